"""``trioflow search``: which plan to choose for a model, a number of ranks and a platform."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trioflow.base.ahead import count_jobs
from trioflow.base.errors import InputError
from trioflow.base.plan_row import BUCKETED
from trioflow.base.provenance import atomic_path
from trioflow.base.units import BYTES_PER_MIB, format_bytes, format_count, format_time
from trioflow.cli.answer import choose_unit, draw_bar, predict_options, print_prediction, wrap
from trioflow.cli.choices import (
    DRAWS,
    GPUS,
    INTER_NODES,
    ROUTING,
    RUN,
    apply_configuration,
    apply_gpus,
    list_given,
    list_inter_node,
    list_model_options,
)
from trioflow.cli.output import (
    EXPLAIN,
    HTML,
    JSON,
    add_command,
    format_table,
    list_flags,
    list_forms,
    number,
    print_warnings,
    write_output,
    write_page,
)
from trioflow.formats.launch import FRAMEWORKS
from trioflow.network.across_nodes import INTER_NODE
from trioflow.parallel.memory.peak import DOUBTED, describe_probability, find_fullest
from trioflow.parallel.plan import BUCKET_BYTES
from trioflow.prediction.assembly import Prediction
from trioflow.prediction.fitting import split_memory
from trioflow.prediction.question import SORTS, STEP_WORDS, Options, find_model
from trioflow.sweeps.search import BestPlans, SearchResult, Watch, plan, search
from trioflow.trace.language.sizes import Configuration

_SHOWN_REASONS = 5
_FATES = ("plans", "refused", "out_of_memory", "slower", "simulated")
"""Of a kind of plan: how many there are, and what became of them."""
_ASSUMED = ("cost_model", "override", "routing", "draws", "seed", *STEP_WORDS, *INTER_NODE)
"""Arguments that are assumptions."""
_BAR = 24
"""Characters of a progress bar."""


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand to the command."""
    add_command(
        parser,
        _run_search,
        {
            "": (
                (
                    "trace",
                    "TRACE",
                    "folder or pack of a trace, or a shipped one's name; several of one workload at other batches",
                    {"nargs": "+"},
                ),
                GPUS,
                ("--ranks", "N[,N]", "number of ranks, or several to compare"),
                ("--platform", "NAME|FILE", "as for simulate"),
                (
                    "--batch",
                    (int, "B"),
                    "samples of the whole step (default: the trace's own batch on each of the most ranks)",
                ),
                (
                    "--top",
                    (int, "K"),
                    "plans to simulate in full at least (default: 10); those simulated are all listed: up to three times"
                    " as many, or six times where too few leave the allocator room",
                    {"default": 10},
                ),
                (
                    "--sort",
                    SORTS,
                    "the best first by the time of a step (default), or by GPU time, which is cost, and throughput per GPU",
                    {"default": SORTS[0]},
                ),
                (
                    "--jobs",
                    (int, "N"),
                    "plans simulated at the same time, on Linux (default: the cores, 8 at most); the answer is the same",
                ),
            )
        },
        list_model_options(several=True),
        RUN,
        ROUTING,
        INTER_NODES,
        DRAWS,
        {"": list_flags(Options, "cost_model", "override")},
        EXPLAIN,
        HTML,
        list_forms("the plans shown"),
    )


def read_ranks(text: str) -> list[int]:
    """Return the numbers of ranks asked for, each once, ascending; InputError where one is no positive whole number."""
    words = [word.strip() for word in text.split(",")]
    if not all(w.isascii() and w.isdigit() and len(w) < 10 and int(w) > 0 for w in words):
        raise InputError(f"--ranks {text:.40}: no numbers of ranks", fix="write for example 16 or 8,16")
    return sorted({int(word) for word in words})


def show_progress(options: argparse.Namespace) -> Watch:
    """Return what follows a search on a terminal."""

    def watch(done: int, total: int, doing: str) -> None:
        part = _BAR * done // max(total, 1)
        bar = "#" * part + "." * (_BAR - part)
        options.sign.text = f", {bar} {done} of {total} plans {doing}"

    return watch


def _run_search(options: argparse.Namespace) -> None:
    """Search for plans and print the best."""
    write_page(options)
    apply_gpus(options)
    if options.ranks is None:
        raise InputError("no number of GPUs was given", fix="give --gpus 256xH100, or --ranks and --platform")
    result = search(
        options.trace,
        read_ranks(str(options.ranks)),
        options.platform,
        batch=options.batch,
        top=options.top,
        price_per_gpu_hour=options.price_per_gpu_hour,
        power_w=options.power_w,
        tokens=options.tokens,
        budget=options.budget,
        watch=show_progress(options),
        sort=options.sort,
        jobs=count_jobs() if options.jobs is None else options.jobs,
        **list_given(options, _ASSUMED),
    )
    answer = result.to_dict()
    if options.html:
        write_page(options, "plot_search", answer, *_predict_best(result))
    if write_output(options.form, answer, answer["ranking"]):
        return
    print_search(answer, everything=options.explain)
    if not answer["ranking"]:
        raise InputError("no plan fits", fix="use more ranks, a smaller batch or another platform")


def _predict_best(result: SearchResult) -> list[Prediction]:
    """Return the predictions of a search's best two plans, which its page compares."""
    return [result.predict(place) for place, _ in enumerate(result["ranking"][:2])]


def print_search(answer: dict[str, Any], *, everything: bool = True) -> None:
    """Print the ranking and, with ``everything``, what became of each kind of plan and every warning."""
    low, high = answer["outline_error"]
    print(
        f"{answer['workload']} on {', '.join(map(str, answer['ranks']))} ranks of {answer['platform']}, "
        f"{answer['batch']} samples a step: "
        f"{answer['plans']:,} plans estimated, the best {answer['simulated']} simulated\n"
        f"confidence {answer['confidence']}; the quick estimates were within {max(-low, high):.1%} of the simulation\n"
    )
    if answer["ranking"]:
        print(format_ranking(answer, everything=everything))
        names = {"expected_s": "time", "peak_memory_bytes": "memory", "cost_per_step": "cost", "energy_j": "energy"}
        words = [names[column] for column in answer["compared_by"]]
        if any(row["crowded"] for row in answer["ranking"]):
            print(f"\n(!) less than {DOUBTED:.0%} likely to fit the memory: behind the others (docs/memory.md)")
        print(f"\n* Pareto-optimal in {' and '.join(words)}")
    if answer["first_beats_second"] is not None:
        print(
            f"P(plan 1 faster than plan 2) = {answer['first_beats_second']:.0%}, "
            f"{describe_odds(answer['first_beats_second'])}"
        )
    if "first_beats_second_drawn" in answer:
        print(
            f"and in {answer['first_beats_second_drawn']:.0%} of samples with the same jitter of ranks, all else equal"
        )
    if everything:
        print(f"operator times: {answer['cost_model']}; {answer['assumption']}")
    _print_left_out(answer, everything=everything)
    print_warnings(answer["warnings"], everything=everything)


_ODDS = ((0.6, "effectively a tie"), (0.8, "slightly ahead"), (0.95, "likely faster"), (1.0, "clearly faster"))
"""Up to which probability that one plan is faster than another it is called so."""


def describe_odds(probability: float) -> str:
    """Return the probability that a plan is faster than the next, in words."""
    return next(word for most, word in _ODDS if probability <= most)


def format_ranking(answer: dict[str, Any], *, everything: bool = True) -> str:
    """Return the ranking as text; columns that no row has are left out, and without ``everything`` those of less weight."""
    rows, recipes = answer["ranking"], "precisions" in answer
    runs = [row["run"] for row in rows if "run" in row]
    unit, size = choose_unit("time_s", *runs)
    tokens = any("tokens_per_s" in row for row in rows)
    columns: list[tuple[str, bool, Callable[[int, dict[str, Any]], str]]] = [
        ("", True, lambda place, row: f"{place}{'*' if row['pareto'] else ''}"),
        ("plan", True, lambda _, row: row["notation"] + describe_rest(row) * everything),
        ("precision, fusion", recipes, lambda _, row: f"{row['precision']}, {row['fusion']}"),
        ("step", True, lambda _, row: format_time(row["step_time_s"])),
        (
            "expected",
            any(row["expected_s"] != row["step_time_s"] for row in rows),
            lambda _, row: format_time(row["expected_s"]),
        ),
        ("80 % interval", True, lambda _, row: f"{format_time(row['low_s'])}-{format_time(row['high_s'])}"),
        ("peak, odds", True, lambda _, row: _format_peak(row) + (" (!)" if row["crowded"] else "")),
        (
            "cost/step",
            everything and "cost_per_step" in answer["compared_by"],
            lambda _, row: f"{row['cost_per_step']:.3g}",
        ),
        ("energy [J]", everything and "energy_j" in answer["compared_by"], lambda _, row: f"{row['energy_j']:.3g}"),
        ("tokens/s/GPU", tokens, lambda _, row: f"{row['tokens_per_s_per_gpu']:,.0f}"),
        ("MFU", tokens, lambda _, row: f"{row['mfu']:.1%}" if "mfu" in row else "-"),
        (unit, bool(runs), lambda _, row: f"{row['run']['time_s'] / size:,.1f}"),
        ("cost", any("cost" in run for run in runs), lambda _, row: f"{row['run']['cost']:,.0f}"),
    ]
    shown = [(head, write) for head, holds, write in columns if holds]
    cells = [[write(place, row) for _, write in shown] for place, row in enumerate(rows, 1)]
    return format_table([head for head, _ in shown], cells, left=3 if recipes else 2)


def _format_peak(row: dict[str, Any]) -> str:
    """Return a plan's peak and how likely it fits."""
    if row["peak_memory_bytes"] is None:
        return "not estimated"
    return f"{format_bytes(row['peak_memory_bytes'])}, {row['fit_probability']:.0%}"


def describe_rest(row: dict[str, Any]) -> str:
    """Return what a plan's text leaves out: its buckets, and how many other sizes are as good."""
    if row["data"] == 1 or row["sharding"] not in BUCKETED:
        return ""
    text = f", buckets of {row['bucket_bytes'] / BYTES_PER_MIB:.0f} MiB"
    if row["bucket_bytes"] == BUCKET_BYTES and not row["other_buckets"]:
        return ""
    sizes = [f"{other['bucket_bytes'] / BYTES_PER_MIB:.0f}" for other in row["other_buckets"]]
    alike = sizes[: row["alike_buckets"]]
    return f"{text} (or {' or '.join(alike)}, alike)" if alike else text


def _print_left_out(answer: dict[str, Any], *, everything: bool = True) -> None:
    """Say how many plans were left out and, with ``everything``, why."""
    dropped, refused = answer["out_of_memory"], answer["refused"]
    if not everything:
        print(f"\n{len(dropped)} plans do not fit the memory, {sum(refused.values())} are refused: --explain says why")
        return
    print(f"\n{_format_families(answer['families'])}")
    if answer["not_searched"]:
        print(f"not searched, ask simulate: {', '.join(answer['not_searched'])}")
    if dropped:
        least = min(dropped, key=lambda entry: entry["needed_bytes"])
        recipe = f" ({least['precision']})" if "precision" in least else ""
        print(
            f"{len(dropped)} plans do not fit the memory; the nearest: {least['plan_text']}{recipe}, {least['reason']}"
        )
    if refused:
        print(f"{sum(refused.values())} plans are refused:")
        for reason, count in list(refused.items())[:_SHOWN_REASONS]:
            print(f"  {count} {reason}")
        if len(refused) > _SHOWN_REASONS:
            rest = len(refused) - _SHOWN_REASONS
            print(f"  and {rest} more reason{'s' * (rest > 1)} (--json lists all)")


def _format_families(families: list[dict[str, Any]]) -> str:
    """Return what became of each kind of plan, and what the nearest needs where none of a kind is shown."""
    rows = []
    for row in families:
        if row["simulated"]:
            why = ""
        elif row["fastest_slower_s"] is not None:
            why = f"the fastest is estimated as {format_time(row['fastest_slower_s'])}"
        elif row["nearest"]:
            why = f"the nearest {row['nearest']['reason']}"
        else:
            why = next(iter(row["reasons"]))
        rows.append([row["family"], *(str(row[name]) for name in _FATES), why])
    head = ["kind", *(fate.replace("_", " ") for fate in _FATES), "none shown"]
    return format_table(head, rows)


_PARTS = {
    "tensor communication": ("T", "exposed TP"),
    "data communication": ("D", "exposed DP"),
    "pipeline communication": ("p", "exposed PP sends"),
    "context communication": ("S", "exposed CP"),
    "expert communication": ("E", "exposed EP"),
    "other communication": ("M", "exposed communication"),
    "kernel launches": ("L", "kernel launches"),
    "optimizer on the host": ("H", "optimizer on the host"),
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
    settings = {**list_given(options, names), "frameworks": frameworks}
    if options.output and Path(options.output).is_file():
        raise InputError(f"--output {options.output} is a file", fix="name a folder")
    best = plan(options.model, options.gpus, watch=show_progress(options), **settings, **list_inter_node(options))
    answer = best.to_dict()
    if options.html:
        write_page(options, "plot_search", answer, *_predict_best(best.found))
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
    defaults = options.build_parser(["simulate"]).parse_args(["simulate", options.model, "--gpus", options.gpus])
    apply_configuration(defaults)
    own = predict_options(defaults)
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
    parts = {
        ("C", "compute"): sum(time_s for name, time_s in of_step.items() if name not in _PARTS),
        **{part: of_step[name] for name, part in _PARTS.items() if of_step.get(name, 0.0) >= _LEAST_SHARE * step_s},
    }
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
