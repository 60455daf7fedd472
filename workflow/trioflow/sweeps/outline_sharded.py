"""Outlines of ``fully_shard``: the order of ``programs.sharded`` with sums, clocks for compute and communicator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trioflow.base.experiments import Plan
from trioflow.costmodel.interface import looks_at_rows
from trioflow.parallel.programs.sharded import cost_units
from trioflow.parallel.splits.parameters import Parameter, list_parameters
from trioflow.parallel.splits.sharding import EXPERTS_UNIT, build_units
from trioflow.parallel.splits.updates import place_parameters, predict_elementwise, upkeep_phase
from trioflow.sweeps.outline import Outline, style_of, sum_stages
from trioflow.sweeps.outline_parts import UnitWork
from trioflow.trace.store import pipeline_units

_KEEPS_UNTIL_END = ("gpipe", "looped-bfs")
"""Schedules that run all forwards before any backward, after whose first all units stay gathered."""


class Shard(NamedTuple):
    """What one unit of ``fully_shard`` takes beside its operators [s]; its parameters once gathered [bytes]."""

    gather_s: float = 0.0
    copy_out_s: float = 0.0
    accumulate_s: float = 0.0
    reduce_copy_s: float = 0.0
    scatter_s: float = 0.0
    whole_bytes: float = 0.0  # none of what nobody trains, which backward may not need


class Part(NamedTuple):
    """A piece of the model in order: its unit of ``fully_shard``, None where the root has it, and its work [s]."""

    shard: Shard | None
    forward_s: float
    backward_s: float


class StageTimes(NamedTuple):
    """What a pipeline's stage takes under ``fully_shard`` [s].

    ``forward_s``, ``backward_s``: of one micro-batch, waits for units given up included. ``behind_s``: reducing
    gradients behind the last one. ``first_s``: the first stage's wait for units that later stay.
    """

    forward_s: list[float]
    backward_s: list[float]
    behind_s: list[float]
    first_s: float


@dataclass
class _Clocks:
    """When compute and communicator are free, and when the last reduction has ended [s]."""

    compute_s: float = 0.0
    network_s: float = 0.0
    reduced_s: float = 0.0
    beside: bool = True

    def gather(self, shard: Shard, not_before_s: float) -> float:
        """Return when a unit's parameters have arrived."""
        if not self.beside:
            not_before_s = self.compute_s
        self.network_s = max(self.network_s, not_before_s) + shard.gather_s
        if not self.beside:
            self.compute_s = self.network_s = max(self.network_s, self.compute_s)
        return self.network_s

    def copy_out(self, shard: Shard, arrived_s: float) -> None:
        self.compute_s = max(self.compute_s, arrived_s) + shard.copy_out_s

    def reduce(self, shard: Shard, adds: bool = False) -> None:
        self.compute_s = max(self.compute_s, self.reduced_s) + shard.reduce_copy_s
        self.network_s = max(self.network_s, self.compute_s) + shard.scatter_s
        self.network_s += shard.accumulate_s * adds
        self.reduced_s = self.network_s
        if not self.beside:
            self.compute_s = self.reduced_s


def time_accumulated(outline: Outline, plan: Plan, work: UnitWork) -> float:
    """Return the forwards, backwards and exchanges of a plan without a pipeline [s]."""
    parts, root = _list_parts(outline, plan, work, 0, outline.units)
    clocks = _Clocks(beside=outline.traces[0].facts.device != "cpu")
    for number in range(plan.accumulate):
        reduces, adds = plan.sums_shards or number == plan.accumulate - 1, number > 0
        asked_s = _play_forward(clocks, parts, root)
        gathers = plan.sharding != "zero2"
        _play_backward(clocks, parts, gathers, asked_s, adds, reduces, plan.sums_shards)
        clocks.compute_s += root.accumulate_s * (adds and not plan.sums_shards)
        if reduces:
            clocks.reduce(root, adds and plan.sums_shards)
            clocks.compute_s = max(clocks.compute_s, clocks.reduced_s)
    return clocks.compute_s


def time_stages(
    outline: Outline, plan: Plan, work: UnitWork, begins: Sequence[int]
) -> StageTimes:  # fmt: skip
    """Return what the stages of a pipeline take, their gradients' sums left out."""
    found = StageTimes([], [], [], 0.0)
    first_s = 0.0
    for begin, end in itertools.pairwise(begins):
        parts, root = _list_parts(outline, plan, work, begin, end)
        plain_s = [sum(part.forward_s for part in parts), sum(part.backward_s for part in parts)]
        clocks = _Clocks(beside=outline.traces[0].facts.device != "cpu")
        _play_forward(clocks, parts, root)
        first_s = first_s or clocks.compute_s - plain_s[0]
        if plan.sharding != "zero2":
            inner = _Clocks(beside=clocks.beside)
            _play_forward(inner, parts, Shard())  # the root is gathered once
            plain_s[0] = inner.compute_s
        if plan.sharding != "zero2" and plan.schedule not in _KEEPS_UNTIL_END:
            clocks = _Clocks(beside=clocks.beside)
            _play_backward(clocks, parts, True, clocks.compute_s)
            plain_s[1] = clocks.compute_s
        behind = _Clocks()
        for shard in (root, *(part.shard for part in parts if part.shard)):
            behind.reduce(shard)
        found.forward_s.append(plain_s[0])
        found.backward_s.append(plain_s[1])
        found.behind_s.append(behind.reduced_s)
    return found._replace(first_s=first_s)


def size_whole(
    outline: Outline, plan: Plan, work: UnitWork, begins: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return the parameters and gradients that each stage holds whole behind a backward [bytes].

    Gradients lie in the format that they are reduced in, until the stage's last micro-batch.
    """
    sized = outline.recipe.reduce_bytes / outline.recipe.gradient_bytes
    gradients = sum_stages(outline.state_of(plan).gradient_bytes * sized, begins)
    parameters = []
    for begin, end in itertools.pairwise(begins):
        parts, root = _list_parts(outline, plan, work, begin, end)
        inner = (part.shard.whole_bytes for part in parts if part.shard)
        parameters.append(root.whole_bytes + sum(inner))
    return parameters, gradients


def _play_forward(clocks: _Clocks, parts: Sequence[Part], root: Shard) -> float:
    """Gather the root, then each unit beside the one before, two in flight at most; return when the last unit is there.

    The host is ahead, and asks for backward's first one then.
    """
    clocks.copy_out(root, clocks.gather(root, clocks.compute_s))
    copied_s = [0.0, clocks.compute_s]
    for part in parts:
        if part.shard:
            arrived_s = clocks.gather(part.shard, copied_s[-2])
            clocks.copy_out(part.shard, arrived_s)
            copied_s.append(clocks.compute_s)
        clocks.compute_s += part.forward_s
    return copied_s[-1]


def _play_backward(
    clocks: _Clocks,
    parts: Sequence[Part],
    gathers: bool,
    asked_s: float,
    adds: bool = False,
    reduces: bool = False,
    shards: bool = False,
) -> None:
    """Gather each unit while the one behind it computes; add up, whole or as ``shards``, and reduce what each has made."""
    coming = [part.shard for part in parts if part.shard] if gathers else []
    arrives_s = clocks.gather(coming[-1], asked_s) if coming else 0.0
    for part in reversed(parts):
        if part.shard and coming:
            clocks.copy_out(coming.pop(), arrives_s)
            if coming:
                arrives_s = clocks.gather(coming[-1], clocks.compute_s)
        clocks.compute_s += part.backward_s
        if part.shard:
            clocks.compute_s += part.shard.accumulate_s * (adds and not shards)
        if part.shard and reduces:
            clocks.reduce(part.shard, adds and shards)


def _list_parts(
    outline: Outline, plan: Plan, work: UnitWork, begin: int, end: int
) -> tuple[list[Part], Shard]:
    """Return the pieces of some of the model's units, and what their root takes."""
    key = ("shards", *style_of(plan), plan.shards, plan.pieces > 1, plan.sums_shards)
    inner, rest = outline.keep((*key, plan.data, plan.pipeline), _list_shards, outline, plan)
    here = [rest[unit] for unit in range(begin, end) if unit in rest]
    root = Shard(*(sum(times) for times in zip(Shard(), *here, strict=True)))
    names = list(pipeline_units(outline.traces[0]))
    if not names:  # blocks that only their parameters name share the work evenly
        shards: list[Shard | None] = [*inner.values()] or [None]
        each = [float(times_s.sum()) / len(shards) for times_s in (work.forward_s, work.backward_s)]
        return [Part(shard, *each) for shard in shards], root
    parts = [
        Part(inner.get(names[unit]), float(work.forward_s[unit]), float(work.backward_s[unit]))
        for unit in range(begin, end)
    ]
    return parts, root


def _list_shards(outline: Outline, plan: Plan) -> tuple[dict[str, Shard], dict[int, Shard]]:
    """Return what each inner unit takes, by its name, and what the root takes of each of the model's units."""
    trace = outline.prepared(outline.traces[0], plan)
    known: dict[tuple[str, tuple[int, ...], int], float] = {}

    def elementwise_s(name: str, sizes: Sequence[int], reads: int) -> float:
        key = (name, tuple(sizes), reads)
        if key not in known:
            found = predict_elementwise(outline.model, name, sizes, reads, upkeep_phase(trace))
            known[key] = float(found["time_s"].sum())
        return known[key]

    *inner, root = build_units(trace, plan.tensor, plan.expert_parts, plan.places_experts)
    at: dict[int, list[Parameter]] = {}
    placed = place_parameters(trace, outline.units_of(trace), {})
    unit_of = {
        p.name: min(where, default=0)
        for p, where in zip(list_parameters(trace), placed, strict=True)
    }
    for parameter in root.parameters:
        at.setdefault(unit_of[parameter.name], []).append(parameter)
    units = [*inner, *(replace(root, parameters=tuple(held)) for held in at.values())]
    if looks_at_rows(outline.model):  # asked for all sizes at once, it remembers each
        asked: dict[tuple[str, int], list[int]] = {}

        def note(name: str, sizes: Sequence[int], reads: int) -> float:
            asked.setdefault((name, reads), []).extend(sizes)
            return 0.0

        cost_units(units, plan, plan.pieces, note, trace)
        for (name, reads), sizes in asked.items():
            elementwise_s(name, sizes, reads)
    works = cost_units(units, plan, plan.pieces, elementwise_s, trace)
    shards = [
        Shard(
            outline.messages.data_s(plan, "all_gather", one.gathered_bytes, one.unit.experts),
            one.copy_out_s, one.accumulate_s, one.reduce_copy_s,
            outline.messages.data_s(plan, "reduce_scatter", one.reduced_bytes, one.unit.experts),
            float(one.gathered_bytes) if one.reduced_bytes else 0.0,
        )
        for one in works
    ]  # fmt: skip
    count, found = len(inner), dict[str, Shard]()
    for unit, shard in zip(inner, shards[:count], strict=True):
        # Experts go with the unit that they are inside.
        name = unit.name.removesuffix(EXPERTS_UNIT) if unit.experts else unit.name
        found[name] = Shard(*map(sum, zip(found.get(name, Shard()), shard, strict=True)))
    return found, dict(zip(at, shards[count:], strict=True))
