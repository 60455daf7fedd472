"""The program of one rank of a parallel run, as the facts of its trace hold it.

``communication`` has an entry a message: ``op_id`` of its row; ``name``, a collective, ``send`` or
``recv``; ``message_bytes`` as in ``tables.TASKS``; ``dtype``; ``ranks`` of its group, the root first;
``group``, the communicator; ``asynchronous``, whether the stream goes on beside it; of a send or
recv ``peer`` and, where messages overtake one another, ``tag``. ``program`` has ``rank`` and ``world_size``; ``streams``, the operators of each stream
but the first by its number; ``waits``, pairs of an operator and an earlier one that it waits for
beside the order of its stream.

Names, arguments and meaning of calls: the operators ``c10d``, ``_c10d_functional`` and ``_dtensor`` of
PyTorch 2.13 (``torch/csrc/distributed/c10d/Ops.cpp``, ``Functional.cpp``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trioflow.base.errors import TraceError
from trioflow.base.shipped import read_own_table
from trioflow.trace.facts import Facts

POINT_TO_POINT = ("send", "recv")


class Call(NamedTuple):
    """A call that communicates, in the words of a trace."""

    collective: str
    whole: str  # argument that holds the whole buffer; empty: the results do
    place: int | None = None  # of that argument, where profiles before PyTorch 2.2 are read by it
    noted: str = ""  # name under which ``record_param_comms`` notes it


CALLS = {
    row["call"]: Call(
        row["collective"], row["whole"], int(row["place"]) if row["place"] else None, row["noted"] or ""
    )
    for row in read_own_table("trace/program")
}  # fmt: skip
"""Calls of ``torch.distributed`` by name; a functional one's may end in ``_`` as well."""


@dataclass(frozen=True)
class Message:
    """One message of a rank's program."""

    op_id: int
    name: str
    message_bytes: int
    ranks: tuple[int, ...]
    group: str
    asynchronous: bool
    peer: int | None = None
    tag: int = 0  # sends and receives of one tag meet in order

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the group, ascending."""
        return tuple(sorted(self.ranks))


@dataclass(frozen=True)
class Program:
    """What a rank sends, and what of its operators waits for what."""

    rank: int
    world_size: int
    messages: Mapping[int, Message]  # by the operator
    streams: Mapping[int, int]  # of operators that are not in the first one
    waits: Mapping[int, Sequence[int]]  # earlier operators that one waits for


def read_program(facts: Facts, operators: int) -> Program:
    """Return the program that the facts of a trace hold; TraceError where there is none, or it contradicts itself."""
    known, place = facts.program, "program"
    if known is None:
        raise TraceError(
            f"the trace of {facts.workload} does not hold the messages of a rank of a parallel run",
            fix="capture it with --world-size, or import a profile whose communication says its group",
        )
    try:
        rank, world_size = int(known["rank"]), int(known["world_size"])
        place = "communication"
        messages = [_read_message(entry, world_size, rank) for entry in facts.communication or []]
        place = "program.streams"
        streams = {int(i): int(number) for number, ids in known["streams"].items() for i in ids}
        place = "program.waits"
        waits: dict[int, list[int]] = {}
        for op_id, earlier in known["waits"]:
            if not 0 <= int(earlier) < int(op_id) < operators:
                raise ValueError(f"operator {op_id} waits for {earlier}")
            waits.setdefault(int(op_id), []).append(int(earlier))
        named = [*(m.op_id for m in messages), *streams]
        if not all(0 <= op_id < operators for op_id in named) or not 0 <= rank < world_size:
            raise ValueError("it names operators or ranks that are not there")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        words = f"{error} is missing" if isinstance(error, KeyError) else error
        raise TraceError(
            f"{words}", file="trace.json", place=place, fix="capture it again"
        ) from None
    return Program(rank, world_size, {m.op_id: m for m in messages}, streams, waits)


def _read_message(entry: Mapping[str, Any], world_size: int, rank: int) -> Message:
    ranks = tuple(int(one) for one in entry["ranks"])
    peer = entry.get("peer")
    size = int(entry["message_bytes"])
    if rank not in ranks or not all(0 <= one < world_size for one in ranks) or size < 0:
        raise ValueError(f"a message of {size} bytes among the ranks {list(ranks)}")
    if len(set(ranks)) != len(ranks) or (entry["name"] in POINT_TO_POINT and peer not in ranks):
        raise ValueError(f"{entry['name']} among the ranks {list(ranks)}, to or from {peer}")
    return Message(
        int(entry["op_id"]), str(entry["name"]), size, ranks, str(entry.get("group", "")),
        bool(entry.get("asynchronous", True)), None if peer is None else int(peer),
        int(entry.get("tag", 0)),
    )  # fmt: skip
