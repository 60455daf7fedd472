"""Traces from other sources: each module reads one format."""
