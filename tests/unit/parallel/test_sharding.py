"""What FSDP2 and ZeRO share: units, shards and their padding, parts of the optimizer."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.parallel.splits.pipeline import Parameter, find_gradients, list_parameters
from trioflow.parallel.splits.sharding import (
    build_units,
    describe_units,
    partition_optimizer,
    partition_parameters,
)
from trioflow.parallel.splits.tensor_split import TensorSplit
from trioflow.parallel.splits.updates import list_updates, split_updates
from trioflow.trace.store import Trace

BLOCKS = ["blocks.0", "blocks.1"]


def with_facts(trace, **facts):
    return Trace(trace.operators, trace.tensors, replace(trace.facts, **facts))


@pytest.mark.parametrize(
    ("shape", "shards", "rows"), [((8, 3), 2, 8), ((8, 3), 3, 9), ((1, 5), 4, 4), ((7,), 2, 8)]
)
def test_rows_that_do_not_divide_are_padded(shape, shards, rows):
    parameter = Parameter("a.weight", shape, 4, -1, -1, True)
    assert parameter.padded_bytes(shards) == rows * prod(shape[1:]) * 4
    assert parameter.size_bytes == prod(shape) * 4


def test_inner_units_are_sharded_alone_and_the_root_has_the_rest(transformer_trace):
    units = build_units(transformer_trace)
    assert [unit.name for unit in units] == [*BLOCKS, ""]
    names = [p.name for unit in units for p in unit.parameters]
    assert sorted(names) == sorted(p["name"] for p in transformer_trace.facts.parameters)
    for unit in units[:-1]:
        assert all(p.name.startswith(f"{unit.name}.") for p in unit.parameters)
        phases = transformer_trace.operators["phase"]
        assert phases[unit.first_forward] == phases[unit.last_forward] == "forward"
        assert phases[unit.first_backward] == phases[unit.last_backward] == "backward"
    first, second, root = units
    assert first.first_forward < second.first_forward
    assert (
        root.first_backward < second.first_backward <= second.last_backward < first.first_backward
    )
    whole = sum(g["size_bytes"] for g in transformer_trace.facts.gradients)
    assert sum(unit.gathered_bytes(2) for unit in units) == whole


def test_every_gradient_of_a_unit_is_ready_when_its_backward_ends(cnn_trace, transformer_trace):
    for trace in (cnn_trace, transformer_trace):
        ready = {g["name"]: g["ready_after_op_id"] for g in trace.facts.gradients}
        for unit in build_units(trace)[:-1]:
            assert max(ready[p.name] for p in unit.parameters) <= unit.last_backward


def test_what_has_no_gradient_is_gathered_and_not_reduced(transformer_trace):
    gradients = transformer_trace.facts.gradients
    frozen = [g for g in gradients if g["name"] != "blocks.0.feed_forward.up.weight"]
    first, *_ = build_units(with_facts(transformer_trace, gradients=frozen))
    missing = next(g for g in gradients if g not in frozen)
    assert first.gathered_bytes(2) - first.reduced_bytes(2) == missing["size_bytes"]


def test_a_unit_that_shares_a_parameter_is_left_to_the_root(tied_trace):
    units = tied_trace.facts.units
    assert {unit.name for unit in build_units(tied_trace)} == {u["name"] for u in units[1:-1]} | {
        ""
    }
    # With a unit behind it, the one that uses the embedding's weight again is an inner one.
    longer = [*units, {"name": "nothing", "modules": ["nothing"]}]
    found = build_units(with_facts(tied_trace, units=longer))
    assert {unit.name for unit in found} == {u["name"] for u in units[1:-1]} | {""}


def test_repeated_blocks_are_units_where_none_are_named(transformer_trace, cnn_trace):
    nameless = with_facts(transformer_trace, units=[])
    told, found = build_units(transformer_trace), build_units(nameless)
    assert [u.name for u in found] == [u.name for u in told] == [*BLOCKS, ""]
    assert found == told
    assert describe_units(nameless) == "units: 2 x blocks.* + rest"
    assert describe_units(with_facts(cnn_trace, units=[])).startswith("units: 2 x layer1.* + 2 x")
    text = extrapolate(nameless, named_plan("fsdp", 2), ProportionalModel()).metadata.plan_text
    assert text.endswith(", fsdp, units: 2 x blocks.* + rest")


def test_a_model_without_blocks_is_one_unit_and_says_so(transformer_trace):
    operators = transformer_trace.operators.assign(module="")
    trace = replace(with_facts(transformer_trace, units=[]), operators=operators)
    (root,) = build_units(trace)
    assert len(root.parameters) == len(transformer_trace.facts.parameters)
    assert describe_units(trace) == "units: the whole model at once"


def test_a_unit_whose_input_has_no_gradient_is_reduced_at_the_end(transformer_trace):
    units = [{"name": "nothing", "modules": ["nothing"]}, *transformer_trace.facts.units]
    found = build_units(with_facts(transformer_trace, units=units))
    assert [(u.name, u.in_graph) for u in found] == [
        ("embedding", False),
        ("blocks.0", True),
        ("blocks.1", True),
        ("", False),
    ]


def test_parameters_are_found_where_only_gradients_are_told(transformer_trace):
    told = {p.name: p for p in list_parameters(transformer_trace)}
    found = list_parameters(with_facts(transformer_trace, parameters=[]))
    assert {p.name: p for p in found} == told
    with pytest.raises(PlanError, match="does not say which parameters"):
        list_parameters(with_facts(transformer_trace, parameters=[], gradients=[]))


def test_tensor_parallel_ranks_shard_their_part_of_split_layers(transformer_trace):
    whole, half = (
        {p.name: p.shape for p in list_parameters(transformer_trace, tensor)} for tensor in (1, 2)
    )
    for name, shape in whole.items():
        rows, *rest = shape
        if name.endswith(("qkv.weight", "up.weight", "qkv.bias", "up.bias")):
            assert half[name] == (rows // 2, *rest)
        elif name.endswith(("projection.weight", "down.weight")):
            assert half[name] == (rows, rest[0] // 2)
        else:
            assert half[name] == shape


def test_a_rank_updates_its_shard(transformer_trace):
    operators = transformer_trace.operators

    def shard(ranks):
        plan = make_plan(data=ranks, sharding="fsdp")
        return split_updates(transformer_trace, plan, TensorSplit(operators))

    half = shard(2)
    frame, cut = half.operators, half.sharded_updates
    rest = operators.index.difference(sorted(cut))
    assert frame.loc[rest].equals(operators.loc[rest])
    assert cut == set(list_updates(operators))
    assert (operators.loc[sorted(cut), "phase"] == "optimizer").all()
    ratio = frame.loc[sorted(cut), "read_bytes"] / operators.loc[sorted(cut), "read_bytes"]
    assert np.allclose(ratio, 0.5, rtol=0.05)
    # 32 rows on three ranks: the first has 11.
    update = operators[operators["module"] == "blocks.0.attention.projection"].query(
        "phase == 'optimizer' and read_bytes > 1000"
    )
    share = shard(3).operators.loc[update.index, "read_bytes"] / update["read_bytes"]
    assert np.allclose(share, 11 / 32, rtol=0.01)


def test_parts_are_made_largest_first():
    # 9 to rank 0; 7 and 5 to the lighter one; 5 and 1 again to the one with less so far.
    assert partition_parameters([5, 9, 1, 7, 5], 2) == [[1, 4], [3, 0, 2]]


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 5))
def test_parts_hold_every_parameter_once_and_differ_by_one_at_most(sizes, ranks):
    parts = partition_parameters(sizes, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    sums = [sum(sizes[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(sizes, default=0)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_update_is_run_by_the_owner_of_its_parameter(transformer_trace, ranks):
    partition = partition_optimizer(transformer_trace, ranks)
    updates = transformer_trace.operators.query("phase == 'optimizer'")["op_id"]
    assert sorted(op for part in partition.operators for op in part) == sorted(updates)
    assert partition.shared == () and not any(partition.shares)
    storage = transformer_trace.tensors["storage_id"]
    owner = {p.storage_id: rank for rank, part in enumerate(partition.parameters) for p in part}
    for rank, operators in enumerate(partition.operators):
        inputs = transformer_trace.operators.loc[list(operators), "input_ids"]
        met = {owner[s] for ids in inputs for s in storage[ids] if s in owner}
        assert met == {rank}
        # Every parameter takes as many operators as any other.
        assert len(operators) == len(updates) // len(owner) * len(partition.parameters[rank])


def test_an_update_of_all_parameters_is_run_by_all(transformer_trace):
    fused = transformer_trace.operators.copy()
    storages = {p.storage_id for p in list_parameters(transformer_trace)}
    tensors = transformer_trace.tensors
    ids = tensors[tensors["storage_id"].isin(storages)]["tensor_id"].tolist()
    updates = fused.index[fused["phase"] == "optimizer"]
    fused = fused.drop(updates[1:])
    fused.at[updates[0], "input_ids"] = ids
    fused.at[updates[0], "input_shapes"] = tensors.loc[ids, "shape"].tolist()
    trace = replace(transformer_trace, operators=fused)
    partition = partition_optimizer(trace, 2)
    assert partition.operators == ((updates[0],), (updates[0],))
    assert partition.shared == (updates[0],)
    assert sum(shares[updates[0]] for shares in partition.shares) == pytest.approx(1)


def test_gradients_that_the_trace_does_not_join_are_found(transformer_trace):
    """A residual's sum runs between a normalisation's gradients and their accumulation."""
    found = find_gradients(transformer_trace)
    told = {g["name"]: g["gradient_storage_id"] for g in transformer_trace.facts.gradients}
    missing = [name for name, storage in told.items() if storage < 0]
    assert missing and all("norm" in name for name in missing)
    assert {name: found[name] for name in told if name not in missing} == {
        name: storage for name, storage in told.items() if storage >= 0
    }
    assert len(set(found.values())) == len(found) and min(found.values()) >= 0
    tensors = transformer_trace.tensors.groupby("storage_id").first()
    for weight in (name for name in missing if name.endswith("weight")):
        pair = [found[weight], found[weight.replace("weight", "bias")]]
        makers = {int(tensors.loc[storage, "producer_op_id"]) for storage in pair}
        names = transformer_trace.operators.loc[list(makers), "name"].tolist()
        assert names == ["aten::native_layer_norm_backward"] and pair[0] < pair[1]
