"""Judge drift in recorded jobs: what half of a job's steps say of the other half's, what made steps slow; and the page.

`judge_drift` is the door. The steps of a `Job` are one task graph, with what each task took in each step.

A rank's operations follow one another; a send and a recv that start at the same instant are one call and
run at once. Operations of several ranks end together: between two stages, over the replicas of a stage,
over the first and last stage (embeddings), and over all ranks (the norm of the gradients). What such an
exchange takes is counted from when its last member began. All else is idle time of the host, a task of
its own before each operation; where it ends in every step with the arrival of another rank of the stage
or of the replica, ranks wait for one another in what was not recorded, and only the rest is the host's.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import ks_2samp
from trioflow import tables
from trioflow.base.errors import TableError
from trioflow.base.provenance import stamp
from trioflow.costmodel.uncertainty import HEADER, SHIPPED_SPREADS, MeasuredSpread, Spread, draw_normals
from trioflow.engine.program import Floats, Ints
from trioflow.engine.result import DrawnGraph
from trioflow.parallel.task_graph import TaskGraph
from trioflow.report.attribution import share_change
from trioflow.report.pages import (
    Page,
    Section,
    count_words,
    numbers,
    render_details,
    render_paragraph,
    render_records,
    words,
    write_markdown,
    write_page,
    write_percent,
    write_signed_percent,
)

from trioflow_evaluation.tables import DRIFT_CAUSES, DRIFT_HALVES

JOBS_FOLDER = "ByteDance-Seed+StragglerAnalysis/data"
"""Where the jobs lie in results/data."""
SOURCE = "ByteDance-Seed/StragglerAnalysis at 8efcd7f3, data/{}.parquet, Apache-2.0"
COMPUTE, EXCHANGE, HOST = "compute", "exchange", "host"
PASSES = {"forward-compute": "forward", "backward-compute": "backward"}
_OF_STAGE = ("params-all-gather", "grads-reduce-scatter")
_OF_ALL = "optimizer-clip-main-grad"
_OF_EMBEDDINGS = "embedding-grads-all-reduce"
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
_OPERATION = ["rank", "optype", "seq_id"]


@dataclass(frozen=True, eq=False)
class Job:
    """A recorded job: ``tasks`` of a step (a row each), and ``graph``, who waits for whom.

    ``item_s``: what each item took in each step [items, steps] [s]; ``step_s``: from the first
    start to the last end [steps] [s]; ``numbers`` of the steps, of which not all were recorded.
    """

    name: str
    tasks: pd.DataFrame
    graph: DrawnGraph
    item_s: Floats
    step_s: Floats
    numbers: Ints

    @property
    def ranks(self) -> int:
        """Recorded ranks."""
        return int(self.tasks["rank"].nunique())

    @property
    def items(self) -> pd.DataFrame:
        """The first task of each item, in the items' order."""
        _, first = np.unique(self.graph.item_of, return_index=True)
        return self.tasks.iloc[first].reset_index(drop=True)

    def play(self, item_s: Floats) -> Floats:
        """Return steps whose items take given times [items, steps] [s]: [steps] [s]."""
        return self.graph.run(np.arange(len(item_s)), item_s).step_s

    def list_passes(self, steps: Any = slice(None)) -> pd.DataFrame:
        """Return the passes of some steps as ``fit_spread`` takes them."""
        return self._list(COMPUTE, steps, ["replica", "stage", "rank", "phase", "micro_batch"])

    def list_exchanges(self, steps: Any = slice(None)) -> pd.DataFrame:
        """Return the exchanges of some steps as ``fit_spread`` takes them."""
        exchanges = self._list(EXCHANGE, steps, ["rank", "optype", "micro_batch"])
        names = exchanges["optype"] + exchanges["rank"].astype(str) + "." + exchanges["micro_batch"].astype(str)
        return exchanges.assign(exchange=names)

    def _list(self, kind: str, steps: Any, columns: list[str]) -> pd.DataFrame:
        items = self.items
        chosen = np.flatnonzero(_find_passes(items) if kind == COMPUTE else items["kind"] == kind)
        numbers = self.numbers[steps]
        rows = items.iloc[np.repeat(chosen, len(numbers))][columns].reset_index(drop=True)
        return rows.assign(step=np.tile(numbers, len(chosen)), time_s=self.item_s[chosen][:, steps].ravel())


def read_job(path: str | Path) -> Job:
    """Read a job of StragglerAnalysis; TableError where a column, a number or a step's operation is missing."""
    path = Path(path)
    rows = pd.read_parquet(path)
    missing = [name for name in _COLUMNS if name not in rows]
    if missing:
        raise TableError(f"no column {missing[0]!r}", file=path, fix="retrieve it anew")
    rows = rows[list(_COLUMNS)].astype({"optype": str, "start_ts": float, "duration": float})
    rows = rows.sort_values(["step", "rank", "start_ts", "optype", "seq_id"], kind="stable")
    if not (rows["duration"] >= 0).all() or not np.isfinite(rows["start_ts"]).all():
        raise TableError("a time is negative or none", file=path, fix="retrieve it anew")
    steps = rows["step"].nunique()
    count = len(rows) // steps
    first = rows.iloc[:count].reset_index(drop=True)
    # Each operation of a step at the place that it has in the first, whatever starts at one instant.
    places = pd.MultiIndex.from_frame(first[_OPERATION])
    wanted = pd.MultiIndex.from_frame(rows[_OPERATION])
    at = np.array(places.get_indexer(wanted)) if places.is_unique else np.full(len(rows), -1)
    order = np.lexsort((at, rows["step"].to_numpy()))
    if not np.array_equal(at[order], np.tile(np.arange(count), steps)):
        raise TableError("a step lacks operations that another has", file=path, place="column step")
    table = rows.iloc[order]
    starts_s, lasting_s = (table[name].to_numpy().reshape(steps, count).T for name in ("start_ts", "duration"))
    return _build(path.stem, first, starts_s, starts_s + lasting_s, table["step"].to_numpy(np.int64)[::count])


def _build(name: str, first: pd.DataFrame, starts_s: Floats, ends_s: Floats, steps: Ints) -> Job:
    """Build the job from the operations of a step, in order, and their starts and ends in all [operations, steps]."""
    exchange = _name_exchanges(first)
    matches, texts = pd.factorize(pd.Series(exchange).where(exchange != "", None))
    length_s = ends_s - starts_s
    for one in range(len(texts)):
        members = matches == one
        begun_s = starts_s[members].max(axis=0)
        length_s[members] = np.maximum(ends_s[members].min(axis=0) - begun_s, 0.0)
        ends_s = np.where(members[:, None], begun_s + length_s[members][0], ends_s)
    program = _Program()
    rank, call_s = -1, starts_s[0]
    for place, row in enumerate(tables.records(first)):
        same_rank = rank == row["rank"]
        rank, match = row["rank"], int(matches[place])
        if same_rank and (starts_s[place] == call_s).all():
            program.add_beside(row, match, length_s[place], ends_s[place])
            continue
        call_s = starts_s[place]
        program.add_call(row, match, call_s, length_s[place], ends_s[place], same_rank)
    program.find_unrecorded()
    return _join(name, program, ends_s.max(axis=0), steps)


@dataclass(frozen=True, eq=False)
class _Call:
    """An operation of a rank, or two that begin together."""

    row: Mapping[str, Any]
    host: int  # The host's task before it
    before: list[int]  # What that waits for
    arrived_s: Floats  # When that had ended [steps]
    start_s: Floats  # When the call began [steps]


_WAITED = 0.1
"""Share of the host's time that is left at most where it was a wait for other ranks."""


class _Program:
    """Tasks of a step, in the order of each rank, what each took in all steps, and who waits for whom."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.times_s: list[Floats] = []
        self.pairs: list[tuple[int, int]] = []
        self._calls: list[_Call] = []
        self._together: list[int] = []  # What the next call of the rank waits for
        self._host = -1  # The host's task before them
        self._until_s: Floats = np.zeros(0)  # When they had all ended [steps]

    def add_call(
        self, row: Mapping[str, Any], match: int, start_s: Floats, length_s: Floats, end_s: Floats, same_rank: bool
    ) -> None:
        """Add an operation, and the host's time from the end of the one before it, or of the step's start."""
        until_s = self._until_s if same_rank else np.zeros_like(start_s)
        self._host = self._add(row, HOST, "main", -1, np.maximum(start_s - until_s, 0.0))
        before = self._together if same_rank else []
        self.pairs += [(self._host, one) for one in before]
        self._calls.append(_Call(row, self._host, before, until_s, start_s))
        self._together = [self._add(row, COMPUTE if match < 0 else EXCHANGE, "main", match, length_s)]
        self._until_s = end_s

    def add_beside(self, row: Mapping[str, Any], match: int, length_s: Floats, end_s: Floats) -> None:
        """Add an operation that began with the one before it."""
        task = self._add(row, COMPUTE if match < 0 else EXCHANGE, "beside", match, length_s)
        self.pairs.append((task, self._host))
        self._together.append(task)
        self._until_s = np.maximum(self._until_s, end_s)

    def find_unrecorded(self) -> None:
        """Let a rank's host wait for the ranks of its stage or replica where it did so in every step."""
        for name in ("stage", "dp_rank"):
            groups: dict[tuple[Any, ...], list[_Call]] = {}
            for call in self._calls:
                groups.setdefault((call.row["optype"], call.row["seq_id"], call.row[name]), []).append(call)
            for calls in groups.values():
                latest_s = np.max([call.arrived_s for call in calls], axis=0)
                for call in calls:
                    left_s, idle_s = call.start_s - latest_s, self.times_s[call.host]
                    if (left_s >= 0).all() and np.median(left_s) < _WAITED * np.median(idle_s):
                        self.times_s[call.host] = left_s
                        self.pairs += [(call.host, one) for other in calls for one in other.before]

    def _add(self, row: Mapping[str, Any], kind: str, stream: str, match: int, time_s: Floats) -> int:
        self.times_s.append(time_s)
        self.rows.append(
            {
                "rank": row["rank"],
                "stage": row["stage"],
                "replica": row["dp_rank"],
                "kind": kind,
                "optype": row["optype"],
                "phase": PASSES.get(row["optype"], ""),
                "micro_batch": row["seq_id"],
                "stream": stream,
                "match_id": match,
            }
        )
        return len(self.rows) - 1


def _join(name: str, program: _Program, step_s: Floats, steps: Ints) -> Job:
    tasks = pd.DataFrame(program.rows)
    timeline = tasks.assign(start_s=0.0, end_s=1.0)
    timeline["match_id"] = timeline["match_id"].where(timeline["match_id"] >= 0).astype("Int64")
    pairs = pd.DataFrame(program.pairs, columns=["task_id", "depends_on"], dtype=np.int64)
    graph = DrawnGraph(TaskGraph(tasks, pairs), timeline)
    _, first = np.unique(graph.item_of, return_index=True)
    return Job(name, tasks, graph, np.array(program.times_s)[first], step_s, steps)


def _name_exchanges(rows: pd.DataFrame) -> NDArray[Any]:
    """Return what tells each operation's exchange from others; empty of operations of one rank."""
    names = []
    for row in tables.records(rows):
        kind, stage, replica, number = (row[name] for name in ("optype", "stage", "dp_rank", "seq_id"))
        direction, _, end = kind.partition("-")
        if end in ("send", "recv"):
            # Between a stage and the next: forward from the one, backward from the other.
            lower = stage - ((direction == "forward") == (end == "recv"))
            names.append(f"{direction} {lower} {replica} {number}")
        elif kind in _OF_STAGE:
            names.append(f"{kind} {stage}")
        elif kind == _OF_EMBEDDINGS:
            names.append(f"{kind} {replica}")
        else:
            names.append(kind if kind == _OF_ALL else "")
    return np.array(names, dtype=object)


def fit_jobs(paths: Iterable[str | Path]) -> list[MeasuredSpread]:
    """Return the spread of recorded jobs, of all their steps."""
    fits = []
    for path in paths:
        job = read_job(path)
        spread, slow = fit_spread(job.list_passes(), job.list_exchanges())
        fits.append(
            MeasuredSpread("gpu", job.name, job.ranks, len(job.step_s), len(slow), spread, SOURCE.format(job.name))
        )
    return fits


DRAWS = 2000
QUANTILES = (0.1, 0.5, 0.9)
SAMPLED, JOINT = "sampled", "sampled, a step's parts together"
ONE_TIME, REPEATED = "median times", "quantiles of the other half"
METHODS = (JOINT, SAMPLED, ONE_TIME, REPEATED)
"""Predictions: samples in which what a step shares comes with its host and exchanges, or by itself;
medians alone; and the quantiles of the steps that all are made from."""
STAGES, RANKS, MICRO_BATCHES = "stages", "ranks", "micro-batches and steps"
COMMUNICATION, HOSTS = "communication", "host"
PARTS = (STAGES, RANKS, MICRO_BATCHES, COMMUNICATION, HOSTS)
"""What may make a step slower than its ideal: each is one player of `attribute_slowdown`."""


def split_steps(count: int) -> dict[str, NDArray[np.bool_]]:
    """Return, by name, which steps a prediction may see; the others are predicted."""
    number = np.arange(count)
    return {
        "even steps": number % 2 == 0,
        "odd steps": number % 2 == 1,
        "first half": number < count // 2,
        "second half": number >= count // 2,
    }


def judge_halves(job: Job, draws: int = DRAWS) -> pd.DataFrame:
    """Return predictions of each half of a job's steps from the other: columns of ``tables.DRIFT_HALVES``."""
    rows = []
    for name, seen in split_steps(len(job.step_s)).items():
        medians_s = _find_medians(job, seen)
        predictions = {
            JOINT: draw_steps(job, seen, draws, together=True),
            SAMPLED: draw_steps(job, seen, draws),
            ONE_TIME: job.play(medians_s[:, None]),
            REPEATED: job.step_s[seen],
        }
        measured = np.quantile(job.step_s[~seen], QUANTILES)
        for method, step_s in predictions.items():
            predicted = np.quantile(step_s, QUANTILES)
            rows.append(
                {
                    "job": job.name,
                    "seen": name,
                    "steps": int((~seen).sum()),
                    "method": method,
                    **{f"measured_{q * 100:.0f}_s": m for q, m in zip(QUANTILES, measured, strict=True)},
                    **{f"predicted_{q * 100:.0f}_s": p for q, p in zip(QUANTILES, predicted, strict=True)},
                    "distance": float(ks_2samp(step_s, job.step_s[~seen], method="asymp").statistic),
                }
            )
    return pd.DataFrame(rows)


def draw_steps(job: Job, seen: NDArray[np.bool_], draws: int, together: bool = False) -> Floats:
    """Return steps sampled from the medians and the spread of those that were seen [draws] [s].

    Passes take their rank's median times sampled factors. All else is taken whole from one of the
    steps, as its parts depend on one another; so is what passes share in a step, where ``together``
    says so.
    """
    steps = np.flatnonzero(seen)
    spread, _ = fit_spread(job.list_passes(steps), job.list_exchanges(steps), lasting=False)
    items = job.items
    chosen, passes = np.random.default_rng(0).choice(steps, draws), _find_passes(items)
    sampled_s, medians_s = job.item_s[:, chosen], _find_medians(job, seen)[passes, None]
    own = items[passes].reset_index(drop=True)
    parts = (
        (0.0 if together else spread.step_log, np.zeros(len(own), dtype=np.int64)),
        (spread.rank_log, own.groupby("rank").ngroup()),
        (spread.micro_batch_log, own.groupby(["replica", "micro_batch"]).ngroup()),
        (spread.pass_log, np.arange(len(own))),
    )
    logs = np.zeros((len(own), draws))
    for number, (deviation, group) in enumerate(parts):
        own_group = np.asarray(group)
        normals = draw_normals(0, number, 0, (int(own_group.max()) + 1, draws))
        logs += deviation * normals[own_group]
    if together:
        logs += np.log(job.item_s[passes][:, chosen] / medians_s).mean(axis=0)
    sampled_s[passes] = medians_s * np.exp(logs)
    return job.play(sampled_s)


def _find_passes(items: pd.DataFrame) -> NDArray[np.bool_]:
    return np.asarray((items["kind"] == COMPUTE) & items["optype"].isin(PASSES))


def _find_medians(job: Job, seen: NDArray[np.bool_]) -> Floats:
    """Return the median of each item over the steps seen; of passes that of all passes of the rank [items] [s]."""
    medians_s: Floats = np.median(job.item_s[:, seen], axis=1)
    items, passes = job.items, _find_passes(job.items)
    for _, rows in items[passes].groupby(["rank", "phase"]).groups.items():
        medians_s[rows] = np.median(job.item_s[np.asarray(rows)][:, seen])
    return medians_s


def attribute_slowdown(job: Job) -> pd.DataFrame:
    """Return what each part costs over the ideal step: columns of ``tables.DRIFT_CAUSES``.

    In the ideal step each pass takes the mean of its phase over all stages, ranks, micro-batches and
    steps, where a rank counts by the others of its stage; each exchange the median of its kind; the
    host's time before each kind of operation its median. A part's share is its Shapley value: the
    mean, over all orders of putting parts right, of what it takes off the median step.
    """
    factors = _list_factors(job)

    @cache
    def play(right: frozenset[str]) -> float:
        item_s = job.item_s.copy()
        for name in sorted(right):
            item_s = factors[name](item_s)
        return float(np.median(job.play(item_s)))

    actual_s, ideal_s = play(frozenset()), play(frozenset(PARTS))
    slowdown_s = actual_s - ideal_s
    rows = [
        {
            "job": job.name,
            "part": name,
            "actual_s": actual_s,
            "ideal_s": ideal_s,
            "share": share_s / slowdown_s,
            "alone": (actual_s - play(frozenset([name]))) / slowdown_s,
        }
        for name, share_s in share_change(PARTS, play).items()
    ]
    return pd.DataFrame(rows)


def _list_factors(job: Job) -> Mapping[str, Callable[[Floats], Floats]]:
    """Return what puts each part right: changes of items' times [items, steps]; they commute."""
    items, passes = job.items, _find_passes(job.items)
    own = items[passes]
    whole_s = pd.Series(np.median(job.item_s[passes], axis=1), index=own.index)
    rank_s = whole_s.groupby([own["rank"], own["phase"]]).transform("median")
    stage_s = rank_s.groupby([own["stage"], own["phase"]]).transform("median")
    mean_s = stage_s.groupby(own["phase"]).transform("mean")

    def scale(values: Floats) -> Callable[[Floats], Floats]:
        factor = np.ones((len(items), values.shape[1]))
        factor[passes] = values
        return lambda item_s: item_s * factor

    def settle(kind: str) -> Callable[[Floats], Floats]:
        chosen, medians_s = (items["kind"] == kind).to_numpy(), np.zeros(len(items))
        for rows in items[chosen].groupby("optype").groups.values():
            medians_s[np.asarray(rows)] = np.median(job.item_s[np.asarray(rows)])
        return lambda item_s: np.where(chosen[:, None], medians_s[:, None], item_s)

    return {
        STAGES: scale((mean_s / stage_s).to_numpy()[:, None]),
        RANKS: scale((stage_s / rank_s).to_numpy()[:, None]),
        MICRO_BATCHES: scale(rank_s.to_numpy()[:, None] / job.item_s[passes]),
        COMMUNICATION: settle(EXCHANGE),
        HOSTS: settle(HOST),
    }


_MEDIAN_AIM, _QUANTILE_AIM = 0.03, 0.05
"""Errors of the median and of the other quantiles that were aimed at."""
NAMES = tuple(f"{quantile * 100:.0f}" for quantile in QUANTILES)
"""Quantiles as columns call them."""
_HALVES = (
    "Each half of a job's steps is predicted from the medians and the spread of the other half. The order of a rank's "
    "operations, and who waits for whom, is the job's; with what each operation took, the same graph repeats every recorded "
    f"step to 0.005 % (a test). Aims: the median within {write_percent(_MEDIAN_AIM, 0)}, the other quantiles within {write_percent(_QUANTILE_AIM, 0)}."
)
_CAUSES = (
    "The median step beside an ideal one: each pass takes the mean of its phase over stages, ranks and steps, each collective "
    "and the host the median of its kind. What a part costs is its Shapley value, so parts sum to the whole slowdown. The "
    "authors say what is wrong with the jobs: in AR they slowed one rank down, ST's last stage is too long."
)


def judge_drift(files: Sequence[str | Path], halves: str | Path, causes: str | Path, page: str | Path) -> None:
    """Judge recorded jobs, and write two tables and a page; TableError where a job's file is damaged."""
    jobs = [read_job(file) for file in sorted(files, key=str)]
    judged = pd.concat([judge_halves(job) for job in jobs], ignore_index=True)
    caused = pd.concat([attribute_slowdown(job) for job in jobs], ignore_index=True)
    facts = stamp(files)
    tables.write_table(judged, "drift_halves", halves, facts, DRIFT_HALVES)
    tables.write_table(caused, "drift_causes", causes, facts, DRIFT_CAUSES)
    content = [
        Section("halves", "One half of the steps from the other", [render_paragraph(_HALVES), _render_halves(judged)]),
        Section("causes", "What made the steps slow", [render_paragraph(_CAUSES), _render_causes(caused)]),
    ]
    ours = judged[judged["method"] == JOINT]
    error = ours.apply(find_error, axis=1, quantile="50").abs()
    ends = pd.concat([ours.apply(find_error, axis=1, quantile=name).abs() for name in NAMES if name != "50"])
    lead = (
        f"Steps of {count_words(len(jobs), 'recorded job')} of ByteDance, predicted from others of their own steps: what "
        "jitter costs a step."
    )
    verdict = (
        f"The median step is predicted within {write_percent(error.mean())} on average, "
        f"{write_percent(error.max())} at most (aim {write_percent(_MEDIAN_AIM, 0)}), the other quantiles within "
        f"{write_percent(ends.mean())}, {write_percent(ends.max())} at most (aim {write_percent(_QUANTILE_AIM, 0)})."
    )
    made = Page(
        "trioflow: jitter of recorded jobs",
        content,
        lead,
        made_from=" from ByteDance's recorded jobs",
        verdict=verdict,
        schemas={"drift_halves": DRIFT_HALVES, "drift_causes": DRIFT_CAUSES},
        files=files,
    )
    write_page(page, made)


def find_error(row: Any, quantile: str) -> float:
    """Return by how much a quantile is predicted too high, relative to the measured one."""
    return float(row[f"predicted_{quantile}_s"] / row[f"measured_{quantile}_s"] - 1)


def _render_halves(judged: pd.DataFrame) -> str:
    errors = [
        numbers(
            f"{name} %",
            "error",
            "predicted over measured quantile, less 1",
            "signed",
            partial(find_error, quantile=name),
        )
        for name in NAMES
    ]
    fields = [
        words("job", "", "", "job"),
        words("predicted from", "", "steps that the prediction may see", "seen"),
        numbers("steps", "", "predicted", "count", "steps"),
        *errors,
        numbers("distance", "KS", "of both distributions", "short", "distance"),
    ]
    ours, method = judged["method"] == JOINT, words("method", "", "", "method")
    others = render_records(judged[~ours], [*fields[:3], method, *fields[3:]], "Other methods, for comparison")
    return render_records(judged[ours], fields, "A step's parts sampled together") + render_details(
        "Other methods, for comparison", others
    )


def _render_causes(caused: pd.DataFrame) -> str:
    fields = [
        words("job", "", "", "job"),
        words("part", "", "", "part"),
        numbers("slowdown", "", "actual over ideal step", "short", lambda row: row["actual_s"] / row["ideal_s"]),
        numbers("share", "of the slowdown", "Shapley value", "signed", "share"),
        numbers("alone", "of the slowdown", "taken off where it alone is put right", "signed", "alone"),
    ]
    return render_records(caused, fields, "Causes")


def describe_drift(judged: pd.DataFrame, caused: pd.DataFrame) -> str:
    """Return both tables in Markdown, the text of docs/spread.md that `make publish` rewrites."""
    heads = ("job", "predicted from", "method", *(f"{name} % quantile" for name in NAMES), "distance")
    rows = [
        (
            row["job"],
            row["seen"],
            row["method"],
            *(write_signed_percent(find_error(row, name)) for name in NAMES),
            f"{row['distance']:.2f}",
        )
        for row in judged.to_dict("records")
    ]
    parts = list(dict.fromkeys(caused["part"]))
    slow = []
    for job, own in caused.groupby("job", sort=False):
        whole = float(own["actual_s"].iloc[0] / own["ideal_s"].iloc[0])
        shares = {row["part"]: write_percent(row["share"]) for row in own.to_dict("records")}
        slow.append((str(job), f"{whole:.2f} times", *(shares[part] for part in parts)))
    return "\n\n".join([write_markdown(heads, rows, left=(0, 1, 2)), write_markdown(("job", "slowdown", *parts), slow)])


_NORMAL_PER_DEVIATION = 1.4826
"""Standard deviation of a normal over its median distance from the median."""


def write_spreads(rows: Iterable[MeasuredSpread], path: Path = SHIPPED_SPREADS) -> None:
    """Write spreads as `load_spreads` reads them."""
    lines = [
        "# How much the same work differs: standard deviations of logarithms of times over their medians, of recorded",
        "# jobs (docs/spread.md says what each part is; rebuilt by make publish). slow_ranks: ranks that a normal spread",
        "# does not explain, left out of rank_log: such a rank is a scenario (--slow-rank). Autocorrelations are those of",
        "# one step's factor with the next step's.",
        "\t".join(HEADER),
    ]
    for one in rows:
        parts = [f"{value:.4g}" for value in astuple(one.spread)]
        counts = [str(number) for number in (one.ranks, one.steps, one.slow_ranks)]
        lines.append("\t".join([one.device_kind, one.job, *counts, *parts, one.source]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


_FEW_DEVIATIONS = 5.0
"""Robust standard deviations from the other ranks beyond which a rank counts as slow, not as spread."""


def fit_spread(passes: pd.DataFrame, exchanges: pd.DataFrame, *, lasting: bool = True) -> tuple[Spread, list[int]]:
    """Return the spread of a recorded job, and the ranks that are slower than it explains.

    ``passes``: step, replica, stage, rank, phase, micro_batch, time_s; ``exchanges``: step,
    exchange (the same text each step), time_s from when all were ready [s]. ``lasting``: whether
    what a rank keeps over all steps counts into ``rank_log``. Means over what shares a part
    estimate it, less the variance over n of parts below.
    """
    work = ["rank", "phase"]
    logs = np.log(passes["time_s"]) - np.log(passes.groupby(work)["time_s"].transform("median"))
    step = logs.groupby(passes["step"]).transform("mean")
    own = [passes[name] for name in ("step", "replica", "micro_batch")]
    micro_batch = (logs - step).groupby(own).transform("mean")
    kept = (logs - step - micro_batch).groupby([passes["step"], passes["rank"]]).transform("mean")
    rest = logs - step - micro_batch - kept
    variance = {name: float(part.var()) for name, part in (("pass", rest), ("kept", kept))}
    variance["micro_batch"] = float(micro_batch.var()) - variance["pass"] / _count(passes, own)
    replicas = passes["replica"].nunique() * passes["micro_batch"].nunique()
    variance["step"] = float(step.var()) - variance["micro_batch"] / replicas
    lasting_log, slow = _find_lasting(passes)
    always = lasting_log**2 if lasting else 0.0
    variance |= {"rank": always + variance["kept"]}
    step_log, rank_log, micro_batch_log, pass_log = (
        math.sqrt(max(0.0, variance[name])) for name in ("step", "rank", "micro_batch", "pass")
    )
    series = passes[["step", "rank"]].assign(step_log=step, kept=kept).groupby(["step", "rank"]).first()
    step_lag = _find_lag(series["step_log"].unstack().iloc[:, :1], 0.0)
    rank_lag = _find_lag(series["kept"].unstack(), always)
    spread = Spread(
        step_log,
        rank_log,
        micro_batch_log,
        pass_log,
        _spread_exchanges(exchanges),
        step_autocorrelation=step_lag,
        rank_autocorrelation=rank_lag,
    )
    return spread, slow


_MOST_LAG = 0.99
"""A factor that never changed in the recorded steps may yet change."""


def _find_lag(series: pd.DataFrame, always: float) -> float:
    """Return the autocorrelation of factors (logarithms, a row a step) from a step to the next; 0 without any.

    ``always``: variance of what they keep in all steps, which is not in them.
    """
    apart = (series - series.mean()).to_numpy()
    first = np.flatnonzero(np.diff(series.index.to_numpy()) == 1)
    whole = always + float((apart[first] ** 2 + apart[first + 1] ** 2).sum()) / (2 * apart[first].size or 1)
    if not len(first) or whole <= 0:
        return 0.0
    lag = (always + float((apart[first] * apart[first + 1]).mean())) / whole
    return min(max(lag, -_MOST_LAG), _MOST_LAG)


def _count(passes: pd.DataFrame, keys: Sequence[pd.Series]) -> float:
    return float(passes.groupby(list(keys)).size().mean())


def _find_lasting(passes: pd.DataFrame) -> tuple[float, list[int]]:
    """Return how far ranks of a stage lie from one another over all steps, and which lie further."""
    medians = passes.groupby(["rank", "stage", "phase"], as_index=False)["time_s"].median()
    alike = medians.groupby(["stage", "phase"])["time_s"].transform("median")
    logs = np.log(medians["time_s"] / alike).groupby(medians["rank"]).mean()
    deviation = _NORMAL_PER_DEVIATION * float((logs - logs.median()).abs().median())
    far = logs - logs.median() > _FEW_DEVIATIONS * deviation
    near = medians[~medians["rank"].isin(logs.index[far])]
    means = np.log(near["time_s"]).groupby([near["stage"], near["phase"]]).transform("mean")
    own = (np.log(near["time_s"]) - means).groupby(near["rank"]).mean()
    free = len(own) - near["stage"].nunique()  # A mean of each stage was taken off.
    lasting_log = math.sqrt(float((own**2).sum()) / free) if free > 0 else 0.0
    return lasting_log, sorted(int(rank) for rank in logs.index[far])


def _spread_exchanges(exchanges: pd.DataFrame) -> float:
    """Return the standard deviation of a normal with the exchanges' median distance from their medians."""
    times_s = exchanges["time_s"].clip(lower=1e-9)
    logs = np.log(times_s / times_s.groupby(exchanges["exchange"]).transform("median"))
    return _NORMAL_PER_DEVIATION * float(np.median(np.abs(logs)))
