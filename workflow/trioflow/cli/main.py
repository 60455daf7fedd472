"""Arguments of the command, and errors turned into one sentence and exit status 2."""

import argparse
import atexit
import gc
import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

from trioflow import __version__
from trioflow.base.errors import TrioflowError, suggest
from trioflow.cli.output import PlainStream, WaitSign, add_subcommand, escape_text

TRACEBACK = "TRIOFLOW_TRACEBACK"
"""Variable of the environment that shows where an unforeseen error came from."""
EXAMPLE = """example, with a trace that ships with trioflow:
  trioflow show gpt2-tiny-b8
  trioflow simulate gpt2-tiny-b8 --plan ddp --ranks 2 --platform cpu2-gloo
"""


COMMANDS = {
    "plan": (
        "the best plans of a model on some GPUs: step, MFU, memory, days and cost on one screen",
        "trioflow.cli.search.add_plan",
    ),
    "simulate": ("predict the training step of a plan on a platform", "trioflow.cli.answer.add_simulate"),
    "memory": (
        "what fills a rank's memory, how likely it fits, and what would make it fit",
        "trioflow.cli.answer.add_memory",
    ),
    "collective": ("predict one collective", "trioflow.cli.collectives.add_collective"),
    "show": ("what a trace holds: operators by phase and class", "trioflow.cli.answer.add_show"),
    "fit": ("fit an operator cost model to traces", "trioflow.cli.fit.add_fit"),
    "capture": ("capture one training step on this device (needs torch)", "trioflow.cli.traces.add_capture"),
    "import": ("make a trace from a profile or another tool's file", "trioflow.cli.traces.add_import"),
    "export": ("write another tool's format", "trioflow.cli.export.add_export"),
    "retrieve": (
        "retrieve public measured data, from a mirror or its pinned address",
        "trioflow.cli.traces.add_retrieve",
    ),
    "fit-collectives": ("fit a platform's collectives to logs of nccl-tests", "trioflow.cli.fit.add_fit_collectives"),
    "pack": ("put a trace into one file, to use it wherever a TRACE is asked for", "trioflow.cli.traces.add_pack"),
    "search": ("rank the plans of a model on a number of ranks of a platform", "trioflow.cli.search.add_search"),
    "scaling": ("throughput and MFU of a plan against the number of GPUs", "trioflow.cli.scaling.add_scaling"),
    "ui": (
        "a local web page: choose a model and GPUs, move sliders, see the charts change",
        "trioflow.cli.installation.add_ui",
    ),
    "explain": (
        "explain why a measured run differs from its prediction, and write the corrected platform",
        "trioflow.cli.explain.add_explain",
    ),
    "judge": (
        "compare your own measured steps with what simulate predicts (the first table of explain)",
        "trioflow.cli.explain.add_judge",
    ),
    "models": ("models known by name: sizes, sources and what is measured", "trioflow.cli.installation.add_models"),
    "platforms": (
        "platforms known by name: GPUs, sources and what is measured",
        "trioflow.cli.installation.add_platforms",
    ),
    "completion": ("Tab completion for bash and zsh", "trioflow.cli.installation.add_completion"),
    "doctor": ("versions, machine and caches, for a bug report", "trioflow.cli.installation.add_doctor"),
}
"""What each subcommand does and what fills its parser, in the order of the help."""


EXAMPLES = {
    "plan": (
        "trioflow plan llama-3.1-70b --gpus 256xH100 --tokens 1e12 --price 2.5",
        "trioflow plan config.json --gpus 64xH200",
    ),
    "simulate": (
        "trioflow simulate llama-3.1-8b --platform dgx-h100 --plan fsdp --ranks 64 --batch 512",
        "trioflow simulate llama-3.1-70b --platform dgx-h100 --ranks 256 --batch 512 --tensor-parallel 8 \\",
        "    --pipeline-parallel 4 --schedule 1f1b --micro-batches 64 --tokens 1e12 --price-per-gpu-hour 2.5",
        "trioflow simulate gpt2-tiny-b8 --platform cpu2-gloo --plan ddp --ranks 2 --by module",
    ),
    "memory": ("trioflow memory llama-3.1-8b --platform dgx-h100 --plan fsdp --ranks 8 --batch 16",),
    "search": ("trioflow search llama-3.1-8b --ranks 64 --platform dgx-h100 --batch 512 --top 5",),
    "capture": (
        "trioflow capture resnet50 --batch 64 -o trace",
        "trioflow capture my_models:make_model --batch 8 --input 3x224x224 -o trace",
    ),
    "collective": ("trioflow collective all_reduce --bytes 1e9 --ranks 16 --platform dgx-h100",),
    "show": ("trioflow show gpt2-tiny-b8",),
}
"""What is shown at the head of a command's help."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are not preceded by all of a command's options, but say what was perhaps meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what no option takes, where the command's own options are known."""
        options, rest = super().parse_known_args(args, namespace)
        if rest and not self._subparsers:
            word, gpus, flags = (
                rest[0].partition("=")[0],
                str(getattr(options, "gpus", "")),
                self._option_string_actions,
            )
            initials = {"".join(part[:1] for part in flag[2:].split("-")): flag for flag in reversed(flags)}
            near = suggest(initials.get(word.strip("-"), word), flags)
            hint = near if word.startswith("-") else f"write --gpus {gpus}x{word}" * gpus.isdigit()
            self.error(f"unrecognized arguments: {' '.join(rest)}; {hint}".rstrip("; "))
        return options, rest

    def error(self, message: str) -> NoReturn:
        """Leave with one sentence, and where all options stand."""
        if file := re.match(r"argument --output: invalid choice: '(.*\.(json|csv|parquet))'", message):
            message = f"--output {file[1]}: it takes a form, not a file; write --output {file[2]} > {file[1]}"
        self.exit(
            2, f"{self.prog}: error: {message}\n{self.prog} --help{' all' * (not self._subparsers)} lists all options\n"
        )


def build_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command, only the subcommands among ``words`` filled; None: all are.

    A subcommand imports what it needs to be filled; the version and the list of them need none.
    """
    parser = _Parser(
        prog="trioflow",
        description="Predict a training step on many devices from an operator trace of one.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trioflow {__version__}")
    parser.set_defaults(build_parser=build_parser)  # the completion of shells reads all of them
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, home) in COMMANDS.items():
        subparser = add_subcommand(commands, name, summary, EXAMPLES.get(name, ()))
        if words is None or name in words:
            module, _, function = home.rpartition(".")
            getattr(import_module(module), function)(subparser)
    return parser


def run() -> NoReturn:
    """Run the command as a program, and leave at once: taking a million objects apart one by one is no use to anyone.

    Cycles are looked for seldom, as nearly all that a command makes stays until its end.
    """
    gc.set_threshold(500_000, 50, 50)
    spare_threads(sys.argv[1:], os.environ)
    status = main()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):  # nobody reads it, or it was closed from the start
            stream.flush()
    os._exit(status)


def spare_threads(words: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Ask numpy's matrix library for one thread, not one a core (none is of use); not for ``capture``, whose step may need them."""
    if words[:1] != ["capture"]:
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 for bad input.

    Control characters in names of files and of what they hold never reach the terminal.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    # Bare: the sign goes back to the start of its line.
    sign = WaitSign(sys.__stderr__, " ".join(words[:1]))
    with (
        redirect_stdout(cast("TextIO", PlainStream(sys.stdout, sign.stop))),
        redirect_stderr(cast("TextIO", PlainStream(sys.stderr, sign.stop))),
        sign,
    ):
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            return _refuse(
                f"no command is called {words[0]!r}; {suggest(words[0], COMMANDS)}known are {', '.join(COMMANDS)}"
            )
        return _run(build_parser(words).parse_args(words, argparse.Namespace(sign=sign, words=words)))


def _run(options: argparse.Namespace) -> int:
    """Run a command; errors become one sentence."""
    try:
        options.run(options)
        sys.stdout.flush()
    except TrioflowError as error:
        return _refuse(error.of_command or str(error))
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk, a folder that cannot be written
        return _refuse(f"{error.filename or 'output'}: {error.strerror}")
    except MemoryError:
        return _refuse("the memory does not suffice; ask for less, or use a machine with more")
    except Exception as error:
        files = _list_own_files(options)
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


def _list_own_files(options: argparse.Namespace) -> list[str]:
    """Return the files and folders of the user's among a command's arguments, in their order."""
    values = [value for name, value in vars(options).items() if name != "words"]
    words = [word for value in values for word in (value if isinstance(value, list | tuple) else [value])]
    return [word for word in words if isinstance(word, str) and "\0" not in word and Path(word).exists()]
