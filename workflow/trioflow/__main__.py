"""``python -m trioflow`` is the ``trioflow`` command."""

from trioflow.cli import run

if __name__ == "__main__":
    run()
