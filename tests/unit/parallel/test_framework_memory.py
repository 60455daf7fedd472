"""What Megatron-LM and nanotron hold of a language model's step, beside what PyTorch alone would.

Parameters without a gradient are parameters: sharded, cut and placed as trained ones, without gradient and state.

The optimizer is shared out by what each rank owns, whatever form it runs in.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from captured import BATCH, TRANSFORMER, capture_raw, with_steady_times
from msgspec import structs
from same_model import ProportionalModel
from trioflow.base.columns import Columns
from trioflow.base.errors import InputError
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.memory.peak import LIKELY, count_plan_outside, load_survival
from trioflow.parallel.plan import NAMED, make_plan, named_plan
from trioflow.parallel.splits.pipeline import list_parameters
from trioflow.parallel.splits.sharding import find_owners, scale_work
from trioflow.prediction.assembly import build_graph, prepare_step
from trioflow.prediction.question import Options, resolve, time_operators
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
    assert {(plan.tensor > 1, plan.vocabulary_parallel) for plan in found} == {(False, False), (True, True)}


@cache
def hold(precision, tensor=1, data=1, sequence=64, **step):
    """Return what fills rank 0 at its peak."""
    trace = make_trace(WORDY, LanguageStep(sequence, STEP["batch"], precision, **step))
    split, sharding = tensor > 1, "distributed" if data > 1 else "none"
    plan = make_plan(data, tensor, sequence_parallel=split, vocabulary_parallel=split, sharding=sharding)
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


@pytest.mark.parametrize(
    ("precision", "bytes_a_score"),
    # In bf16 as they are made and in fp32; in fp32 twice; the probabilities and two gradients in fp32.
    [("megatron-bf16", 2 + 4), ("nanotron-bf16", 4 + 4), ("pure-bf16", 4 + 4 + 4)],
)
@pytest.mark.parametrize("tensor", [1, 4, 8])
def test_a_loss_that_works_in_place_holds_the_scores_that_it_works_in(precision, bytes_a_score, tensor):
    held = hold(precision, tensor)
    passing = held.get("activation", 0) + held.get("temporary", 0)
    assert passing == pytest.approx(bytes_a_score * SCORES / tensor, rel=0.05)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "pure-bf16", "megatron-bf16"])
def test_a_pipeline_holds_no_more_scores_with_more_micro_batches(precision):
    times = time_operators(make_trace(WORDY, LanguageStep(**STEP, precision=precision)), "NVIDIA H100 80GB HBM3")

    def hold_beside_buffers(micro_batches):
        plan = make_plan(pipeline=2, schedule="1f1b", micro_batches=micro_batches)
        memory = build_graph(times, plan, batch=STEP["batch"] * micro_batches).metadata.memory
        # Stages of PyTorch have a buffer for every micro-batch's message; the inputs lie there too.
        return [
            entry["peak_bytes"] - sum(entry["categories"].get(k, 0) for k in ("message", "input")) for entry in memory
        ]

    assert hold_beside_buffers(24) == hold_beside_buffers(6)


def test_stages_that_do_not_fit_are_balanced_by_layers_and_what_is_reserved_is_bounded():
    deep = LanguageModel("deep", 12, 256, 8, 8, 32, 1024, 16384)
    trace = make_trace(deep, LanguageStep(512, 4, "megatron-bf16"))
    plan = make_plan(pipeline=4, schedule="1f1b", micro_batches=4)
    machine = load_platform("dgx-h100", 4)

    def ask(stages, room_bytes=machine.device.memory_bytes):
        device = structs.replace(machine.device, memory_bytes=room_bytes + count_plan_outside(plan, "gpu"))
        options = Options(stages=stages)
        return prepare_step(resolve(trace, plan, replace(machine, device=device), batch=16, options=options))

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
    "plan", [*(named_plan(n, 1 if n == "single" else 2) for n in NAMED), *OTHERS], ids=lambda plan: plan.plan
)
def test_frozen_parameters_lie_where_trained_ones_do(plan, traces):
    trained, frozen = (peaks_of(trace, plan) for trace in traces)
    for rank, held in trained.items():
        assert frozen[rank]["parameter"] == held["parameter"]
        for category in ("input", "gradient", "optimizer_state"):
            assert frozen[rank].get(category, 0) <= held.get(category, 0)
    totals = [sum(held.get("optimizer_state", 0) for held in peaks.values()) for peaks in (trained, frozen)]
    assert totals[1] < 0.6 * totals[0]


def test_a_capture_and_its_names_say_what_is_frozen(traces, tmp_path):
    from trioflow.trace.profile.merge import merge_trace

    real = merge_trace(capture_raw(PLAIN | FREEZE, tmp_path))
    for trace in (traces[1], real):
        found = {p.name: p for p in list_parameters(trace)}
        assert all(p.storage_id >= 0 and p.frozen != p.trained for p in found.values())
        assert [found[f"blocks.4.norm1.{part}"].frozen for part in ("weight", "bias")] == [True, False]
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


FORMS = ("adamw", "adamw-foreach", "adamw-fused")
STATE = "optimizer_state"
PLANS = {
    "tensor": make_plan(tensor=2),
    "pipeline": make_plan(pipeline=2, schedule="1f1b", micro_batches=2),
    "interleaved": make_plan(pipeline=2, schedule="interleaved", micro_batches=2, stages_per_rank=2),
    "both": make_plan(tensor=2, pipeline=2, schedule="1f1b", micro_batches=2),
    "zero1": make_plan(data=3, sharding="zero1"),
    "fsdp": make_plan(data=3, sharding="fsdp"),
    "fsdp and tensor": make_plan(data=2, tensor=2, sharding="fsdp"),
}


def test_a_share_of_an_operator_that_is_not_there_is_refused() -> None:
    work = ("flop", "read_bytes", "write_bytes")
    operators = Columns({name: np.array([10, 20, 30]) for one in work for name in (one, f"batch_{one}")})
    assert scale_work(operators, {1: 0.5})["flop"].tolist() == [10, 10, 30]
    with pytest.raises(KeyError, match="99"):
        scale_work(operators, {99: 0.5})


@pytest.fixture(scope="module")
def forms():
    """One step with its optimizer as a loop over parameters, over lists of them, and in one call."""
    from trioflow.trace.capture.meta import capture_meta

    made = {}
    for form in FORMS:
        made[form] = with_steady_times(capture_meta({**TRANSFORMER, "optimizer": form}, BATCH, target="cpu"))
    return made


def build(trace, plan):
    # Four units, two a stage: the loop and the lists are cut in the same place.
    names = [unit["name"] for unit in trace.facts.units]
    size = -(-len(names) // plan.stages)
    stages = [names[i : i + size] for i in range(0, len(names), size)]
    return extrapolate(
        trace, plan, ProportionalModel(), batch=BATCH * plan.data, stages=stages if plan.pipeline > 1 else None
    )


def held(graph, category):
    """Return what each rank holds of a category [bytes]."""
    return {rank: entry["categories"].get(category, 0) for entry in graph.metadata.memory for rank in entry["ranks"]}


@pytest.mark.parametrize("name", PLANS)
def test_each_rank_holds_the_state_of_its_parameters(name, forms):
    graphs = {form: build(trace, PLANS[name]) for form, trace in forms.items()}
    loop = held(graphs["adamw"], STATE)
    for form in FORMS[1:]:
        # A loop makes single numbers, such as counts of steps, for every parameter.
        assert held(graphs[form], STATE) == pytest.approx(loop, rel=0.01), form
        for category in ("parameter", "gradient"):
            assert held(graphs[form], category) == held(graphs["adamw"], category), form


@pytest.mark.parametrize("form", FORMS)
def test_every_state_has_its_parameter(form, forms):
    trace = forms[form]
    owners = find_owners(trace).of_storage
    rows = trace.tensors.drop_duplicates("storage_id")
    states = rows[(rows["category"] == STATE) & rows["shape"].map(len).gt(0)]
    parameters = trace.facts.parameters
    assert len(states) >= 2 * len(parameters)
    for storage, shape in zip(states["storage_id"], states["shape"], strict=True):
        assert list(shape) == parameters[owners[storage]]["shape"]
    kept = states[states["producer_op_id"].isna()]
    assert sorted(owners[s] for s in kept["storage_id"]) == sorted([*range(len(parameters))] * 2)
