"""Chakra files that trioflow wrote, back as a task graph."""

from pathlib import Path
from typing import Any

import pandas as pd
from trioflow import tables
from trioflow.base.errors import TraceError
from trioflow.base.provenance import read_json
from trioflow.base.units import NS_PER_US, ns_to_s
from trioflow.export.rank_files import OWN, OWN_COLUMNS
from trioflow.parallel.task_graph import TaskGraph
from trioflow.trace.importers.chakra_nodes import COMM_TYPES, read_attributes, read_messages


def read_chakra_graph(prefix: str | Path) -> TaskGraph:
    """Return the task graph that ``PREFIX.<rank>.et`` and their groups describe.

    Durations are the whole microseconds of the files. What a task waits for
    leaves out the task before it in its stream: streams run in order anyway.

    Raises
    ------
    TraceError
        When a file is missing, broken or not written by trioflow.
    InputError
        When the file of groups is missing or no JSON.
    """
    groups = read_json(f"{prefix}.comm_groups.json")
    rows: list[dict[str, Any]] = []
    edges: list[tuple[int, int]] = []
    ranks, rank = 1, 0
    while rank < ranks:
        path = Path(f"{prefix}.{rank}.et")
        for number, (place, message) in enumerate(read_messages(path)):
            told = read_attributes(message)
            if not number:
                ranks = int(told.get(OWN + "ranks") or 0)
                if told.get(OWN + "rank") != rank:
                    raise TraceError("not written by trioflow for this rank", file=path)
                continue
            try:
                rows.append(_read_task(message, told, rank, ranks, groups))
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(
                    f"node {message.id} is not one of trioflow's ({error!r})", file=path, place=place
                ) from None
            before = set(message.ctrl_deps)
            edges += [(message.id, other) for other in message.data_deps if other not in before]
        rank += 1
    rows.sort(key=lambda row: int(row["task_id"]))
    tasks = pd.DataFrame(rows, columns=tables.TASKS.names)
    for field in tables.TASKS:
        if field.type in (tables.INT, tables.FLOAT):
            kind = "Int64" if field.type == tables.INT else "float64"
            tasks[field.name] = tasks[field.name].astype(kind)
    columns = tables.DEPENDENCIES.names
    return TaskGraph(tasks, pd.DataFrame(sorted(edges), columns=columns, dtype="int64"))


def _read_task(node: Any, told: dict[str, Any], rank: int, ranks: int, groups: dict[str, list[int]]) -> dict[str, Any]:
    """Return a row of the task table."""
    row: dict[str, Any] = {"task_id": node.id, "rank": rank, "name": node.name}
    row |= {column: told.get(OWN + column) for column in OWN_COLUMNS}
    if row["kind"] == "collective":
        group = groups[told["pg_name"]] if "pg_name" in told else range(ranks)
        row["group"] = ",".join(map(str, group))
        if COMM_TYPES[node.name] != told["comm_type"]:
            raise ValueError(f"comm_type {told['comm_type']} for {node.name}")
        row["message_bytes"] = told.get(OWN + "message_bytes", told["comm_size"])
    elif row["kind"] in ("send", "recv"):
        row["message_bytes"] = told["comm_size"]
        row["peer"] = told["comm_dst" if row["kind"] == "send" else "comm_src"]
    else:
        row["duration_s"] = ns_to_s(node.duration_micros * NS_PER_US)
    return row
