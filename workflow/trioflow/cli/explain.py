"""``trioflow explain RUN``: what measured steps, a profile or collectives say of a machine; ``judge``, its table alone."""

import argparse
import math
import shlex
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn
from zipfile import is_zipfile

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError, TableError, TrioflowError
from trioflow.base.input_files import read_text
from trioflow.base.settings import read_cells
from trioflow.base.units import format_bytes, format_time, ms_to_s, ns_to_s
from trioflow.cli.answer import add_simulate, predict_options
from trioflow.cli.choices import apply_configuration, apply_gpus, read_options
from trioflow.cli.output import (
    add_command,
    add_options,
    check_output,
    format_facts,
    format_table,
    list_forms,
    write_output,
)
from trioflow.costmodel.choices import find_launch_s, find_platform, load_named_platform
from trioflow.formats.logs import LoggedSteps, read_logged_steps
from trioflow.formats.nccl_tests import import_nccl_tests
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import EXCHANGE, MICRO_BATCH, Corrections, correct_platform, save_corrected
from trioflow.network.collectives import CollectivePlanner, compute_wire_bytes
from trioflow.prediction.assembly import Prediction, choose_collectives, predict
from trioflow.prediction.explain import Explanation, MeasuredTime, explain
from trioflow.report.errors import score_cases
from trioflow.trace.facts import UNTIMED
from trioflow.trace.importers.detect import import_trace
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.store import load_trace

_COLUMNS = ("case", "simulate", "measured_ms", "source")
_TABLE = (
    f"tab-separated table with the columns {', '.join(_COLUMNS)}: the arguments of `trioflow simulate`, the median step time "
    "or the name of a log in the table's folder, and who measured it, how and on what"
)


@dataclass(frozen=True)
class _Case:
    """A measured step: its name and time [s], and what ``simulate`` is asked."""

    name: str
    options: argparse.Namespace
    measured_s: float
    source: str
    logged: LoggedSteps | None = None  # where the time comes from a log


def add_judge(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``judge``: the first table of ``explain`` alone."""
    add_command(parser, _run_judge, {"": [("cases", "CASES", _TABLE)]}, list_forms("the cases"))


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``explain``, with all that ``simulate`` takes behind the run."""
    add_options(
        parser,
        {
            "": (
                (
                    "measured",
                    "RUN",
                    "a log of training (Megatron-LM, torchtitan, nanotron, HF Trainer, MLPerf, lines such as `step 10 ... 0.53 s`), a profile "
                    f"or captured trace, the output of nccl-tests, or a {_TABLE}. Except for a table, give the model, plan and platform after RUN",
                ),
            )
        },
    )
    add_simulate(parser, "--form")
    add_command(
        parser,
        _run_explain,
        {"": (("--output", "FILE.yaml", "platform file to write, for --platform of the next predictions"),)},
    )


def _run_judge(options: argparse.Namespace) -> None:
    _print_judged(options, [_judge(case)[0] for case in _read_cases(options.cases)], {})


def _print_judged(options: argparse.Namespace, rows: list[dict[str, Any]], more: Mapping[str, Any]) -> bool:
    """Print measured beside predicted steps; return whether it was for programs."""
    summary = _summarize(rows)
    if write_output(options.form, {"cases": rows, "summary": summary, **more}, rows):
        return True
    if not rows:
        return False
    head = ("case", "measured", "predicted", "error", "80 % interval", "holds it", "confidence")
    print(format_table(head, map(_format_row, rows)))
    print(f"\n{format_facts(_format_summary(summary))}")
    for row in rows:
        if "measured_steps" in row:
            print(f"measured {row['case']}: {_format_logged(row['measured_steps'])}")
        if "refused" in row:
            print(f"refused {row['case']}: {row['refused']}")
    return False


class _Words(argparse.ArgumentParser):
    """Refuses words with an error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _read_cases(path: str) -> list[_Case]:
    """Read all cases before the first is judged; raise TableError where a cell is wrong."""
    parser = _Words(prog="simulate", add_help=False)
    add_simulate(parser)
    cases = []
    for place, cells in read_cells(path, list(_COLUMNS), {}):

        def refuse(column: str, why: str, fix: str, place: str = place) -> NoReturn:
            raise TableError(why, file=path, place=f"{place}, column {column}", fix=fix)

        try:
            parsed = parser.parse_args(shlex.split(cells["simulate"]))
            apply_gpus(parsed)
        except (InputError, ValueError) as error:
            refuse("simulate", str(error), "write what is typed after `trioflow simulate`")
        try:
            measured_s, logged = _read_measured(cells["measured_ms"], Path(path).parent)
        except ValueError:
            refuse(
                "measured_ms",
                f"{cells['measured_ms']!r} is not a time",
                "give the median of the measured steps in ms, or the name of a log of MLPerf",
            )
        if cells["source"] in ("", "-"):
            refuse("source", "it is empty", "say who measured it, how, and on what")
        cases.append(_Case(cells["case"], parsed, measured_s, cells["source"], logged))
    if not cases:
        raise TableError("no case stands in it", file=path, fix="give a row for each measured step")
    return cases


def _read_measured(cell: str, folder: Path) -> tuple[float, LoggedSteps | None]:
    """Return the measured step [s] that a cell holds, or that the log it names does; ValueError for neither."""
    try:
        measured_s, logged = ms_to_s(float(cell)), None
    except ValueError:
        if not (folder / cell).is_file():
            raise
        logged = read_logged_steps(folder / cell)
        measured_s = logged.median_s
    if not 0 < measured_s < math.inf:
        raise ValueError(cell)
    return measured_s, logged


def _judge(case: _Case) -> tuple[dict[str, Any], Prediction | None]:
    """Return a case's prediction beside its measured step; times [s]. One that is refused keeps its row."""
    row: dict[str, Any] = {"case": case.name, "measured_s": case.measured_s, "source": case.source}
    measured_s, logged = case.measured_s, case.logged
    row |= {} if logged is None else {"measured_steps": asdict(logged)}
    try:
        apply_configuration(case.options)
        prediction = predict_options(case.options)
        batch = prediction.task_graph.metadata.batch
        if logged is not None:
            tokens = prediction.describe_language().get("tokens_per_step")
            logged = logged.of_tokens(tokens and tokens / prediction.task_graph.metadata.ranks)
            measured_s = logged.median_s
            if logged.batch not in (None, batch) and not case.options.as_traced:
                raise InputError(
                    f"the log's steps have {logged.batch} samples, the predicted one {batch}",
                    fix=f"write --batch {logged.batch} behind it",
                )
    except TrioflowError as error:
        return row | {"refused": error.of_command or str(error)}, None
    low_s, high_s = prediction.low_s, prediction.high_s
    row |= {} if logged is None else {"measured_steps": asdict(logged)}
    return row | {
        "measured_s": measured_s,
        "predicted_s": prediction.step_time_s,
        "low_s": low_s,
        "high_s": high_s,
        "error": prediction.step_time_s / measured_s - 1,
        "covered": low_s <= measured_s <= high_s,
        "width": (high_s - low_s) / measured_s,
        "confidence": prediction.confidence,
    }, prediction


def _summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    judged = [row for row in rows if "refused" not in row]
    summary: dict[str, Any] = {"cases": len(rows), "refused": len(rows) - len(judged)}
    if not judged:
        return summary
    scores = score_cases(pd.DataFrame(judged).assign(oracle_s=np.nan, extrapolated=np.nan, group=""), ["group"])
    names = ("mean_absolute_error", "median_absolute_error", "bias", "worst_error", "coverage", "mean_relative_width")
    worst = max(judged, key=lambda row: abs(row["error"]))
    return summary | {name: float(scores[name][0]) for name in names} | {"worst_case": worst["case"]}


def _format_row(row: dict[str, Any]) -> tuple[str, ...]:
    measured = format_time(row["measured_s"])
    if "refused" in row:
        return (row["case"], measured, "refused", "-", "-", "-", "-")
    return (
        row["case"],
        measured,
        format_time(row["predicted_s"]),
        f"{row['error']:+.1%}",
        f"{format_time(row['low_s'])} to {format_time(row['high_s'])}",
        "yes" if row["covered"] else "no",
        row["confidence"],
    )


_EXPLAINED = ("fitted to", "measured", "predicted", "explained", "error before", "after")
_FITTED = ("component", "as described", "this run", "80 % interval", "of a step")
_NCCL_SIZES = 8
"""Sizes of each collective of a log that are fitted to, from the smallest to the largest."""
_SNIFFED = 65_536
"""Characters of a run by which its kind is recognised."""
_SHOWN_BYTES = 256_000_000
"""Of the all-gather whose bandwidth a sentence gives."""
_LEAST_S = 1e-9
_NAMED_BYTES = 0.02
"""Of a device, memory that a sentence is worth."""


@dataclass(frozen=True)
class _Run:
    """What was measured, on which platform, and the table of its steps.

    ``launch_s``: predicted time of a launch [s]; ``beyond_bytes``: what the run's allocator held more than predicted.
    """

    rows: list[MeasuredTime]
    platform: Platform
    name: str  # of the platform, or its file
    judged: list[dict[str, Any]]
    launch_s: float = 0.0
    beyond_bytes: float = 0.0


def _run_explain(options: argparse.Namespace) -> None:
    """Read the run, predict it, fit, and say what deviates."""
    check_output("--output", options.output, (".yaml", ".yml"))
    run = _read_run(options.measured, options)
    explanation = explain(run.rows)
    sentences = _list_sentences(explanation, run)
    corrections = explanation.corrections
    corrections |= {"outside_bytes": run.beyond_bytes} if run.beyond_bytes else {}
    times = zip(run.rows, explanation.before_s, explanation.after_s, strict=True)
    after = [
        {"row": row.name, "measured_s": row.measured_s, "predicted_s": one, "explained_s": other}
        for row, one, other in times
    ]
    components = [
        {
            "component": one.component.name,
            **{key: getattr(one, key) for key in ("value", "low", "high", "effect", "deviates")},
        }
        for one in explanation.estimates
    ]
    if options.output:
        source = f"fitted by `trioflow explain` to {Path(options.measured).name} ({len(run.rows)} measured times)"
        save_corrected(find_platform(run.name), corrections, options.output, source)
    answer = {
        "components": components,
        "cause": explanation.cause,
        "explained": after,
        "sentences": sentences,
        "corrections": corrections,
    }
    if _print_judged(options, run.judged, answer):
        return
    print(f"\n{format_table(_EXPLAINED, map(_format_explained, after))}\n")
    print(f"{format_table(_FITTED, map(_format_component, components))}\n")
    print("\n".join(sentences))
    if options.output:
        print(f"written: {options.output}; say --platform {options.output} from now on")


def _read_run(path: str, options: argparse.Namespace) -> _Run:
    """Return what a run measured, and how it is predicted; InputError where its model or machine is missing."""
    kind = _recognise(path)
    if kind == "table" and (options.platform or options.trace):
        raise InputError("the table's rows hold what was run", file=path, fix="leave the rest out")
    if kind != "table" and options.platform is None:
        raise InputError("the run's machine is missing", file=path, fix="add --platform NAME|FILE")
    if kind == "nccl":
        return _Run(*_list_collectives(path, options.platform), options.platform, [])
    if kind == "profile":
        return _Run(*_list_profiled(path, options), options.platform, [])
    if kind == "table":
        cases = _read_cases(path)
    else:
        logged, name = read_logged_steps(path), Path(path).name
        cases = [_Case(name, options, logged.median_s, f"log {name}", logged)]
    answers = [(case, *_judge(case)) for case in cases]
    judged = [row for _, row, _ in answers]
    known = [(case, row, one) for case, row, one in answers if one is not None]
    names = sorted({case.options.platform for case, _, _ in known})
    if len(names) != 1:
        refused = "; ".join(str(row.get("refused", "")) for row in judged)
        why = f"rows of {', '.join(names)}: one machine is fitted at a time" if names else refused
        raise InputError(why, file=path, fix="give steps of one platform, which simulate answers")
    rows = [
        MeasuredTime(
            case.name, row["measured_s"], _predict_times(case.options, 0), pieces=one.task_graph.metadata.plan.pieces
        )
        for case, row, one in known
    ]
    largest = max((one for *_, one in known), key=lambda one: one.step.platform.ranks)
    platform = largest.step.platform
    reserved = [(row.get("measured_steps", {}).get("reserved_bytes"), one) for _, row, one in known]
    more = [size - one.step.reserved_bytes for size, one in reserved if size]
    beyond_bytes = max(statistics.median(more), 0.0) if more else 0.0
    launch_s = find_launch_s(platform.host, largest.step.trace.facts)
    return _Run(rows, platform, names[0], judged, launch_s, beyond_bytes)


def _recognise(run: str) -> str:
    """Return what a run is: table, nccl, profile or log; InputError where there is no such file."""
    path = Path(run)
    if path.is_dir() or is_zipfile(run):
        return "profile"
    text = read_text(path, broken="replace")[:_SNIFFED]
    if text.startswith(_COLUMNS[0] + "\t"):
        return "table"
    if "nccl-tests" in text or "out-of-place" in text or '"nccl_version"' in text:
        return "nccl"
    return "profile" if text.lstrip()[:1] == "{" or run.endswith(".gz") else "log"


def _predict_times(options: argparse.Namespace, place: int) -> Callable[[Corrections], float]:
    """Return the function that predicts a step, its compute (1) or its communication (2) on a corrected platform [s]."""
    plan, platform, assumed = read_options(options)
    lean = replace(assumed, interval=False, memory=False, draws=0)

    @cache
    def ask(corrections: tuple[tuple[str, float], ...]) -> tuple[float, float, float]:
        machine = correct_platform(platform, dict(corrections))
        step = predict(options.trace, plan, machine, batch=options.batch, options=lean)
        return step.step_time_s, step.compute_s, step.communication_s

    return lambda corrections: ask(tuple(sorted(corrections.items())))[place]


def _list_profiled(run: str, options: argparse.Namespace) -> tuple[list[MeasuredTime], Platform]:
    """Return what a profile recorded of a rank: its step, its compute, its collectives."""
    traced = (Path(run) / "trace.json").exists() or is_zipfile(run)
    trace = load_trace(run) if traced else import_trace([run], ImportOptions())
    apply_configuration(options)
    plan, platform, _ = read_options(options)
    facts, kinds = trace.facts, trace.operators.groupby("kind")["device_ns"].sum()
    step_s = 0.0 if facts.step_time_source in (UNTIMED, "busy", "predicted") else facts.step_time_s
    times = (step_s, ns_to_s(kinds.get("compute", 0)), ns_to_s(kinds.get("collective", 0)))
    names = ("step", "compute", "communication")
    rows = [
        MeasuredTime(
            f"{name} of the profile", time_s, _predict_times(options, place), name, plan.pieces if name == "step" else 0
        )
        for place, (name, time_s) in enumerate(zip(names, times, strict=True))
        if time_s
    ]
    rows = [row for row in rows if row.predict({})]
    if not rows:
        raise InputError("the profile holds no times", file=run, fix="give one of a step that ran")
    return rows, platform


def _list_collectives(run: str, name: str) -> tuple[list[MeasuredTime], Platform]:
    """Return the median times of a log of nccl-tests, and the platform of as many nodes as the largest run."""
    samples = import_nccl_tests([run], name)
    keys = ["collective", "ranks", "nodes", "message_bytes"]
    times = samples.groupby(keys)["time_ns"].median().reset_index()
    per_node = load_named_platform(name, int(samples["ranks"].min())).ranks_per_node
    most = int((samples["nodes"] * per_node if per_node else samples["ranks"]).max())
    platform, rows = load_named_platform(name, max(most, int(samples["ranks"].max()))), []
    for _, part in times.groupby(keys[:3]):
        thinned = part.iloc[:: -(-len(part) // _NCCL_SIZES)]
        for collective, ranks, nodes, size, time_ns in thinned.itertuples(index=False):
            each = -(-ranks // nodes)
            group = tuple(one // each * (per_node or each) + one % each for one in range(ranks))
            ask = partial(_time_collective, platform, collective, int(size), group)
            label = f"{collective} of {format_bytes(size)} on {ranks} ranks of {nodes} nodes"
            rows.append(MeasuredTime(label, ns_to_s(time_ns), ask, "collective"))
    return rows, platform


def _time_collective(
    platform: Platform, collective: str, size: int, group: tuple[int, ...], corrections: Corrections
) -> float:
    """Return the time of a collective that has a corrected platform to itself [s]."""
    machine = correct_platform(platform, corrections)
    flows = CollectivePlanner(machine, choose_collectives(machine)).build(collective, size, group)
    rates = np.minimum(flows.shape.rates_bytes_per_s, flows.max_rates_bytes_per_s)
    time_s = float(np.max(flows.latencies_s + flows.sizes_bytes / rates))
    return time_s * machine.corrections.get("communication", 1.0)


def _list_sentences(explanation: Explanation, run: _Run) -> list[str]:
    """Return what deviates and by how much, the largest first."""
    corrections, platform, launch_s = explanation.corrections, run.platform, run.launch_s
    sentences = []
    for one in sorted(explanation.estimates, key=lambda one: -abs(one.effect)):
        name, value = one.component.name, one.value
        if not one.deviates:
            continue
        sentences.append(
            {
                "compute": f"operators take {value:.3g} times as long as predicted",
                "communication": f"messages take {value:.3g} times as long as predicted",
                "between_nodes": f"bytes between nodes take {value:.3g} times as long as predicted",
                "between_nodes_step_s": f"each step of a collective between nodes takes {format_time(value)} longer than predicted",
                EXCHANGE: f"each exchange of a tensor group takes {format_time(value)} longer for each of its ranks than predicted",
                "launches": f"launches take {format_time(launch_s * value)}, not {format_time(launch_s)}"
                if launch_s
                else f"launches take {value:.3g} times as long as predicted",
                MICRO_BATCH: f"each micro-batch costs {format_time(value)} more than its work",
            }[name]
            + f" (80 % interval {_format_number(name, one.low)} to {_format_number(name, one.high)})"
        )
    if explanation.cause == "network" and platform.ranks > (platform.ranks_per_node or platform.ranks):
        group = tuple(range(platform.ranks))
        before, after = (
            compute_wire_bytes("all_gather", _SHOWN_BYTES, len(group))
            / _time_collective(platform, "all_gather", _SHOWN_BYTES, group, some)
            for some in ({}, {key: corrections[key] for key in corrections if key != "compute"})
        )
        sentences.insert(
            0,
            (
                f"between nodes this job moved {after / 1e9:.3g} of {before / 1e9:.3g} GB/s (bus bandwidth of an all-gather of "
                f"{format_bytes(_SHOWN_BYTES)} over {platform.ranks} ranks)"
            ),
        )
    if run.beyond_bytes > _NAMED_BYTES * platform.device.memory_bytes:
        sentences.append(f"a rank holds {format_bytes(run.beyond_bytes)} more than predicted")
    return sentences or ["nothing deviates by more than the predictions themselves are known to miss"]


def _format_number(name: str, value: float) -> str:
    if not name.endswith("_s"):
        return f"{value:.3g}"
    return format_time(value) if value > _LEAST_S else "0 s"


def _format_explained(row: dict[str, Any]) -> tuple[str, ...]:
    times = (row["measured_s"], row["predicted_s"], row["explained_s"])
    errors = (f"{one / row['measured_s'] - 1:+.1%}" for one in times[1:])
    return (row["row"], *map(format_time, times), *errors)


def _format_component(row: dict[str, Any]) -> tuple[str, ...]:
    name, ends = row["component"], (row["value"], row["low"], row["high"])
    value, low, high = (_format_number(name, one) for one in ends)
    plain = "0" if name.endswith("_s") else "1"
    return (name, plain, value, f"{low} to {high}", f"{row['effect']:+.1%}")


def _format_logged(logged: dict[str, Any]) -> str:
    quartiles = f"{format_time(logged['low_s'])} to {format_time(logged['high_s'])}"
    return f"median of {logged['values']} by {logged['way']}, quartiles {quartiles}"


def _format_summary(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the summary's lines; of refused cases alone, their count."""
    count = f"{summary['cases']}, {summary['refused']} of them refused"
    if "bias" not in summary:
        return [("cases", count)]
    return [
        ("cases", count),
        (
            "absolute error",
            f"{summary['mean_absolute_error']:.1%} in the mean, {summary['median_absolute_error']:.1%} in "
            f"the median, {summary['worst_error']:+.1%} at worst ({summary['worst_case']})",
        ),
        ("signed error", f"{summary['bias']:+.1%} in the mean"),
        (
            "80 % intervals",
            f"hold {summary['coverage']:.0%}; {summary['mean_relative_width']:.0%} of the measured step wide",
        ),
    ]
