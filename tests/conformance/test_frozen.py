"""Frozen parameters: gradients, collectives and peaks are those of real steps of PyTorch.

Below the first trainable block nothing has a gradient; between trainable ones a frozen block has its input's alone.
"""

from dataclasses import replace

import pytest
from captured import BATCH, TRANSFORMER, with_steady_times
from test_messages import Same, run_plans
from test_peak_memory import LIMIT
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.tables import records

torch = pytest.importorskip("torch", reason="the real run needs torch (extra [capture])")

FROZEN = {
    **TRANSFORMER,
    "workload": "test-frozen",
    "layers": 5,
    "freeze": "embedding,blocks.0,blocks.1,blocks.3,blocks.4.norm?",
}
LORA = {**TRANSFORMER, "workload": "test-lora", "lora": 4, "lora_targets": "qkv,projection,up,down"}
SUM = replace(make_plan(data=2, sharding="fsdp", accumulate=2), plan="fsdp-sum")
RUNS = {
    "frozen": (FROZEN, [named_plan(name, 2) for name in ("ddp", "fsdp", "zero1", "zero2")] + [SUM]),
    "lora": (LORA, [named_plan(name, 2) for name in ("ddp", "fsdp", "zero1", "tp-layers")]),
}
WORDS = {"frozen": "blocks frozen", "lora": "LoRA"}


@pytest.fixture(scope="module")
def traces():
    from trioflow.trace.capture.meta import capture_meta

    found = {}
    for name, (row, _) in RUNS.items():
        steady = with_steady_times(capture_meta(row, BATCH, target="cpu"))
        found[name] = replace(steady, facts=replace(steady.facts, device="cpu"))
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What the ranks of a run recorded; each run takes place once."""
    known = {}

    def find(name):
        if name not in known:
            row, plans = RUNS[name]
            sized = [(plan, BATCH * plan.data) for plan in plans]
            known[name] = run_plans(row, sized, None, tmp_path_factory.mktemp(name))
        return known[name]

    return find


@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, plan) for name, (_, plans) in RUNS.items() for plan in plans],
    ids=lambda value: getattr(value, "plan", value),
)
def test_collectives_are_those_of_the_real_run(name, plan, traces, real, compare):
    graph = extrapolate(traces[name], plan, Same(), batch=BATCH * plan.data)
    row = {"model": f"{TRANSFORMER['model']}, {WORDS[name]}"}
    about = {"plan": plan, "batch": BATCH * plan.data, "row": row, "ranks": plan.ranks}
    for rank in range(plan.ranks):
        tasks = records(graph.tasks[graph.tasks["rank"] == rank])
        sizes = [[t["name"], t["message_bytes"]] for t in tasks if t["kind"] == "collective"]
        assert sizes, "the graph asks for nothing"
        compare("collectives and bytes", sizes, real(name)[rank][plan.plan]["messages"], **about)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("frozen", make_plan()),
        ("frozen", named_plan("fsdp", 2)),
        ("frozen", named_plan("ddp", 2)),
        ("lora", make_plan()),
        ("lora", named_plan("fsdp", 2)),
        ("lora", named_plan("tp-layers", 2)),
    ],
    ids=lambda value: getattr(value, "plan", value),
)
def test_predicted_peaks_are_those_of_real_steps(name, plan, traces):
    from oracles.peak_memory import compare_peaks, make_case

    case = make_case(traces[name], plan, Same())
    buckets = case.memory[0]["categories"].get("bucket", 0)  # gloo's threads keep one for a while
    for row in compare_peaks([case]).itertuples():
        assert row.predicted_bytes <= row.measured_bytes * (1 + LIMIT), row
        assert row.predicted_bytes + buckets >= row.measured_bytes * (1 - LIMIT), row
