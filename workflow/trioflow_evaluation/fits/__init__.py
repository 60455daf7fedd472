"""Fits of the cost models that ship, from public measurements."""
