"""What a command prints: tables and lines, grouped warnings, a sign that it is at work, and forms for other programs.

Options of the command come from rows of a table (`add_options`).
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from trioflow.base.errors import InputError, group_warnings

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
"""What moves a terminal's cursor, colours it or turns its text round; line ends and tabs do not."""


def escape_text(text: str) -> str:
    """Return text of a file in one line: what a terminal would obey is spelled out."""
    return escape_control(text).replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")


def escape_control(text: str) -> str:
    """Return text with control characters spelled out, its lines and tabs kept."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


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


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, *, drop_empty: bool = False) -> str:
    """Return rows as columns, the first ``left`` aligned left; ``drop_empty`` leaves out those with nothing but dashes."""
    lines_of = [list(row) for row in rows]
    kept = [i for i in range(len(head)) if not (drop_empty and lines_of and all(row[i] == "-" for row in lines_of))]
    left = sum(i < left for i in kept)
    cells = [[escape_text(row[i]) for i in kept] for row in (head, *lines_of)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(kept))]
    aligned = [
        [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in (cells[0], ["-" * width for width in widths], *cells[1:])
    ]
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def format_facts(facts: Iterable[tuple[str, str]]) -> str:
    """Return names and values, one pair a line, the values aligned."""
    pairs = [(escape_text(name), escape_text(value)) for name, value in facts if value]
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs)


Options = Mapping[str, Iterable[tuple[Any, ...]]]
"""Arguments of a command by the title of their group (empty: no group). A row is: names, value, help and, where needed,
further keywords of ``add_argument``. The value is a metavar for text, a type (or reader) and its metavar, the choices, True for a
flag without a value, or None where the keywords say it. ``rare`` among the keywords: only ``--help all`` shows it.
``list_flags`` makes rows of declared fields.
"""
_TYPES = {"int": int, "float": float}
_POWERS = {"k": "e3", "M": "e6", "B": "e9", "T": "e12"}
"""What a prefix behind a count stands for."""


def list_flags(record: Any, *names: str) -> list[tuple[Any, ...]]:
    """Return the flags of a dataclass's fields, as rows, from what ``arguments.declare`` says of them."""
    rows: list[tuple[Any, ...]] = []
    for name in names:
        one = record.__dataclass_fields__[name]
        flag, kinds = one.metadata["flag"], str(getattr(one.type, "__name__", one.type)).removesuffix(" | None")
        kind = "str" if " | " in kinds else kinds  # a rate, or a word for it, is read where it is used
        more: dict[str, Any] = {"dest": name, "default": None, "rare": not flag.usual}
        text, stop, rest = one.metadata["description"].partition(". ")
        if kind == "bool":
            more |= {"action": "store_const", "const": not one.default}
        else:
            more |= {"type": _TYPES.get(kind, str), "choices": one.metadata.get("enum"), "metavar": flag.value or None}
            text += f" (default: {one.default})" if one.default not in (MISSING, None, "none", 0, 1, ()) else ""
        rows.append((flag.name or f"--{name.replace('_', '-')}", None, text + stop + rest, more))
    return rows


def add_options(parser: argparse.ArgumentParser, *groups: Options) -> None:
    """Add arguments in their groups; those of one title stand together."""
    known = {group.title: group for group in parser._action_groups}
    for title, rows in (pair for group in groups for pair in group.items()):
        if title and title not in known:
            known[title] = parser.add_argument_group(title)
        for name, kind, text, *more in rows:
            words = (
                {}
                if kind is None
                else {"action": "store_true"}
                if kind is True
                else {"metavar": kind}
                if isinstance(kind, str)
                else {"type": kind[0], "metavar": kind[1]}
                if callable(kind[0])
                else {"choices": kind}
            )
            words |= more[0] if more else {}
            rare = words.pop("rare", False)
            action = (known[title] if title else parser).add_argument(*name.split(), help=text, **words)
            action.rare = rare  # type: ignore[attr-defined]


def number(text: str) -> float:
    """Return the number in 1e12, 250k, 10M, 2.5B or 1T; ValueError where there is none (argparse names this function)."""
    return float(re.sub("[kMBT]$", lambda prefix: _POWERS[prefix[0]], text))


class HelpAction(argparse.Action):
    """``--help`` shows the usual arguments with the first sentence of each text, ``--help all`` all of everything."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Print the help, and leave."""
        if values != "all":
            for action in parser._actions:
                text = str(action.help or "").partition(". ")[0]
                action.help = argparse.SUPPRESS if getattr(action, "rare", False) else text
            if any(action.help == argparse.SUPPRESS for action in parser._actions):
                parser.epilog = f"{parser.epilog or ''}\n{parser.prog} --help all shows every option".strip()
        words = [action for action in parser._actions if not action.option_strings or action.required]
        shown = [
            " ".join([*action.option_strings[-1:], str(action.metavar or action.dest)])
            + " ..." * (action.nargs in ("*", "+"))
            for action in words
        ]
        parser.usage = " ".join([parser.prog, *shown, "[options]"])
        parser.print_help()
        parser.exit()


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of up to 100 columns, examples and notes with lines of their own."""

    def __init__(self, prog: str, **settings: Any) -> None:
        width = min(shutil.get_terminal_size().columns - 2, 100)
        super().__init__(prog, max_help_position=30, width=width, **settings)


def add_subcommand(commands: Any, name: str, summary: str, examples: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of a subcommand, whose help begins with its summary and examples."""
    text = f"{summary[0].upper()}{summary[1:]}." + "\n  ".join(["\n\nexamples:", *examples]) * bool(examples)
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=text, formatter_class=HelpFormatter, add_help=False
    )
    words = "show this, or with `all` every option"
    parser.add_argument("-h", "--help", action=HelpAction, nargs="?", metavar="all", help=words)
    return parser


def add_command(
    parser: argparse.ArgumentParser, run: Callable[[Any], None], *groups: Options, epilog: str = ""
) -> None:
    """Fill a subcommand's parser: what runs it, its arguments, and text with lines of its own behind them."""
    parser.set_defaults(run=run)
    parser.epilog = epilog or parser.epilog
    add_options(parser, *groups)


JSON: Options = {"answer": [("--json", True, "print one JSON object for programs")]}
HTML: Options = {"answer": [("--html", "OUT", "write the answer with its pictures as one file: .html (needs bokeh)")]}


def write_page(options: argparse.Namespace, draw: str = "", *answers: Any, **more: Any) -> None:
    """Write the page of ``--html`` where it is asked for; before anything is computed only check that it can be written.

    ``draw``: the function of ``report.charts`` that draws the answers, with what ``more`` it takes; none to check.
    Raises InputError where bokeh or the folder is missing.
    """
    check_output("--html", options.html, (".html",))
    if options.html:
        charts = import_module("trioflow.report.charts")
        if draw:
            command = shlex.join(["trioflow", *options.words])
            getattr(charts, draw)(*answers, command=command, **more).save(options.html)


FORMS = ("table", "json", "csv", "parquet")
QUIET_S, _BEAT_S = 2.0, 0.5
"""How long a command may be silent on a terminal, and how often its sign is drawn again [s]."""


def list_forms(rows: str, flag: str = "--output") -> Options:
    """Return the forms of output under a flag; ``rows``: what the rows of a table are."""
    text = f"how to print: table, json (all there is), or {rows} as csv or parquet (default: table)"
    json_form = {"dest": "form", "action": "store_const", "const": "json"}
    return {
        "answer": (
            (flag, FORMS, text, {"dest": "form", "default": "table", "metavar": "FORM"}),
            ("--json", None, f"the same as {flag} json", json_form),
        )
    }


def write_output(form: str, answer: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
    """Print an answer in a form for programs; False, and nothing, where text was asked for.

    ``rows``: the table of the other forms than JSON, nested values left out. Raises InputError when
    Parquet would go to a terminal.
    """
    if form == "json":
        print(json.dumps(answer, sort_keys=True))
        return True
    if form == "table":
        return False
    from trioflow.tables import flatten

    frame = flatten(rows)
    if form == "csv":
        print(frame.to_csv(index=False), end="")
        return True
    if sys.stdout.isatty():
        raise InputError("--output parquet on a terminal", fix="send it to a file: ... > rows.parquet")
    frame.to_parquet(sys.stdout.buffer, index=False)
    return True


def check_output(flag: str, path: str | None, endings: tuple[str, ...]) -> None:
    """Raise InputError where an output file has an unknown ending or its folder does not exist."""
    if path is not None and not path.endswith(endings):
        raise InputError(f"{flag} {path}: unknown ending", fix=f"use {' or '.join(endings)}")
    if path and not Path(path).parent.is_dir():
        raise InputError(f"{flag} {path}: no folder {Path(path).parent}", fix="create the folder first")


EXPLAIN: Options = {"answer": (("--explain", True, "print every warning, and all that lies behind the answer"),)}
_MOST_WARNINGS = 3
_OF_CONFIDENCE = "was not measured: its time is"
"""In warnings that repeat what the word of confidence says."""


def print_warnings(warnings: Sequence[str], *, everything: bool = True) -> None:
    """Print warnings on the error stream, those that say the same as one; not ``everything``: the first few alone.

    What the word of confidence says already is left out then.
    """
    grouped = group_warnings(warnings)
    shown = grouped if everything else [one for one in grouped if _OF_CONFIDENCE not in one][:_MOST_WARNINGS]
    for warning in shown:
        print(f"warning: {warning}", file=sys.stderr)
    if more := len(grouped) - len(shown):
        print(f"{more} more warning{'s' * (more > 1)}: --explain", file=sys.stderr)


class WaitSign:
    """Tells a terminal that a command is at work, once it was silent for two seconds; ``text``: how far it is."""

    def __init__(self, stream: TextIO | None, name: str) -> None:
        """``stream``: the error stream, bare, since the sign goes back to the start of its line."""
        self._stream = stream if stream is not None and stream.isatty() else None
        self._name, self._begin, self._done = name, time.monotonic(), threading.Event()
        self._width, self.text = 0, ""
        if self._stream:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        if self._done.wait(QUIET_S):
            return
        while True:
            self._draw(f"{self._name}: {time.monotonic() - self._begin:.0f} s{self.text}")
            if self._done.wait(_BEAT_S):
                return

    def _draw(self, text: str) -> None:
        if self._stream:
            self._width = max(self._width, len(text))
            self._stream.write(f"\r{text:<{self._width}}\r")
            self._stream.flush()

    def __enter__(self) -> WaitSign:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Wipe the sign off, for good; more than once is as once."""
        if self._stream and not self._done.is_set():
            self._done.set()
            self._thread.join()
            if self._width:
                self._draw("")
