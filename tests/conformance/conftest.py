"""What conformance tests compare is noted, and must stand in the table that ships."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from trioflow.parallel.plan import describe_plan
from trioflow.report.build import KEY, read_conformance, sum_up_comparisons

RECORDING = "TRIOFLOW_RECORD_CONFORMANCE"
"""Set by ``docs/record_conformance.py``, which writes the table."""
GLOO = "ranks over gloo"


class Comparison:
    """Compares sequences with PyTorch's and notes how long they were."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def __call__(
        self,
        what: str,
        ours: Any,
        theirs: Any,
        *,
        plan: Any,
        ranks: int | str,
        batch: int = 0,
        row: dict[str, Any] | None = None,
        against: str = GLOO,
    ) -> None:
        """Assert that two sequences are equal.

        ``plan`` is a plan of a ``batch`` or a text; ``row`` the workload, none
        for tables that know no model; ``against`` what PyTorch did it.
        """
        text = plan if isinstance(plan, str) else describe_plan(plan, batch)
        self.found.append(
            {
                "compared": what,
                "plan": text,
                "model": row["model"] if row else "any",
                "ranks": str(ranks),
                "against": against,
                "count": len(theirs),
                "equal": bool(ours == theirs),
            }
        )
        assert ours == theirs


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Iterator[Comparison]:
    """Compares with the real PyTorch; what it compared must be in the shipped table."""
    import torch

    comparison = Comparison()
    yield comparison
    request.node.user_properties.append(("conformance", comparison.found))
    if os.environ.get(RECORDING) or not all(one["equal"] for one in comparison.found):
        return
    shipped = read_conformance()
    if set(shipped["torch"]) != {str(torch.__version__)}:
        return
    stands = {tuple(entry[name] for name in KEY): entry for entry in shipped.to_dict("records")}
    for one in sum_up_comparisons(comparison.found):
        entry = stands.get(tuple(one[name] for name in KEY))
        assert entry is not None and (entry["count"], entry["equal"]) == (one["count"], "yes"), (
            f"the shipped table does not say {one}; run docs/record_conformance.py"
        )
