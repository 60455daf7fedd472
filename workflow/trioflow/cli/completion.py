"""``trioflow completion``: what a shell offers when Tab is pressed, generated from the parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from typing import Any, cast

from trioflow.base.precision_recipes import RECIPE_NAMES
from trioflow.hardware.platform import list_platforms
from trioflow.parallel.plan import NAMED
from trioflow.trace.store import shipped_traces

SHELLS = ("bash", "zsh")
_ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
_HEAD = """\
_trioflow() {
  local current="${COMP_WORDS[COMP_CWORD]}" last="${COMP_WORDS[COMP_CWORD-1]}" words=""
  case "${COMP_WORDS[1]} $last" in
"""
_MIDDLE = """\
    *)
      case "${COMP_WORDS[1]}" in
"""
_TAIL = """\
      esac
      if [ "$COMP_CWORD" = 1 ]; then words=%s; fi ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _trioflow trioflow
"""


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``completion``."""
    parser.set_defaults(run=_run_completion)
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "example, a line of ~/.bashrc or ~/.zshrc:\n  source <(trioflow completion bash)\n"
    )


def _run_completion(options: argparse.Namespace) -> None:
    script = write_completion(options.build_parser())
    print((_ZSH if options.shell == "zsh" else "") + script, end="")


def write_completion(parser: argparse.ArgumentParser) -> str:
    """Return the script of bash, which zsh runs too: options, their values, shipped names, else files.

    ``parser``: the whole command's, every subcommand filled.
    """
    root = next(action for action in parser._actions if action.dest == "command")
    commands: dict[str, argparse.ArgumentParser] = dict(cast("Any", root.choices))
    lines = [_HEAD]
    for name, each in commands.items():
        for flags, values in _list_values(each):
            pattern = "|".join(f'"{name} {flag}"' for flag in flags)
            lines.append(f"    {pattern}) words={shlex.quote(' '.join(values))} ;;\n")
    lines.append(_MIDDLE)
    for name, each in commands.items():
        words = [flag for action in each._actions for flag in action.option_strings]
        for action in each._actions:
            if not action.option_strings:
                words += (
                    shipped_traces()
                    if action.metavar == "TRACE"
                    else map(str, action.choices or ())
                )
        lines.append(f"        {name}) words={shlex.quote(' '.join(words))} ;;\n")
    return "".join([*lines, _TAIL % shlex.quote(" ".join(commands))])


def _list_values(parser: argparse.ArgumentParser) -> Iterator[tuple[list[str], list[str]]]:
    """Yield an option's spellings and the values that it takes, where they can be listed."""
    known = {"platform": list_platforms(), "plan": sorted(NAMED), "precision": list(RECIPE_NAMES)}
    for action in parser._actions:
        values = list(map(str, action.choices or ())) or known.get(action.dest, [])
        if action.option_strings and values:
            yield list(action.option_strings), values
