"""Tables of fitted cost models and of their validation."""

from __future__ import annotations

import pyarrow as pa

from trioflow.tables.columns import FLOAT, INT, TEXT, column

OPERATOR_FIT = pa.schema([
    column("operator_class", TEXT, "class that shares one regression"),
    column("phase", TEXT, "forward, backward or optimizer"),
    column("driver", TEXT, "feature that correlates best with the time: flop, read_bytes or write_bytes"),
    column("operators", INT, "operators fitted"),
    column("r_squared", FLOAT, "share of the variance explained in the sample", null=True),
    column("time_share", FLOAT, "share of the fitted time that the class takes"),
    column("held_out_error", FLOAT, "sum of predicted over sum of recorded time less one, with the workload left out", null=True),
    column("held_out_absolute_error", FLOAT, "mean absolute relative error over operators weighted by time, with the workload left out", null=True),
])  # fmt: skip

VALIDATION = pa.schema([
    column("set", TEXT, "set of cases: batch-change, new-gpu, leave-workload-out, operator-data or collectives"),
    column("model", TEXT, "model that predicted, by name"),
    column("case", TEXT, "what was predicted"),
    column("group", TEXT, "part of the set that is averaged by itself, such as a phase, a class or a distance"),
    column("device", TEXT, "device or platform of the measured value"),
    column("source", TEXT, "what the model was given: device, batch, sizes or ranks"),
    column("quantity", TEXT, "operator_sum, end_to_end, operator or collective"),
    column("measured_s", FLOAT, "measured time", "s"),
    column("predicted_s", FLOAT, "predicted time", "s"),
    column("low_s", FLOAT, "lower end of the 80 % interval", "s", null=True),
    column("high_s", FLOAT, "upper end of the 80 % interval", "s", null=True),
    column("oracle_s", FLOAT, "sum of the measured operators of the target, or the median of repeats: what a perfect operator model would say", "s", null=True),
    column("extrapolated", FLOAT, "share of the time predicted outside the fitted range"),
])  # fmt: skip
