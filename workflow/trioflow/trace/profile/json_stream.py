"""Reading one long list out of a JSON file of any size, entry by entry."""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from trioflow.base.errors import TraceError
from trioflow.base.input_files import check_file

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
