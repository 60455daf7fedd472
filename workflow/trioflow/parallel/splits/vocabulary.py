"""Transformers by their modules' names: layers that can be split, and where the model meets its tokens.

References: M. Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3: columns, then rows, of attention and
feed-forward layers; token embedding and head by vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod

from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import TENSOR_STYLE, find_rank_program
from trioflow.costmodel.features import class_of_name, plain_operator_name
from trioflow.parallel.model_graph import ModelGraph, Operator, of_model
from trioflow.parallel.splits.routing import leave_experts_whole
from trioflow.parallel.splits.tensor_split import find_loss, kind_of_module, list_untrained, with_rules
from trioflow.trace.language.sizes import LIGER, split_adapters
from trioflow.trace.store import Trace


@dataclass(frozen=True)
class Vocabulary:
    """Where a model meets its vocabulary."""

    modules: tuple[str, ...]  # token embeddings and head
    weights: tuple[int, ...]  # storages of their weights; one for a tied weight
    # Rows of the weight, and of it with those that make it divide
    words: int
    padded_words: int
    statistics: Mapping[int, int]  # operator of the loss to the small all-reduces that follow it
    tokens: int  # predicted tokens of the traced batch


@of_model
def list_lengths(trace: ModelGraph) -> frozenset[int]:
    """Return the lengths of what a step's inputs look up: the tokens of a sample."""
    return frozenset(
        row.input_shapes[place][-1]
        for row in trace.forward
        if row.looks_up
        for place, index in enumerate(row.input_ids)
        if trace.category[index] == "input" and row.input_shapes[place]
    )


def check_tokens(trace: Trace, degree: int) -> None:
    """Check that the tokens of a sample can be shared; PlanError when none are looked up, or they do not divide."""
    lengths = list_lengths(trace)
    if not lengths:
        raise PlanError(
            "sequence parallelism: the model of this trace looks no tokens up", fix="leave sequence_parallel out"
        )
    for length in sorted(lengths):
        if length % degree:
            raise PlanError(
                f"sequence parallelism: {length} tokens a sample cannot be shared by {degree} ranks",
                fix=f"use a sequence that is a multiple of {degree}",
            )


@of_model
def find_head(trace: ModelGraph) -> int | None:
    """Return the last product with a parameter in forward, unless that is a split layer's; None without one."""
    rules, loss = (trace.facts.tensor_split or {}), find_loss(trace)
    products = [row for row in trace.forward if row.op_id not in loss and _multiplies(row)]
    if products and kind_of_module(products[-1].module, rules) != "row":
        return products[-1].op_id
    return min(loss, default=None)


def _multiplies(row: Operator) -> bool:
    """Return whether an operator is a product with a parameter."""
    return class_of_name(row.name) == "gemm" and row.matrix is not None


@of_model
def find_vocabulary(trace: ModelGraph, degree: int) -> Vocabulary:
    """Return the layers that vocabulary parallelism splits; rows are added until ``degree`` divides them.

    Raises PlanError when there is no embedding of the step's tokens, no head of as many words, or no loss.
    """
    lookups = [
        (row, row.matrix)
        for row in trace.forward
        if row.looks_up and any(trace.category[i] == "input" for i in row.input_ids)
    ]
    tables = {row.reads[place]: row.input_shapes[place][0] for row, place in lookups if place is not None}
    words = max(tables.values(), default=0)
    heads = [
        row
        for row in trace.forward
        if words and _multiplies(row) and row.output_shapes and row.output_shapes[0][-1:] == [words]
    ]
    if not heads:
        missing = "head that scores the words" if words else "embedding of its tokens"
        raise PlanError(
            f"vocabulary parallelism: the model of this trace has no {missing}", fix="leave vocabulary_parallel out"
        )
    head = heads[-1]
    chosen = [row for row, place in lookups if place is not None and row.input_shapes[place][0] == words]
    weights = [row.reads[place] for row in (*chosen, head) if (place := row.matrix) is not None]
    statistics = _find_statistics(trace.forward[trace.forward.index(head) + 1 :])
    return Vocabulary(
        _list_modules(trace, [*chosen, head], set(weights)),
        tuple(dict.fromkeys(weights)),
        words,
        -(-words // degree) * degree,
        statistics,
        prod(head.output_shapes[0][:-1]),
    )


def has_vocabulary(trace: Trace, degree: int) -> bool:
    """Return whether tensor-parallel ranks can share the vocabulary of a trace's model."""
    if not trace.facts.tensor_split and find_layers(trace):
        return bool(_match(trace, VOCABULARY))
    try:
        find_vocabulary(trace, degree)
    except PlanError:
        return False
    return True


def _list_modules(trace: Trace, rows: list[Operator], weights: set[int]) -> tuple[str, ...]:
    """Return the modules that use the weights, the owner of a tied one included."""
    owners = [
        str(g["module"])
        for g in (*trace.facts.gradients, *list_untrained(trace))
        if int(g.get("parameter_storage_id", -1)) in weights
    ]
    return tuple(dict.fromkeys([*(row.module for row in rows), *owners]))


_REDUCED = {"softmax": 2, "loss": 1}
"""Small all-reduces behind operators of a loss, by class; behind a whole cross entropy maximum, sum and predicted logit."""


def _find_statistics(behind: Sequence[Operator]) -> dict[int, int]:
    """Return how many all-reduces of one number a token follow each operator of the loss; PlanError without a loss of words."""
    whole = [3 * plain_operator_name(row.name)[0].startswith("cross_entropy") for row in behind]
    counts = (one or _REDUCED.get(class_of_name(row.name), 0) for one, row in zip(whole, behind, strict=True))
    found = {row.op_id: count for row, count in zip(behind, counts, strict=True) if count}
    if sum(found.values()) < 3:
        raise PlanError(
            "vocabulary parallelism: no cross entropy follows the head in this trace",
            fix="leave vocabulary_parallel out",
        )
    return found


LAYERS: Mapping[str, str] = {
    # GPT-2
    "*.attn.c_attn": "column",
    "*.attn.c_proj": "row",
    "*.mlp.c_fc": "column",
    "*.mlp.c_proj": "row",
    # BERT; ViT, whose attention is a module inside a module
    **{f"*.attention.self.{part}": "column" for part in ("query", "key", "value")},
    **{f"*.attention.attention.{part}": "column" for part in ("query", "key", "value")},
    "*.attention.output.dense": "row",
    "*.intermediate.dense": "column",
    "*.output.dense": "row",
    # Llama, Mistral, Qwen2; Whisper
    **{
        f"*.{attention}.{part}_proj": "column"
        for attention in ("self_attn", "encoder_attn", "attention")
        for part in "qkv"
    },
    "*.self_attn.o_proj": "row",
    "*.attention.o_proj": "row",
    "*.self_attn.out_proj": "row",
    "*.encoder_attn.out_proj": "row",
    "*.mlp.gate_proj": "column",
    "*.mlp.up_proj": "column",
    "*.mlp.down_proj": "row",
    "*.layers.*.fc1": "column",
    "*.layers.*.fc2": "row",
}
"""Modules of transformers' models, by the names that their families share, of any size."""
VOCABULARY: Mapping[str, str] = {
    "transformer.wte": "row",
    "*.embed_tokens": "row",
    "lm_head": "column",
    "proj_out": "column",
    "bert.embeddings.word_embeddings": "row",
    "cls.predictions.decoder": "column",
}
"""Each rank holds a part of the vocabulary: the embedding's results are summed, the head's stay apart."""


def split_like_megatron(trace: Trace, *, vocabulary: bool = True) -> ModelGraph:
    """Return the trace with the layers that Megatron-LM cuts named in its facts; PlanError when none is known."""
    found = find_layers(trace)
    if not found:
        raise PlanError(
            f"no module of {trace.facts.workload} is a layer that Megatron-LM cuts",
            fix="use data or pipeline parallelism, or tensor_style gather",
        )
    if vocabulary:
        found |= _match(trace, VOCABULARY)
    facts = replace(trace.facts, tensor_split=found, tensor_split_by_name=True)
    return ModelGraph.of(trace).with_facts(facts)


def find_layers(trace: Trace) -> dict[str, str]:
    """Return the layers of a trace that Megatron-LM cuts, and how: module pattern to column or row."""
    return _match(trace, {**LAYERS, **split_adapters(LAYERS)})


def _match(trace: Trace, rules: Mapping[str, str]) -> dict[str, str]:
    modules = set(trace.operator_columns["module"].tolist())
    return {pattern: kind for pattern, kind in rules.items() if any(fnmatchcase(module, pattern) for module in modules)}


@partial(
    of_model,
    key=lambda plan: (plan.tensor, plan.tensor_style, plan.replication, plan.vocabulary_parallel, plan.expert_cut),
)
def prepare_split(trace: ModelGraph, plan: Plan) -> ModelGraph:
    """Return the trace with the module rules of a plan: its own by default, else Megatron-LM's by known names.

    Raises PlanError when the model has not what the plan splits.
    """
    if plan.tensor > 1 and (trace.facts.language_model or {}).get("fusion") == LIGER:
        raise PlanError(
            f"--fusion {LIGER} computes head and loss together, which no tensor-parallel rank can for its words alone",
            fix="use --fusion compile, or no tensor parallelism",
        )
    if plan.tensor > 1 and plan.tensor_style != TENSOR_STYLE:
        return with_rules(trace, find_rank_program(plan).find_rules(trace), {})
    found = _name_layers(trace, plan.tensor, plan.vocabulary_parallel)
    return leave_experts_whole(found) if plan.expert_cut < plan.tensor else found


@of_model
def _name_layers(trace: ModelGraph, degree: int, vocabulary: bool) -> ModelGraph:
    if degree == 1:
        return trace
    if not trace.facts.tensor_split and find_layers(trace):
        return split_like_megatron(trace, vocabulary=vocabulary)
    if not vocabulary:
        return trace
    found = find_vocabulary(trace, degree)
    rules = {**(trace.facts.tensor_split or {}), **dict.fromkeys(found.modules, "column")}
    return with_rules(trace, rules, dict.fromkeys(found.weights, found.padded_words / found.words))
