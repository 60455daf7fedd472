"""Predicted ranks as other tools read them, a file a rank: Chakra's execution traces, profiles as PyTorch's, logs as NCCL's.

ASTRA-sim and others replay Chakra's. Readers of profiles are Holistic Trace Analysis above all; of logs those that read
what ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL`` prints.
"""

import gzip
import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trioflow import __version__
from trioflow.base.errors import InputError
from trioflow.base.experiments import Plan
from trioflow.base.provenance import atomic_path
from trioflow.base.units import NS_PER_S, NS_PER_US
from trioflow.costmodel.features import resize_batch
from trioflow.engine.program import COMMUNICATION_KINDS
from trioflow.parallel.reference import choose_reference
from trioflow.parallel.splits.tensor_parallel import split_for_plan
from trioflow.parallel.splits.tensor_split import prepare_split
from trioflow.parallel.task_graph import TaskGraph
from trioflow.tables import records
from trioflow.trace.importers.chakra_nodes import (
    COMM_TYPES,
    OWN,
    add_attributes,
    new_metadata,
    new_node,
    sort_by_waiting,
    write_messages,
)
from trioflow.trace.store import Trace

OWN_COLUMNS = ("stream", "kind", "phase", "op_id", "micro_batch", "stage", "match_id")
"""Columns of the task table that are kept as attributes."""
_SOURCE_FACTS = ("workload", "device", "device_name", "precision", "optimizer")
_MODEL_FACTS = ("units", "tensor_split", "attention_heads", "parameters", "row", "step_time_source")
"""Facts of the traced model, true of an export only where one rank runs the whole model."""

_NODE_TYPES = {"collective": "COMM_COLL_NODE", "send": "COMM_SEND_NODE", "recv": "COMM_RECV_NODE"}
_HOST_STREAM = "host"
_US_PER_S = NS_PER_S / NS_PER_US
_FIRST_GROUP = 1
"""ASTRA-sim numbers communicator groups from one; without a number it takes all ranks."""
_LARGEST_TAG = (1 << 31) - 1

Row = dict[str, Any]


def size_trace(traces: Sequence[Trace], plan: Plan, batch: int) -> Trace:
    """Return the trace that a plan starts from, operators as large as a task runs them; ``batch`` is the whole step's.

    FLOPs and bytes are those of one micro-batch on one shard; no tensors where shapes differ from the traced ones.
    """
    samples = batch / (plan.data * plan.micro_batches)
    trace = choose_reference(traces, samples).trace
    factor = samples / trace.facts.batch
    split = split_for_plan(prepare_split(trace, plan), plan)
    operators = resize_batch(split.operators, factor)
    same = factor == 1.0 and plan.tensor == 1
    return Trace(operators, trace.tensor_columns.take(slice(None if same else 0)), trace.facts)


def leave_host(graph: TaskGraph) -> TaskGraph:
    """Return a graph of devices alone, for readers that know no operators of a CPU (ASTRA-sim).

    What the host's stream runs takes no time then, so that a step that its launches hold back is too short. What a task
    waits for through the host, such as a message that the host looked at before it launched on, it waits for.
    """
    tasks = graph.tasks
    host = (tasks["stream"] == _HOST_STREAM).to_numpy(dtype=bool)
    ranks, streams = tasks["rank"].tolist(), tasks["stream"].tolist()
    waits: dict[int, list[int]] = {}
    edges = graph.dependencies[["task_id", "depends_on"]].to_numpy().tolist()
    for task, other in edges:
        waits.setdefault(task, []).append(other)
    # Behind which tasks of the device the host lies: of each stream the last, which waits for the others.
    behind: dict[int, dict[str, int]] = {}
    queues: dict[int, dict[str, int]] = {}
    kept: list[tuple[int, int]] = []
    for task in range(len(tasks)):
        seen = dict(queues.get(ranks[task], {})) if host[task] else {}
        for other in waits.get(task, ()):
            if host[other] and other not in behind:
                raise InputError(f"task {task} waits for the host's later task {other}")
            for stream, last in (behind[other] if host[other] else {streams[other]: other}).items():
                seen[stream] = max(seen.get(stream, last), last)
        if host[task]:
            behind[task] = queues[ranks[task]] = seen
        else:
            kept += [(task, other) for other in sorted(seen.values())]
    number = np.cumsum(~host) - 1
    left = tasks[~host].reset_index(drop=True).assign(task_id=np.arange(int((~host).sum())))
    columns = graph.dependencies.columns
    waiting = pd.DataFrame(number[np.array(kept, dtype=np.int64).reshape(-1, 2)], columns=columns)
    return TaskGraph(left, waiting, graph.metadata)


def write_chakra(graph: TaskGraph, prefix: str | Path, source: Trace | None = None) -> list[Path]:
    """Write one Chakra file a rank, and the communicator groups beside them.

    ``graph``: what every rank does. ``prefix``: the files are ``PREFIX.<rank>.et`` and ``PREFIX.comm_groups.json``.
    ``source``: from `size_trace`: gives operators their ``num_ops`` and ``tensor_size``, and their tensors where its
    tensor table has them.

    Returns the files written: the ranks' in order, then the groups'. Raises InputError when a task cannot be expressed,
    tasks wait for one another, or files of a larger export lie under the prefix.

    A node's id is its ``task_id``. Durations are whole microseconds whose remainder is carried along each stream; those
    that the network decides are absent. The order of a stream is in ``ctrl_deps`` and, with what a task waits for
    otherwise, in ``data_deps``: readers that follow one of the two alone see the whole order. Tasks of the stream
    ``host`` are CPU operators.
    """
    export = _Export(graph, source)
    files = [Path(f"{prefix}.{rank}.et") for rank in range(export.ranks)]
    groups_file = Path(f"{prefix}.comm_groups.json")
    _check_free(prefix, files, groups_file)
    orders = [export.order(rank) for rank in range(export.ranks)]
    with ExitStack() as stack:
        for rank, file in enumerate(files):
            temporary = stack.enter_context(atomic_path(file))
            write_messages(temporary, export.messages(rank, orders[rank]))
        temporary = stack.enter_context(atomic_path(groups_file))
        named = {str(number): list(group) for group, number in export.groups.items()}
        temporary.write_text(json.dumps(named, indent=1) + "\n")
    return [*files, groups_file]


def _check_free(prefix: str | Path, files: list[Path], groups_file: Path) -> None:
    """Refuse a prefix without a name, and one with files that would not be replaced."""
    if str(prefix) == "" or str(prefix).endswith(("/", ".")):
        raise InputError(f"{str(prefix)!r} is not a prefix of file names", fix="give such as folder/name")
    folder, stem = files[0].parent, files[0].name.removesuffix("0.et")
    known = {file.name for file in files}
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        number = file.name.removeprefix(stem).removesuffix(".et")
        if file.name == f"{stem}{number}.et" and number.isdigit() and file.name not in known:
            raise InputError(
                f"this is a file of an export of more than {len(files)} ranks",
                file=file,
                fix="remove it, or choose another prefix",
            )
    for file in (*files, groups_file):
        if file.is_dir():
            raise InputError("a folder lies here", file=file, fix="choose another prefix")


class _Export:
    """Turns the tasks of a graph into nodes."""

    def __init__(self, graph: TaskGraph, source: Trace | None) -> None:
        self.tasks = records(graph.tasks)
        self.metadata, self.source = graph.metadata, source
        self._of_rank: dict[int, list[int]] = {}
        for number, task in enumerate(self.tasks):
            if task["task_id"] != number:
                raise InputError(f"task {task['task_id']} stands in row {number}")
            self._of_rank.setdefault(task["rank"], []).append(number)
        self.ranks = max(*self._of_rank, -1, graph.metadata.ranks - 1) + 1
        self._waits: list[list[int]] = [[] for _ in self.tasks]
        self._before: list[int | None] = [None] * len(self.tasks)
        self._link(graph.dependencies)
        self._groups_of = [self._check_exchange(task) for task in self.tasks]
        self.groups = self._number_groups()
        matches = sorted({t["match_id"] for t in self.tasks if t["peer"] is not None})
        self._tags = {match: tag for tag, match in enumerate(matches)}
        self._operators = records(source.operators) if source else []
        self._tensors = records(source.tensors) if source else []
        # On a CPU a task holds the host time before its operator, too.
        self._host_inside = bool(source) and not any(t["stream"] == _HOST_STREAM for t in self.tasks)

    def _link(self, dependencies: pd.DataFrame) -> None:
        """Note what each task waits for, and the task before it in its stream."""
        edges = zip(dependencies["task_id"], dependencies["depends_on"], strict=True)
        for task, other in sorted({(int(a), int(b)) for a, b in edges}):
            if not (0 <= task < len(self.tasks) and 0 <= other < len(self.tasks)):
                raise InputError(f"task {task} waits for task {other}: one does not exist")
            ranks = [self.tasks[end]["rank"] for end in (task, other)]
            if ranks[0] != ranks[1]:
                raise InputError(
                    f"task {task} of rank {ranks[0]} waits for task {other} of rank {ranks[1]}",
                    fix="Chakra joins ranks by messages only: use a send and a recv",
                )
            self._waits[task].append(other)
        last: dict[tuple[int, str], int] = {}
        for number, row in enumerate(self.tasks):
            stream = (row["rank"], row["stream"])
            self._before[number] = last.get(stream)
            last[stream] = number

    def _check_exchange(self, task: Row) -> tuple[int, ...]:
        """Check what a message needs; return the ranks of a collective, nothing for others."""
        if task["kind"] not in _NODE_TYPES:
            return ()
        place = _name_task(task)
        for column in ("message_bytes", "match_id"):
            if task[column] is None:
                raise InputError(f"{place}: it has no {column}")
        if task["kind"] != "collective":
            if task["peer"] is None or not 0 <= task["peer"] < self.ranks:
                raise InputError(f"{place}: its peer is {task['peer']}")
            return ()
        if task["name"] not in COMM_TYPES:
            raise InputError(f"{place}: Chakra has no such collective", fix=f"it has {', '.join(COMM_TYPES)}")
        words = str(task["group"] or "").split(",")
        group = tuple(int(word) for word in words if word.isdigit())
        if len(group) != len(words) or task["rank"] not in group:
            raise InputError(f"{place}: its group is {task['group']!r}")
        return group

    def _number_groups(self) -> dict[tuple[int, ...], int]:
        """Give numbers to the groups that are not all ranks in order."""
        world = tuple(range(self.ranks))
        parts = sorted(set(self._groups_of) - {(), world})
        return {group: number for number, group in enumerate(parts, _FIRST_GROUP)}

    def order(self, rank: int) -> list[int]:
        """Return a rank's tasks so that each follows what it waits for, else by number; InputError when they wait in a circle."""
        waits = {number: self._data_deps(number) for number in self._of_rank.get(rank, [])}
        ordered, stuck = sort_by_waiting(waits)
        if stuck is not None:
            raise InputError(f"{_name_task(self.tasks[stuck])} waits, in a circle, for itself")
        return ordered

    def _data_deps(self, number: int) -> list[int]:
        """Return all that a task waits for, the task before it in its stream included."""
        before = self._before[number]
        return sorted({*self._waits[number], *(() if before is None else (before,))})

    def messages(self, rank: int, order: list[int]) -> Iterator[Any]:
        """Yield a rank's metadata and nodes."""
        yield self._describe(rank)
        carried_us: dict[str, float] = {}
        for number in order:
            task = self.tasks[number]
            node = new_node(number, str(task["name"]), _NODE_TYPES.get(task["kind"], "COMP_NODE"))
            if self._before[number] is not None:
                node.ctrl_deps.append(self._before[number])
            node.data_deps.extend(self._data_deps(number))
            if task["kind"] in _NODE_TYPES:
                self._add_message(node, task, self._groups_of[number])
            else:
                self._add_work(node, task, carried_us)
            add_attributes(node, {OWN + column: task[column] for column in OWN_COLUMNS})
            yield node

    def _describe(self, rank: int) -> Any:
        message = new_metadata()
        facts = self.source.facts.to_dict() if self.source else {}
        metadata = self.metadata
        known = {"workload": metadata.workload, "device_name": metadata.device_name}
        attributes: dict[str, Any] = {
            "version": __version__,
            "rank": rank,
            "ranks": self.ranks,
            "plan": metadata.plan_text or None,
            "nodes": len(self._of_rank.get(rank, [])),
            **{key: known.get(key) or facts.get(key) for key in _SOURCE_FACTS},
        }
        if metadata.batch:
            attributes["batch"] = metadata.batch // metadata.plan.data
        if self.ranks == 1 and self._tensors:
            kept = {key: facts[key] for key in _MODEL_FACTS if key in facts}
            named = facts.get("parameters", [])
            kept["ready"] = [
                [g["ready_after_op_id"], named[g["index"]]["shape"] if g["index"] >= 0 else None]
                for g in facts.get("gradients", [])
            ]
            attributes["model"] = json.dumps(kept, sort_keys=True)
        add_attributes(message, {OWN + key: value for key, value in attributes.items()})
        return message

    def _add_work(self, node: Any, task: Row, carried_us: dict[str, float]) -> None:
        """Add a duration, with the remainder of the stream's earlier ones, and the work."""
        duration_s = task["duration_s"]
        if duration_s is None or not 0 <= duration_s < math.inf:
            raise InputError(f"{_name_task(task)}: its duration is {duration_s}")
        due_us = carried_us.get(task["stream"], 0.0) + duration_s * _US_PER_S
        node.duration_micros = round(due_us)
        carried_us[task["stream"]] = due_us - node.duration_micros
        add_attributes(node, {"is_cpu_op": task["stream"] == _HOST_STREAM})
        if task["kind"] != "compute" or task["op_id"] is None or not self._operators:
            return
        operator = self._operators[task["op_id"]]
        add_attributes(node, {"num_ops": operator["flop"]})
        moved = operator["read_bytes"] + operator["write_bytes"]
        add_attributes(node, {"tensor_size": moved}, "uint64_val")
        own = {"module": operator["module"] or None, "forward_op_id": operator["forward_op_id"]}
        add_attributes(node, {OWN + key: value for key, value in own.items()})
        if self._tensors:
            self._add_tensors(node, operator)
            add_attributes(node, {OWN + "cpu_ns": operator["cpu_ns"] if self._host_inside else None})

    def _add_tensors(self, node: Any, operator: Row) -> None:
        """Add an operator's tensors as PyTorch's execution trace words them."""
        for side in ("input", "output"):
            rows = [self._tensors[index] for index in operator[f"{side}_ids"]]
            info = getattr(node, f"{side}s")
            info.values = json.dumps(
                [[r["tensor_id"], r["storage_id"], 0, math.prod(r["shape"]), r["elem_bytes"], ""] for r in rows]
            )
            info.shapes = json.dumps([list(r["shape"]) for r in rows])
            info.types = json.dumps([f"Tensor({r['dtype']})" for r in rows])
            categories = [r["category"] for r in rows]
            add_attributes(node, {f"{OWN}{side}_categories": categories})

    def _add_message(self, node: Any, task: Row, group: tuple[int, ...]) -> None:
        """Add what a collective, a send or a recv moves, and between whom."""
        size = task["message_bytes"]
        add_attributes(node, {"is_cpu_op": False})
        if task["kind"] == "collective":
            add_attributes(node, {"comm_type": COMM_TYPES[task["name"]]})
            if task["name"] == "all_gather":
                add_attributes(node, {OWN + "message_bytes": size})
                size = -(-size // len(group))  # Chakra counts one rank's shard
            if group in self.groups:
                add_attributes(node, {"pg_name": str(self.groups[group])})
        else:
            source, target = task["rank"], task["peer"]
            if task["kind"] == "recv":
                source, target = target, source
            tag = self._tags[task["match_id"]]
            if tag > _LARGEST_TAG:
                raise InputError(f"{_name_task(task)}: more messages than Chakra has tags")
            ends = {"comm_src": source, "comm_dst": target, "comm_tag": tag}
            add_attributes(node, ends, "int32_val")
        add_attributes(node, {"comm_size": size})


def _name_task(task: Row) -> str:
    return f"task {task['task_id']} '{task['name']}' of rank {task['rank']}"


STEP = "ProfilerStep#0"
_STREAM_NUMBERS = {"compute": 7}
_FIRST_OTHER_STREAM = 20
_HOST_THREAD = 1
_KERNELS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_to_all": "SendRecv",
}
_NOTED = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_all",
}
"""Collectives as ``record_param_comms`` names them, where that is another name."""
_CALLS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "send": "Send",
    "recv": "Recv",
}
_EACH = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Collectives whose count is that of one rank's part."""
_BYTES, _SUM = 1, 0
"""``ncclUint8`` and ``ncclSum``."""
_FIRST_COMMUNICATOR, _FIRST_STREAM = 0xC000, 0x5000
"""Handles, which a prediction has none of: a number each is enough to tell them apart."""


def write_kineto(timeline: pd.DataFrame, folder: str | Path) -> list[Path]:
    """Write ``rank-N.json.gz`` for every rank of a predicted step; return the files in order of rank.

    ``timeline``: columns of ``tables.TIMELINE``, of a GPU's step. Tasks on a GPU are kernels and copies on streams,
    tasks of the host operators with the launch of their kernel at their end; where the host costs nothing, a kernel is
    launched as it starts. Kernels carry the operator's name (a prediction knows no other), those of collectives NCCL's
    with PyTorch's metadata; a kernel of a collective does not hold the wait for late ranks, which a measured one does.
    Raises InputError when the folder holds other files, which a reader of folders would take for ranks.
    """
    goal, members = make_folder(folder), find_members(timeline)
    ranks = sorted(int(rank) for rank in timeline["rank"].unique())
    files = []
    for rank in ranks:
        tasks = timeline[timeline["rank"] == rank]
        run = {"backend": "nccl", "rank": rank, "world_size": len(ranks)}
        content = {
            "schemaVersion": 1,
            "distributedInfo": run,
            "displayTimeUnit": "ms",
            "traceEvents": list(_describe_rank(tasks, members)),
        }
        files.append(goal / f"rank-{rank}.json.gz")
        with atomic_path(files[-1]) as temporary:
            # With spaces after colons, as Kineto writes: readers look for '"rank": 0' in the text.
            text = json.dumps(content).encode()
            temporary.write_bytes(gzip.compress(text, 2, mtime=0))
    return files


def make_folder(folder: str | Path) -> Path:
    """Make a folder for a file a rank; InputError when it holds others, which readers would take for ranks."""
    goal = Path(folder)
    if goal.exists() and any(goal.iterdir()):
        raise InputError("the folder is not empty", file=goal, fix="name a new one")
    goal.mkdir(parents=True, exist_ok=True)
    return goal


def find_members(timeline: pd.DataFrame) -> dict[int, list[int]]:
    """Return the ranks of each exchange, by ``match_id``, ascending."""
    ranks = timeline.groupby("match_id")["rank"].unique()
    return {int(str(match)): sorted(map(int, members)) for match, members in ranks.items()}


def _describe_rank(tasks: pd.DataFrame, members: dict[int, list[int]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank: the step, the host's operators and launches, kernels and copies."""
    rank = int(tasks["rank"].iloc[0])
    yield {
        "ph": "X",
        "cat": "user_annotation",
        "name": STEP,
        "pid": rank,
        "tid": _HOST_THREAD,
        "ts": 0.0,
        "dur": _to_us(tasks["end_s"].max()),
        "args": {"External id": 0},
    }
    rows: list[Any] = list(tasks.sort_values(["start_s", "task_id"], kind="stable").itertuples(index=False))
    launches = {task.task_id + 1: task for task in rows if task.kind == "host"}
    device = [task for task in rows if task.kind != "host"]
    streams = dict(_STREAM_NUMBERS)
    for number, task in enumerate(device, start=1):
        stream = streams.setdefault(str(task.stream), _FIRST_OTHER_STREAM + len(streams))
        yield from _describe_task(task, number, stream, members, launches.get(task.task_id))


def _describe_task(
    task: Any, number: int, stream: int, members: dict[int, list[int]], launch: Any
) -> Iterator[dict[str, Any]]:
    """Yield a task's operator, its launch (the host's task before it, None where that costs nothing), its device part."""
    message = _describe_message(task, members)
    begin, end = (task.start_s, task.start_s) if launch is None else (launch.start_s, launch.end_s)
    thread = {"ph": "X", "pid": int(task.rank), "tid": _HOST_THREAD if launch else 1000 + stream}
    name = f"nccl:{task.name}" if message else task.name
    yield thread | {
        "cat": "cpu_op",
        "name": name,
        "ts": _to_us(begin),
        "dur": _to_us(end) - _to_us(begin),
        "args": {"External id": number} | message,
    }
    if task.end_s <= task.start_s and not message:
        return  # a view: it runs nothing
    yield thread | {
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": _to_us(end),
        "dur": 0.0,
        "args": {"External id": number, "correlation": number},
    }
    copied = task.kind == "memcpy"
    kernel = f"Memcpy DtoD ({task.name})" if copied else task.name
    if task.kind in ("collective", "send", "recv"):
        kernel = f"ncclDevKernel_{_KERNELS.get(task.name, 'SendRecv')}"
    yield {
        "ph": "X",
        "cat": "gpu_memcpy" if copied else "kernel",
        "name": kernel,
        "pid": 0,
        "tid": stream,
        "ts": _to_us(task.start_s),
        "dur": _to_us(task.end_s) - _to_us(task.start_s),
        "args": {"External id": number, "correlation": number, "device": 0, "stream": stream} | message,
    }


def _describe_message(task: Any, members: dict[int, list[int]]) -> dict[str, Any]:
    """Return what PyTorch notes beside a collective; its elements are bytes, as a prediction counts."""
    if task.kind != "collective":
        return {}
    ranks = members.get(int(task.match_id), [int(task.rank)])
    size, parts = int(task.message_bytes), len(ranks)
    return {
        "Collective name": _NOTED.get(task.name, task.name),
        "dtype": "Byte",
        "In msg nelems": size // parts if task.name == "all_gather" else size,
        "Out msg nelems": size // parts if task.name == "reduce_scatter" else size,
        "Group size": parts,
        "Process Group Ranks": json.dumps(ranks),
    }


def _to_us(time_s: float) -> float:
    """Return a time in microseconds, to whole nanoseconds, so that tasks that touch still touch."""
    return round(time_s * NS_PER_S) / NS_PER_US


def write_nccl_log(timeline: pd.DataFrame, folder: str | Path, ranks_per_node: int | None = None) -> list[Path]:
    """Write ``rank-N.log`` for every rank of a predicted step; return the files in order of rank.

    ``timeline``: columns of ``tables.TIMELINE``. ``ranks_per_node``: all ranks by default. Calls stand in the order in
    which they start, elements are bytes, buffers ``(nil)``; each group of ranks on each stream has a communicator, as
    PyTorch's process groups have, and two ranks that send have one too. An all-to-all is a send to every rank and a
    receive from it, as PyTorch calls it. Raises InputError when the folder holds other files.

    Source: NVIDIA/nccl, ``src/enqueue.cc`` and ``src/init.cc`` (what a line holds).
    """
    ranks = sorted(int(rank) for rank in timeline["rank"].unique())
    goal, members = make_folder(folder), find_members(timeline)
    exchanges = timeline[timeline["kind"].isin(COMMUNICATION_KINDS) & timeline["match_id"].notna()]
    exchanges = exchanges.sort_values(["start_s", "task_id"], kind="stable")
    groups = zip(exchanges["stream"], (tuple(members[int(match)]) for match in exchanges["match_id"]), strict=True)
    known = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    files = []
    for rank in ranks:
        calls = exchanges[exchanges["rank"] == rank].itertuples(index=False)
        node, device = divmod(rank, ranks_per_node or len(ranks))
        head = f"node{node}:{rank}:{rank} [{device}] NCCL INFO "
        lines = [head + line for line in _describe_calls(rank, device, list(calls), members, known)]
        files.append(goal / f"rank-{rank}.log")
        with atomic_path(files[-1]) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines))
    return files


def _describe_calls(
    rank: int,
    device: int,
    calls: list[Any],
    members: dict[int, list[int]],
    known: dict[tuple[str, tuple[int, ...]], int],
) -> Iterator[str]:
    """Yield what a rank logs: the communicators that it is in, then its calls."""
    for (_, group), number in known.items():
        if rank in group:
            yield (
                f"ncclCommInitRank comm {_FIRST_COMMUNICATOR + number:#x} rank {group.index(rank)} nranks {len(group)} "
                f"cudaDev {device} nvmlDev {device} busId {device:x}000 commId {number + 1:#x} - Init COMPLETE"
            )
    done: Counter[int] = Counter()
    for call in calls:
        group = tuple(members[int(call.match_id)])
        number = known[call.stream, group]
        size = int(call.message_bytes) // (len(group) if call.name in _EACH else 1)
        for name, peer in _list_calls(call, group.index(rank), len(group)):
            yield (
                f"{name}: opCount {done[number]:x} sendbuff (nil) recvbuff (nil) count {size} datatype {_BYTES} "
                f"op {_SUM} root {peer} comm {_FIRST_COMMUNICATOR + number:#x} [nranks={len(group)}] "
                f"stream {_FIRST_STREAM + number:#x}"
            )
        done[number] += 1


def _list_calls(call: Any, place: int, size: int) -> list[tuple[str, int]]:
    """Return the calls of NCCL that a task is, each with the root, or the peer of a send or receive."""
    kind = call.kind if call.kind in _CALLS else call.name
    if kind in ("send", "recv"):
        return [(_CALLS[kind], 1 - place)]
    if kind in _CALLS:
        return [(_CALLS[kind], 0)]
    return [(name, peer) for peer in range(size) for name in ("Send", "Recv")]
