"""Collective algorithms as tables of messages: who sends what to whom, and after what."""
