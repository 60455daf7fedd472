"""fp16: the scaler's operators are in the step, and sharded ranks agree on overflows as PyTorch's do."""

import pytest
from captured import BATCH, TRANSFORMER, capture_raw
from test_messages import Same, run_plans
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.parallel.programs.staged import FINDS_OVERFLOW
from trioflow.parallel.programs.units import FLAG_BYTES
from trioflow.tables import records
from trioflow.trace.profile.merge import merge_trace

torch = pytest.importorskip("torch", reason="the real run needs torch (extra [capture])")

HALF = {**TRANSFORMER, "workload": "test-transformer-fp16", "precision": "fp16"}
PLANS = [named_plan("ddp", 2), named_plan("fsdp", 2)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return merge_trace(capture_raw(HALF, tmp_path_factory.mktemp("fp16")))


def test_the_step_unscales_checks_and_updates_the_scale(trace):
    updates = trace.operators[trace.operators["phase"] == "optimizer"]["name"].tolist()
    assert updates.count(FINDS_OVERFLOW) == 1
    assert "aten::_amp_update_scale_" in updates
    assert updates.index(FINDS_OVERFLOW) < updates.index("aten::addcdiv_")


def test_collectives_are_those_of_the_real_run(trace, tmp_path, compare):
    sized = [(plan, BATCH * plan.data) for plan in PLANS]
    real = run_plans(HALF, sized, None, tmp_path)
    flags = {}
    for plan, batch in sized:
        graph = extrapolate(trace, plan, Same(), batch=batch)
        for rank in range(plan.ranks):
            tasks = records(graph.tasks[graph.tasks["rank"] == rank])
            asked = [[t["name"], t["message_bytes"]] for t in tasks if t["kind"] == "collective"]
            found = real[rank][plan.plan]["messages"]
            compare("messages", asked, found, plan=f"{plan.plan} in fp16", row=HALF, ranks=plan.ranks)
            flags[plan.plan] = asked.count(["all_reduce", FLAG_BYTES])
    assert flags == {"ddp": 0, "fsdp": 1}
