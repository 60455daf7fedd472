"""A log file that catches everything a job prints, child processes included."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trioflow.base.errors import TrioflowError


@contextmanager
def log_job(path: str | Path) -> Iterator[None]:
    """Send standard output and error of a block to a (new) file, from this process and its children.

    A deliberate error ends the process with status 1 and is one sentence in the log and on the
    terminal; any other leaves its traceback in both.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    terminal = os.dup(2)
    kept = [(stream, os.dup(stream)) for stream in (1, 2)]
    try:
        with target.open("w") as log:
            _flush()
            for stream, _ in kept:
                os.dup2(log.fileno(), stream)
            yield
    except TrioflowError as error:
        _write_line(terminal, target, f"{type(error).__name__}: {error}\n")
        sys.exit(1)
    except Exception:
        _write_line(terminal, target, traceback.format_exc())
        sys.exit(1)
    finally:
        _flush()
        for stream, copy in kept:
            os.dup2(copy, stream)
            os.close(copy)
        os.close(terminal)


def _write_line(terminal: int, log: Path, text: str) -> None:
    """Write a message to the log and to the terminal."""
    _flush()
    with log.open("a") as stream:
        stream.write(text)
    os.write(terminal, text.encode())


def _flush() -> None:
    """Write out what Python still buffers, so that lines keep their order."""
    sys.stdout.flush()
    sys.stderr.flush()
