"""What tensor parallelism, Megatron's or of gathered outputs, makes of a trace: operators on shards, messages between.

Layers that can be split are known by their modules' names, and so is where a model meets its vocabulary
(`find_vocabulary`). References: M. Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3: columns, then rows, of
attention and feed-forward layers; token embedding and head by vocabulary.

Tokens reach experts as a router spreads them: equally, by a power law, or by shares that somebody measured.
`find_expert_layers` finds the layers of experts in a trace: those whose forward runs grouped products; `set_routing`
says who gets how much. Consecutive experts lie on one rank, and the ranks of an exchange wait for the one with most.
Ranks are kept alike: each layer takes as long on all as on its fullest rank, which is exact for time, since every
exchange waits for it, and a bound from above for a rank's memory and for what a rank computes alone.

The power law is that of AIConfigurator's tables of experts (``collector``, ``sample_power_law``): an expert's tokens x
have the density x ** -exponent between 1 and 0.8 times the tokens of the exchange, are scaled to what all experts get,
and no expert gets a token twice. Each layer is drawn by itself, by the seed. It describes inference: a router that is
trained to balance its loads stays near equal ones, so that a step under it is a bound.

Consecutive experts are what gates of benchmarks choose (NeMo Automodel's ``FakeBalancedGate``): token i has those from
i times its number of experts on. All get equally many, but a token's own lie on one or two ranks, to which it is handed on
once (``expert_domain``); where each copy travels by itself, as many bytes do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from trioflow.base.columns import Columns
from trioflow.base.errors import InputError, PlanError, TableError
from trioflow.base.experiments import Plan
from trioflow.base.input_files import read_text
from trioflow.base.plan_row import TENSOR_STYLE, find_rank_program, refuse_plan
from trioflow.costmodel.features import WORK, class_of_name, plain_operator_name
from trioflow.parallel.model_graph import ModelGraph, Operator, of_model
from trioflow.trace.language.sizes import LIGER, split_adapters
from trioflow.trace.store import Trace

BEFORE, AFTER, SUMMED = "before", "after", "summed"
TENSOR, CONTEXT, EXPERTS = "tensor", "context", "experts"
EXPERT_NODES, EXPERT_DOMAIN = "experts across domains", "experts in a domain"
EXPERT_SLICES = "slices of experts"
"""Groups of ranks that exchange something beside an operator: where tokens are handed on, where experts are cut by
another degree than the tensor degree."""
ATTENTION = "scaled_dot_product"
Shares = Mapping[int, float]
"""Optimizer operator to the part of its work that a rank does."""


class Exchange(Struct, frozen=True):
    """A collective of tensor-parallel ranks, or of ranks that share experts, beside one operator."""

    collective: str  # all_reduce, all_gather, reduce_scatter or all_to_all
    size_bytes: int  # the whole buffer, as in ``tables.TASKS``, for the traced batch [bytes]
    # Whether the buffer is copied into another order: `BEFORE` it leaves, `AFTER` it arrived, or not; or `SUMMED`
    # where each rank adds up the pieces that all handed on
    copied: str = ""
    # Part of the buffer that grows with the batch; a table of positions does not
    growing: float = 1.0
    group: str = TENSOR  # or one of those of experts: who takes part
    awaited: bool = False  # whether the host reads what arrives in forward before it launches more
    beside: int = -1  # operator that runs meanwhile, and behind which it is waited for
    blocks: int = 1  # that the operator is computed in while the buffer goes round piece by piece
    # In a stage, of each micro-batch: the buffer [bytes], and the time of the copy into another order [s], empty
    # where there is none
    sizes_bytes: tuple[int, ...] = ()
    copies_s: tuple[float, ...] = ()

    def scale(self, factor: float) -> int:
        """Return the buffer at so many times the traced batch [bytes]."""
        return round(self.size_bytes * (1 - self.growing + self.growing * factor))

    def copy_bytes(self, factor: float) -> int:
        """Return the buffer whose copy takes as long as what brings it into order, at so many times the batch [bytes]."""
        size, pieces = self.scale(factor), self.blocks
        # Every rank reads all pieces, and writes one.
        return size * (pieces + 1) // (2 * pieces) if self.copied == SUMMED else size


class SharedAttention(Struct, frozen=True):
    """An attention operator of ranks that share a sequence: one rank's tokens of the traced batch."""

    method: str  # one of ``plan_row.CONTEXT_METHODS``
    ranks: int  # that share it
    forward: int | None  # the forward operator, of a gradient
    # Queries (results, their gradients), keys, values [bytes]
    query_bytes: float
    key_bytes: float
    value_bytes: float

    @property
    def backward(self) -> bool:
        """Whether it is the gradient of an attention."""
        return self.forward is not None


class TensorSplit(Struct, eq=False):
    """What tensor parallelism does to the operators of a trace."""

    operators: Columns  # With the work of one shard
    # Operator to the exchanges right before and right after it
    before: dict[int, list[Exchange]] = field(default_factory=dict)
    after: dict[int, list[Exchange]] = field(default_factory=dict)
    # Optimizer operators that the framework dispatches on sharded parameters
    sharded_updates: set[int] = field(default_factory=set)
    # Parameters held whole whose gradients are sums over the ranks' tokens
    partial_gradients: frozenset[str] = frozenset()
    # Operators that the first rank alone runs: the loss of one process
    first_rank_only: frozenset[int] = frozenset()
    # Inputs that the first rank hands to all in every forward [bytes]
    input_bytes: tuple[int, ...] = ()
    # Attention operators of ranks that share a sequence, and the part of the time that a ring's first
    # block takes of each
    attentions: dict[int, SharedAttention] = field(default_factory=dict)
    first_blocks: dict[int, float] = field(default_factory=dict)
    gathered_bytes: int = 0  # parameters that no layer splits, gathered in each step [bytes]
    # Backward products that run in each other's place: the input's gradient, and then the weight's
    swapped: dict[int, int] = field(default_factory=dict)

    @property
    def exchanges(self) -> list[Exchange]:
        """All exchanges, those before operators first."""
        return [e for side in (self.before, self.after) for of_op in side.values() for e in of_op]

    def add(self, where: str, op_id: int, exchange: Exchange) -> None:
        """Put an exchange before or after an operator, behind those that are there."""
        (self.before if where == BEFORE else self.after).setdefault(op_id, []).append(exchange)


def kind_of_module(module: str, rules: Mapping[str, str]) -> str:
    """Return column, row or nothing for a module's path."""
    for pattern, kind in rules.items():
        if fnmatchcase(module, pattern):
            return kind
    return ""


def is_sharded(gradient: Mapping[str, Any], rules: Mapping[str, str]) -> bool:
    """Return whether a parameter is cut; a row split keeps its bias whole, added after the sum."""
    kind = kind_of_module(str(gradient["module"]), rules)
    return kind == "column" or (kind == "row" and str(gradient["name"]).endswith("weight"))


@of_model
def list_untrained(trace: ModelGraph) -> list[dict[str, Any]]:
    """Return the parameters that the step reads and makes no gradient of: entries as those of ``facts.gradients``.

    The tables say which storages are parameters and which module reads them first, the facts which names and shapes
    there are: a parameter's storage is the one of its shape that its module reads, else a module around it, else any.
    """
    gradients = {str(g["name"]) for g in trace.facts.gradients}
    owned = {int(g.get("parameter_storage_id", -1)) for g in trace.facts.gradients}
    readers: dict[int, str] = {}
    places: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    columns = (trace.storage, trace.category, trace.tensor_columns["module"].tolist(), trace.shape)
    for at, category, module, shape in zip(*columns, strict=True):
        if category == "parameter" and at not in owned:
            for place in (readers.setdefault(at, str(module)), _ANYWHERE):
                places.setdefault((place, shape), []).append(at)
    untrained: dict[str, int] = {}
    free = [p for p in trace.facts.parameters or [] if str(p["name"]) not in gradients]
    for depth in (1, None):
        for entry in (e for e in free if str(e["name"]) not in untrained):
            parts, shape = str(entry["name"]).split("."), tuple(entry["shape"])
            around = [".".join(parts[:n]) for n in range(len(parts) - 1, -1, -1)][:depth]
            known = [entry["storage_id"]] if "storage_id" in entry else []
            for place in (*around, *([] if depth else [_ANYWHERE])):
                known += places.get((place, shape), [])
            storage = next((s for s in known if s in readers), None)
            if storage is not None:
                untrained[str(entry["name"])] = storage
                del readers[storage]
    return [
        {
            "name": name,
            "module": name.rpartition(".")[0],
            "parameter_storage_id": untrained[name],
            "size_bytes": prod(entry["shape"]) * int(entry.get("elem_bytes", 4)),
        }
        for entry in free
        if (name := str(entry["name"])) in untrained
    ]


_ANYWHERE = "*"


@of_model
def count_heads(trace: ModelGraph) -> list[int]:
    """Return the numbers of heads that attentions have, of queries and keys, each once.

    From the model's configuration where captured, and shapes [batch, heads, tokens, size] that PyTorch's own attention
    reads.
    """
    configured = str((trace.facts.row or {}).get("heads", ""))
    counts = {*(trace.facts.attention_heads or ()), *map(int, [configured] * configured.isdigit())}
    for row in trace.forward:
        if ATTENTION in row.name:
            counts |= {shape[1] for shape in row.input_shapes[:3] if len(shape) == 4}
    return sorted(counts)


@of_model
def find_loss(trace: ModelGraph) -> frozenset[int]:
    """Return the forward operators behind the last one inside a module: the loss."""
    last = max((row.op_id for row in trace.forward if row.module), default=len(trace.rows))
    return frozenset(row.op_id for row in trace.forward if row.op_id > last)


def with_rules(trace: ModelGraph, rules: Mapping[str, str], padded: Mapping[int, float]) -> ModelGraph:
    """Return a trace whose facts say how its modules are split: pattern to column or row.

    ``padded``: storage of a parameter to how many times its rows grow, so that they divide among the ranks.
    """
    gradients = [
        {**g, "size_bytes": round(int(g["size_bytes"]) * padded.get(int(g["parameter_storage_id"]), 1.0))}
        for g in trace.facts.gradients
    ]
    storages = {g["name"]: int(g["parameter_storage_id"]) for g in (*gradients, *list_untrained(trace))}
    grown = {name: padded[at] for name, at in storages.items() if padded.get(at, 1.0) != 1.0}
    parameters = [
        {**p, "shape": [round(p["shape"][0] * grown[p["name"]]), *p["shape"][1:]], "storage_id": storages[p["name"]]}
        if p["name"] in grown
        else p
        for p in trace.facts.parameters or []
    ]
    facts = replace(trace.facts, tensor_split=dict(rules), gradients=gradients)
    if trace.facts.parameters is not None:
        facts = replace(facts, parameters=parameters)
    return trace.with_facts(facts)


def scale_work(operators: Columns, shares: Shares) -> Columns:
    """Return the operators with some that do a share of their work; KeyError for one that is not there."""
    if missing := [op for op in shares if not 0 <= op < operators.rows]:
        raise KeyError(f"no operators {missing}")
    return scale_operator_rows(
        operators, np.array(list(shares), dtype=np.intp), np.array(list(shares.values()), dtype=float)
    )


def scale_operator_rows(operators: Columns, rows: NDArray[np.intp], factors: NDArray[np.float64]) -> Columns:
    """Return the operators with factors on the work of some rows."""
    scaled = {name: operators[name].copy() for name in WORK}
    for cells in scaled.values():
        cells[rows] = np.ceil(cells[rows].astype(float) * factors).astype(np.int64)
    return operators.assign(**scaled)


_GROUPED = ("grouped_mm", "scaled_grouped_mm", "block_scaled_grouped_mm")
_CAST = "quantize"


class ExpertLayer(Struct, frozen=True):
    """One layer of experts, as operators of forward."""

    experts: int
    permute: int  # copies each token once an expert, sorted by expert
    products: tuple[int, ...]  # grouped products
    modules: frozenset[str]  # that hold the experts' parameters
    # Results of the copies and of the last product for the traced batch [bytes]
    rows_bytes: int
    made_bytes: int
    per_token: float  # copies of a token, one for each of its experts
    consecutive: bool = False  # whether these are neighbours (``CONSECUTIVE``)

    @property
    def inside(self) -> range:
        """Forward operators that run on the ranks of the experts."""
        return range(self.permute + 1, self.products[-1] + 1)


@of_model
def find_expert_layers(trace: ModelGraph) -> list[ExpertLayer]:
    """Return the layers of experts that are computed by grouped products, in the order of forward."""
    size, producer = trace.size, trace.tensor_columns["producer_op_id"].tolist()
    layers: dict[str, list[Operator]] = {}
    for row in trace.forward:
        if plain_operator_name(row.name)[0] in _GROUPED and row.weights and row.output_ids:
            layers.setdefault(row.module.rpartition(".")[0], []).append(row)
    copied = {layer: _look_through_casts(trace, rows[0].input_ids[0]) for layer, rows in layers.items()}
    return [
        ExpertLayer(
            next(shape[0] for shape in rows[0].input_shapes if len(shape) == 3),
            int(producer[copied[layer]]),
            tuple(row.op_id for row in rows),
            frozenset(row.module for row in rows),
            size[copied[layer]],
            size[rows[-1].output_ids[0]],
            size[copied[layer]] / max((size[i] for i in trace.rows[int(producer[copied[layer]])].input_ids), default=1),
            "consecutive" in (trace.facts.routing or {}),
        )
        for layer, rows in layers.items()
    ]


def _look_through_casts(trace: ModelGraph, tensor: int) -> int:
    """Return the tensor that experts' tokens were cast from: they travel as they are."""
    caster = trace.makers[tensor]
    return caster.input_ids[0] if caster and plain_operator_name(caster.name)[0] == _CAST else tensor


@of_model
def find_expert_modules(trace: ModelGraph) -> frozenset[str]:
    """Return the modules whose parameters are the experts'."""
    return frozenset().union(*(layer.modules for layer in find_expert_layers(trace)))


@of_model
def leave_experts_whole(trace: ModelGraph) -> ModelGraph:
    """Return a trace whose rules of tensor parallelism leave experts out: each works on a rank's own tokens."""
    experts, rules = find_expert_modules(trace), dict(trace.facts.tensor_split or {})
    known = (*trace.facts.gradients, *list_untrained(trace))
    others = [m for g in known if (m := str(g["module"])) not in experts]
    kept: dict[str, str] = {}
    for pattern, kind in rules.items():
        if any(fnmatchcase(module, pattern) for module in experts):  # dense blocks may fit it too
            kept |= {m: kind for m in others if fnmatchcase(m, pattern)}
        else:
            kept[pattern] = kind
    return trace.with_facts(replace(trace.facts, tensor_split=kept))


def check_experts(trace: Trace, plan: Plan) -> None:
    """Check that a plan's ranks can share a model's experts; PlanError when it has none, or they do not divide."""
    if plan.expert == 1:
        return
    counts = sorted({layer.experts for layer in find_expert_layers(trace)})
    none = f"workload {trace.facts.workload} has no experts that {plan.expert} ranks could share"
    fix = "leave expert parallelism out, or name a model with experts, such as mixtral-8x7b"
    degrees = {count: [str(n) for n in range(2, count + 1) if count % n == 0] for count in counts}
    uneven = (
        (
            count % plan.expert,
            f"{count} experts cannot be shared by {plan.expert} expert-parallel ranks",
            f"use an expert degree of {', '.join(some)}",
        )
        for count, some in degrees.items()
    )
    refuse_plan(plan, [(not counts, none, fix), *uneven])


BALANCED, CONSECUTIVE, POWER = "balanced", "consecutive", "power"
_LEAST, _MOST = 1.0, 0.8
"""Least tokens of an expert under the power law, and most of them over the tokens of an exchange."""
_Shares = Sequence[Sequence[float]]
"""Part of a layer's copies of tokens that each expert gets, by layer of experts; one entry for all layers alike."""


def read_routing(text: str, seed: int = 0) -> Mapping[str, Any] | None:
    """Return what ``trace.facts.routing`` says of a routing.

    It is balanced (None), consecutive, ``power:EXPONENT``, or a file of shares.

    The file has a row an expert: its share, or its count of tokens, behind its number, and before both the number of
    the layer of experts where layers differ. Raises InputError when it is none of them, or the file's numbers make no
    shares.
    """
    if text == BALANCED:
        return None
    if text == CONSECUTIVE:
        return {"said": "a benchmark's gate, consecutive ones to a token", CONSECUTIVE: True}
    kind, _, exponent = text.partition(":")
    if kind == POWER and not Path(text).exists():
        try:
            value = float(exponent)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise InputError(f"routing {text!r}: {exponent!r} is no exponent", fix="write power:1.2, for example")
        return {"said": f"a power law of exponent {value:g}, seed {seed}", "exponent": value, "seed": seed}
    try:
        return {"said": f"shares of {text}", "shares": _read_shares(text)}
    except InputError as error:
        if Path(text).exists():
            raise
        raise InputError(
            f"routing {text!r} is no file: {error.problem}",
            fix="give balanced, consecutive, power:EXPONENT, or a file of shares",
        ) from None


def _read_shares(file: str) -> list[list[float]]:
    """Return the shares of a file, by layer."""
    shares_of: dict[int, dict[int, float]] = {}
    for number, line in enumerate(read_text(file, InputError).splitlines(), 1):
        cells = line.replace(",", " ").split()
        if not cells or (number == 1 and not cells[0].replace(".", "").isdecimal()):
            continue
        try:
            *layer, expert = (int(cell) for cell in cells[:-1])
            share = float(cells[-1])
        except ValueError:
            layer, expert, share = [], -1, -1.0
        place = layer[0] if layer else 0
        of_layer = shares_of.setdefault(place, {})
        if len(layer) > 1 or expert < 0 or expert in of_layer or not 0 <= share < math.inf:
            raise TableError(
                f"{line!r:.60} is no new expert with its share",
                file=file,
                place=f"line {number}",
                fix="write a row an expert: LAYER EXPERT SHARE, or EXPERT SHARE for all layers",
            )
        of_layer[expert] = share
    shares = []
    for layer_number, of_layer in sorted(shares_of.items()):
        if sorted(of_layer) != list(range(len(of_layer))) or not sum(of_layer.values()):
            raise TableError(
                f"layer {layer_number}: {len(of_layer)} experts are not numbered from 0 on, or none gets anything",
                file=file,
                fix="name every expert of the layer once",
            )
        shares.append([of_layer[i] / sum(of_layer.values()) for i in range(len(of_layer))])
    if not shares:
        raise TableError("no shares of experts", file=file, fix="write a row an expert: EXPERT SHARE")
    return shares


def set_routing(trace: Trace, routing: Mapping[str, Any] | None) -> Trace:
    """Return a trace whose experts get tokens by a routing of `read_routing`."""
    if not routing:
        return trace
    if not find_expert_layers(trace):
        raise PlanError(f"a routing, and {trace.facts.workload} has no layers of experts", fix="leave it out")
    return trace.replace(replace(trace.facts, routing=routing))


@of_model
def spread_tokens(trace: ModelGraph, plan: Plan) -> list[NDArray[np.float64]]:
    """Return what each rank of an exchange gets, over their mean, by layer of experts [layers][ranks].

    Raises PlanError when shares are of another number of layers or experts.
    """
    layers, routing = find_expert_layers(trace), trace.facts.routing
    if not routing or CONSECUTIVE in routing or plan.expert == 1:
        return [np.ones(plan.expert)] * len(layers)
    shares = [_find_shares(trace, plan, routing, number, layer.experts) for number, layer in enumerate(layers)]
    return [one.reshape(plan.expert, -1).sum(axis=1) * plan.expert for one in shares]


def _find_shares(
    trace: ModelGraph, plan: Plan, routing: Mapping[str, Any], number: int, experts: int
) -> NDArray[np.float64]:
    """Return the part of its copies of tokens that each expert of a layer gets."""
    if "shares" in routing:
        given: _Shares = routing["shares"]
        layers = len(find_expert_layers(trace))
        shares = given[number if len(given) > 1 else 0] if len(given) in (1, layers) else []
        if len(shares) != experts:
            raise PlanError(
                f"plan {plan.plan}: shares of {len(given)} layers x {len(given[0])} experts, and the model has {layers} x {experts}",
                fix="give a share for each expert of each layer of experts, or of one for all",
            )
        return np.array(shares)
    model = trace.facts.language_model or {}
    if not model.get("experts_per_token"):
        raise PlanError(
            f"plan {plan.plan}: the trace does not say how many experts a token has",
            fix="name a language model with experts, or give a file of shares",
        )
    tokens = int(model["sequence"]) * trace.facts.batch // (plan.tensor * plan.context) * plan.expert
    seed = [int(routing["seed"]), number]
    drawn = draw_power_law(experts, tokens, float(routing["exponent"]), seed)
    return _limit_shares(drawn, 1 / int(model["experts_per_token"]))


def draw_power_law(experts: int, tokens: int, exponent: float, seed: Sequence[int]) -> NDArray[np.float64]:
    """Return the part of all copies of tokens that each expert gets by a power law, without a limit."""
    draws = np.random.default_rng(seed).random(experts)
    most, power = max(_MOST * tokens, 2 * _LEAST), 1 - exponent
    if abs(power) < 1e-9:
        drawn = _LEAST * (most / _LEAST) ** draws
    else:
        low, high = _LEAST**power, most**power
        drawn = (low + (high - low) * draws) ** (1 / power)
    return np.asarray(drawn / drawn.sum(), np.float64)


def _limit_shares(shares: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    """Return shares none of which is above the most; what is too much goes to the others as they have."""
    full = np.zeros(len(shares), dtype=bool)
    while (shares > most + 1e-12).any():
        full |= shares >= most
        rest = shares[~full].sum()
        left = 1 - most * full.sum()
        shares = np.where(full, most, shares * left / rest if rest else left / max((~full).sum(), 1))
    return shares


def describe_routing(trace: Trace, plan: Plan) -> list[str]:
    """Say how the tokens of a model's experts are taken to be spread over them, and over ranks."""
    if not find_expert_layers(trace):
        return []
    routing = trace.facts.routing
    if not routing:
        text = "assumes perfectly balanced routing and no dropped tokens (--routing)"
        whole = f"{text}; each data-parallel replica holds or gathers all"
        return [text if plan.expert > 1 else whole]
    text = f"experts get tokens by {routing['said']}; none is dropped"
    if plan.expert == 1:
        return [f"{text}; a rank holds or gathers all, and how they share its tokens changes nothing here"]
    if CONSECUTIVE in routing:
        return [f"{text}; every expert gets equally many"]
    bound = ", a bound: a router that is trained to balance its loads stays near --routing balanced"
    text += bound * ("exponent" in routing)
    loads = np.array(spread_tokens(trace, plan))
    most, least = loads.max(axis=1), loads.min(axis=1)
    return [
        f"{text}; of {plan.expert} ranks the fullest gets {most.mean():.2f} times the mean (by layer {most.min():.2f} to"
        f" {most.max():.2f}), the emptiest {least.mean():.2f} times; each layer takes as long, and its memory, as on its"
        " fullest rank"
    ]


class Vocabulary(Struct, frozen=True):
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
    statistics = {row.op_id: count for row, count in zip(behind, counts, strict=True) if count}
    if sum(statistics.values()) < 3:
        raise PlanError(
            "vocabulary parallelism: no cross entropy follows the head in this trace",
            fix="leave vocabulary_parallel out",
        )
    return statistics


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
    layers = find_layers(trace)
    if not layers:
        raise PlanError(
            f"no module of {trace.facts.workload} is a layer that Megatron-LM cuts",
            fix="use data or pipeline parallelism, or tensor_style gather",
        )
    if vocabulary:
        layers = layers | _match(trace, VOCABULARY)
    facts = replace(trace.facts, tensor_split=layers, tensor_split_by_name=True)
    return ModelGraph.of(trace).with_facts(facts)


@of_model
def find_layers(trace: ModelGraph) -> dict[str, str]:
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
    layers = _name_layers(trace, plan.tensor, plan.vocabulary_parallel)
    return leave_experts_whole(layers) if plan.expert_cut < plan.tensor else layers


@of_model
def _name_layers(trace: ModelGraph, degree: int, vocabulary: bool) -> ModelGraph:
    if degree == 1:
        return trace
    if not trace.facts.tensor_split and find_layers(trace):
        return split_like_megatron(trace, vocabulary=vocabulary)
    if not vocabulary:
        return trace
    vocabulary_split = find_vocabulary(trace, degree)
    rules = {**(trace.facts.tensor_split or {}), **dict.fromkeys(vocabulary_split.modules, "column")}
    return with_rules(
        trace, rules, dict.fromkeys(vocabulary_split.weights, vocabulary_split.padded_words / vocabulary_split.words)
    )
