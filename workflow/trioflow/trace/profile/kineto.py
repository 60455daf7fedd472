"""Reading Kineto's Chrome trace, of any size, into columns; events are built for a window of it."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.errors import TraceError
from trioflow.trace.profile.events import DEVICE, Event
from trioflow.trace.profile.json_stream import ListStream
from trioflow.trace.profile.profiler_fields import (
    categories,
    detail_spellings,
    id_spellings,
    kineto_words,
)

ABSENT = -1
_NUMBERS = ("record_id", "external_id", "sequence_number", "correlation")
_LIMIT = 1 << 62
_LONGEST_NS = 10**15
"""Eleven days: no call, and no step of a training run, takes longer."""
_NANOSECONDS_SINCE_1970 = 10**17
"""A time stamp beyond this counts nanoseconds: in microseconds it would lie after the year 5000."""


class Profile:
    """The complete events of one Kineto file, as columns.

    About 64 bytes an event, so that a file of several GB fits in memory; what no reader asks for
    (Python frames, flow arrows, memory samples) is dropped.

    ``path``: the file.
    ``header``: the file's values beside the events, such as the device's properties.
    ``foreign``: events of accelerators that trioflow cannot read, by category.
    ``start_ns``, ``end_ns``: times [ns].
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.header: dict[str, Any] = {}
        self.names: list[str] = []
        self.categories: list[str] = []
        self.details: list[dict[str, Any]] = []
        self.foreign: dict[str, int] = {}
        self._columns: dict[str, array[int]] = {
            name: array("i" if name in _CODES else "q") for name in _COLUMNS
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
            start, end = (np.asarray(self._columns[c]) for c in ("start_ns", "end_ns"))
            order = np.lexsort((-end, start))
            for word in _COLUMNS:  # one at a time: a file of several GB fills memory twice over
                self._ordered[word] = np.asarray(self._columns.pop(word))[order]
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
            [None if value == ABSENT else value for value in cells[name]] for name in _NUMBERS
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


_CODES = ("name", "category", "thread", "details")
_COLUMNS = ("start_ns", "end_ns", *_CODES, *_NUMBERS)


def read_profile(path: str | Path) -> Profile:
    """Read a Kineto trace into columns.

    Raises TraceError when the file is not a Kineto trace, or an event lacks its time, runs
    backwards or longer than any training run, or has an id that is not a number or an invalid
    shape.
    """
    profile = Profile(path)
    stream = ListStream(path, kineto_words("events")[0], "a Kineto trace")
    read = _Reader(profile)
    for row, raw in enumerate(stream):
        try:
            if raw["ph"] == "X":
                read.take(raw)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if not isinstance(raw, dict):
                problem = f"{raw!r:.40} is not an event"
            elif "ph" not in raw:
                continue
            elif isinstance(error, KeyError):
                problem = f"the event lacks {error}"
            else:
                problem = f"the event {str(raw.get('name'))!r:.60} cannot be read: {error}"
            raise TraceError(
                problem, file=path, place=f"traceEvents[{row}]", fix="capture it again"
            ) from None
    profile.header = stream.header
    return profile


class _Reader:
    """Puts raw events into a profile's columns."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._names: dict[str, int] = {}
        self._categories: dict[str, int] = {}
        self._threads: dict[Any, int] = {}
        self._details: dict[str, int] = {"": 0}
        profile.details.append({})
        self._known = {
            word: (category, detail_spellings(category)) for word, category in categories().items()
        }
        self._ids = [id_spellings(name) for name in _NUMBERS]
        self._modules = kineto_words("module")
        self._annotations = kineto_words("annotation")
        self._foreign = kineto_words("foreign_device")
        self._codes = [profile._columns[name].append for name in _CODES]
        self._numbers = [profile._columns[name].append for name in _NUMBERS]
        self._start = profile._columns["start_ns"].append
        self._end = profile._columns["end_ns"].append

    def take(self, raw: dict[str, Any]) -> None:
        """Add one complete event, unless nobody reads its category."""
        category, spellings = self._known.get(raw.get("cat", ""), (None, ()))
        if category is None:
            self._note_unread(raw)
            return
        name = raw["name"]
        if category == "python_function" and not name.startswith(self._modules):
            return
        if category == "cpu_op" and name.startswith(self._annotations):
            category = "user_annotation"  # before PyTorch 1.10 one category held both
        start, duration = raw["ts"], raw["dur"]
        scale = 1 if start.__class__ is int and start > _NANOSECONDS_SINCE_1970 else 1000
        start_ns, duration_ns = _to_ns(start, scale), _to_ns(duration, scale)
        if duration_ns < 0:
            raise ValueError(f"negative duration {duration}")
        if duration_ns > _LONGEST_NS:
            raise ValueError(f"no call takes {duration}")
        find = (raw.get("args") or _NOTHING).get
        ids = []
        for words in self._ids:
            value = find(words[0])
            if value is None and len(words) > 1:
                value = next((found for w in words[1:] if (found := find(w)) is not None), None)
            ids.append(_to_id(value))
        details = {}
        for word, kept in spellings:
            value = find(word)
            if value is not None:
                details[kept] = value
        codes = (
            self._code(self._names, self._profile.names, name),
            self._code(self._categories, self._profile.categories, category),
            self._threads.setdefault((raw.get("pid"), raw.get("tid")), len(self._threads)),
            self._code_details(details) if details else 0,
        )
        self._start(start_ns)
        self._end(start_ns + duration_ns)
        for add, code in zip(self._codes, codes, strict=True):
            add(code)
        for add, number in zip(self._numbers, ids, strict=True):
            add(number)

    def _note_unread(self, raw: dict[str, Any]) -> None:
        """Count the events of devices that trioflow does not read."""
        word = raw.get("cat")
        if isinstance(word, str) and word.startswith(self._foreign):
            self._profile.foreign[word] = self._profile.foreign.get(word, 0) + 1

    @staticmethod
    def _code(known: dict[str, int], words: list[str], word: str) -> int:
        """Return the number of a word, giving it one where it is new."""
        code = known.get(word)
        if code is None:
            if not isinstance(word, str):
                raise TypeError(f"{word!r:.40} is not a name")
            code = known[word] = len(words)
            words.append(word)
        return code

    def _code_details(self, details: dict[str, Any]) -> int:
        """Return the number of a set of details; equal sets share it."""
        key = repr(details)
        code = self._details.get(key)
        if code is None:
            _check_shapes(details)
            code = self._details[key] = len(self._profile.details)
            self._profile.details.append(details)
        return code


_NOTHING: dict[str, Any] = {}


def _check_shapes(details: dict[str, Any]) -> None:
    """Refuse shapes and types of arguments that are none, or not one each."""
    shapes, types = details.get("shapes", []), details.get("types", [])
    if not isinstance(shapes, list) or not isinstance(types, list):
        raise ValueError(f"{shapes!r:.40} and {types!r:.40} are not lists of shapes and types")
    if "shapes" in details and "types" in details and len(shapes) != len(types):
        raise ValueError(
            f"it has the shapes of {len(shapes)} arguments and the types of {len(types)}"
        )
    if not all(isinstance(word, str) for word in types):
        raise ValueError(f"{types!r:.40} are not types")
    for shape in shapes:
        for sizes in shape if _is_list_of_lists(shape) else [shape]:
            whole = isinstance(sizes, list) and all(s.__class__ is int and s >= 0 for s in sizes)
            if not whole:
                raise ValueError(f"{sizes!r:.40} is not a shape")


def _is_list_of_lists(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and isinstance(shape[0], list)


def _to_ns(stamp: Any, scale: int) -> int:
    """Return a time in nanoseconds; text keeps digits that a float would lose.

    Raises ValueError when it is not a number, or one that no clock shows.
    """
    if stamp.__class__ is int:
        time_ns: int = stamp * scale
    else:
        if not isinstance(stamp, str):
            raise ValueError(f"{stamp!r:.40} is not a time")
        whole, _, fraction = stamp.partition(".")
        if fraction.isdigit() and scale == 1000:
            time_ns = int(whole) * 1000
            part = int((fraction + "000")[:3]) + (fraction[3:4] >= "5")
            time_ns += -part if whole.startswith("-") else part
        else:
            time_ns = round(float(stamp) * scale)
    if not -_LIMIT < time_ns < _LIMIT:
        raise ValueError(f"{stamp} is not a time")
    return time_ns


def _to_id(value: Any) -> int:
    """Return an id, ABSENT for none."""
    if value is None:
        return ABSENT
    if value.__class__ is not int or not ABSENT <= value < _LIMIT:
        raise ValueError(f"{value!r:.40} is not an id")
    return int(value)
