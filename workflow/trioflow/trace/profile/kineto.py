"""Kineto's Chrome trace, of any size, read into columns; `read_profile` is the door.

Many events are decoded at once, and of each what trioflow reads; events are built for a window of the profile.
"""

import gzip
import json
import re
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from itertools import chain, compress, islice
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from msgspec import DecodeError, Meta, Raw, Struct, ValidationError, defstruct
from msgspec import field as member
from msgspec.json import Decoder
from msgspec.structs import replace
from numpy.typing import NDArray

from trioflow.base.columns import ABSENT
from trioflow.base.errors import TraceError
from trioflow.base.input_files import check_file
from trioflow.base.units import NS_PER_US
from trioflow.trace.profile.events import DEVICE, LAUNCHES, Event
from trioflow.trace.profile.profiler_fields import categories, kineto_words, load_fields

CHUNK = 1 << 22
"""Bytes read at a time."""
BLOCK = 1 << 17
"""Bytes of events that are decoded at once."""
LONGEST = 1 << 26
"""No single event, and no other value of the file, may be longer [bytes]."""
MOST_EXPANSION = 200
"""Bytes of a byte of a gzipped file; profiles have some 20, one character again and again 1,000."""
_GZIP = b"\x1f\x8b"
_START = re.compile(rb'\s*\[|(?s:.*?)"traceEvents"\s*:\s*\[')
_NEXT, _LAST = re.compile(rb"\}[\s,]*\{"), re.compile(rb"\}[\s,]*\]")
"""Where an event may end, the next one or the list's end behind it; its texts and arguments may hold the same."""
_END = re.compile(rb"[\s,]*\]")
_TRIED = 32
"""So many places where events may end are tried before the file is taken as broken."""

T = TypeVar("T")


@contextmanager
def open_json(path: Path) -> Iterator[Callable[[int], bytes]]:
    """Yield what reads some bytes of a JSON file, plain or gzipped; TraceError where it is broken or unpacks without end."""
    check_file(path, TraceError)
    most = max(MOST_EXPANSION * path.stat().st_size, LONGEST)
    try:
        with path.open("rb") as raw:
            packed = raw.read(len(_GZIP)) == _GZIP
            raw.seek(0)
            file: Any = gzip.GzipFile(fileobj=raw) if packed else raw

            def read(size: int) -> bytes:
                content: bytes = file.read(min(size, most + 1))
                if file.tell() > most:
                    raise TraceError(
                        f"unpacks to more than {MOST_EXPANSION} times its size", file=path, fix="check what it is"
                    )
                return content

            yield read
    except (OSError, EOFError, zlib.error, DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem, _, place = str(error).partition(" - at `$")
        what = "it cannot be read:" if isinstance(error, ValidationError) else "not a complete JSON file:"
        raise TraceError(f"{what} {problem}", file=path, place=place.strip(".`"), fix="capture it again") from None


def decode_file(path: str | Path, decoder: Decoder[T]) -> T:
    """Return what a JSON file, plain or gzipped, holds; TraceError, with the key, where the decoder refuses it."""
    with open_json(Path(path)) as read:
        return decoder.decode(read(sys.maxsize))


NUMBERS = ("record_id", "external_id", "sequence_number", "correlation")
_KEPT: Mapping[str, Sequence[str]] = load_fields()["kineto"]["details"]
"""Arguments that are kept of each category's events, ids left out; of those that communicate ``message`` besides."""
_MEMORY = ("device_type", "device_id", "allocated", "reserved")
_LIMIT = 1 << 62
_Id = Annotated[int, Meta(ge=ABSENT, lt=_LIMIT)]
_KINDS: Mapping[str, tuple[Any, Any]] = dict.fromkeys(NUMBERS, (_Id, ABSENT)) | dict.fromkeys(_MEMORY, (Any, None))
_Arguments: Any = defstruct(
    "_Arguments",
    [
        (name, kind, member(name=word, default=default))
        for name, word in load_fields()["kineto"]["arguments"].items()
        for kind, default in [_KINDS.get(name, (Raw, b""))]
    ],
    gc=False,
)
"""What is read of an event's ``args``: numbers, and the text of details; ``b""`` where there is none."""
_NOTHING = _Arguments()
_memory_of = attrgetter(*_MEMORY)
_EXACT_US = 1 << 43
"""Below this a double has every nanosecond; from there on fractions are read as texts."""
_WHOLE_US = 1 << 53
"""Below this a double has every microsecond."""


class _Event(Struct, gc=False):
    """One entry of the file's list."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: Any = None
    dur: Any = None
    args: _Arguments | None = None

    def times_ns(self) -> tuple[int, int]:
        """Return start and end [ns]; raises ValueError where no call runs so."""
        since_1970 = self.ts.__class__ is int and self.ts > _NANOSECONDS_SINCE_1970
        start_ns, duration_ns = (_to_ns(t, 1 if since_1970 else NS_PER_US) for t in (self.ts, self.dur))
        if duration_ns < 0:
            raise ValueError(f"negative duration {self.dur}")
        if duration_ns > _LONGEST_NS:
            raise ValueError(f"no call takes {self.dur}")
        return start_ns, start_ns + duration_ns


_EVENTS, _EXACT_EVENTS = Decoder(list[_Event]), Decoder(list[_Event], float_hook=str)
VALUE = Decoder(float_hook=str)
"""Reads any value; fractions stay text, so that no digit is lost."""
_Size = Annotated[int, Meta(ge=0)]
_DECODERS: Mapping[str, Decoder[Any]] = {
    "shapes": Decoder(list[list[_Size | list[_Size]]] | None),
    "types": Decoder(list[str] | None),
}
"""Read the details that must be of some form: an argument's shape, or those of a list of tensors."""


class _EventFile:
    """The events of a file, many at a time, in order; iterate once, ``header`` then holds the file's other values."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self._text, self._at, self._rows = b"", 0, 0

    def __iter__(self) -> Iterator[list[_Event]]:
        """Yield the events; TraceError where the file is missing, cut short or no profile."""
        with open_json(self.path) as self._read:
            while (start := _START.match(self._text)) is None and self._more():
                pass
            if start is None:
                raise TraceError("it holds no list traceEvents", file=self.path, fix="give a Kineto trace")
            before, self._at = self._text[: start.end()], start.end()
            while events := self._decode_next():
                yield events
                self._rows += len(events)
            while self._more():
                pass
            header = VALUE.decode(before.removeprefix(b"\xef\xbb\xbf") + self._text[self._at :])
            self.header = {key: value for key, value in dict(header).items() if key != "traceEvents"}

    def _decode_next(self) -> list[_Event]:
        """Return the next events, some `BLOCK` bytes of them; none at the list's end."""
        while len(self._text) < self._at + 2 * BLOCK and self._more():
            pass
        if _END.match(self._text, self._at):
            return []
        problem = "the list traceEvents does not end"
        while True:
            ends = chain(_NEXT.finditer(self._text, self._at + BLOCK), _LAST.finditer(self._text, self._at))
            for end in islice(ends, _TRIED):
                text = b"[%b]" % self._text[self._at : end.start() + 1]
                try:
                    events = _EVENTS.decode(text)
                except ValidationError as error:
                    raise self._odd(error) from None
                except DecodeError as error:
                    problem = str(error)
                else:
                    self._at = end.end() - 1
                    stamps = [event.ts for event in events if event.ts.__class__ is float]
                    return _EXACT_EVENTS.decode(text) if max(stamps, default=0) >= _EXACT_US else events
            if not self._more():
                raise DecodeError(f"{problem} - at `$.traceEvents`")

    def _more(self) -> bool:
        """Read on, dropping what is done; False at the end of the file."""
        chunk = self._read(CHUNK)
        self._text, self._at = self._text[self._at :] + chunk, 0
        if len(self._text) > LONGEST:
            raise DecodeError(f"more than {LONGEST} bytes without an end")
        return bool(chunk)

    def _odd(self, error: ValidationError) -> TraceError:
        """Return the error of an event that holds what none may, with the row and the key."""
        problem, _, place = str(error).partition(" - at `$[")
        row, _, key = place.rstrip("`").partition("]")
        where = f"traceEvents[{self._rows + int(row or 0)}]{key}"
        return TraceError(f"the event cannot be read: {problem}", file=self.path, place=where, fix="capture it again")


CODES = ("name", "category", "thread", "details")
_NAMED_PROCESSES = 4


@dataclass
class Profile:
    """The complete events of one Kineto file, as columns of about 64 bytes an event.

    Files of several GB fit in memory: what no reader asks for (Python frames, flow arrows,
    counters) is dropped. Events lie in order of start, what encloses before what is enclosed.
    ``header``: values beside the events; ``foreign``: number of events of unknown
    accelerators, by category; ``memory``: five numbers of each of the allocators' events: when
    [ns], kind and number of the device, bytes that are handed out then, and that are reserved.
    """

    path: Path
    header: dict[str, Any]
    names: list[str]
    categories: list[str]
    details: list[dict[str, Any]]
    columns: dict[str, NDArray[Any]]
    foreign: Counter[str]
    memory: list[tuple[int, ...]]
    _masks: dict[tuple[str, ...], NDArray[np.bool_]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.start_ns)

    @property
    def start_ns(self) -> NDArray[np.int64]:
        """Start of every event [ns]."""
        return self.columns["start_ns"]

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """End of every event [ns]."""
        return self.columns["end_ns"]

    def is_category(self, *words: str) -> NDArray[np.bool_]:
        """Return which events are of one of some categories."""
        if words not in self._masks:
            codes = [i for i, word in enumerate(self.categories) if word in words]
            self._masks[words] = np.isin(self.columns["category"], codes)
        return self._masks[words]

    def is_named(self, *prefixes: str) -> NDArray[np.bool_]:
        """Return which events' names begin with one of some words."""
        codes = [i for i, name in enumerate(self.names) if name.startswith(prefixes)]
        return np.isin(self.columns["name"], codes)

    def rows_between(self, start_ns: int, end_ns: int) -> NDArray[np.int64]:
        """Return the rows of the events that start within some time."""
        first, last = np.searchsorted(self.start_ns, (start_ns, end_ns))
        return np.arange(first, last)

    @cached_property
    def launched(self) -> NDArray[np.int64]:
        """The numbers of all launches in the file, sorted."""
        return np.unique(self.columns["correlation"][self.is_category(*LAUNCHES)])

    @cached_property
    def _by_launch(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of what ran on the device, sorted, and the rows of each."""
        rows = np.flatnonzero(self.is_category(*DEVICE))
        keys = self.columns["correlation"][rows]
        order = np.argsort(keys, kind="stable")
        return keys[order], rows[order]

    def device_rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of what some launches started on the device, in order of start."""
        keys, rows = self._by_launch
        first, last = (np.searchsorted(keys, numbers, side=side) for side in ("left", "right"))
        spans = [rows[a:b] for a, b in zip(first, last, strict=True) if b > a]
        return np.sort(np.concatenate(spans)) if spans else rows[:0]

    def drop(self, rows: NDArray[np.bool_]) -> None:
        """Leave out some events, given by a mask, as if the file did not hold them."""
        self.columns = {name: column[~rows] for name, column in self.columns.items()}
        self._masks.clear()

    def events(self, rows: NDArray[Any]) -> list[Event]:
        """Build some events, given by their rows or by a mask, in order of start."""
        cells = {name: column[rows].tolist() for name, column in self.columns.items()}
        return [
            Event(
                self.names[name],
                self.categories[category],
                start,
                end,
                thread,
                record,
                sequence,
                correlation,
                external,
                self.details[details],
            )
            for name, category, start, end, thread, details, record, external, sequence, correlation in zip(
                cells["name"],
                cells["category"],
                cells["start_ns"],
                cells["end_ns"],
                cells["thread"],
                cells["details"],
                *([None if value == ABSENT else value for value in cells[name]] for name in NUMBERS),
                strict=True,
            )
        ]


_NANOSECONDS_SINCE_1970 = 10**17
"""A time stamp beyond this counts nanoseconds: in microseconds it would lie after the year 5000."""
_LONGEST_NS = 10**15
"""Eleven days: no call, and no step of a training run, takes longer."""


def read_profile(path: str | Path) -> Profile:
    """Read a Kineto trace into columns.

    Raises TraceError when it is none, or an event's time, number or shape is missing or impossible.
    """
    file = _EventFile(Path(path))
    reader = _Reader(file.path)
    for events in file:
        reader.take(events)
    return reader.finish(file.header)


def make_profile(path: Path, events: Sequence[dict[str, Any]], header: dict[str, Any]) -> Profile:
    """Put events as Kineto's file lists them into columns; TraceError as `read_profile`."""
    try:
        decoded = _EVENTS.decode(json.dumps(events))
    except ValidationError as error:
        raise TraceError(f"an event cannot be read: {error}", file=path) from None
    reader = _Reader(path)
    reader.take(decoded)
    return reader.finish(header)


_UNREAD, _OF_MEMORY, _FOREIGN = -1, -2, -3
_Key = tuple[str, str, str, int | str | None, int | str | None]


class _Codes(dict[_Key, int]):
    """Numbers of the combinations of phase, category, name, process and thread; below 0 for events that are not kept."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.rows: list[tuple[int, int, int]] = []  # of each combination: name, category and thread
        self.names: dict[str, int] = {}
        self.categories: dict[str, int] = {}
        self.processes: dict[int | str | None, str] = {}  # that run operators, and the first of each
        self._threads: dict[tuple[Any, Any], int] = {}

    def __missing__(self, key: _Key) -> int:
        """Return the number of a new combination; TraceError where only versions before PyTorch 2.0 have it."""
        phase, category, name, process, thread = key
        kept = categories().get(category) if phase == "X" else None
        code = _OF_MEMORY if name in kineto_words("memory") else _UNREAD
        if phase == "X" and category in kineto_words("category_before_2_0"):
            raise TraceError(
                f"the profile is of a PyTorch before 2.0, which files {name!r:.60} under {category!r}",
                file=self.path,
                fix="profile with PyTorch 2.0 or later",
            )
        if phase == "X" and category.startswith(kineto_words("foreign_device")):
            code = _FOREIGN
        if kept is not None and (kept != "python_function" or name.startswith(kineto_words("module"))):
            code = len(self.rows)
            if kept == "cpu_op":
                self.processes.setdefault(process, name)
            self.rows.append(
                (
                    self.names.setdefault(name, len(self.names)),
                    self.categories.setdefault(kept, len(self.categories)),
                    self._threads.setdefault((process, thread), len(self._threads)),
                )
            )
        self[key] = code
        return code


class _Details(dict[bytes, int]):
    """Numbers of the sets of details that events of one category hold, by their text; equal texts share one."""

    def __init__(self, category: str, rows: list[dict[str, Any]]) -> None:
        super().__init__()
        self._names, self._rows = [*_KEPT[category], *_KEPT["message"]], rows
        self._texts, self._message_texts = attrgetter(*_KEPT[category]), attrgetter(*self._names)

    def number(self, arguments: Any) -> int:
        """Return the number of an event's details; ValueError where shapes or types are odd."""
        return self[b"\0".join(self._message_texts(arguments) if arguments.collective else self._texts(arguments))]

    def __missing__(self, text: bytes) -> int:
        """Read new details; equal ones of all categories share a number in ``rows``."""
        pairs = zip(self._names, text.split(b"\0"), strict=False)
        values = {name: _DECODERS.get(name, VALUE).decode(part) for name, part in pairs if part}
        details = {name: value for name, value in values.items() if value is not None}
        if {"shapes", "types"} <= details.keys() and len(details["shapes"]) != len(details["types"]):
            counts = f"the shapes of {len(details['shapes'])} arguments and the types of {len(details['types'])}"
            raise ValueError(f"it has {counts}")
        for shape in details.get("shapes", ()):
            if len(set(map(type, shape))) > 1:
                raise ValueError(f"{shape!r:.40} is not a shape")
        self[text] = len(self._rows) if details else 0
        if details:
            self._rows.append(details)
        return self[text]


class _Reader:
    """Puts a file's events into columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._codes, self._details = _Codes(path), [dict[str, Any]()]
        self._known = {word: _Details(kept, self._details) for word, kept in categories().items() if kept in _KEPT}
        self._foreign, self._memory = Counter[str](), list[tuple[int, ...]]()
        self._blocks = {name: bytearray() for name in ("start_ns", "end_ns", "code", "details", *NUMBERS)}
        self._rows = 0

    def take(self, events: Sequence[_Event]) -> None:
        """Add the file's next events; refuse an odd one."""
        try:
            self._take(events)
            self._rows += len(events)
        except (TypeError, ValueError, OverflowError, RecursionError, DecodeError) as error:
            if len(events) == 1:
                raise TraceError(
                    f"the event {events[0].name!r:.60} cannot be read: {error}",
                    file=self._path,
                    place=f"traceEvents[{self._rows}]",
                    fix="capture it again",
                ) from None
            for event in events:
                self.take([event])

    def _take(self, events: Sequence[_Event]) -> None:
        codes = np.array([self._codes[e.ph, e.cat, e.name, e.pid, e.tid] for e in events], np.int32)
        kept = codes >= 0
        timed = [*compress(events, kept.tolist())]
        memory = [one for i in np.flatnonzero(codes == _OF_MEMORY).tolist() if (one := _read_memory(events[i]))]
        if timed:
            arguments = [event.args or _NOTHING for event in timed]
            details = [
                self._known[event.cat].number(given) if event.cat in self._known else 0
                for event, given in zip(timed, arguments, strict=True)
            ]
            ids = (
                [one.record_id for one in arguments],
                [one.external_id for one in arguments],
                [one.sequence_number for one in arguments],
                [one.correlation for one in arguments],
            )
            columns = *_read_times(timed), codes[kept], array("i", details), *(array("q", column) for column in ids)
            for name, column in zip(self._blocks, columns, strict=True):
                self._blocks[name] += memoryview(column)
        self._memory += memory
        self._foreign.update(events[i].cat for i in np.flatnonzero(codes == _FOREIGN).tolist())

    def finish(self, header: dict[str, Any]) -> Profile:
        """Return all events, ordered one column at a time: those of a file of several GB fill memory."""
        if len(self._codes.processes) > 1:
            words = [f"{process} (such as {name:.60})" for process, name in self._codes.processes.items()]
            raise TraceError(
                f"operators of {len(words)} processes: {', '.join(words[:_NAMED_PROCESSES])}",
                file=self._path,
                fix="give each process's own profile: of a run of several ranks, a file a rank",
            )
        start_ns, end_ns = (np.frombuffer(self._blocks[name], np.int64) for name in ("start_ns", "end_ns"))
        order = np.lexsort((-end_ns, start_ns))
        columns = {
            name: np.frombuffer(self._blocks.pop(name), np.int32 if name in ("code", "details") else np.int64)[order]
            for name in [*self._blocks]
        }
        codes = np.array(self._codes.rows, np.int32).reshape(-1, 3)[columns.pop("code")]
        columns |= dict(zip(("name", "category", "thread"), codes.T, strict=True))
        names, kinds = [*self._codes.names], [*self._codes.categories]
        return Profile(self._path, header, names, kinds, self._details, columns, self._foreign, self._memory)


def _read_memory(event: _Event) -> tuple[int, ...] | None:
    """Return what an allocator holds, and when; None where the event does not say so."""
    numbers = _memory_of(event.args or _NOTHING)
    if not all(number.__class__ is int and 0 <= number < _LIMIT for number in numbers):
        return None
    return replace(event, dur=0).times_ns()[0], *numbers


def _read_times(events: Sequence[_Event]) -> NDArray[np.int64]:
    """Return starts and ends of events [2, events] [ns]; ValueError where no clock shows one."""
    with suppress(TypeError):
        times: NDArray[np.float64] = np.array(
            (array("d", [event.ts for event in events]), array("d", [event.dur for event in events]))
        )
        stamps, lengths = times
        whole = np.floor(times)  # apart from the fraction, whose every nanosecond is exact
        if np.abs(stamps).max() < _WHOLE_US and 0 <= lengths.min() <= lengths.max() <= _LONGEST_NS / NS_PER_US:
            fraction_ns = np.round((times - whole) * NS_PER_US).astype(np.int64)
            start_ns, length_ns = whole.astype(np.int64) * NS_PER_US + fraction_ns
            return np.stack((start_ns, start_ns + length_ns))
    return np.array([event.times_ns() for event in events], np.int64).T


def _to_ns(stamp: Any, scale: int) -> int:
    """Return a time in nanoseconds, with all its digits; ValueError where it is no number or no clock's."""
    if stamp.__class__ not in (int, float, str):
        raise ValueError(f"{stamp!r:.40} is not a time")
    try:
        exact = Decimal(str(stamp)) * scale
        if not -_LIMIT < exact < _LIMIT:
            raise ValueError
        return int(exact.to_integral_value())
    except (ArithmeticError, ValueError):
        raise ValueError(f"{stamp} is not a time") from None
