"""Arguments of the command, and errors turned into one sentence and exit status 2."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO, cast

from trioflow import __version__
from trioflow.cli import answer, capture, inspect
from trioflow.cli.arguments import (
    add_collectives_argument,
    add_model_arguments,
    add_plan_arguments,
    add_run_arguments,
)
from trioflow.cli.collectives import add_collective, add_import_collectives
from trioflow.cli.datasets import add_retrieve
from trioflow.cli.export import add_export
from trioflow.cli.imports import add_import
from trioflow.cli.network import add_algorithm_arguments, add_network_arguments
from trioflow.cli.pack import add_pack
from trioflow.cli.search import add_search
from trioflow.cli.text import PlainStream, escape_text
from trioflow.costmodel.methods import AUTO, METHOD_NAMES
from trioflow.errors import TrioflowError
from trioflow.experiments import OPTIMIZERS, PRECISIONS
from trioflow.prediction.breakdown import DEPTH, WAYS

TRACEBACK = "TRIOFLOW_TRACEBACK"
"""Variable of the environment that shows where an unforeseen error came from."""
EXAMPLE = """example, with a trace that ships with trioflow:
  trioflow show gpt2-tiny-b8
  trioflow simulate gpt2-tiny-b8 --plan ddp --ranks 2 --platform cpu2-gloo
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="trioflow",
        description="Predict a training step on many devices from an operator trace of one.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trioflow {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_simulate(commands)
    add_collective(commands)
    _add_show(commands)
    _add_fit(commands)
    _add_capture(commands)
    add_import(commands)
    add_export(commands)
    add_retrieve(commands)
    add_import_collectives(commands)
    add_pack(commands)
    add_search(commands)
    return parser


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object for programs")


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "simulate", help="predict the training step of a plan on a platform"
    )
    parser.set_defaults(run=answer.run_simulate)
    add_plan_arguments(parser)
    add_collectives_argument(parser)
    add_run_arguments(parser)
    parser.add_argument(
        "--timeline", metavar="OUT", help="write the timeline: .parquet, or .json[.gz] for Perfetto"
    )
    add_network_arguments(parser)
    add_algorithm_arguments(parser, ", for all or as all_reduce=ring,all_gather=direct")
    parser.add_argument(
        "--no-fold", action="store_true",
        help="simulate every rank, also where ranks do the same and simulating them once is exact",
    )  # fmt: skip
    parser.add_argument("--by", choices=WAYS, help="break the step down as well")
    parser.add_argument(
        "--depth", type=int, default=DEPTH, metavar="N",
        help=f"parts of a module's path that --by module tells apart (default: {DEPTH})",
    )  # fmt: skip
    parser.add_argument("--breakdown", metavar="OUT", help="write that breakdown: .parquet")
    _json(parser)


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("show", help="what a trace holds: operators by phase and class")
    parser.set_defaults(run=inspect.run_show)
    parser.add_argument(
        "trace", metavar="TRACE",
        help="folder or pack of a trace, a shipped one's name, or a language model by name or configuration",
    )  # fmt: skip
    add_model_arguments(parser)
    parser.add_argument("--batch", type=int, metavar="N", help="samples of such a model's step")
    parser.add_argument(
        "--operators", action="store_true",
        help="print every distinct operator with its time as CSV, the format of simulate's --override",
    )  # fmt: skip
    _json(parser)


def _add_fit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("fit", help="fit an operator cost model to traces")
    parser.set_defaults(run=inspect.run_fit)
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE", help="folders of traces of one device"
    )
    parser.add_argument(
        "--method", default=AUTO, metavar="NAME",
        help=f"{', '.join(METHOD_NAMES)}, or one that a package registers (default: {AUTO})",
    )  # fmt: skip
    parser.add_argument("-o", "--output", required=True, metavar="MODEL", help="JSON file to write")
    _json(parser)


def _add_capture(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "capture", help="capture one training step on this device (needs torch)"
    )
    parser.set_defaults(run=capture.run_capture)
    parser.add_argument(
        "workload", metavar="WORKLOAD",
        help="by name, such as resnet50 or gpt2, or a function of yours, module:function",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, required=True, metavar="N", help="samples of the step")
    parser.add_argument(
        "--workloads",
        metavar="FILE",
        help="table of workloads (default: config/workloads.tsv, then those that ship)",
    )
    parser.add_argument(
        "--sequence", type=int, metavar="N", help="tokens of a sample, instead of the workload's"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N",
        help="depth of the model: two blocks are captured, the last one is repeated",
    )  # fmt: skip
    parser.add_argument("--precision", choices=PRECISIONS, help="instead of the workload's")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, metavar="O",
        help=f"instead of the workload's: {', '.join(OPTIMIZERS)}",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=["cpu", "cuda", "meta", "auto"], default="auto",
        help="default: a GPU where present; meta: the operators that --target runs, without their times, for "
        "models that fit no device",
    )  # fmt: skip
    parser.add_argument(
        "--target", choices=["cuda", "cpu"],
        help="with --device meta: whose operators (default: cuda, any GPU's of NVIDIA)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="folder of the trace to write"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 for bad input.

    Control characters in names of files and of what they hold never reach the terminal.
    """
    with (
        redirect_stdout(cast("TextIO", PlainStream(sys.stdout))),
        redirect_stderr(cast("TextIO", PlainStream(sys.stderr))),
    ):
        return _run(build_parser().parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    """Run a command; errors become one sentence."""
    try:
        options.run(options)
        sys.stdout.flush()
    except TrioflowError as error:
        return _refuse(str(error))
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk, a folder that cannot be written
        return _refuse(f"{error.filename or 'output'}: {error.strerror}")
    except MemoryError:
        return _refuse("the memory does not suffice; ask for less, or use a machine with more")
    except Exception as error:
        files = list_own_files(options)
        if not files or os.environ.get(TRACEBACK):
            raise
        return _refuse(
            f"{' or '.join(files)}: something in it is not what it should be"
            f" ({type(error).__name__}: {error}); compare it with docs/, or set {TRACEBACK}=1 and report what is shown"
        )
    return 0


def _refuse(problem: str) -> int:
    print(f"trioflow: {escape_text(problem)}", file=sys.stderr)
    return 2


def list_own_files(options: argparse.Namespace) -> list[str]:
    """Return the files and folders of the user's among a command's arguments, in their order."""
    found = []
    for value in vars(options).values():
        for word in value if isinstance(value, list | tuple) else [value]:
            if isinstance(word, str) and "\0" not in word and Path(word).exists():
                found.append(word)
    return found
