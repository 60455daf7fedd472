"""How many random examples a test draws.

``TRIOFLOW_FUZZ`` is the share of the full number: a quarter where nothing is said, all in
``.ci/run``, more for whoever hunts.
"""

import os

SHARE = float(os.environ.get("TRIOFLOW_FUZZ", "0.25"))
USUAL = 100
"""Examples of a test that does not say how many."""


def count_examples(full: int = USUAL) -> int:
    """Return the examples to draw where all of them are this many."""
    return max(1, round(full * SHARE))
