"""``trioflow search``: which plan to choose for a model, a number of ranks and a platform."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from trioflow.base.ahead import count_jobs
from trioflow.base.errors import InputError
from trioflow.base.plan_row import BUCKETED
from trioflow.base.units import BYTES_PER_MIB, format_bytes, format_time
from trioflow.cli.answer import choose_unit
from trioflow.cli.choices import DRAWS, GPUS, INTER_NODES, ROUTING, RUN, apply_gpus, list_given, list_model_options
from trioflow.cli.output import (
    EXPLAIN,
    HTML,
    add_command,
    format_table,
    list_flags,
    list_forms,
    print_warnings,
    write_output,
    write_page,
)
from trioflow.hardware.machine import Platform
from trioflow.network.across_nodes import INTER_NODE
from trioflow.parallel.memory.peak import DOUBTED
from trioflow.parallel.plan import BUCKET_BYTES
from trioflow.prediction.answer import Prediction
from trioflow.prediction.assembly import predict
from trioflow.prediction.question import SORTS, STEP_WORDS, Options
from trioflow.sweeps.search import SearchResult, Watch, search

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


def _find_plans(options: argparse.Namespace) -> SearchResult:
    """Return the answer of ``trioflow search``."""
    apply_gpus(options)
    if options.ranks is None:
        raise InputError("no number of GPUs was given", fix="give --gpus 256xH100, or --ranks and --platform")
    jobs = count_jobs() if options.jobs is None else options.jobs
    return search(
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
        jobs=jobs,
        **list_given(options, _ASSUMED),
    )


def _run_search(options: argparse.Namespace) -> None:
    """Search for plans and print the best."""
    write_page(options)
    result = _find_plans(options)
    answer = result.to_dict()
    if options.html:
        write_page(options, "plot_search", answer, *predict_best(options, options.trace, result, options.platform))
    if write_output(options.form, answer, answer["ranking"]):
        return
    print_search(answer, everything=options.explain)
    if not answer["ranking"]:
        raise InputError("no plan fits", fix="use more ranks, a smaller batch or another platform")


def predict_best(
    options: argparse.Namespace, traces: Sequence[str], result: SearchResult, platform: Platform | str
) -> list[Prediction]:
    """Return the predictions of a search's best two plans, which its page compares."""
    given = list_given(options, [name for name in _ASSUMED if name != "draws"])
    found = []
    for plan, row in zip(result.plans[:2], result["ranking"], strict=False):
        recipe = {name: row[name] for name in ("precision", "fusion") if "precisions" in result}
        found.append(predict(traces, plan, platform, batch=result["batch"], options=Options(**given | recipe)))
    return found


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
        print(f"and in {answer['first_beats_second_drawn']:.0%} of the draws of the same ranks, by their jitter alone")
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
