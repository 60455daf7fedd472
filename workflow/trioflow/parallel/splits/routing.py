"""How a router spreads tokens over experts: equally, by a power law, or by shares that somebody measured.

`find_expert_layers` finds the layers of experts in a trace: those whose forward runs grouped products. `set_routing` is
the door. Which rank gets how much follows from that: consecutive experts lie on one rank, and the ranks of an exchange
wait for the one with most. Ranks are kept alike: each layer takes as long on all as on its fullest rank, which is exact
for time, since every exchange waits for it, and a bound from above for a rank's memory and for what a rank computes
alone.

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
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.errors import InputError, PlanError, TableError
from trioflow.base.input_files import read_text
from trioflow.base.plan_row import refuse_plan
from trioflow.costmodel.features import plain_operator_name
from trioflow.parallel.model_graph import ModelGraph, Operator, of_model
from trioflow.parallel.splits.tensor_split import list_untrained
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    from trioflow.base.experiments import Plan


_GROUPED = ("grouped_mm", "scaled_grouped_mm", "block_scaled_grouped_mm")
_CAST = "quantize"


@dataclass(frozen=True)
class ExpertLayer:
    """One layer of experts, as operators of forward."""

    experts: int
    permute: int  # copies each token once an expert, sorted by expert
    products: tuple[int, ...]  # grouped products
    modules: frozenset[str]  # that hold the experts' parameters
    # Results of the copies and of the last product for the traced batch [bytes]
    rows_bytes: int
    made_bytes: int
    per_token: float  # copies of a token, one for each of its experts
    consecutive: bool = False  # whether these are neighbours (``routing.CONSECUTIVE``)

    @property
    def inside(self) -> range:
        """Forward operators that run on the ranks of the experts."""
        return range(self.permute + 1, self.products[-1] + 1)


@of_model
def find_expert_layers(trace: ModelGraph) -> list[ExpertLayer]:
    """Return the layers of experts that are computed by grouped products, in the order of forward."""
    size, producer = trace.size, trace.tensor_columns["producer_op_id"].tolist()
    found: dict[str, list[Operator]] = {}
    for row in trace.forward:
        if plain_operator_name(row.name)[0] in _GROUPED and row.weights and row.output_ids:
            found.setdefault(row.module.rpartition(".")[0], []).append(row)
    copied = {layer: _look_through_casts(trace, rows[0].input_ids[0]) for layer, rows in found.items()}
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
        for layer, rows in found.items()
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
    found: dict[int, dict[int, float]] = {}
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
        held = found.setdefault(place, {})
        if len(layer) > 1 or expert < 0 or expert in held or not 0 <= share < math.inf:
            raise TableError(
                f"{line!r:.60} is no new expert with its share",
                file=file,
                place=f"line {number}",
                fix="write a row an expert: LAYER EXPERT SHARE, or EXPERT SHARE for all layers",
            )
        held[expert] = share
    shares = []
    for layer_number, held in sorted(found.items()):
        if sorted(held) != list(range(len(held))) or not sum(held.values()):
            raise TableError(
                f"layer {layer_number}: {len(held)} experts are not numbered from 0 on, or none gets anything",
                file=file,
                fix="name every expert of the layer once",
            )
        shares.append([held[i] / sum(held.values()) for i in range(len(held))])
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
