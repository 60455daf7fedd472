"""Tests of trioflow.datasets; a folder called datasets would shadow the package that transformers looks for."""
