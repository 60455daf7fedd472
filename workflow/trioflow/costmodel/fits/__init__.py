"""Fits of the models that predictions read; no prediction imports them."""
