"""The ``trioflow`` command: the library's answers without a workflow."""

from trioflow.cli.main import main

__all__ = ["main"]
