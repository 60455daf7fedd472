"""Cost models of collectives."""
