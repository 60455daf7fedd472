"""Rows of the figures from public measurements that the workflow judged its models on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow import tables
from trioflow.errors import InputError
from trioflow.reproductions.figures.families import SINGLE, read_short_plan
from trioflow.reproductions.figures.figure_tables import MEASURED_PUBLIC
from trioflow.reproductions.validation.aims import SETS
from trioflow.tables import records

TRAINING = "train"
"""Group of whole training steps in ``tables.VALIDATION``."""
THROUGHPUT = "resnet50 throughput"
"""First words of the group of measured throughputs there."""


def shorten_device(name: str) -> str:
    """Return the name of a GPU without what every line would repeat."""
    words = name.replace("-", " ").split()
    skipped = {"NVIDIA", "Tesla", "HBM3", "SXM4", "80GB"}
    return " ".join(word for word in words if word not in skipped)


def list_validation_rows(file: str | Path, set_name: str) -> list[dict[str, Any]]:
    """Return whole training steps of one GPU from a set of the validation, as ``EVIDENCE`` rows.

    Parameters
    ----------
    file : path
        Parquet file of ``tables.VALIDATION``.
    set_name : str
        Its set: a key of ``validation_aims.SETS``.

    Raises
    ------
    InputError
        When the set has no such case by the model that ships.
    """
    cases = tables.read_table(file, "validation")
    ours = cases[(cases["set"] == set_name) & (cases["model"] == SETS[set_name].ours)]
    group = ours["group"]
    ours = ours[(group == TRAINING) | group.str.startswith(THROUGHPUT)]
    if ours.empty:
        raise InputError(
            f"no whole training step in the set {set_name}", file=file,
            fix="run `snakemake validation`",
        )  # fmt: skip
    return [_describe_validation(row) for row in records(ours)]


def _describe_validation(row: dict[str, Any]) -> dict[str, Any]:
    same = row["set"] == "batch-change"
    source_gpu = row["device"] if same else row["source"]
    ways = {"end_to_end": "whole step", "operator_sum": "operator sum"}
    target = shorten_device(row["device"])
    name = target if same else f"{shorten_device(source_gpu)} to {target}"
    return {
        "evidence": MEASURED_PUBLIC, "panel": "one GPU", "label": name, "series": ways[row["quantity"]],
        "case": row["case"], "workload": row["case"].split()[0].split("-")[0].rstrip(","),
        "source_gpu": source_gpu, "device": row["device"], "family": SINGLE, "plan": "single", "ranks": 1,
        "micro_batches": 0, "batch": 0, "quantity": ways[row["quantity"]],
        **{key: row[key] for key in ("measured_s", "predicted_s", "low_s", "high_s")},
        "status": "ok", "reason": "", "confidence": "",
        "source": f"public tables of the set {row['set']} ({row['source']})",
    }  # fmt: skip


def list_published_rows(
    files: Sequence[str | Path], families: Sequence[str], *, label: str = "{case}"
) -> list[dict[str, Any]]:
    """Return public multi-GPU cases of some kinds of plans, as ``EVIDENCE`` rows.

    Parameters
    ----------
    files : sequence of path
        Parquet files of ``tables.PUBLISHED_CASES``.
    families : sequence of str
        Kinds of plans that are wanted.
    label : str
        What a line is called, with columns of the table in braces.

    Raises
    ------
    InputError
        When there is no such case.
    """
    frames = [tables.read_table(file, "published_cases") for file in files]
    rows = []
    for row in records(pd.concat(frames, ignore_index=True)) if frames else []:
        family, chunks = read_short_plan(row["plan"])
        if family not in families:
            continue
        device = row["platform"].rpartition(", ")[2]
        rows.append({
            "evidence": MEASURED_PUBLIC, "panel": f"traced on {'the same GPU' if row['source_gpu'] == device else 'another GPU'}",
            "label": label.format(**row), "series": "",
            "case": row["case"], "workload": row["workload"], "source_gpu": row["source_gpu"],
            "device": device, "family": family, "plan": row["plan"],
            "ranks": row["ranks"], "micro_batches": chunks, "batch": row["batch"],
            "quantity": f"step time, {row['mode']}",
            **{key: row[key] for key in ("measured_s", "predicted_s", "low_s", "high_s")},
            "status": "ok", "reason": "", "confidence": row["confidence"], "source": row["source"],
        })  # fmt: skip
    if not rows:
        raise InputError(
            f"no public case with a plan of the kind {' or '.join(families)} in"
            f" {', '.join(str(file) for file in files) or 'no file at all'}",
            fix="run `snakemake published`",
        )
    return rows
