"""``python -m trioflow`` is the ``trioflow`` command."""

from trioflow.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
