"""Running a campaign's items inside a time budget, in order of value."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioflow.base.units import ns_to_s, s_to_ns
from trioflow.campaign.items import Item, Result, State

SAFETY = 1.25
"""An item is started only when its estimate, longer by this factor, still fits."""

_RATIO_LIMITS = (0.2, 5.0)
"""How far what items really took may move the estimates of others."""

_RECENT = 4
"""Finished items of a kind that the correction looks back on; the slowest of them counts."""

KILLS = 2
"""An item during which the process died this often is not tried again."""

_MIXED = ("bf16", "fp16")

_ERROR_CHARACTERS = 2_000

Execute = Callable[[Item, Path], Result]


class Stopped(BaseException):
    """The call must end now: a signal, or the time is up. No item's handler may swallow it."""


class DeviceLost(BaseException):
    """The device refuses all further work in this process; a new process may use it again."""


@dataclass
class Budget:
    """The time of one call."""

    clock: Callable[[], float]  # seconds of a clock that only goes forward [s]
    deadline_s: float  # when nothing may run any more, on that clock [s]
    whole_s: float

    def left_s(self) -> float:
        """Return the time left [s]."""
        return self.deadline_s - self.clock()


class Runner:
    """Runs items one after another and stores what came of each.

    ``execute``: does one item in a scratch folder; ``check_device``: whether it still works;
    ``after_item``: packs now and then.
    """

    def __init__(
        self,
        items: Sequence[Item],
        state: State,
        execute: Execute,
        budget: Budget,
        *,
        check_device: Callable[[], bool] = lambda: True,
        notify: Callable[[str], None] = lambda line: None,
        after_item: Callable[[], None] = lambda: None,
    ) -> None:
        self.items, self.state, self.execute, self.budget = items, state, execute, budget
        self.check_device, self.notify, self.after_item = check_device, notify, after_item
        self.known = {item.name: item for item in items}

    def run(self) -> list[str]:
        """Do everything that still fits, most valuable first; return the names of what fits into no call this long.

        Raises Stopped when a signal ends the call (the item in flight is lost), DeviceLost when the
        device refuses further work.
        """
        too_long = []
        for item in self.items:
            if item.name in self.state.results:
                continue
            refusal = self._refuse(item)
            if refusal:
                self._store(item, refusal)
                continue
            estimate_s = self.estimate(item)
            if estimate_s * SAFETY > self.budget.left_s():
                if estimate_s * SAFETY > self.budget.whole_s:
                    too_long.append(item.name)
                continue
            self._run_one(item)
        return too_long

    def estimate(self, item: Item) -> float:
        """Return how long an item is expected to take [s]: as the workload's others, or the first guess.

        That is corrected by the slowest of the last items of the kind.
        """
        guess_s = self._from_sibling(item)
        if guess_s is None:
            guess_s = item.estimate_s * self._ratio(item)
        ran_s = [s for s in self.state.interruptions.get(item.name, []) if s is not None]
        return max([guess_s, *(s * 1.5 for s in ran_s)])

    def _ratio(self, item: Item) -> float:
        """Return real over guessed time of the last items alike: same kind, same sweep."""
        alike = [
            ns_to_s(self.state.results[other.name].time_ns) / other.estimate_s
            for other in self.items
            if other.name in self.state.results
            and self.state.results[other.name].status == "done"
            and other.kind == item.kind
            and other.arguments.get("operation") == item.arguments.get("operation")
        ]
        low, high = _RATIO_LIMITS
        return min(max([low, *alike[-_RECENT:]]), high) if alike else 1.0

    def _from_sibling(self, item: Item) -> float | None:
        """Estimate a workload's item from another of the workload: its steps grow with the batch."""
        if item.kind != "workload":
            return None
        found: list[float] = []
        for other in self.items:
            result = self.state.results.get(other.name)
            same = other.kind == "workload" and _workload(other) == _workload(item)
            if not same or result is None or "steps" not in result.facts:
                continue
            growth = item.arguments["batch"] / other.arguments["batch"]
            steps_s = result.facts["steps"] * result.facts["step_time_s"]
            # What is not a step (building, writing profiles) does not grow; steps may not shrink either.
            rest_s = max(ns_to_s(result.time_ns) - steps_s, 0.0)
            found.append(rest_s + steps_s * max(growth, 0.5))
        return max(found[-2:]) if found else None

    def _refuse(self, item: Item) -> Result | None:
        """Return the result of an item that is not worth trying, or None."""
        if self.state.interruptions.get(item.name, []).count(None) >= KILLS:
            return Result("failed", f"the process died {KILLS} times while it ran")
        if item.kind != "workload":
            return None
        for other in self.items:
            result = self.state.results.get(other.name)
            if (
                result is not None
                and result.status == "out_of_memory"
                and other.kind == "workload"
                and _workload(other) == _workload(item)
                and _is_mixed(other) == _is_mixed(item)
                and other.arguments["batch"] <= item.arguments["batch"]
            ):
                words = f"batch {other.arguments['batch']} already ran out of memory"
                return Result("skipped", words, facts=_request(item))
        return None

    def _run_one(self, item: Item) -> None:
        """Run one item and store what came of it."""
        start_s = self.budget.clock()
        self.state.begin(item.name)
        try:
            with self.state.scratch() as folder:
                result = self.execute(item, folder)
        except (Stopped, KeyboardInterrupt):
            self.state.interrupt(item.name, self.budget.clock() - start_s)
            raise
        except Exception as error:
            result = _result_of_error(error, item)
            _drop_frames(error)
        result.time_ns = s_to_ns(self.budget.clock() - start_s)
        self._store(item, result)
        self.state.end()
        if result.status != "done" and not self.check_device():
            raise DeviceLost
        self.after_item()

    def _store(self, item: Item, result: Result) -> None:
        result.session = max(len(self.state.sessions) - 1, 0)
        self.state.interruptions.pop(item.name, None)
        self.state.store(item.name, result)
        remark = result.error or str(result.facts.get("warning", ""))
        words = f": {remark.splitlines()[0]}" if remark else ""
        self.notify(
            f"{item.name}: {result.status} in {ns_to_s(result.time_ns):.1f} s,"
            f" {max(self.budget.left_s(), 0.0):.0f} s left{words}"
        )


def _workload(item: Item) -> Any:
    return item.arguments["row"]["workload"]


def _is_mixed(item: Item) -> bool:
    """Return whether activations in a precision take half the memory; those of a kind need the same."""
    return item.arguments["row"].get("precision") in _MIXED


def _drop_frames(error: BaseException | None) -> None:
    """Empty the frames of a failure and of what led to it: their tensors could not be freed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _request(item: Item) -> dict[str, Any]:
    """Return what was asked for, kept also where it failed."""
    arguments: Mapping[str, Any] = item.arguments
    if item.kind == "workload":
        return {
            "workload": _workload(item),
            "batch": arguments["batch"],
            "precision": arguments["row"].get("precision"),
        }
    return {key: value for key, value in arguments.items() if key != "points"}


def _result_of_error(error: Exception, item: Item) -> Result:
    """Return the result of an item that raised."""
    text = f"{type(error).__name__}: {error}".strip()
    if is_out_of_memory(error):
        return Result("out_of_memory", text[:_ERROR_CHARACTERS], facts=_request(item))
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f"{Path(last[0].filename).name}, line {last[0].lineno}: " if last else ""
    return Result("failed", (place + text)[:_ERROR_CHARACTERS], facts=_request(item))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on the device or the host."""
    # torch.OutOfMemoryError since 2.5, torch.cuda.OutOfMemoryError before; some libraries raise
    # a plain RuntimeError with these words, and their handles fail to be made in full memory.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    words = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return bool(kinds & {"OutOfMemoryError", "MemoryError"}) or any(
        word in str(error) for word in words
    )
