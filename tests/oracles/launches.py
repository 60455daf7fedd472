"""What a launch takes Megatron-LM's host: steps of its functional tests, which wait for it, beside simulated ones.

The model of these tests is so small (12 layers, hidden 512) that the host decides its step. A step is simulated with
several times of a launch, and the one looked for under which as many steps are predicted too long as too short. It is
fitted on the cases of one stage whose ranks share no sequence, and judged on the others.

References
----------
Megatron-LM, ``training_log``: ``iteration-time`` is the mean of a logged interval [s], one iteration here.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from trioflow.base.errors import TrioflowError
from trioflow.hardware.platform import load_platform
from trioflow.prediction.assembly import predict
from trioflow.prediction.question import Options, time_operators
from trioflow.trace.language.read import trace_of
from trioflow_evaluation.clusters.bridge import CONFIG, DEVICES, GPUS, plan_case

STEP = "iteration-time"
LAUNCHES_S = (60e-6, 90e-6, 120e-6, 150e-6, 180e-6)
"""Times of a launch that steps are simulated with [s]; between them a step is taken to be a line."""
_WARM_UP = 3
"""One part of so many of the logged iterations are left out, the first ones."""
_KEY = "launch_megatron_s"


def judge_launches(files: Iterable[str | Path]) -> pd.DataFrame:
    """Return what was measured and simulated of each test that logged its iterations.

    ``files``: ``golden_values_dev_dgx_<device>.json`` beside ``model_config.yaml``. Returns a row a case, in order:
    ``case``, ``device``, ``measured_s`` (median of the iterations after warm-up), ``fitted`` (whether it is of those
    that a launch is fitted on), a column for each of `LAUNCHES_S` with the step under it [s], and ``refused`` with why
    there is none.
    """
    rows, known = [], dict[Any, list[float]]()
    for path in sorted(Path(file) for file in files):
        values = json.loads(path.read_text(encoding="utf-8")).get(STEP, {}).get("values", {})
        logged = [float(value) for value in values.values() if value != "nan"]
        if not logged:
            continue
        device = path.stem.rpartition("_")[2]
        row: dict[str, Any] = {
            "case": path.parent.name,
            "device": device,
            "measured_s": float(np.median(logged[len(logged) // _WARM_UP :])),
            "refused": "",
            "fitted": False,
        }
        try:
            found, plan, batch = plan_case(path.parent / CONFIG)
            same = (replace(found.model, name=""), *sorted(found.step.items()), found.stages)
            row["fitted"] = plan.pipeline == plan.context == 1
            key = (device, repr(same), plan, batch)
            if key not in known:
                known[key] = _simulate(found, plan, batch, device)
            row |= {name_step(n): step_s for n, step_s in zip(LAUNCHES_S, known[key], strict=True)}
        except TrioflowError as error:
            row["refused"] = getattr(error, "problem", str(error))
        rows.append(row)
    return pd.DataFrame(rows)


def _simulate(found: Any, plan: Any, batch: int, device: str) -> list[float]:
    platform = load_platform(f"dgx-{device}", GPUS)
    times = time_operators(trace_of(found, {}), DEVICES[device])
    options = Options(stages=found.name_stages(), memory=False)
    return [
        predict(
            times, plan, replace(platform, host={**platform.host, _KEY: launch_s}), batch=batch, options=options
        ).step_time_s
        for launch_s in LAUNCHES_S
    ]


def name_step(launch_s: float) -> str:
    """Return the column of steps under a time of a launch."""
    return f"step_{launch_s * 1e6:.0f}us_s"


def fit_launch_s(rows: pd.DataFrame) -> float:
    """Return the time of a launch [s] under which half of the steps are predicted too long."""
    steps = rows[[name_step(n) for n in LAUNCHES_S]].to_numpy(np.float64)
    measured = rows["measured_s"].to_numpy(np.float64)
    bias = [float(np.median(np.log(measured / steps[:, n]))) for n in range(len(LAUNCHES_S))]
    return float(np.interp(0.0, bias[::-1], LAUNCHES_S[::-1]))


def judge_fit(rows: pd.DataFrame) -> tuple[float, Sequence[float]]:
    """Return the time of a launch [s], and the errors of the steps that it was not fitted on, predicted over measured less 1."""
    given = rows[rows["refused"] == ""]
    known, left = given[given["fitted"]], given[~given["fitted"]]
    launch_s = fit_launch_s(known)
    predicted = [
        float(np.interp(launch_s, LAUNCHES_S, [row[name_step(n)] for n in LAUNCHES_S]))
        for row in left.to_dict("records")
    ]
    errors = np.array(predicted) / left["measured_s"].to_numpy(np.float64) - 1.0
    return launch_s, errors.tolist()


_LAUNCH, _WAIT, _COPY = "LaunchKernel", "ynchronize", "Memcpy"
_LONGEST_COPY_US, _LONGEST_US = 30.0, 1000.0
_FEWEST = 100
"""Launches of a thread that takes part in a step."""


def measure_launch_s(profile: str | Path) -> float:
    """Return the mean interval between launches of an eager program's host threads [s], from a Kineto profile.

    Intervals with a wait for the device (a synchronisation, a copy of more than 30 us) are left out, and those of
    more than 1 ms, in which the program does something else. The profiler's own time is in them.
    """
    with gzip.open(profile, "rt", encoding="utf-8") as stream:
        events = json.load(stream)["traceEvents"]
    threads: dict[Any, list[tuple[float, str, float]]] = {}
    for event in events:
        if event.get("ph") == "X" and "runtime" in str(event.get("cat", "")).lower():
            one = (float(event["ts"]), str(event["name"]), float(event["dur"]))
            threads.setdefault(event["tid"], []).append(one)
    found: list[float] = []
    for calls in threads.values():
        intervals, last = list[float](), None
        for start_us, name, duration_us in sorted(calls):
            if _LAUNCH in name:
                intervals += [start_us - last] if last is not None else []
                last = start_us
            elif _WAIT in name or (_COPY in name and duration_us > _LONGEST_COPY_US):
                last = None
        if len(intervals) >= _FEWEST:
            found += [one for one in intervals if one < _LONGEST_US]
    return float(np.mean(found)) * 1e-6
