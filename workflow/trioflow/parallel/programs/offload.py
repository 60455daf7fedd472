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

import pandas as pd

from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.parallel.backward import list_units
from trioflow.parallel.memory.storages import build_storage_table
from trioflow.parallel.programs.builder import (
    UNITS_ON_DEVICE,
    HostRates,
    OffloadedActivations,
    RankProgram,
    UnitActivations,
)
from trioflow.parallel.schedules.table import FORWARD_ONLY, TRAIN
from trioflow.tables import records
from trioflow.trace.store import Trace

_LINK_BANDWIDTH, _LINK_LATENCY = "host_link_bandwidth_bytes_per_s", "host_link_latency_s"
_UPDATE_RATE = "host_update_bytes_per_s"
"""Rates of a platform's ``host`` that offloading needs; the latency may be left out."""


def read_host_rates(plan: Plan, host: Mapping[str, float]) -> HostRates | None:
    """Return the host's rates that a plan needs, None for none; PlanError when the platform does not give them."""
    if plan.offload == "none":
        return None
    needed = [_LINK_BANDWIDTH, *([_UPDATE_RATE] if plan.offload == "optimizer" else [])]
    missing = [name for name in needed if not host.get(name)]
    if missing:
        raise PlanError(
            f"plan {plan.plan}: offload {plan.offload} needs {' and '.join(missing)} of the platform's host",
            fix="add it to the platform file, with its source, or use another platform",
        )
    return HostRates(
        float(host[_LINK_BANDWIDTH]), float(host.get(_LINK_LATENCY, 0.0)), float(host.get(_UPDATE_RATE, 0.0))
    )  # fmt: skip


def size_update(trace: Trace, parameter_bytes: float) -> float:
    """Return what the host reads and writes to update some parameters, which are one rank's [bytes]."""
    table = build_storage_table(trace, trace.operators, lambda storage: None)
    whole = float(table.bytes[table.category == "parameter"].sum())
    state = float(table.bytes[(table.category == "optimizer_state") & ~table.made].sum())
    return parameter_bytes * (3.0 + 2.0 * (state / whole if whole else 0.0))


def plan_activations(trace: Trace, operators: pd.DataFrame) -> OffloadedActivations:
    """Return what each unit keeps for backward; what several read belongs to the last, which comes first in backward.

    Raises PlanError when the trace does not say what the model's units are.
    """
    regions = list_units(trace)
    if not regions:
        raise PlanError(
            f"offload activations: the trace of {trace.facts.workload} does not show its units",
            fix="use offload none",
        )
    unit_of_forward = {op: unit for unit, region in enumerate(regions) for op in region}
    unit_of = {
        int(row["op_id"]): unit_of_forward[row["forward_op_id"]]
        for row in records(trace.operators, "op_id", "phase", "forward_op_id")
        if row["phase"] == "backward" and row["forward_op_id"] in unit_of_forward
    }
    table = build_storage_table(trace, operators, lambda storage: None)
    phase = trace.operators["phase"].to_numpy(dtype=str)
    makers = trace.tensors.groupby("storage_id")["producer_op_id"].first()
    begins, entries, _ = table.uses
    owner: dict[int, int] = {}
    for op, unit in unit_of.items():
        for storage in entries[begins[op] : begins[op + 1]].tolist():
            maker = makers[table.storage_id[storage]]
            if table.made[storage] and phase[int(maker)] == "forward":
                owner[storage] = max(owner.get(storage, -1), unit)
    found: list[UnitActivations] = []
    numbers: dict[int, int] = {}
    for unit, region in enumerate(regions):
        mine = [storage for storage, last in owner.items() if last == unit]
        grown = float((table.bytes[mine] * table.growing[mine]).sum())
        if mine and table.bytes[mine].sum() > 0:
            numbers[unit] = len(found)
            fixed = float(table.bytes[mine].sum()) - grown
            found.append(UnitActivations(region[0], region[-1], fixed, grown))
    kept = {op: numbers[unit] for op, unit in unit_of.items() if unit in numbers}
    return OffloadedActivations(tuple(found), kept)


class ActivationMover:
    """Writes the copies of one rank's activations to the host and back."""

    def __init__(
        self, rank: RankProgram, plan: OffloadedActivations, rates: HostRates,
        factors: Sequence[float],
    ) -> None:  # fmt: skip
        self.rank, self.plan, self.rates, self.factors = rank, plan, rates, factors
        self.begins = {unit.begins: number for number, unit in enumerate(plan.units)}
        self.ends = {unit.ends: number for number, unit in enumerate(plan.units)}
        self.gone: dict[tuple[int, int], int] = {}
        self.back: dict[tuple[int, int], int] = {}
        self.entered: set[tuple[int, int]] = set()

    def before_forward(self, op_id: int, micro_batch: int) -> None:
        """Wait, before a unit, until the memory of the last but one is free."""
        before = self.begins.get(op_id, -1) - UNITS_ON_DEVICE
        task = self.gone.get((before, micro_batch))
        if task is not None:
            self.rank.waits.append(task)
            self._hold(before, micro_batch, -1)

    def after_forward(self, op_id: int, micro_batch: int) -> None:
        """Send what a unit keeps to the host."""
        unit = self.ends.get(op_id, -1)
        if self.plan.leaves(unit):
            after = (self.rank.last,)
            self.gone[unit, micro_batch] = self._copy(
                "offload", "forward", unit, micro_batch, after
            )

    def before_backward(self, op_id: int, micro_batch: int) -> None:
        """Wait for what a unit needs, and ask for what the unit before it will need."""
        unit = self.plan.unit_of.get(op_id, -1)
        if unit < 0 or (unit, micro_batch) in self.entered:
            return
        self.entered.add((unit, micro_batch))
        self._fetch(unit, micro_batch)
        if (unit, micro_batch) in self.back:
            self.rank.waits.append(self.back[unit, micro_batch])
        self._fetch(unit - 1, micro_batch)

    def _fetch(self, unit: int, micro_batch: int) -> None:
        """Bring a unit's activations back, unless they are there or on their way."""
        key = (unit, micro_batch)
        if self.plan.leaves(unit) and key not in self.back and key in self.gone:
            self._hold(unit, micro_batch, 1)
            after = (self.rank.last, self.gone[key])
            self.back[key] = self._copy("fetch", "backward", unit, micro_batch, after)

    def _hold(self, unit: int, micro_batch: int, sign: int) -> None:
        rank = self.rank
        size = sign * self.plan.units[unit].scale(self.factors[micro_batch])
        rank.program.memory_of(rank.rank).add(rank.program.graph.next_task, "activation", size)

    def _copy(
        self, stream: str, phase: str, unit: int, micro_batch: int, after: Sequence[int | None]
    ) -> int:
        size = self.plan.units[unit].scale(self.factors[micro_batch])
        return self.rank.program.graph.add(
            self.rank.rank, stream, "memcpy", f"{stream} activations", after=after,
            duration_s=self.rates.copy_s(size), phase=phase, micro_batch=micro_batch,
        )  # fmt: skip


class HostOptimizer:
    """Writes one rank's gradients' way to the host, the update there, and the parameters' way back."""

    def __init__(self, rank: RankProgram, rates: HostRates) -> None:
        self.rank, self.rates = rank, rates
        self.sent_bytes = 0.0
        self.copies: list[int] = []

    def send(self, after: int | None, size_bytes: float, storages: frozenset[int]) -> None:
        """Send gradients that are final after a task; the device's are dropped."""
        rank = self.rank
        graph, memory = rank.program.graph, rank.program.memory_of(rank.rank)
        self.sent_bytes += size_bytes
        copy = graph.add(
            rank.rank, "offload", "memcpy", "offload gradients", after=(after,),
            duration_s=self.rates.copy_s(size_bytes), phase="backward",
        )  # fmt: skip
        self.copies.append(copy)
        memory.dropped.append((graph.next_task, storages))

    def update(self) -> None:
        """Update on the host once all gradients are there, and bring the parameters back."""
        rank = self.rank
        graph, moved = rank.program.graph, self.sent_bytes * rank.program.update_bytes_per_byte
        updated = graph.add(
            rank.rank, "host", "host", "optimizer on the host", after=(*self.copies, *rank.waits),
            duration_s=moved / self.rates.update_bytes_per_s, phase="optimizer",
        )  # fmt: skip
        rank.waits.append(graph.add(
            rank.rank, "fetch", "memcpy", "fetch parameters", after=(updated,),
            duration_s=self.rates.copy_s(self.sent_bytes), phase="optimizer",
        ))  # fmt: skip


def make_movers(rank: RankProgram) -> tuple[ActivationMover | None, HostOptimizer | None]:
    """Return what moves a rank's activations and its gradients to the host, where its plan asks for it."""
    program = rank.program
    rates = program.rates
    if rates is None or program.mode == FORWARD_ONLY:
        return None, None
    if program.offloaded is not None:
        return ActivationMover(rank, program.offloaded, rates, program.factors), None
    return None, HostOptimizer(rank, rates) if program.mode == TRAIN else None
