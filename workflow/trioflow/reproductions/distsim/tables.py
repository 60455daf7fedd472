"""Tables of DistSim's evaluation on our own runs; ``tables`` writes and checks them."""

from __future__ import annotations

import pyarrow as pa

from trioflow.table_columns import FLOAT, INT, TEXT, column

TIMESTAMPS = pa.schema([
    column("experiment", TEXT, "experiment that was run and simulated"),
    column("plan", TEXT, "its plan"),
    column("rank", INT, "process"),
    column("stage", INT, "pipeline stage, from 0"),
    column("phase", TEXT, "forward, backward or optimizer"),
    column("micro_batch", INT, "micro-batch, from 0"),
    column("rounds", INT, "recorded rounds"),
    column("measured_start_s", FLOAT, "start after the step's start, median over rounds", "s"),
    column("measured_end_s", FLOAT, "end after the step's start, median over rounds", "s"),
    column("simulated_start_s", FLOAT, "the same, simulated", "s"),
    column("simulated_end_s", FLOAT, "the same, simulated", "s"),
    column("start_bias", FLOAT, "simulated less measured start over the measured step, median over rounds"),
    column("end_bias", FLOAT, "simulated less measured end over the measured step, median over rounds"),
    column("start_error", FLOAT, "absolute deviation of the start over the measured step, median over rounds"),
    column("end_error", FLOAT, "absolute deviation of the end over the measured step, median over rounds"),
])  # fmt: skip

ACTIVITY = pa.schema([
    column("experiment", TEXT, "experiment that was run and simulated"),
    column("plan", TEXT, "its plan"),
    column("rank", INT, "process"),
    column("step_s", FLOAT, "measured step, median over rounds without a profiler", "s"),
    column("simulated_s", FLOAT, "simulated step", "s"),
    column("step_error", FLOAT, "simulated over measured step less one"),
    column("events", INT, "operators and communications that the profiler recorded on the rank"),
    column("matched", INT, "of them those with a counterpart in the simulation"),
    column("matched_time", FLOAT, "share of the recorded operators' time that is matched"),
    column("start_error", FLOAT, "mean absolute deviation of the starts of operators over the step"),
    column("end_error", FLOAT, "mean absolute deviation of all ends over the step"),
    column("activity_error", FLOAT, "mean absolute deviation of starts and ends over the step, the profiler's own time taken out between marks"),
    column("profiled_error", FLOAT, "the same as recorded, over the profiled step"),
    column("rank_spread", FLOAT, "mean of the same deviation of a round's marks from their own median: what no simulation of one step can explain"),
    column("profiler_slowdown", FLOAT, "profiled over plain step less one"),
    column("mark_slowdown", FLOAT, "time of the marks themselves over the step"),
])  # fmt: skip

COSTS = pa.schema([
    column("workload", TEXT, "workload of the run"),
    column("experiments", INT, "experiments that share the workload's traces"),
    column("capture_s", FLOAT, "to profile the workload on one rank and read the profiles", "s"),
    column("fit_s", FLOAT, "to fit the cost models, shared evenly by the workloads", "s"),
    column("extrapolate_s", FLOAT, "to build all task graphs, as jobs", "s"),
    column("simulate_s", FLOAT, "to simulate all experiments and write their timelines, as jobs", "s"),
    column("engine_s", FLOAT, "of it inside the simulator", "s"),
    column("steps", INT, "steps of all experiments that were run for real"),
    column("direct_s", FLOAT, "ranks times the time of these steps", "s"),
    column("session_s", FLOAT, "ranks times the whole measuring session", "s"),
    column("share", FLOAT, "capture over direct: profiling on one rank against running on all"),
])  # fmt: skip
