"""What launches take the host: recorded, or of a platform, kernel by kernel or a CUDA graph at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trioflow.base.precision_recipes import WORDS
from trioflow.base.units import ns_to_s
from trioflow.costmodel.features import Floats
from trioflow.tables import PHASES
from trioflow.trace.facts import Facts
from trioflow.trace.store import Trace, pipeline_units

PREDICTED = "predicted"
"""The fact ``step_time_source`` of a trace whose times a model gave."""
NO_HOST = "; host time is not part of them"
"""How the warning of such times ends where the platform does not say what a launch takes."""


def host_times(trace: Trace, operators: pd.DataFrame, launch_s: float) -> Floats:
    """Return the host time of some of a trace's operators [s]: recorded, or ``launch_s`` of each predicted one.

    A view has none then: PyTorch's host time of it is a small part of a kernel's. Of a CUDA graph, which a block's
    forward or backward is (``cuda_graphs`` of the language model), the first one launches all.
    """
    if trace.facts.step_time_source == PREDICTED and launch_s:
        launched = operators["device_ns"].to_numpy() > 0
        if (trace.facts.language_model or {}).get("cuda_graphs"):
            launched &= ~_find_replayed(trace, operators, launched)
        return np.where(launched, launch_s, 0.0)
    return np.array([ns_to_s(t) for t in operators["cpu_ns"]], dtype=np.float64)


def _find_replayed(
    trace: Trace, operators: pd.DataFrame, launched: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return which operators are in a block's CUDA graph, but not the first of it that is ``launched``."""
    place = {path: n for n, paths in enumerate(pipeline_units(trace).values(), 1) for path in paths}
    blocks = {n for path, n in place.items() if path.rpartition(".")[2].isdigit()}
    modules = operators["module"].to_numpy(dtype=str)
    known = {
        m: next((n for path, n in place.items() if f"{m}.".startswith(f"{path}.")), 0)
        for m in set(modules)
    }
    block = np.array([known[m] * (known[m] in blocks) for m in modules], dtype=np.int64)
    runs = np.flatnonzero(launched)
    code = (
        block[runs] * len(PHASES)
        + operators["phase"].map(PHASES.index).to_numpy(dtype=np.int64)[runs]
    )
    first = np.diff(code, prepend=-1) != 0
    replayed = block > 0
    replayed[runs[first]] = False
    return replayed


def find_launch_s(host: Mapping[str, float], facts: Facts) -> float:
    """Return what a launch takes the host of a platform where the step's framework runs [s]; 0 where nobody knows.

    ``host``: the platform's named costs; ``launch_s`` is that of every framework without one of its own.
    """
    return float(host.get(f"launch_{facts.recipe.framework}_s", host.get("launch_s", 0.0)))


def mention_launches(warnings: Sequence[str], launch_s: float, facts: Facts) -> list[str]:
    """Return warnings that say what a launch was taken to last, in place of saying that none was."""
    said = (
        f"; the host takes {launch_s * 1e6:.3g} us for each, that of {WORDS[facts.recipe.framework]}"
        " (docs/platforms.md says where it was measured)"
    )
    return [text.replace(NO_HOST, said) if launch_s else text for text in warnings]
