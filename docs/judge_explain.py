"""Whether ``trioflow explain`` names the right cause and makes further predictions right: on nanotron's runs.

``python docs/judge_explain.py DATA PAGE [RUNS]`` draws runs (by a seed, of every network and engine), and
writes the tables of docs/accuracy.md. What is true is what the sweep's file says: each job measured its own collectives,
and whether the run came before the fix of nanotron's pipelines. What such a pipeline costs a micro-batch is learned from
other runs (a prior of the engine's time); all other priors are those of the command.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from page_numbers import publish_block
from trioflow.costmodel.choices import DeviceTimes
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import MICRO_BATCH, Corrections, correct_platform, load_platform
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import predict
from trioflow.prediction.explain import COMPONENTS, NAMED, Component, Explanation, MeasuredTime, explain
from trioflow.prediction.question import Options, time_operators
from trioflow.report.pages import write_markdown
from trioflow_evaluation.clusters.steps import DEVICE, Run, load_own_platform, predict_run, read_runs, trace_run
from trioflow_evaluation.fits.collectives import NO_NVLINK, SLOW

PLATFORM = "p5-h100"
"""What every run is predicted on: the fast network, a sound engine."""
SEED = 35
_GIVEN, _OTHERS = 3, 8
"""Rows of a cluster that are fitted to, and those that are then predicted."""
_LEARNED = 15
"""Runs before the fix, of those not drawn, from which the engine's time is learned."""
_ODDS = 1.7
"""Minus twice the logarithm of the odds that a pipeline over nodes is from before the fix: 3 to 7 in the sweep."""


def list_causes(run: Run) -> set[str]:
    """Return what deviates in a run, by its file: a slow network, an engine that waits."""
    slow = {"network"} if run.network in (SLOW, NO_NVLINK) else set()
    faulty = run.pipeline > 1 and run.nodes > 1 and not run.after_fix
    return slow | ({"engine"} if faulty else set())


_WAITS_S = 0.5
"""A micro-batch of a faulty engine takes as much longer, and 1.4 s in the middle."""
_PLAIN, _UNSEEN = "nothing deviates", f"network, which changes the step by less than {100 * NAMED:.0f} %"
_GROUPS = {
    _PLAIN: set(),
    "network": {"network"},
    _UNSEEN: set(),
    "engine": {"engine"},
    "engine and network": {"engine", "network"},
}
"""What deviates, by the sweep's file; the causes that are right."""
_MISMARKED = "marked as fixed, but each micro-batch takes over half a second longer"


def name_group(run: Run, before_s: float) -> str:
    """Return what deviates in a run, as its job measured its own collectives; ``before_s``: its step on the described network."""
    causes = list_causes(run)
    if "engine" in causes or not causes:
        return " and ".join(sorted(causes)) or _PLAIN
    own_s = predict_run(run, _time_operators(run), load_own_platform(run), interval=False)[0]
    if run.pipeline > 1 and run.measured_step_s - own_s > _WAITS_S * run.accumulate:
        return _MISMARKED
    return "network" if abs(own_s / before_s - 1) > NAMED else _UNSEEN


def measure_run(run: Run) -> MeasuredTime:
    """Return a run's step and the function that predicts it."""
    name = f"{run.nodes} nodes DP{run.data} TP{run.tensor} PP{run.pipeline}"

    def ask(corrections: Corrections) -> float:
        platform = correct_platform(_load_platform(run.nodes), corrections)
        return float(predict_run(run, _time_operators(run), platform, interval=False)[0])

    return MeasuredTime(name, run.measured_step_s, ask, pieces=run.accumulate)


@cache
def _load_platform(nodes: int) -> Platform:
    return load_platform(PLATFORM, 8 * nodes)


_TIMES: dict[tuple[int, int, int], DeviceTimes] = {}


def _time_operators(run: Run) -> DeviceTimes:
    key = run.hidden, run.key_values, run.vocabulary
    if key not in _TIMES:
        _TIMES[key] = time_operators(trace_run(run), DEVICE)
    return _TIMES[key]


def explain_runs(runs: Sequence[Run], components: Sequence[Component]) -> Iterator[tuple[Run, Explanation]]:
    """Yield each run with what its step alone is explained by."""
    for run in sorted(runs, key=lambda one: (one.hidden, one.nodes, one.tensor)):
        yield run, explain([measure_run(run)], components)


def learn_engine(runs: Sequence[Run]) -> list[Component]:
    """Return the components with a prior of the engine's time from runs whose pipelines waited."""
    rows = list(map(measure_run, runs))
    beyond = [(row.measured_s - row.predict({})) / row.pieces for row in rows]
    engine = next(one for one in COMPONENTS if one.name == MICRO_BATCH)
    logs = [math.log1p(max(one, 0.0) / engine.unit) for one in beyond]
    middle = statistics.median(logs)
    spread = 1.5 * statistics.median(abs(one - middle) for one in logs)
    engine = replace(engine, spread=1.0, tail=1e6, known=(middle, max(spread, 0.2), _ODDS))
    print(f"engine: {engine.value(middle):.3g} s a micro-batch, {spread:.2f} in the logarithm")
    return [engine if one.name == MICRO_BATCH else one for one in COMPONENTS]


def halve_errors(rows: Sequence[MeasuredTime]) -> tuple[float, float, str]:
    """Return the median error of a cluster's other rows, before and after three are given, and the cause named."""
    explanation = explain(rows[:_GIVEN])
    before, after = (
        statistics.median(abs(row.predict(some) / row.measured_s - 1) for row in rows[_GIVEN:])
        for some in ({}, explanation.corrections)
    )
    return before, after, explanation.cause


def list_clusters(runs: Sequence[Run], draw: random.Random) -> Iterator[tuple[str, list[MeasuredTime]]]:
    """Yield the rows of clusters that differ from their description, in the order in which they are given."""
    for nodes in (16, 32, 64):
        some = [run for run in runs if run.nodes == nodes and list_causes(run) == {"network"}]
        rows = draw.sample(some, min(_GIVEN + _OTHERS, len(some)))
        yield f"nanotron, slow network, {nodes} nodes", list(map(measure_run, rows))
    some = [run for run in runs if run.nodes == 16 and "engine" in list_causes(run)]
    rows = draw.sample(some, min(_GIVEN + _OTHERS, len(some)))
    yield "nanotron, pipelines before the fix, 16 nodes", list(map(measure_run, rows))
    plans = [(16, 1, 1), (32, 4, 2), (64, 1, 4), (16, 2, 2), (32, 1, 1), (64, 2, 1), (64, 4, 4), (16, 4, 1), (32, 2, 4)]
    yield ("synthetic: A100 steps on Perlmutter's TCP between nodes", [_synthesise(*plan) for plan in plans])


def _synthesise(ranks: int, tensor: int, pieces: int) -> MeasuredTime:
    """Return a step as predicted with what Perlmutter measured over TCP, and its prediction by nominal links."""
    plan = make_plan(ranks // tensor, tensor, accumulate=pieces)

    def ask(corrections: Corrections, **network: Any) -> float:
        platform = correct_platform(load_platform("dgx-a100", ranks), corrections)
        options = Options(sequence=1024, memory=False, interval=False, **network)
        batch = 4 * plan.data * pieces
        return predict("gpt2-large", plan, platform, batch=batch, options=options).step_time_s

    measured_s = ask({}, inter_node_bandwidth="tcp")
    return MeasuredTime(f"{ranks} ranks TP{tensor}", measured_s, ask, pieces=pieces)


def _format_causes(found: Sequence[tuple[Run, Explanation]]) -> str:
    """Return a table with a row for each group and one for all of them; runs that the file marks wrongly stand behind it."""
    rows = []
    groups = [name_group(run, one.before_s[0]) for run, one in found]
    for name in (*_GROUPS, "all of these", _MISMARKED):
        some = [
            (*row, _GROUPS.get(group, {"engine"}))
            for row, group in zip(found, groups, strict=True)
            if group == name or (name == "all of these" and group != _MISMARKED)
        ]
        if not some:
            continue
        before, after = (
            statistics.median(abs(getattr(one, when)[0] / run.measured_step_s - 1) for run, one, _ in some)
            for when in ("before_s", "after_s")
        )
        right = sum(_is_right(one.cause, causes) for _, one, causes in some)
        rows.append((name, len(some), f"{before:.1%} off", f"{after:.1%}", f"{right} of {len(some)}"))
    heads = ("what deviates, by the file", "runs", "predicted", "explained", "cause named rightly")
    return write_markdown(heads, rows)


def _is_right(cause: str, causes: set[str]) -> bool:
    named = {cause} & {"network", "engine"}
    return bool(named & causes) if causes else not named


def main(data: str, page: str, count: int = 60) -> None:
    """Draw runs, explain them and write the page's tables."""
    draw = random.Random(SEED)
    runs = [run for run in read_runs(data) if run.ran]
    drawn = draw.sample(runs, count)
    others = [run for run in runs if run not in drawn]
    waiting = [run for run in others if "engine" in list_causes(run)]
    components = learn_engine(draw.sample(waiting, _LEARNED))
    found = []
    for run, one in explain_runs(drawn, components):
        found.append((run, one))
        times = f"{run.measured_step_s:.3g} {one.before_s[0]:.3g} {one.after_s[0]:.3g} s"
        group = name_group(run, one.before_s[0])
        print(measure_run(run).name, times, f"{group}:", one.cause or "none named", flush=True)
    clusters = []
    for name, rows in list_clusters(others, draw):
        before, after, cause = halve_errors(rows)
        clusters.append((name, len(rows) - _GIVEN, f"{before:.1%}", f"{after:.1%}", cause or "none"))
    heads = ("three steps given of", "others", "their median error before", "after", "cause named")
    tables = [_format_causes(found), write_markdown(heads, clusters, left=(0, 4))]
    publish_block(Path(page).resolve().parents[1], Path(page).name, "explained", "\n\n".join(tables))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
