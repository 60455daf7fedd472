"""What Megatron-LM and nanotron hold of a language model's step, beside what PyTorch alone would."""

from dataclasses import replace
from functools import cache

import pytest
from trioflow.hardware.platform import load_platform
from trioflow.parallel.memory.peak import count_plan_outside
from trioflow.parallel.memory.survival import LIKELY, load_survival
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.prediction.assembly import build_graph, prepare_step, time_operators
from trioflow.prediction.options import Options
from trioflow.sweeps.search_space import Fates, choose_space, enumerate_plans
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.sizes import LanguageModel, LanguageStep

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

WORDY = LanguageModel("wordy", 2, 64, 8, 8, 8, 96, 32768)
"""Its scores are most of what it holds."""
TALL = LanguageModel("tall", 2, 64, 8, 8, 8, 96, 64)
"""Its blocks are most of its parameters."""
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
        (False, False),
        (True, True),
    }


@cache
def hold(precision, tensor=1, data=1, sequence=64, **step):
    """Return what fills rank 0 at its peak."""
    trace = make_trace(WORDY, LanguageStep(sequence, STEP["batch"], precision, **step))
    split, sharding = tensor > 1, "distributed" if data > 1 else "none"
    plan = make_plan(
        data, tensor, sequence_parallel=split, vocabulary_parallel=split, sharding=sharding
    )
    times = time_operators(trace, "NVIDIA H100 80GB HBM3")
    return build_graph(times, plan, batch=data * STEP["batch"]).metadata.memory[0]["categories"]


@pytest.mark.parametrize(
    ("precision", "whole", "shared"),
    # Bytes per parameter that replicas hold whole, and that they share.
    [
        ("megatron-bf16", 2 + 4, 12),
        ("megatron-bf16-reduce", 2 + 2, 12),
        ("megatron-fp16", 2 + 2, 12),
        # bf16 gradients stay beside those in fp32.
        ("deepspeed-bf16", 2 + 2 + 4, 12),
        # FP8 copies lie beside the weights of blocks, or in their place.
        ("fp8", 2 + 2 * 0.0126 + 4, 12),
        ("fp8-params", 2 + 4, 12),
        ("fp8-params-bf16-reduce", 2 + 2, 12),
    ],
)
@pytest.mark.parametrize("data", [1, 4])
def test_bytes_per_parameter_are_those_of_the_framework(precision, whole, shared, data):
    held = hold(precision, data=data)
    stands = sum(held.get(name, 0) for name in ("parameter", "gradient", "optimizer_state"))
    assert stands / WORDY.parameters == pytest.approx(whole + shared / data, rel=0.001)
    # The update has a copy of its gradients in fp32 where they are in half precision.
    if "reduce" in precision:
        held = hold(precision, data=data, sequence=2)
        assert held["temporary"] / WORDY.parameters == pytest.approx(4 / data, rel=0.001)


def test_weights_in_fp8_are_gathered_as_one_byte():
    gathered = {}
    for precision in ("fp8", "fp8-params"):
        trace = make_trace(TALL, LanguageStep(**STEP, precision=precision))
        plan = make_plan(2, sharding="distributed")
        graph = build_graph(time_operators(trace, "NVIDIA H100 80GB HBM3"), plan, batch=4)
        messages = graph.tasks[(graph.tasks["name"] == "all_gather") & (graph.tasks["rank"] == 0)]
        gathered[precision] = messages["message_bytes"].sum()
    blocks = TALL.parameters - 2 * TALL.vocabulary * TALL.hidden
    assert gathered["fp8"] - gathered["fp8-params"] == pytest.approx(blocks, rel=0.01)


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


@pytest.mark.parametrize("precision", ["bf16", "fp32", "pure-bf16", "megatron-bf16"])
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


def test_stages_that_do_not_fit_are_balanced_by_layers_and_what_is_reserved_is_bounded():
    deep = LanguageModel("deep", 12, 256, 8, 8, 32, 1024, 16384)
    trace = make_trace(deep, LanguageStep(512, 4, "megatron-bf16"))
    plan = make_plan(pipeline=4, schedule="1f1b", micro_batches=4)
    machine = load_platform("dgx-h100", 4)

    def ask(stages, room_bytes=machine.device.memory_bytes):
        device = replace(machine.device, memory_bytes=room_bytes + count_plan_outside(plan, "gpu"))
        options = Options(stages=stages)
        return prepare_step(trace, plan, replace(machine, device=device), batch=16, options=options)

    by_time, by_layers = (ask(one).needed_bytes for one in ("time", "count"))
    assert by_time > by_layers
    assert ask(None).needed_bytes == by_time
    room_bytes = round((by_time + by_layers) / 2 / load_survival().find_limit(LIKELY, 1.0))
    crowded = ask(None, room_bytes)
    assert crowded.fits_memory and crowded.needed_bytes == by_layers
    assert any("as many layers each" in text for text in crowded.graph.metadata.warnings)
    assert not ask("time", room_bytes).fits_memory, "what was asked for stays"
    # The allocator frees what it keeps before it fails, and holds no more than there is.
    peak_bytes = ask("count").peak_memory_bytes
    tight = ask("count", peak_bytes + 1)
    assert tight.reserved_bytes == peak_bytes + 1 < tight.wanted_bytes and not tight.fits_memory


def test_unfused_attention_of_megatron_has_a_buffer_of_one_layers_scores():
    held = {}
    for attention in ("fused-softmax", "cudnn"):
        trace = make_trace(TALL, LanguageStep(64, 2, "megatron-bf16", attention))
        times = time_operators(trace, "NVIDIA H100 80GB HBM3")
        memory = build_graph(times, make_plan(), batch=2).metadata.memory
        held[attention] = memory[0]["categories"].get("workspace", 0)
    assert held == {"fused-softmax": 2 * 2 * TALL.heads * 64 * 64, "cudnn": 0}


@pytest.mark.parametrize(("loss", "bytes_a_score"), [("eager", 4 + 4 + 4), ("fused", 2 + 2)])
@pytest.mark.parametrize("fusion", ["eager", "compile", "liger"])
def test_the_loss_is_fused_or_not_whatever_the_layers_are(fusion, loss, bytes_a_score):
    held = hold("pure-bf16", fusion=fusion, loss=loss)
    passing = held.get("activation", 0) + held.get("temporary", 0)
    assert passing == pytest.approx(bytes_a_score * SCORES, rel=0.05)


def test_an_optimizer_that_is_not_fused_holds_its_terms():
    fused, terms = (
        hold("pure-bf16", sequence=2, optimizer=name) for name in ("adamw-fused", "adamw-foreach")
    )
    more = terms["temporary"] - fused.get("temporary", 0)
    assert more == pytest.approx(2 * WORDY.parameters, rel=0.01)
