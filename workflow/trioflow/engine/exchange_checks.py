"""The check of one exchange's tasks, row by row, and how errors name them."""

from __future__ import annotations

import math
from typing import Any

from trioflow.errors import SimulationError


def read_first_word(name: str) -> str:
    """Return the word of a collective's name that says which one it is; empty for none."""
    return (name.split(maxsplit=1) or [""])[0]


def read_group(text: str) -> tuple[int, ...] | None:
    """Return the ranks of a group that is written as a text, None where it is none."""
    try:
        return tuple(int(rank) for rank in text.split(","))
    except ValueError:
        return None


def check_match(members: list[dict[str, Any]]) -> None:
    """Check the tasks of one match, row by row.

    Parameters
    ----------
    members : list of dict
        Rows of ``tables.TASKS`` with a common ``match_id``; None for nulls.

    Raises
    ------
    SimulationError
        When they do not fit together; names them.
    """
    match = members[0]["match_id"]
    kinds = sorted({str(member["kind"]) for member in members})
    if kinds == ["collective"]:
        collective = _check_collective(match, members)
    elif set(kinds) <= {"send", "recv"}:
        collective = "send"
        _check_message(match, members)
    else:
        raise SimulationError(
            f"match {match} joins tasks of the kinds {', '.join(kinds)}: "
            + "; ".join(name_task(member) for member in members)
        )
    if len({member["message_bytes"] for member in members}) > 1:
        raise SimulationError(
            f"the sizes of one {collective} differ: "
            + "; ".join(f"{name_task(m)} has {m['message_bytes']} bytes" for m in members)
        )
    durations = [member["duration_s"] for member in members]
    if (members[0]["message_bytes"] is None) == (None in durations):
        raise SimulationError(
            f"{name_task(members[0])} needs either message_bytes or, on every member, duration_s"
        )
    for member in members:
        if member["message_bytes"] is None and not 0 <= member["duration_s"] < math.inf:
            raise SimulationError(
                f"{name_task(member)} has the duration {member['duration_s']}; "
                "a collective or message needs one in seconds, or message_bytes"
            )


def _check_collective(match: int, members: list[dict[str, Any]]) -> str:
    """Return the collective, when all members agree."""
    for column in ("group", "name"):
        if len({member[column] for member in members}) > 1:
            raise SimulationError(
                f"the members of match {match} differ in their {column}: "
                + "; ".join(f"{name_task(m)} has {m[column]}" for m in members)
            )
    group = read_group(str(members[0]["group"]))
    if group is None:
        raise SimulationError(
            f"{name_task(members[0])} has the group {members[0]['group']!r}; "
            "write its ranks joined by commas"
        )
    present = [int(member["rank"]) for member in members]
    missing = sorted(set(group) - set(present))
    if missing or sorted(present) != sorted(group):
        raise SimulationError(
            f"the group {list(group)} of match {match} does not match its tasks: "
            + (f"rank {', '.join(map(str, missing))} never joins; " if missing else "")
            + "; ".join(name_task(member) for member in members)
        )
    return read_first_word(str(members[0]["name"]))


def _check_message(match: int, members: list[dict[str, Any]]) -> None:
    """Check that there is one sender and one receiver."""
    if sorted(str(member["kind"]) for member in members) != ["recv", "send"]:
        raise SimulationError(
            f"match {match} needs one send and one recv and has "
            + "; ".join(f"the {member['kind']} {name_task(member)}" for member in members)
        )
    send, recv = sorted(members, key=lambda member: str(member["kind"]), reverse=True)
    for one, other in ((send, recv), (recv, send)):
        if one["peer"] is not None and int(one["peer"]) != int(other["rank"]):
            raise SimulationError(
                f"{name_task(one)} has the peer {one['peer']} and is matched with {name_task(other)}"
            )


def name_task(row: dict[str, Any]) -> str:
    """Name a task for a message."""
    return f"task {row['task_id']} '{row['name']}' of rank {row['rank']}"
