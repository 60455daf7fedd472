"""Which device kernels were launched inside which annotation of a profile; needs no torch."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

from trioflow.trace.profile.kernels import LAUNCHES
from trioflow.trace.profile.kineto import DEVICE
from trioflow.units import us_to_ns


def kernels_by_window(
    events: Iterable[Mapping[str, Any]], windows: set[str]
) -> dict[str, tuple[int, list[str]]]:
    """Return each window's kernel time and the names of its kernels.

    Parameters
    ----------
    events : iterable of mapping
        Events of a Kineto profile. Windows do not overlap.
    windows : set of str
        Names of annotations; one of a name for each repeat.

    Returns
    -------
    dict of str to (int, list of str)
        Median over a window's repeats of the sum of its kernels' times [ns],
        and the kernels of its last repeat in order of launch.

    Notes
    -----
    A kernel belongs to the window in which the host launched it, on any
    thread: host times alone are compared, never with the device's clock.
    """
    complete = [e for e in events if isinstance(e, Mapping) and e.get("ph") == "X"]
    spans = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"]))
        for e in complete
        if e.get("cat") == "user_annotation" and e.get("name") in windows
    )
    kernels: dict[int, list[Mapping[str, Any]]] = {}
    for event in complete:
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") in DEVICE and correlation is not None:
            kernels.setdefault(correlation, []).append(event)
    starts = [start for start, _, _ in spans]
    launched: list[list[tuple[float, Mapping[str, Any]]]] = [[] for _ in spans]
    for event in complete:
        if event.get("cat") not in LAUNCHES:
            continue
        place = bisect_right(starts, float(event["ts"])) - 1
        if place >= 0 and float(event["ts"]) <= spans[place][1]:
            for kernel in kernels.get(event.get("args", {}).get("correlation"), []):
                launched[place].append((float(event["ts"]), kernel))
    found: dict[str, tuple[int, list[str]]] = {}
    for name in sorted(windows):
        repeats = [launched[n] for n, span in enumerate(spans) if span[2] == name and launched[n]]
        if repeats:
            times = [sum(us_to_ns(float(k["dur"])) for _, k in repeat) for repeat in repeats]
            last = sorted(repeats[-1], key=lambda pair: pair[0])
            found[name] = (round(statistics.median(times)), [str(k["name"]) for _, k in last])
    return found
