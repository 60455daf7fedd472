"""DistSim's search for a plan, with what it does not publish assumed: order and ratio.

GPT 145B from shapes: the model is whole, its steps are labelled, and the schedule follows the batch.
"""

import csv
from pathlib import Path

import pandas as pd
import pytest
import trioflow
from trioflow.hardware.platform import load_platform
from trioflow.trace.store import load_trace
from trioflow_evaluation.distsim.recorded import bubble_throughput, compare_throughput
from trioflow_evaluation.studies.distsim import (
    BEST,
    BLOCKS,
    MEASURED_RATIO,
    PIPELINE,
    PLATFORM,
    PREDICTED_RATIO,
    TENSOR,
    WORKLOAD,
    WORST,
    build_shapes,
    choose_schedule,
    draw_distsim_search,
    list_degrees,
    name_plan,
    predict_distsim,
    predict_throughput,
)


def test_the_plans_are_the_fifteen_of_sixteen_ranks() -> None:
    found = list_degrees()
    assert len(set(found)) == 15 and all(t * p * d == 16 for t, p, d in found)
    assert BEST[:3] in found and WORST[:3] in found


def test_what_is_published_is_consistent() -> None:
    """The ratios are those of unrounded times: the rounded ones allow them."""
    assert BEST.predicted_per_s / WORST.predicted_per_s == pytest.approx(PREDICTED_RATIO, rel=0.005)
    assert BEST.measured_per_s / WORST.measured_per_s == pytest.approx(MEASURED_RATIO, rel=0.005)


def test_the_machine_says_what_was_assumed() -> None:
    machine = load_platform(PLATFORM, 16)
    assert (machine.ranks, machine.ranks_per_node, machine.device.name) == (16, 4, "NVIDIA A10")
    assert all("DistSim" in machine.sources[key] for key in machine.sources if "nics" in key)
    assert len(machine.unmeasured) >= 8


def make_rows() -> pd.DataFrame:
    rows = [
        {
            "tensor": t,
            "pipeline": p,
            "data": d,
            "communication_scale": scale,
            "step_time_s": (1 + t + scale * t / p),
            "low_s": 0.9 * t,
            "high_s": 9.0 * t,
        }
        for scale in (1.0, 2.0)
        for t, p, d in list_degrees()
    ]
    return pd.DataFrame(rows)


def test_the_figure_shows_every_plan_at_every_speed() -> None:
    axes = draw_distsim_search(make_rows()).axes[0]
    dots = [float(x) for one in axes.collections for x, _ in one.get_offsets()]
    assert {BEST.measured_per_s, WORST.measured_per_s} <= set(dots) and len(dots) >= 2 * 15 + 2
    ticks = [tick.get_text() for tick in axes.get_yticklabels()]
    assert len(ticks) == 15 and ticks[0] == "1M16P1D"


@pytest.mark.slow
def test_with_a_network_half_as_fast_the_last_is_distsims_and_its_best_is_among_the_first() -> None:
    rows = predict_distsim((2.0,)).sort_values("step_time_s")
    assert rows["status"].tolist() == ["ok"] * 15
    names = [name_plan(row) for _, row in rows.iterrows()]
    assert names[-1] == "16M1P1D" and "1M8P2D" in names[:3]
    assert rows["step_time_s"].max() / rows["step_time_s"].min() > 3


FACTS = Path(trioflow.__file__).parent / "data/model_facts.tsv"


def test_the_model_has_as_many_parameters_as_its_paper_says() -> None:
    with FACTS.open() as stream:
        rows = {row["workload"]: row for row in csv.DictReader(stream, delimiter="\t")}
    trace = build_shapes()
    elements = sum(g["size_bytes"] for g in trace.facts.gradients) / 4  # weights and gradients stay in fp32
    assert elements == pytest.approx(float(rows[WORKLOAD]["parameters"]), rel=0.01)
    blocks = load_trace(BLOCKS)
    assert len(blocks.operators) < len(trace.operators) / 10
    assert (trace.operators["device_ns"] == 0).all(), "nothing was timed"


@pytest.mark.parametrize(("count", "name"), [(1, "gpipe"), (15, "gpipe"), (16, "1f1b")])
def test_pytorchs_1f1b_needs_as_many_micro_batches_as_stages(count: int, name: str) -> None:
    assert choose_schedule(count, 16) == name


def test_steps_are_extrapolated_and_close_to_the_bubble() -> None:
    """All-reduces inside a node are measured; sends between nodes are not, and take little time."""
    rows = predict_throughput((1, 4))
    assert rows["status"].tolist() == ["ok", "ok"] and set(rows["confidence"]) == {"extrapolated"}
    assert (rows["tensor"] * rows["pipeline"] * rows["data"] == 128).all()
    assert (TENSOR, PIPELINE) == (8, 16)
    found = compare_throughput(rows)
    assert found["simulated"].iloc[1] == pytest.approx(bubble_throughput(4, 16), rel=0.15)
    assert isinstance(found, pd.DataFrame) and found["deviation"].iloc[0] == 0
