"""``trioflow scaling``: throughput and MFU of a plan against the number of GPUs."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

from trioflow.base.errors import InputError, PlanError
from trioflow.base.units import format_time
from trioflow.cli.choices import COLLECTIVES, NETWORK, WHAT_IF, add_plan_arguments, apply_configuration, read_options
from trioflow.cli.output import HTML, add_command, format_table, list_forms, print_warnings, write_output, write_page
from trioflow.parallel.memory.peak import describe_probability
from trioflow.prediction.assembly import predict

_COLUMNS = (
    "workload",
    "platform",
    "plan_text",
    "step_time_s",
    "low_s",
    "high_s",
    "samples_per_s",
    "tokens_per_s",
    "mfu",
    "peak_memory_bytes",
    "fit_probability",
    "confidence",
    "warnings",
)
_MOST = 20
"""Numbers of GPUs at most."""


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``scaling``."""
    add_plan_arguments(parser)
    text = (
        "--gpus 8..2048: doublings; 8,24,64: a list; 8..64xH100: with the GPU's name, else give\n--platform. More GPUs add "
        "data-parallel replicas. The default plan is fsdp, or a launch\nconfiguration's own; without --batch the batch per "
        "GPU is constant (weak scaling)."
    )
    forms = list_forms("a row per number of GPUs")
    add_command(parser, _run_scaling, COLLECTIVES, NETWORK, WHAT_IF, HTML, forms, epilog=text)


def read_counts(text: str) -> list[int]:
    """Return the numbers of GPUs of ``8..2048`` or ``8,24``, ascending; InputError where it is neither."""
    first, dots, last = text.partition("..")
    words = [first, last] if dots else text.split(",")
    if not all(re.fullmatch("[1-9][0-9]{0,6}", word, re.ASCII) for word in words):
        raise InputError(f"--gpus {text:.40} is no list of numbers of GPUs", fix="write 8..2048, or 8,16,64")
    counts = sorted({int(word) for word in words})
    if dots:
        counts = [counts[0] << place for place in range((counts[-1] // counts[0]).bit_length())]
    if len(counts) > _MOST:
        raise InputError(f"--gpus {text:.40}: {len(counts)} numbers of GPUs, at most {_MOST} are allowed")
    return counts


def _predict_at(options: argparse.Namespace, count: int, name: str) -> dict[str, Any]:
    """Return the row of a number of GPUs; ``name`` of the GPUs, empty where the platform was given."""
    gpus = f"{count}x{name}" if name else None
    chosen = argparse.Namespace(**{**vars(options), "ranks": count, "gpus": gpus, "data": None, "megatron": None})
    apply_configuration(chosen)
    if not chosen.megatron and not any(
        getattr(options, given) for given in ("plan", "sharding", "tensor", "context", "pipeline", "expert")
    ):
        chosen.plan = "fsdp" if count > 1 else "single"
    plan, platform, assumed = read_options(chosen)
    prediction = predict(chosen.trace, plan, platform, batch=chosen.batch, options=assumed)
    answer = prediction.to_dict()
    return {"ranks": count, **{column: answer.get(column) for column in _COLUMNS}}


def _run_scaling(options: argparse.Namespace) -> None:
    """Predict the step on each number of GPUs and print the rates."""
    write_page(options)
    text, _, name = str(options.gpus or "").partition("x")
    rows: list[dict[str, Any]] = []
    refused: list[PlanError] = []
    for count in read_counts(text):
        options.sign.text = f", {count} GPUs"
        try:
            rows.append(_predict_at(options, count, name))
        except PlanError as error:  # this number does not share the model or the batch
            refused.append(error)
    if not rows:
        raise refused[0]
    unit = "samples" if rows[0]["tokens_per_s"] is None else "tokens"
    for row in rows:
        row["rate"] = row[f"{unit}_per_s"]
        row["efficiency"] = row["rate"] / row["ranks"] / (rows[0]["rate"] / rows[0]["ranks"])
    warnings = [*map(str, refused), *dict.fromkeys(warning for row in rows for warning in row.pop("warnings"))]
    answer = {
        "workload": rows[0]["workload"],
        "platform": rows[0]["platform"],
        "unit": unit,
        "rows": rows,
        "warnings": warnings,
    }
    write_page(options, "plot_scaling", answer)
    if write_output(options.form, answer, rows):
        return
    print(f"{answer['workload']} on {answer['platform']}: {rows[0]['plan_text']} to {rows[-1]['plan_text']}")
    print(_format_rows(rows, unit))
    print_warnings(warnings)


def _format_rows(rows: Sequence[dict[str, Any]], unit: str) -> str:
    head = ["GPUs", "step", "80 % interval", f"{unit}/s", f"{unit}/s/GPU", "scaling efficiency", "MFU", "memory"]
    cells = [
        [
            str(row["ranks"]),
            format_time(row["step_time_s"]),
            f"{format_time(row['low_s'])} to {format_time(row['high_s'])}",
            f"{row['rate']:,.4g}" if row["rate"] < 1e4 else f"{row['rate']:,.0f}",
            f"{row['rate'] / row['ranks']:,.4g}",
            f"{row['efficiency']:.0%}",
            "-" if row["mfu"] is None else f"{row['mfu']:.1%}",
            "-" if row["fit_probability"] is None else describe_probability(row["fit_probability"]),
        ]
        for row in rows
    ]
    return format_table(head, cells, left=0, drop_empty=True)
