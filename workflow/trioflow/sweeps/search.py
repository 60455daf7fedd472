"""The search for a plan: estimate thousands, simulate the best in full, rank them; `search` and `plan` are the doors.

A `SearchResult` says which plans were simulated, in order, which variants were tried together, and what became of the
others. `plan` asks the whole question at once: the best plans of a model on some GPUs, what they take and cost.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import pandas as pd

from trioflow import tables
from trioflow.base.ahead import Ahead, count_jobs
from trioflow.base.arguments import check_argument, check_names, show_fields
from trioflow.base.errors import InputError, PlanError
from trioflow.base.experiments import Plan
from trioflow.base.units import format_apart
from trioflow.costmodel.choices import DeviceTimes, find_own_model, read_gpus
from trioflow.costmodel.uncertainty import CONFIDENCES
from trioflow.formats.launch import FRAMEWORKS, express
from trioflow.hardware.machine import Platform
from trioflow.network.across_nodes import INTER_NODE, open_platform
from trioflow.parallel.extrapolate import NoRoomError
from trioflow.parallel.memory.peak import (
    DOUBTED,
    LIKELY,
    count_needed,
    count_plan_outside,
    count_room,
    count_wanted,
    describe_probability,
    load_survival,
)
from trioflow.parallel.plan import check_shapes, micro_batch_sizes
from trioflow.parallel.splits.tensor_split import BALANCED, read_routing
from trioflow.prediction.assembly import Draws, Prediction, choose_collectives, predict, predict_step, prepare_step
from trioflow.prediction.breakdown import describe_rates, describe_run
from trioflow.prediction.question import (
    DEFAULTS,
    SORTS,
    STEP_WORDS,
    Options,
    Traces,
    count_samples,
    find_model,
    resolve,
)
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
from trioflow.trace.language.sizes import BLOCKS, Configuration

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


class SearchResult(dict[str, Any]):
    """What a search found: a dictionary with the keys of ``trioflow search --json``, of which ``ranking`` is the list of plans.

    ``traces``, ``platform``, ``options``: what the plans are of, for ``predict``.
    """

    def __init__(
        self,
        answer: Mapping[str, Any],
        traces: Traces = (),
        platform: Platform | str | Path = "",
        options: Options = DEFAULTS,
    ) -> None:
        super().__init__(answer)
        self.traces, self.platform, self.options = traces, platform, options

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

    def predict(self, place: int = 0) -> Prediction:
        """Return the prediction of the plan at a place of the ranking, from 0, without draws."""
        row = self["ranking"][place]
        recipe = {name: row[name] for name in ("precision", "fusion") if self.options.precision}
        options = replace(self.options, **recipe, draws=0)
        return predict(self.traces, self.plans[place], self.platform, batch=self["batch"], options=options)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``trioflow search --json`` prints."""
        return dict(self)

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
    """What searches found, on each number of ranks and under each precision recipe.

    ``ranking``: of ``simulated``, the fastest first on each number of ranks, behind them those whose memory is less
    than ``memory.peak.DOUBTED`` to suffice (``crowded``), each with its best bucket size; ``other_buckets`` lists the others
    (``bucket_bytes`` [bytes], ``outlined_s`` [s]), ``alike_buckets`` counts those within a hundredth. ``fates``: what
    became of all plans, by family. ``left_out``: kinds of plans not looked at. ``estimated``: plans whose step was
    estimated. ``confidence``, ``model_texts``: of the operators' times.
    """

    simulated: list[RankedPlan] = field(default_factory=list)
    ranking: list[dict[str, Any]] = field(default_factory=list)
    fates: Fates = field(default_factory=Fates)
    left_out: list[str] = field(default_factory=list)
    estimated: int = 0
    confidence: str = CONFIDENCES[0]
    model_texts: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def estimate_error(self) -> tuple[float, float]:
        """Least and greatest estimated over simulated step, less 1."""
        ratios = [one.candidate.time_s / one.steady_s - 1 for one in self.simulated]
        return min(ratios, default=0.0), max(ratios, default=0.0)

    def rank(self) -> None:
        """Put the simulated plans in order, each with the probability that the first one on its ranks beats it."""
        self.simulated.sort(key=lambda one: (one.row["ranks"], one.row["crowded"], one.prediction.time_s))
        self.ranking, firsts = [], dict[int, RankedPlan]()
        for one in self.simulated:
            first = firsts.setdefault(one.row["ranks"], one)
            row = {**one.row, "first_faster_probability": probability_faster(first.prediction, one.prediction)}
            if one.draws is not None and first.draws is not None:
                row["first_faster_drawn"] = first.draws.beats(one.draws)
            self.ranking.append(row)


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
    check_names([sort], SORTS, "order of plans")
    if jobs < 1:
        raise InputError(f"--jobs {jobs} is not positive")
    for flag, value in (("price-per-gpu-hour", price_per_gpu_hour), ("power-w", power_w)):
        if value is not None and check_argument(flag, value, "float") <= 0:
            raise InputError(f"--{flag} {value} is not positive")
    options = Options(cost_model=cost_model, override=override, draws=draws, seed=seed, routing=routing, **step)
    recipes = list(dict.fromkeys(map(str.strip, (step.get("precision") or "").split(","))))
    name = platform.name if isinstance(platform, Platform) else str(platform)
    cache = PredictionCache(
        dict.fromkeys(recipes, traces),
        {name: platform},
        steps={recipe: _name_step(recipe, options.language_step) for recipe in recipes},
        routing=read_routing(routing, seed),
        inter_node=options.inter_node,
    )
    facts = cache.load_traces(recipes[0])[0].facts
    batch = facts.batch * max(counts) if batch is None else batch
    result = Found()
    for count, recipe in product(counts, recipes):
        space = choose_space(cache.load_traces(recipe)[0].facts, recipe in data_parallel)
        search_plans(
            cache,
            recipe,
            name,
            count,
            batch,
            top=top,
            space=space,
            options=options,
            watch=watch,
            jobs=jobs,
            found=result,
        )
        for entry in result.fates.dropped if len(recipes) > 1 else ():
            entry.setdefault("precision", recipe)
    ranking = sorted(
        result.ranking,
        key=lambda row: (row["crowded"], float(row["expected_s"]) * (row["ranks"] if sort == SORTS[1] else 1)),
    )
    columns = add_costs(ranking, price_per_gpu_hour, power_w)
    for row in ranking:
        if run := describe_run(row, tokens, price_per_gpu_hour, power_w, budget=budget):
            row["run"] = run
    mark_front(ranking, columns)
    second = ranking[1] if len(counts) == 1 and len(ranking) > 1 else {}
    answer = {
        "workload": facts.workload,
        "platform": name,
        "ranks": counts,
        "batch": batch,
        **({"precisions": recipes} if len(recipes) > 1 else {}),
        "cost_model": "; ".join(dict.fromkeys(result.model_texts)),
        "confidence": result.confidence,
        "plans": result.estimated,
        "simulated": len(ranking),
        "outline_error": [*result.estimate_error],
        "ranking": ranking,
        "compared_by": columns,
        "first_beats_second": second.get("first_faster_probability"),
        **({"first_beats_second_drawn": second["first_faster_drawn"]} if "first_faster_drawn" in second else {}),
        "assumption": ASSUMPTION,
        "out_of_memory": result.fates.dropped,
        "refused": result.fates.list_reasons(),
        "families": result.fates.list_families(),
        "not_searched": result.left_out,
        "warnings": list(dict.fromkeys(result.warnings)),
    }
    return SearchResult(answer, traces, platform, options)


def _name_step(recipe: str, step: dict[str, Any]) -> dict[str, Any]:
    """Return what is asked of a language model's step under ``RECIPE`` or ``RECIPE+FUSION``; the default recipe without."""
    name, _, fusion = recipe.partition("+")
    return {**step, "precision": name or None, **({"fusion": fusion} if fusion else {})}


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
    options: Options = DEFAULTS,
    watch: Watch | None = None,
    jobs: int = 1,
    found: Found | None = None,
) -> Found:
    """Return the best plans for a model on a number of ranks, beside what was ``found`` before.

    Trace and platform go by their names in the cache, of the options cost model, override and draws count; the others'
    arguments are as for ``search``; ``top`` are simulated at least. Raises InputError when no plan fits,
    numbers are not positive, or nothing can be read.

    The cost of all is estimated; what needs more memory than there is, counting what is certainly held, is dropped. The others are
    simulated in the order of their estimates until ``top`` are there and no further estimate, corrected by the worst
    error so far, promises to come among them, or ``FURTHER`` says to stop. Of plans that differ only in their buckets'
    size the best estimate is simulated.
    """
    if ranks < 1 or batch < 1 or top < 1:
        raise InputError(f"{ranks} ranks, a batch of {batch}, {top} plans: all must be positive")
    found = Found() if found is None else found
    one = _Search(cache, cache.load_platform(platform, ranks), trace, batch, FURTHER * top, watch, options, found)
    if plans is None:
        space = space or Space()
        found.left_out = space.list_left_out()
        plans = list(enumerate_plans(cache.load_traces(trace)[0], ranks, batch, space, found.fates))
    groups = group_variants(one.estimate(plans))
    for variants in groups[:top]:  # traced once, not by each copy of this process
        one.time_exactly(variants.best.plan)
    with Ahead(one.try_best, groups, jobs) as ahead:
        found.simulated += _simulate_best(groups, top, lambda variants: one.keep(variants, ahead.take(one.tried)))
    for left in (same for rest in groups[one.tried :] for same in (rest.best, *rest.others)):
        found.fates.note(vars(left.plan), "slower", outlined_s=left.time_s)
    found.rank()
    return found


class _Search:
    """One search on one number of ranks: what it compares plans by, and where it puts what it finds."""

    def __init__(
        self,
        cache: PredictionCache,
        machine: Platform,
        trace: str,
        batch: int,
        most_tried: int,
        watch: Watch | None,
        options: Options,
        result: Found,
    ) -> None:
        self.cache, self.machine, self.trace, self.batch = cache, machine, trace, batch
        self.most_tried, self.tried, self.found = most_tried, 0, result
        self.watch: Watch = watch or (lambda done, all_plans, doing: None)
        self.models = (str(options.cost_model or find_own_model(machine) or ""), str(options.override or ""))
        self.options = Options(draws=options.draws, seed=options.seed)
        self.times = times = cache.time_operators(trace, machine.device.described, *self.models)
        result.model_texts.append(times.model_text)
        result.confidence = max(result.confidence, times.confidence, key=CONFIDENCES.index)
        result.warnings += times.warnings

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

    def keep(self, variants: Variants, trial: _Trial) -> RankedPlan | None:
        """Keep what simulating the best of some variants told; None where it does not fit the memory."""
        self.watch(self.tried, self.most_tried, "tried in full, at most")
        self.tried += 1
        result = self.found
        for same in (variants.best, *variants.others):
            if trial.refused is not None:
                result.fates.refuse(vars(same.plan), trial.refused)
            elif trial.simulated is None:
                self._drop(same.plan, trial.wanted_bytes, trial.fit_probability or 0.0)
            else:
                result.fates.note(vars(same.plan), "simulated")
        result.confidence = max(result.confidence, trial.confidence, key=CONFIDENCES.index)
        result.warnings += trial.warnings
        return trial.simulated

    def try_best(self, variants: Variants) -> _Trial:
        """Simulate the best of some variants in full, if it fits the memory."""
        plan = variants.best.plan
        try:
            times = self.time_exactly(plan)
            question = resolve(times, plan, self.machine, batch=self.batch, options=self.options)
            step = prepare_step(question, must_fit=not self.machine.corrections)
        except NoRoomError as error:
            sizes = count_needed(error.memory), count_room(plan, self.machine.device)
            return _Trial(max(map(count_wanted, error.memory)), load_survival().find_probability(*sizes))
        except PlanError as error:
            return _Trial(0, None, error)
        if step.fits_memory is False:
            return _Trial(step.wanted_bytes, step.fit_probability)
        result = predict_step(step)
        highest = step.options.scale_compute(step.graph.metadata.uncertainty.compute[1]).compute_scale
        slower = step.replace_options(interval=False, compute_scale=highest, draws=0)
        time_s, draws = result.step_time_s, result.draws
        ranked_s = time_s if draws is None else draws.expected_s
        compute_log = math.log(predict_step(slower).step_time_s / time_s)
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


RUN_TOKENS = 1e12
"""Of the run that is reported where nobody says how long it is."""
MOST_SHOWN = 3
_TYPICAL_TOKENS = ((0.0, 2**19), (1e9, 2**20), (6e9, 2**22))
"""Parameters of a model from which on a step has so many tokens: GPT-3's of up to 2.7 B parameters (arXiv 2005.14165, table
2.1: 0.5 and 1 million), and Llama 2's of 7 B and more (arXiv 2307.09288: 4 million)."""
_KINDS = ("ranks", "data", "tensor", "context", "pipeline", "expert", "sharding", "precision", "fusion")
"""Columns in which plans that are shown beside one another differ."""


@dataclass(frozen=True)
class BestPlans:
    """The best plans of a model on some GPUs.

    ``found``: the answer of ``search``. ``shown``: the best rows of its ranking that differ in degrees or sharding.
    ``prediction``: that of the best plan. ``run``: tokens, price [per GPU-hour] and memory margin, as passed.
    ``assumed``: the values of arguments that were not passed. ``launch``: per framework, the best ``plan`` that it can
    express with its configuration (``file``, ``text``), or ``why`` there is none.
    """

    found: SearchResult
    shown: list[dict[str, Any]]
    prediction: Prediction
    run: dict[str, Any]
    assumed: dict[str, Any]
    launch: dict[str, dict[str, str]]

    def to_frame(self) -> pd.DataFrame:
        """Return the whole ranking, a row a plan."""
        return self.found.to_frame()

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as ``trioflow plan --json`` prints it: that of ``search`` with the first plan's prediction."""
        best = self.prediction.to_dict()
        return {
            **self.found,
            **self.run,
            "shown": self.shown,
            "best": best,
            "parts_s": self.prediction.parts_s,
            "assumed": self.assumed,
            "launch": self.launch,
        }


@show_fields(Options, only=(*STEP_WORDS, *INTER_NODE))
def plan(
    model: str,
    gpus: str,
    *,
    tokens: float | None = None,
    budget: float | None = None,
    price: float | None = None,
    power_w: float | None = None,
    batch: int | None = None,
    memory_margin: float = 0.0,
    routing: str = BALANCED,
    frameworks: Sequence[str] = (),
    top: int = 3,
    watch: Watch | None = None,
    jobs: int | None = None,
    **step: "Unpack[StepKeywords]",
) -> BestPlans:
    """Return the best plans of a model on some GPUs: what ``trioflow plan`` answers.

    ``model``: a language model by name or configuration, or a trace. ``gpus``: number and name, such as ``256xH100``;
    the name is a GPU, a platform or a platform's file. ``tokens``: length of the training run, 10^12 by default, or
    what ``budget`` pays for. ``price``: per GPU-hour. ``power_w``: power per GPU [W], by default the data sheet's limit. ``batch``: global batch
    [samples], by default what models of this size are usually trained with. ``memory_margin``: share of each GPU's
    memory to leave free. ``frameworks``: those of ``FRAMEWORKS`` to write launch configurations for; without a
    ``precision`` each uses its own recipe. ``top``: how many plans to simulate in full at least. ``watch``, ``jobs``,
    ``routing``: as for ``search``. ``step``: ``STEP_WORDS`` and ``INTER_NODE``. Raises InputError when nothing fits, or
    as ``search``.
    """
    if not 0 <= memory_margin < 1:
        raise InputError(f"--memory-margin {memory_margin:g} must be at least 0 and below 1")
    check_names(frameworks, FRAMEWORKS, "framework")
    ranks, name = read_gpus(gpus)
    inter_node: dict[str, Any] = {key: step.get(key) for key in INTER_NODE}
    machine = open_platform(name, ranks, **inter_node)
    machine = replace(machine, device=machine.device.keep_free(memory_margin))
    named = find_model(model)
    configuration = named if isinstance(named, Configuration) else None
    assumed: dict[str, Any] = {} if name == machine.name else {"platform": machine.name}
    if configuration is not None:
        sequence = step.get("sequence") or configuration.step.get("sequence")
        if sequence is None:
            sequence = assumed["sequence"] = configuration.usual_sequence
        batch = configuration.global_batch if batch is None else batch
        if batch is None:
            batch = assumed["batch"] = choose_batch(configuration, sequence, ranks)
    sheet = machine.device.sheet
    if power_w is None and sheet is not None and math.isfinite(sheet.power_limit_w):
        power_w = assumed["power_w"] = sheet.power_limit_w
    if tokens is None and budget is None and configuration is not None:
        tokens = assumed["tokens"] = RUN_TOKENS
    if frameworks and configuration is None:
        raise InputError(f"{model}: launch configurations exist only for language models by name or configuration")
    if frameworks and step.get("precision") is None:
        step["precision"] = ",".join(dict.fromkeys(FRAMEWORKS[name].recipe for name in frameworks))
    result = search(
        [model],
        ranks,
        machine,
        data_parallel=[FRAMEWORKS[name].recipe for name in frameworks if FRAMEWORKS[name].data_parallel],
        batch=batch,
        top=top,
        price_per_gpu_hour=price,
        power_w=power_w,
        tokens=tokens,
        budget=budget,
        routing=routing,
        watch=watch,
        jobs=count_jobs() if jobs is None else jobs,
        **step,
    )
    if not result["ranking"]:
        nearest = min(result["out_of_memory"], key=lambda row: row["needed_bytes"], default=None)
        why = f"; the nearest, {nearest['plan_text']}, {nearest['reason']}" if nearest else ""
        raise InputError(f"no plan fits {gpus}{why}", fix="use more GPUs, a smaller batch or sequence")
    launch = {name: _write_launch(name, configuration, result) for name in frameworks if configuration}
    run = {
        "gpus": gpus,
        "tokens": tokens,
        "budget": budget,
        "price_per_gpu_hour": price,
        "memory_margin": memory_margin,
    }
    return BestPlans(result, choose_shown(result["ranking"]), result.predict(), run, assumed, launch)


def _write_launch(framework: str, configuration: Configuration, result: SearchResult) -> dict[str, str]:
    """Return a framework's file for the best plan that it can express, or why there is none."""
    reasons = []
    for place, (row, each) in enumerate(zip(result["ranking"], result.plans, strict=True)):
        words = {name: row[name] for name in ("sequence", "precision", "fusion")}
        wanted = replace(configuration, step=words, global_batch=result["batch"], stages=())
        text, why = express(framework, wanted, each, configuration.model.name)
        if text and each.pipeline > 1:
            stages = result.predict(place).task_graph.metadata.stages
            blocks = tuple(sum(unit.startswith(BLOCKS) for unit in stage) for stage in stages)
            text, why = express(framework, replace(wanted, stages=blocks), each, configuration.model.name)
        if text:
            return {"file": FRAMEWORKS[framework].file, "plan": row["notation"], "text": text}
        reasons.append(why)
    return {"why": f"{FRAMEWORKS[framework].title} cannot express the best plan: {reasons[0]:.100}"}


def choose_batch(configuration: Configuration, sequence: int, ranks: int) -> int:
    """Return the samples of a step that a model is usually trained with, such that the GPUs can share them.

    A multiple of the GPUs where there are fewer of them, else of their odd factor.
    """
    tokens = [tokens for least, tokens in _TYPICAL_TOKENS if configuration.model.parameters >= least][-1]
    samples = max(tokens // sequence, 1)
    unit = ranks if ranks <= samples else ranks // (ranks & -ranks)
    return -(-samples // unit) * unit


def choose_shown(ranking: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the best plans that differ in more than stages, micro-batches and recomputation, the first of each kind."""
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in ranking:
        kinds.setdefault(tuple(row.get(name) for name in _KINDS), row)
    return list(kinds.values())[:MOST_SHOWN]
