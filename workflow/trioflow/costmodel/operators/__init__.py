"""Cost models of operators."""
