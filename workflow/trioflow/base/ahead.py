"""Questions answered in their order, later ones ahead of their turn in copies of this process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import current_process, get_context, parent_process
from typing import Any, Generic, TypeVar

_WORTH_S = 0.5
"""Starting copies of the process takes about a tenth of it [s]."""
_MOST_JOBS = 8
"""Processes at most by default: each may hold a GB."""
_IN_HAND = 2
"""Questions handed out per copy, so that no copy is idle while the caller waits for the next answer."""
Question = TypeVar("Question")
Answer = TypeVar("Answer")


def count_jobs() -> int:
    """Return how many processes are taken by default: the cores of this process, not above ``_MOST_JOBS``."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), _MOST_JOBS)
    return min(os.cpu_count() or 1, _MOST_JOBS)


class Ahead(Generic[Question, Answer]):
    """Answers questions in order, and later ones ahead of their turn in copies of this process.

    ``answer``: what answers one; it must depend on its question alone, and what it leaves behind be the same
        when it is asked twice.
    ``questions``: all of them; those that nobody takes are at most looked into.
    ``jobs``: copies of this process; with one it answers itself, as where processes cannot be copied.
    ``worth_s``: copies are made once answers have taken so long [s].

    What an answer raises is raised here, where it is taken. Use as a context manager: the copies end with it.
    """

    def __init__(
        self, answer: Callable[[Question], Answer], questions: Sequence[Question], jobs: int, worth_s: float = _WORTH_S
    ) -> None:
        self._answer, self._questions, self._worth_s = answer, questions, worth_s
        # A daemon may have no children.
        self._jobs = jobs if sys.platform == "linux" and not current_process().daemon else 1
        self._spent_s = 0.0
        self._pool: ProcessPoolExecutor | None = None
        self._answers: dict[int, Future[Answer]] = {}  # of questions that copies look into

    def __enter__(self) -> Ahead[Question, Answer]:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._pool:
            for process in list(self._pool._processes.values()):  # no other children of this process
                process.terminate()
            self._pool.shutdown(cancel_futures=True)

    def take(self, place: int) -> Answer:
        """Return the answer to a question; places must ascend."""
        if self._pool:
            self._hand_out(place)
            with suppress(Exception):  # where a copy failed or was ended, the question is answered here
                return self._answers.pop(place).result()
            return self._answer(self._questions[place])
        begin_s = time.perf_counter()
        answer = self._answer(self._questions[place])
        self._spent_s += time.perf_counter() - begin_s
        if self._jobs > 1 and self._spent_s >= self._worth_s:
            self._pool = ProcessPoolExecutor(self._jobs, get_context("fork"), _begin, (self._answer, self._questions))
            self._hand_out(place + 1)
        return answer

    def _hand_out(self, place: int) -> None:
        """Let the copies look into the next questions, from one on."""
        assert self._pool is not None
        last = min(place + _IN_HAND * self._jobs, len(self._questions))
        with suppress(BrokenProcessPool):
            for number in range(max([place - 1, *self._answers]) + 1, last):
                self._answers[number] = self._pool.submit(_serve, number)


_asked: list[Any] = []
"""In a copy of the process: what answers, and all questions."""


def _begin(answer: Callable[[Any], Any], questions: Sequence[Any]) -> None:
    """Prepare a copy of the process; it ends when its parent process has ended."""
    _asked[:] = answer, questions
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_first, daemon=True).start()
    gc.freeze()


def _end_with_first() -> None:
    first = parent_process()
    if first is not None:
        first.join()
        os._exit(1)


def _serve(place: int) -> Any:
    answer, questions = _asked
    return answer(questions[place])
