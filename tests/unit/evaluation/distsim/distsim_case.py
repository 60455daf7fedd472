"""A made-up step of two pipeline stages and two micro-batches, simulated and recorded."""

from collections.abc import Callable

import pandas as pd
from trioflow import tables
from trioflow.measure.records import MARKED, PROFILED, RECORDED_EVENTS, STEP_MARKS

PARTS = {
    # rank: (phase, micro-batch, start, end) [s]
    0: [
        ("forward", 0, 0.0, 1.0),
        ("forward", 1, 1.0, 2.0),
        ("backward", 0, 6.0, 8.0),
        ("backward", 1, 8.0, 9.0),
        ("optimizer", 0, 9.0, 10.0),
    ],
    1: [
        ("forward", 0, 1.5, 2.5),
        ("forward", 1, 2.5, 3.5),
        ("backward", 0, 3.5, 5.5),
        ("backward", 1, 5.5, 7.5),
        ("optimizer", 0, 7.5, 8.5),
    ],
}
STEP_S = 10.0
OPERATORS = {
    "forward": ["aten::linear", "aten::gelu", "aten::linear"],
    "backward": ["aten::mm", "aten::gelu_backward", "aten::mm"],
    "optimizer": ["aten::add_", "aten::add_"],
}
Place = Callable[[int, str, int, float], float]
"""Where an instant of a part is put: of rank, phase, micro-batch and time."""


def stay(rank: int, phase: str, micro_batch: int, time_s: float) -> float:
    return time_s


def make_timeline(place: Place = stay) -> pd.DataFrame:
    """The simulated step: operators of equal length, and a message either way for each micro-batch."""
    rows = []
    for rank, parts in PARTS.items():
        for phase, number, start, end in parts:
            names = OPERATORS[phase]
            each = (end - start) / len(names)
            for at, name in enumerate(names):
                limits = [place(rank, phase, number, start + each * (at + i)) for i in (0, 1)]
                rows.append((rank, "compute", "compute", name, phase, *limits, number))
            sends = (rank, phase) in ((0, "forward"), (1, "backward"))
            if phase != "optimizer":
                stream, kind = ("send", "send") if sends else ("receive", "recv")
                limits = (end, end + 0.25) if sends else (start - 0.25, start)
                rows.append((rank, stream, kind, kind, phase, *limits, number))
    columns = ["rank", "stream", "kind", "name", "phase", "start_s", "end_s", "micro_batch"]
    frame = pd.DataFrame(rows, columns=columns)
    updates = frame["phase"] == "optimizer"
    frame["micro_batch"] = frame["micro_batch"].astype("Int64").mask(updates)
    frame["stage"] = frame["rank"].astype("Int64")
    frame["message_bytes"] = frame["match_id"] = pd.array([pd.NA] * len(frame), "Int64")
    frame["task_id"] = range(len(frame))
    return frame[tables.TIMELINE.names]


def make_marks(place: Place = stay, rounds: int = 3, profiled: Place | None = None) -> pd.DataFrame:
    """Its recorded marks, and those of as many profiled rounds."""
    rows = []
    for recording, put in ((MARKED, place), (PROFILED, profiled or place)):
        for number in range(rounds):
            for rank, parts in PARTS.items():
                moved = [(p, m, put(rank, p, m, start), put(rank, p, m, end)) for p, m, start, end in parts]
                whole = ("", 0, 0.0, max(end for *_, end in moved))
                for phase, micro_batch, start, end in [whole, *moved]:
                    limits = (round(start * 1e9), round(end * 1e9))
                    rows.append(("x", recording, number, rank, phase, micro_batch, rank, *limits))
    return pd.DataFrame(rows, columns=STEP_MARKS.names)


def make_events(place: Place = stay) -> pd.DataFrame:
    """Its recorded events: the simulated ones elsewhere, messages from when their rank was there."""
    frame = make_timeline(place)
    messages = frame["kind"] != "compute"
    frame.loc[messages, "start_s"] -= 0.2
    frame["micro_batch"] = frame["micro_batch"].mask(messages)
    frame.loc[frame["phase"] == "optimizer", "micro_batch"] = 0
    frame["experiment"], frame["rounds"] = "x", 3
    keys = ["rank", "stream", "kind", "name", "phase", "micro_batch"]
    frame["occurrence"] = frame.groupby(keys, dropna=False).cumcount()
    return frame[RECORDED_EVENTS.names]
