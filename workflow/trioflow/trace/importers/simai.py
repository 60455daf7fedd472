"""A trace from a workload file of SimAI, as AICB generates it: one rank's layers, their times and their messages.

The first line names the loop and the degrees (``HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 8 ep: 1
pp: 1 vpp: 1 ga: 2 all_gpus: 16 ...``), the second counts the layers, each further one is a layer in 12 words: name,
dependency, then time [ns], message and its bytes of forward, of the gradient of the input and of that of the weights,
and what follows a message [ns]. The layers of all micro-batches stand one after the other. SimAI runs forward over
all of them, then backward from the last to the first: it waits for the messages of forward and of the inputs'
gradients, and for those of the weights' at the end. A size is that of the whole buffer.

Source: aliyun/SimAI, ``Workload.cc`` (order, columns, whose group a message is of) and ``MockNcclGroup.cc`` (groups);
aliyun/aicb, ``SimAI_training_workload_generator.py`` (sizes).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trioflow.base.errors import TraceError
from trioflow.base.input_files import read_text
from trioflow.base.provenance import digest_file, stamp
from trioflow.base.units import ns_to_s
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.importers.ranks import read_head
from trioflow.trace.importers.sources import CsvColumn, CsvRow, ImportOptions, check_cells, whole
from trioflow.trace.profile.messages import MOST_RANKS
from trioflow.trace.store import Trace

_LOOP = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
_LOOPS = ("HYBRID_", "DATA", "MODEL", "MICRO", "DISTRIBUTED_INFERENCE")
"""How the first line of a file of ASTRA-sim 1 may begin, whose format it is."""
_TENSOR, _DEGREES = "model_parallel_NPU_group", ("ep", "pp", "vpp", "ga")
_RANKS, _AGAIN = "all_gpus", ("checkpoints", "checkpoint_initiates")
_COLLECTIVES = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "REDUCESCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
}
_PARTS = ("forward", "input gradient", "weight gradient")
_LONGEST_NS = 10**15
_MOST_BYTES = 1 << 50
_MESSAGE = CsvColumn(
    ("message",),
    f"NONE or one of {', '.join(_COLLECTIVES)}, with _EP, _DP_EP or nothing",
    f"NONE|({'|'.join(_COLLECTIVES)})(_EP|_DP_EP)?",
    lambda text: "" if text == "NONE" else text,
)
_COLUMNS = {
    "name": CsvColumn(("name",)),
    "dependency": CsvColumn(("dependency",)),
    **{
        f"{part}'s {what}": column
        for part in _PARTS
        for what, column in (
            ("time", whole("time", highest=_LONGEST_NS)),
            ("message", _MESSAGE),
            ("bytes", whole("bytes", highest=_MOST_BYTES)),
        )
    },
    "what follows a message": whole("after", highest=_LONGEST_NS),
}
"""The words of a layer."""


class _Work(NamedTuple):
    """Forward or one of the gradients of a layer: what it computes [ns] and then sends, and what follows that [ns]."""

    layer: str
    compute_ns: int
    message: str  # as the file spells it; "" for none
    size: int
    after_ns: int


_Layer = tuple[_Work, ...]
"""Forward, and the gradients of the input and of the weights."""


@dataclass
class _Program:
    """Operators and messages of rank 0, in the order in which it runs them."""

    groups: dict[str, list[int]]
    operators: list[ObservedOperator] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    waits: list[list[int]] = field(default_factory=list)

    def compute(self, name: str, phase: str, time_ns: int) -> None:
        if time_ns:
            self.operators.append(ObservedOperator(name, phase, device_ns=time_ns))

    def send(self, work: _Work, phase: str, inner: str, asynchronous: bool) -> int | None:
        """Add a layer's message; None where it is empty or its group has one rank."""
        kind, _, suffix = work.message.partition("_")
        group = suffix or inner
        if not work.size or not kind or len(self.groups[group]) < 2:
            return None
        place = len(self.operators)
        self.operators.append(ObservedOperator(_COLLECTIVES[kind], phase, kind="collective"))
        self.messages.append(
            {
                "op_id": place,
                "name": _COLLECTIVES[kind],
                "message_bytes": work.size,
                "group": group,
                "ranks": self.groups[group],
                "asynchronous": asynchronous,
            }
        )
        return place


def recognise(path: str | Path) -> bool:
    """Return whether a file begins as a workload of ASTRA-sim 1 or SimAI does."""
    first, _, second = read_head(Path(path)).partition(b"\n")
    count = second.split(b"\n", 1)[0].strip()
    return first.decode("utf-8", "replace").lstrip("\ufeff").startswith(_LOOPS) and count.isdigit()


def import_simai(path: str | Path, options: ImportOptions) -> Trace:
    """Read a workload file: the program of rank 0, which ``simulate --as-traced`` runs on all ranks.

    ``options``: GPU, batch (samples of a rank), precision, and number of ranks, as far as the file does not say them. Raises TraceError, which
    names the line, when the file is cut or not of this loop, or an option is missing.
    """
    path = Path(path)
    lines = [
        (number, line.split())
        for number, line in enumerate(read_text(path, TraceError).splitlines(), 1)
        if line.strip()
    ]
    degrees = _read_degrees(lines[0][1] if lines else ["nothing"], path, options)
    layers = _read_layers(lines, path)
    program = _write_program(layers, _list_groups(degrees, path))
    total_ns = sum(one.device_ns for one in program.operators)
    if not total_ns:
        raise TraceError("no layer has a time", file=path, fix="generate it with times: AICB measures them with aiob")
    return assemble_trace(
        program.operators,
        {
            "source": "SimAI",
            **stamp([path]),
            "workload": options.workload or path.name.partition(".")[0],
            "batch": int(options.need("batch", path)),
            "device": "cuda",
            "device_name": str(options.need("gpu", path)),
            "precision": str(options.need("precision", path)),
            "optimizer": options.optimizer or "unknown",
            "step_time_s": ns_to_s(total_ns),
            "step_time_source": "busy",
            "tail_s": 0.0,
            "inputs": {path.name: digest_file(path)[:16]},
            "communication": program.messages,
            "program": {"rank": 0, "world_size": degrees[_RANKS], "streams": {}, "waits": program.waits},
            "operators_without_tensors": len(program.operators),
            "warnings": _list_warnings(degrees, layers),
        },
        ready=[],
        file=path,
    )


def _read_degrees(words: Sequence[str], path: Path, options: ImportOptions) -> dict[str, int]:
    """Return what the first line says, 1 for degrees that it leaves out; SimAI takes all_gpus as an argument too."""
    if words[0].lstrip("\ufeff") != _LOOP:
        raise TraceError(
            f"the loop is {words[0]:.60}",
            file=path,
            place="line 1",
            fix=f"give a file of {_LOOP}, which AICB writes; of others the groups and the order are not read",
        )
    given = {
        word.rstrip(":"): value
        for word, value in pairwise(words)
        if word.rstrip(":") in (_TENSOR, *_DEGREES, _RANKS, *_AGAIN, "pp_comm")
    }
    numbers = _read_numbers(given, path, 1)
    ranks = int(options.need("world_size", path, numbers.get(_RANKS)))
    degrees: dict[str, int] = {**dict.fromkeys(_DEGREES, 1), **numbers, _RANKS: ranks}
    if _TENSOR not in numbers:
        raise TraceError(f"{_TENSOR} is missing", file=path, place="line 1", fix="generate the file again")
    if any(numbers.get(name) for name in _AGAIN):
        raise TraceError(
            "it recomputes layers (checkpoints), which is not read",
            file=path,
            place="line 1",
            fix="generate it without, as AICB does: it doubles the forward times instead",
        )
    return degrees


def _list_groups(degrees: dict[str, int], path: Path) -> dict[str, list[int]]:
    """Return the ranks of each group that rank 0 is in; raise TraceError where degrees do not fit."""
    ranks, tensor, expert, pipeline = (degrees[name] for name in (_RANKS, _TENSOR, "ep", "pp"))
    copies = ranks // max(tensor * pipeline, 1)
    if not 1 <= ranks <= MOST_RANKS or copies * tensor * pipeline != ranks or expert < 1 or copies % expert:
        raise TraceError(
            f"{ranks} ranks are no whole number of {tensor} tensor x {pipeline} pipeline x {expert} expert ranks, "
            f"or more than {MOST_RANKS}",
            file=path,
            place="line 1",
            fix="correct the degrees",
        )
    return {
        "TP": list(range(tensor)),
        "DP": list(range(0, ranks, tensor * pipeline)),
        "EP": list(range(0, expert * tensor, tensor)),
        "DP_EP": list(range(0, copies * tensor, expert * tensor)),
    }


def _read_layers(lines: Sequence[tuple[int, list[str]]], path: Path) -> list[_Layer]:
    """Return the layers; raise TraceError where one is cut or their number is not what line 2 says."""
    if len(lines) < 2 or len(lines[1][1]) != 1:
        raise TraceError("the number of layers is missing", file=path, place="line 2", fix="generate it again")
    count = _read_numbers({"layers": lines[1][1][0]}, path, 2)["layers"]
    if count != len(lines) - 2:
        raise TraceError(
            f"{len(lines) - 2} layers follow, line 2 says {count}",
            file=path,
            fix="copy or generate the file again: it is cut or was edited",
        )
    titles = {name: name for name in _COLUMNS}
    for number, words in lines[2:]:
        if len(words) != len(_COLUMNS):
            raise TraceError(
                f"{len(words)} words, a layer has {len(_COLUMNS)}",
                file=path,
                place=f"line {number}",
                fix="generate the file again",
            )
    rows = [CsvRow(path, number, titles, dict(zip(titles, words, strict=True))) for number, words in lines[2:]]
    check_cells(rows, _COLUMNS)
    return [
        tuple(
            _Work(
                row.cells["name"],
                row.cells[f"{part}'s time"],
                row.cells[f"{part}'s message"],
                row.cells[f"{part}'s bytes"],
                row.cells["what follows a message"],
            )
            for part in _PARTS
        )
        for row in rows
    ]


def _read_numbers(words: dict[str, str], path: Path, line: int) -> dict[str, Any]:
    """Return the whole numbers that a line gives by their names."""
    row = CsvRow(path, line, {name: name for name in words}, dict(words))
    check_cells([row], dict.fromkeys(words, whole("number", highest=1 << 40)))
    return row.cells


def _write_program(layers: Sequence[_Layer], groups: dict[str, list[int]]) -> _Program:
    """Return what rank 0 runs: forward over all layers, backward from the last, the weights' messages' ends."""
    program = _Program(groups)
    late: list[tuple[int, int]] = []
    for forward, *_ in layers:
        _run_awaited(program, forward, "forward")
    for _, of_input, of_weight in reversed(layers):
        _run_awaited(program, of_input, "backward")
        program.compute(of_weight.layer, "backward", of_weight.compute_ns)
        sent = program.send(of_weight, "backward", "DP", asynchronous=True)
        if sent is not None:
            late.append((sent, of_weight.after_ns))
    for sent, after_ns in late:
        if after_ns:
            program.waits.append([len(program.operators), sent])
            program.compute("after a message", "optimizer", after_ns)
    return program


def _run_awaited(program: _Program, work: _Work, phase: str) -> None:
    program.compute(work.layer, phase, work.compute_ns)
    if program.send(work, phase, "TP", asynchronous=False) is not None:
        program.compute("after a message", phase, work.after_ns)


def _list_warnings(degrees: dict[str, int], layers: Sequence[_Layer]) -> list[str]:
    warnings = []
    if degrees["pp"] > 1:
        warnings.append(
            f"the file holds the layers of one of {degrees['pp']} pipeline stages: its sends and the time in which "
            "stages wait for one another are not in the step, which is a lower bound"
        )
    if all(work.compute_ns <= 1 for layer in layers for work in layer):
        warnings.append("every compute time is 1 ns or less: AICB was run without measuring any (aiob)")
    return warnings
