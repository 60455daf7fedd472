"""Questions answered in their order, later ones ahead of their turn in copies of this process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

_WORTH_S = 0.5
"""Starting copies of the process takes about a tenth of it [s]."""
_MOST_JOBS = 8
"""Processes at most by default: each may hold a GB."""
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
        self,
        answer: Callable[[Question], Answer],
        questions: Sequence[Question],
        jobs: int,
        worth_s: float = _WORTH_S,
    ) -> None:
        self._answer, self._questions, self._worth_s = answer, questions, worth_s
        # A daemon may have no children.
        self._jobs = jobs if sys.platform == "linux" and not current_process().daemon else 1
        self._next = 0  # first question that nobody looks into
        self._spent_s = 0.0
        self._found: dict[int, Answer] = {}
        self._asked: dict[Connection, int | None] = {}  # what each copy looks into
        self._processes: list[Any] = []

    def __enter__(self) -> Ahead[Question, Answer]:
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        for connection in self._asked:
            connection.close()

    def take(self, place: int) -> Answer:
        """Return the answer to a question; places must ascend."""
        if not self._processes:
            begin_s, self._next = time.perf_counter(), place + 1
            answer = self._answer(self._questions[place])
            self._spent_s += time.perf_counter() - begin_s
            if self._jobs > 1 and self._spent_s >= self._worth_s:
                self._start()
            return answer
        self._hand_out()
        while place not in self._found and place in self._asked.values():
            self._await_one()
            self._hand_out()
        if place in self._found:
            return self._found.pop(place)
        return self._answer(self._questions[place])

    def _start(self) -> None:
        """Start the copies, each with a connection of its own, and let them look into the next questions."""
        context = get_context("fork")
        for _ in range(self._jobs):
            here, there = context.Pipe()
            foreign = [*self._asked, here]
            process = context.Process(target=self._serve, args=(there, foreign), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._asked[here] = None
        self._hand_out()

    def _hand_out(self) -> None:
        for connection, place in self._asked.items():
            if place is None and self._next < len(self._questions):
                with suppress(OSError):  # a copy that has ended is found out where it is waited for
                    connection.send(self._next)
                self._asked[connection] = self._next
                self._next += 1

    def _await_one(self) -> None:
        """Take what copies have found; one that failed, or was ended, leaves its question open."""
        for ready in wait([one for one, place in self._asked.items() if place is not None]):
            assert isinstance(ready, Connection)
            place = self._asked[ready]
            assert place is not None
            try:
                found = ready.recv()
            except (EOFError, OSError):
                del self._asked[ready]
                continue
            self._asked[ready] = None
            if found:
                self._found[place] = found[0]

    def _serve(self, connection: Connection, foreign: Sequence[Connection]) -> None:
        """Answer what comes, in a copy of the process; nothing stands for what raised something."""
        for other in foreign:  # else nobody would learn that the first process has ended
            other.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()
        with suppress(EOFError, OSError):
            while True:
                place = connection.recv()
                try:
                    found: tuple[Answer, ...] = (self._answer(self._questions[place]),)
                except Exception:
                    found = ()
                connection.send(found)
