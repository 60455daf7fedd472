"""Sharded data parallelism: the generated graph's collectives are those of the real run.

Number, order, kind, bytes and group of ``fully_shard`` (FSDP2), also in the stages of a pipeline,
``ZeroRedundancyOptimizer``, a distributed optimizer beside tensor and pipeline parallelism, and of
accumulated micro-steps, on gloo.
"""

from dataclasses import replace

import pytest
from captured import BATCH, CNN, TRANSFORMER
from test_messages import Same, run_plans
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.tables import records

torch = pytest.importorskip("torch", reason="the real run needs torch (extra [capture])")

SUM = {"accumulate": 2}
ONE_BLOCK = [["embedding", "blocks.0"], ["blocks.1", "head"]]
SMALL = {"first_bucket_bytes": 2**14, "bucket_bytes": 2**14}
RUNS = {
    "cnn-2": (
        CNN,
        [
            named_plan("fsdp", 2),
            named_plan("zero1", 2),
            make_plan(data=2, **SUM),
            replace(make_plan(data=2, **SUM, gradient_sync="micro-batch"), plan="ddp-each"),
            replace(make_plan(2, sharding="zero1", **SUM, gradient_sync="micro-batch"), plan="zero1-each"),
        ],
    ),
    "transformer-2": (
        TRANSFORMER,
        [
            named_plan("fsdp", 2),
            named_plan("zero2", 2),
            replace(make_plan(data=2, sharding="fsdp", **SUM), plan="fsdp-sum"),
            replace(make_plan(2, sharding="fsdp", **SUM, gradient_sync="step"), plan="fsdp-no-sync"),
            # ZeRO-2 in buckets, of each micro-step
            replace(make_plan(2, sharding="partitioned", **SUM), plan="partitioned", **SMALL),
        ],
    ),
    # Three ranks: rows that do not divide are padded, and the optimizer's parts differ.
    "transformer-3": (TRANSFORMER, [named_plan("fsdp", 3), named_plan("zero1", 3)]),
    "transformer-4": (
        TRANSFORMER,
        [
            make_plan(data=4, sharding="hsdp", shard=2),
            replace(make_plan(data=4, sharding="zero1", shard=2), plan="zero1-groups"),
            replace(make_plan(data=4, sharding="distributed", shard=2), plan="groups", **SMALL),
            replace(make_plan(2, 2, sharding="zero1"), plan="zero1-tensor"),
            make_plan(data=2, tensor=2, sharding="fsdp"),
        ],
    ),
    "transformer-pipeline": (
        TRANSFORMER,
        [
            *(
                replace(make_plan(2, 1, 2, name, 4, sharding=sharding), plan=f"{sharding}-{name}")
                for sharding in ("fsdp", "zero2")
                for name in ("gpipe", "1f1b")
            )
        ],
    ),
    # Small buckets, so that there are several.
    "transformer-distributed": (TRANSFORMER, [replace(make_plan(2, 2, sharding="distributed"), **SMALL)]),
    "transformer-staged": (
        TRANSFORMER,
        [
            replace(make_plan(2, 1, 2, name, 4, sharding="distributed"), plan=f"distributed-{name}", **SMALL)
            for name in ("gpipe", "1f1b")
        ],
    ),
    # A mesh of three dimensions: groups of shards, their replicas, and shards of layers.
    "transformer-8": (TRANSFORMER, [make_plan(data=4, tensor=2, sharding="hsdp", shard=2)]),
}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What the ranks of a run recorded; each run takes place once."""
    known = {}

    def find(name, stages):
        if name not in known:
            row, plans = RUNS[name]
            sized = [(plan, BATCH * plan.data) for plan in plans]
            known[name] = run_plans(row, sized, stages, tmp_path_factory.mktemp(name), groups=True)
        return known[name]

    return find


def drop_messages(recorded):
    """Leave out what goes between stages, which ``test_messages`` compares."""
    return [entry for entry in recorded if not entry[0].startswith(("send", "recv"))]


LARGE = ("transformer-4", "transformer-pipeline", "transformer-8")
"""Runs of the slow tier: in the fast one each way to share stands once."""


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=pytest.mark.slow if name in LARGE else ())
        for name, (_, plans) in RUNS.items()
        for plan in plans
    ],
    ids=lambda value: getattr(value, "plan", value),
)
def test_collectives_are_those_of_the_real_run(name, plan, real, request, compare):
    trace = request.getfixturevalue("cnn_trace" if name.startswith("cnn") else "transformer_trace")
    stages = ONE_BLOCK if plan.pipeline > 1 else None
    graph = extrapolate(trace, plan, Same(), batch=BATCH * plan.data, stages=stages)
    found = real(name, graph.metadata.stages)
    about = {"plan": plan, "batch": BATCH * plan.data, "row": RUNS[name][0], "ranks": plan.ranks}
    for rank in range(plan.ranks):
        tasks = records(graph.tasks[graph.tasks["rank"] == rank])
        asked = [task for task in tasks if task["kind"] == "collective"]
        assert asked, "the graph asks for nothing"
        sizes = [[t["name"], t["message_bytes"]] for t in asked]
        recorded = found[rank][plan.plan]
        messages = drop_messages(recorded["messages"])
        compare("collectives and bytes", sizes, messages, **about)
        told = [[t["name"], [int(r) for r in t["group"].split(",")]] for t in asked]
        groups = drop_messages(recorded["groups"])
        if plan.tensor > 1:  # DTensor asks for its all-reduces below the dispatcher
            first = rank - rank % plan.tensor
            sums = ["all_reduce", list(range(first, first + plan.tensor))]
            told, groups = ([entry for entry in side if entry != sums] for side in (told, groups))
        compare("collectives and groups", told, groups, **about)
