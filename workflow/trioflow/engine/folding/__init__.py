"""Ranks that do the same are simulated once: how they are found, and why that is exact."""
