"""What a data sheet bounds: no operator is faster than its roofline, and none is lost below it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from trioflow.costmodel.features import FEATURES, Floats, base_class
from trioflow.costmodel.intervals import WIDEST_FACTOR
from trioflow.costmodel.new_gpu_rules import CARRY_OVER, TENSOR_CLASSES, device_rates, roofline_s
from trioflow.costmodel.products import PRODUCTS
from trioflow.hardware.device_sheet import FALLBACK_PRECISION, DeviceSheet


def roofline_times(rows: pd.DataFrame, sheet: DeviceSheet, precision: str) -> Floats:
    """Return the least time that a data sheet allows rows [s].

    Parameters
    ----------
    rows : DataFrame
        As ``operator_rows.sized_rows``.
    sheet : DeviceSheet
        The GPU.
    precision : str
        Of products; all else runs on the vector units.
    """
    flop, read, write = rows[list(FEATURES)].to_numpy(np.float64).T
    sized = rows if PRODUCTS[0] in rows.columns else rows.assign(**dict.fromkeys(PRODUCTS, 0.0))
    return roofline_s(flop, read + write, device_rates(sized, sheet, precision), CARRY_OVER)


def bound_times(
    time_s: Floats,
    launch_s: Floats,
    rows: pd.DataFrame,
    sheet: DeviceSheet,
    precisions: Mapping[str, str],
) -> Floats:
    """Return predicted times inside the bounds of a data sheet [s].

    Parameters
    ----------
    time_s, launch_s : ndarray
        Predictions of the rows, and of rows of the same class without any work [s].
    rows, sheet
        As in :func:`roofline_times`.
    precisions : mapping of str to str
        What the classes of products ran in; one that does not say is bounded by
        the fastest precision of the GPU.

    Notes
    -----
    Not faster than the roofline; not slower than a launch and
    ``WIDEST_FACTOR`` times the roofline, where intervals end, too.
    """
    bases = rows["operator_class"].map(base_class)
    fastest = max(sheet.peak_flop_per_s, key=sheet.peak_flop_per_s.__getitem__)
    ran = bases.map(lambda name: precisions.get(name, fastest))
    ran = ran.where(bases.isin(TENSOR_CLASSES), FALLBACK_PRECISION)
    least = np.zeros(len(rows))
    for precision in sorted(set(ran)):
        at = (ran == precision).to_numpy()
        least[at] = roofline_times(rows[at], sheet, precision)
    return np.asarray(np.clip(time_s, least, launch_s + WIDEST_FACTOR * least), np.float64)
