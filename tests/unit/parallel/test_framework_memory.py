"""What Megatron-LM and nanotron hold of a language model's step, beside what PyTorch alone would."""

from __future__ import annotations

from functools import cache

import pytest
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.prediction.assembly import build_graph, time_operators
from trioflow.sweeps.search_space import Fates, choose_space, enumerate_plans
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.sizes import LanguageModel, LanguageStep

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

WORDY = LanguageModel("wordy", 2, 64, 8, 8, 8, 96, 32768)
"""Its scores are most of what it holds."""
STEP = {"sequence": 64, "batch": 2}
TOKENS = STEP["sequence"] * STEP["batch"]
SCORES = TOKENS * WORDY.vocabulary


def test_tensor_parallel_ranks_of_a_language_model_share_its_vocabulary_unasked():
    trace = make_trace(WORDY, LanguageStep(**STEP))
    times = time_operators(trace, "NVIDIA H100 80GB HBM3")

    def build(plan):
        return build_graph(times, plan, batch=STEP["batch"]).metadata

    for plan in (make_plan(tensor=4), make_plan(tensor=4, pipeline=2, micro_batches=2)):
        assert build(plan).plan.vocabulary_parallel
        assert "vocabulary parallel" in build(plan).plan_text
    assert not build(named_plan("tp-layers", 4)).plan.vocabulary_parallel
    assert not build(make_plan(data=2)).plan.vocabulary_parallel
    found = enumerate_plans(trace, 4, 8, choose_space(trace.facts), Fates())
    assert {(plan.tensor > 1, plan.vocabulary_parallel) for plan in found} == {
        (False, False), (True, True),
    }  # fmt: skip


@cache
def hold(precision, tensor=1):
    """Return what fills rank 0 at its peak."""
    trace = make_trace(WORDY, LanguageStep(**STEP, precision=precision))
    split = tensor > 1
    plan = make_plan(1, tensor, sequence_parallel=split, vocabulary_parallel=split)
    times = time_operators(trace, "NVIDIA H100 80GB HBM3")
    return build_graph(times, plan, batch=STEP["batch"]).metadata.memory[0]["categories"]


@pytest.mark.parametrize(
    ("precision", "bytes_a_score"),
    # In bf16 as they are made and in fp32; in fp32 twice; the probabilities and two gradients in fp32.
    [("megatron-bf16", 2 + 4), ("nanotron-bf16", 4 + 4), ("pure-bf16", 4 + 4 + 4)],
)
@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_a_loss_that_works_in_place_holds_the_scores_that_it_works_in(
    precision, bytes_a_score, tensor
):
    held = hold(precision, tensor)
    passing = held.get("activation", 0) + held.get("temporary", 0)
    assert passing == pytest.approx(bytes_a_score * SCORES / tensor, rel=0.05)


@pytest.mark.parametrize(
    ("precision", "buffers"), [("megatron-bf16", 1), ("nanotron-bf16", 2), ("pure-bf16", 0)]
)
def test_what_sequence_parallelism_gathers_lies_in_buffers_that_stay(precision, buffers):
    assert "gathered" not in hold(precision)
    assert hold(precision, 2).get("gathered", 0) == buffers * TOKENS * WORDY.hidden * 2


@pytest.mark.parametrize("precision", ["bf16", "fsdp2-mixed", "pure-bf16", "megatron-bf16"])
def test_a_pipeline_holds_no_more_scores_with_more_micro_batches(precision):
    times = time_operators(
        make_trace(WORDY, LanguageStep(**STEP, precision=precision)), "NVIDIA H100 80GB HBM3"
    )

    def hold_beside_buffers(micro_batches):
        plan = make_plan(pipeline=2, schedule="1f1b", micro_batches=micro_batches)
        memory = build_graph(times, plan, batch=STEP["batch"] * micro_batches).metadata.memory
        # Stages of PyTorch have a buffer for every micro-batch's message; the inputs lie there too.
        return [
            entry["peak_bytes"] - sum(entry["categories"].get(k, 0) for k in ("message", "input"))
            for entry in memory
        ]

    assert hold_beside_buffers(24) == hold_beside_buffers(6)
