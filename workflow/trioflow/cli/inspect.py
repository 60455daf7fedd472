"""``trioflow show`` and ``trioflow fit``: what a trace holds, and what is learned from several."""

from __future__ import annotations

import argparse
import json
from typing import Any

from trioflow.base.precision_recipes import choose_recipe
from trioflow.base.units import format_bytes, format_count, format_time, ns_to_s
from trioflow.cli.arguments import add_json_argument, add_model_arguments
from trioflow.cli.output import add_output_argument, write_output
from trioflow.cli.text import add_options, format_facts, format_table
from trioflow.costmodel.features import classify
from trioflow.costmodel.operators.methods import AUTO, METHOD_NAMES, fit_named_model
from trioflow.costmodel.overrides import write_operator_times
from trioflow.prediction.options import STEP_WORDS
from trioflow.tables import PHASES, records
from trioflow.trace.facts import Facts
from trioflow.trace.language.sizes import (
    COMPILE,
    EAGER,
    FLASH_ATTN,
    GRADIENTS,
    LAYERS,
    LIGER,
    read_language_model,
)
from trioflow.trace.store import MOST_UNNAMED, Trace, find_operators, load_trace, shipped_traces
from trioflow.trace.summary import describe_step, summarise_trace

_FUSED = {
    EAGER: "PyTorch's operators one by one (eager)",
    COMPILE: "kernels of torch.compile",
    LIGER: "Liger's kernels",
    FLASH_ATTN: "flash-attn's norm and rotation",
    LAYERS: "fused layers",
    GRADIENTS: "fused layers and products that add to main gradients",
}
"""How an answer names the kernels beside attention."""


def describe_model(facts: Facts) -> str:
    """Return the sizes of a language model and of its samples; empty for another trace."""
    language = read_language_model(facts)
    if language is None or facts.language_model is None:
        return ""
    recipe = choose_recipe(str(facts.precision_recipe or facts.precision))
    attention = "deterministic " * bool(facts.language_model.get("deterministic"))
    attention += facts.language_model["attention"]
    fused = _FUSED[str(facts.language_model.get("fusion", EAGER))]
    if facts.language_model.get("cuda_graphs"):
        fused += ", a CUDA graph for each block and direction"
    trained = facts.language_model.get("trained_parameters")
    if trained is not None:
        lora = facts.language_model["lora"]
        fused += (
            f"; {f'LoRA of rank {lora}: ' if lora else ''}{trained / 1e6:.4g} M parameters train"
        )
    return f"{language[0].describe()}; sequence {language[1]}, {recipe.describe()}, {attention} attention, {fused}"


def describe_trace(trace: Trace) -> dict[str, Any]:
    """Return what a trace holds: ``tables.TRACES``, ``coverage`` (None without times), ``classes`` by phase, and sums."""
    operators = trace.operators.assign(operator_class=classify(trace.operators).to_numpy())
    operators.loc[operators["kind"] == "collective", "operator_class"] = "communication"
    device_s = ns_to_s(float(operators["device_ns"].sum()))
    rows: list[dict[str, Any]] = []
    for phase in PHASES:
        own = operators[operators["phase"] == phase]
        for name, group in own.groupby("operator_class", sort=True):
            time_s = ns_to_s(float(group["device_ns"].sum()))
            rows.append(
                {
                    "phase": phase,
                    "operator_class": str(name),
                    "operators": len(group),
                    "device_time_s": time_s,
                    "share": time_s / device_s if device_s else 0.0,
                    "flop": sum(group["flop"].tolist()),
                    "bytes": int((group["read_bytes"] + group["write_bytes"]).sum()),
                }
            )
    rows.sort(key=lambda row: (PHASES.index(row["phase"]), -row["device_time_s"]))
    facts = trace.facts
    kept = ("device_name", "torch", "warnings", "unjoined", "language_model", "precision_recipe")
    return {
        **summarise_trace(trace, facts.workload),
        **{key: getattr(facts, key) for key in kept},
        "device_time_s": device_s,
        "operators": len(operators),
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
        format_facts([
            ("workload", f"{answer['workload']}, batch {answer['batch']}, {answer['precision']}, {answer['optimizer']}"),
            ("source", str(answer["source"])),
            ("model", describe_model(trace.facts)),
            ("device", str(answer["device_name"] or "none")),
            ("step", describe_step(answer)),
            ("operators", f"{answer['operators']} operators, {answer['kernels']} device kernels"),
            ("work", "not recorded" if trace.unshaped_share >= MOST_UNNAMED else f"{format_count(answer['flop'])}FLOP, parameters {format_bytes(answer['parameter_bytes'])}"),
            ("not joined", str(answer["not_joined"])),
            ("warnings", "; ".join(answer["warnings"] or [])),
        ])
    )  # fmt: skip
    print()
    rows = [
        (
            row["phase"], row["operator_class"], str(row["operators"]),
            format_time(row["device_time_s"]) if answer["device_time_s"] else "-",
            f"{row['share']:.1%}" if answer["device_time_s"] else "-", format_count(row["flop"]).strip() if row["flop"] else "-",
            format_bytes(row["bytes"]),
        )
        for row in answer["classes"]
    ]  # fmt: skip
    head = ("phase", "class", "operators", "time", "share", "FLOP", "bytes")
    print(format_table(head, rows, left=2, drop_empty=True))


def _run_fit(options: argparse.Namespace) -> None:
    """Fit a model, write it, and print how well it predicts what it did not see."""
    traces = [load_trace(name) for name in options.traces]
    model, diagnostics = fit_named_model(traces, options.method)
    model.save(options.output, inputs=[find_operators(n) for n in options.traces])
    rows = records(diagnostics.sort_values("time_share", ascending=False))
    low, high = model.step_interval()
    if options.json:
        print(json.dumps({"model": options.output, "step_interval": [low, high], "classes": rows}))
        return
    print(
        format_table(
            ("class", "phase", "driver", "operators", "time share", "R2", "held-out sum", "held-out each"),
            [
                (
                    row["operator_class"], row["phase"], row["driver"], str(row["operators"]),
                    f"{row['time_share']:.1%}", _optional(row["r_squared"], ".3f"),
                    _optional(row["held_out_error"], "+.1%"),
                    _optional(row["held_out_absolute_error"], ".1%"),
                )
                for row in rows
            ],
            left=3,
        )
    )  # fmt: skip
    print(
        f"\n80 % of left-out steps lie between {low:.2f} and {high:.2f} of their prediction"
        f"\nwritten: {options.output}"
    )


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def add_show(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``show``."""
    parser.set_defaults(run=run_show)
    parser.epilog = (
        f"Traces that ship: {', '.join(shipped_traces())}. Names of language models: one that is none of them is "
        "answered with all. They are traced on the spot, which takes PyTorch."
    )
    parser.add_argument(
        "trace", metavar="TRACE",
        help="folder or pack of a trace, a shipped one's name, or a language model by name or configuration",
    )  # fmt: skip
    add_model_arguments(parser)
    add_options(parser, (
        ("--batch", (int, "N"), "samples of such a model's step"),
        ("--operators", True, "print every distinct operator with its time as CSV, the format of simulate's --override"),
    ))  # fmt: skip
    add_output_argument(parser, "the classes of operators")


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``fit``."""
    parser.set_defaults(run=_run_fit)
    add_options(parser, (
        ("traces", "TRACE", "folders of traces of one device", {"nargs": "+"}),
        ("--method", "NAME", f"{', '.join(METHOD_NAMES)}, or one that a package registers (default: {AUTO})", {"default": AUTO}),
    ))  # fmt: skip
    parser.add_argument("-o", "--output", required=True, metavar="MODEL", help="JSON file to write")
    add_json_argument(parser)
