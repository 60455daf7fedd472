"""The largest batch or sequence with which a plan fits the memory; no step is simulated for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trioflow.base.arguments import check_instance
from trioflow.base.errors import InputError
from trioflow.base.experiments import Plan
from trioflow.base.units import format_apart
from trioflow.hardware.machine import Platform
from trioflow.network.inter_node import open_platform
from trioflow.parallel.memory.survival import DOUBTED, LIKELY, load_survival
from trioflow.prediction.assembly import Traces, prepare_step
from trioflow.prediction.fitting import size_step
from trioflow.prediction.options import DEFAULTS, Options

LARGEST = ("batch", "sequence")
"""What may be asked for."""
_TOKENS = 1024
"""A sequence is tried in steps of so many tokens, or more where ranks share it."""
_MOST = 1 << 16
"""Most of these steps, and most samples of a micro-batch."""
_LINES = 6
"""Guesses by a straight line before halves are taken."""


def find_largest(
    traces: Traces,
    plan: Plan,
    platform: Platform | str | Path,
    what: str,
    *,
    batch: int | None = None,
    options: Options = DEFAULTS,
) -> dict[str, Any]:
    """Return the largest batch or sequence (``what``) of a plan that fits the memory.

    Returns ``largest``, ``plan_text``, ``memory_bytes`` and ``outside_bytes`` of a rank; for the largest that more likely
    ``fits`` than not, the ``next`` one and the largest that is ``survival.DOUBTED`` likely to fit (``roomy``, None
    where there is none) the size, ``peak_memory_bytes``, ``reserved_bytes`` and ``fit_probability``. A batch is of the whole step, in as
    many pieces as the plan has, all of one size. Raises InputError when nothing fits; otherwise as
    ``assembly.prepare_step``.
    """
    if what not in LARGEST:
        raise InputError(f"the largest {what!r} cannot be found", fix=f"use {' or '.join(LARGEST)}")
    check_instance("plan", plan, Plan, "make one by trioflow.named_plan or trioflow.make_plan")
    machine = open_platform(platform, plan.ranks, **options.inter_node)
    unit = plan.data * plan.pieces
    if what == "sequence":
        unit = math.lcm(_TOKENS, 2 * plan.context * plan.tensor)
    needs: dict[int, dict[str, Any]] = {}

    def ask(count: int) -> dict[str, Any]:
        if count not in needs:
            samples = count * unit if what == "batch" else batch
            asked = replace(options, sequence=count * unit) if what == "sequence" else options
            step = prepare_step(traces, plan, machine, batch=samples, options=asked)
            needs[count] = size_step(step) | {"needed_bytes": step.needed_bytes}
            if needs[count]["fit_probability"] is None:
                raise InputError(
                    f"--largest {what}: no memory is estimated of this step",
                    fix="leave it out, or give a trace with tensors",
                )
        return needs[count]

    def describe(count: int) -> dict[str, Any] | None:
        if not 1 <= count <= _MOST:
            return None
        names = ("peak_memory_bytes", "reserved_bytes", "fit_probability")
        return {what: count * unit, **{name: ask(count)[name] for name in names}}

    def find(probability: float, most: int) -> int:
        limit_bytes = load_survival().find_limit(probability, room - ask(1)["outside_bytes"])
        return find_most(lambda count: float(ask(count)["needed_bytes"]), limit_bytes, most)

    room = machine.device.memory_bytes
    most = find(LIKELY, _MOST)
    if not most:
        needed, limit = format_apart(ask(1)["wanted_bytes"] + ask(1)["outside_bytes"], room)
        raise InputError(
            f"no {what} fits: {unit:,} {'tokens' if what == 'sequence' else 'samples a step'} need {needed} of {limit}",
            fix="use more ranks, another plan or --recompute full",
        )
    return {
        "largest": what,
        "plan_text": ask(most)["plan_text"],
        "memory_bytes": room,
        "outside_bytes": ask(most)["outside_bytes"],
        "fits": describe(most),
        "next": describe(most + 1),
        "roomy": describe(find(DOUBTED, most)),
    }


def find_most(need: Callable[[int], float], room: float, most: int) -> int:
    """Return the largest count to ``most`` that needs no more than the room, 0 where none; ``need`` is nearly a line."""
    if need(1) > room:
        return 0
    low, high, guess, tries = 1, most + 1, 2, 0
    while high - low > 1:
        guess, tries = min(max(guess, low + 1), high - 1), tries + 1
        low, high = (guess, high) if need(guess) <= room else (low, guess)
        each = (need(guess) - need(1)) / (guess - 1)
        line = 1 + math.floor((room - need(1)) / each) if each > 0 else 2 * guess
        guess = line if tries < _LINES else min((low + high) // 2, 2 * low)
    return low
