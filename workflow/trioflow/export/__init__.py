"""Traces, task graphs and timelines in other tools' formats."""
