"""Transformers by their modules' names: layers that can be split, and where the model meets its tokens.

References: M. Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3: columns, then rows, of attention and
feed-forward layers; token embedding and head by vocabulary.

Tensor parallelism of any layers by their outputs, as the library ``tensor_parallel`` does it.

Every linear, convolution and embedding layer is split by its outputs, which an all-gather makes whole; what lies
between runs whole on every rank. The gradient of a layer's whole input is one rank's part of a sum: the gather's
backward, a reduce-scatter, adds up and leaves each rank its outputs' gradient. Grouped convolutions, and a head that
shares an embedding's weight, are split by inputs and summed by an all-reduce, in backward as well.

Parameters that no layer splits are shared out too: one all-gather a step, one reduce-scatter after backward. One
process drives all ranks, its first one hands out the inputs in every forward and alone computes the loss.

The library's configurations for some transformers, column and row splits, are Megatron's (``tensor_parallel``); this is
its default. Linear layers are recognized by their operators: products with a parameter. Release 2.0.0 shares unsplit
parameters out in its class ``TensorParallel``; its function ``tensor_parallel`` on request.

References: BlackSamorez/tensor_parallel (2023-08): ``config.py`` (default configuration), ``communications.py``
(AllGather with ReduceScatter as backward), ``sharding.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.costmodel.features import class_of_name, plain_name
from trioflow.parallel.reference import WORK
from trioflow.parallel.remembered import remembered, tensor_bytes
from trioflow.parallel.splits.pipeline import coalesce_broadcasts
from trioflow.parallel.splits.routing import leave_experts_whole
from trioflow.parallel.splits.tensor_split import (
    AFTER,
    BEFORE,
    Exchange,
    TensorSplit,
    cut_row,
    find_loss,
    find_weight,
    is_lookup,
    kind_of_module,
    list_inputs,
    list_untrained,
    with_rules,
)
from trioflow.tables import records
from trioflow.trace.language.sizes import LIGER, split_adapters
from trioflow.trace.store import Trace

OUTPUT, _INPUT = "output", "input"
_LAYERS = ("gemm", "convolution", "embedding")


@dataclass(frozen=True)
class _GatheredLayer:
    """A layer that is split; gathers pad shards to equal sizes.

    A grouped convolution is split inside each group, so a depthwise one is whole on the first rank; its bias, and that
    of a head with an embedding's weight, stays whole everywhere.
    """

    op_id: int  # its forward operator
    module: str  # its module
    split: str  # output or input: what its ranks share
    # Storage and shape of its weight
    weight: int
    shape: tuple[int, ...]
    # Storages of the parameters that are cut, and of all else that it reads
    parameters: frozenset[int]
    inputs: frozenset[int]
    channels: int  # what is shared: channels of its output or its input
    # Its output for the traced batch [bytes], and the part of it that grows with the batch
    output_bytes: int
    growing: float

    def exchange(self, name: str, degree: int) -> Exchange:
        """Return a collective over its output; gathers and scatters bring it into order."""
        if name == "all_reduce":
            return Exchange(name, self.output_bytes, growing=self.growing)
        padded = round(self.output_bytes * self.part(degree) * degree)
        copied = AFTER if name == "all_gather" else BEFORE
        return Exchange(name, padded, copied, growing=self.growing)

    def part(self, degree: int) -> float:
        """Return the largest rank's part; channels that do not divide make one more of them."""
        return -(-self.channels // degree) / self.channels


def find_gathered_layers(trace: Trace) -> list[_GatheredLayer]:
    """Return the layers that are split by outputs or by inputs, in the order of forward."""
    storage, category = (trace.tensors[c].tolist() for c in ("storage_id", "category"))
    size, loss = tensor_bytes(trace), find_loss(trace)
    rows = [
        row for row in records(trace.operators)
        if row["phase"] == "forward" and row["op_id"] not in loss
        and class_of_name(str(row["name"])) in _LAYERS and find_weight(row, category) is not None
    ]  # fmt: skip
    looked_up = {
        storage[row["input_ids"][find_weight(row, category) or 0]]
        for row in rows
        if is_lookup(row, category)
    }
    found = []
    for row in rows:
        place = find_weight(row, category)
        if place is None or not row["output_ids"]:
            continue
        weight = storage[row["input_ids"][place]]
        split, channels = _choose_split(row, place, weight in looked_up)
        parameters = {storage[i] for i in row["input_ids"] if category[i] == "parameter"}
        parameters = parameters if split == OUTPUT else {weight}
        found.append(
            _GatheredLayer(
                int(row["op_id"]), str(row["module"]), split, weight,
                tuple(int(n) for n in row["input_shapes"][place]), frozenset(parameters),
                frozenset({storage[i] for i in row["input_ids"]} - parameters), channels,
                size[row["output_ids"][0]],
                int(row["batch_write_bytes"]) / int(row["write_bytes"]) if row["write_bytes"] else 1.0,
            )
        )  # fmt: skip
    return found


def _choose_split(row: Mapping[str, Any], place: int, looked_up: bool) -> tuple[str, int]:
    """Return whether a layer's outputs or inputs are shared, and how many channels these have."""
    shapes, output = row["input_shapes"], row["output_shapes"][0]
    kind = class_of_name(str(row["name"]))
    if kind == "convolution":
        data, weight = shapes[place - 1], shapes[place]
        # A transposed one's weight names its inputs first.
        transposed = "transpose" in str(row["name"])
        whole = int(output[1] if transposed else data[1])
        if weight[1] == whole:
            return OUTPUT, int(output[1])
        return _INPUT, int(data[1]) * int(weight[1]) // whole
    if kind == "gemm" and looked_up:
        return _INPUT, int(shapes[place][-1])
    return OUTPUT, int(output[-1])


def gather_rules(trace: Trace) -> dict[str, str]:
    """Return column or row by split module: a weight's first dimension, the second of an embedding or a head tied to it."""
    category = trace.tensors["category"].tolist()
    lookups = {
        int(row["op_id"])
        for row in records(trace.operators, "op_id", "name", "phase", "input_ids")
        if row["phase"] == "forward" and is_lookup(row, category)
    }
    layers = find_gathered_layers(trace)
    by_rows = {layer.weight for layer in layers if layer.op_id in lookups}
    kinds = {layer.weight: "row" if layer.weight in by_rows else "column" for layer in layers}
    rules = {layer.module: kinds[layer.weight] for layer in layers}
    for gradient in (*trace.facts.gradients, *list_untrained(trace)):
        owned = kinds.get(int(gradient.get("parameter_storage_id", -1)))
        if owned:
            rules.setdefault(str(gradient["module"]), owned)
    return rules


class _Cutter:
    """Writes one rank's work into the operators of split layers, and places their exchanges."""

    def __init__(self, trace: Trace, degree: int, layers: list[_GatheredLayer]) -> None:
        self.degree = degree
        self.layers = {layer.op_id: layer for layer in layers}
        self.storage, self.category = (
            trace.tensors[c].tolist() for c in ("storage_id", "category")
        )
        self.size = tensor_bytes(trace)
        self.shape = [tuple(shape) for shape in trace.tensors["shape"]]
        self.split = TensorSplit(trace.operators.copy())
        self.begun: set[int] = set()

    def visit(self, row: dict[str, Any]) -> None:
        """Take one operator in."""
        if row["phase"] == "forward" and row["op_id"] in self.layers:
            self._forward(row, self.layers[row["op_id"]])
        elif row["phase"] == "backward" and row["forward_op_id"] in self.layers:
            self._backward(row, self.layers[row["forward_op_id"]])

    def _forward(self, row: dict[str, Any], layer: _GatheredLayer) -> None:
        part, whole = layer.part(self.degree), layer.split == _INPUT
        cut_row(self.split.operators, row, part, {
            "read_bytes": self._share(row["input_ids"], row["read_bytes"], part, layer, cut_data=whole),
            "write_bytes": 1.0 if whole else part,
        })  # fmt: skip
        self.split.add(
            AFTER, layer.op_id, layer.exchange("all_reduce" if whole else "all_gather", self.degree)
        )

    def _backward(self, row: dict[str, Any], layer: _GatheredLayer) -> None:
        if layer.op_id not in self.begun:
            self.begun.add(layer.op_id)
            whole = layer.split == _INPUT
            name = "all_reduce" if whole else "reduce_scatter"
            self.split.add(BEFORE, int(row["op_id"]), layer.exchange(name, self.degree))
        part = layer.part(self.degree)
        makes = [i for i in row["output_ids"] if self._is_gradient(i, layer)]
        reads = any(self.storage[i] in layer.parameters for i in row["input_ids"])
        if not makes and not reads:  # sums of what several readers of one tensor found
            return
        cut_row(self.split.operators, row, part, {
            "read_bytes": self._share(row["input_ids"], row["read_bytes"], part, layer, back=True),
            "write_bytes": self._share(
                row["output_ids"], row["write_bytes"], part, layer, cut_data=layer.split == _INPUT
            ),
        })  # fmt: skip

    def _is_gradient(self, index: int, layer: _GatheredLayer) -> bool:
        """Return whether a tensor is a parameter's gradient, or a part of a shared weight's."""
        if self.category[index] == "gradient":
            return True
        makes = self.category[index] == "activation" and self.storage[index] not in layer.inputs
        return makes and self.shape[index] in (layer.shape, layer.shape[::-1])

    def _share(
        self, indices: list[int], total: int, part: float, layer: _GatheredLayer,
        cut_data: bool = False, back: bool = False,
    ) -> float:  # fmt: skip
        """Return the part of some tensors' bytes that one rank moves.

        Cut are parameters and their gradients, input and its gradient of a layer split by inputs, and the incoming
        gradient of one split by outputs.
        """
        by_input = layer.split == _INPUT
        moved = whole = 0.0
        for index in indices:
            size = self.size[index]
            cut = cut_data and self.category[index] != "parameter"
            if self.storage[index] in layer.parameters or self._is_gradient(index, layer):
                cut = True
            elif back:
                cut = (self.storage[index] in layer.inputs) == by_input
            moved += size * (part if cut else 1.0)
            whole += size
        return moved / whole if whole and total else 1.0


def split_gathered(trace: Trace, degree: int) -> TensorSplit:
    """Return one rank's operators when all layers' outputs are split and gathered; PlanError when there is no such layer."""
    layers = find_gathered_layers(trace)
    if not layers:
        raise PlanError(
            f"tensor degree {degree}: the trace shows no linear, convolution or embedding layer to split",
            fix="use data or pipeline parallelism, or a trace with its tensors",
        )
    cutter = _Cutter(trace, degree, layers)
    rows = records(trace.operators)
    for row in rows:
        cutter.visit(row)
        if row["phase"] == "optimizer" and any(len(shape) for shape in row["input_shapes"]):
            part = 1.0 / degree
            cut_row(cutter.split.operators, row, part, dict.fromkeys(WORK, part))
    split, loss = cutter.split, find_loss(trace)
    of_loss = {
        int(r["op_id"]) for r in rows if r["phase"] == "backward" and r["forward_op_id"] in loss
    }
    split.first_rank_only = frozenset(loss | of_loss)
    model = [int(r["op_id"]) for r in rows if r["phase"] == "forward" and r["op_id"] not in loss]
    split.input_bytes = tuple(coalesce_broadcasts(list(list_inputs(trace, model).values())))
    cut = {storage for layer in layers for storage in layer.parameters | layer.inputs}
    split.gathered_bytes = sum(
        int(g["size_bytes"])
        for g in trace.facts.gradients
        if int(g.get("parameter_storage_id", -1)) not in cut
    )
    return split


_COLUMNS = ("op_id", "name", "phase", "module", "input_ids", "input_shapes", "output_shapes")


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

    @property
    def padding(self) -> float:
        """How many times as large the weight is with its padding."""
        return self.padded_words / self.words


@remembered
def list_lengths(trace: Trace) -> frozenset[int]:
    """Return the lengths of what a step's inputs look up: the tokens of a sample."""
    category = trace.tensors["category"].tolist()
    return frozenset(
        int(row["input_shapes"][place][-1])
        for row in records(trace.operators, "name", "phase", "input_ids", "input_shapes")
        if row["phase"] == "forward" and is_lookup(row, category)
        for place, index in enumerate(row["input_ids"])
        if category[index] == "input" and row["input_shapes"][place]
    )


def check_tokens(trace: Trace, degree: int) -> None:
    """Check that the tokens of a sample can be shared; PlanError when none are looked up, or they do not divide."""
    lengths = list_lengths(trace)
    if not lengths:
        raise PlanError(
            "sequence parallelism: the model of this trace looks no tokens up",
            fix="leave sequence_parallel out",
        )
    for length in sorted(lengths):
        if length % degree:
            raise PlanError(
                f"sequence parallelism: {length} tokens a sample cannot be shared by {degree} ranks",
                fix=f"use a sequence that is a multiple of {degree}",
            )


def find_head(trace: Trace) -> int | None:
    """Return the last product with a parameter in forward, unless that is a split layer's; None without one."""
    category = trace.tensors["category"].tolist()
    rules, loss = (trace.facts.tensor_split or {}), find_loss(trace)
    found = None
    for row in records(trace.operators, *_COLUMNS):
        if row["phase"] != "forward" or row["op_id"] in loss:
            continue
        if class_of_name(str(row["name"])) == "gemm" and find_weight(row, category) is not None:
            found = row
    if found is not None and kind_of_module(str(found["module"]), rules) != "row":
        return int(found["op_id"])
    return min(loss, default=None)


@remembered
def find_vocabulary(trace: Trace, degree: int) -> Vocabulary:
    """Return the layers that vocabulary parallelism splits; rows are added until ``degree`` divides them.

    Raises PlanError when there is no embedding of the step's tokens, no head of as many words, or no loss.
    """
    category = trace.tensors["category"].tolist()
    storage = trace.tensors["storage_id"].tolist()
    forward = [r for r in records(trace.operators, *_COLUMNS) if r["phase"] == "forward"]
    lookups = [
        row for row in forward
        if is_lookup(row, category) and any(category[i] == "input" for i in row["input_ids"])
    ]  # fmt: skip
    places = {int(row["op_id"]): find_weight(row, category) for row in forward}
    tables = {
        storage[row["input_ids"][places[row["op_id"]]]]: row["input_shapes"][places[row["op_id"]]]
        for row in lookups
        if places[row["op_id"]] is not None
    }
    words = max((int(shape[0]) for shape in tables.values()), default=0)
    heads = [
        row for row in forward
        if class_of_name(str(row["name"])) == "gemm" and places[row["op_id"]] is not None
        and words and row["output_shapes"] and row["output_shapes"][0][-1:] == [words]
    ]  # fmt: skip
    if not heads:
        missing = "head that scores the words" if words else "embedding of its tokens"
        raise PlanError(
            f"vocabulary parallelism: the model of this trace has no {missing}",
            fix="leave vocabulary_parallel out",
        )
    head = heads[-1]
    chosen = [
        row for row in lookups
        if places[row["op_id"]] is not None
        and int(row["input_shapes"][places[row["op_id"]]][0]) == words
    ]  # fmt: skip
    weights = [storage[row["input_ids"][places[row["op_id"]]]] for row in (*chosen, head)]
    statistics = _find_statistics(forward, int(head["op_id"]))
    return Vocabulary(
        _list_modules(trace, [*chosen, head], set(weights)),
        tuple(dict.fromkeys(weights)), words, -(-words // degree) * degree, statistics,
        prod(head["output_shapes"][0][:-1]),
    )  # fmt: skip


def has_vocabulary(trace: Trace, degree: int) -> bool:
    """Return whether tensor-parallel ranks can share the vocabulary of a trace's model."""
    if not trace.facts.tensor_split and find_layers(trace):
        return bool(_find_vocabulary_layers(trace))
    try:
        find_vocabulary(trace, degree)
    except PlanError:
        return False
    return True


def _list_modules(trace: Trace, rows: list[dict[str, Any]], weights: set[int]) -> tuple[str, ...]:
    """Return the modules that use the weights, the owner of a tied one included."""
    owners = [
        str(g["module"])
        for g in (*trace.facts.gradients, *list_untrained(trace))
        if int(g.get("parameter_storage_id", -1)) in weights
    ]
    return tuple(dict.fromkeys([*(str(row["module"]) for row in rows), *owners]))


def _find_statistics(forward: list[dict[str, Any]], head: int) -> dict[int, int]:
    """Return how many all-reduces of one number a token follow each operator of the loss; PlanError without a loss of words."""
    found: dict[int, int] = {}
    for row in forward:
        if row["op_id"] <= head:
            continue
        name = str(row["name"])
        if plain_name(name)[0].startswith("cross_entropy"):
            found[int(row["op_id"])] = 3  # maximum, sum, predicted logit
        elif class_of_name(name) == "softmax":
            found[int(row["op_id"])] = 2
        elif class_of_name(name) == "loss":
            found[int(row["op_id"])] = 1
    if sum(found.values()) < 3:
        raise PlanError(
            "vocabulary parallelism: no cross entropy follows the head in this trace",
            fix="leave vocabulary_parallel out",
        )
    return found


LAYERS: Mapping[str, str] = {
    # GPT-2
    "*.attn.c_attn": "column", "*.attn.c_proj": "row",
    "*.mlp.c_fc": "column", "*.mlp.c_proj": "row",
    # BERT; ViT, whose attention is a module inside a module
    **{f"*.attention.self.{part}": "column" for part in ("query", "key", "value")},
    **{f"*.attention.attention.{part}": "column" for part in ("query", "key", "value")},
    "*.attention.output.dense": "row",
    "*.intermediate.dense": "column", "*.output.dense": "row",
    # Llama, Mistral, Qwen2; Whisper
    **{f"*.{attention}.{part}_proj": "column" for attention in ("self_attn", "encoder_attn", "attention") for part in "qkv"},
    "*.self_attn.o_proj": "row", "*.attention.o_proj": "row", "*.self_attn.out_proj": "row", "*.encoder_attn.out_proj": "row",
    "*.mlp.gate_proj": "column", "*.mlp.up_proj": "column", "*.mlp.down_proj": "row",
    "*.layers.*.fc1": "column", "*.layers.*.fc2": "row",
}  # fmt: skip
"""Modules of transformers' models, by the names that their families share, of any size."""
VOCABULARY: Mapping[str, str] = {
    "transformer.wte": "row", "*.embed_tokens": "row", "lm_head": "column", "proj_out": "column",
    "bert.embeddings.word_embeddings": "row", "cls.predictions.decoder": "column",
}  # fmt: skip
"""Each rank holds a part of the vocabulary: the embedding's results are summed, the head's stay apart."""


def split_like_megatron(trace: Trace, *, vocabulary: bool = True) -> Trace:
    """Return the trace with the layers that Megatron-LM cuts named in its facts; PlanError when none is known."""
    found = find_layers(trace)
    if not found:
        raise PlanError(
            f"no module of {trace.facts.workload} is a layer that Megatron-LM cuts",
            fix="use data or pipeline parallelism, or tensor_style gather",
        )
    if vocabulary:
        found |= _find_vocabulary_layers(trace)
    return Trace(
        trace.operators,
        trace.tensors,
        replace(trace.facts, tensor_split=found, tensor_split_by_name=True),
    )


def find_layers(trace: Trace) -> dict[str, str]:
    """Return the layers of a trace that Megatron-LM cuts, and how: module pattern to column or row."""
    return _match(trace, {**LAYERS, **split_adapters(LAYERS)})


def _find_vocabulary_layers(trace: Trace) -> dict[str, str]:
    """Return the embeddings and heads of a trace that Megatron-LM cuts by vocabulary, and how."""
    return _match(trace, VOCABULARY)


def _match(trace: Trace, rules: Mapping[str, str]) -> dict[str, str]:
    modules = set(trace.operators["module"])
    return {
        pattern: kind
        for pattern, kind in rules.items()
        if any(fnmatchcase(module, pattern) for module in modules)
    }


def prepare_split(trace: Trace, plan: Plan) -> Trace:
    """Return the trace with the module rules of a plan: its own by default, else Megatron-LM's by known names.

    Raises PlanError when the model has not what the plan splits.
    """
    if plan.tensor > 1 and (trace.facts.language_model or {}).get("fusion") == LIGER:
        raise PlanError(
            f"--fusion {LIGER} computes head and loss together, which no tensor-parallel rank can for its words alone",
            fix="use --fusion compile, or no tensor parallelism",
        )
    found = _prepare_split(trace, plan.tensor, plan.tensor_style, plan.vocabulary_parallel)
    return leave_experts_whole(found) if plan.expert_cut < plan.tensor else found


@remembered
def _prepare_split(trace: Trace, degree: int, style: str, vocabulary: bool) -> Trace:
    if degree > 1 and style == "gather":
        return with_rules(trace, gather_rules(trace), {})
    if degree == 1:
        return trace
    if not trace.facts.tensor_split and find_layers(trace):
        return split_like_megatron(trace, vocabulary=vocabulary)
    if not vocabulary:
        return trace
    found = find_vocabulary(trace, degree)
    rules = {**(trace.facts.tensor_split or {}), **dict.fromkeys(found.modules, "column")}
    return with_rules(trace, rules, dict.fromkeys(found.weights, found.padding))
