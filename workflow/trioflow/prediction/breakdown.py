"""What a step comes to: where its time goes, and for language models tokens, FLOPs, money, energy and goodput.

`build_breakdown` divides a simulated step by rank, by pipeline stage or by module of the model. `describe_rates` and
`describe_run` give the units of language-model training.

Goodput (`measure_goodput`) is what is left of a long run when it is stopped by failures, and how often to save its
state. Failures come at random (exponentially), also while state is saved or read back; work since the last checkpoint is
lost (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006: the expected time
of an interval in closed form).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trioflow import tables
from trioflow.base.columns import ABSENT, Columns, Texts
from trioflow.base.errors import InputError
from trioflow.base.plan_row import Plan
from trioflow.base.precision_recipes import choose_recipe
from trioflow.base.units import format_time
from trioflow.engine.result import (
    Executed,
    LaneIntervals,
    join_lanes,
    measure_lanes,
    merge_lanes,
    select_communication,
    select_compute,
    subtract_lanes,
)
from trioflow.hardware.machine import Device
from trioflow.parallel.programs.offload import HOST_UPDATE
from trioflow.parallel.schedules.table import TRAIN
from trioflow.parallel.splits.tensor_parallel import EXCHANGE
from trioflow.parallel.task_graph import TaskGraph, read_tasks
from trioflow.trace.facts import Facts
from trioflow.trace.language.sizes import read_language_model
from trioflow.trace.store import Trace

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

WAYS = ("rank", "stage", "module")
DEPTH = 2
"""Parts of a module's path that a row is named by."""
_WORK = ("compute", "memcpy", "host")


def build_breakdown(
    graph: TaskGraph, timeline: pd.DataFrame | Columns, trace: Trace, by: str, depth: int = DEPTH
) -> pd.DataFrame:
    """Break a simulated step down ``by`` rank, stage or module: ``tables.BREAKDOWN``, means over ranks that have it.

    Ranks and stages in order, modules by their first operator, ``depth`` parts of the path: 2 for ``h.0``.
    Communication has no module; a rank or stage has the gradients that its operators finish, uncut. Raises InputError
    when the way is unknown or the depth is not positive.
    """
    if by not in WAYS or depth < 1:
        problem = f"no breakdown by {by!r}" if by not in WAYS else f"depth {depth} is not positive"
        raise InputError(problem, fix=f"use {', '.join(WAYS)}, and a depth from 1")
    import pandas as pd

    tasks = read_tasks(timeline).assign(op_id=graph.task_columns["op_id"])
    step_s = float(tasks["end_s"].max(initial=0.0))
    modules = [cut_path(str(path), depth) for path in trace.operator_columns["module"].tolist()]
    if by == "module":
        tasks = tasks.take((tasks["op_id"] != ABSENT) & tasks["kind"].isin(_WORK))
        named = Texts.of(modules[operator] for operator in tasks["op_id"].tolist())
        codes, keys = named.codes.astype(np.int64), list(named.words)
    else:
        found_keys, codes = np.unique(np.maximum(tasks[by], 0), return_inverse=True)
        keys = [str(key) for key in found_keys]
    result = pd.DataFrame(_measure_rows(tasks, codes, len(keys), step_s))
    result["by"], result["name"] = by, keys
    if by == "module":
        parts, result["output_shapes"] = _describe_modules(trace, modules, depth, keys)
        result[["communication_s", "exposed_communication_s", "idle_s"]] = np.nan
        result["message_bytes"] = None
    else:
        parts, result["output_shapes"] = _add_gradients(tasks, codes, len(keys), trace), None
    result["gradient_bytes"] = parts
    for column in ("message_bytes", "gradient_bytes"):
        result[column] = result[column].astype("Int64")
    return result.reindex(columns=tables.BREAKDOWN.names)


_OF_HOST = {"kernel launches": "host_share", HOST_UPDATE: "host_update_share"}
"""Parts in which devices wait for the host, and what `describe_waits` calls their shares of a step."""
PARTS = (
    *(f"{phase} compute" for phase in tables.PHASES),
    *(f"{group} communication" for group in ("tensor", "context", "expert", "data", "pipeline", "other")),
    *_OF_HOST,
    "idle time",
)
"""Where a rank's step goes: compute by phase, communication that no compute hides by degree, waits for the host, and all
other waits: the bubble of a pipeline, and of ranks with less work than the slowest."""


def split_step(executed: Executed, trace: Trace, waits: Mapping[str, Any], step_s: float) -> dict[str, float]:
    """Return the ``PARTS`` of a step that take any time [s], as means over the ranks; they add up to ``step_s``.

    ``waits``: of ``describe_waits``. What two degrees' groups hide at once is shared among them.
    """
    tasks = executed.timeline_columns.assign(op_id=executed.graph.task_columns["op_id"])
    ranks, codes = np.unique(tasks["rank"], return_inverse=True)
    rows = _measure_rows(tasks, codes, len(ranks), float(tasks["end_s"].max(initial=0.0)))
    place = np.searchsorted(ranks, executed.like)
    total = {name: float(values[place].sum() / max(len(place), 1)) for name, values in rows.items()}
    exposed = dict(waits.get("exposed_by_group_s", {})) or {"other": 1.0}
    phases = {f"{phase} compute": total[f"{phase}_s"] for phase in tables.PHASES}
    groups = {f"{name} communication": time_s for name, time_s in exposed.items()}
    whole_s = sum(total[name] for name in _WHOLE)
    parts = {name: min(waits.get(share, 0.0) * whole_s, total["idle_s"]) for name, share in _OF_HOST.items()}
    parts["idle time"] = max(total["idle_s"] - sum(parts.values()), 0.0)
    for names, whole in ((phases, "compute_s"), (groups, "exposed_communication_s")):
        scale = total[whole] / (sum(names.values()) or 1.0)
        parts |= {name: time_s * scale for name, time_s in names.items()}
    scale = step_s / (sum(parts.values()) or 1.0)
    return {name: parts[name] * scale for name in PARTS if parts.get(name, 0.0) > 0}


_WHOLE = ("compute_s", "exposed_communication_s", "idle_s")


def cut_path(path: str, depth: int) -> str:
    """Return the first parts of a module's path."""
    return ".".join(path.split(".")[:depth])


def _measure_rows(tasks: Columns, codes: NDArray[np.int64], count: int, step_s: float) -> dict[str, NDArray[Any]]:
    """Return times and sizes of each key, as means over the ranks that have such tasks [keys]."""
    _, rank = np.unique(tasks["rank"], return_inverse=True)
    ranks = int(rank.max(initial=-1)) + 1
    lane = codes * ranks + rank
    present = np.bincount(lane, minlength=count * ranks).reshape(count, ranks) > 0
    members = present.sum(axis=1)

    def mean(values: Floats) -> Floats:
        kept: Floats = values.reshape(count, ranks) * present
        return np.asarray(kept.sum(axis=1) / members, dtype=np.float64)

    def add_up(values: NDArray[Any]) -> Floats:
        return np.bincount(codes, weights=values, minlength=count).astype(np.float64)

    times_s = {name: mean(lanes) for name, lanes in _measure_lanes(_read_work(tasks), lane, present, step_s)}
    work_s = (tasks["end_s"] - tasks["start_s"]) * select_compute(tasks)
    operators = (tasks["op_id"] != ABSENT) & tasks["kind"].isin(["compute"])
    phases_s = {f"{name}_s": add_up(work_s * tasks["phase"].isin([name])) / members for name in tables.PHASES}
    moved = add_up(np.maximum(tasks["message_bytes"], 0))
    return {
        "ranks": members.astype(np.int64),
        "operators": add_up(operators).astype(np.int64),
        **times_s,
        **phases_s,
        "message_bytes": moved.astype(np.int64) // np.maximum(members, 1),
    }


def _read_work(tasks: Columns) -> Columns:
    """Return when tasks run [s], and what they keep busy [tasks]."""
    busy = {"computes": select_compute(tasks), "communicates": select_communication(tasks)}
    return Columns({"start_s": tasks["start_s"], "end_s": tasks["end_s"], **busy})


def _measure_lanes(
    work: Columns, lane: NDArray[np.int64], present: NDArray[np.bool_], step_s: float
) -> Iterator[tuple[str, Floats]]:
    """Yield the times of each key and rank; what hides communication is all that a rank computes."""
    count, ranks = present.shape
    start_s, end_s, computes, communicates = (work[name] for name in work)
    compute, communication = (
        merge_lanes(LaneIntervals(lane[chosen], start_s[chosen], end_s[chosen])) for chosen in (computes, communicates)
    )
    of_rank = merge_lanes(LaneIntervals(lane[computes] % max(ranks, 1), start_s[computes], end_s[computes]))
    key, row = np.nonzero(present[:, of_rank.lane])
    hiding = LaneIntervals(key * ranks + of_rank.lane[row], of_rank.start_s[row], of_rank.end_s[row])
    busy = merge_lanes(join_lanes(compute, communication))
    for name, intervals in (
        ("compute_s", compute),
        ("communication_s", communication),
        ("exposed_communication_s", subtract_lanes(communication, hiding)),
    ):
        yield name, measure_lanes(intervals, count * ranks)
    yield "idle_s", step_s - measure_lanes(busy, count * ranks)


def _add_gradients(tasks: Columns, codes: NDArray[np.int64], count: int, trace: Trace) -> list[int]:
    """Return the gradients that become ready among the operators of each key [keys] [bytes]."""
    sizes = np.zeros(trace.operator_columns.rows + 1)
    for entry in trace.facts.gradients:
        sizes[int(entry["ready_after_op_id"])] += int(entry["size_bytes"])
    operators = np.where(tasks["op_id"] == ABSENT, len(sizes) - 1, tasks["op_id"])
    # Recomputed and repeated ones are one gradient.
    pairs = np.unique(codes * len(sizes) + operators)
    key, operator = np.divmod(pairs, len(sizes))
    return [int(size) for size in np.bincount(key, weights=sizes[operator], minlength=count)]


def _describe_modules(trace: Trace, modules: list[str], depth: int, keys: Sequence[str]) -> tuple[list[int], list[Any]]:
    """Return the gradients of each module [bytes], and the shapes of its last forward operator."""
    gradients = dict.fromkeys(keys, 0)
    for entry in trace.facts.gradients:
        module = cut_path(str(entry["module"]), depth)
        gradients[module] = gradients.get(module, 0) + int(entry["size_bytes"])
    operators = trace.operator_columns
    columns = zip(modules, operators["phase"].tolist(), operators["output_shapes"].tolist(), strict=True)
    made: dict[str, Any] = {module: shapes for module, phase, shapes in columns if phase == "forward"}
    shapes = [None if key not in made else [[int(size) for size in shape] for shape in made[key]] for key in keys]
    return [gradients[key] for key in keys], shapes


_HALVINGS = 100


@dataclass(frozen=True)
class Faults:
    """How a run is stopped and goes on."""

    gpu_hours_per_failure: float  # GPU-hours between failures that stop the whole run
    checkpoint_s: float = 0.0  # time in which the run waits for its state to be saved [s]
    restart_s: float = 0.0  # from a failure to the first step after it [s]

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--gpu-hours-per-failure", self.gpu_hours_per_failure, math.nextafter(0.0, 1.0)),
            ("--checkpoint-s", self.checkpoint_s, 0.0),
            ("--restart-s", self.restart_s, 0.0),
        ):
            if not least <= value < math.inf:
                wanted = "positive" if least else "0 or more"
                raise InputError(f"{flag} {value:g}: expected a number that is {wanted}")

    def mtbf_s(self, ranks: int) -> float:
        """Return the mean time between failures of a run on ``ranks`` GPUs [s]."""
        return self.gpu_hours_per_failure * 3600.0 / ranks


def choose_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the work between two checkpoints that leaves the most goodput [s].

    It solves exp((t + d) / m) (1 - t / m) = 1 with the checkpoint's time d and the mean time between failures m; sqrt(2
    d m) is its first order (J. W. Young, 1974).
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = middle + checkpoint_s / mtbf_s + math.log1p(-middle) > 0
        low, high = (middle, high) if above else (low, middle)
    return low * mtbf_s


def measure_goodput(faults: Faults, interval_s: float, ranks: int) -> float:
    """Return the share of a run's time that goes into steps whose work is kept."""
    mtbf_s = faults.mtbf_s(ranks)
    work, whole = interval_s / mtbf_s, (interval_s + faults.checkpoint_s) / mtbf_s
    if not whole:  # saved at no cost after every step: a failure costs its restart alone
        return math.exp(-faults.restart_s / mtbf_s)
    try:
        return work / (math.exp(faults.restart_s / mtbf_s) * math.expm1(whole))
    except OverflowError:
        return 0.0


HOUR_S = 3600.0
_DOUBTED_MFU = 0.6
"""Beyond it an answer says that tables of single products are behind it: a convention."""
_MFU_FORMULA = (
    "(6 x all parameters, embeddings included, + 12 x layers x width x sequence) x tokens/s/GPU over the"
    " peak of the sheet; attention in full, recomputation not counted"
)


def describe_rates(facts: Facts, samples: int, step_time_s: float, ranks: int, device: Device) -> dict[str, Any]:
    """Return a step's tokens and model FLOPs, and the MFU where the device's peak is known; empty for other models."""
    known = read_language_model(facts)
    if known is None or facts.language_model is None or step_time_s <= 0:
        return {}
    (model, sequence), trained = known, facts.language_model.get("trained_parameters")
    tokens = samples * sequence
    rate = tokens / step_time_s / ranks
    flop, formula, share = model.flop_per_token(sequence), _MFU_FORMULA, 1.0
    if trained is not None:
        # A frozen weight has no gradient: 2 FLOPs less; adapters come on top of the model's own weights.
        adapters = trained if facts.language_model.get("lora") else 0
        share = (trained - adapters) / model.parameters
        flop += 6.0 * adapters - 2.0 * (1 - share) * model.active_parameters
        formula = formula.replace("6 x all parameters", "6 x all parameters, 4 x frozen ones")
    rates: dict[str, Any] = {
        "sequence": sequence,
        "attention": facts.language_model["attention"],
        "fusion": facts.language_model.get("fusion", "eager"),
        "precision": choose_recipe(str(facts.precision_recipe or facts.precision)).name,
        "parameters": model.parameters,
        **({"active_parameters": model.active_parameters} if model.experts else {}),
        **({} if trained is None else {"trained_parameters": trained}),
        "tokens_per_step": tokens,
        "tokens_per_s": tokens / step_time_s,
        "tokens_per_s_per_gpu": rate,
        "model_flop_per_s_per_gpu": rate * flop,
        "mfu_formula": formula if not model.experts else formula.replace("all", "active", 1),
    }
    peak = device.peak_flop_per_s.get(str(facts.precision))
    if peak:
        bare = flop - (4.0 + 2.0 * share) * model.embedding_parameters
        rates["mfu"] = rates["model_flop_per_s_per_gpu"] / peak
        rates["mfu_without_embeddings"] = rate * bare / peak
    return rates


def doubt_rate(rates: Mapping[str, Any]) -> list[str]:
    """Return what to say of a step that is faster than products in a long run may be."""
    if rates.get("mfu", 0.0) <= _DOUBTED_MFU:
        return []
    return [
        f"an MFU of {rates['mfu']:.0%} is more than long steps usually reach: it rests on products that were measured "
        "alone, and slowed as at a GPU's power limit (docs/cost_models.md); take the slow end of the interval for a budget"
    ]


def describe_run(
    rates: Mapping[str, Any],
    tokens: float | None,
    price_per_gpu_hour: float | None,
    power_w: float | None,
    faults: Faults | None = None,
    budget: float | None = None,
) -> dict[str, Any]:
    """Return what training on many tokens takes at a predicted step's rate; InputError without a positive number or tokens.

    ``budget`` in place of ``tokens``: as many as this much money pays for.

    Cost in the currency of ``price_per_gpu_hour`` [1/h], energy by a GPU's ``power_w`` [W]. With ``faults`` time,
    GPU-hours, cost and energy hold what is lost, ``goodput`` what is kept.
    """
    for flag, number in (("--price-per-gpu-hour", price_per_gpu_hour), ("--power-w", power_w)):
        if number is not None and not 0 <= number < float("inf"):
            raise InputError(f"{flag} {number:g}: expected a number that is 0 or more")
    flag, length = ("--tokens", tokens) if budget is None else ("--budget", budget)
    if length is None:
        return {}
    if not 0 < length < float("inf"):
        raise InputError(f"{flag} {length:g} is not positive")
    if "tokens_per_s" not in rates:
        raise InputError(
            f"{flag} needs a language model, as this trace counts samples", fix="name one, such as llama-3.1-8b"
        )
    lost = _describe_faults(faults, rates["ranks"]) if faults is not None else {"goodput": 1.0}
    tokens_per_hour = HOUR_S * rates["tokens_per_s"] * lost["goodput"]
    if budget is not None:
        if tokens is not None or not price_per_gpu_hour:
            raise InputError(
                "--budget needs a price above 0 and takes the place of --tokens",
                fix="give a price per GPU-hour, and no --tokens",
            )
        tokens = budget / price_per_gpu_hour / rates["ranks"] * tokens_per_hour
    assert tokens is not None
    hours = tokens / tokens_per_hour
    gpu_hours = hours * rates["ranks"]
    return {
        "tokens": tokens,
        **(lost if faults is not None else {}),
        "time_s": hours * HOUR_S,
        "gpu_hours": gpu_hours,
        **({} if budget is None else {"budget": budget}),
        **({} if price_per_gpu_hour is None else {"cost": gpu_hours * price_per_gpu_hour}),
        **({} if power_w is None else {"energy_j": gpu_hours * HOUR_S * power_w, "power_w": power_w}),
    }


def _describe_faults(faults: Faults, ranks: int) -> dict[str, float]:
    """Return the mean time between failures, the best interval of checkpoints, and what is kept."""
    mtbf_s = faults.mtbf_s(ranks)
    interval_s = choose_interval_s(faults.checkpoint_s, mtbf_s)
    goodput = measure_goodput(faults, interval_s, ranks)
    if not goodput:
        raise InputError(
            f"a failure every {format_time(mtbf_s)}: no work is ever kept",
            fix="give --gpu-hours-per-failure of one GPU's share, and shorter --checkpoint-s and --restart-s",
        )
    return {"mtbf_s": mtbf_s, "checkpoint_interval_s": interval_s, "goodput": goodput}


def describe_waits(executed: Executed, plan: Plan) -> dict[str, Any]:
    """Return how much of a step the ranks wait: for the pipeline, and for each group's communication.

    Shares of the step, means over ranks: ``bubble_share``, only of a pipeline; ``host_share``, in which devices wait for
    launches, and ``host_update_share``, for the optimizer on the host, each only where they do. ``exposed_by_group_s``
    [s] is by degree: tensor, context, expert, data, pipeline; where groups wait at once, each counts.
    """
    graph, timeline = executed.graph, executed.timeline_columns
    if graph.metadata.mode != TRAIN or not timeline.rows:
        return {}
    groups = graph.task_columns["group"]
    known = [name_group(text, plan) for text in groups.words]
    names = list(dict.fromkeys([*known, "pipeline", "expert"]))
    codes = np.array([names.index(name) for name in [*known, "pipeline"]])[groups.codes]
    if plan.expert > 1:  # all-to-alls of ranks that share sequences are named alike
        codes = np.where(graph.task_columns["name"].isin([EXCHANGE]), names.index("expert"), codes)
    communicates, host = select_communication(timeline), timeline["kind"].isin(["host"])
    updates = timeline["name"].isin([HOST_UPDATE])
    codes = np.where(communicates, codes, 0)
    step_s = float(timeline["end_s"].max())
    ranks, rank = np.unique(timeline["rank"], return_inverse=True)
    place, work = np.searchsorted(ranks, executed.like), _read_work(timeline)

    def measure(name: str, work: Columns, key: NDArray[np.int64], keys: int = 1) -> Floats:
        present = np.ones((keys, len(ranks)), dtype=bool)
        times_s = dict(_measure_lanes(work, key * len(ranks) + rank, present, step_s))[name]
        return np.asarray(times_s.reshape(present.shape)[:, place].mean(axis=1))

    exposed_s = measure("exposed_communication_s", work, codes, len(names))
    present = sorted({*codes[communicates].tolist()}, key=names.__getitem__)
    waits: dict[str, Any] = {"exposed_by_group_s": {names[code]: float(exposed_s[code]) for code in present}}

    def measure_idle(busy: NDArray[np.bool_]) -> float:
        return float(measure("idle_s", work.assign(computes=work["computes"] | busy), np.zeros_like(codes))[0])

    idle_s = measure_idle(np.zeros_like(host))
    updated_s = measure_idle(updates) if updates.any() else idle_s
    waiting_s = measure_idle(host) if host.any() else idle_s
    if plan.pipeline > 1:
        waits["bubble_share"] = waiting_s / step_s if step_s else 0.0
    shares = {"host_share": updated_s - waiting_s, "host_update_share": idle_s - updated_s}
    return waits | {name: time_s / step_s for name, time_s in shares.items() if time_s > 0}


def name_group(text: str, plan: Plan) -> str:
    """Return the degree whose ranks a group holds, by Megatron-LM's order: tensor, context, data, pipeline.

    Gradients of one replica, that the ranks of a sequence add up, are counted with the context.
    """
    ranks = sorted(int(word) for word in text.split(","))  # a broadcast names its root first
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if ranks[-1] - ranks[0] < plan.tensor:
        return "tensor"
    if step < plan.tensor:  # of whole experts, which lie over tensor-parallel ranks too
        return "data"
    if step >= plan.tensor * plan.replicas:
        return "pipeline"
    return "context" if ranks[-1] - ranks[0] < plan.tensor * plan.context else "data"
