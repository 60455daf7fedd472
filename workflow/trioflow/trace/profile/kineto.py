"""Kineto's Chrome trace, of any size, read into columns.

Reading one long list out of a JSON file of any size, entry by entry.

Reading Kineto's Chrome trace, of any size, into columns: many events at once, and of each what trioflow reads.

The events of a Kineto profile as columns; events are built for a window of it.
"""

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import pyarrow as pa
from msgspec import UNSET, Meta, MsgspecError, Raw, Struct, defstruct, field
from msgspec.json import Decoder
from msgspec.structs import replace
from numpy.typing import NDArray

from trioflow.base.errors import TraceError
from trioflow.base.input_files import check_file
from trioflow.trace.profile.events import DEVICE, LAUNCHES, Event, is_shape
from trioflow.trace.profile.profiler_fields import categories, kineto_words, load_fields

CHUNK = 1 << 22
"""Characters read at a time."""
LONGEST = 1 << 26
"""No single entry, and no other value of the file, may be longer [characters]."""
MOST_EXPANSION = 200
"""Characters of a byte of a gzipped file; profiles have some 20, one character again and again 1,000."""
_NEAR_END = 24
"""A cut word or number shows its error this close to the end of what was read."""
_BLANK = re.compile(r"[ \t\r\n]*")
BLOCK = 1 << 17
"""Characters of entries that are decoded at once."""
_FEW = 256
"""Entries that are kept at a time where each is decoded by itself: garbage collections look at each."""
_BETWEEN = re.compile(r"\}\s*,\s*\{")


class ListStream:
    """Entries of the list under one ``key`` of a JSON object (or a bare list); plain or gzipped, of ``kind`` for messages.

    Iterate once; ``header`` then holds the file's other values. Fractions stay text, so that no
    digit is lost. Raises TraceError while iterating, when the file is missing, cut short, no JSON,
    or lacks the list.
    """

    def __init__(self, path: str | Path, key: str, kind: str) -> None:
        self.path, self.key, self.kind = Path(path), key, kind
        self.header: dict[str, Any] = {}
        self._decoder = json.JSONDecoder(parse_float=str, parse_constant=self._refuse_constant)
        self._decode_list: Callable[[bytes], Sequence[Any] | None] | None = None
        self._file: IO[str] | None = None
        self._text, self._at, self._before, self._ended = "", 0, 0, False
        self._most, self._place = 0, key

    def __iter__(self) -> Iterator[Any]:
        """Yield the entries in order."""
        for entries in self.blocks(None):
            yield from entries

    def blocks(self, decode_list: Callable[[bytes], Sequence[Any] | None] | None) -> Iterator[Sequence[Any]]:
        """Yield the entries in order, many at a time, made by ``decode_list`` or, where it gives None, the json module."""
        self._decode_list = decode_list
        try:
            with self._open() as self._file:
                yield from self._read_file()
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise self._incomplete(str(error)) from None

    def _open(self) -> IO[str]:
        check_file(self.path, TraceError)
        with self.path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        self._most = max(MOST_EXPANSION * self.path.stat().st_size, LONGEST)
        if packed:
            return gzip.open(self.path, "rt", encoding="utf-8-sig")
        return self.path.open(encoding="utf-8-sig")

    def _read_file(self) -> Iterator[Sequence[Any]]:
        first = self._peek()
        if first == "[":
            yield from self._read_list()
        elif first == "{":
            yield from self._read_object()
        else:
            raise self._incomplete("it starts with neither { nor [")
        if self._peek():
            raise self._incomplete("more follows its end")

    def _read_object(self) -> Iterator[Sequence[Any]]:
        found = False
        self._at += 1
        while self._peek() != "}":
            if self._peek() == ",":
                self._at += 1
                continue
            key = self._place = str(self._decode())
            if self._peek() != ":":
                raise self._incomplete("a key without a value")
            self._at += 1
            if key == self.key:
                if self._peek() != "[" or found:
                    raise TraceError(
                        f"the key {self.key} {'occurs twice' if found else 'holds no list'}",
                        file=self.path,
                        fix=f"give {self.kind}",
                    )
                found = True
                yield from self._read_list()
            else:
                self.header[key] = self._decode()
        self._at += 1
        if not found:
            raise TraceError(f"the key {self.key} is missing", file=self.path, fix=f"give {self.kind}")

    def _read_list(self) -> Iterator[Sequence[Any]]:
        self._at += 1
        while self._peek() != "]":
            yield self._decode_many() or self._decode_each()
        self._at += 1

    def _decode_many(self) -> Sequence[Any] | None:
        """Return the next entries at once; None unless they are a list, and none of them is cut."""
        if self._decode_list is None:
            return None
        while self._peek() == ",":
            self._at += 1
        while len(self._text) < self._at + 2 * BLOCK and self._more():
            pass
        between = _BETWEEN.search(self._text, self._at + BLOCK, self._at + 2 * BLOCK)
        if between is not None:
            text = f"[{self._text[self._at : between.start() + 1]}]"
            entries = self._decode_list(text.encode())
            if entries is not None:
                self._at = between.end() - 1
                return entries
        return None

    def _decode_each(self) -> list[Any]:
        """Return a few of the next entries, each by itself: what is wrong is told of the one."""
        entries: list[Any] = []
        while len(entries) < _FEW and (character := self._peek()) != "]":
            if character == ",":
                self._at += 1
            else:
                entries.append(self._decode())
        return entries

    def _peek(self) -> str:
        """Return the next character that is not a space; empty at the end of the file."""
        while True:
            self._at = _BLANK.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _decode(self) -> Any:
        """Return the next value, reading on until it is whole."""
        self._peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _NEAR_END
                longest = len(self._text) - self._at > LONGEST
                if not cut or longest or not self._more():
                    raise self._incomplete(error.msg) from None
            except ValueError as error:  # a number of more digits than Python reads
                raise self._incomplete(str(error).partition(";")[0]) from None
            except RecursionError:
                raise self._incomplete("nested too deeply") from None
            else:
                whole = end < len(self._text) or value.__class__ in (dict, list, str)
                if whole or not self._more():
                    self._at = end
                    return value

    def _more(self) -> bool:
        """Read on, dropping what is done; False at the end of the file."""
        assert self._file is not None
        chunk = "" if self._ended else self._file.read(CHUNK)
        self._ended = not chunk
        if self._before + self._at > self._most:
            raise TraceError(
                f"unpacks to more than {MOST_EXPANSION} times its size", file=self.path, fix="check what it is"
            )
        self._before += self._at
        self._text, self._at = self._text[self._at :] + chunk, 0
        return bool(chunk)

    def _incomplete(self, why: str) -> TraceError:
        return TraceError(
            f"not a complete JSON file ({why})", file=self.path, place=self._place, fix="capture it again"
        )

    def _refuse_constant(self, word: str) -> Any:
        raise self._incomplete(f"{word} is not a number")


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
        self.columns: dict[str, array[int]] = {name: array("i" if name in CODES else "q") for name in _COLUMNS}
        self._ordered: dict[str, NDArray[Any]] = {}
        self._masks: dict[tuple[str, ...], NDArray[np.bool_]] = {}

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

    @cached_property
    def launched(self) -> NDArray[np.int64]:
        """The numbers of all launches in the file, sorted."""
        return np.unique(self.column("correlation")[self.is_category(*LAUNCHES)])

    @cached_property
    def _by_launch(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The numbers of what ran on the device, sorted, and the rows of each."""
        rows = np.flatnonzero(self.is_category(*DEVICE))
        keys = self.column("correlation")[rows]
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
        self._ordered = {name: column[~rows] for name, column in self._ordered.items()}
        self._masks.clear()

    def events(self, rows: NDArray[Any]) -> list[Event]:
        """Build some events, given by their rows or by a mask, in order of start."""
        cells = {c: self.column(c)[rows].tolist() for c in _COLUMNS}
        optional = [[None if value == ABSENT else value for value in cells[name]] for name in NUMBERS]
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
                *optional,
                strict=True,
            )
        ]


CODES = ("name", "category", "thread", "details")
_COLUMNS = ("start_ns", "end_ns", *CODES, *NUMBERS)


_LIMIT = 1 << 62
_NANOSECONDS_SINCE_1970 = 10**17
"""A time stamp beyond this counts nanoseconds: in microseconds it would lie after the year 5000."""
_LONGEST_NS = 10**15
"""Eleven days: no call, and no step of a training run, takes longer."""


def read_profile(path: str | Path) -> Profile:
    """Read a Kineto trace into columns.

    Raises TraceError when it is none, or an event's time, number or shape is missing or impossible.
    """
    stream = ListStream(path, kineto_words("events")[0], "a Kineto trace")
    return make_profile(path, stream.blocks(_decode_events), stream.header)


def make_profile(path: str | Path, blocks: Iterable[Sequence[Any]], header: dict[str, Any]) -> Profile:
    """Put events as Kineto's file lists them, some at a time, into columns; fractions are text. TraceError as `read_profile`."""
    profile = Profile(path)
    read = _Reader(profile)
    for entries in blocks:
        read.take(entries)
    profile.header = header
    return profile


_KEPT: Mapping[str, list[str]] = load_fields()["kineto"]["details"]
"""Arguments that are kept of each category's events, ids left out."""
_DETAILS = sorted({name for names in _KEPT.values() for name in names})
_MEMORY = ("device_type", "device_id", "allocated", "reserved")
_Id = Annotated[int, Meta(ge=ABSENT, lt=_LIMIT)]
_Arguments: Any = defstruct(
    "_Arguments",
    [
        (name, kind, field(name=load_fields()["kineto"]["arguments"][name], default=default))
        for names, kind, default in ((NUMBERS, _Id, ABSENT), (_DETAILS, Raw, b""), (_MEMORY, Any, None))
        for name in names
    ],
    gc=False,
)
"""What is read of an event's ``args``: numbers, and the text of details; ``b""`` where there is none."""
_NOTHING = _Arguments()
_numbers_of = attrgetter(*NUMBERS)
_memory_of = attrgetter(*_MEMORY)


class _Event(Struct, gc=False):
    """One entry of the file's list; a number with a fraction is text, so that no digit is lost."""

    ph: Any = None
    cat: Any = ""
    name: Any = UNSET
    pid: Any = None
    tid: Any = None
    ts: Any = UNSET
    dur: Any = UNSET
    args: _Arguments | None = None

    def times_ns(self) -> tuple[int, int]:
        """Return start and end [ns]; raises ValueError where no call runs so."""
        since_1970 = self.ts.__class__ is int and self.ts > _NANOSECONDS_SINCE_1970
        start_ns, duration_ns = (_to_ns(t, 1 if since_1970 else 1000) for t in (self.ts, self.dur))
        if duration_ns < 0:
            raise ValueError(f"negative duration {self.dur}")
        if duration_ns > _LONGEST_NS:
            raise ValueError(f"no call takes {self.dur}")
        return start_ns, start_ns + duration_ns


_DECODER = Decoder(list[_Event], float_hook=str)
_ARGUMENTS = Decoder(_Arguments, float_hook=str)


def _decode_events(text: bytes) -> list[_Event] | None:
    """Return the events of a JSON list; None where one is not as it should be."""
    try:
        return _DECODER.decode(text)
    except (MsgspecError, RecursionError):
        return None


def _convert_event(entry: Any) -> _Event:
    """Return an event of the json module; TypeError or MsgspecError where one that is read is odd."""
    if not isinstance(entry, dict):
        raise TypeError
    timed = entry.get("ph") == "X" and entry.get("cat") in categories()
    is_read = timed or entry.get("name") in kineto_words("memory")
    given = (entry.get("args") or {}) if is_read else {}
    if not isinstance(given, dict):
        raise TypeError(f"{given!r:.40} are no arguments")
    known = {word: value for word, value in given.items() if value is not None}
    members = {word: entry[word] for word in _Event.__struct_fields__ if word in entry}
    return _Event(**members | {"args": _ARGUMENTS.decode(json.dumps(known))})


def _odd_event(path: Path, row: int, entry: Any, error: Exception) -> TraceError:
    """Return the error of an entry that cannot be read."""
    if isinstance(entry, _Event):
        cells = {word: getattr(entry, word) for word in _Event.__struct_fields__}
        entry = {word: cell for word, cell in cells.items() if cell is not UNSET}
    if not isinstance(entry, dict):
        problem = f"{entry!r:.40} is not an event"
    elif missing := [word for word in ("name", "ts", "dur") if word not in entry]:
        problem = f"the event lacks {missing[0]!r}"
    else:
        problem = f"the event {str(entry['name'])!r:.60} cannot be read: {error}"
    return TraceError(problem, file=path, place=f"traceEvents[{row}]", fix="capture it again")


def _decode_times(events: Sequence[_Event]) -> NDArray[np.int64] | None:
    """Return starts and ends [ns], a row each; None unless all are texts of at most three decimals, and sane."""
    kind = pa.decimal128(18, 3)
    stamps = [event.ts for event in events], [event.dur for event in events]
    try:
        cells = [pa.array(texts, pa.string()).cast(kind) for texts in stamps]
    except (TypeError, ValueError):
        return None
    start_ns, duration_ns = (np.frombuffer(c.buffers()[1], np.int64)[::2] for c in cells)
    if any(c.null_count for c in cells) or not 0 <= duration_ns.min() <= duration_ns.max() <= _LONGEST_NS:
        return None
    return np.stack((start_ns, start_ns + duration_ns))


class _Category:
    """What the events of one category have in common, and what was found of them.

    ``kept``: the category's name here. ``details``: sets of details by number, shared by all
    categories; the first is empty.
    """

    def __init__(self, kept: str, details: list[dict[str, Any]]) -> None:
        self.kept = kept
        self.codes: dict[str, tuple[int, ...]] = {}
        self._details = details
        self._names = _KEPT.get(kept, ())
        self._texts = attrgetter(*self._names) if self._names else None
        self._numbers: dict[bytes, int] = {}

    def number_details(self, arguments: Any) -> int:
        """Return the number of an event's details, shared by equal ones; ValueError where shapes or types are odd."""
        if self._texts is None:
            return 0
        text = b"\0".join(self._texts(arguments))
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = self._add_details(text.split(b"\0"))
        return number

    def _add_details(self, texts: Sequence[bytes]) -> int:
        details = {
            name: value
            for name, text in zip(self._names, texts, strict=True)
            if text and (value := json.loads(text, parse_float=str)) is not None
        }
        if not details:
            return 0
        _check_shapes(details)
        self._details.append(details)
        return len(self._details) - 1


class _Reader:
    """Puts a file's entries into a profile's columns."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._codes: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._threads: dict[Any, int] = {}
        profile.details.append({})
        self._known = {word: _Category(kept, profile.details) for word, kept in categories().items()}
        self._foreign = kineto_words("foreign_device")
        self._memory = kineto_words("memory")
        self._rows = 0

    def take(self, entries: Sequence[Any]) -> None:
        """Add the file's next entries; refuse an odd one."""
        taken: list[_Event] = []
        rows: list[int] = []
        cells: list[int] = []
        for row, entry in enumerate(entries, self._rows):
            try:
                event = entry if entry.__class__ is _Event else _convert_event(entry)
                if event.ph == "X" and (own := self._cells_of(event)):
                    cells += own
                    taken.append(event)
                    rows.append(row)
                elif event.name in self._memory and event.args is not None:
                    self._take_memory(event)
            except (TypeError, ValueError, MsgspecError, OverflowError, RecursionError) as error:
                raise _odd_event(self._profile.path, row, entry, error) from None
        if taken:
            self._add_times(taken, rows)
        for place, name in enumerate((*CODES, *NUMBERS)):
            self._profile.columns[name].extend(cells[place :: len(CODES) + len(NUMBERS)])
        self._rows += len(entries)

    def _take_memory(self, event: _Event) -> None:
        """Add what an allocator holds, where the event says so."""
        numbers = _memory_of(event.args)
        if all(number.__class__ is int and 0 <= number < _LIMIT for number in numbers):
            start_ns, _ = replace(event, dur=0).times_ns()
            self._profile.memory.extend((start_ns, *numbers))

    def _cells_of(self, event: _Event) -> tuple[int, ...]:
        """Return an event's codes, then its ids; empty where nobody reads it."""
        category = self._known.get(event.cat)
        if category is None:
            self._note_unread(event)
            return ()
        codes = category.codes.get(event.name)
        if codes is None:
            codes = category.codes[event.name] = self._code(category.kept, event.name)
        if not codes:
            return ()
        arguments = event.args or _NOTHING
        thread = self._threads.setdefault((event.pid, event.tid), len(self._threads))
        return *codes, thread, category.number_details(arguments), *_numbers_of(arguments)

    def _add_times(self, events: Sequence[_Event], rows: Sequence[int]) -> None:
        """Put starts and ends into their columns; refuse what no clock shows."""
        times = _decode_times(events)
        if times is None:
            singly = []
            for row, event in zip(rows, events, strict=True):
                try:
                    singly.append(event.times_ns())
                except ValueError as error:
                    raise _odd_event(self._profile.path, row, event, error) from None
            times = np.array(singly, np.int64).T
        for name, stamps in zip(("start_ns", "end_ns"), times, strict=True):
            self._profile.columns[name].frombytes(stamps.tobytes())

    def _note_unread(self, event: _Event) -> None:
        """Count the events of devices that trioflow does not read; refuse the categories of old versions."""
        word = event.cat
        if word in kineto_words("category_before_2_0"):
            raise TraceError(
                f"the profile is of a PyTorch before 2.0, which files {event.name!r:.60} under {word!r}",
                file=self._profile.path,
                fix="profile with PyTorch 2.0 or later",
            )
        if isinstance(word, str) and word.startswith(self._foreign):
            self._profile.foreign[word] = self._profile.foreign.get(word, 0) + 1

    def _code(self, category: str, name: Any) -> tuple[int, ...]:
        """Return the numbers of a new name and of its category; nothing where nobody reads it."""
        if not isinstance(name, str):
            raise TypeError(f"{name!r:.40} is not a name")
        if category == "python_function" and not name.startswith(kineto_words("module")):
            return ()
        words = self._profile.names, self._profile.categories
        return tuple(map(_number, self._codes, words, (name, category)))


def _number(known: dict[str, int], words: list[str], word: str) -> int:
    """Return the number of a word, giving it one where it is new."""
    if word not in known:
        known[word] = len(words)
        words.append(word)
    return known[word]


def _check_shapes(details: dict[str, Any]) -> None:
    """Refuse shapes and types of arguments that are none, or not one each."""
    shapes, types = details.get("shapes", []), details.get("types", [])
    if not isinstance(shapes, list) or not isinstance(types, list):
        raise ValueError(f"{shapes!r:.40} and {types!r:.40} are not lists of shapes and types")
    if "shapes" in details and "types" in details and len(shapes) != len(types):
        raise ValueError(f"it has the shapes of {len(shapes)} arguments and the types of {len(types)}")
    if not all(isinstance(word, str) for word in types):
        raise ValueError(f"{types!r:.40} are not types")
    for shape in shapes:
        several = isinstance(shape, list) and bool(shape) and isinstance(shape[0], list)
        for sizes in shape if several else [shape]:
            if not is_shape(sizes):
                raise ValueError(f"{sizes!r:.40} is not a shape")


def _to_ns(stamp: Any, scale: int) -> int:
    """Return a time in nanoseconds, with all its digits; ValueError where it is no number or no clock's."""
    if stamp.__class__ not in (int, str):
        raise ValueError(f"{stamp!r:.40} is not a time")
    try:
        exact = Decimal(stamp) * scale
        if not -_LIMIT < exact < _LIMIT:
            raise ValueError
        return int(exact.to_integral_value(ROUND_HALF_UP))
    except (ArithmeticError, ValueError):
        raise ValueError(f"{stamp} is not a time") from None
