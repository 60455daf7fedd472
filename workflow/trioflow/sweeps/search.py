"""The search for a plan: estimate thousands, simulate the best in full, rank them; `search` is the door.

A `SearchResult` says which plans were simulated, in order, which variants were tried together, and what became of the
others.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import pandas as pd

from trioflow import tables
from trioflow.base.ahead import Ahead
from trioflow.base.arguments import check_argument, check_names, show_fields
from trioflow.base.errors import InputError, PlanError
from trioflow.base.experiments import Plan
from trioflow.base.units import format_apart
from trioflow.costmodel.choices import find_own_model
from trioflow.costmodel.device_times import DeviceTimes
from trioflow.costmodel.uncertainty import CONFIDENCES
from trioflow.hardware.machine import Platform
from trioflow.network.across_nodes import INTER_NODE
from trioflow.parallel.memory.peak import (
    DOUBTED,
    LIKELY,
    count_plan_outside,
    count_room,
    describe_probability,
    load_survival,
)
from trioflow.parallel.plan import check_shapes, micro_batch_sizes
from trioflow.parallel.splits.routing import BALANCED, read_routing
from trioflow.prediction.answer import Draws
from trioflow.prediction.assembly import choose_collectives, prepare_step
from trioflow.prediction.breakdown import describe_rates, describe_run
from trioflow.prediction.question import SORTS, STEP_WORDS, Options, Traces, count_samples, resolve
from trioflow.sweeps.description import PLAN_COLUMNS
from trioflow.sweeps.scenarios import PredictionCache
from trioflow.sweeps.search_space import (
    ASSUMPTION,
    Fates,
    RankedStep,
    Space,
    add_costs,
    choose_space,
    describe_way,
    enumerate_plans,
    mark_front,
    probability_faster,
)
from trioflow.sweeps.step_estimate import estimate_step
from trioflow.sweeps.unit_costs import UnitCosts
from trioflow.trace.store import pipeline_units

if TYPE_CHECKING:
    from trioflow.prediction.keywords import StepKeywords

_ALIKE_SHARE = 0.01
"""Bucket sizes of a plan whose estimated steps differ by no more count as alike."""


class Candidate(NamedTuple):
    """A plan with its cost estimate: step [s], and memory at least [bytes]."""

    time_s: float
    plan: Plan
    least_bytes: int


class Variants(NamedTuple):
    """A plan with its best bucket size by its estimate, and the same plan with other ones, in order."""

    best: Candidate
    others: tuple[Candidate, ...] = ()

    def compare_buckets(self) -> dict[str, Any]:
        """Return what a row says of the plan's other bucket sizes: all, and how many are as good."""
        most_s = self.best.time_s * (1 + _ALIKE_SHARE)
        return {
            "other_buckets": [
                {"bucket_bytes": other.plan.bucket_bytes, "outlined_s": other.time_s} for other in self.others
            ],
            "alike_buckets": sum(other.time_s <= most_s for other in self.others),
        }


def group_variants(candidates: Sequence[Candidate]) -> list[Variants]:
    """Put plans together that differ in the size of their buckets alone, by the best estimate; the fastest is given first."""
    groups: dict[tuple[Any, ...], list[Candidate]] = {}
    for candidate in candidates:
        key = tuple(value for name, value in vars(candidate.plan).items() if not name.endswith("bucket_bytes"))
        groups.setdefault(key, []).append(candidate)
    return [Variants(group[0], tuple(group[1:])) for group in groups.values()]


@dataclass(frozen=True, repr=False)
class SearchResult(Mapping[str, Any]):
    """What a search found: a mapping with the keys of ``trioflow search --json``, of which ``ranking`` is the list of plans."""

    answer: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.answer[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.answer)

    def __len__(self) -> int:
        return len(self.answer)

    @property
    def best(self) -> dict[str, Any]:
        """Row of the best plan: its columns, times [s], memory [bytes]. Raises InputError when no plan fits."""
        if not self["ranking"]:
            raise InputError("no plan fits", fix="use more ranks, a smaller batch or another platform")
        return dict(self["ranking"][0])

    @property
    def plans(self) -> list[Plan]:
        """The plans, the best first, as ``predict`` takes them."""
        return [
            Plan(**{"plan": f"plan{place}", **{name: row[name] for name in PLAN_COLUMNS}})
            for place, row in enumerate(self["ranking"], 1)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return what ``trioflow search --json`` prints."""
        return self.answer

    def to_frame(self) -> pd.DataFrame:
        """Return the plans, the best first, a row each, as ``trioflow search --output csv`` prints them."""
        return tables.flatten(self["ranking"])

    def plot(self) -> Any:
        """Return the search's page of pictures, which a notebook shows and ``save("answer.html")`` writes; needs bokeh."""
        return import_module("trioflow.report.charts").plot_search(self)

    def _summarise(self) -> pd.DataFrame:
        frame = self.to_frame()
        return frame[[name for name in _SUMMARY if name in frame]]

    def __repr__(self) -> str:
        ranks = ", ".join(map(str, self["ranks"]))
        title = f"{self['plans']} plans of {self['workload']} on {ranks} ranks of {self['platform']}, the best first"
        return f"{title}\n{self._summarise().to_string()}"

    def _repr_html_(self) -> str:
        return self._summarise().to_html()


_SUMMARY = ("plan_text", "step_time_s", "low_s", "high_s", "tokens_per_s_per_gpu", "mfu", "fit_probability")
"""Columns of a ranking that are shown in a notebook."""


@dataclass
class RankedPlan:
    """A plan simulated in full, and what it is compared by."""

    row: dict[str, Any]
    prediction: RankedStep
    candidate: Candidate
    steady_s: float  # Expected without draws [s]
    draws: Draws | None = None


@dataclass
class Found:
    """What a search found.

    ``ranking``: of ``simulated``, the fastest first, behind them those whose memory is less
    than ``memory.peak.DOUBTED`` to suffice (``crowded``), each with its best bucket size; ``other_buckets`` lists the others
    (``bucket_bytes`` [bytes], ``outlined_s`` [s]), ``alike_buckets`` counts those within a hundredth. ``dropped``:
    plans that more likely run out of memory than not, with the reason. ``fates``: what became of all plans, by family. ``left_out``:
    kinds of plans not looked at. ``estimated``: plans whose step was estimated. ``estimate_error``: least and greatest
    estimated over simulated step, less 1. ``confidence``, ``model_text``: of the operators' times.
    """

    simulated: list[RankedPlan] = field(default_factory=list)
    ranking: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    fates: Fates = field(default_factory=Fates)
    left_out: list[str] = field(default_factory=list)
    estimated: int = 0
    estimate_error: tuple[float, float] = (0.0, 0.0)
    confidence: str = CONFIDENCES[0]
    model_text: str = ""
    warnings: list[str] = field(default_factory=list)

    def rank(self) -> None:
        """Put the simulated plans in order, each with the probability that the first one beats it."""
        self.simulated.sort(key=lambda one: (one.row["crowded"], one.prediction.time_s))
        self.ranking = []
        for one in self.simulated:
            first = self.simulated[0]
            beaten = probability_faster(first.prediction, one.prediction)
            row = {**one.row, "first_faster_probability": beaten}
            if one.draws is not None and first.draws is not None:
                row["first_faster_drawn"] = first.draws.beats(one.draws)
            self.ranking.append(row)
        ratios = [one.candidate.time_s / one.steady_s - 1 for one in self.simulated]
        if ratios:
            self.estimate_error = (min(ratios), max(ratios))
        self.warnings = list(dict.fromkeys(self.warnings))


def join_found(found: Sequence[Found], recipes: Sequence[str | None]) -> Found:
    """Return what was found under each of some precision recipes as one, ranked together."""
    if len(found) == 1:
        return found[0]
    joined = Found(
        simulated=[one for each in found for one in each.simulated],
        dropped=[entry for each in found for entry in each.dropped],
        left_out=found[0].left_out,
        estimated=sum(each.estimated for each in found),
        confidence=max((each.confidence for each in found), key=CONFIDENCES.index),
        model_text="; ".join(dict.fromkeys(each.model_text for each in found)),
        warnings=[warning for each in found for warning in each.warnings],
    )
    for each, recipe in zip(found, recipes, strict=True):
        joined.fates.noted += each.fates.noted
        lacking = [more for _, fate, more in each.fates.noted if fate == "out_of_memory"]
        for entry in (*each.dropped, *lacking):
            entry["precision"] = recipe
    joined.rank()
    return joined


FURTHER = 3
"""At most so many times the plans asked for are simulated, twice as many while too few of them have room."""
Watch = Callable[[int, int, str], None]
"""Follows a search: plans done, of how many, and what was done."""


class _Trial(NamedTuple):
    """What became of a plan that was built: what its allocator wants [bytes], the odds, its simulation where it fits."""

    wanted_bytes: int
    fit_probability: float | None = None
    refused: PlanError | None = None
    simulated: RankedPlan | None = None
    confidence: str = CONFIDENCES[0]
    warnings: Sequence[str] = ()


@show_fields(Options, only=(*STEP_WORDS, *INTER_NODE))
def search(
    traces: Traces,
    ranks: int | Sequence[int],
    platform: Platform | str | Path,
    *,
    batch: int | None = None,
    top: int = 10,
    price_per_gpu_hour: float | None = None,
    power_w: float | None = None,
    cost_model: str | None = None,
    override: str | None = None,
    tokens: float | None = None,
    budget: float | None = None,
    draws: int = 0,
    seed: int = 0,
    routing: str = BALANCED,
    sort: str = "time",
    data_parallel: Sequence[str] = (),
    watch: Watch | None = None,
    jobs: int = 1,
    **step: "Unpack[StepKeywords]",
) -> SearchResult:
    """Rank the plans of a model: what ``trioflow search`` prints.

    Raises InputError when no number makes sense or nothing can be read.

    ``traces``: one step on one rank; further ones of the same workload at other batches. ``ranks``, ``platform``:
    numbers of ranks to compare; a platform, or its name or file. ``batch``: samples of the whole step; by default the
    trace's own batch on each of the most ranks. ``top``: plans to simulate in full at least, for each number of ranks
    and recipe. ``price_per_gpu_hour``, ``power_w``: price [1/h] and power [W] of a device, to compare cost and energy
    too. ``cost_model``, ``override``: as for ``Options``. ``tokens``: of a whole run, to say what it takes under each
    plan; ``budget``: the money for it instead. ``draws``, ``seed``: as for ``Options``: plans stand in the order of the
    draws' means, compared draw by draw.
    ``INTER_NODE`` and ``routing``: as for ``Options``; routing is drawn by the seed. ``sort``: one of ``SORTS``. ``data_parallel``: recipes whose plans
    share nothing but the batch and what replicas shard. ``watch``: called with how many plans are done, of how many, and
    what is done with them. ``jobs``: processes that simulate plans at the same time (Linux); the answer is the same.
    ``step``: ``STEP_WORDS`` of a language model by name or configuration; several recipes of ``precision``, with commas
    between, are ranked together, each with its ``fusion`` behind a plus sign where it has one of its own:
    ``fsdp2-mixed+compile,megatron-bf16``.
    """
    several = ranks if isinstance(ranks, Iterable) else [ranks]
    counts = sorted({check_argument("ranks", one, "int") for one in several})
    if not counts or min(counts) < 1:
        raise InputError(f"ranks={ranks!r}", fix="give one positive number of ranks or more")
    top, jobs = check_argument("top", top, "int"), check_argument("jobs", jobs, "int")
    batch = batch if batch is None else check_argument("batch", batch, "int")
    check_names(step, (*STEP_WORDS, *INTER_NODE), "option")
    inter_node = {name: step.get(name) for name in INTER_NODE}
    language = {name: value for name, value in step.items() if name not in INTER_NODE}
    check_names([sort], SORTS, "order of plans")
    if jobs < 1:
        raise InputError(f"--jobs {jobs} is not positive")
    for flag, value in (("price-per-gpu-hour", price_per_gpu_hour), ("power-w", power_w)):
        if value is not None and check_argument(flag, value, "float") <= 0:
            raise InputError(f"--{flag} {value} is not positive")
    recipes = _list_recipes(step.get("precision"))
    name = platform.name if isinstance(platform, Platform) else str(platform)
    cache = PredictionCache(
        {str(recipe): traces for recipe in recipes},
        {name: platform},
        steps={str(recipe): _name_step(recipe, language) for recipe in recipes},
        routing=read_routing(routing, seed),
        inter_node=inter_node,
    )
    facts = cache.load_traces(str(recipes[0]))[0].facts
    batch = facts.batch * max(counts) if batch is None else batch
    all_found = [
        join_found(
            [
                search_plans(
                    cache,
                    str(recipe),
                    name,
                    count,
                    batch,
                    top=top,
                    cost_model=cost_model or "",
                    override=override or "",
                    watch=watch,
                    draws=draws,
                    seed=seed,
                    jobs=jobs,
                    space=choose_space(cache.load_traces(str(recipe))[0].facts, recipe in data_parallel),
                )
                for recipe in recipes
            ],
            recipes,
        )
        for count in counts
    ]
    rows = [row for found in all_found for row in found.ranking]
    ranking = sorted(
        rows, key=lambda row: (row["crowded"], float(row["expected_s"]) * (row["ranks"] if sort == SORTS[1] else 1))
    )
    columns = add_costs(ranking, price_per_gpu_hour, power_w)
    for row in ranking:
        if run := describe_run(row, tokens, price_per_gpu_hour, power_w, budget=budget):
            row["run"] = run
    mark_front(ranking, columns)
    asked = {"workload": facts.workload, "platform": name, "ranks": counts, "batch": batch}
    asked |= {"precisions": recipes} if len(recipes) > 1 else {}
    return SearchResult(asked | _summarize(all_found, ranking, columns))


def _list_recipes(words: str | None) -> list[str | None]:
    """Return the precision recipes asked for, each once; None stands for the default."""
    return [None] if words is None else list(dict.fromkeys(map(str.strip, words.split(","))))


def _name_step(recipe: str | None, step: dict[str, Any]) -> dict[str, Any]:
    """Return what is asked of a language model's step under ``RECIPE`` or ``RECIPE+FUSION``."""
    name, _, fusion = (recipe or "").partition("+")
    return {**step, "precision": name or None, **({"fusion": fusion} if fusion else {})}


def _summarize(all_found: Sequence[Found], ranking: list[dict[str, Any]], columns: Sequence[str]) -> dict[str, Any]:
    """Return what was found on each number of ranks as one answer."""
    fates = Fates([one for found in all_found for one in found.fates.noted])
    first = all_found[0].ranking
    beats = float(first[1]["first_faster_probability"]) if len(first) > 1 else None
    drawn = first[1].get("first_faster_drawn") if len(first) > 1 else None
    return {
        "cost_model": all_found[0].model_text,
        "confidence": max((found.confidence for found in all_found), key=CONFIDENCES.index),
        "plans": sum(found.estimated for found in all_found),
        "simulated": len(ranking),
        "outline_error": [
            min(found.estimate_error[0] for found in all_found),
            max(found.estimate_error[1] for found in all_found),
        ],
        "ranking": ranking,
        "compared_by": columns,
        "first_beats_second": beats if len(all_found) == 1 else None,
        **({} if drawn is None else {"first_beats_second_drawn": drawn}),
        "assumption": ASSUMPTION,
        "out_of_memory": [entry for found in all_found for entry in found.dropped],
        "refused": fates.list_reasons(),
        "families": fates.list_families(),
        "not_searched": all_found[0].left_out,
        "warnings": list(dict.fromkeys(w for found in all_found for w in found.warnings)),
    }


def search_plans(
    cache: PredictionCache,
    trace: str,
    platform: str,
    ranks: int,
    batch: int,
    *,
    top: int = 10,
    space: Space | None = None,
    plans: Sequence[Plan] | None = None,
    cost_model: str = "",
    override: str = "",
    watch: Watch | None = None,
    draws: int = 0,
    seed: int = 0,
    jobs: int = 1,
) -> Found:
    """Return the best plans for a model on a number of ranks; trace and platform by their names in the cache.

    ``top`` are simulated at least; the others' arguments are as for ``search``. Raises InputError when no plan fits,
    numbers are not positive, or nothing can be read.

    The cost of all is estimated; what needs more memory than there is, counting what is certainly held, is dropped. The others are
    simulated in the order of their estimates until ``top`` are there and no further estimate, corrected by the worst
    error so far, promises to come among them, or ``FURTHER`` says to stop. Of plans that differ only in their buckets'
    size the best estimate is simulated.
    """
    if ranks < 1 or batch < 1 or top < 1:
        raise InputError(f"{ranks} ranks, a batch of {batch}, {top} plans: all must be positive")
    watch = watch or (lambda done, all_plans, doing: None)
    machine = cache.load_platform(platform, ranks)
    models, drawn = (cost_model, override), Options(draws=draws, seed=seed)
    one = _Search(cache, machine, models, trace, batch, top, watch, drawn)
    if plans is None:
        first = cache.load_traces(trace)[0]
        one.found.left_out = (space or Space()).list_left_out()
        plans = list(enumerate_plans(first, ranks, batch, space or Space(), one.found.fates))
    groups = group_variants(one.estimate(plans))
    for variants in groups[:top]:  # traced once, not by each copy of this process
        one.time_exactly(variants.best.plan)
    with Ahead(one.try_best, groups, jobs) as ahead:
        one.found.simulated = _simulate_best(
            groups, top, lambda variants: one.simulate(variants, ahead.take(one.tried))
        )
    for left in (same for rest in groups[one.tried :] for same in (rest.best, *rest.others)):
        one.found.fates.note(vars(left.plan), "slower", outlined_s=left.time_s)
    one.found.rank()
    return one.found


class _Search:
    """One search on one number of ranks: what it compares plans by, and what it has found so far."""

    def __init__(
        self,
        cache: PredictionCache,
        machine: Platform,
        models: tuple[str, str],
        trace: str,
        batch: int,
        top: int,
        watch: Watch,
        drawn: Options,
    ) -> None:
        self.cache, self.machine = cache, machine
        self.models = (models[0] or find_own_model(machine) or "", models[1])
        self.trace = trace
        self.times = times = cache.time_operators(trace, machine.device.described, *self.models)
        self.batch, self.watch = batch, watch
        self.most_tried, self.tried = FURTHER * top, 0
        self.options = drawn
        self.units = len(pipeline_units(times.traces[0]))
        self.found = Found(model_text=times.model_text, confidence=times.confidence)
        self.found.warnings += times.warnings

    def time_exactly(self, plan: Plan) -> DeviceTimes:
        """Return the times of a trace that ``predict`` starts from; ``times``, which plans are estimated by, are of one batch."""
        samples = count_samples(plan, self.batch)
        device = self.machine.device.described
        return self.cache.time_operators(self.trace, device, *self.models, samples)

    def estimate(self, plans: Sequence[Plan]) -> list[Candidate]:
        """Return the plans that may fit the memory, the fastest estimate first."""
        costs = UnitCosts(self.times, self.machine, choose_collectives(self.machine))
        trace = self.times.traces[0]
        candidates: list[Candidate] = []
        for place, plan in enumerate(plans):
            self.watch(place, len(plans), "estimated")
            try:
                check_shapes(plan, trace, micro_batch_sizes(plan, self.batch))
                step = estimate_step(costs, plan, self.batch)
            except PlanError as error:
                self.found.fates.refuse(vars(plan), error)
                continue
            self.found.estimated += 1
            device = self.machine.device
            likely = load_survival().find_probability(step.least_bytes, count_room(plan, device))
            if trace.names_results and likely < LIKELY:
                self._drop(plan, step.least_bytes, likely, "at least ")
            else:
                candidates.append(Candidate(step.time_s, plan, step.least_bytes))
        return sorted(candidates, key=lambda c: c.time_s)

    def simulate(self, variants: Variants, trial: _Trial) -> RankedPlan | None:
        """Keep what simulating the best of some variants told; None where it does not fit the memory."""
        self.watch(self.tried, self.most_tried, "tried in full, at most")
        self.tried += 1
        found = self.found
        for same in (variants.best, *variants.others):
            if trial.refused is not None:
                found.fates.refuse(vars(same.plan), trial.refused)
            elif trial.simulated is None:
                self._drop(same.plan, trial.wanted_bytes, trial.fit_probability or 0.0)
            else:
                found.fates.note(vars(same.plan), "simulated")
        found.confidence = max([found.confidence, trial.confidence], key=CONFIDENCES.index)
        found.warnings += trial.warnings
        return trial.simulated

    def try_best(self, variants: Variants) -> _Trial:
        """Simulate the best of some variants in full, if it fits the memory."""
        cache, plan = self.cache, variants.best.plan
        try:
            times = self.time_exactly(plan)
            step = prepare_step(resolve(times, plan, self.machine, batch=self.batch, options=self.options))
        except PlanError as error:
            return _Trial(0, None, error)
        if step.fits_memory is False:
            return _Trial(step.wanted_bytes, step.fit_probability)
        result = cache.simulate(step)
        highest = step.graph.metadata.uncertainty.compute[1]
        slower = step.replace_options(interval=False, compute_scale=highest, draws=0)
        time_s, draws = result.step_time_s, result.draws
        ranked_s = time_s if draws is None else draws.expected_s
        compute_log = math.log(cache.simulate(slower).step_time_s / time_s)
        rest_log = max(math.log(result.high_s / time_s) - compute_log, 0.0)
        likely = step.fit_probability
        row = {
            "plan_text": describe_way(plan, self.batch, self.times.traces[0]),
            "notation": describe_way(plan, self.batch, self.times.traces[0], brief=True),
            "step_time_s": result.step_time_s,
            "expected_s": ranked_s,
            "low_s": result.low_s,
            "high_s": result.high_s,
            "exposed_communication_s": result.exposed_communication_s,
            "micro_batch_samples": self.batch / plan.data / plan.pieces,
            "peak_memory_bytes": step.known_peak_bytes,
            "fit_probability": likely,
            "crowded": likely is not None and likely < DOUBTED,
            "outlined_s": variants.best.time_s,
            "ranks": self.machine.ranks,
            **variants.compare_buckets(),
            **{name: getattr(plan, name) for name in PLAN_COLUMNS},
            **describe_rates(self.times.traces[0].facts, self.batch, ranked_s, self.machine.ranks, self.machine.device),
        }
        weighed = RankedStep(ranked_s, compute_log, rest_log)
        one = RankedPlan(row, weighed, variants.best, time_s, draws)
        return _Trial(step.wanted_bytes, likely, None, one, result.confidence, result.warnings)

    def _drop(self, plan: Plan, needed_bytes: int, likely: float, how: str = "") -> None:
        needed_bytes += count_plan_outside(plan, self.machine.device.kind)
        sizes = format_apart(needed_bytes, self.machine.device.memory_bytes)
        reason = f"needs {how}{' of '.join(sizes)}, {describe_probability(likely)}"
        entry: dict[str, Any] = {"reason": reason, "needed_bytes": needed_bytes, "fit_probability": likely}
        entry["plan_text"] = describe_way(plan, self.batch, self.times.traces[0])
        self.found.dropped.append(entry)
        self.found.fates.note(vars(plan), "out_of_memory", **entry)


def _simulate_best(groups: Sequence[Variants], top: int, run: Any) -> list[RankedPlan]:
    """Simulate plans in order until no other one promises to be among the best."""
    done: list[RankedPlan] = []
    for variants in groups:
        roomy_s = sorted(one.prediction.time_s for one in done if not one.row["crowded"])
        if len(roomy_s) >= top:
            kept_s = roomy_s[top - 1]
            highest = max(one.candidate.time_s / one.prediction.time_s for one in done)
            if variants.best.time_s / highest > kept_s:
                break
        if len(done) >= FURTHER * top * (1 if len(roomy_s) >= top else 2):
            break
        one = run(variants)
        if one is not None:
            done.append(one)
    return done
