"""``trioflow plan``: the best plans of a model on some GPUs on one screen, and everything behind it on request."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.provenance import atomic_path
from trioflow.base.units import format_bytes, format_count, format_time
from trioflow.cli.answer import choose_unit, draw_bar, predict_options, print_prediction, wrap
from trioflow.cli.choices import (
    GPUS,
    INTER_NODES,
    ROUTING,
    apply_configuration,
    list_given,
    list_inter_node,
    list_model_options,
)
from trioflow.cli.output import HTML, JSON, add_command, format_table, number, write_output, write_page
from trioflow.cli.search import describe_odds, predict_best, print_search, show_progress
from trioflow.formats.launch import FRAMEWORKS
from trioflow.parallel.memory.peak import describe_probability, find_fullest
from trioflow.prediction.fitting import split_memory
from trioflow.prediction.question import STEP_WORDS, find_model
from trioflow.sweeps.best_plans import BestPlans, plan
from trioflow.trace.language.sizes import Configuration

_PARTS = {
    "tensor communication": ("T", "exposed TP"),
    "data communication": ("D", "exposed DP"),
    "pipeline communication": ("p", "exposed PP sends"),
    "context communication": ("S", "exposed CP"),
    "expert communication": ("E", "exposed EP"),
    "other communication": ("M", "exposed communication"),
    "kernel launches": ("L", "kernel launches"),
    "idle time": ("B", "bubble and idle"),
}
"""Letter and name of what ``breakdown.PARTS`` has beside compute."""
_LEAST_SHARE = 0.005
"""Of a step, or of a GPU's memory, that is worth a word."""
_MANY = 10_000
"""A rate from which on it is written with a prefix."""
_CONFIDENCE = {
    "measured": "operators and collectives were measured at these sizes",
    "interpolated": "operators and collectives lie between measured sizes",
    "extrapolated": "some sizes lie outside those measured, or another GPU's times were transferred",
    "uncalibrated": "some parts were never measured on such a machine",
}


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``plan``."""
    flag, metavar, text = GPUS
    add_command(
        parser,
        _run_plan,
        {
            "": (
                ("model", "MODEL", "language model by name or configuration, or a trace"),
                (flag, metavar, text.partition(", instead")[0], {"required": True}),
                ("--tokens", (number, "N"), "tokens of the training run, such as 500B or 1T (default: 1e12)"),
                ("--price", (float, "P"), "price per GPU-hour, for the cost of the run"),
                ("--budget", (number, "M"), "money for the run: how many tokens it pays for"),
                ("--currency", "SIGN", "currency of the price (default: US$)", {"default": "US$"}),
                ("--power-w", (float, "W"), "power draw per GPU [W] (default: the data sheet's limit)"),
                ("--batch", (int, "B"), "global batch in samples (default: usual for models of this size)"),
                (
                    "--memory-margin",
                    (float, "SHARE"),
                    "share of each GPU's memory to leave free, such as 0.1 (default: 0)",
                    {"default": 0.0},
                ),
                ("--top", (int, "K"), "simulate at least K plans in full (default: 3)", {"default": 3}),
                ("--jobs", (int, "N"), "plans simulated at the same time (default: the cores, 8 at most)"),
                (
                    "--frameworks",
                    "NAME[,NAME]",
                    f"write launch configurations for {', '.join(FRAMEWORKS)}: the best plan that each can express, with "
                    "its own precision recipe",
                ),
                ("--output", "FOLDER", "folder for the launch configurations (default: print them)"),
                (
                    "--explain",
                    True,
                    "print everything: all plans, rejected ones and why, details of the first plan, warnings",
                ),
            )
        },
        list_model_options(several=True),
        ROUTING,
        INTER_NODES,
        HTML,
        JSON,
    )


def _run_plan(options: argparse.Namespace) -> None:
    """Find the best plans and print them."""
    write_page(options)
    names = ("tokens", "budget", "price", "power_w", "batch", "memory_margin", "routing", "top", "jobs", *STEP_WORDS)
    frameworks = [name.strip() for name in (options.frameworks or "").split(",") if name.strip()]
    asked = {**list_given(options, names), "frameworks": frameworks}
    if options.output and Path(options.output).is_file():
        raise InputError(f"--output {options.output} is a file", fix="name a folder")
    best = plan(options.model, options.gpus, watch=show_progress(options), **asked, **list_inter_node(options))
    answer = best.to_dict()
    if options.html:
        machine = best.prediction.step.platform
        write_page(options, "plot_search", answer, *predict_best(options, [options.model], best.found, machine))
    for one in answer["launch"].values():
        if options.output and "text" in one:
            with atomic_path(Path(options.output) / one["file"]) as temporary:
                temporary.write_text(one["text"], encoding="utf-8")
    if write_output("json" if options.json else "table", answer, answer["ranking"]):
        return
    print(format_plans(best, answer, options.currency))
    _compare_own(options, answer["best"])
    for one in answer["launch"].values():
        _print_launch(one, options.output, options.gpus)
    if options.explain:
        print("\n--- all plans\n")
        print_search(answer)
        print("\n--- the first plan\n")
        print_prediction(best.prediction, answer["best"], options)


def _compare_own(options: argparse.Namespace, best: Mapping[str, Any]) -> None:
    """Print what the plan of a launch configuration takes, where the model is one; nothing for another model."""
    launch = find_model(options.model)
    if not isinstance(launch, Configuration) or not launch.degrees:
        return
    asked = options.build_parser(["simulate"]).parse_args(["simulate", options.model, "--gpus", options.gpus])
    apply_configuration(asked)
    own = predict_options(asked)
    times = f"{format_time(own.step_time_s)} [{format_time(own.low_s)}-{format_time(own.high_s)}]"
    odds = "" if own.fit_probability is None else f", {describe_probability(own.fit_probability)}"
    ratio = own.step_time_s / own.task_graph.metadata.batch / (best["step_time_s"] / best["batch"])
    print(
        wrap(f"your plan   {own.task_graph.metadata.plan_text}: {times}{odds}; plan 1 is {ratio:.2f} times as fast", 12)
    )


def _print_launch(launch: Mapping[str, str], folder: str | None, gpus: str) -> None:
    """Print a launch configuration, or where in a folder it was written, or why there is none."""
    if "why" in launch:
        print(f"\n{launch['why']}")
    elif folder:
        path = Path(folder) / launch["file"]
        print(f"\nwritten: {path} ({launch['plan']}); trioflow simulate {path} --gpus {gpus} reads it back")
    else:
        print(f"\n--- {launch['file']}: {launch['plan']}\n{launch['text']}", end="")


def format_plans(best: BestPlans, answer: Mapping[str, Any], currency: str) -> str:
    """Return the screen: verdict, the best plans side by side, memory, what limits the first, and confidence."""
    rows, step = answer["shown"], answer["best"]
    return "\n".join(
        [
            wrap(_judge(answer, currency), 0),
            "",
            *(f"{place:3}  {row['notation']}" for place, row in zip(_list_places(answer), rows, strict=True)),
            "",
            _format_numbers(answer, currency),
            "",
            *_describe_memory(step),
            "",
            *_describe_limits(answer),
            "",
            wrap(f"assumed     {_describe_assumed(best, answer)}", 12),
            wrap(
                f"confidence  {step['confidence']}: {_CONFIDENCE[step['confidence']]}; brackets are 80 % intervals", 12
            ),
            wrap(
                f"more        --explain, --json; {answer['plans']:,} plans estimated, the best {answer['simulated']} simulated",
                12,
            ),
        ]
    )


def _list_places(answer: Mapping[str, Any]) -> list[int]:
    """Return the places in the ranking of the plans that are shown; what differs from a better one in little is not."""
    return [answer["ranking"].index(row) + 1 for row in answer["shown"]]


def _shorten(count: float) -> str:
    """Return a count with a decimal prefix behind it: 736k, 4.19M, 1T."""
    return format_count(count).replace(" ", "")


def _judge(answer: Mapping[str, Any], currency: str) -> str:
    """Return the verdict in one or two sentences."""
    first, rows = answer["shown"][0], answer["shown"]
    rate = (
        f"{first['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU"
        + (f", {first['mfu']:.0%} MFU" if "mfu" in first else "")
        if "tokens_per_s" in first
        else f"{answer['batch'] / first['step_time_s']:,.0f} samples/s"
    )
    text = f"{answer['workload']} on {answer['gpus']} trains fastest with plan 1: {rate}."
    if run := first.get("run"):
        unit, size = choose_unit("time_s", run)
        tokens, days = f"{_shorten(run['tokens'])} tokens", f"{run['time_s'] / size:,.1f} {unit}"
        if "budget" in run:
            text += f" {currency}{_shorten(run['budget'])} pays for {tokens} in {days}."
        else:
            text += f" {tokens} take {days}" + (f" and {currency}{_shorten(run['cost'])}." if "cost" in run else ".")
    if len(rows) > 1:
        odds = float(rows[1]["first_faster_probability"])
        text += (
            f" Plan 1 against plan {_list_places(answer)[1]}: {describe_odds(odds)} (P(plan 1 faster) = {odds:.0%})."
        )
    return text


def _format_numbers(answer: Mapping[str, Any], currency: str) -> str:
    """Return the plans' numbers side by side, each with its 80 % interval."""
    rows = answer["shown"]
    scale, unit = (1.0, "s") if rows[0]["step_time_s"] >= 1 else (1e-3, "ms")
    runs = [row.get("run", {}) for row in rows]
    (time, time_s), (energy, energy_j) = choose_unit("time_s", *runs), choose_unit("energy_j", *runs)

    def spread(value: float, row: Mapping[str, Any], write: Callable[[float], str], *, rate: bool = False) -> str:
        """Write a value that grows with the step's time, or with its inverse, with its interval."""
        ends = [row[name] / row["step_time_s"] for name in ("low_s", "high_s")]
        low, high = sorted(value / end if rate else value * end for end in ends)
        return f"{write(value)} [{write(low)}-{write(high)}]"

    def spend(name: str, unit: float, row: Mapping[str, Any], write: Callable[[float], str]) -> str:
        """Write what a run takes; a budget is spent whatever the step's time."""
        run = row["run"]
        return write(run[name] / unit) if "budget" in run else spread(run[name] / unit, row, write)

    lines: dict[str, Callable[[Mapping[str, Any]], str]] = {
        f"step [{unit}]": lambda row: spread(row["step_time_s"] / scale, row, lambda value: f"{value:.3g}"),
        "tokens/s/GPU": lambda row: spread(
            row["tokens_per_s_per_gpu"], row, lambda v: f"{v:,.0f}" if v < _MANY else _shorten(v), rate=True
        ),
        "MFU [%]": lambda row: spread(100 * row["mfu"], row, lambda value: f"{value:.1f}", rate=True),
        **(
            {"tokens": lambda row: spread(row["run"]["tokens"], row, _shorten, rate=True)}
            if "budget" in runs[0]
            else {}
        ),
        time: lambda row: spend("time_s", time_s, row, lambda value: f"{value:,.1f}"),
        f"cost [{currency}]": lambda row: spend("cost", 1.0, row, _shorten),
        f"energy [{energy}]": lambda row: spend("energy_j", energy_j, row, lambda value: f"{value:,.3g}"),
        "memory fits": lambda row: f"{row['fit_probability']:.0%}",
    }
    table = []
    for name, write in lines.items():
        try:
            table.append([name, *(write(row) for row in rows)])
        except (KeyError, TypeError):  # no tokens, price, sheet or memory
            continue
    return format_table(["", *(f"plan {place}" for place in _list_places(answer))], table)


def _describe_memory(step: Mapping[str, Any]) -> list[str]:
    """Return the first plan's memory: the odds, a bar, and its categories."""
    if step["fit_probability"] is None:
        return ["memory of plan 1: not estimated (the trace does not record operator outputs)"]
    parts = split_memory(find_fullest(step["memory"]), step["outside_bytes"])
    total, room = sum(parts.values()), step["memory_bytes"]
    head = f"memory of plan 1: {format_bytes(total)} of {format_bytes(room)} per GPU, "
    parts = {part: size for part, size in parts.items() if size >= _LEAST_SHARE * room}
    legend = ", ".join(f"{letter} {name} {format_bytes(size)}" for (letter, name), size in parts.items())
    return [head + describe_probability(step["fit_probability"]), draw_bar(parts, room), wrap(legend)]


def _describe_limits(answer: Mapping[str, Any]) -> list[str]:
    """Return where the first plan's step goes: a bar, and its parts in per cent."""
    step_s, of_step = answer["best"]["step_time_s"], answer["parts_s"]
    parts = {("C", "compute"): sum(time_s for name, time_s in of_step.items() if name not in _PARTS)}
    parts |= {part: of_step[name] for name, part in _PARTS.items() if of_step.get(name, 0.0) >= _LEAST_SHARE * step_s}
    words = [f"{letter} {name} {time_s / step_s:.0%}" for (letter, name), time_s in parts.items()]
    head = f"time of plan 1: {format_time(step_s)} per step (hidden communication not shown)"
    return [head, draw_bar(parts, step_s), wrap(", ".join(words))]


def _describe_assumed(best: BestPlans, answer: Mapping[str, Any]) -> str:
    """Return what was taken where nothing was given, and how to change it."""
    assumed, step = answer["assumed"], answer["best"]
    sequence, batch = (f" (--{name})" * (name in assumed) for name in ("sequence", "batch"))
    tokens = step.get("tokens_per_step")
    parts = [
        f"{assumed['platform']} ({best.prediction.step.platform.device.name})" if "platform" in assumed else "",
        f"sequence {step['sequence']:,}{sequence}" if "sequence" in step else "",
        f"batch {answer['batch']}" + (f" = {_shorten(tokens)} tokens per step" if tokens else "") + batch,
        f"{step['precision']} (--precision)" if "precision" in step else "",
        f"a run of {_shorten(assumed['tokens'])} tokens (--tokens)" if "tokens" in assumed else "",
        f"{assumed['power_w']:.0f} W per GPU (--power-w)"
        if "power_w" in assumed and "run" in answer["shown"][0]
        else "",
    ]
    return ", ".join(filter(None, parts))
