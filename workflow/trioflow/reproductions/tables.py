"""Tables of the reproductions: columns with units and meanings; ``tables`` writes and checks them.

They keep the rules of ``trioflow.tables``: explicit schemas, units and meanings
in the fields' metadata, checked on writing and reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
import pyarrow as pa

from trioflow import tables
from trioflow.base.provenance import stamp
from trioflow.costmodel.judging import COUNTS, SCORES
from trioflow.tables import FLOAT, INT, TEXT, column

MEASURED_HERE = "measured here"
MEASURED_PUBLIC = "measured, public"
ONLY_SIMULATED = "only simulated"
EVIDENCE_KINDS = (MEASURED_HERE, MEASURED_PUBLIC, ONLY_SIMULATED)
"""What a number rests on: runs of this machine, public tables of others, or no measurement at all."""

EVIDENCE = pa.schema([
    column("figure", TEXT, "figure, such as fig08"),
    column("evidence", TEXT, "measured here (runs of this machine), measured, public (tables of others) or only simulated"),
    column("panel", TEXT, "panel of the figure"),
    column("label", TEXT, "line of the panel"),
    column("series", TEXT, "what the colour says; empty where there is one colour"),
    column("case", TEXT, "experiment, public case or trace"),
    column("workload", TEXT, "workload by its name"),
    column("source_gpu", TEXT, "GPU that was traced; empty where the trace holds no times, or is of this machine"),
    column("device", TEXT, "device that is predicted; empty for this machine"),
    column("family", TEXT, "single, DataParallel, DDP, sharded, TP, PP or hybrid"),
    column("plan", TEXT, "plan in short"),
    column("ranks", INT, "ranks of the plan"),
    column("micro_batches", INT, "pieces that a pipeline cuts the batch into; 0 without a pipeline"),
    column("batch", INT, "samples of the whole step; 0 where the source does not say"),
    column("quantity", TEXT, "what the times are of"),
    column("measured_s", FLOAT, "measured time; null where nothing was measured", "s", null=True),
    column("predicted_s", FLOAT, "predicted time; null where there is none, see status", "s", null=True),
    column("low_s", FLOAT, "low end of its 80 % interval", "s", null=True),
    column("high_s", FLOAT, "high end of its 80 % interval", "s", null=True),
    column("status", TEXT, "ok, out of memory or infeasible"),
    column("reason", TEXT, "why there is no prediction; empty for ok"),
    column("confidence", TEXT, "what the prediction rests on: measured, interpolated, extrapolated or uncalibrated; empty where the source does not say"),
    column("source", TEXT, "where the measured value, or else the trace, comes from"),
    column("paper", TEXT, "averages of the paper that are drawn beside it, all of other cases; empty for none"),
])  # fmt: skip

SHARES = pa.schema([
    column("figure", TEXT, "figure, such as fig13"),
    column("evidence", TEXT, "measured here (runs of this machine) or only simulated"),
    column("panel", TEXT, "panel of the figure"),
    column("label", TEXT, "line of the panel"),
    column("case", TEXT, "experiment or trace"),
    column("plan", TEXT, "plan in short"),
    column("origin", TEXT, "measured (the profile of a real step) or predicted"),
    column("compute_share", FLOAT, "part of the step in which the busiest rank computes"),
    column("communication_share", FLOAT, "part in which it communicates and computes nothing; measured, this holds waiting for the others in a collective"),
    column("idle_share", FLOAT, "the rest"),
    column("source", TEXT, "where it comes from"),
])  # fmt: skip

SIMULATOR_TIMES = pa.schema([
    column("trace", TEXT, "trace by its name"),
    column("workload", TEXT, "workload that was traced"),
    column("family", TEXT, "DataParallel, DDP, TP, PP, hybrid, sharded or single"),
    column("plan", TEXT, "plan in words"),
    column("ranks", INT, "ranks of the plan"),
    column("events", INT, "starts and ends of tasks and flows that were simulated"),
    column("repeats", INT, "times that it was run, after one that is not counted"),
    column("build_s", FLOAT, "median time to extrapolate the trace to the plan's tasks", "s"),
    column("wall_s", FLOAT, "median time to simulate one step", "s"),
    column("wall_low_s", FLOAT, "shortest of the repeats", "s"),
    column("wall_high_s", FLOAT, "longest of the repeats", "s"),
    column("step_s", FLOAT, "the step that was predicted", "s"),
])  # fmt: skip


WAFER = pa.schema([
    column("workload", TEXT, "workload of the trace"),
    column("plan", TEXT, "degrees of the plan"),
    column("batch", INT, "samples of the whole step"),
    column("samples_per_replica", INT, "samples of one replica"),
    column("sweep", TEXT, "link: bandwidth of the links swept; paper: bandwidth at which the mesh case has the paper's share of communication; port: ports that one circuit bundles swept"),
    column("network", TEXT, "mesh or circuit"),
    column("variant", TEXT, "mesh: how the ring lies on it (snake, row-major); circuit: first step (no circuit open), later step, or without reuse (every flow sets its circuit up)"),
    column("link_bandwidth_bytes_per_s", FLOAT, "mesh: one link, per direction; circuit: one circuit", "bytes/s"),
    column("ports_per_circuit", INT, "ports that one circuit bundles; 0 on the mesh"),
    column("step_s", FLOAT, "duration of the step", "s"),
    column("ideal_s", FLOAT, "duration of the step on a network that takes no time", "s"),
    column("network_share", FLOAT, "part of the step that the network adds: 1 - ideal / step"),
    column("established", INT, "circuits set up in the step"),
    column("torn_down", INT, "circuits torn down in the step"),
])  # fmt: skip

HOP = pa.schema([
    column("graph", TEXT, "ring-based or double-ring"),
    column("slowed", TEXT, "what is slowed by random factors"),
    column("seed", INT, "seed of the factors"),
    column("bandwidth_bytes_per_s", FLOAT, "bandwidth of a link that is not slowed, per direction", "bytes/s"),
    column("variant", TEXT, "name of the rules"),
    column("backup_workers", INT, "updates of an iteration that a worker need not wait for"),
    column("staleness", INT, "iterations that an update may be old"),
    column("max_gap", INT, "tokens of a queue: iterations that a worker may be ahead"),
    column("max_jump", INT, "iterations that a worker may enter at once; 1 never skips"),
    column("iterations", INT, "iterations that every worker finishes"),
    column("time_s", FLOAT, "time until every worker has finished", "s"),
    column("iteration_s", FLOAT, "that time divided by the iterations", "s"),
    column("samples_per_s", FLOAT, "samples that were computed, of all workers, by that time; skipped ones do not count", "1/s"),
    column("speedup", FLOAT, "time of the standard rules on the same graph and factors divided by this one"),
    column("computed_share", FLOAT, "part of the iterations that was computed and not skipped"),
    column("dropped", INT, "updates that came too late"),
    column("largest_gap", INT, "most iterations that a worker was ahead of a neighbour"),
    column("largest_staleness", INT, "most iterations that an update was old when it was relied on"),
])  # fmt: skip


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


_DEVICE = column("device", tables.TEXT, "GPU, as its driver names it")
_METHOD = column("method", tables.TEXT, "operator model, by name")
_MAY_LACK = {
    "oracle_mean_absolute_error", "beside_oracle_error", "coverage", "mean_relative_width",
    "interval_score",
}  # fmt: skip

SUMMARY = pa.schema([
    *(tables.VALIDATION.field(name) for name in ("set", "quantity", "group", "model")),
    *(
        column(name, tables.INT if name in COUNTS else tables.FLOAT, text, null=name in _MAY_LACK)
        for name, text in SCORES.items()
    ),
])  # fmt: skip

OPERATORS = pa.schema([
    _DEVICE,
    _METHOD,
    column("workload", tables.TEXT, "model that the operator belongs to"),
    column("mode", tables.TEXT, "train or inf, inference"),
    column("batch", tables.INT, "samples of the step"),
    column("name", tables.TEXT, "operator"),
    column("operator_class", tables.TEXT, "class that shares one regression"),
    column("phase", tables.TEXT, "forward, backward or optimizer"),
    column("flop", tables.FLOAT, "floating-point operations", "flop"),
    column("read_bytes", tables.FLOAT, "bytes of all inputs", "bytes"),
    column("write_bytes", tables.FLOAT, "bytes of all results", "bytes"),
    column("occurrences", tables.INT, "equal operators of the step"),
    column("recorded_s", tables.FLOAT, "mean of their measured times", "s"),
    column("held_out_s", tables.FLOAT, "predicted by a model that did not see the workload", "s"),
    column("relative_error", tables.FLOAT, "held_out_s over recorded_s less one"),
])  # fmt: skip

CLASSES = pa.schema([_DEVICE, _METHOD, *tables.OPERATOR_FIT])

SCHEMAS: Mapping[str, pa.Schema] = {
    "summary": SUMMARY, "diagnosed operators": OPERATORS, "diagnosed classes": CLASSES,
}  # fmt: skip


def write_validation_table(
    frame: pd.DataFrame, name: str, path: str | Path, inputs: Iterable[str | Path] = ()
) -> None:
    """Write a table of ``SCHEMAS`` as Parquet, checked and atomically; inputs go into its stamp."""
    tables.write_table(frame, name, path, stamp(inputs), SCHEMAS[name])


def read_validation_table(path: str | Path, name: str) -> pd.DataFrame:
    """Read a table of ``SCHEMAS``."""
    return tables.read_table(path, name, SCHEMAS[name])


PARAMETERS = pa.schema([
    column("set", TEXT, "set of cases"),
    column("fold", TEXT, "what was left out; the word nothing for fits on all rows"),
    column("form", TEXT, "chosen on the fold's own rows"),
    column("name", TEXT, "parameter"),
    column("value", FLOAT, "fitted value, in its unit"),
    column("unit", TEXT, "unit of the value; 1 for none"),
    column("low", FLOAT, "lower limit of the fit"),
    column("high", FLOAT, "upper limit of the fit"),
    column("meaning", TEXT, "what it is"),
])  # fmt: skip
"""Rows of the table of fitted parameters."""


TRIALS = pa.schema([
    column("trial", TEXT, "what was fitted on what"),
    column("model", TEXT, "who predicts"),
    column("draws", INT, "how often, with other rows each time"),
    column("cases", INT, "rows judged each time"),
    column("mean_absolute_error", FLOAT, "mean over draws of the mean absolute relative error"),
    column("ordered", FLOAT, "mean over draws of the share of pairs of plans in the right order"),
])  # fmt: skip
"""Comparisons that are not a set of cases of their own."""


CHECKS = pa.schema([
    column("check", TEXT, "relation that was tested"),
    column("compared", INT, "sets of rows that could show it"),
    column("exact", INT, "of them, those in which it holds to a nanosecond"),
    column("worst_s", FLOAT, "largest deviation", "s"),
])  # fmt: skip


# fmt: off
_CLUSTER_RUN = (
    column("parameters", FLOAT, "parameters of the model, in 1e9"),
    column("nodes", INT, "nodes of 8 GPUs"),
    column("data", INT, "data-parallel degree"),
    column("tensor", INT, "tensor-parallel degree"),
    column("pipeline", INT, "pipeline degree"),
    column("zero", INT, "ZeRO's stage, 0 or 1"),
    column("micro_batch", INT, "samples of a micro-batch"),
    column("accumulate", INT, "micro-batches of a replica"),
)
# fmt: on
"""What tells nanotron's runs apart."""
CLUSTER_MEMORY = pa.schema([
    column("set", TEXT, "ran, ran and fitted on (1.34 B parameters on 1 and 2 nodes), or failed"),
    *_CLUSTER_RUN,
    column("measured_bytes", FLOAT, "memory of rank 0 as the file gives it; null for most that failed", "bytes", null=True),
    column("allocated_bytes", INT, "predicted peak of what rank 0's allocator hands out", "bytes"),
    column("passing_bytes", INT, "of that what comes and goes in a step: activations, temporaries, inputs", "bytes"),
    column("waiting_bytes", INT, "what is freed before the device has sent it", "bytes"),
    column("gathered_bytes", INT, "copies of weights that replicas gather behind the update", "bytes"),
    column("reserved_bytes", INT, "predicted peak of what rank 0's allocator holds", "bytes"),
    column("fullest_bytes", INT, "predicted peak handed out on the fullest rank", "bytes"),
    column("fullest_reserved_bytes", INT, "predicted peak held on the fullest rank", "bytes"),
    column("reason", TEXT, "what trioflow knows of why it failed: too few micro-batches, out of memory, other; empty for runs"),
])  # fmt: skip
CLUSTER_STEPS = pa.schema([
    column("set", TEXT, "ran, or ran and fitted on (1.34 B parameters on 1 and 2 nodes)"),
    *_CLUSTER_RUN,
    column("measured_s", FLOAT, "step, by the tokens a second that the file gives", "s"),
    column("mfu", FLOAT, "model FLOPs utilisation as the file gives it, of 1"),
    column("predicted_s", FLOAT, "predicted step; null where the plan is refused", "s", null=True),
    column("expected_s", FLOAT, "expected step: predicted, and what runs of the other models on as many nodes took more", "s", null=True),
    column("low_s", FLOAT, "lower end of the 80 % interval", "s", null=True),
    column("high_s", FLOAT, "upper end of the 80 % interval", "s", null=True),
    column("stages", INT, "pipeline stages that hold anything"),
    column("blocks", INT, "units of the model in the fullest stage"),
    column("refused", TEXT, "why the plan is refused; empty elsewhere"),
])  # fmt: skip
CLUSTER_PEAKS = pa.schema([
    column("suite", TEXT, "gpt, moe, bert or t5: which of Megatron-LM's test suites"),
    column("case", TEXT, "the test's name"),
    column("device", TEXT, "a100 or h100: eight of them ran it"),
    column("measured_bytes", FLOAT, "highest peak that the last rank's allocator handed out, as logged", "bytes"),
    column("kept_bytes", FLOAT, "what lay there between steps at the end", "bytes"),
    column("data", INT, "data-parallel degree; null where the arguments are refused", null=True),
    column("tensor", INT, "tensor-parallel degree", null=True),
    column("pipeline", INT, "pipeline degree", null=True),
    column("attention", TEXT, "flash, fused-softmax or eager; empty where refused"),
    column("workspace_bytes", INT, "of the prediction what libraries keep for their products", "bytes", null=True),
    column("predicted_bytes", INT, "predicted peak of the last rank, workspaces included", "bytes", null=True),
    column("not_followed", TEXT, "arguments that change work or memory and are not followed, as simulate warns of them"),
    column("refused", TEXT, "why the arguments are refused; empty elsewhere"),
])  # fmt: skip
DRIFT_HALVES = pa.schema([
    column("job", TEXT, "recorded job"),
    column("seen", TEXT, "steps that the prediction is made from: even steps, odd steps, first half or second half"),
    column("steps", INT, "steps that are predicted: the others"),
    column("way", TEXT, "how: drawn, a step's parts together (what a step's passes share comes with its host and exchanges), drawn (by itself),"
           " one time an operation (medians), the steps seen (their own quantiles)"),
    *(column(f"{what}_{quantile}_s", FLOAT, f"{what} {quantile} % quantile of the steps predicted", "s")
      for what in ("measured", "predicted") for quantile in (10, 50, 90)),
    column("distance", FLOAT, "Kolmogorov-Smirnov distance of both distributions, of 1"),
])  # fmt: skip
DRIFT_CAUSES = pa.schema([
    column("job", TEXT, "recorded job"),
    column("part", TEXT, "stages, ranks, micro-batches and steps, communication or host"),
    column("actual_s", FLOAT, "median step, of the recorded times played again", "s"),
    column("ideal_s", FLOAT, "median step with all parts put right", "s"),
    column("share", FLOAT, "what of the slowdown the part is: Shapley value, of 1"),
    column("alone", FLOAT, "what of the slowdown goes where it alone is put right, of 1"),
])  # fmt: skip

CLUSTER_RATES = pa.schema([
    column("release", TEXT, "NeMo container that ran"),
    column("training", TEXT, "Pre-Training, SFT or LoRA"),
    column("model", TEXT, "what the page calls it"),
    column("precision", TEXT, "as the page says; empty where it names none"),
    column("gpus", INT, "H100 in all"),
    column("batch", INT, "samples of a step"),
    column("micro_batch", INT, "samples of a micro-batch"),
    column("sequence", INT, "tokens of a sample"),
    column("fsdp", INT, "ranks that shard weights; 0 without"),
    column("tensor", INT, "tensor-parallel degree"),
    column("pipeline", INT, "pipeline degree"),
    column("context", INT, "context-parallel degree"),
    column("stages_per_rank", INT, "stages of each rank of a pipeline"),
    column("expert", INT, "expert-parallel degree"),
    column("measured_tokens_per_s", FLOAT, "of one GPU, as the page says", "1/s"),
    column("predicted_tokens_per_s", FLOAT, "of one GPU; missing where the row is not predicted", "1/s", null=True),
    column("low_tokens_per_s", FLOAT, "lower end of its 80 % interval", "1/s", null=True),
    column("high_tokens_per_s", FLOAT, "upper end", "1/s", null=True),
    column("refused", TEXT, "why the row is not predicted; empty elsewhere"),
])  # fmt: skip

ANALYTICAL = pa.schema([
    column("experiment", TEXT, "experiment that is predicted"),
    column("plan", TEXT, "its plan"),
    column("ranks", INT, "processes"),
    column("flop_per_s", FLOAT, "best rate of the traces' long operators", "flop/s"),
    column("bytes_per_s", FLOAT, "best bandwidth of the traces' long operators", "bytes/s"),
    column("analytical_s", FLOAT, "predicted step", "s"),
])  # fmt: skip
