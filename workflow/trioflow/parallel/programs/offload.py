"""What lies in the host's memory: the optimizer with its state, or activations between their uses.

``optimizer``: gradients go to the host in a stream ``offload`` as soon as they are final (a bucket once it is reduced,
a sharded unit once scattered). The host updates all at once, and the parameters come back.

``activations``: what a unit keeps for backward goes to the host after its forward, beside the next unit's, and comes
back beside the backward of the unit behind it. Two units' are on the device at any time, so the last two never leave
it.

The host updates as one fused operator: parameters, gradients and states read once, parameters and states written once.
Copies run at the rate of a rank's own link, in both directions at once; that ranks may share the host's memory is in
the platform's rate or nowhere.

References: J. Ren et al., ZeRO-Offload, arXiv 2101.06840; activations: PyTorch ``torch.autograd.graph.save_on_cpu``,
here overlapped as in M. Rhu et al., vDNN, arXiv 1602.08124.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from trioflow.base.columns import ABSENT, Columns
from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import refuse_plan
from trioflow.parallel.backward import list_units
from trioflow.parallel.memory.profile import build_storage_table
from trioflow.parallel.model_graph import ModelGraph
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    from trioflow.parallel.programs.builder import RankProgram

UNITS_ON_DEVICE = 2
"""Units whose activations are on the device at one time."""


class UnitActivations(Struct, frozen=True):
    """What one unit keeps for backward, and where in the step that begins and ends."""

    # Its first and last forward operator
    begins: int
    ends: int
    # What it keeps for the traced batch, of one rank: the part that stays with another batch and
    # the part that grows [bytes]
    fixed_bytes: float
    growing_bytes: float


class OffloadedActivations(Struct, frozen=True):
    """Units that keep something, in the order of forward, and whose backward each operator is."""

    # All units that keep anything; the last `UNITS_ON_DEVICE` of them stay
    units: tuple[UnitActivations, ...]
    unit_of: dict[int, int]  # backward operator to the unit that it belongs to

    def leaves(self, unit: int) -> bool:
        """Return whether a unit's activations leave the device."""
        return 0 <= unit < len(self.units) - UNITS_ON_DEVICE


_LINK_BANDWIDTH, _LINK_LATENCY = "host_link_bandwidth_bytes_per_s", "host_link_latency_s"
_UPDATE_RATE = "host_update_bytes_per_s"
"""Rates of a platform's ``host`` that offloading needs; the latency may be left out."""
HOST_UPDATE = "optimizer on the host"
"""Name of the task that updates all parameters of a rank there."""


def check_host(plan: Plan, host: Mapping[str, float]) -> None:
    """Check that a platform gives the host's rates that a plan needs; PlanError when not."""
    needed = {"none": [], "activations": [_LINK_BANDWIDTH]}.get(plan.offload, [_LINK_BANDWIDTH, _UPDATE_RATE])
    missing = " and ".join(name for name in needed if not host.get(name))
    fix = "add it to the platform file, with its source, or use another platform"
    refuse_plan(plan, [(missing, f"offload {plan.offload} needs {missing} of the platform's host", fix)])


def _copy_s(rank: RankProgram, size_bytes: float) -> float:
    """Return the time of a copy over a rank's own link [s]."""
    host = rank.program.host
    return host.get(_LINK_LATENCY, 0.0) + size_bytes / host[_LINK_BANDWIDTH]


def size_update(trace: Trace, parameter_bytes: float) -> float:
    """Return what the host reads and writes to update some parameters, which are one rank's [bytes]."""
    table = build_storage_table(trace, trace.operator_columns)
    whole = float(table.bytes[table.category == "parameter"].sum())
    state = float(table.bytes[(table.category == "optimizer_state") & ~table.made].sum())
    return parameter_bytes * (3.0 + 2.0 * (state / whole if whole else 0.0))


def plan_activations(trace: ModelGraph, operators: Columns) -> OffloadedActivations:
    """Return what each unit keeps for backward; what several read belongs to the last, which comes first in backward.

    Raises PlanError when the trace does not say what the model's units are.
    """
    regions = list_units(trace)
    if not regions:
        raise PlanError(
            f"offload activations: the trace of {trace.facts.workload} does not show its units", fix="use offload none"
        )
    unit_of = {
        row.op_id: unit for unit, region in enumerate(regions) for op in region for row in trace.backward_of.get(op, ())
    }
    table = build_storage_table(trace, operators)
    phase = trace.operator_columns["phase"].tolist()
    columns = (trace.tensor_columns[name].tolist() for name in ("storage_id", "producer_op_id"))
    # Of the first tensor of a storage that somebody made.
    makers = {at: maker for at, maker in [*zip(*columns, strict=True)][::-1] if maker != ABSENT}
    begins, entries, _ = table.uses
    owner: dict[int, int] = {}
    for op, unit in unit_of.items():
        for storage in entries[begins[op] : begins[op + 1]].tolist():
            maker = makers.get(int(table.storage_id[storage]), ABSENT)
            if table.made[storage] and phase[maker] == "forward":
                owner[storage] = max(owner.get(storage, -1), unit)
    storages, last = np.array([*owner], dtype=np.int64), np.array([*owner.values()], dtype=np.int64)
    kept_bytes = table.bytes[storages]
    kept, grown = (
        np.bincount(last, sizes, len(regions)).tolist() for sizes in (kept_bytes, kept_bytes * table.growing[storages])
    )
    moved = [unit for unit, size_bytes in enumerate(kept) if size_bytes > 0]
    numbers = {unit: number for number, unit in enumerate(moved)}
    units = (UnitActivations(regions[u][0], regions[u][-1], kept[u] - grown[u], grown[u]) for u in moved)
    return OffloadedActivations(tuple(units), {op: numbers[unit] for op, unit in unit_of.items() if unit in numbers})


class ActivationMover:
    """Writes the copies of one rank's activations to the host and back; ``operators``: those beside which they begin."""

    def __init__(self, rank: RankProgram, plan: OffloadedActivations) -> None:
        self.rank, self.plan = rank, plan
        self.begins = {unit.begins: number for number, unit in enumerate(plan.units)}
        self.ends = {unit.ends: number for number, unit in enumerate(plan.units)}
        self.operators = {*self.begins, *self.ends, *plan.unit_of}
        self.gone: dict[tuple[int, int], int] = {}
        self.back: dict[tuple[int, int], int] = {}
        self.entered: set[tuple[int, int]] = set()

    def before(self, op_id: int, micro_batch: int) -> None:
        """Wait, before a unit's forward, until the memory of the last but one is free; before its backward for what it needs.

        With that goes for what the unit whose backward is next will need.
        """
        last_but_one = (self.begins.get(op_id, -1) - UNITS_ON_DEVICE, micro_batch)
        if last_but_one in self.gone:
            self.rank.waits.append(self.gone[last_but_one])
            self.rank.hold("activation", -self._size(*last_but_one))
        unit = (self.plan.unit_of.get(op_id, -1), micro_batch)
        if unit[0] < 0 or unit in self.entered:
            return
        self.entered.add(unit)
        self._fetch(*unit)
        self.rank.waits += [self.back[unit]] if unit in self.back else []
        self._fetch(unit[0] - 1, micro_batch)

    def after(self, op_id: int, micro_batch: int) -> None:
        """Send what a unit keeps to the host behind its forward."""
        unit = self.ends.get(op_id, -1)
        if self.plan.leaves(unit):
            self.gone[unit, micro_batch] = self._copy("offload", "forward", unit, micro_batch, (self.rank.last,))

    def _fetch(self, unit: int, micro_batch: int) -> None:
        """Bring a unit's activations back, unless they are there or on their way."""
        key = (unit, micro_batch)
        if self.plan.leaves(unit) and key not in self.back and key in self.gone:
            self.rank.hold("activation", self._size(*key))
            self.back[key] = self._copy("fetch", "backward", unit, micro_batch, (self.rank.last, self.gone[key]))

    def _size(self, unit: int, micro_batch: int) -> float:
        kept = self.plan.units[unit]
        return kept.fixed_bytes + kept.growing_bytes * self.rank.program.factors[micro_batch]

    def _copy(self, stream: str, phase: str, unit: int, micro_batch: int, after: Sequence[int | None]) -> int:
        time_s = _copy_s(self.rank, self._size(unit, micro_batch))
        fields = {"duration_s": time_s, "phase": phase, "micro_batch": micro_batch}
        return self.rank.add(stream, "memcpy", f"{stream} activations", after=after, **fields)


class HostOptimizer:
    """Writes one rank's gradients' way to the host, the update there, and the parameters' way back."""

    def __init__(self, rank: RankProgram) -> None:
        self.rank = rank
        self.sent_bytes = 0.0
        self.copies: list[int] = []

    def send(self, after: int | None, size_bytes: float, storages: frozenset[int]) -> None:
        """Send gradients that are final after a task; the device's are dropped."""
        self.sent_bytes += size_bytes
        fields = {"duration_s": _copy_s(self.rank, size_bytes), "phase": "backward"}
        self.copies.append(self.rank.add("offload", "memcpy", "offload gradients", after=(after,), **fields))
        self.rank.drop(storages)

    def update(self) -> None:
        """Update on the host once all gradients are there, and bring the parameters back."""
        rank, of = self.rank, {"phase": "optimizer"}
        moved_s = self.sent_bytes * rank.program.update_bytes_per_byte / rank.program.host[_UPDATE_RATE]
        after = (*self.copies, *rank.waits)
        updated = rank.add("host", "host", HOST_UPDATE, after=after, duration_s=moved_s, **of)
        back_s = _copy_s(rank, self.sent_bytes)
        rank.waits.append(rank.add("fetch", "memcpy", "fetch parameters", after=(updated,), duration_s=back_s, **of))
