"""What backward computes again, and its two parts: for the input and for the weights.

Recomputation is that of ``torch.utils.checkpoint`` without reentrance: the first backward operator that needs a result
which was not kept runs the region's forward again, up to the operator that saves the last result for backward; an
operator that saves nothing but its inputs is not computed again (`plan_recomputation` says what other frameworks do).
States of random generators and the checkpoint's own bookkeeping (empty tensors, detached ones) are left out.

PyTorch's zero-bubble schedules run backward in two: I is what the gradient that goes to the stage before depends on, W
everything else. An operator that makes both runs twice.

References: PyTorch 2.13 ``torch/utils/checkpoint.py``: ``_checkpoint_without_reentrant_generator``,
``_recomputation_hook``, ``set_checkpoint_early_stop``. Selective: V. Korthikanti et al., arXiv 2205.05198, section 5. I
and W: ``torch/distributed/pipelining/_backward.py``, ``stage.py`` (the first stage does all of it in W).
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field, structs
from numpy.typing import NDArray

from trioflow.base.errors import PlanError
from trioflow.base.plan_row import TO_THE_END
from trioflow.base.precision_recipes import PYTORCH
from trioflow.base.provenance import PACKAGE, read_table
from trioflow.parallel.model_graph import ModelGraph, Operator, of_model
from trioflow.parallel.splits.pipeline import is_inside, loss_operators
from trioflow.parallel.splits.tensor_split import find_expert_modules
from trioflow.trace.store import pipeline_units

_FUSED_ATTENTION = ("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_")
"""How the names of operators begin that are an attention's products and softmax in one."""
PRODUCTS = ("aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum")
_SOFTMAXES = ("aten::softmax", "aten::_softmax", "aten::_safe_softmax")


_LINEAR = ("linear", "::mm", "::addmm", "grouped_mm")
"""How the names of operators end that are a linear layer's product."""
_LAYERS = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj"),
    "out": ("o_proj",),
    "up": ("gate_proj", "up_proj", "gate_up_proj"),
    "down": ("down_proj",),
}
"""Linear layers that a policy's words name, by the last part of their module."""
POLICIES = {row["policy"]: row for row in read_table(PACKAGE / "data" / "recompute_policies.tsv")}
"""Named policies of recomputation: what each saves, and where it is written."""


CORE_ATTENTION = "core_attn"
MODULES = {CORE_ATTENTION: "", "mlp": r".*\.\d+\.mlp", "moe": r".*\.\d+\.mlp", "shared_experts": r".*\.shared_experts?"}
"""Modules of a block that Megatron-LM's ``recompute_modules`` checkpoints as wholes, by their paths: mlp without experts,
moe with them (``TransformerConfig``; moe_act, layernorm and mla_up_proj drop their output alone, which is not built)."""
_BLOCK = re.compile(r"\.\d+$")
"""How the name of a unit ends that is one of a model's repeated blocks."""


class Recomputation(Struct, frozen=True):
    """A region of forward whose results are dropped and computed again."""

    operators: tuple[int, ...]  # forward operators that run again, in order
    needed_by: frozenset[int]  # backward operators; before the first of them the region runs again
    stops_at: int | None = None  # operator at which PyTorch stops before it computes anything


@of_model
def plan_recomputation(trace: ModelGraph, kind: str, cut: Sequence[Sequence[str]] = ()) -> list[Recomputation]:
    """Return the regions that a step recomputes, in the order of forward.

    ``full``: each unit of the model's chain; ``selective``: the products and the softmax of each attention;
    ``uniform:N``: all blocks, kept at every N-th of a stage; ``block:N``: each of the first N blocks of a stage;
    ``save:POLICY``: each block but what a named policy saves (``POLICIES``), as selective activation checkpointing of
    PyTorch and policies of ``jax.checkpoint`` do: what is saved does not run again; ``modules:NAMES``: each of some of
    a block's ``MODULES``.
    ``cut``: the units of each stage; one stage of all without it. Raises PlanError when the trace does not say what the
    model's units are, or shows no attention.

    PyTorch's checkpoint stops once it has all that backward needs. Megatron-LM's and nanotron's ``CheckpointFunction``
    runs all of a region again, and both wrap blocks alone: ``full`` is ``uniform:1``.
    """
    if kind == "none":
        return []
    stops = trace.facts.recipe.framework == PYTORCH and not kind.endswith(TO_THE_END)
    word, _, count = kind.removesuffix(TO_THE_END).partition(":")
    policy = count if word == "save" else ""
    if word == "selective":
        regions = _list_attentions(trace)
    elif word == "modules":
        regions = _list_modules(trace, count.split(","))
    elif word == "full" and stops:
        regions = list_units(trace)
    else:
        word, count = (word, count) if count and not policy else ("uniform", "1")
        regions = _list_blocks(trace, word, int(count), cut or [list(pipeline_units(trace))])
    if not regions:
        what = {"selective": "an attention", "modules": "these modules"}.get(word, "its units")
        raise PlanError(
            f"recompute {kind}: the trace of {trace.facts.workload} does not show {what}",
            fix="use recompute full" if word == "selective" else "use recompute none",
        )
    saved = _find_saved(trace)
    made = [_make_region(region, saved, stops) for region in regions]
    if policy:
        kept = _find_kept(trace, policy, regions)
        made = [structs.replace(r, operators=tuple(sorted({*r.operators} - kept))) for r in made]
    return [region for region in made if region.operators]


def _find_kept(trace: ModelGraph, policy: str, blocks: Sequence[Sequence[int]]) -> set[int]:
    """Return the forward operators whose results a policy saves; PlanError when nobody knows it, or it saves nothing here."""
    row = POLICIES.get(policy)
    if row is None:
        raise PlanError(f"recompute save:{policy}: no such policy", fix=f"use {', '.join(POLICIES)}")
    words = row["saves"].split()
    rows = trace.rows
    attentions = _list_attentions(trace)
    ends = {"scores": 0, "context": -1}
    kept = {part[ends[word]] for part in attentions for word in words if word in ends}
    chosen = {leaf for word in words for leaf in _LAYERS.get(word, ())}
    for block in blocks:
        linear = [op for op in block if rows[op].name.endswith(_LINEAR)]
        saved = [op for op in linear if "linear" in words or rows[op].module.rpartition(".")[2] in chosen]
        kept |= set(saved[:: 2 if row["alternates"] == "yes" else 1])
    if words and not kept:
        raise PlanError(
            f"recompute save:{policy}: the trace of {trace.facts.workload} shows nothing that it saves",
            fix="use recompute full, or a language model by its name",
        )
    return kept


class _Saved(Struct, frozen=True):
    """What backward reads of one forward operator: by which operators, and whether a result of it."""

    readers: frozenset[int]
    result: bool


def _make_region(operators: Sequence[int], saved: dict[int, _Saved], stops: bool) -> Recomputation:
    """Cut a region that ``stops`` behind the operator that saves last."""
    saving = [op for op in operators if op in saved]
    needed_by = frozenset(reader for op in saving for reader in saved[op].readers)
    if not saving or not stops:
        return Recomputation(tuple(operators) if saving else (), needed_by)
    last = max(saving)
    computed = saved[last].result
    kept = tuple(op for op in operators if op < last + computed)
    return Recomputation(kept, needed_by, None if computed else last)


def _find_saved(trace: ModelGraph) -> dict[int, _Saved]:
    """Return the forward operators that keep something for backward: those of an autograd node take all that it kept."""
    makers = dict(zip(reversed(trace.storage), reversed(trace.makers), strict=True))
    saved: dict[int, _Saved] = {}
    for forward, rows in trace.backward_of.items():
        nodes: dict[int | None, list[Operator]] = {}
        for row in rows:
            nodes.setdefault(row.sequence_number, []).append(row)
        for node in nodes.values():
            sources = [makers[storage] for row in node for storage in row.reads]
            kept = [maker for maker in sources if maker is None or maker.phase == "forward"]
            if kept:
                known = saved.get(forward, _Saved(frozenset(), False))
                result = any(maker is not None and maker.op_id == forward for maker in kept)
                saved[forward] = _Saved(known.readers | {row.op_id for row in node}, known.result or result)
    return saved


def _list_blocks(trace: ModelGraph, word: str, count: int, cut: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return the forward operators of the blocks that Megatron-LM's ``recompute-num-layers`` chooses."""
    units = dict(zip(pipeline_units(trace), list_units(trace), strict=False))
    listed = []
    for stage in cut:
        blocks = [name for name in stage if _BLOCK.search(name)]
        if word == "block":
            listed += [units[name] for name in blocks[:count]]
            continue
        for start in range(0, len(blocks), count):
            parts = [units[name] for name in blocks[start : start + count]]
            listed.append([op for part in parts for op in part])
    return listed


@of_model
def list_units(trace: ModelGraph) -> list[list[int]]:
    """Return the forward operators of each unit, from its first module's to its last's."""
    loss = loss_operators(trace) if pipeline_units(trace) else set()
    forward = [row for row in trace.forward if row.op_id not in loss]
    op_ids = [row.op_id for row in forward]
    places: dict[str, list[int]] = {row.module: [] for row in forward}
    for place, row in enumerate(forward):
        places[row.module].append(place)
    units = (
        [p for module in places if is_inside(module, paths) for p in places[module]]
        for paths in pipeline_units(trace).values()
    )
    return [op_ids[min(unit) : max(unit) + 1] for unit in units if unit]


def _list_modules(trace: ModelGraph, words: Sequence[str]) -> list[list[int]]:
    """Return the forward operators of each of some of a block's modules; of one inside another the outer one's."""
    if unknown := [word for word in words if word not in MODULES]:
        raise PlanError(
            f"recompute modules:{','.join(words)}: {unknown[0]} is not built", fix=f"use {', '.join(MODULES)}"
        )
    experts = find_expert_modules(trace)
    spans = _list_attentions(trace) if CORE_ATTENTION in words else []
    for word in set(words) - {CORE_ATTENTION}:
        inside: dict[str, list[int]] = {}
        for row in trace.forward:
            if at := re.match(rf"({MODULES[word]})(\.|$)", row.module):
                inside.setdefault(at[1], []).append(row.op_id)
        for path, ops in inside.items():
            if word == "shared_experts" or any(is_inside(m, [path]) for m in experts) == (word == "moe"):
                spans.append(list(range(ops[0], ops[-1] + 1)))
    outer = [s for s in spans if not any(o[0] <= s[0] and s[-1] <= o[-1] and o != s for o in spans)]
    return sorted(outer)


def _list_attentions(trace: ModelGraph) -> list[list[int]]:
    """Return the operators of each attention: one fused, or from product over softmax to product."""
    rows, products = trace.forward, [_mixes(row, trace.category) for row in trace.forward]
    regions = []
    for place, row in enumerate(rows):
        if row.name.startswith(_FUSED_ATTENTION):
            regions.append([row.op_id])
        elif row.name in _SOFTMAXES and any(products[:place]) and any(products[place:]):
            first, last = (place - 1 - products[:place][::-1].index(True), products.index(True, place))
            if rows[first].module == rows[last].module:
                regions.append([one.op_id for one in rows[first : last + 1]])
    return regions


def _mixes(row: Operator, category: Sequence[str]) -> bool:
    """Return whether an operator multiplies two activations."""
    return row.name in PRODUCTS and [category[i] for i in row.input_ids].count("activation") >= 2


class BackwardSplit(Struct):
    """The two parts of one stage's backward."""

    # ``op_id`` of the operators of I and of W, in order
    for_input: list[int] = field(default_factory=list)
    for_weight: list[int] = field(default_factory=list)
    # Operators in both, with the part of their time that I takes
    input_share: dict[int, float] = field(default_factory=dict)


@of_model
def split_backward(
    trace: ModelGraph, stage_of: NDArray[np.int64], stage: int, left_out: frozenset[int] = frozenset()
) -> BackwardSplit:
    """Return which backward operators of a stage belong to I and which to W; the first stage has no I.

    An operator that makes both kinds of gradient is shared by its FLOPs, half each (both products of a convolution or
    linear layer have one size), without FLOPs by the bytes that each part moves, both reading all inputs. Twice the
    host's time; what reading twice costs more is left out. Raises PlanError when the trace does not say what operators
    read and write.
    """
    rows = [row for row in trace.backward if row.op_id not in left_out]
    of_stage = [row for row in rows if stage_of[row.op_id] == stage]
    if stage == 0:
        return BackwardSplit([], [row.op_id for row in of_stage])
    listed = {index for row in of_stage for index in row.output_ids}
    needed, needed_storages = set[int](), set[int]()

    def need(row: Operator) -> None:
        needed.update(row.input_ids)
        # A view that no operator shows
        needed_storages.update(trace.storage[index] for index in row.input_ids if index not in listed)

    before = [row for row in rows if stage_of[row.op_id] < stage]
    for row in before:
        need(row)
    split = BackwardSplit()
    for row in reversed(of_stage):
        gradients = [i for i in row.output_ids if trace.category[i] == "gradient"]
        wanted = not needed.isdisjoint(row.output_ids) or not needed_storages.isdisjoint(row.makes)
        if wanted:
            need(row)
            split.for_input.append(row.op_id)
        if gradients or not wanted:
            split.for_weight.append(row.op_id)
        if gradients and wanted:
            split.input_share[row.op_id] = _share_of_input(row, gradients, trace.size)
    if not split.for_input and before:
        raise PlanError(
            f"the trace does not say what the backward of stage {stage} hands to the stage before",
            fix="capture it again with its tensors, or use a schedule with whole backwards",
        )
    split.for_input.reverse()
    split.for_weight.reverse()
    return split


def _share_of_input(row: Operator, gradients: Sequence[int], size: Sequence[int]) -> float:
    if row.flop:
        return 0.5
    read = sum(size[i] for i in row.input_ids)
    moved = [read + sum(size[i] for i in row.output_ids if (i in gradients) is of) for of in (False, True)]
    return float(moved[0] / max(sum(moved), 1))


def keep_sums_with_input(
    split: BackwardSplit, exchanges: dict[int, list[Any]], forward_of: list[int | None], first: bool = False
) -> dict[int, list[Any]]:
    """Move tensor-parallel collectives of gradients that go on from W to I, beside I of the same forward operator."""
    inside, moved = set(split.for_input), {op: list(of_op) for op, of_op in exchanges.items()}
    for op_id in split.for_weight:
        if op_id in exchanges and op_id not in inside and inside:
            same = [i for i in split.for_input if (first or i < op_id) and forward_of[i] == forward_of[op_id]]
            if same:
                moved.setdefault(min(same) if first else max(same), []).extend(moved.pop(op_id))
    return moved
