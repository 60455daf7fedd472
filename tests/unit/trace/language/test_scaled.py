"""Products in FP8 in the trace of a language model: which, what is cast for them, what they read."""

from dataclasses import replace

import pytest
from trioflow.base.errors import InputError
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import build_graph
from trioflow.prediction.question import time_operators
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow.trace.store import load_trace, save_trace

DENSE = LanguageModel("dense", 3, 1024, 8, 8, 128, 4096, 32000)
SPARSE = LanguageModel("sparse", 2, 512, 8, 8, 64, 1024, 32000, experts=8, experts_per_token=2)
WIDE = replace(DENSE, hidden=8192, heads=64, kv_heads=64, feed_forward=16384)
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def trace(model=DENSE, precision="fp8"):
    return make_trace(model, LanguageStep(2048, 1, precision))


def select(found, name, phase="forward"):
    operators = found.operators
    return operators[(operators["name"] == f"trioflow::{name}") & (operators["phase"] == phase)]


def test_the_linear_layers_of_blocks_run_in_fp8_and_nothing_else():
    found = trace()
    assert len(select(found, "scaled_linear")) == 4 * 3
    assert len(select(found, "scaled_mm", "backward")) == 2 * 4 * 3
    left = found.operators[found.operators["name"].isin(["aten::linear", "aten::mm"])]
    assert set(left["module"]) == {"lm_head"}
    assert found.operators["flop"].sum() == trace(precision="megatron-bf16").operators["flop"].sum()


def test_what_several_layers_read_is_cast_once():
    # Query, key and value read one norm's result, gate and up another; each gradient is its own.
    found = make_trace(DENSE, LanguageStep(2048, 1, "fp8", fusion="flash-attn"))
    assert len(select(found, "quantize")) == 4 * 3
    assert len(select(found, "quantize", "backward")) == 7 * 3
    first = select(found, "quantize").iloc[0]
    elements = 2048 * DENSE.hidden
    assert (first["read_bytes"], first["write_bytes"]) == (2 * elements, 2 * elements)
    product = select(found, "scaled_linear").iloc[0]
    assert product["read_bytes"] == elements + DENSE.hidden**2
    assert product["write_bytes"] == 2 * elements


def test_a_scale_of_each_tensor_asks_for_its_largest_value_first():
    counts = [(trace(precision=name).operators["name"] == "aten::amax").sum() for name in ("fp8", "fp8-block")]
    assert counts == [8 * 3, 0]
    assert len(select(trace(precision="fp8-block"), "block_scaled_linear")) == 4 * 3


def test_a_largest_value_does_not_grow_with_the_batch(tmp_path):
    step = LanguageStep(256, 2, "fp8")
    found = make_trace(DENSE, step)
    save_trace(found, tmp_path / "two")
    assert len(load_trace(tmp_path / "two").operators) == len(found.operators)
    largest = found.operators[found.operators["name"] == "aten::amax"]
    assert largest["batch_dim"].isna().all()
    assert (largest["batch_read_bytes"] == largest["read_bytes"]).all()


def test_experts_run_in_fp8_and_their_router_does_not():
    found = trace(SPARSE)
    assert len(select(found, "scaled_grouped_mm")) == 2 * 2
    router = found.operators[found.operators["module"].str.endswith("mlp.gate")]
    assert not router["name"].str.contains("scaled").any()


@pytest.mark.parametrize("precision", ["fp8", "fp8-block"])
def test_products_take_less_time_on_an_h100(precision):
    half, fp8 = (time_operators(trace(WIDE, name), H100).traces[0].operators for name in ("megatron-bf16", precision))
    before, after = (
        rows.loc[rows["module"].str.endswith("down_proj") & rows["name"].str.endswith("linear"), "device_ns"]
        for rows in (half, fp8)
    )
    # Twice the peak rate at most; at its power limit a board sustains the same share of either.
    assert 0.5 < after.max() / before.max() < 0.95
    heads = [rows.loc[rows["module"] == "lm_head", "device_ns"].sum() for rows in (half, fp8)]
    assert heads[0] == heads[1]


def test_a_gpu_without_fp8_is_refused():
    with pytest.raises(InputError, match=r"A100.* has no tensor cores for FP8"):
        time_operators(trace(), A100)
    with pytest.raises(InputError, match="no tensor cores for FP8"):
        time_operators(trace(), "AMD EPYC 7R13")


@pytest.mark.parametrize(("tensor", "expert"), [(4, 1), (1, 2)])
def test_messages_of_plans_stay_but_for_what_is_gathered_in_fp8(tensor, expert):
    model = DENSE if expert == 1 else SPARSE
    plan = make_plan(2 * expert, tensor, expert=expert, sequence_parallel=tensor > 1, vocabulary_parallel=tensor > 1)
    sent = {}
    for name in ("megatron-bf16", "fp8"):
        tasks = build_graph(time_operators(trace(model, name), H100), plan).tasks
        messages = tasks[(tasks["rank"] == 0) & (tasks["message_bytes"] > 0)]
        sent[name] = messages[["name", "phase", "message_bytes"]].reset_index(drop=True)
    half, fp8 = sent["megatron-bf16"], sent["fp8"]
    assert half[["name", "phase"]].equals(fp8[["name", "phase"]])
    smaller = half["message_bytes"] != fp8["message_bytes"]
    assert set(half["name"][smaller]) == ({"all_gather"} if tensor > 1 else set())
    assert (half["message_bytes"][smaller] == 2 * fp8["message_bytes"][smaller]).all()
    # A block's two gathers of forward, before query, key and value, and before gate and up; four of backward: of the
    # same inputs once more, and of the gradients of what the two other layers return.
    assert smaller.sum() == (6 * model.layers if tensor > 1 else 0)
    assert (half["phase"][smaller] == "backward").sum() == smaller.sum() * 2 / 3


def test_memory_keeps_activations_once_in_fp8_and_weights_a_second_time():
    plan, held = make_plan(2), {}
    for name in ("megatron-bf16", "fp8"):
        graph = build_graph(time_operators(trace(precision=name), H100), plan)
        held[name] = graph.metadata.memory[0]["categories"]
    block = DENSE.hidden * (4 * DENSE.hidden + 3 * DENSE.feed_forward)
    more = held["fp8"]["parameter"] - held["megatron-bf16"]["parameter"]
    assert more == 2 * DENSE.layers * block
    assert held["fp8"]["activation"] < held["megatron-bf16"]["activation"]
