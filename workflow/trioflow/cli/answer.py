"""What ``trioflow simulate`` and ``memory`` answer, and what ``show`` says of a trace."""

import argparse
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trioflow import tables
from trioflow.base.columns import Texts
from trioflow.base.errors import InputError, how_to_install
from trioflow.base.precision_recipes import choose_recipe
from trioflow.base.units import format_apart, format_bytes, format_count, format_time, ns_to_s
from trioflow.cli.choices import (
    COLLECTIVES,
    DRAWS,
    FAULTS,
    NETWORK,
    RUN,
    WHAT_IF,
    add_plan_arguments,
    apply_configuration,
    list_algorithm_options,
    list_model_options,
    read_options,
)
from trioflow.cli.output import (
    EXPLAIN,
    HTML,
    add_command,
    check_output,
    format_facts,
    format_table,
    list_flags,
    list_forms,
    print_warnings,
    write_output,
    write_page,
)
from trioflow.costmodel.choices import write_operator_times
from trioflow.costmodel.features import classify
from trioflow.costmodel.operators.curves import class_positions
from trioflow.engine.compiled.run import has_numba
from trioflow.hardware.machine import Device
from trioflow.parallel.memory.peak import DOUBTED, LIKELY, count_wanted, describe_probability, find_fullest
from trioflow.prediction.assembly import Prediction, describe_memory, predict
from trioflow.prediction.breakdown import DEPTH, HOUR_S, WAYS, Faults, describe_run
from trioflow.prediction.fitting import LARGEST, answer_memory, find_largest, split_memory
from trioflow.prediction.question import STEP_WORDS, Options
from trioflow.tables import PHASES
from trioflow.trace.facts import Facts
from trioflow.trace.language.sizes import COMPILE, EAGER, FLASH_ATTN, GRADIENTS, LAYERS, LIGER, read_language_model
from trioflow.trace.store import MOST_UNNAMED, Trace, describe_step, load_trace, summarise_trace

if TYPE_CHECKING:
    import pandas as pd

_FUSED = {
    EAGER: "PyTorch's operators one by one (eager)",
    COMPILE: "kernels of torch.compile",
    LIGER: "Liger's kernels",
    FLASH_ATTN: "flash-attn's norm and rotation",
    LAYERS: "fused layers",
    GRADIENTS: "fused layers and GEMMs that add to main gradients",
}
"""How an answer names the kernels beside attention."""


def describe_model(facts: Facts) -> str:
    """Return the sizes of a language model and of its samples; empty for another trace."""
    language, step = read_language_model(facts), facts.language_model
    if language is None or step is None:
        return ""
    recipe = choose_recipe(str(facts.precision_recipe or facts.precision)).describe()
    trained, lora = step.get("trained_parameters"), step.get("lora")
    return "".join(
        [
            f"{language[0].describe()}; sequence {language[1]}",
            " (default: --sequence)" * bool(step.get("sequence_assumed")),
            f", {recipe}",
            " (default: --precision; PyTorch's FSDP: fsdp2-mixed)" * bool(step.get("precision_assumed")),
            ", deterministic " if step.get("deterministic") else ", ",
            f"{step['attention']} attention, {_FUSED[str(step.get('fusion', EAGER))]}",
            ", a CUDA graph for each block and direction" * bool(step.get("cuda_graphs")),
            ""
            if trained is None
            else f"; {f'LoRA of rank {lora}: ' if lora else ''}{trained / 1e6:.4g} M parameters train",
        ]
    )


def describe_trace(trace: Trace) -> dict[str, Any]:
    """Return what a trace holds: ``tables.TRACES``, ``coverage`` (None without times), ``classes`` by phase, and sums."""
    operators = trace.operator_columns
    named = zip(classify(operators), operators["kind"].tolist(), strict=True)
    names = Texts.of("communication" if kind == "collective" else name for name, kind in named)
    device_s = ns_to_s(float(operators["device_ns"].sum()))
    rows: list[dict[str, Any]] = []
    for name, phase, places in class_positions(operators.assign(operator_class=names)):
        group = operators.take(places)
        time_s = ns_to_s(float(group["device_ns"].sum()))
        rows.append(
            {
                "phase": phase,
                "operator_class": name,
                "operators": group.rows,
                "device_time_s": time_s,
                "share": time_s / device_s if device_s else 0.0,
                "flop": sum(group["flop"].tolist()),
                "bytes": int((group["read_bytes"] + group["write_bytes"]).sum()),
            }
        )
    rows.sort(key=lambda row: (PHASES.index(row["phase"]), -row["device_time_s"], row["operator_class"]))
    facts = trace.facts
    kept = ("device_name", "torch", "warnings", "unjoined", "language_model", "precision_recipe")
    return {
        **summarise_trace(trace, facts.workload),
        **{key: getattr(facts, key) for key in kept},
        "device_time_s": device_s,
        "operators": operators.rows,
        "classes": rows,
    }


def run_show(options: argparse.Namespace) -> None:
    """Print what a trace holds."""
    step = {name: getattr(options, name) for name in ("batch", *STEP_WORDS)}
    trace = load_trace(options.trace, **step)
    if options.operators:
        print(write_operator_times(trace), end="")
        return
    answer = describe_trace(trace)
    if write_output(options.form, answer, answer["classes"]):
        return
    print(
        format_facts(
            [
                (
                    "workload",
                    f"{answer['workload']}, batch {answer['batch']}, {answer['precision']}, {answer['optimizer']}",
                ),
                ("source", str(answer["source"])),
                ("model", describe_model(trace.facts)),
                ("device", str(answer["device_name"] or "none")),
                ("step", describe_step(answer)),
                ("operators", f"{answer['operators']} operators, {answer['kernels']} device kernels"),
                (
                    "work",
                    "not recorded"
                    if trace.unshaped_share >= MOST_UNNAMED
                    else f"{format_count(answer['flop'])}FLOP, parameters {format_bytes(answer['parameter_bytes'])}",
                ),
                ("not joined", str(answer["not_joined"])),
                ("warnings", "; ".join(answer["warnings"] or [])),
            ]
        )
    )
    print()
    rows = [
        (
            row["phase"],
            row["operator_class"],
            str(row["operators"]),
            format_time(row["device_time_s"]) if answer["device_time_s"] else "-",
            f"{row['share']:.1%}" if answer["device_time_s"] else "-",
            format_count(row["flop"]).strip() if row["flop"] else "-",
            format_bytes(row["bytes"]),
        )
        for row in answer["classes"]
    ]
    head = ("phase", "class", "operators", "time", "share", "FLOP", "bytes")
    print(format_table(head, rows, left=2, drop_empty=True))


def add_show(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``show``."""
    add_command(
        parser,
        run_show,
        {
            "": (
                (
                    "trace",
                    "TRACE",
                    "folder or pack of a trace, a shipped one's name, or a language model by name or configuration",
                ),
            )
        },
        list_model_options(),
        {
            "": (
                ("--batch", (int, "N"), "samples of such a model's step"),
                (
                    "--operators",
                    True,
                    "print every distinct operator with its time as CSV, the format of simulate's --override",
                ),
            )
        },
        list_forms("the classes of operators"),
        epilog="`trioflow models` lists the traces that ship, and the models that are traced on the spot (with PyTorch).",
    )


_MINUTE_S = 60.0
_UNITS = {
    "time_s": (("days", 86400.0), ("hours", HOUR_S), ("minutes", _MINUTE_S)),
    "energy_j": (("MWh", 3.6e9), ("kWh", 3.6e6)),
}
"""Of a run's time [s] and energy [J], the largest first."""
_PATIENCE_S = 5.0
PERFETTO_ENDINGS = (".json", ".json.gz")
"""Of files that hold a timeline for Perfetto."""


def predict_options(options: argparse.Namespace, *, record_links: bool = False) -> Prediction:
    """Return the prediction that a command line asks for; with the links' rates, where the network has them."""
    plan, platform, assumed = read_options(options)
    if record_links:
        from trioflow.export.step_files import can_count_links

        assumed = replace(assumed, record_links=can_count_links(assumed.network))
    return predict(options.trace, plan, platform, batch=options.batch, options=assumed)


def write_timeline(prediction: Prediction, path: str) -> None:
    """Write a timeline, as a table or for Perfetto."""
    if path.endswith(".parquet"):
        tables.write_table(prediction.timeline, "timeline", path)
    else:
        from trioflow.export.step_files import write_step

        write_step(prediction, path)


def _run_simulate(options: argparse.Namespace) -> None:
    """Predict a step and print it."""
    apply_configuration(options)
    _check_outputs(options)
    write_page(options)
    if options.largest:
        _run_largest(options)
        return
    prediction = predict_options(options, record_links=str(options.timeline or "").endswith(PERFETTO_ENDINGS))
    answer, breakdown = prediction.to_dict(), None
    answer |= add_run(answer, options, prediction.step.platform.device)
    if options.by:
        breakdown = prediction.breakdown(options.by, options.depth)
    if options.timeline:
        write_timeline(prediction, options.timeline)
    if options.breakdown and breakdown is not None:
        tables.write_table(breakdown, "breakdown", options.breakdown)
    write_page(options, "plot", prediction, run=answer.get("run"))
    rows = [answer] if breakdown is None else tables.records(breakdown)
    if write_output(options.form, answer | ({} if breakdown is None else {"breakdown": rows}), rows):
        return
    print_prediction(prediction, answer, options)
    if breakdown is not None:
        print(f"\n{_format_breakdown(breakdown, answer['step_time_s'])}")
    print_warnings(answer["warnings"], everything=options.explain)


def print_prediction(prediction: Prediction, answer: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print a predicted step, ``answer`` of ``Prediction.to_dict`` with its run; ``options``: what of it was asked."""
    facts = prediction.step.traces[0].facts
    interval = f"80 % interval {format_time(answer['low_s'])} to {format_time(answer['high_s'])}"
    print(f"{answer['workload']} on {answer['platform']}: {answer['plan_text']}")
    peak_bytes, outside_bytes, memory_bytes, likely = (
        answer[name] for name in ("peak_memory_bytes", "outside_bytes", "memory_bytes", "fit_probability")
    )
    memory = describe_memory(peak_bytes, outside_bytes, memory_bytes, likely, prediction.step.wanted_bytes)
    print(
        format_facts(
            [
                ("model", describe_model(facts)),
                ("precision", "" if describe_model(facts) else f"{facts.precision or 'not said'}, as traced"),
                ("stages", _describe_stages(answer, prediction)),
                ("operator times", answer["cost_model"]),
                ("peak memory", memory),
                *_describe_filling(answer["memory"]),
                ("step time", f"{format_time(answer['step_time_s'])}  ({interval}; {answer['confidence']})"),
                (
                    "without session",
                    f"{format_time(answer['trace_only_step_time_s'])}, from the trace alone"
                    if "trace_only_step_time_s" in answer
                    else "",
                ),
                ("throughput", _describe_throughput(answer)),
                (
                    "MFU",
                    f"{answer['mfu']:.1%} ({answer['mfu_without_embeddings']:.1%} without embeddings): "
                    f"{answer['model_flop_per_s_per_gpu'] / 1e12:.0f} model TFLOP/s per GPU"
                    if "mfu" in answer
                    else "",
                ),
                ("MFU counts", answer.get("mfu_formula", "")),
                ("compute", f"{format_time(answer['compute_s'])} on the busiest GPU"),
                (
                    "communication",
                    f"{format_time(answer['communication_s'])}, "
                    f"of which {format_time(answer['exposed_communication_s'])} exposed, on that GPU",
                ),
                ("exposed", _describe_waits(answer)),
                *_describe_draws(answer.get("draws")),
                ("bubble", f"{answer['bubble_share']:.1%} of the step, on average" if "bubble_share" in answer else ""),
                (
                    "launch-bound",
                    f"GPUs idle {answer['host_share']:.1%} of the step waiting for kernel launches"
                    if answer.get("host_share", 0.0) >= _NAMED_SHARE
                    else "",
                ),
                (
                    "host-bound",
                    f"GPUs idle {answer['host_update_share']:.1%} of the step waiting for the optimizer on the host"
                    if answer.get("host_update_share", 0.0) >= _NAMED_SHARE
                    else "",
                ),
                ("run", _describe_cost(answer, getattr(options, "currency", "US$"))),
                (
                    "simulated",
                    f"{answer['events']} events in {format_time(answer['simulator_wall_s'])}"
                    f"{' (identical ranks simulated once)' if answer['folded'] else ''}",
                ),
                (
                    "faster",
                    f"with numba; {how_to_install('fast')}"
                    if answer["simulator_wall_s"] > _PATIENCE_S and not has_numba()
                    else "",
                ),
                *((name, getattr(options, name, None) or "") for name in ("timeline", "breakdown")),
                ("page", getattr(options, "html", None) or ""),
            ]
        )
    )


def _run_largest(options: argparse.Namespace) -> None:
    """Find the largest batch or sequence that fits, and print it."""
    what = options.largest
    if getattr(options, what) is not None and not (options.megatron and what == "batch"):
        raise InputError(f"--{what} and --largest {what} were both given", fix="give one of them")
    plan, platform, assumed = read_options(options)
    answer = find_largest(options.trace, plan, platform, what, batch=options.batch, options=assumed)
    if write_output(options.form, answer, [answer]):
        return
    print(f"{options.trace[0]} on {platform.name}: {answer['plan_text']}")
    unit, facts = "tokens a sample", []
    for head, name in (
        ("largest", "fits"),
        (f"largest that is {DOUBTED:.0%} likely to fit", "roomy"),
        ("the next does not fit", "next"),
    ):
        if largest := answer[name]:
            needed, room = format_apart(largest["reserved_bytes"] + answer["outside_bytes"], answer["memory_bytes"])
            if what == "batch":
                unit = f"samples a step, {largest[what] // (plan.data * plan.pieces)} a micro-batch"
            likely = describe_probability(largest["fit_probability"])
            facts.append((head, f"{largest[what]:,} {unit}: {needed} of {room}, {likely}"))
    print(format_facts(facts))


def add_run(answer: Mapping[str, Any], options: argparse.Namespace, device: Device) -> dict[str, Any]:
    """Return the run of ``--tokens`` as an entry of the answer; nothing where none is asked for."""
    power_w, sheet = options.power_w, device.sheet
    if power_w is None and sheet and math.isfinite(sheet.power_limit_w):
        power_w = sheet.power_limit_w
    faults, hours = None, options.gpu_hours_per_failure
    if hours is not None:
        faults = Faults(hours, options.checkpoint_s, options.restart_s)
        if options.tokens is None and options.budget is None:
            raise InputError("--gpu-hours-per-failure of no run", fix="give its --tokens or --budget")
    run = describe_run(answer, options.tokens, options.price_per_gpu_hour, power_w, faults, options.budget)
    return {"run": run} if run else {}


_WHOLE = 100.0
"""A rate from which on no digit behind the point is written."""


def _describe_throughput(answer: Mapping[str, Any]) -> str:
    """Return the rate in samples, and in tokens where a sample has any."""
    rate = answer["samples_per_s"]
    text = f"{rate:,.0f} samples/s" if rate >= _WHOLE else f"{rate:.3g} samples/s"
    if "tokens_per_s" not in answer:
        return text
    return (
        f"{answer['tokens_per_s']:,.0f} tokens/s ({answer['tokens_per_s_per_gpu']:,.0f} per GPU; "
        f"{answer['tokens_per_step']:,} tokens a step, {text})"
    )


def _describe_waits(answer: Mapping[str, Any]) -> str:
    """Return the exposed communication of each degree's groups, which late ranks have less of."""
    parts = [f"{name} {format_time(time_s)}" for name, time_s in answer.get("exposed_by_group_s", {}).items()]
    shared = "; where several wait at once, each counts" * (len(parts) > 1)
    return f"{', '.join(parts)}, mean over the GPUs{shared}" if parts else ""


def choose_unit(column: str, *runs: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name and size of the largest unit that ``time_s`` or ``energy_j`` of all runs reach, else of the smallest."""
    least = min((run.get(column, 0.0) for run in runs), default=0.0)
    return next((unit for unit in _UNITS[column] if least >= unit[1]), _UNITS[column][-1])


def _describe_cost(answer: Mapping[str, Any], currency: str) -> str:
    """Return what a run of many tokens takes."""
    run = answer.get("run")
    if not run:
        return ""
    unit, size = choose_unit("time_s", run)
    hours = run["gpu_hours"]
    text = f"{run['tokens']:.3g} tokens: {run['time_s'] / size:,.1f} {unit}, {hours:,.{0 if hours >= 10 else 2}f} GPU-hours"
    if "cost" in run:
        cost = format_count(run["cost"]).replace(" ", "")
        text += f", {currency}{cost} at {currency}{run['cost'] / hours:.2f}/GPU-hour"
    if "goodput" in run:
        text += (
            f" ({run['goodput']:.1%} of it kept: a failure every {run['mtbf_s'] / HOUR_S:,.1f} h, state saved every"
            f" {run['checkpoint_interval_s'] / _MINUTE_S:,.0f} min)"
        )
    if "energy_j" in run:
        unit, size = choose_unit("energy_j", run)
        text += f", {run['energy_j'] / size:,.1f} {unit} at {run['power_w']:.0f} W per GPU"
    return text


_LATEST = 3
"""Ranks that are named as late."""
_NAMED_SHARE = 0.01
"""Of a step that its hosts decide; less is not worth a line."""


def _describe_draws(draws: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return what the draws came to, and who waits for whom in them; nothing without draws."""
    if draws is None:
        return []
    low, median, high, mean = (format_time(draws[name]) for name in ("low_s", "median_s", "high_s", "expected_s"))
    waits = [
        f"{format_time(one['wait_s'])} at each of {one['exchanges']} exchanges of {one['group']}"
        f" ({format_time(one['steady_wait_s'])} without spread)"
        for one in draws["waits"]
    ]
    late = sorted(draws["late"], key=lambda one: (-one["share"], one["rank"]))[:_LATEST]
    return [
        ("sampled", f"{draws['count']} steps: median {median}, 80 % from {low} to {high}, mean {mean}"),
        ("spread", draws["source"]),
        ("waits", ", ".join(waits)),
        ("late", ", ".join(f"rank {one['rank']} at {one['share']:.0%} of its exchanges" for one in late)),
    ]


_CUTS = {
    "time": "by the trace's times (--stages count: as many layers each, as Megatron-LM cuts)",
    "count": "as many layers each",
    "given": "as given",
}


def _describe_stages(answer: Mapping[str, Any], prediction: Prediction) -> str:
    """Return the units of a pipeline's stages, how they were cut, and what other schedule there is for GPipe."""
    if "stage_units" not in answer:
        return ""
    gpipe = prediction.task_graph.metadata.plan.schedule == "gpipe"
    units = ", ".join(map(str, answer["stage_units"]))
    return f"{units} units, cut {_CUTS[answer['stages_by']]}" + "; GPipe (--schedule 1f1b as Megatron-LM)" * gpipe


def _describe_filling(memory: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return what fills the fullest rank at its peak, the largest first, what the allocator reserves, and when that is."""
    if not memory:
        return []
    fullest = find_fullest(memory)
    parts = [
        f"{category.replace('_', ' ')} {format_bytes(size)}"
        for category, size in fullest["categories"].items()
        if size >= fullest["peak_bytes"] / 100
    ]
    rank = f"rank {fullest['ranks'][0]}, " if len(memory) > 1 else ""
    return [("at its peak", ", ".join(parts)), ("peak occurs at", f"{rank}{fullest['when']}")]


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written and a breakdown that cannot be made, before anything is computed: InputError."""
    if options.depth < 1:
        raise InputError(f"--depth {options.depth} is not positive")
    if options.breakdown and not options.by:
        raise InputError(f"--breakdown {options.breakdown} without --by", fix=f"say --by {'|'.join(WAYS)}")
    check_output("--breakdown", options.breakdown, (".parquet",))
    check_output("--timeline", options.timeline, (".parquet", *PERFETTO_ENDINGS))


def _format_breakdown(breakdown: "pd.DataFrame", step_time_s: float) -> str:
    """Return a breakdown as text, times with their share of the step."""

    def share(time_s: float | None) -> str:
        if time_s is None:
            return "-"
        return f"{format_time(time_s)} {time_s / step_time_s:6.1%}" if step_time_s else "-"

    def size(value: int | None) -> str:
        return format_bytes(value) if value else "-"

    rows = [
        (
            row["name"] or "(outside)",
            str(row["ranks"]),
            share(row["compute_s"]),
            share(row["communication_s"]),
            share(row["exposed_communication_s"]),
            share(row["idle_s"]),
            size(row["message_bytes"]),
            size(row["gradient_bytes"]),
            " ".join("x".join(map(str, shape)) for shape in row["output_shapes"] or []) or "-",
        )
        for row in tables.records(breakdown)
    ]
    head = ["ranks", "compute", "communication", "exposed", "idle", "messages", "gradients", "output"]
    columns = [breakdown["by"].iloc[0] if len(breakdown) else "name", *head]
    return format_table(columns, rows, drop_empty=True)


def add_simulate(parser: argparse.ArgumentParser, form: str = "--output") -> None:
    """Add the subcommand ``simulate``, its form of output under a flag."""
    add_plan_arguments(parser, megatron=True)
    add_command(
        parser,
        _run_simulate,
        COLLECTIVES,
        RUN,
        FAULTS,
        DRAWS,
        NETWORK,
        list_algorithm_options(", for all or as all_reduce=ring,all_gather=direct"),
        WHAT_IF,
        {
            "answer": (
                (
                    "--largest",
                    LARGEST,
                    "instead of a step's time: the largest batch, or sequence, that fits the memory",
                    {"metavar": "batch|sequence"},
                ),
                ("--by", WAYS, f"break the step down by {' or '.join(WAYS)}", {"metavar": "WAY"}),
                (
                    "--depth",
                    (int, "N"),
                    f"levels of a module's path that --by module shows (default: {DEPTH})",
                    {"default": DEPTH, "rare": True},
                ),
                ("--breakdown", "OUT", "write that breakdown: .parquet", {"rare": True}),
                ("--timeline", "OUT", "write the timeline: .parquet, or .json[.gz] for Perfetto"),
                *list_flags(Options, "fold", "as_traced"),
            )
        },
        EXPLAIN,
        HTML,
        list_forms("the answer, or the breakdown of --by,", form),
    )


_BAR = 76
"""Characters of a bar."""


def draw_bar(parts: Mapping[tuple[str, str], float], memory_bytes: float) -> str:
    """Return a bar of what fills a card, its end marked by a stroke; what lies beyond follows it."""
    whole = max(memory_bytes, sum(parts.values()))
    text, so_far = "", 0.0
    for (letter, _), size in parts.items():
        so_far += size
        text += letter * (round(so_far / whole * _BAR) - len(text))
    text = text.ljust(_BAR, ".")
    end = round(memory_bytes / whole * _BAR)
    return f"[{text[:end]}|{text[end:]}]" if end < _BAR else f"[{text}]"


def _run_memory(options: argparse.Namespace) -> None:
    """Estimate a step's memory and print it."""
    apply_configuration(options)
    write_page(options)
    plan, platform, assumed = read_options(options)
    answer = answer_memory(options.trace, plan, platform, batch=options.batch, options=assumed)
    write_page(options, "plot_memory", answer)
    if write_output(options.form, answer, answer["memory"]):
        return
    print(wrap(f"{answer['workload']} on {answer['platform']}: {answer['plan_text']}"))
    if answer["fit_probability"] is None:
        print("memory: not estimated (the trace does not record operator outputs)")
    else:
        _print_ranks(answer)
        _print_verdict(answer)
    print_warnings(answer["warnings"], everything=options.explain)


def wrap(text: str, indent: int = 2) -> str:
    """Return a paragraph in lines of 80 columns."""
    return textwrap.fill(text, _BAR + 4, subsequent_indent=" " * indent, break_on_hyphens=False)


def _print_ranks(answer: Mapping[str, Any]) -> None:
    """Print the bar of the fullest rank and the last, and what each category takes."""
    fullest, last = answer["fullest_rank"], answer["last_rank"]
    shown = [fullest] if last is fullest else [fullest, last]
    columns = [split_memory(entry, answer["outside_bytes"]) for entry in shown]
    heads = []
    for entry, parts, word in zip(shown, columns, ("fullest", "last"), strict=False):
        rank = entry["ranks"][0] if word == "fullest" else answer["ranks"] - 1
        heads.append(f"rank {rank}")
        alike = f" (the same on {len(entry['ranks'])} of {answer['ranks']} ranks)" if answer["ranks"] > 1 else ""
        print("\n" + wrap(f"{word}: rank {rank}{alike}; peak in {entry['when']}"))
        print(draw_bar(parts, answer["memory_bytes"]))
    rows = [
        *(
            (f"{letter}  {name}", *(format_bytes(parts.get((letter, name), 0)) for parts in columns))
            for letter, name in dict.fromkeys(part for parts in columns for part in parts)
        ),
        # Reserved: without the card's limit, as in the bar and of the changes below.
        ("allocated peak", *(format_bytes(one["peak_bytes"]) for one in shown)),
        ("reserved peak", *(format_bytes(count_wanted(one)) for one in shown)),
    ]
    print(f"\n{format_table(['', *heads], rows, left=1)}")


def _print_verdict(answer: Mapping[str, Any]) -> None:
    """Print the odds, what is left, and what the changes come to."""
    size = format_bytes(abs(answer["left_bytes"]))
    left = f"{size} left" if answer["left_bytes"] >= 0 else f"{size} less would make it {100 * LIKELY:.0f} % likely"
    likely = describe_probability(answer["fit_probability"])
    print(f"\nusable memory {format_bytes(answer['memory_bytes'])}: {likely} ({left}; docs/memory.md)")
    if not answer["changes"]:
        return
    print(f"\n{'P(fits)':>15}  {'reserved':>9}  change")
    for row in answer["changes"]:
        odds = describe_probability(row["fit_probability"]).removesuffix(" likely to fit")
        mark = "*" if row["fit_probability"] >= DOUBTED else " "
        print(wrap(f"{mark} {odds:>13}  {format_bytes(row['wanted_bytes']):>9}  {row['flags']}", 28))
    enough = any(row["fit_probability"] >= DOUBTED for row in answer["changes"])
    print(
        f"* at least {100 * DOUBTED:.0f} % likely to fit"
        if enough
        else "none of these makes it fit: use more ranks, or a larger device"
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``memory``."""
    add_plan_arguments(parser, megatron=True)
    add_command(
        parser,
        _run_memory,
        {"answer": list_flags(Options, "as_traced")},
        EXPLAIN,
        HTML,
        list_forms("the ranks' memory"),
    )
