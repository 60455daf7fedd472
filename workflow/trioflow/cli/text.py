"""Plain text tables and lines for people; options of the command from rows."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
"""What moves a terminal's cursor, colours it or turns its text round; line ends and tabs do not."""


def escape_text(text: str) -> str:
    """Return text of a file in one line: what a terminal would obey is spelled out."""
    return escape_control(text).replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")


def escape_control(text: str) -> str:
    """Return text with control characters spelled out, its lines and tabs kept."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class PlainStream:
    """A text stream on which control characters are spelled out, whoever writes them."""

    def __init__(self, stream: TextIO, before: Callable[[], None] = lambda: None) -> None:
        """``before`` is called ahead of everything written."""
        self._stream, self._before = stream, before

    def write(self, text: str) -> int:
        """Write text, its control characters spelled out."""
        self._before()
        return self._stream.write(escape_control(text))

    def __getattr__(self, name: str) -> Any:
        """Do all else as the stream does."""
        return getattr(self._stream, name)


def format_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, *, drop_empty: bool = False
) -> str:
    """Return rows as columns, the first ``left`` aligned left; ``drop_empty`` leaves out those with nothing but dashes."""
    lines_of = [list(row) for row in rows]
    kept = [
        i for i in range(len(head))
        if not (drop_empty and lines_of and all(row[i] == "-" for row in lines_of))
    ]  # fmt: skip
    left = sum(i < left for i in kept)
    cells = [[escape_text(row[i]) for i in kept] for row in (head, *lines_of)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(kept))]
    lines = []
    for row in cells:
        parts = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_facts(facts: Iterable[tuple[str, str]]) -> str:
    """Return names and values, one pair a line, the values aligned."""
    pairs = [(escape_text(name), escape_text(value)) for name, value in facts if value]
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs)


def add_options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, rows: Iterable[tuple[Any, ...]]
) -> None:
    """Add arguments from rows: name, what follows it, help and, where needed, more of ``add_argument``.

    What follows is a text's metavar, a type with its metavar, the choices, or True for nothing.
    """
    for name, kind, text, *more in rows:
        known = (
            {"action": "store_true"} if kind is True
            else {"metavar": kind} if isinstance(kind, str)
            else {"type": kind[0], "metavar": kind[1]} if isinstance(kind[0], type)
            else {"choices": kind}
        )  # fmt: skip
        parser.add_argument(name, help=text, **known, **(more[0] if more else {}))
