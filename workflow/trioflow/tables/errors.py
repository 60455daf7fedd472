"""Tables of errors: predictions beside measured steps."""

from __future__ import annotations

import pyarrow as pa

from trioflow.tables.columns import FLOAT, INT, TEXT, column

ERRORS = pa.schema([
    column("experiment", TEXT, "name of the experiment"),
    column("set", TEXT, "set of experiments that is averaged together"),
    column("workload", TEXT, "workload"),
    column("plan", TEXT, "parallel plan"),
    column("ranks", INT, "processes"),
    column("batch", INT, "samples of the whole step"),
    column("measured_s", FLOAT, "median of the measured step", "s"),
    column("measured_low_s", FLOAT, "lower quartile of the measured step", "s"),
    column("measured_high_s", FLOAT, "upper quartile of the measured step", "s"),
    column("rounds", INT, "measured rounds"),
    column("simulated_s", FLOAT, "predicted step, anchored on the session's single-rank steps", "s"),
    column("low_s", FLOAT, "lower end of the 80 % interval", "s"),
    column("high_s", FLOAT, "upper end of the 80 % interval", "s"),
    column("relative_error", FLOAT, "simulated over measured less one"),
    column("trace_only_s", FLOAT, "predicted step from the trace alone, without the session's anchor", "s"),
    column("trace_only_error", FLOAT, "trace-only prediction over measured less one"),
    column("baseline_s", FLOAT, "baseline: the traced step divided by its share of the work, communication free", "s"),
    column("baseline_error", FLOAT, "baseline over measured less one"),
    column("compute_s", FLOAT, "simulated compute of the busiest rank", "s"),
    column("communication_s", FLOAT, "simulated communication of the busiest rank", "s"),
    column("exposed_communication_s", FLOAT, "communication that no compute hides, same rank", "s"),
    column("confidence", TEXT, "measured, interpolated, extrapolated or uncalibrated"),
    column("source", TEXT, "where the measured value comes from"),
    column("simulator_wall_s", FLOAT, "wall time of the simulation", "s"),
    column("warnings", TEXT, "what the reader must know; empty for nothing"),
])  # fmt: skip

PUBLISHED_CASES = pa.schema([
    column("set", TEXT, "set of cases, such as h100-4gpu, resnet50-a40 or vtrain-a100"),
    column("case", TEXT, "name of the case, once in its set"),
    column("workload", TEXT, "model that was trained"),
    column("source_gpu", TEXT, "GPU whose trace or model graph the prediction starts from; empty for a graph without times"),
    column("platform", TEXT, "platform that was measured and is predicted"),
    column("ranks", INT, "GPUs"),
    column("plan", TEXT, "plan in short, such as single, ddp4, tp4, gpipe4-m1 or t2-d2-p2-m8"),
    column("batch", INT, "samples of the whole step"),
    column("mode", TEXT, "what the measured time spans, such as forward and backward, or a whole step"),
    column("measured_s", FLOAT, "measured time", "s"),
    column("source", TEXT, "file of the measured value"),
    column("spread", FLOAT, "half the range of the source's repeats over their median; null where it gives none", null=True),
    column("predicted_s", FLOAT, "predicted time", "s"),
    column("low_s", FLOAT, "lower end of the 80 % interval", "s", null=True),
    column("high_s", FLOAT, "upper end of the 80 % interval", "s", null=True),
    column("confidence", TEXT, "what the prediction rests on: measured, interpolated, extrapolated or uncalibrated"),
    column("oracle_s", FLOAT, "the prediction with measured compute in place of predicted compute; null where none was measured", "s", null=True),
    column("triosim_s", FLOAT, "the same by TrioSim's public rules; null for a plan that they do not know", "s", null=True),
    column("analytical_s", FLOAT, "the same by FLOPs over peak rate or bytes over bandwidth; null where the operators are unknown", "s", null=True),
    column("regression_s", FLOAT, "the same by a plain regression on other cases of the set; null where there is none", "s", null=True),
    column("learned_from", TEXT, "what was fitted on what; never the judged row"),
    column("changes", TEXT, "what else differs between what was traced and what was measured; empty for nothing"),
])  # fmt: skip
