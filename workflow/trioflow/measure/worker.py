"""One rank of a measuring session: runs every series round robin and writes what it timed.

Started as ``python -m trioflow.measure.worker JOB RANK``; the job is a JSON file.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from trioflow.base.provenance import read_json, write_json
from trioflow.base.units import ns_to_s
from trioflow.measure.host_costs import HostCosts, sample_overlap, time_collective
from trioflow.measure.parallel_steps import Step, make_parallel_step
from trioflow.measure.records import (
    MARKED,
    PROFILED,
    Look,
    Mark,
    assign_marks,
    find_clock_offset,
    find_marks,
    time_mark,
)
from trioflow.trace.capture.rank_process import keep_freed_memory, pinned_to
from trioflow.trace.capture.training_step import TrainingStep
from trioflow.trace.capture.workload import device_name
from trioflow.trace.profile.events import STEP, Event
from trioflow.trace.profile.kineto import read_profile
from trioflow.trace.profile.steps import Step as ProfiledStep
from trioflow.trace.profile.steps import find_spans, load_step
from trioflow.trace.workloads.build import build_workload

_SPANS = ("gloo:", "nccl:")
_COMMUNICATION = (*_SPANS, "c10d::", "_c10d_functional::", "record_param_comms")
_KINDS = {"send": "send", "recv": "recv", "irecv": "recv", "isend": "send"}


def build_rank_timelines(
    path: str | Path, experiment: str, rank: int, looks: Sequence[Look]
) -> list[list[dict[str, Any]]]:
    """Return the events of each profiled step (a Kineto trace's annotations) as rows of ``tables.RANK_TIMELINES``, a list each.

    Operators of the rank's own thread are compute; what the communication library reports is
    communication. ``looks``: at the clock around each annotation's start; the step began with the
    second, as a busy machine may interrupt between the two for longer than a step. Times count from
    the step's own start; micro-batch and stage are left open.
    """
    profile = read_profile(path)
    spans = find_spans(profile)
    offset_ns = find_clock_offset(looks, [span.start_ns for span in spans])
    return [
        _list_events(load_step(profile, span), look.after_ns - offset_ns, experiment, rank)
        for span, look in zip(spans, looks, strict=True)
    ]


def _list_events(
    loaded: ProfiledStep, began_ns: int, experiment: str, rank: int
) -> list[dict[str, Any]]:
    """Return one step's events in order of start; the step began then on the profiler's clock."""
    found = [(e, "compute", "compute") for e in loaded.operators if not _communicates(e)]
    found += [
        (event, "communication", _KINDS.get(event.name.partition(":")[2], "collective"))
        for event in loaded.messages
    ]
    found.sort(key=lambda item: (item[0].start_ns, item[0].end_ns, item[0].name))
    return [
        {
            "experiment": experiment,
            "task_id": number,
            "rank": rank,
            "stream": stream,
            "kind": kind,
            "name": event.name,
            "phase": _phase(event),
            "start_s": ns_to_s(max(event.start_ns - began_ns, 0)),
            "end_s": ns_to_s(max(event.end_ns - began_ns, 0)),
            "message_bytes": None,
            "match_id": None,
            "micro_batch": None,
            "stage": None,
        }
        for number, (event, stream, kind) in enumerate(found)
    ]


def _communicates(event: Event) -> bool:
    return event.name.startswith(_COMMUNICATION)


def _phase(event: Event) -> str:
    for above in (event, *event.ancestors()):
        if above.name.startswith("autograd::engine::evaluate_function"):
            return "backward"
        if above.name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
            return "optimizer"
    return "" if event.name.startswith(_SPANS) else "forward"


_PROFILED_ROUNDS = 3
"""Profiled steps that are kept of each experiment, or as many as the session has rounds."""


class _RankSession:
    """The series of one rank and the samples that it collects."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self.job, self.rank = job, rank
        self.device = torch.device("cuda", rank) if job["device"] == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.steps: list[dict[str, Any]] = []
        self.collectives: list[dict[str, Any]] = []
        self.host: list[dict[str, float]] = []
        self.marks: list[dict[str, Any]] = []
        self.limits_ns = (0, 0)
        self.workload = build_workload(job["workload"], job["seed"])
        self.workload.model.to(self.device)

    def run(self) -> dict[str, Any]:
        """Warm up, run every series round robin, profile one real step of each experiment."""
        series = self._make_series()
        costs = None
        if self.job["ranks"] > 1:
            costs = HostCosts(self.workload, self.device, self.job["sharded"])
        for _ in range(self.job["warm_up"]):
            for _, step, ranks in series:
                self._time(step, ranks)
        if costs:
            costs.sample()
        for number in range(self.job["rounds"]):
            for facts, step, ranks in series:
                elapsed = self._time(step, ranks)
                if elapsed is not None:
                    row = {**facts, "round": number, "rank": self.rank, "step_ns": elapsed}
                    self.steps.append({**row, "phases_ns": getattr(step, "phases_ns", {})})
                    if facts["ranks"] > 1:
                        self._keep_marks(facts, MARKED, number, self._find_marks(step))
            if costs:
                self._sweep(number)
                self.host.append({**costs.sample(), "overlap": sample_overlap(self.device)})
            self._print_progress(number, series)
        events = [
            self._profile(facts, step)
            for facts, step, _ in series
            if facts["series"] == "distributed" and facts["ranks"] > 1
        ]
        if events:
            pd.concat(events).to_parquet(Path(self.job["folder"]) / f"events-{self.rank}.parquet")
        return {
            "steps": self.steps,
            "collectives": self.collectives,
            "host": self.host,
            "marks": self.marks,
            "mark_s": time_mark(),
            "device_name": device_name(self.device.type),
            "memory_bytes": self._memory_bytes(),
        }

    def _memory_bytes(self) -> int:
        """Return the memory of this rank's device: its own, or its share of the machine's."""
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(self.job["ranks"])

    def _print_progress(
        self, number: int, series: list[tuple[dict[str, Any], Step, range]]
    ) -> None:
        if self.rank == 0:
            done = [s["step_ns"] / 1e6 for s in self.steps if s["round"] == number]
            print(
                f"round {number + 1}/{self.job['rounds']}: {len(series)} series, "
                f"median step {statistics.median(done):.0f} ms",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def _make_series(self) -> list[tuple[dict[str, Any], Step, range]]:
        """Return (facts, step, ranks that run it) for every series of a round."""
        world, seed = self.job["ranks"], self.job["seed"]
        series: list[tuple[dict[str, Any], Step, range]] = []
        for traced in self.job["traced_batches"]:
            plain = TrainingStep(self.workload, self.workload.model, traced, self.device, seed)
            base = {"plan": "single", "batch": traced, "experiment": "", "ranks": 1}
            series.append(({**base, "series": "single"}, plain, range(1)))
            if world > 1:
                series.append(({**base, "series": "both_busy"}, plain, range(world)))
        for row in self.job["experiments"]:
            plan = self.job["plans"][row["plan"]]
            ranks = int(plan["data"]) * int(plan["tensor"]) * int(plan["pipeline"])
            stages = self.job["stages"].get(str(plan["pipeline"]))
            facts = {
                "series": "distributed", "plan": row["plan"], "batch": int(row["batch"]),
                "experiment": row["experiment"], "ranks": ranks,
                "stage": self.rank if int(plan["pipeline"]) > 1 else 0,
            }  # fmt: skip
            step = make_parallel_step(
                self.workload, plan, int(row["batch"]), stages, self.device, seed
            )
            series.append((facts, step, range(ranks)))
        return series

    def _time(self, step: Step, ranks: range) -> int | None:
        """Time one step on the ranks that take part, from a common start [ns]."""
        if self.job["ranks"] > 1:
            dist.barrier()
        if self.rank not in ranks:
            return None
        start = time.perf_counter_ns()
        step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        end = time.perf_counter_ns()
        self.limits_ns = (start, end)
        return end - start

    def _find_marks(self, step: Step) -> list[Mark]:
        """Return the marks of the step that was timed last."""
        return find_marks(step, *self.limits_ns)

    def _keep_marks(
        self, facts: dict[str, Any], recording: str, number: int, marks: list[Mark]
    ) -> list[dict[str, Any]]:
        """Keep the marks of one round, and return them as rows."""
        place = {
            "experiment": facts["experiment"], "recording": recording, "round": number,
            "rank": self.rank, "stage": facts["stage"],
        }  # fmt: skip
        rows = [{**place, **mark._asdict()} for mark in marks]
        self.marks += rows
        return rows

    def _sweep(self, number: int) -> None:
        for name, sizes in self.job["collectives"].items():
            for size in sizes:
                elapsed = time_collective(name, size, self.device)
                self.collectives.append(
                    {"collective": name, "message_bytes": size, "round": number, "time_ns": elapsed}
                )

    def _profile(self, facts: dict[str, Any], step: Step) -> pd.DataFrame:
        """Profile some real steps of an experiment and return their events; the first is not kept."""
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        step()
        marks, looks = [], []
        with profile(activities=activities) as profiler:
            for _ in range(1 + min(_PROFILED_ROUNDS, self.job["rounds"])):
                dist.barrier()
                before = time.perf_counter_ns()
                with record_function(STEP):
                    start = time.perf_counter_ns()
                    step()
                    self.limits_ns = (start, time.perf_counter_ns())
                looks.append(Look(before, start))
                marks.append(self._find_marks(step))
        path = Path(self.job["folder"]) / f"{facts['experiment']}-{self.rank}.json"
        profiler.export_chrome_trace(str(path))
        timelines = build_rank_timelines(path, facts["experiment"], self.rank, looks)
        rounds = []
        for number, (rows, found) in enumerate(zip(timelines[1:], marks[1:], strict=True)):
            kept = pd.DataFrame(self._keep_marks(facts, PROFILED, number, found))
            rounds.append(assign_marks(pd.DataFrame(rows), kept).assign(round=number))
        return pd.concat(rounds)


def main() -> None:
    """Run one rank of the job given on the command line."""
    job, rank = read_json(sys.argv[1]), int(sys.argv[2])
    with pinned_to(rank) as (core, warnings):
        warnings.extend(keep_freed_memory())
        if job["ranks"] > 1:
            store = dist.FileStore(str(Path(job["folder"]) / "store"), job["ranks"])
            backend = "nccl" if job["device"] == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=job["ranks"])
        result = _RankSession(job, rank).run()
        if job["ranks"] > 1:
            dist.barrier()
            dist.destroy_process_group()
    write_json(
        Path(job["folder"]) / f"result-{rank}.json", {**result, "core": core, "warnings": warnings}
    )


if __name__ == "__main__":
    main()
