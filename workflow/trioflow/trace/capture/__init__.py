"""Observing one step of a model on this machine, or on no device at all."""
