"""Numbers and facts as a reader of the report sees them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trioflow.base.units import format_bytes, format_count, format_time

SHARES = ("_error", "_overhead", "_fraction", "_share", "drift", "overhead", "overlap", "share")
_MINUS = "\u2212"
NOTHING = "\u2013"


def write_time(time_s: float) -> str:
    """Write a time [s] with three significant digits."""
    return format_time(time_s).replace(" us", " \u00b5s")


def write_percent(share: float | None, digits: int = 1) -> str:
    """Write a share as a percentage; a missing one as a dash."""
    if share is None or math.isnan(share):
        return NOTHING
    return f"{100 * share:.{digits}f} %"


def write_signed_percent(share: float | None, digits: int = 1) -> str:
    """Write a share as a percentage with its sign, a true minus and no negative zero."""
    if share is None or math.isnan(share):
        return NOTHING
    return f"{write_signed(100 * share, digits)} %"


def write_signed(value: float, digits: int = 1) -> str:
    """Write a number with its sign, a true minus and no negative zero."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", _MINUS) if float(text) else f"{0:.{digits}f}"


def write_range(low_s: float, high_s: float) -> str:
    """Write a range of times [s]."""
    low, high = write_time(low_s), write_time(high_s)
    unit = high.rpartition(" ")[2]
    return (
        f"{low.removesuffix(' ' + unit)} to {high}"
        if low.endswith(" " + unit)
        else f"{low} to {high}"
    )


def join_words(words: Iterable[str]) -> str:
    """Join words as in a sentence: a, b and c."""
    parts = list(words)
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def count_words(count: int, word: str) -> str:
    """Write a count with its noun in the right number."""
    return f"{count} {word if count == 1 else word + 's'}"


def flatten_facts(facts: Mapping[str, Any], skip: Iterable[str] = ()) -> dict[str, str]:
    """Turn nested facts into dotted names to text, units read from the names; lists of numbers become their range."""
    lines: dict[str, str] = {}
    left_out = set(skip)
    for key, value in facts.items():
        if key in left_out:
            continue
        if isinstance(value, Mapping):
            lines.update({f"{key}.{name}": text for name, text in flatten_facts(value).items()})
        else:
            lines[key] = _write_fact(key, value)
    return lines


def write_label(name: str) -> str:
    """Turn the dotted name of a fact into words; its value carries the unit."""
    for unit in ("_bytes_per_s", "_bytes", "_ns", "_s", "_flop"):
        name = name.removesuffix(unit)
    return name.replace(".", ": ").replace("_", " ")


def _write_fact(name: str, value: Any) -> str:
    """Write one fact; its name gives the unit."""
    if value is None or value in ("", []):
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return _write_number(name, value)
    if not isinstance(value, (list, tuple)):
        return str(value)
    return _write_list(name, value)


def _write_list(name: str, value: Sequence[Any]) -> str:
    """Write a list: words one after the other, many numbers as their range."""
    if any(isinstance(item, bool) or not isinstance(item, (int, float)) for item in value):
        if len(value) > 1 and len({str(item) for item in value}) == 1:
            return f"{value[0]} ({len(value)} times)"
        return ", ".join(str(item) for item in value)
    if len(value) <= 4:
        return ", ".join(_write_number(name, item) for item in value)
    ends = _write_number(name, min(value)), _write_number(name, max(value))
    return f"{ends[0]} to {ends[1]} ({len(value)} values)"


_WRITERS: tuple[tuple[tuple[str, ...], Callable[[float], str]], ...] = (
    (("bytes_per_s",), lambda value: f"{format_bytes(value)}/s"),
    (("_s",), write_time),
    (("_ns",), lambda value: f"{value:.0f} ns"),
    (("bytes",), format_bytes),
    (("flop",), lambda value: f"{format_count(value)}flop"),
    (SHARES, write_percent),
)
"""Endings of names, the first that fits deciding."""


def _write_number(name: str, value: float) -> str:
    """Write a number in the unit that its name says."""
    if not math.isfinite(value):
        return str(value)
    for endings, write in _WRITERS:
        if name.endswith(endings):
            return write(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _write_line(cells: Iterable[Any]) -> str:
    """Return one line of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def write_markdown(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], left: Sequence[int] = (0,)
) -> str:
    """Return a Markdown table; columns that are not ``left`` are set flush right."""
    rules = ["---" if at in left else "---:" for at in range(len(headings))]
    return "\n".join(_write_line(cells) for cells in (headings, rules, *rows))
