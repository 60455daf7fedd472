"""GPT 145B from shapes: the model is whole, its steps are labelled, and the schedule follows the batch."""

import csv
from pathlib import Path

import pandas as pd
import pytest
import trioflow
from trioflow.trace.store import load_trace
from trioflow_evaluation.distsim.recorded import bubble_throughput, compare_throughput
from trioflow_evaluation.studies.distsim import (
    BLOCKS,
    PIPELINE,
    TENSOR,
    WORKLOAD,
    build_shapes,
    choose_schedule,
    predict_throughput,
)

FACTS = Path(trioflow.__file__).parent / "data/model_facts.tsv"


def test_the_model_has_as_many_parameters_as_its_paper_says() -> None:
    with FACTS.open() as stream:
        rows = {row["workload"]: row for row in csv.DictReader(stream, delimiter="\t")}
    trace = build_shapes()
    elements = (
        sum(g["size_bytes"] for g in trace.facts.gradients) / 4
    )  # weights and gradients stay in fp32
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
