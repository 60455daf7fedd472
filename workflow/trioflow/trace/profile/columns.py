"""The events of a Kineto profile as columns; events are built for a window of it."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.trace.profile.events import DEVICE, Event

ABSENT = -1
"""Stands for an id that an event has not."""
NUMBERS = ("record_id", "external_id", "sequence_number", "correlation")


class Profile:
    """The complete events of one Kineto file, as columns of about 64 bytes an event.

    Files of several GB fit in memory: what no reader asks for (Python frames, flow arrows,
    counters) is dropped. ``header``: values beside the events; ``foreign``: events of unknown
    accelerators, by category; ``memory``: five numbers of each of the allocators' events: when
    [ns], kind and number of the device, bytes that are handed out then, and that are reserved.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header: dict[str, Any] = {}
        self.names: list[str] = []
        self.categories: list[str] = []
        self.details: list[dict[str, Any]] = []
        self.foreign: dict[str, int] = {}
        self.memory = array("q")
        self.columns: dict[str, array[int]] = {
            name: array("i" if name in CODES else "q") for name in _COLUMNS
        }
        self._ordered: dict[str, NDArray[Any]] = {}
        self._masks: dict[tuple[str, ...], NDArray[np.bool_]] = {}
        self._launched: NDArray[np.int64] | None = None
        self._by_launch: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.column("start_ns"))

    def column(self, name: str) -> NDArray[Any]:
        """Return a column in order of start, what encloses before what is enclosed."""
        if not self._ordered:
            start, end = (np.asarray(self.columns[c]) for c in ("start_ns", "end_ns"))
            order = np.lexsort((-end, start))
            for word in _COLUMNS:  # one at a time: a file of several GB fills memory twice over
                self._ordered[word] = np.asarray(self.columns.pop(word))[order]
        return self._ordered[name]

    @property
    def start_ns(self) -> NDArray[np.int64]:
        """Start of every event [ns]."""
        return self.column("start_ns")

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """End of every event [ns]."""
        return self.column("end_ns")

    def is_category(self, *words: str) -> NDArray[np.bool_]:
        """Return which events are of one of some categories."""
        if words not in self._masks:
            codes = [i for i, word in enumerate(self.categories) if word in words]
            self._masks[words] = np.isin(self.column("category"), codes)
        return self._masks[words]

    def is_named(self, *prefixes: str) -> NDArray[np.bool_]:
        """Return which events' names begin with one of some words."""
        codes = [i for i, name in enumerate(self.names) if name.startswith(prefixes)]
        return np.isin(self.column("name"), codes)

    def rows_between(self, start_ns: int, end_ns: int) -> NDArray[np.int64]:
        """Return the rows of the events that start within some time."""
        first, last = np.searchsorted(self.start_ns, (start_ns, end_ns))
        return np.arange(first, last)

    def launched(self, categories: tuple[str, ...]) -> NDArray[np.int64]:
        """Return the numbers of all launches in the file, sorted."""
        if self._launched is None:
            self._launched = np.unique(self.column("correlation")[self.is_category(*categories)])
        return self._launched

    def device_rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of what some launches started on the device, in order of start."""
        if self._by_launch is None:
            rows = np.flatnonzero(self.is_category(*DEVICE))
            keys = self.column("correlation")[rows]
            order = np.argsort(keys, kind="stable")
            self._by_launch = keys[order], rows[order]
        keys, rows = self._by_launch
        first, last = (np.searchsorted(keys, numbers, side=side) for side in ("left", "right"))
        spans = [rows[a:b] for a, b in zip(first, last, strict=True) if b > a]
        return np.sort(np.concatenate(spans)) if spans else rows[:0]

    def events(self, rows: NDArray[Any]) -> list[Event]:
        """Build some events, given by their rows or by a mask, in order of start."""
        cells = {c: self.column(c)[rows].tolist() for c in _COLUMNS}
        optional = [
            [None if value == ABSENT else value for value in cells[name]] for name in NUMBERS
        ]
        return [
            Event(
                self.names[name], self.categories[category], start, end, thread,
                record, sequence, correlation, external, self.details[details],
            )
            for name, category, start, end, thread, details, record, external, sequence, correlation
            in zip(
                cells["name"], cells["category"], cells["start_ns"], cells["end_ns"],
                cells["thread"], cells["details"], *optional, strict=True,
            )
        ]  # fmt: skip


CODES = ("name", "category", "thread", "details")
_COLUMNS = ("start_ns", "end_ns", *CODES, *NUMBERS)
