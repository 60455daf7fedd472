"""The plans that a search looks at, and which of them is better."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import BUCKETED, RECOMPUTATIONS, SCHEDULE_GROUP, SCHEDULES, SHARDINGS
from trioflow.base.plugins import list_plugins
from trioflow.base.units import BYTES_PER_MIB
from trioflow.costmodel.uncertainty import COLLECTIVES, PIPELINE, load_residuals
from trioflow.parallel.plan import BUCKET_BYTES, check_plan, describe_plan, fit_framework, make_plan
from trioflow.prediction.breakdown import HOUR_S
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace, pipeline_units

_SEARCHED_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
_SEARCHED_SHARDINGS = ("none", "zero1", "distributed", "zero2", "fsdp")
_SEARCHED_BUCKETS_BYTES = (5 * BYTES_PER_MIB, BUCKET_BYTES, 100 * BYTES_PER_MIB)
"""PyTorch's own limit, and far ends that users set."""
_MORE_STAGES = 1.5
"""Times as many stages a rank as the number tried before."""


@dataclass(frozen=True)
class Space:
    """What a search varies beside the degrees."""

    # Words of the plans' columns
    schedules: tuple[str, ...] = _SEARCHED_SCHEDULES
    shardings: tuple[str, ...] = _SEARCHED_SHARDINGS
    recomputations: tuple[str, ...] = RECOMPUTATIONS
    # Whether tensor-parallel ranks share what lies between split layers
    sequence_parallel: tuple[bool, ...] = (False, True)
    buckets_bytes: tuple[int, ...] = _SEARCHED_BUCKETS_BYTES  # limits of DDP's buckets [bytes]
    experts: int = 0  # of each layer of the model, of which expert-parallel ranks share each part
    most_pieces: int = 64  # most micro-batches of a pipeline, and most accumulated micro-steps
    most_stages: int = 8  # most stages of a rank, where a schedule takes several
    data_parallel: bool = False  # whether data parallelism is the only degree

    def list_left_out(self) -> list[str]:
        """Return what ``trioflow simulate`` takes and this space leaves out."""
        searched = {*self.schedules, *self.shardings, *self.recomputations, "zero3"}
        schedules = (*SCHEDULES, *list_plugins(SCHEDULE_GROUP))
        known = (*schedules, *SHARDINGS, *RECOMPUTATIONS)
        words = [f"recompute {w}" if w in RECOMPUTATIONS else w for w in known if w not in searched]
        more = f"uneven stages but two a rank, and more than {self.most_stages}"
        return [*words, "context parallelism", "offloading", more]


def choose_space(facts: Facts, data_parallel: bool = False) -> Space:
    """Return what to vary for a trace: of a language model what the frameworks that train them have.

    Megatron-LM, nanotron and torchtitan: 1F1B or interleaved, replicas whole, with distributed optimizer or fully
    sharded, tensor parallelism with its activations shared, DDP's own buckets; flash attention leaves selective
    recomputation nothing.
    """
    if not facts.language_model:
        return Space()
    eager = facts.language_model["attention"] == "eager"
    return Space(
        schedules=("1f1b", "interleaved"),
        shardings=("none", "distributed", *["zero2"] * data_parallel, "fsdp"),
        data_parallel=data_parallel,
        recomputations=("none", "selective", "full") if eager else ("none", "full"),
        sequence_parallel=(True,),
        buckets_bytes=(BUCKET_BYTES,),
        experts=int(facts.language_model.get("experts", 0)),
    )


FATES = ("refused", "out_of_memory", "slower", "simulated")
"""What becomes of a plan: it cannot be carried out, does not fit, is left out since its estimate is slower, or shown."""


def name_families(values: Mapping[str, Any]) -> list[str]:
    """Return the kinds of plans that one is, by its columns: what replicas share, schedule, and degrees beyond one."""
    shared = {"none": "ddp", "zero3": "fsdp"}.get(values["sharding"], values["sharding"])
    of = {
        shared: values["data"] > 1,
        "tensor": values["tensor"] > 1,
        values["schedule"]: values["pipeline"] > 1,
        "expert": values["expert"] > 1,
        f"recompute {values['recompute']}": values["recompute"] != "none",
    }
    return [name for name, holds in of.items() if holds] or ["one rank"]


@dataclass
class Fates:
    """What became of the plans that a search looked at, in all and by family.

    ``noted``: for each plan its families, its fate and details: ``reason``, ``needed_bytes``, or its estimated step
    ``outlined_s`` [s].
    """

    noted: list[tuple[list[str], str, dict[str, Any]]] = field(default_factory=list)

    def note(self, values: Mapping[str, Any], fate: str, **more: Any) -> None:
        """Note one plan, by its columns."""
        self.noted.append((name_families(values), fate, more))

    @property
    def dropped(self) -> list[dict[str, Any]]:
        """Plans that more likely run out of memory than not, with the reason."""
        return [more for _, fate, more in self.noted if fate == "out_of_memory"]

    def refuse(self, values: Mapping[str, Any], error: PlanError) -> None:
        """Note one plan that cannot be carried out, under the error's reason without the plan's name."""
        text = error.problem
        if text.startswith("plan ") and ": " in text:
            text = text.partition(": ")[2]
        self.note(values, "refused", reason=text)

    def list_reasons(self, family: str = "") -> dict[str, int]:
        """Return how many plans, of a family or of all, were refused for each reason, the most frequent first."""
        counter = Counter(
            more["reason"] for names, fate, more in self.noted if fate == "refused" and (not family or family in names)
        )
        return dict(counter.most_common())

    def list_families(self) -> list[dict[str, Any]]:
        """Return a row for each family: what replicas share, degrees, schedules, recomputation.

        ``nearest``: the plan that needs least memory among those that do not fit; ``fastest_slower_s``: the shortest
        estimated step of the plans that were not simulated [s].
        """
        places = ("one rank", "ddp", *SHARDINGS, "tensor", "expert", *SCHEDULES)
        of: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for names, fate, more in self.noted:
            for name in names:
                of.setdefault(name, []).append((fate, more))
        rows = []
        for name in sorted(of, key=lambda n: places.index(n) if n in places else len(places)):
            dropped = [more for fate, more in of[name] if fate == "out_of_memory"]
            slower_s = (more["outlined_s"] for fate, more in of[name] if fate == "slower")
            counter = Counter(fate for fate, _ in of[name])
            rows.append(
                {
                    "family": name,
                    "plans": len(of[name]),
                    **{fate: counter[fate] for fate in FATES},
                    "reasons": self.list_reasons(name),
                    "nearest": min(dropped, key=lambda one: one["needed_bytes"], default=None),
                    "fastest_slower_s": min(slower_s, default=None),
                }
            )
        return rows


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def list_degrees(ranks: int) -> list[tuple[int, int, int]]:
    """Return every data, tensor and pipeline degree whose product is the number of ranks."""
    return [
        (ranks // (tensor * pipeline), tensor, pipeline)
        for pipeline in list_divisors(ranks)
        for tensor in list_divisors(ranks // pipeline)
    ]


def enumerate_plans(trace: Trace, ranks: int, batch: int, space: Space, fates: Fates) -> Iterator[Plan]:
    """Yield the plans of a number of ranks that can be carried out; the others are counted in ``fates``.

    What has no effect is not varied: schedules without a pipeline, shardings and buckets without replicas, buckets
    under a sharding. Micro-batches (of a pipeline) and micro-steps (without) are divisors of a replica's samples. A
    rank of an interleaved pipeline has two stages, or more where these are all as long.
    """
    units = len(pipeline_units(trace))
    for data, tensor, pipeline in list_degrees(ranks):
        if space.data_parallel and tensor * pipeline > 1:
            continue
        pieces = list_divisors(batch // data) if batch % data == 0 else [1]
        for given in _list_ways(data, tensor, pipeline, units, space):
            for count in pieces:
                name = "micro_batches" if pipeline > 1 else "accumulate"
                values = {"data": data, "tensor": tensor, "pipeline": pipeline, **given, name: count}
                try:
                    if count > space.most_pieces:
                        raise PlanError(f"more than {space.most_pieces} micro-batches or micro-steps are not searched")
                    plan = fit_framework(make_plan(**values), trace)
                    check_plan(plan, trace, batch)
                except PlanError as error:
                    fates.refuse(values, error)
                    continue
                yield plan


def _list_stages(pipeline: int, units: int, space: Space) -> Iterator[tuple[str, int]]:
    """Yield schedules with stages of a rank; 0 for the schedule's own.

    More than two where they share the units evenly, or all but embedding and head, each at least half as many again as
    before: bubbles shrink with their inverse.
    """
    for schedule in space.schedules if pipeline > 1 else ("none",):
        yield schedule, 0
        sizes = SCHEDULES.get(schedule)
        if sizes is None or sizes.stages == 1 or sizes.fixed:
            continue
        last = sizes.stages
        for count in range(last + 1, min(space.most_stages, units // pipeline) + 1):
            even = 0 in (units % (pipeline * count), (units - 2) % (pipeline * count))
            if even and count >= _MORE_STAGES * last:
                last = count
                yield schedule, count


def _list_ways(data: int, tensor: int, pipeline: int, units: int, space: Space) -> Iterator[dict[str, Any]]:
    """Yield what is varied at some degrees, as columns of a plan."""
    axes: dict[str, Sequence[Any]] = {
        "schedule": list(_list_stages(pipeline, units, space)),
        "sharding": space.shardings if data > 1 else ("none",),
        "sequence_parallel": space.sequence_parallel if tensor > 1 else (False,),
        "recompute": space.recomputations,
        "bucket_bytes": space.buckets_bytes if data > 1 else (BUCKET_BYTES,),
        "expert": _list_expert_grids(data, tensor, space.experts),
    }
    for values in product(*axes.values()):
        given = dict(zip(axes, values, strict=True))
        given["expert"], given["expert_tensor"] = given["expert"]
        given["schedule"], stages = given["schedule"]
        given |= {"stages_per_rank": stages} if stages else {}
        if given["bucket_bytes"] == BUCKET_BYTES:  # of another limit make_plan makes the first bucket's too
            del given["bucket_bytes"]
        elif data == 1 or given["sharding"] not in BUCKETED:
            continue
        yield given


def _list_expert_grids(data: int, tensor: int, experts: int) -> list[tuple[int, int]]:
    """Return expert and expert-tensor degrees: experts cut as all layers are, and whole ones."""
    grids = [(degree, 0) for degree in list_divisors(math.gcd(data, experts) or 1)]
    if not experts or tensor == 1:
        return grids if experts else [(1, 0)]
    return grids + [(degree, 1) for degree in list_divisors(math.gcd(data * tensor, experts))]


QUANTILE = statistics.NormalDist().inv_cdf(0.9)
"""The ends of an 80 % interval lie this many standard deviations from the middle."""
ASSUMPTION = (
    "log-normal errors: that of compute is one factor common to all plans, that of communication "
    "another, and they act on each plan as far as its step depends on them; what the plans of a "
    "workload do not share is taken from trioflow's own measured runs"
)


@dataclass(frozen=True)
class RankedStep:
    """A plan's step [s], and how far it moves with what is uncertain.

    ``compute_log``, ``communication_log``: logarithm of the step at the high end of compute times, and of communication
    besides, over the predicted one.
    """

    time_s: float
    compute_log: float
    communication_log: float


def probability_faster(one: RankedStep, other: RankedStep) -> float:
    """Return the probability that the first of two plans of one model on one platform takes less time.

    `ASSUMPTION`: errors that both share cancel as far as both steps depend on them alike. A plan's own has the standard
    deviation `own_deviation`. Not meant across workloads and platforms.
    """
    shared = (
        (one.compute_log - other.compute_log) ** 2 + (one.communication_log - other.communication_log) ** 2
    ) / QUANTILE**2
    deviation = math.sqrt(shared + 2 * own_deviation() ** 2)
    return statistics.NormalDist(0.0, deviation).cdf(math.log(other.time_s / one.time_s))


@cache
def own_deviation() -> float:
    """Return the standard deviation of the logarithm of a plan's own error, from measured plans.

    Each workload's mean error is taken off, since its plans share it: one degree of freedom each. The measurements' own
    scatter is still in it, so it is rather too large.
    """
    groups: dict[str, list[float]] = {}
    for one in load_residuals():
        if one.way in (COLLECTIVES, PIPELINE) and one.device_kind == "cpu":
            groups.setdefault(one.workload, []).append(one.log_error)
    squares = sum((e - statistics.fmean(g)) ** 2 for g in groups.values() for e in g)
    return math.sqrt(squares / sum(len(g) - 1 for g in groups.values()))


def find_front(rows: Sequence[Mapping[str, float]], columns: Sequence[str]) -> list[int]:
    """Return the places of rows that no other beats: as little in every column, less in one; of equal ones the first."""
    values = np.array([[row[column] for column in columns] for row in rows]).reshape(-1, 1, len(columns))
    no_more = (values <= values[:, 0]).all(axis=2)  # whether one row has no more in any column than another one
    beats = no_more & (~no_more.T | np.triu(np.ones_like(no_more), 1))
    return list(np.flatnonzero(~beats.any(axis=0)).tolist())


def add_costs(rows: Sequence[dict[str, Any]], price_per_gpu_hour: float | None, power_w: float | None) -> list[str]:
    """Add what a step costs to simulated plans, and return the columns to compare by.

    ``cost_per_step`` (of ``price_per_gpu_hour`` [1/h]) and ``energy_j`` [J] (of a device's ``power_w`` [W]), where
    given.
    """
    known = all(row["peak_memory_bytes"] is not None for row in rows)
    columns = ["expected_s", *(["peak_memory_bytes"] if known else [])]
    for row in rows:
        device_s = row["ranks"] * row["expected_s"]
        if price_per_gpu_hour is not None:
            row["cost_per_step"] = device_s * price_per_gpu_hour / HOUR_S
        if power_w is not None:
            row["energy_j"] = device_s * power_w
    columns += ["cost_per_step"] if price_per_gpu_hour is not None else []
    return columns + (["energy_j"] if power_w is not None else [])


def mark_front(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Say of each row whether no other one beats it in all columns: ``pareto``."""
    front = set(find_front(rows, columns))
    for place, row in enumerate(rows):
        row["pareto"] = place in front


def describe_way(plan: Plan, batch: int, trace: Trace, *, brief: bool = False) -> str:
    """Return a plan in the field's notation, without what the trace's framework always does."""
    bare = replace(plan, vocabulary_parallel=False, tensor_overlap="auto")
    return describe_plan(bare if fit_framework(bare, trace) == plan else plan, batch, brief=brief)
