"""Builders of networks: links from a few numbers, or from a file, instead of a list."""
