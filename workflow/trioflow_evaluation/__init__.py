"""Evaluation: judges on others' data, counterparts of papers' figures, studies, and the pages of all these.

It uses trioflow as any other package does, and nothing of trioflow imports it.
"""

from pathlib import Path

DATA = Path(__file__).parent / "data"
"""What modules here have below ``data``, at their own places."""
