"""One call of a campaign: take over what is finished, go on, pack, stop in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType

import torch

from trioflow.base.errors import InputError
from trioflow.base.units import format_bytes
from trioflow.campaign.items import Item, Result, State
from trioflow.campaign.machine import describe_machine, read_clocks, run_ceiling
from trioflow.campaign.packing import ITEMS_FILE, Limits, Pack, load_pack, pack_campaign
from trioflow.campaign.runner import Budget, DeviceLost, Report, Runner, Stopped
from trioflow.campaign.sweeps import free_memory, run_sweep
from trioflow.campaign.workload_captures import run_workload

__all__ = ["CallSettings", "DeviceLost", "run_call"]

_RESERVE_S, _RESERVE_SHARE = 12.0, 0.1
"""Time kept for the last packing, and the share of a short call that it is at most."""

_PACK_EVERY_S = 60.0
"""A call that is killed outright leaves packed files no older than this and one item."""


class _Signals:
    """Ends the call on a signal or when its time is up, by raising ``Stopped`` in the main thread."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.muted = False

    def receive(self, number: int, _: FrameType | None) -> None:
        """Note the signal and stop whatever runs."""
        self.received = self.received or number
        if not self.muted:
            raise Stopped

    @contextmanager
    def heeded(self, time_s: float) -> Iterator[None]:
        """Heed signals inside the block, the alarm after some seconds [s] among them."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)
        before = {number: signal.signal(number, self.receive) for number in numbers}
        # It repeats: an exception raised inside a destructor is swallowed by Python.
        signal.setitimer(signal.ITIMER_REAL, max(time_s, 1e-3), 2.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class CallSettings:
    """How one call runs."""

    output: Path  # where the packed files go; those of an earlier call are taken over
    device: str
    until_s: float  # when the call must be over, on the monotonic clock [s]
    whole_s: float
    only: str = "*"  # pattern of the names of the items to do
    # Where finished items lie until they are packed; below the output by default.
    state_folder: str | None = None
    resume: Sequence[str] = ()  # outputs of earlier calls to take over
    limits: Limits = field(default_factory=Limits)
    # Few repeats and small sizes; forget failures of earlier calls.
    quick: bool = False
    retry_failed: bool = False


def run_call(items: Sequence[Item], settings: CallSettings) -> int:
    """Do as many items as fit until a time, pack what is finished, and return the exit status (128 and a signal's number).

    Raises InputError when what is to be taken over is no campaign's or another device's, DeviceLost
    when the device refuses further work.
    """
    output, device = settings.output, settings.device
    reserve_s = min(_RESERVE_S, _RESERVE_SHARE * settings.whole_s)
    state = State(settings.state_folder or output / "state")
    _take_over(state, output, settings.resume)
    if settings.retry_failed:
        state.forget(("failed",))
    _begin_session(state, device, settings.quick)
    budget = Budget(time.monotonic, settings.until_s - reserve_s, settings.whole_s - reserve_s)
    chosen = [item for item in items if fnmatch(item.name, settings.only)]
    before = sum(item.name in state.results for item in chosen)
    _print_line(f"{len(chosen)} items, {before} finished before; {budget.left_s():.0f} s to go")
    signals, executor = _Signals(), Executor(device, settings.quick)
    packer = _Packer(items, state, output, settings.limits, signals)
    runner = Runner(
        chosen, state, executor, budget, check_device=executor.check_device, notify=_print_line,
        after_item=packer.pack_now_and_then,
    )  # fmt: skip
    lost, report = False, None
    with signals.heeded(budget.left_s()):
        try:
            report = runner.run()
        except DeviceLost:
            lost = True
        except Stopped:
            pass
        signals.muted = True  # nothing may stop the last packing
        _end_session(state, device)
        pack = packer.pack()
    _summarize(chosen, state, report, pack, output)
    if lost:
        raise DeviceLost
    if not pack.left_out:
        state.discard()
    ended_by = signals.received
    return 128 + ended_by if ended_by in (signal.SIGTERM, signal.SIGINT) else 0


class _Packer:
    """Packs from time to time, and at the end."""

    def __init__(
        self, items: Sequence[Item], state: State, output: Path, limits: Limits, signals: _Signals
    ) -> None:
        self.items, self.state, self.output, self.limits = items, state, output, limits
        self.signals, self.packed_at_s = signals, time.monotonic()

    def pack_now_and_then(self) -> None:
        """Pack when the last time is long ago; stop where a swallowed signal asked for it."""
        if self.signals.received is not None:
            raise Stopped
        if time.monotonic() - self.packed_at_s > _PACK_EVERY_S:
            self.pack()

    def pack(self) -> Pack:
        """Pack all that is finished."""
        pack = pack_campaign(self.items, self.state, self.output, self.limits)
        self.packed_at_s = time.monotonic()
        return pack


def _take_over(state: State, output: Path, resume: Sequence[str]) -> None:
    """Take over the output's own packed files and earlier outputs."""
    for folder in (output, *map(Path, resume)):
        own = folder == output
        if (folder / "state" / "items").is_dir() and folder / "state" != state.folder:
            state.take_over(State(folder / "state"))
            own = True  # the packed files beside it may be missing
        if not own or (folder / ITEMS_FILE).exists():
            load_pack(folder, state)


def _begin_session(state: State, device: str, quick: bool) -> None:
    """Note what this call found, and refuse to mix devices."""
    machine = describe_machine(device)
    for session in state.sessions:
        before, now = session["machine"]["device_name"], machine["device_name"]
        if before != now:
            raise InputError(
                f"what is finished comes from {before!r}, this device is {now!r}",
                fix="start in an empty output folder",
            )
        if session["quick"] != quick:
            raise InputError(
                "items of --quick have the names of full ones and cannot be mixed with them",
                fix="start in an empty output folder",
            )
    state.sessions.append(
        {"machine": machine, "quick": quick, "clocks_before": read_clocks(device)}
    )
    state.write_sessions()


def _end_session(state: State, device: str) -> None:
    state.sessions[-1]["clocks_after"] = read_clocks(device)
    state.write_sessions()


def _print_line(line: str) -> None:
    print(line, flush=True)


def _summarize(
    items: Sequence[Item], state: State, report: Report | None, pack: Pack, output: Path
) -> None:
    """Print what is finished, what is left and where it lies."""
    finished = sum(item.name in state.results for item in items)
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(pack.files.items()))
    print(f"{finished} of {len(items)} items finished; in {output}: {sizes}")
    for name in report.too_long if report else []:
        print(f"not in any call this long: {name}; give it more --minutes")
    for name, why in pack.left_out.items():
        print(f"left out of the packed files: {name}: {why}")
    if finished < len(items):
        print("call it again with the same --output, or with --resume, to go on")


_WARM_UP_S = 1.0


def _raise_clocks(time_s: float) -> None:
    """Keep the device busy for a while [s]: an idle one runs at a fraction of its clock."""
    block = torch.randn(4096, 4096, device="cuda")
    until = time.monotonic() + time_s
    while time.monotonic() < until:
        torch.mm(block, block)
        torch.cuda.synchronize()


class Executor:
    """Does items, each with the device's memory free of the one before."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = device, quick
        if device == "cuda":
            _raise_clocks(0.05 if quick else _WARM_UP_S)

    def __call__(self, item: Item, folder: Path) -> Result:
        """Do one item; temporary files go into the folder."""
        free_memory(self.device)
        arguments = item.arguments
        if item.kind == "ceiling":
            return run_ceiling(item.name, arguments["part"], self.device, self.quick)
        if item.kind == "sweep":
            return run_sweep(
                item.name, arguments["operation"], arguments["precision"], arguments["points"],
                self.device, folder, self.quick,
            )  # fmt: skip
        return run_workload(arguments["row"], arguments["batch"], self.device, self.quick, folder)

    def check_device(self) -> bool:
        """Return whether the device still works, after freeing what a failed item held."""
        if self.device != "cuda":
            return True
        try:
            free_memory(self.device)
            torch.ones(1, device="cuda").add_(1)
            torch.cuda.synchronize()
        except Exception:  # after an illegal access every call of this process fails
            return False
        return True
