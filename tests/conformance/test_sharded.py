"""Sharded data parallelism: the generated graph's collectives are those of the real run.

Number, order, kind, bytes and group of ``fully_shard`` (FSDP2) and
``ZeroRedundancyOptimizer``, and of accumulated micro-steps, on gloo.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from captured import BATCH, CNN, TRANSFORMER
from test_messages import Same, run_plans
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.tables import records

torch = pytest.importorskip("torch", reason="the real run needs torch (extra [capture])")

SUM = {"accumulate": 2}
RUNS = {
    "cnn-2": (CNN, [
        named_plan("fsdp", 2), named_plan("zero1", 2), make_plan(data=2, **SUM),
    ]),
    "transformer-2": (TRANSFORMER, [
        named_plan("fsdp", 2), named_plan("zero2", 2),
        replace(make_plan(data=2, sharding="fsdp", **SUM), plan="fsdp-sum"),
    ]),
    # Three ranks: rows that do not divide are padded, and the optimizer's parts differ.
    "transformer-3": (TRANSFORMER, [named_plan("fsdp", 3), named_plan("zero1", 3)]),
    "transformer-4": (TRANSFORMER, [
        make_plan(data=4, sharding="hsdp", shard=2), make_plan(data=2, tensor=2, sharding="fsdp"),
    ]),
}  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What the ranks of a run recorded; each run takes place once."""
    known = {}

    def find(name):
        if name not in known:
            row, plans = RUNS[name]
            sized = [(plan, BATCH * plan.data) for plan in plans]
            known[name] = run_plans(row, sized, None, tmp_path_factory.mktemp(name), groups=True)
        return known[name]

    return find


@pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name, (_, plans) in RUNS.items() for plan in plans],
    ids=lambda value: getattr(value, "plan", value),
)  # fmt: skip
def test_collectives_are_those_of_the_real_run(name, plan, real, request, compare):
    trace = request.getfixturevalue("cnn_trace" if name.startswith("cnn") else "transformer_trace")
    graph = extrapolate(trace, plan, Same(), batch=BATCH * plan.data)
    found = real(name)
    about = {"plan": plan, "batch": BATCH * plan.data, "row": RUNS[name][0], "ranks": plan.ranks}
    for rank in range(plan.ranks):
        tasks = records(graph.tasks[graph.tasks["rank"] == rank])
        asked = [task for task in tasks if task["kind"] == "collective"]
        assert asked, "the graph asks for nothing"
        sizes = [[t["name"], t["message_bytes"]] for t in asked]
        compare("collectives and bytes", sizes, found[rank][plan.plan]["messages"], **about)
        told = [[t["name"], [int(r) for r in t["group"].split(",")]] for t in asked]
        if plan.tensor > 1:  # tensor parallelism asks for its all-reduces below the dispatcher
            told = [entry for entry in told if entry[0] != "all_reduce"]
        compare("collectives and groups", told, found[rank][plan.plan]["groups"], **about)
