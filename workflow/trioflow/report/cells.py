"""Cells of the tables of the page of cost models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from trioflow.report.html import Cell
from trioflow.report.wording import NOTHING, write_percent, write_signed_percent, write_time


def _cell(value: Any, write: Callable[[float], str], detail: str = "") -> Cell:
    """Return a number's cell; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return Cell(NOTHING, "")
    return Cell(write(float(value)), float(value), detail)


def percent_cell(value: Any, detail: str = "") -> Cell:
    """Return a share's cell, as a percentage."""
    return _cell(value, write_percent, detail)


def oracle_cell(value: Any, detail: str) -> Cell:
    """Return the cell of an oracle's error; a dash where the oracle is what was measured."""
    return percent_cell(value or None, detail)


def signed_cell(value: Any) -> Cell:
    """Return a share's cell, as a percentage with its sign."""
    return _cell(value, write_signed_percent)


def number_cell(value: Any) -> Cell:
    """Return the cell of a plain number."""
    return _cell(value, lambda number: f"{number:.3f}")


def ratio_cell(value: Any) -> Cell:
    """Return the cell of a factor."""
    return _cell(value, lambda number: f"{number:.2f} times")


def time_cell(value: Any) -> Cell:
    """Return the cell of a time [s]."""
    return _cell(value, write_time)


def bandwidth_cell(value: Any) -> Cell:
    """Return the cell of a bandwidth [bytes/s], in GB/s."""
    return _cell(value, lambda rate: f"{rate / 1e9:.3g}")


def part_cell(part: str) -> Cell:
    """Return the cell of a place of measurement: the device, below it the dataset."""
    device, _, dataset = part.partition("; ")
    return Cell(device, part, dataset)


def count_cell(value: Any) -> Cell:
    """Return the cell of a count."""
    return Cell(str(int(value)), float(value))
