"""A model of operator cost for tests: recorded times, in proportion to the work."""

import pandas as pd


class ProportionalModel:
    """Times grow with the bytes and FLOPs; everything else stays as recorded."""

    bytes_per_s = 1e9

    def _frame(self, time_s, index):
        return pd.DataFrame({"time_s": time_s, "low_s": time_s, "high_s": time_s, "extrapolated": False}, index=index)

    def predict(self, operators):
        moved = operators["read_bytes"] + operators["write_bytes"]
        return self._frame(moved.astype(float) / self.bytes_per_s, operators.index)

    def rescale(self, operators, target):
        work = [
            (frame["flop"] + frame["read_bytes"] + frame["write_bytes"]).astype(float) for frame in (operators, target)
        ]
        factor = (work[1] / work[0]).where(work[0] > 0, 1.0)
        return self._frame(operators["device_ns"].astype(float) / 1e9 * factor, operators.index)

    def step_interval(self, kind="rescale", distance=None):
        return (0.9, 1.1)
