"""Traces: capture on the device at hand, raw profiles, and the merged tables."""
