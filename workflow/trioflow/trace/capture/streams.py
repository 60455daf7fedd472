"""Which stream each call of a step goes to, and which streams wait for one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_MARK = "_trioflow_mark"


class StreamLog:
    """Notes the streams of operators, and which earlier ones they wait for, of a step that runs.

    On a CPU, PyTorch's stand-ins ``torch.cpu.Stream`` and ``torch.cpu.Event`` are asked what a
    GPU's would be. Stream 0 is the one that the step starts in.
    """

    def __init__(self, kind: str) -> None:
        self._device: Any = torch.cuda if kind == "cuda" else torch.cpu
        self._numbers: dict[Any, int] = {}
        self._last: dict[int, int] = {}
        self._owed: dict[int, list[int]] = {}
        self.of: list[int] = []
        self.waits: list[tuple[int, int]] = []

    def add(self, op_id: int, beside: bool) -> None:
        """Note that an operator is next in the current stream; one ``beside`` it holds nothing up."""
        number = self._current()
        self.of.append(number)
        self.waits += [(op_id, earlier) for earlier in self._owed.get(number, [])]
        if not beside:
            self._owed.pop(number, None)
            self._last[number] = op_id

    def list_streams(self) -> dict[str, list[int]]:
        """Return the operators of each stream but the first."""
        numbers = sorted(set(self.of) - {0})
        return {str(n): [i for i, own in enumerate(self.of) if own == n] for n in numbers}

    def list_waits(self) -> list[list[int]]:
        """Return what waits for what, each pair once."""
        return [list(pair) for pair in sorted(set(self.waits))]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what streams are asked to wait for; the current one is number 0."""
        stream, event, log = self._device.Stream, self._device.Event, self
        self._current()

        def wait_stream(one: Any, other: Any) -> None:
            log._owe(one, log._reached(other))

        def record_event(one: Any, event: Any = None) -> Any:
            made = log._device.Event() if event is None else event
            setattr(made, _MARK, log._reached(one))
            return made

        def record(one: Any, stream: Any = None) -> None:
            setattr(one, _MARK, log._reached(stream or log._device.current_stream()))

        def wait_event(one: Any, event: Any) -> None:
            log._owe(one, getattr(event, _MARK, []))

        def wait(one: Any, stream: Any = None) -> None:
            log._owe(stream or log._device.current_stream(), getattr(one, _MARK, []))

        with ExitStack() as changed:
            for owner, function in (
                (stream, wait_stream), (stream, record_event), (stream, wait_event),
                (event, record), (event, wait),
            ):  # fmt: skip
                changed.enter_context(_following(owner, function))
            yield

    def _current(self) -> int:
        return self._number(self._device.current_stream())

    def _number(self, stream: Any) -> int:
        key = getattr(stream, "cuda_stream", id(stream))
        return self._numbers.setdefault(key, len(self._numbers))

    def _reached(self, stream: Any) -> list[int]:
        """Return what a stream has been asked to do last, and what it was to wait for after that."""
        number = self._number(stream)
        last = [self._last[number]] if number in self._last else []
        return [*last, *self._owed.get(number, [])]

    def _owe(self, stream: Any, operators: list[int]) -> None:
        owed = self._owed.setdefault(self._number(stream), [])
        owed += [one for one in operators if one not in owed]


@contextmanager
def _following(owner: type, function: Callable[..., Any]) -> Iterator[None]:
    """Let a method be noted as well as done."""
    name = function.__name__
    own = vars(owner).get(name)
    done = getattr(owner, name)

    def both(one: Any, *args: Any, **named: Any) -> Any:
        result = done(one, *args, **named)
        noted = function(one, *args, **named)
        if result is not None and name == "record_event":
            setattr(result, _MARK, getattr(noted, _MARK))
        return noted if result is None else result

    setattr(owner, name, both)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
