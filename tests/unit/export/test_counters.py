"""Curves beside a timeline: what a rank holds, when its device gets there."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from same_model import ProportionalModel
from trioflow.engine.simulate import simulate
from trioflow.export.step_files import count_memory
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.trace.store import load_trace


def make_timeline(*rows: tuple[int, str, float]) -> pd.DataFrame:
    """Return tasks by rank, kind and start."""
    return pd.DataFrame(rows, columns=["rank", "kind", "start_s"])


def read(found: pd.DataFrame, rank: int) -> list[tuple[float, float]]:
    own = found[found["rank"] == rank]
    assert set(own["counter"]) <= {"memory"} and set(own["unit"]) <= {"bytes"}
    return list(zip(own["time_s"], own["value"], strict=True))


def test_a_change_is_shown_when_the_device_begins_its_task() -> None:
    timeline = make_timeline(
        (1, "compute", 0.0),
        (0, "compute", 1.0),
        (0, "collective", 9.0),
        (0, "compute", 3.0),
        (1, "compute", 2.0),
    )
    curves = [
        {"ranks": [0], "places": [0, 1, 2], "bytes": [10, 20, 5]},
        {"ranks": [1], "places": [0, 1, 7], "bytes": [1, 2, 3]},
    ]
    found = count_memory(curves, timeline)
    # A collective that ends late does not hold back what computation does meanwhile.
    assert read(found, 0) == [(1.0, 10.0), (1.0, 20.0), (3.0, 5.0)]
    assert read(found, 1) == [(0.0, 1.0), (2.0, 2.0)], "there is no eighth task"
    assert count_memory([], timeline).empty


def test_long_curves_keep_the_most_of_each_stretch_and_the_end() -> None:
    held = np.random.default_rng(0).integers(1, 10**6, 997)
    timeline = make_timeline(*((0, "compute", float(n)) for n in range(997)))
    curve = {"ranks": [0], "places": list(range(997)), "bytes": held.tolist()}
    found = count_memory([curve], timeline, most_points=50)
    assert len(found) == 50
    assert found["value"].max() == held.max() and found["value"].iloc[-1] == held[-1]
    times_s = found["time_s"].tolist()
    for begin, end, value in zip(times_s, [*times_s[1:], 997.0], found["value"], strict=True):
        assert value == held[int(begin) : int(end)].max()


@pytest.mark.parametrize(
    "degrees", [{"data": 2}, {"pipeline": 2, "schedule": "1f1b"}, {"data": 2, "sharding": "fsdp"}]
)
def test_the_top_of_each_curve_is_the_peak_of_its_rank(degrees: dict[str, Any]) -> None:
    graph = extrapolate(load_trace("gpt2-tiny-b8"), make_plan(**degrees), ProportionalModel())
    result = simulate(graph, load_platform("h100x8-nvlink", 2))
    found = count_memory(graph.metadata.memory_curves, result.timeline)
    for entry in graph.metadata.memory:
        assert "curve" not in entry
        for rank in entry["ranks"]:
            own = found[found["rank"] == rank]
            assert own["value"].max() == pytest.approx(
                entry["peak_bytes"], abs=len(entry["categories"])
            )
            assert own["time_s"].is_monotonic_increasing
            assert own["time_s"].max() <= result.summary.step_time_s
