"""Parameters without a gradient are parameters: sharded, cut and placed as trained ones, without gradient and state."""

from dataclasses import replace

import pytest
from captured import BATCH, TRANSFORMER, capture_raw, with_steady_times
from same_model import ProportionalModel
from trioflow.base.errors import InputError
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import NAMED, make_plan, named_plan
from trioflow.parallel.splits.pipeline import list_parameters

pytest.importorskip("torch", reason="capture needs torch (extra [capture])")

MODEL = ProportionalModel()
PLAIN = {**TRANSFORMER, "layers": 5}
FREEZE = {"freeze": "embedding,blocks.0,blocks.1,blocks.3,blocks.4.norm1.weight"}
OTHERS = [
    make_plan(tensor=2, sequence_parallel=True, vocabulary_parallel=True),
    make_plan(data=4, sharding="hsdp", shard=2),
    make_plan(data=2, tensor=2, pipeline=2, sharding="fsdp"),
    make_plan(data=2, sharding="fsdp", accumulate=2, no_sync=True),
    make_plan(context=2),
    make_plan(recompute="full"),
    make_plan(pipeline=5, micro_batches=2),
    make_plan(pipeline=5, sharding="fsdp", data=2, micro_batches=2),
]


@pytest.fixture(scope="module")
def traces():
    from trioflow.trace.capture.meta import capture_meta

    return [with_steady_times(capture_meta(row, BATCH)) for row in (PLAIN, PLAIN | FREEZE)]


def peaks_of(trace, plan):
    graph = extrapolate(trace, plan, MODEL, batch=4 * BATCH * plan.data, stages="count")
    return {rank: one["categories"] for one in graph.metadata.memory for rank in one["ranks"]}


@pytest.mark.parametrize(
    "plan",
    [*(named_plan(n, 1 if n == "single" else 2) for n in NAMED), *OTHERS],
    ids=lambda plan: plan.plan,
)
def test_frozen_parameters_lie_where_trained_ones_do(plan, traces):
    trained, frozen = (peaks_of(trace, plan) for trace in traces)
    for rank, held in trained.items():
        assert frozen[rank]["parameter"] == held["parameter"]
        for category in ("input", "gradient", "optimizer_state"):
            assert frozen[rank].get(category, 0) <= held.get(category, 0)
    totals = [
        sum(held.get("optimizer_state", 0) for held in peaks.values())
        for peaks in (trained, frozen)
    ]
    assert totals[1] < 0.6 * totals[0]


def test_a_frozen_layer_has_its_input_s_gradient_alone(traces):
    products = [
        trace.operators.query("phase == 'backward' and flop > 0")["module"].value_counts()
        for trace in traces
    ]
    layer = "blocks.{}.feed_forward.up".format
    assert [[int(p.get(layer(i), 0)) for i in (0, 2, 3)] for p in products] == [
        [2, 2, 2],
        [0, 2, 1],
    ]


def test_a_capture_and_its_names_say_what_is_frozen(traces, tmp_path):
    from trioflow.trace.profile.merge import merge_trace

    real = merge_trace(capture_raw(PLAIN | FREEZE, tmp_path))
    for trace in (traces[1], real):
        found = {p.name: p for p in list_parameters(trace)}
        assert all(p.storage_id >= 0 and p.frozen != p.trained for p in found.values())
        assert [found[f"blocks.4.norm1.{part}"].frozen for part in ("weight", "bias")] == [
            True,
            False,
        ]
        assert not any("gradient" in warning for warning in trace.facts.warnings)
        assert len({p.storage_id for p in found.values()}) == len(found)


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        (make_plan(), [1]),
        (named_plan("fsdp", 2), [0.5, 0.5]),
        (named_plan("ddp", 2), [1, 1]),
        (make_plan(pipeline=5, micro_batches=2), [0, 1, 0, 0, 0]),
    ],
    ids=lambda value: getattr(value, "plan", ""),
)
def test_parameters_that_no_operator_reads_are_held(plan, shares, traces):
    trace, size = traces[0], 64 * 32 * 4
    unread = {"name": "blocks.1.spare", "shape": [64, 32], "elem_bytes": 4, "frozen": False}
    facts = replace(trace.facts, parameters=[*trace.facts.parameters, unread])
    before, after = (peaks_of(t, plan) for t in (trace, replace(trace, facts=facts)))
    more = [after[rank]["parameter"] - before[rank]["parameter"] for rank in range(plan.ranks)]
    assert more == [round(size * share) for share in shares]


def test_what_fits_nothing_or_freezes_all_is_refused():
    from trioflow.trace.workloads.build import build_workload

    for word, message in (("block.0", "fits no parameter"), ("*", "every parameter is frozen")):
        with pytest.raises(InputError, match=message):
            build_workload({**TRANSFORMER, "freeze": word})
