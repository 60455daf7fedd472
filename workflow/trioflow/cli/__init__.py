"""The ``trioflow`` command: the library's answers without a workflow."""

from trioflow.cli.main import main, run

__all__ = ["main", "run"]
