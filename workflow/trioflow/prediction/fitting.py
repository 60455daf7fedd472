"""Whether a step fits the memory: what fills it, the odds, what would make it fit, and the largest batch that does.

Nothing is simulated: memory depends on the order of a rank's program, not on its times.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trioflow.base.arguments import show_fields
from trioflow.base.errors import InputError, TrioflowError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import name_flag
from trioflow.base.units import format_apart
from trioflow.hardware.machine import Platform
from trioflow.network.across_nodes import open_platform
from trioflow.parallel.memory.peak import DOUBTED, LIKELY, find_fullest, load_survival
from trioflow.parallel.plan import vary_plan
from trioflow.prediction.assembly import prepare_step
from trioflow.prediction.question import DEFAULTS, Options, Traces, read_keywords, resolve
from trioflow.prediction.step import Step

if TYPE_CHECKING:
    from trioflow.prediction.keywords import Keywords

_ENOUGH, _MOST_PAIRS = 3, 4
"""Single changes that suffice after which no other is tried, and pairs that are tried where none does."""


def size_step(step: Step) -> dict[str, Any]:
    """Return what a step's fullest rank holds [bytes] and the probability that it survives; None where unknown."""
    known = bool(step.graph.metadata.memory)
    sizes = {
        "peak_memory_bytes": step.peak_memory_bytes,
        "reserved_bytes": step.reserved_bytes,
        "wanted_bytes": step.wanted_bytes,
        "outside_bytes": step.outside_bytes,
        "left_bytes": round(load_survival().find_limit(LIKELY, step.room_bytes) - step.needed_bytes),
        "fit_probability": step.fit_probability,
        "fits_memory": step.fits_memory,
    }
    plan_text = {"plan_text": step.graph.metadata.plan_text}
    return plan_text | (sizes if known else dict.fromkeys(sizes))


_PARTS = {
    "parameter": ("P", "weights"),
    "gradient": ("G", "gradients"),
    "optimizer_state": ("O", "optimizer state"),
    "activation": ("A", "activations"),
    "temporary": ("T", "temporary results"),
    "bucket": ("C", "communication buffers"),
    "gathered": ("C", "communication buffers"),
    "message": ("C", "communication buffers"),
    "kept": ("k", "reserved, not allocated"),
    "outside": ("x", "CUDA context, NCCL"),
}
"""Letter and name of each category, those of ``memory.profile`` and what lies beside; others are the last."""
_REST = ("B", "inputs, buffers, workspaces")


def split_memory(entry: Mapping[str, Any], outside_bytes: int) -> dict[tuple[str, str], int]:
    """Return what fills a rank's card [bytes] by letter and name."""
    kept = int(entry.get("wanted_bytes", entry.get("reserved_bytes", 0)) or entry["peak_bytes"])
    sizes = {**entry["categories"], "kept": kept - entry["peak_bytes"], "outside": outside_bytes}
    names = dict(_PARTS)
    if "parameter" not in sizes:  # sharded in fp32 beside their moments
        names["optimizer_state"] = ("O", "weights and optimizer state")
    parts: dict[tuple[str, str], int] = dict.fromkeys((*names.values(), _REST), 0)
    for name, size in sizes.items():
        parts[names.get(name, _REST)] += size
    return {part: size for part, size in parts.items() if size > 0}


def answer_memory(
    traces: Traces,
    plan: Plan,
    platform: Platform | str | Path,
    *,
    batch: int | None = None,
    options: Options = DEFAULTS,
) -> dict[str, Any]:
    """Return the memory of a plan's step, with ``question.resolve``'s arguments and errors.

    ``memory`` is that of every rank by category, ``fullest_rank`` and ``last_rank`` its entries of the fullest rank
    and of the last one, whose peak frameworks such as Megatron-LM log; ``left_bytes``: how much more
    the step may need and still likely fit, negative where it needs less to. ``changes``: where the step is less than ``memory.peak.DOUBTED``
    likely to fit, plans that change one thing, or two where no single one suffices, each with its own memory.
    """
    step = prepare_step(resolve(traces, plan, platform, batch=batch, options=options))
    metadata, device = step.graph.metadata, step.platform.device
    last = [entry for entry in metadata.memory if metadata.ranks - 1 in entry["ranks"]]
    answer = {
        "workload": step.traces[0].facts.workload,
        "batch": metadata.batch,
        "ranks": metadata.ranks,
        "platform": step.platform.name,
        "memory_bytes": device.memory_bytes,
        **size_step(step),
        "fullest_rank": find_fullest(metadata.memory) if metadata.memory else None,
        "last_rank": last[0] if last else None,
        "memory": metadata.memory,
        "warnings": metadata.warnings,
        "changes": [],
    }
    doubted = step.fit_probability is not None and step.fit_probability < DOUBTED
    if doubted and not (options.as_traced or options.schedule):
        answer["changes"] = _try_changes(traces, metadata.plan, step, options)
    return answer


def _try_changes(traces: Traces, plan: Plan, step: Step, options: Options) -> list[dict[str, Any]]:
    """Return what each change comes to, in order of what it costs; pairs where none suffices."""
    batch, first = step.graph.metadata.batch, size_step(step)

    def evaluate(change: dict[str, Any]) -> dict[str, Any] | None:
        try:
            varied = vary_plan(plan, **change)
            changed = prepare_step(resolve(traces, varied, step.platform, batch=batch, options=options))
        except TrioflowError:  # the plan, the model or the platform does not take it
            return None
        return {"flags": _spell(change), **size_step(changed)}

    better: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for change in _list_changes(plan, step):
        row = evaluate(change)
        if row is not None and row["left_bytes"] > first["left_bytes"]:
            better.append((change, row))
        if sum(row["fit_probability"] >= DOUBTED for _, row in better) == _ENOUGH:
            break
    rows = [row for _, row in better]
    if all(row["fit_probability"] < DOUBTED for row in rows):
        better.sort(key=lambda one: -int(one[1]["left_bytes"]))
        pairs = [a | b for (a, _), (b, _) in combinations(better, 2) if not a.keys() & b.keys()]
        rows += [row for pair in pairs[:_MOST_PAIRS] if (row := evaluate(pair)) is not None]
    return rows


def _list_changes(plan: Plan, step: Step) -> list[dict[str, Any]]:
    """Return single changes of a plan that save memory, as columns, those first that usually cost the least time."""
    recipe, batch = step.traces[0].facts.recipe, step.graph.metadata.batch
    pieces = "micro_batches" if plan.pipeline > 1 else "accumulate"
    doubled = {pieces: 2 * getattr(plan, pieces)}
    changes: list[tuple[bool, dict[str, Any]]] = [
        (plan.tensor > 1 and not plan.sequence_parallel, {"sequence_parallel": True}),
        (
            plan.data > 1 and plan.sharding == "none",
            {"sharding": "distributed" if recipe.keeps_main_gradients else "zero1"},
        ),
        (plan.recompute == "none", {"recompute": "selective"}),
        (batch % (2 * plan.data * plan.pieces) == 0, doubled),
        (plan.data > 1 and not plan.shards_units, {"sharding": "fsdp"}),
        (plan.recompute in ("none", "selective"), {"recompute": "full"}),
        (plan.data % 2 == 0, {"data": plan.data // 2, "tensor": 2 * plan.tensor, **doubled, "sequence_parallel": True}),
        (plan.offload == "none", {"offload": "optimizer"}),
        (plan.offload == "none", {"offload": "activations"}),
    ]
    return [change for holds, change in changes if holds]


def _spell(change: dict[str, Any]) -> str:
    """Return a change as flags of the command."""
    return " ".join(name_flag(column) + f" {value}" * (value is not True) for column, value in change.items())


LARGEST = ("batch", "sequence")
"""What may be asked for."""
_TOKENS = 1024
"""A sequence is tried in steps of so many tokens, or more where ranks share it."""
_MOST = 1 << 16
"""Most of these steps, and most samples of a micro-batch."""
_LINES = 6
"""Guesses by a straight line before halves are taken."""


@show_fields(Options, Plan)
def find_largest(
    traces: Traces,
    plan: Plan | str | None = None,
    platform: Platform | str | Path = "",
    what: str = LARGEST[0],
    *,
    ranks: int | None = None,
    batch: int | None = None,
    options: Options = DEFAULTS,
    **changes: "Unpack[Keywords]",
) -> dict[str, Any]:
    """Return the largest batch or sequence (``what``) of a plan that fits the memory; all else as for ``predict``.

    Returns ``largest``, ``plan_text``, ``memory_bytes`` and ``outside_bytes`` of a rank; for the largest that more likely
    ``fits`` than not, the ``next`` one and the largest that is ``memory.peak.DOUBTED`` likely to fit (``roomy``, None
    where there is none) the size, ``peak_memory_bytes``, ``reserved_bytes`` and ``fit_probability``. A batch is of the whole step, in as
    many pieces as the plan has, all of one size. Raises InputError when nothing fits; otherwise as
    ``question.resolve``.
    """
    plan, options = read_keywords(plan, ranks, options, changes)
    if what not in LARGEST:
        raise InputError(f"the largest {what!r} cannot be found", fix=f"use {' or '.join(LARGEST)}")
    machine = open_platform(platform, plan.ranks, **options.inter_node)
    unit = plan.data * plan.pieces
    if what == "sequence":
        unit = math.lcm(_TOKENS, 2 * plan.context * plan.tensor)
    needs: dict[int, dict[str, Any]] = {}

    def ask(count: int) -> dict[str, Any]:
        if count not in needs:
            samples = count * unit if what == "batch" else batch
            varied = replace(options, sequence=count * unit) if what == "sequence" else options
            step = prepare_step(resolve(traces, plan, machine, batch=samples, options=varied))
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
