"""When tasks of a timeline run: the union of their times, lane by lane."""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from trioflow.engine.result import LaneIntervals, merge_lanes


def cover(tasks: pd.DataFrame, lane: ArrayLike = 0) -> LaneIntervals:
    """Return when any of some tasks runs, in each ``lane`` (a number for each task; all in one by default)."""
    start_s, end_s = (tasks[name].to_numpy(np.float64) for name in ("start_s", "end_s"))
    return merge_lanes(LaneIntervals(np.broadcast_to(lane, start_s.shape).astype(np.int64), start_s, end_s))
