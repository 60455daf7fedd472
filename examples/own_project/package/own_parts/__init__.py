"""Parts of our own for trioflow."""
