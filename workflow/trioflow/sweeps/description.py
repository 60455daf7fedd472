"""The description of a sweep, ``config/sweeps/<name>.yaml``: read, checked, and spelled out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.input_files import parse_cells, read_text
from trioflow.base.settings import NAME, check_settings, suggest_name
from trioflow.base.yaml_files import parse_yaml, read_yaml
from trioflow.costmodel.choices import THIS_MACHINE
from trioflow.hardware.platform import list_platforms
from trioflow.sweeps.parameters import PARAMETERS, fill_values
from trioflow.trace.store import shipped_traces

DEFAULT_CHUNK = 64
"""Scenarios of a job, unless the settings or the description say otherwise."""
MOST_SCENARIOS = 1_000_000
"""More than this is taken for a mistake in a grid."""


@dataclass(frozen=True)
class Sweep:
    """What a description asks for."""

    name: str  # name of its file, without the ending
    description: str  # what it is for, in a sentence
    interval: bool  # whether every scenario has an interval, for which it is simulated three times
    chunk: int  # scenarios of a job; 0 for the settings' own
    # Folders or packs by name; further ones of a workload at other batches
    traces: dict[str, list[str]]
    platforms: dict[str, str]  # platform files by name
    # A value for every parameter; each different scenario once, in the order of the description.
    # The place in the list is its number.
    scenarios: list[dict[str, Any]]


def sweep_schema() -> dict[str, Any]:
    """Describe ``config/sweeps/<name>.yaml`` as a JSON schema (2020-12)."""
    single = {
        name: {key: value for key, value in entry.items() if key != "default"}
        for name, entry in PARAMETERS.items()
    }
    several = {
        name: {"description": e["description"], "type": "array", "items": e, "minItems": 1}
        for name, e in single.items()
    }
    names = {"type": "object", "propertyNames": {"pattern": NAME}}
    files = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
    block = {"type": "object", "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "sweep",
        "description": "A sweep, config/sweeps/<name>.yaml; generated from trioflow.sweeps.",
        **block,
        "required": ["description"],
        "properties": {
            "description": {
                "description": "what the sweep is for, in a sentence",
                "type": "string", "minLength": 1,
            },
            "interval": {
                "description": "whether every scenario has an 80 % interval: it is simulated three times then",
                "type": "boolean", "default": True,
            },
            "chunk": {
                "description": "scenarios of a job; 0 for the settings' `sweeps.chunk`",
                "type": "integer", "minimum": 0, "default": 0,
            },
            "traces": {
                **names,
                "description": "folders or packs of traces by name, relative to where Snakemake runs;"
                " several of one workload at other batches",
                "additionalProperties": files, "default": {},
            },
            "platforms": {
                **names,
                "description": "platform files by name",
                "additionalProperties": {"type": "string", "minLength": 1}, "default": {},
            },
            "defaults": {
                **block, "properties": single, "default": {},
                "description": "values for what blocks and rows leave out",
            },
            "grid": {
                "description": "blocks whose values are combined, each with each; one value or a list of them",
                "type": "array", "items": {**block, "properties": several}, "default": [],
            },
            "list": {
                "description": "scenarios one by one",
                "type": "array", "items": {**block, "properties": single}, "default": [],
            },
            "table": {
                "description": "tab-separated file with a scenario a row, columns named as parameters; - for the default",
                "type": "string", "default": "",
            },
        },
    }  # fmt: skip


def load_sweep(path: str | Path) -> Sweep:
    """Read the description of a sweep.

    Raises InputError, which names the file, the place in it and the likely fix, when it cannot be
    read, a key or a value is unknown, a scenario lacks a trace or a platform, or there are no
    scenarios or a million.
    """
    file = Path(path)
    content = _read_yaml(file)
    for key in ("grid",):
        if isinstance(content.get(key), Mapping):
            content[key] = [content[key]]
    for block in content.get("grid") or [] if isinstance(content.get("grid"), list) else []:
        if isinstance(block, dict):
            block.update({k: v if isinstance(v, list) else [v] for k, v in block.items()})
    if isinstance(content.get("traces"), dict):
        listed = {k: v if isinstance(v, list) else [v] for k, v in content["traces"].items()}
        content["traces"] = listed
    settings = check_settings(content, sweep_schema(), file)
    known = {
        "trace": {*settings["traces"], *shipped_traces()},
        "platform": {*settings["platforms"], *list_platforms(), THIS_MACHINE},
    }
    unique: dict[tuple[Any, ...], dict[str, Any]] = {}
    for place, given in _spell_out(settings, file):
        _check_names(given, known, file, place)
        values = fill_values(given)
        unique.setdefault(tuple(values.values()), values)
        if len(unique) > MOST_SCENARIOS:
            raise InputError(
                f"more than {MOST_SCENARIOS} scenarios", file=file, place=place,
                fix="combine fewer values",
            )  # fmt: skip
    if not unique:
        raise InputError("no scenarios", file=file, fix="give a grid, a list or a table")
    return Sweep(
        file.stem, settings["description"], settings["interval"], settings["chunk"],
        settings["traces"], settings["platforms"], list(unique.values()),
    )  # fmt: skip


def _read_yaml(file: Path) -> dict[str, Any]:
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise InputError("not a mapping of keys to values", file=file, fix="see config/README.md")
    return content


def _spell_out(settings: Mapping[str, Any], file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every scenario's given values, with its place in the description."""
    common = settings["defaults"]
    for number, block in enumerate(settings["grid"]):
        axes = {name: block[name] for name in PARAMETERS if name in block}
        for combination in itertools.product(*axes.values()):
            yield f"grid.{number}", {**common, **dict(zip(axes, combination, strict=True))}
    for number, row in enumerate(settings["list"]):
        yield f"list.{number}", {**common, **row}
    if settings["table"]:
        for place, row in _read_table(Path(settings["table"]), file):
            yield place, {**common, **row}


def _check_names(
    given: Mapping[str, Any], known: Mapping[str, set[str]], file: Path, place: str
) -> None:
    """Refuse a scenario without trace or platform, or with one that nobody knows."""
    for name, names in known.items():
        value = given.get(name, "")
        if value not in names:
            problem = f"unknown {name} {value!r}" if value else f"the {name} is missing"
            fix = (
                suggest_name(value, sorted(names))
                if value
                else f"name one of {', '.join(sorted(names))}"
            )
            raise InputError(problem, file=file, place=f"{place}.{name}", fix=fix)


def _read_table(table: Path, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a tab-separated table, each cell checked against its parameter."""
    try:
        lines = parse_cells(read_text(table), table, delimiter="\t")
    except InputError as error:
        fix = f"{error.fix}, or mend the key table of {file}".removeprefix(", or ")
        raise InputError(error.problem, file=table, place=error.place, fix=fix) from None
    header = [cell.strip() for cell in lines[0][1]] if lines else []
    for column in header:
        if column not in PARAMETERS or header.count(column) > 1:
            raise InputError(
                f"unknown or repeated column {column!r}", file=table, place="line 1",
                fix=suggest_name(column, PARAMETERS),
            )  # fmt: skip
    schema = sweep_schema()["properties"]["list"]["items"]
    for number, line in lines[1:]:
        cells = [cell.strip() for cell in line]
        if not any(cells):
            continue
        if len(cells) != len(header):
            raise InputError(
                f"{len(cells)} cells found where {len(header)} are due", file=table,
                place=f"line {number}", fix="separate cells with one tab and write - for nothing",
            )  # fmt: skip
        given = {
            name: _parse(cell, PARAMETERS[name]["type"], table, f"line {number}, column {name}")
            for name, cell in zip(header, cells, strict=True)
            if cell not in ("", "-")
        }
        try:
            check_settings(given, schema, table)
        except InputError as error:
            place = f"line {number}, column {error.place}"
            raise InputError(error.problem, file=table, place=place, fix=error.fix) from None
        yield f"{table}, line {number}", given


def _parse(cell: str, kind: str, table: Path, place: str) -> Any:
    """Turn a cell into its parameter's type; what cannot be turned stays text and is refused later."""
    if kind == "string":
        return cell
    value = parse_yaml(cell, table, place=place)
    return float(value) if kind == "number" and isinstance(value, int) else value
