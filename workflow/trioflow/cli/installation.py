"""``trioflow doctor``, what a report of a problem needs to say of an installation; ``completion``, what its shell offers."""

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, cast

import pandas as pd

from trioflow import __version__
from trioflow.base.arguments import check_names
from trioflow.base.errors import how_to_install
from trioflow.base.machine_memory import find_available_bytes
from trioflow.base.plan_row import SCHEDULE_GROUP, SCHEDULES
from trioflow.base.plugins import list_plugins
from trioflow.base.precision_recipes import RECIPE_NAMES
from trioflow.base.provenance import host_environment
from trioflow.base.units import format_bytes, format_count
from trioflow.cli.output import add_command, format_facts, format_table, list_forms, write_output
from trioflow.hardware.platform import list_platforms
from trioflow.parallel.plan import NAMED, PLAN_GROUP
from trioflow.prediction.known import models, platforms
from trioflow.tables import records


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``models``."""
    _add_known(
        parser,
        models,
        "model",
        ("name", "use", "parameters", "layers", "hidden", "heads", "kv_heads", "vocabulary", "experts", "measured"),
    )


def add_platforms(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``platforms``."""
    columns = (
        "name",
        "device",
        "ranks",
        "ranks_per_node",
        "memory_bytes",
        "bf16_flop_per_s",
        "operators",
        "collectives",
    )
    _add_known(parser, platforms, "platform", columns)


def _add_known(
    parser: argparse.ArgumentParser, list_rows: Callable[[], pd.DataFrame], what: str, columns: Sequence[str]
) -> None:
    """Add a subcommand that lists what is known by name, or with one name all that is known of it."""

    def run(options: argparse.Namespace) -> None:
        frame = list_rows()
        if options.name is not None:
            check_names([options.name], frame["name"].tolist(), what)
            frame = frame[frame["name"] == options.name]
        rows = records(frame)
        if write_output(options.form, {f"{what}s": rows}, rows):
            return
        if options.name is not None:
            sources = rows[0].pop("sources", {})
            print(format_facts((name, _spell_fact(name, value)) for name, value in (rows[0] | sources).items()))
            return
        head = [name.removesuffix("_bytes").removesuffix("_flop_per_s").replace("_", " ") for name in columns]
        cells = [[_spell_fact(name, row[name]) or "-" for name in columns] for row in rows]
        print(format_table(head, cells, left=2, drop_empty=True))
        print(f"\nsources and all else: trioflow {what}s NAME, or --json")

    of_one = ("name", "NAME", "one of them: all that is known of it, with its sources", {"nargs": "?"})
    add_command(parser, run, {"": [of_one]}, list_forms(f"the {what}s"))


def _spell_fact(name: str, value: Any) -> str:
    """Return a fact in words: numbers by their unit, which the name ends with."""
    if isinstance(value, str | list):
        return value if isinstance(value, str) else ", ".join(value)
    if value is None or value == 0:
        return "any" if name == "ranks" else ""
    if name == "parameters":
        return f"{value / 1e9:.3g} B"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_count(value) if name.endswith("_per_s") else str(value)


MIRROR = "TRIOFLOW_DATA_MIRROR"


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's parser."""
    add_command(parser, _run_doctor, list_forms("the facts as one row"))


def _run_doctor(options: argparse.Namespace) -> None:
    from trioflow.trace.language.make import cache_folder

    free = find_available_bytes()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = f"{os.cpu_count()} cores, {allowed} of them for this process"
    facts = {
        "trioflow": f"{__version__}, {Path(__file__).parents[1]}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "system": platform.platform(),
        "processor": f"{host_environment()['cpu_model']}, {cores}",
        "memory": ("unknown" if free is None else f"{format_bytes(free)} free for this process"),
        "GPU": _describe_gpus(),
        "packages": _list_packages(),
        "models": _try_models(),
        "public data": _describe_mirror(),
        "kept kernels": _describe_kernels(),
        "kept traces": _weigh(cache_folder()),
    }
    if write_output(options.form, facts, [facts]):
        return
    width = max(map(len, facts)) + 2
    print("\n".join(f"{name:{width}}{fact}" for name, fact in facts.items()))


def _describe_gpus() -> str:
    """Ask the driver's tool, so that PyTorch need not be there nor be loaded."""
    question = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        run = subprocess.run(question, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none that nvidia-smi shows; capturing and measuring take the processor"
    return "; ".join(run.stdout.split("\n")[:-1])


def _list_packages() -> str:
    """Return every package that trioflow's own metadata requires, with the version that is here."""
    try:
        lines = metadata.requires("trioflow") or []
    except metadata.PackageNotFoundError:
        return "trioflow is not installed here, only imported"
    tools = {"test", "slurm", "kubernetes", "cluster"}
    packages = []
    for line in lines:
        extra = re.search(r"extra == ['\"](\w+)", line)
        if (extra and extra[1] in tools) or line.startswith("trioflow["):
            continue
        name = re.split(r"[^\w-]", line)[0]
        try:
            packages.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            packages.append(f"{name} missing" + (f" ({how_to_install(extra[1])})" if extra else ""))
    return ", ".join(packages)


def _try_models() -> str:
    """Import what models of torchvision and transformers import, as a capture does."""
    try:
        workloads = import_module("trioflow.trace.workloads.recipe")
        workloads.import_torchvision_models()
        import_module("transformers.modeling_utils")
    except Exception as error:
        return f"cannot be captured ({type(error).__name__}: {error}); {how_to_install('capture')}"
    missing = workloads.define_missing_operators() is not None
    detection = ", but those that detect objects: torchvision's compiled operators do not load"
    return f"torchvision's and transformers' can be captured{detection * missing}"


def _describe_mirror() -> str:
    folder = os.environ.get(MIRROR)
    if not folder:
        return f"from its addresses; {MIRROR} names a folder to look in first"
    return f"{MIRROR}={folder}" + ("" if Path(folder).is_dir() else ": no such folder")


def _describe_kernels() -> str:
    from trioflow.engine.compiled.run import find_cache_folder, has_numba

    if not has_numba():
        return f"none: numba is not installed, so large simulations run uncompiled; {how_to_install('fast')}"
    folder = find_cache_folder()
    if folder is None:
        return "nowhere: there is no home folder; each process compiles its own"
    return _weigh(folder)


def _weigh(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    size = format_bytes(sum(path.stat().st_size for path in files))
    return f"{folder}, {len(files)} files, {size}" if files else f"{folder}, empty"


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
    example = "example, a line of ~/.bashrc or ~/.zshrc:\n  source <(trioflow completion bash)\n"
    shells = ("shell", SHELLS, "whose script to print")
    add_command(parser, _run_completion, {"": [shells]}, epilog=example)


def _run_completion(options: argparse.Namespace) -> None:
    script = write_completion(options.build_parser())
    print((_ZSH if options.shell == "zsh" else "") + script, end="")


def write_completion(parser: argparse.ArgumentParser) -> str:
    """Return the script of bash, which zsh runs too: options, their values, shipped names, else files.

    ``parser``: the whole command's, every subcommand filled.
    """
    names = models().groupby(models()["use"] == "capture")["name"].agg(list)
    by_name = {
        "TRACE": names[False],
        "MODEL": names[False],
        "WORKLOAD": names[True],
        "platforms": list_platforms(),
        "models": names.sum(),
    }
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
                choices = map(str, action.choices or ())
                words += by_name.get(str(action.metavar), by_name.get(name, choices))
        lines.append(f"        {name}) words={shlex.quote(' '.join(words))} ;;\n")
    return "".join([*lines, _TAIL % shlex.quote(" ".join(commands))])


def _list_values(parser: argparse.ArgumentParser) -> Iterator[tuple[list[str], list[str]]]:
    """Yield an option's spellings and the values that it takes, where they can be listed."""
    known = {
        "platform": list_platforms(),
        "plan": list_plugins(SCHEDULE_GROUP, list_plugins(PLAN_GROUP, NAMED)),
        "schedule": list_plugins(SCHEDULE_GROUP, SCHEDULES),
        "precision": list(RECIPE_NAMES),
    }
    for action in parser._actions:
        values = list(map(str, action.choices or ())) or known.get(action.dest, [])
        if action.option_strings and values:
            yield list(action.option_strings), values


def add_ui(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``ui``."""
    folder = "folder whose traces and platforms the page offers as well; no other files are read"
    rows = (
        ("--port", (int, "N"), "port on 127.0.0.1 (default: a free one)", {"default": 0}),
        ("--folder", (Path, "DIR"), folder),
        ("--no-browser", True, "only print the address"),
    )
    add_command(parser, _run_ui, {"": rows})


def _run_ui(options: argparse.Namespace) -> None:
    """Serve the page; only this imports what it needs, which may be missing."""
    from trioflow.cli.answer import add_run, predict_options
    from trioflow.ui.page import Command, run

    run(options, Command(options.build_parser(["simulate"]), predict_options, add_run))
