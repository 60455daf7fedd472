"""The generated graph's messages are the real run's: number, order, kind and bytes."""

from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
from captured import BATCH, BERT, CNN, TRANSFORMER
from rank_runs import run_ranks
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan

torch = pytest.importorskip("torch", reason="the real run needs torch (extra [capture])")

# Small limits, so that small models fill several buckets.
DDP = replace(make_plan(data=2), plan="ddp2", first_bucket_bytes=2**20, bucket_bytes=25 * 2**20)
TP = replace(make_plan(tensor=2), plan="tp2")
GPIPE = replace(make_plan(pipeline=2, micro_batches=2), plan="gpipe2")
CASES = [
    ("cnn_trace", CNN, DDP),
    ("transformer_trace", TRANSFORMER, DDP),
    ("bert_trace", BERT, DDP),
    ("transformer_trace", TRANSFORMER, TP),
    ("bert_trace", BERT, TP),
    ("cnn_trace", CNN, GPIPE),
    ("transformer_trace", TRANSFORMER, GPIPE),
    ("bert_trace", BERT, GPIPE),
]


class Same:
    """A model of operator cost that leaves every time as recorded."""

    def predict(self, operators):
        zero = [0.0] * len(operators)
        return pd.DataFrame(
            {"time_s": zero, "low_s": zero, "high_s": zero, "extrapolated": False}, index=operators.index
        )

    def rescale(self, operators, target):
        time_s = operators["device_ns"].astype(float) / 1e9
        return pd.DataFrame({"time_s": time_s, "low_s": time_s, "high_s": time_s, "extrapolated": False})

    def step_interval(self, kind="rescale", distance=None):
        return (1.0, 1.0)


def run_plans(row, plans, stages, folder: Path, groups: bool = False) -> list[dict]:
    """Run plans for real, one after the other, and return what each rank recorded of each by name.

    ``plans`` are pairs of a plan and its batch; all take the same number of ranks.
    """
    job = {
        "row": row,
        "plans": [(asdict(plan), batch) for plan, batch in plans],
        "stages": stages,
        "ranks": plans[0][0].ranks,
        "groups": groups,
    }
    return run_ranks("real_rank.py", job, folder)


@pytest.fixture(scope="module")
def real(tmp_path_factory, request):
    """Each rank's messages of a plan in order; the plans of a workload run one after the other."""
    known = {}

    def find(name, row, plan):
        if name not in known:
            plans = [(one, BATCH * one.data) for trace, _, one in CASES if trace == name]
            stages = extrapolate(request.getfixturevalue(name), GPIPE, Same(), batch=BATCH).metadata.stages
            known[name] = run_plans(row, plans, stages, tmp_path_factory.mktemp(name))
        return [[tuple(m) for m in rank[plan.plan]["messages"]] for rank in known[name]]

    return find


@pytest.mark.parametrize(("trace", "row", "plan"), CASES, ids=lambda value: getattr(value, "plan", ""))
def test_messages_are_those_of_the_real_run(trace, row, plan, real, request, compare):
    batch = BATCH * plan.data
    graph = extrapolate(request.getfixturevalue(trace), plan, Same(), batch=batch)
    found = real(trace, row, plan)
    for rank in range(plan.ranks):
        tasks = graph.tasks[graph.tasks["rank"] == rank]
        messages = tasks[tasks["message_bytes"].notna()]
        name = messages["name"].where(messages["kind"] == "collective", messages["kind"])
        generated = list(zip(name, messages["message_bytes"].astype(int), strict=True))
        assert generated, "the graph sends nothing"
        if plan.pipeline > 1:  # sends are not waited for, so only each direction has an order
            for kind in ("send", "recv"):
                ours, theirs = ([m for m in ms if m[0] == kind] for ms in (generated, found[rank]))
                compare("messages", ours, theirs, plan=plan, batch=batch, row=row, ranks=plan.ranks)
            assert len(generated) == len(found[rank])
        else:
            told = {"plan": plan, "batch": batch, "row": row, "ranks": plan.ranks}
            compare("messages", generated, found[rank], **told)
