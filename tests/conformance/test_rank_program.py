"""The program of one rank under PyTorch's fake process group is that of the generated plan.

Number, order, kind, bytes and group of the messages of every rank; generated plans are compared with
real ranks over gloo in ``test_messages`` and ``test_sharded``.
"""

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
from captured import BATCH, CNN, TRANSFORMER
from test_messages import Same
from trioflow.base.errors import PlanError
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.sharded.as_traced import build_traced_graph
from trioflow.trace.workloads.catalog import name_user_model

torch = pytest.importorskip("torch", reason="a captured rank needs torch (extra [capture])")

STAGES = [["embedding", "blocks.0"], ["blocks.1", "head"]]
SMALL = {"first_bucket_bytes": 2**16, "bucket_bytes": 2**16}
PLANS = {
    "ddp": (CNN, replace(make_plan(data=4), bucket_bytes=2**20, first_bucket_bytes=2**20)),
    "ddp-small": (TRANSFORMER, replace(make_plan(data=4), **SMALL)),
    "fsdp": (TRANSFORMER, named_plan("fsdp", 4)),
    "hsdp": (TRANSFORMER, make_plan(data=4, sharding="hsdp", shard=2)),
    "tensor": (TRANSFORMER, make_plan(tensor=4)),
    "fsdp-tensor": (TRANSFORMER, make_plan(data=2, tensor=2, sharding="fsdp")),
    "gpipe": (TRANSFORMER, make_plan(pipeline=2, micro_batches=2)),
}


def make_step(name: str) -> Callable[[], None]:
    """Return one rank's step of a plan, built with PyTorch's own parallel modules."""
    from trioflow.measure.worker import make_parallel_step
    from trioflow.trace.workloads.build import build_workload

    row, plan = PLANS[name]
    if plan.pipeline > 1:
        return make_staged_step(row, plan)
    return make_parallel_step(build_workload(row), asdict(plan), BATCH * plan.data, None, torch.device("cpu"), 0)


def make_staged_step(row, plan) -> Callable[[], None]:
    """Return a stage's step; shapes are given, as no other rank can tell them."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from trioflow.trace.workloads.build import build_workload

    workload, rank = build_workload(row), dist.get_rank()
    inputs, targets = workload.make_batch(BATCH, 0)
    hidden = torch.randn(BATCH // plan.micro_batches, row["sequence"], row["hidden"], requires_grad=True)
    module = workload.make_stage(STAGES[rank])
    first = inputs[: BATCH // plan.micro_batches] if rank == 0 else hidden
    result = hidden if rank == 0 else module(hidden).detach()
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), input_args=first, output_args=result)
    schedule = ScheduleGPipe(stage, plan.micro_batches, loss_fn=workload.loss)
    optimizer = workload.make_optimizer(module.parameters())

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*([inputs] if rank == 0 else []), target=targets, losses=[])
        optimizer.step()

    return step


for _name in PLANS:
    globals()[_name.replace("-", "_")] = lambda name=_name: make_step(name)


def capture(name: str, rank: int = 0, device: str = "cpu"):
    from trioflow.trace.capture.rank_program import capture_rank

    row = asdict(name_user_model(f"{__name__}:{name.replace('-', '_')}", BATCH))
    ranks = PLANS[name][1].ranks
    return capture_rank(row, BATCH, world_size=ranks, rank=rank, device=device)


def list_messages(graph, rank: int) -> list[tuple]:
    tasks = graph.tasks[(graph.tasks["rank"] == rank) & graph.tasks["message_bytes"].notna()]
    return [
        (t["name"], int(t["message_bytes"]), str(t["group"]))
        if t["kind"] == "collective"
        else (t["kind"], int(t["message_bytes"]), int(t["peer"]))
        for t in tasks.to_dict("records")
    ]


@pytest.mark.parametrize("name", [name for name in PLANS if name != "gpipe"])
def test_messages_are_those_of_the_generated_plan(name, request):
    row, plan = PLANS[name]
    trace = request.getfixturevalue("cnn_trace" if row is CNN else "transformer_trace")
    generated = extrapolate(trace, plan, Same(), batch=BATCH * plan.data)
    traced = build_traced_graph([capture(name)])
    for rank in range(plan.ranks):
        assert list_messages(traced, rank) == list_messages(generated, rank) != []


def test_a_rank_without_data_sends_the_same():
    kept = ("name", "message_bytes", "ranks", "asynchronous")
    with_data, without = (
        [[m[key] for key in kept] for m in capture("hsdp", 3, device).facts.communication] for device in ("cpu", "meta")
    )
    assert with_data == without != []


def test_stages_of_a_pipeline_send_what_the_plan_says(transformer_trace):
    plan = PLANS["gpipe"][1]
    generated = extrapolate(transformer_trace, plan, Same(), batch=BATCH, stages=STAGES)
    first = capture("gpipe", 0)
    traced = build_traced_graph([first, capture("gpipe", 1)])
    for rank in range(2):
        for kind in ("send", "recv"):
            ours, theirs = ([m for m in list_messages(graph, rank) if m[0] == kind] for graph in (traced, generated))
            assert ours == theirs != []
    with pytest.raises(PlanError, match=r"give traces of the ranks 1 as well"):
        build_traced_graph([first])
