"""The description of a sweep, ``config/sweeps/<name>.yaml``: read, checked, and spelled out as scenarios.

`load_sweep` is the door. The parameters of a scenario have names, limits, defaults and meanings, and give a plan
(`resolve_plan`). `Scenarios` are columns of a frame: a hundred thousand are spelled out, told apart and sorted in a
fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd

from trioflow.base.errors import InputError, PlanError
from trioflow.base.experiments import Plan
from trioflow.base.settings import NAME, NOTHING, check_settings, read_cells, suggest_name
from trioflow.base.yaml_files import parse_yaml, read_yaml
from trioflow.costmodel.choices import THIS_MACHINE
from trioflow.hardware.platform import list_platforms
from trioflow.network.across_nodes import INTER_NODE
from trioflow.parallel.plan import BUCKET_BYTES, choose_plan
from trioflow.prediction.question import STEP_WORDS, Options
from trioflow.trace.store import find_language_model, language_models, shipped_traces

Values = Mapping[str, Any]
"""A value for every parameter."""

_FIRST: dict[str, dict[str, Any]] = {
    "trace": {
        "description": "trace by its name under `traces`, a shipped one's name, or a language model by its name or"
        " configuration file",
        "type": "string",
    },
    "platform": {
        "description": "platform by its name under `platforms`, a shipped one's, or this-machine",
        "type": "string",
    },
    "ranks": {
        "description": "number of ranks; the data degree is what the other degrees leave of it;"
        " left out, the degrees decide",
        "type": "integer",
        "minimum": 1,
        "default": None,
    },
    "batch": {
        "description": "samples of the whole step; left out, `samples` on each replica",
        "type": "integer",
        "minimum": 1,
        "default": None,
    },
    "samples": {
        "description": "samples of each replica where `batch` is left out; by default the trace's own batch",
        "type": "integer",
        "minimum": 1,
        "default": None,
    },
    "micro_batch": {
        "description": "samples of a micro-batch where neither `micro_batches` nor `accumulate` says how many there are;"
        " by default 1 for a language model by name or configuration",
        "type": "integer",
        "minimum": 1,
        "default": None,
    },
}
_CHANGED: dict[str, dict[str, Any]] = {
    "data": {"default": None},
    "tensor": {"default": 1},
    "pipeline": {"default": 1},
    "schedule": {"default": "none"},
    "micro_batches": {"default": None},
    "stages_per_rank": {"default": None},
    "bucket_bytes": {"default": BUCKET_BYTES},
    "first_bucket_bytes": {"default": None},
}
"""Columns of a plan that have another default here; None, for what the command line would take."""
_NOT_GIVEN = 0
"""Value of a number that is left out and has no default; nobody can give it."""
ASSUMED = (
    *("network", "cost_model", "override", "collectives", "anchor", "stages", "mode", "last_batch", *STEP_WORDS),
    *("routing", *INTER_NODE, "operator_scales", "slow_ranks"),
)
"""Fields of ``Options`` that a scenario may give."""
_LAST: dict[str, dict[str, Any]] = {
    "compute_scale": {
        "description": "factor on every compute time",
        "type": "number",
        "exclusiveMinimum": 0,
        "default": 1.0,
    },
    "communication_scale": {
        "description": "factor on every communication time",
        "type": "number",
        "exclusiveMinimum": 0,
        "default": 1.0,
    },
    "rank_spread": {
        "description": "standard deviation of the logarithm of each rank's own compute factor, drawn by `seed`",
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "default": 0.0,
    },
    "seed": {
        "description": "seed of the draw; without `rank_spread` nothing is drawn",
        "type": "integer",
        "minimum": 0,
        "default": 0,
    },
}
_FACTORS = ("compute_scale", "communication_scale", "rank_spread")
_TYPES = {"int": ("integer", None), "float": ("number", None), "bool": ("boolean", False), "str": ("string", "")}
"""Types of fields as JSON has them, and their defaults where the field's own is none."""
PLAN_COLUMNS = tuple(column.name for column in fields(Plan) if column.name != "plan")


def _read_parameters(record: Any, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return declared fields of a dataclass as parameters; what is neither a number nor a truth is text, as the command has it."""
    values = {}
    for name in names:
        one = record.__dataclass_fields__[name]
        word, _, rest = str(getattr(one.type, "__name__", one.type)).partition(" | ")
        kind, default = _TYPES[word if rest in ("", "None") and word in _TYPES else "str"]
        schema = {key: list(value) if key == "enum" else value for key, value in one.metadata["schema"].items()}
        if schema.get("default") in (None, ()):
            schema["default"] = default
        values[name] = {"type": kind, **schema, **_CHANGED.get(name, {})}
    return values


PARAMETERS: dict[str, dict[str, Any]] = {
    **_FIRST,
    **_read_parameters(Plan, PLAN_COLUMNS),
    **_read_parameters(Options, ASSUMED),
    **_LAST,
}
"""JSON schema of each parameter; one without a default must be given."""


def fill_value(name: str, value: Any) -> Any:
    """Return the value of a parameter as scenarios hold it; its default for None."""
    if value is None:
        value = PARAMETERS[name].get("default", "")
    if name in _FACTORS:
        return float(value)
    return _NOT_GIVEN if value is None else value


def fill_values(given: Values) -> dict[str, Any]:
    """Return every parameter's value, in order; what changes nothing has its default. PlanError when a number is too low."""
    for name in given.keys() & PARAMETERS.keys():
        value, least = given[name], PARAMETERS[name].get("minimum")
        if least is not None and value < least:
            raise PlanError(f"{name} {value} is below {least}", fix="leave it out for the default")
    values = {name: fill_value(name, given.get(name)) for name in PARAMETERS}
    if not values["rank_spread"]:
        values["seed"] = 0
    return values


def read_assumptions(values: Values) -> dict[str, Any]:
    """Return what a scenario assumes, as fields of ``Options``; InputError where a factor is no number."""
    given = {name: values[name] for name in ASSUMED if values[name] not in ("", _NOT_GIVEN, False)}
    for name, kind in (("operator_scales", str), ("slow_ranks", int)):
        parts = [part.rsplit(maxsplit=1) for part in str(given.pop(name, "")).split(";") if part.strip()]
        try:
            given |= {name: [(kind(who.strip()), float(factor)) for who, factor in parts]} if parts else {}
        except ValueError:
            raise InputError(
                f"{name} {values[name]!r}", fix="write a name or rank and a factor; semicolons between"
            ) from None
    return given


def resolve_plan(values: Values) -> Plan:
    """Return the plan of a scenario; PlanError when the degrees do not give the ranks, or do not go together."""
    given = {name: values[name] for name in PLAN_COLUMNS}
    columns = {name: v for name, v in given.items() if v != _NOT_GIVEN or PARAMETERS[name]["default"] is not None}
    if columns["bucket_bytes"] == BUCKET_BYTES:  # of a limit that is given PyTorch makes the first bucket's too
        del columns["bucket_bytes"]
    return choose_plan(None, values["ranks"] or None, columns)


def resolve_batch(values: Values, plan: Plan, traced_batch: int) -> int:
    """Return the samples of the whole step."""
    return int(values["batch"] or (values["samples"] or traced_batch) * plan.data)


class Scenarios(Sequence[dict[str, Any]]):
    """A value for every parameter of each scenario: categories in ascending order, a column of ``frame`` a parameter."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Scenarios:
        """Return scenarios of given values, what is left out with its default; each different one once."""
        return join_parts([pd.DataFrame(list(rows), dtype=object)])

    def __len__(self) -> int:
        return len(self.frame)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.frame.to_dict("records"))  # type: ignore[arg-type]  # columns have names

    def __getitem__(self, place: Any) -> Any:
        """Return a scenario, or those of a slice or of a list of places."""
        if isinstance(place, slice | list):
            return Scenarios(self.frame.iloc[place])
        return next(iter(self[[int(place)]]))

    def different(self, name: str) -> list[Any]:
        """Return the values of a parameter, each once, in ascending order."""
        return self.frame[name].cat.remove_unused_categories().cat.categories.tolist()

    def list_columns(self) -> dict[str, list[Any]]:
        """Return the values of each parameter by scenario; one value where all share it."""
        return {str(name): column[: None if _varies(column) else 1].tolist() for name, column in self.frame.items()}

    def rank(self, names: Sequence[str]) -> list[Any]:
        """Return the rank of each scenario's value among its parameter's sorted values [scenarios]; shared ones are left out."""
        return [self.frame[name].cat.codes.to_numpy() for name in names if _varies(self.frame[name])]


def _varies(column: pd.Series) -> bool:
    codes = column.cat.codes.to_numpy()
    return bool((codes != codes[:1]).any())


def combine_axes(axes: Mapping[str, Sequence[Any]]) -> pd.DataFrame:
    """Return the values of parameters, each with each, the last parameter's changing fastest."""
    shape = [len(values) for values in axes.values()]
    places = np.indices(shape).reshape(len(shape), math.prod(shape))
    columns = zip(axes.items(), places, strict=True)
    return pd.DataFrame(
        {name: np.array(values, dtype=object)[place] for (name, values), place in columns},
        index=range(math.prod(shape)),
        dtype=object,
    )


def join_parts(parts: Sequence[pd.DataFrame]) -> Scenarios:
    """Return the scenarios of all parts, each once, where it first stands; the seed of one that draws nothing is 0.

    A part has a column for each parameter that it gives, of values or None.
    """
    joined = pd.concat(parts, ignore_index=True)
    given = [name for name in PARAMETERS if name in joined]
    frame = pd.DataFrame({name: _order_values(name, joined.get(name), len(joined)) for name in PARAMETERS})
    frame.loc[frame["rank_spread"] == 0, "seed"] = 0
    return Scenarios(frame.drop_duplicates(given or None, ignore_index=True))


def _order_values(name: str, column: pd.Series | None, count: int) -> pd.Categorical:
    """Return the values of a parameter in scenarios, its default where they have none, among all in ascending order."""
    codes, values = (np.full(count, -1), ()) if column is None else pd.factorize(column)
    # The last value, which -1 names, is what a scenario has that gives none.
    known = [fill_value(name, value) for value in (*values, None)]
    levels = sorted(set(known))
    places = np.array([levels.index(value) for value in known])
    return pd.Categorical.from_codes(places[codes], pd.Index(levels, dtype=object))


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
    scenarios: Scenarios


def sweep_schema() -> dict[str, Any]:
    """Describe ``config/sweeps/<name>.yaml`` as a JSON schema (2020-12)."""
    single = {
        name: {key: value for key, value in entry.items() if key != "default"} for name, entry in PARAMETERS.items()
    }
    several = {
        name: {"description": e["description"], "type": "array", "items": e, "minItems": 1}
        for name, e in single.items()
    }
    names = {"type": "object", "propertyNames": {"pattern": NAME}}
    files = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
    block = {"type": "object", "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "sweep",
        "description": "A sweep, config/sweeps/<name>.yaml; generated from trioflow.sweeps.",
        **block,
        "required": ["description"],
        "properties": {
            "description": {"description": "what the sweep is for, in a sentence", "type": "string", "minLength": 1},
            "interval": {
                "description": "whether every scenario has an 80 % interval: it is simulated three times then",
                "type": "boolean",
                "default": True,
            },
            "chunk": {
                "description": "scenarios of a job; 0 for the settings' `sweeps.chunk`",
                "type": "integer",
                "minimum": 0,
                "default": 0,
            },
            "traces": {
                **names,
                "description": "folders or packs of traces by name, relative to where Snakemake runs;"
                " several of one workload at other batches",
                "additionalProperties": files,
                "default": {},
            },
            "platforms": {
                **names,
                "description": "platform files by name",
                "additionalProperties": {"type": "string", "minLength": 1},
                "default": {},
            },
            "defaults": {
                **block,
                "properties": single,
                "default": {},
                "description": "values for what blocks and rows leave out",
            },
            "grid": {
                "description": "blocks whose values are combined, each with each; one value or a list of them",
                "type": "array",
                "items": {**block, "properties": several},
                "default": [],
            },
            "list": {
                "description": "scenarios one by one",
                "type": "array",
                "items": {**block, "properties": single},
                "default": [],
            },
            "table": {
                "description": "tab-separated file with a scenario a row, columns named as parameters; - for the default",
                "type": "string",
                "default": "",
            },
        },
    }


def load_sweep(path: str | Path) -> Sweep:
    """Read the description of a sweep.

    Raises InputError with file, place and likely fix when it cannot be read, a key or value is unknown, a scenario
    lacks a trace or platform, or there are no scenarios or more than a
    million, equal ones counted.
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
        "trace": {*settings["traces"], *shipped_traces(), *language_models().published_models()},
        "platform": {*settings["platforms"], *list_platforms(), THIS_MACHINE},
    }
    parts = []
    for part, places in _spell_out(settings, file):
        for name, names in known.items():
            _check_names(part, name, names, file, places)
        parts.append(part)
    scenarios = join_parts(parts)
    if not len(scenarios):
        raise InputError("no scenarios", file=file, fix="give a grid, a list or a table")
    return Sweep(
        file.stem,
        settings["description"],
        settings["interval"],
        settings["chunk"],
        settings["traces"],
        settings["platforms"],
        scenarios,
    )


def _read_yaml(file: Path) -> dict[str, Any]:
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise InputError("not a mapping of keys to values", file=file, fix="see config/README.md")
    return content


def _spell_out(settings: Mapping[str, Any], file: Path) -> Iterator[tuple[pd.DataFrame, Callable[[int], str]]]:
    """Yield the parts of a description, each with the place at which a scenario of it stands."""
    common = settings["defaults"]
    room = MOST_SCENARIOS
    for number, axes in enumerate(settings["grid"]):
        values = {name: [value] for name, value in common.items()} | axes
        room -= math.prod(len(given) for given in values.values())
        _check_room(room, file, f"grid.{number}")
        chosen = {name: values[name] for name in PARAMETERS if name in values}
        yield combine_axes(chosen), partial("grid.{}".format, number)
    rows = [({**common, **row}, f"list.{number}") for number, row in enumerate(settings["list"])]
    if settings["table"]:
        table = Path(settings["table"])
        rows += [({**common, **row}, place) for place, row in _read_table(table, file)]
    _check_room(room - len(rows), file, rows[-1][1] if rows else "")
    yield pd.DataFrame([row for row, _ in rows], dtype=object), lambda place: rows[place][1]


def _check_room(room: int, file: Path, place: str) -> None:
    if room < 0:
        raise InputError(
            f"more than {MOST_SCENARIOS} scenarios, equal ones counted",
            file=file,
            place=place,
            fix="combine fewer values",
        )


def _check_names(part: pd.DataFrame, name: str, names: set[str], file: Path, places: Callable[[int], str]) -> None:
    """Refuse a scenario without trace or platform, or with one that nobody knows."""
    for number, given in part.reindex(columns=[name])[name].drop_duplicates().items():
        value = given if isinstance(given, str) else None
        if value not in names and not (name == "trace" and value and find_language_model(value)):
            problem = f"unknown {name} {value!r}" if value else f"the {name} is missing"
            fix = suggest_name(value, sorted(names)) if value else f"name one of {', '.join(sorted(names))}"
            raise InputError(problem, file=file, place=f"{places(cast(int, number))}.{name}", fix=fix)


def _read_table(table: Path, file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a tab-separated table, each cell checked against its parameter."""
    try:
        rows = read_cells(table, list(PARAMETERS), None)
    except InputError as error:
        fix = f"{error.fix}, or mend the key table of {file}".removeprefix(", or ")
        raise InputError(error.problem, file=table, place=error.place, fix=fix) from None
    schema = sweep_schema()["properties"]["list"]["items"]
    # What a column's cell says, checked once for all rows in which it stands
    read: dict[tuple[str, str], dict[str, Any]] = {}
    for place, cells in rows:
        given: dict[str, Any] = {}
        for named in cells.items():
            if named not in read:
                read[named] = _check_cell(*named, schema, table, f"{place}, column ")
            given |= read[named]
        yield f"{table}, {place}", given


def _check_cell(name: str, cell: str, schema: Mapping[str, Any], table: Path, place: str) -> dict[str, Any]:
    """Return what a cell gives: its parameter's value, or nothing for -."""
    if cell in NOTHING:
        return {}
    given = {name: _parse(cell, PARAMETERS[name]["type"], table, f"{place}{name}")}
    alone = {"type": "object", "properties": {name: schema["properties"][name]}}
    try:
        return check_settings(given, alone, table)
    except InputError as error:
        raise InputError(error.problem, file=table, place=f"{place}{error.place}", fix=error.fix) from None


def _parse(cell: str, kind: str, table: Path, place: str) -> Any:
    """Turn a cell into its parameter's type; what cannot be turned stays text and is refused later."""
    if kind == "string":
        return cell
    value = parse_yaml(cell, table, place=place)
    return float(value) if kind == "number" and isinstance(value, int) else value
