"""``trioflow memory``: what fills a rank, how likely it fits, and the smallest changes that make it fit."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from typing import Any

from trioflow.base.units import format_bytes
from trioflow.cli.choices import (
    add_plan_arguments,
    apply_configuration,
    read_options,
)
from trioflow.cli.output import (
    add_command,
    format_table,
    list_forms,
    write_output,
)
from trioflow.parallel.memory.survival import DOUBTED, describe_probability
from trioflow.prediction.fitting import answer_memory
from trioflow.sharded.as_traced import AS_TRACED

_BAR = 76
"""Characters of a bar."""
_PARTS = {
    "parameter": ("P", "weights"), "gradient": ("G", "gradients"),
    "optimizer_state": ("O", "optimizer state"), "activation": ("A", "activations"),
    "temporary": ("T", "temporary results"), "bucket": ("C", "communication buffers"),
    "gathered": ("C", "communication buffers"), "message": ("C", "communication buffers"),
    "kept": ("k", "kept free by the allocator"), "outside": ("x", "outside PyTorch"),
}  # fmt: skip
"""Letter and name of each category, those of ``memory.profile`` and what lies beside; others are the last."""
_REST = ("B", "inputs, buffers, workspaces")


def _split(entry: Mapping[str, Any], outside_bytes: int) -> dict[tuple[str, str], int]:
    """Return what fills a rank's card [bytes] by letter and name."""
    kept = int(entry.get("wanted_bytes", entry.get("reserved_bytes", 0)) or entry["peak_bytes"])
    sizes = {**entry["categories"], "kept": kept - entry["peak_bytes"], "outside": outside_bytes}
    names = dict(_PARTS)
    if "parameter" not in sizes:  # sharded in fp32 beside their moments
        names["optimizer_state"] = ("O", "weights and optimizer state")
    parts: dict[tuple[str, str], int] = dict.fromkeys((*names.values(), _REST), 0)
    for name, size in sizes.items():
        parts[names.get(name, _REST)] += size
    return {part: size for part, size in parts.items() if size > 0}


def draw_bar(parts: Mapping[tuple[str, str], int], memory_bytes: int) -> str:
    """Return a bar of what fills a card, its end marked by a stroke; what lies beyond follows it."""
    whole = max(memory_bytes, sum(parts.values()))
    text, so_far = "", 0
    for (letter, _), size in parts.items():
        so_far += size
        text += letter * (round(so_far / whole * _BAR) - len(text))
    text = text.ljust(_BAR, ".")
    end = round(memory_bytes / whole * _BAR)
    return f"[{text[:end]}|{text[end:]}]" if end < _BAR else f"[{text}]"


def _run_memory(options: argparse.Namespace) -> None:
    """Estimate a step's memory and print it."""
    apply_configuration(options)
    plan, platform, assumed = read_options(options)
    answer = answer_memory(options.trace, plan, platform, batch=options.batch, options=assumed)
    if write_output(options.form, answer, answer["memory"]):
        return
    print(_wrap(f"{answer['workload']} on {answer['platform']}: {answer['plan_text']}"))
    if answer["fit_probability"] is None:
        print("memory: not estimated (the trace does not say what its operators make)")
    else:
        _print_ranks(answer)
        _print_verdict(answer)


def _wrap(text: str, indent: int = 2) -> str:
    return textwrap.fill(text, _BAR + 4, subsequent_indent=" " * indent, break_on_hyphens=False)


def _print_ranks(answer: Mapping[str, Any]) -> None:
    """Print the bar of the fullest rank and the last, and what each category takes."""
    fullest, last = answer["fullest_rank"], answer["last_rank"]
    shown = [fullest] if last is fullest else [fullest, last]
    columns = [_split(entry, answer["outside_bytes"]) for entry in shown]
    heads = []
    for entry, parts, word in zip(shown, columns, ("fullest", "last"), strict=False):
        rank = entry["ranks"][0] if word == "fullest" else answer["ranks"] - 1
        heads.append(f"rank {rank}")
        alike = f", {len(entry['ranks'])} of {answer['ranks']} alike" if answer["ranks"] > 1 else ""
        print("\n" + _wrap(f"{word}: rank {rank}{alike}; at its peak in {entry['when']}"))
        print(draw_bar(parts, answer["memory_bytes"]))
    rows = [
        (f"{letter}  {name}", *(format_bytes(parts.get((letter, name), 0)) for parts in columns))
        for letter, name in dict.fromkeys(part for parts in columns for part in parts)
    ]
    for name, key in (("allocated peak", "peak_bytes"), ("reserved peak", "reserved_bytes")):
        rows.append((name, *(format_bytes(one.get(key, one["peak_bytes"])) for one in shown)))
    print(f"\n{format_table(['', *heads], rows, left=1)}")


def _print_verdict(answer: Mapping[str, Any]) -> None:
    """Print the odds, what is left, and what the changes come to."""
    left = f"{format_bytes(abs(answer['left_bytes']))} {'left' if answer['left_bytes'] >= 0 else 'too much'}"
    likely = describe_probability(answer["fit_probability"])
    print(f"\ncard {format_bytes(answer['memory_bytes'])}: {likely} ({left}; docs/memory.md)")
    if not answer["changes"]:
        return
    print(f"\n{'odds':>15}  {'reserved':>9}  change")
    for row in answer["changes"]:
        odds = describe_probability(row["fit_probability"]).removesuffix(" likely to fit")
        mark = "*" if row["fit_probability"] >= DOUBTED else " "
        print(
            _wrap(f"{mark} {odds:>13}  {format_bytes(row['wanted_bytes']):>9}  {row['flags']}", 28)
        )
    enough = any(row["fit_probability"] >= DOUBTED for row in answer["changes"])
    print("* fits" if enough else "none of these makes it fit: use more ranks, or a larger device")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``memory``."""
    add_plan_arguments(parser, megatron=True)
    add_command(parser, _run_memory, {"": (
        (f"--{AS_TRACED}", True, "the memory of ranks that the traces hold, as they are"),
    )}, list_forms("the ranks' memory"))  # fmt: skip
