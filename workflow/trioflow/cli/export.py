"""``trioflow export``: task graphs, timelines and traces in other tools' formats."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError, PlanError
from trioflow.base.plan_row import SCHEDULES
from trioflow.cli.answer import PERFETTO_ENDINGS, predict_options, write_timeline
from trioflow.cli.choices import COLLECTIVES, add_plan_arguments, read_options
from trioflow.cli.output import add_command, add_subcommand, check_output, print_warnings
from trioflow.costmodel.choices import find_own_model
from trioflow.export.rank_files import leave_host, size_trace, write_chakra, write_kineto, write_nccl_log
from trioflow.export.triosim import write_triosim
from trioflow.parallel.plan import make_plan
from trioflow.parallel.schedules.build import lower_for_execution, plan_schedule, write_schedule
from trioflow.prediction.assembly import build_graph
from trioflow.prediction.question import time_operators
from trioflow.trace.store import load_trace


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add ``export`` and its formats to the command's parser."""
    formats = parser.add_subparsers(dest="format", required=True, metavar="FORMAT")
    chakra = add_subcommand(formats, "chakra", "a plan's task graph, one Chakra file per rank (ASTRA-sim and others)")
    add_plan_arguments(chakra)
    device_only = (
        "--device-only",
        True,
        "without the host's launches, for readers that know no CPU operators (ASTRA-sim)",
    )
    output = ("PREFIX", "writes PREFIX.<rank>.et and PREFIX.comm_groups.json")
    add_command(chakra, _run_export_chakra, {"": [device_only, _output(*output)]})
    for name, run, text, output in (
        (
            "perfetto",
            _run_export_perfetto,
            "the simulated timeline, for ui.perfetto.dev",
            ("FILE", "file to write: .json or .json.gz"),
        ),
        (
            "kineto",
            _run_export_kineto,
            "the predicted ranks as PyTorch's profiler writes them (Holistic Trace Analysis)",
            ("DIR", "new folder for rank-0.json.gz and so on"),
        ),
        (
            "nccl",
            _run_export_nccl,
            "the predicted ranks' collectives as NCCL logs them (NCCL_DEBUG_SUBSYS=INIT,COLL)",
            ("DIR", "new folder for rank-0.log and so on"),
        ),
    ):
        simulated = add_subcommand(formats, name, text)
        add_plan_arguments(simulated)
        add_command(simulated, run, COLLECTIVES, {"": [_output(*output)]})
    triosim = add_subcommand(formats, "triosim", "a trace as TrioSim's trace.csv and tensor.csv")
    trace = ("trace", "TRACE", "folder of a trace, or a shipped one's name")
    add_command(triosim, _run_export_triosim, {"": [trace, _output("DIR", "folder to write")]})
    schedule = add_subcommand(formats, "schedule", "a pipeline schedule's actions, as PyTorch writes and loads them")
    add_command(
        schedule,
        _run_export_schedule,
        {
            "": (
                ("name", "NAME", f"{', '.join(SCHEDULES)}, or one that a package registers"),
                ("--ranks", (int, "P"), "pipeline's ranks", {"required": True}),
                ("--micro-batches", (int, "M"), "default: one per rank"),
                ("--stages-per-rank", (int, "V"), "stages of each rank"),
                ("--messages", True, "with sends and receives, as PyTorch adds them (its compute_comms format)"),
                _output("CSV", "file to write; simulate's --schedule-file reads it"),
            )
        },
    )


def _output(metavar: str, text: str) -> tuple[Any, ...]:
    return ("-o --output", metavar, text, {"required": True})


def _run_export_chakra(options: argparse.Namespace) -> None:
    """Build a plan's task graph and write it for every rank."""
    plan, platform, assumed = read_options(options)
    assumed = replace(assumed, cost_model=assumed.cost_model or find_own_model(platform))
    times = time_operators(options.trace, platform.device.described, assumed)
    host = platform.host_of(plan, times.traces[0].facts.recipe.framework)
    graph = build_graph(times, plan, batch=options.batch, host=host, options=assumed)
    resolved = graph.metadata.plan
    source = size_trace(times.traces, resolved, graph.metadata.batch)
    warnings = [*times.warnings, *graph.metadata.warnings]
    if options.device_only:
        tasks, graph = len(graph.tasks), leave_host(graph)
        if len(graph.tasks) < tasks:
            warnings.append("the host is left out: a step that its launches hold back is too short")
    files = write_chakra(graph, options.output, source)
    print(f"{graph.metadata.workload}: {graph.metadata.plan_text}")
    nodes = f"{len(graph.tasks)} node{'s' if len(graph.tasks) != 1 else ''}"
    print(f"{nodes} in {files[0]} to {files[-2].name}; communicator groups in {files[-1].name}")
    print_warnings(warnings)


def _run_export_perfetto(options: argparse.Namespace) -> None:
    """Simulate a plan and write its timeline."""
    check_output("--output", options.output, PERFETTO_ENDINGS)
    prediction = predict_options(options, record_links=True)
    write_timeline(prediction, options.output)
    answer = prediction.to_dict()
    print(f"{answer['workload']} on {answer['platform']}: {answer['plan_text']}")
    print(f"{len(prediction.timeline)} tasks in {options.output}")
    print_warnings(answer["warnings"])


def _run_export_kineto(options: argparse.Namespace) -> None:
    """Simulate a plan and write every rank as a profile."""
    prediction = predict_options(options)
    if prediction.step.platform.device.kind == "cpu":
        raise InputError(
            f"{prediction.step.platform.name} has no GPU, and readers of such profiles look for kernels",
            fix="use export perfetto",
        )
    files = write_kineto(prediction.timeline, options.output)
    _print_ranks(prediction.to_dict(), files)


def _run_export_nccl(options: argparse.Namespace) -> None:
    """Simulate a plan and write every rank's collectives as a log."""
    prediction = predict_options(options)
    per_node = prediction.step.platform.ranks_per_node
    _print_ranks(prediction.to_dict(), write_nccl_log(prediction.timeline, options.output, per_node))


def _print_ranks(answer: dict[str, Any], files: list[Path]) -> None:
    print(f"{answer['workload']} on {answer['platform']}: {answer['plan_text']}")
    print(f"{len(files)} ranks in {files[0]} to {files[-1].name}")
    print_warnings(answer["warnings"])


def _run_export_triosim(options: argparse.Namespace) -> None:
    """Write a trace in TrioSim's format."""
    trace = load_trace(options.trace)
    write_triosim(trace, Path(options.output))
    print(f"{len(trace.operators)} operators of {trace.facts.workload} in {options.output}")


def _run_export_schedule(options: argparse.Namespace) -> None:
    """Write a schedule's actions, one line a rank."""
    plan = make_plan(
        pipeline=options.ranks,
        schedule=options.name,
        micro_batches=options.micro_batches,
        stages_per_rank=options.stages_per_rank,
    )
    if options.ranks < 2:
        raise PlanError(f"--ranks {options.ranks} makes no pipeline", fix="give 2 or more")
    schedule = plan_schedule(plan)
    schedule = lower_for_execution(schedule) if options.messages else schedule
    write_schedule(schedule, options.output)
    print(
        f"{options.name}: {schedule.ranks} ranks, {schedule.stages} stages, {schedule.micro_batches}"
        f" micro-batches in {options.output}"
    )
