"""The tables that a user edits: workloads, plans and experiments, read into typed rows.

Every column has a type, a meaning and limits in its field's metadata; ``workflow/schemas`` comes from them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from trioflow.base.arguments import declare
from trioflow.base.errors import TableError
from trioflow.base.plan_row import MEASURED_SCHEDULES, SHARDINGS, UNIT_SHARDINGS, Plan, find_plan_problem
from trioflow.base.settings import FAMILIES, NAME, OPTIMIZERS, PRECISIONS, SIZES, read_records, suggest_name
from trioflow.base.units import BYTES_PER_MIB

__all__ = [
    "MEASURED_SCHEDULES",
    "SHARDINGS",
    "TABLES",
    "UNIT_SHARDINGS",
    "CampaignRow",
    "Experiment",
    "Import",
    "Plan",
    "Workload",
    "as_rows",
    "find_plan_problem",
    "load_campaign",
    "load_experiments",
    "load_imports",
    "load_plans",
    "load_workloads",
    "row_schema",
]

_TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    int | None: {"type": ["integer", "null"]},
    bool: {"type": "boolean"},
    bool | None: {"type": ["boolean", "null"]},
    tuple[int, ...]: {"type": "array", "items": {"type": "integer", "minimum": 1}},
    tuple[str, ...]: {"type": "array", "items": {"type": "string", "minLength": 1}},
}
Row = TypeVar("Row", bound="Workload | Plan | Experiment | Import | CampaignRow")


@dataclass(frozen=True)
class Workload:
    """One row of ``workloads.tsv``: a model, its sizes and how it is trained."""

    workload: str = declare("name of the workload", pattern=NAME)
    family: str = declare(
        "torchvision (a CNN of torchvision), transformer (built from the sizes in this row),"
        " transformers (a published configuration of the library transformers)"
        " or user (a function of yours)",
        enum=list(FAMILIES),
    )
    model: str = declare(
        "model of the family: resnet18, vgg11; gpt2, bert-base; for transformer what it resembles;"
        " for user module:function"
    )
    batches: tuple[int, ...] = declare(
        "batch sizes to capture, comma between; experiments extrapolate from the first,"
        " the cost model is fitted on all",
        minItems=1,
        uniqueItems=True,
    )
    image_size: int | None = declare("height and width of an image [pixels]", minimum=1)
    sequence: int | None = declare(
        "tokens of one sample; an encoder-decoder model reads and predicts as many", minimum=1
    )
    hidden: int | None = declare("width of the residual stream", minimum=1)
    layers: int | None = declare("transformer blocks; for transformers instead of the published depth", minimum=1)
    heads: int | None = declare("attention heads of a block", minimum=1)
    vocabulary: int | None = declare("distinct tokens", minimum=1)
    causal: bool | None = declare("true: attention looks back only (GPT); false: both ways (BERT)")
    optimizer: str = declare(
        "optimizer of the step; without -foreach or -fused PyTorch chooses how it runs", enum=list(OPTIMIZERS)
    )
    precision: str = declare(
        "precision of the step: fp32 without TF32, tf32, or bf16 or fp16 by autocast", enum=list(PRECISIONS)
    )

    @property
    def traces(self) -> tuple[str, ...]:
        """Names of the traces to capture; experiments extrapolate from the first."""
        return tuple(f"{self.workload}-b{batch}" for batch in self.batches)


@dataclass(frozen=True)
class Experiment:
    """One row of ``experiments.tsv``: a step that is predicted and measured."""

    experiment: str = declare("name of the experiment", pattern=NAME)
    set: str = declare("experiments averaged together in the report", pattern=NAME)
    workload: str = declare("row of workloads.tsv", pattern=NAME)
    plan: str = declare("row of plans.tsv", pattern=NAME)
    batch: int = declare("samples of the whole step, all ranks together", minimum=1)


IMPORT_FORMATS = ("kineto", "triosim", "neusight", "chakra", "nsight", "simai", "xla")
"""Formats of traces that others wrote; ``trace.importers.detect`` reads them."""


@dataclass(frozen=True)
class Import:
    """One row of ``imports.tsv``: a trace made from public files."""

    trace: str = declare("name of the trace", pattern=NAME)
    files: tuple[str, ...] = declare(
        "files of workflow/resources/datasets.yaml that it is made from, comma between; the first"
        " is what is read, with the second where the format has two",
        minItems=1,
        uniqueItems=True,
    )
    format: str = declare("format of the files", enum=list(IMPORT_FORMATS))
    gpu: str = declare("traced device, where the files do not say it")
    batch: int | None = declare("samples of the step, where the files do not say it", minimum=1)
    precision: str = declare("precision of the step, where the files do not say it", enum=["-", *PRECISIONS])
    optimizer: str = declare("optimizer of the step, where the files do not say it")


@dataclass(frozen=True)
class CampaignRow:
    """One row of ``campaign.tsv``: what is worth measuring on a GPU that is there for some minutes."""

    order: int = declare("place by value: the row with the smallest is done first", minimum=0)
    kind: str = declare("capture, a step of a workload; or sweep, an operation alone", enum=["capture", "sweep"])
    item: str = declare(
        "workload of the catalogue or of workloads.tsv; or operation of data/campaign/sweeps.toml",
        pattern="^[a-z0-9_-]+$",
    )
    precisions: tuple[str, ...] = declare(
        "precisions, comma between; none for what has none",
        minItems=1,
        items={"type": "string", "enum": [*PRECISIONS, "none"]},
    )
    sizes: tuple[str, ...] = declare("batches, or levels of the sweep, comma between", minItems=1)


TABLES: dict[str, type[Workload] | type[Plan] | type[Experiment] | type[Import] | type[CampaignRow]] = {
    "workloads": Workload,
    "plans": Plan,
    "experiments": Experiment,
    "imports": Import,
    "campaign": CampaignRow,
}


def row_schema(name: str, kind: Any = None) -> dict[str, Any]:
    """Describe a row of the table ``name``, or of another one whose rows are of a ``kind``, as a JSON schema (2020-12)."""
    kind = kind or TABLES[name]
    hints, properties = get_type_hints(kind), {}
    for column in fields(kind):
        properties[column.name] = {**_TYPES[hints[column.name]], **column.metadata["schema"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": name,
        "description": f"One row of config/{name}.tsv; generated from trioflow.base.experiments.",
        "type": "object",
        "properties": properties,
        "required": [name for name, entry in properties.items() if "default" not in entry],
        "additionalProperties": False,
    }


def load_workloads(path: str | Path) -> dict[str, Workload]:
    """Read ``workloads.tsv`` into rows by name; TableError where a cell is wrong, or a size is missing or unknown."""
    rows = read_records(path, row_schema("workloads"), Workload)
    for place, row in rows:
        needed, possible = FAMILIES[row.family]
        sizes = {column: getattr(row, column) for column in SIZES}
        uneven = bool(row.hidden and row.heads and row.hidden % row.heads)
        rules = [
            *(
                (value is None, column, f"nothing found for the family {row.family}", "give the size")
                for column, value in sizes.items()
                if column in needed
            ),
            *(
                (value is not None, column, f"{value!r} found for the family {row.family}", "write -")
                for column, value in sizes.items()
                if column not in (*needed, *possible)
            ),
            (uneven, "heads", f"{row.heads} heads do not divide hidden {row.hidden}", "use a divisor of hidden"),
            (
                row.family == "user" and ":" not in row.model,
                "model",
                f"{row.model!r} is not module:function",
                "write for example my_models:make_model",
            ),
        ]
        _refuse(rules, path, place)
    return _by_name(rows)


def _refuse(rules: Iterable[tuple[bool, str, str, str]], file: str | Path, place: str) -> None:
    """Raise TableError for the first broken rule; each rule is: whether it is broken, column, problem, fix."""
    for column, problem, fix in (rule[1:] for rule in rules if rule[0]):
        raise TableError(problem, file=file, place=f"{place}, column {column}", fix=fix)


def load_plans(path: str | Path) -> dict[str, Plan]:
    """Read ``plans.tsv`` into rows by name.

    Raises TableError when a cell is wrong, a schedule lacks a pipeline or the other way round,
    PyTorch has no such bucket limits, or a sharding does not go with the degrees.
    """
    rows = read_records(path, row_schema("plans"), Plan)
    for place, row in rows:
        limits, single = (row.first_bucket_bytes, row.bucket_bytes), row.pipeline == 1
        # Given a limit, PyTorch gives the first bucket the same one; only its defaults differ.
        usual = limits[0] == limits[1] or limits == (BYTES_PER_MIB, 25 * BYTES_PER_MIB)
        rules = [
            (
                not usual,
                "first_bucket_bytes",
                f"PyTorch cannot have a first bucket of {limits[0]} and others of {limits[1]} bytes",
                f"write the same limit twice, or {BYTES_PER_MIB} and {25 * BYTES_PER_MIB}",
            ),
            (
                (row.schedule == "none") != single,
                "schedule",
                f"{row.schedule!r} does not go with a pipeline degree of {row.pipeline}",
                "write none for one rank and a schedule for more",
            ),
            (
                row.stages_per_rank > 1 and single,
                "stages_per_rank",
                f"{row.stages_per_rank} stages a rank without a pipeline",
                "write 1",
            ),
            (
                row.micro_batches > 1 and single,
                "micro_batches",
                f"{row.micro_batches} micro-batches without a pipeline",
                "write 1",
            ),
        ]
        if problem := find_plan_problem(row):
            rules.append((True, *problem))
        _refuse(rules, path, place)
    return _by_name(rows)


def load_experiments(
    path: str | Path, workloads: Mapping[str, Workload], plans: Mapping[str, Plan]
) -> dict[str, Experiment]:
    """Read ``experiments.tsv``, which refers to ``workloads`` and ``plans``, into rows by name.

    Raises TableError when a cell is wrong, a workload or plan is unknown, the batch does not
    divide, a plan cannot be measured for the workload's family or precision, or a single rank runs
    a captured batch: its prediction would be its own measurement.
    """
    rows = read_records(path, row_schema("experiments"), Experiment)
    for place, row in rows:
        named = (("workload", row.workload, workloads), ("plan", row.plan, plans))
        unknown = (
            (value not in known, column, f"unknown {column} {value!r}", suggest_name(value, known))
            for column, value, known in named
        )
        _refuse(unknown, path, place)
        _check_plan(row, plans[row.plan], workloads[row.workload], path, place)
    return _by_name(rows)


def _check_plan(row: Experiment, plan: Plan, workload: Workload, path: str | Path, place: str) -> None:
    """Refuse an experiment whose plan fits neither its batch nor its workload."""
    pieces = plan.data * plan.pieces
    word = "micro-batches" if plan.pipeline > 1 else "micro-steps"
    unmeasured = [
        (
            plan.tensor > 1 and workload.family != "transformer",
            f"splits transformer blocks, which is measured for the family transformer and not for"
            f" {row.workload}, {workload.family}",
            "choose another plan or a transformer",
        ),
        (plan.context > 1, "shares sequences, which is not measured yet", "choose a context degree of 1"),
        (
            plan.replication != "ddp",
            "copies a model with DataParallel, which is not measured: it needs several GPUs",
            "choose ddp",
        ),
        (
            plan.tensor_style != "megatron" or plan.sequence_parallel or plan.vocabulary_parallel,
            "splits layers in a way that is not measured yet",
            "choose megatron without further splits",
        ),
        (
            plan.schedule not in MEASURED_SCHEDULES,
            f"runs the schedule {plan.schedule}, which is not measured yet",
            f"choose one of {', '.join(MEASURED_SCHEDULES)}",
        ),
        (
            workload.precision == "fp16" and (plan.pipeline > 1 or plan.sharding != "none"),
            "needs scaled gradients (fp16), which is not measured in a pipeline or under a sharding",
            "choose another plan or bf16",
        ),
    ]
    rules = [
        (
            row.batch % pieces > 0,
            "batch",
            f"{row.batch} samples do not divide into {pieces} pieces, {plan.data} replicas times {plan.pieces} {word}, of the"
            f" plan {row.plan}",
            f"use a multiple of {pieces}",
        ),
        (
            plan.ranks == 1 and row.batch in workload.batches,
            "batch",
            f"batch {row.batch} of {row.workload} is captured on one rank, so nothing is predicted",
            "use a batch that is not captured",
        ),
        *((holds, "plan", f"the plan {row.plan} {problem}", fix) for holds, problem, fix in unmeasured),
    ]
    _refuse(rules, path, place)


def load_imports(path: str | Path) -> dict[str, Import]:
    """Read ``imports.tsv`` into rows by name; TableError where a cell is wrong."""
    return _by_name(read_records(path, row_schema("imports"), Import))


def load_campaign(path: str | Path) -> list[CampaignRow]:
    """Read ``campaign.tsv``, sorted by its order; TableError where a cell is wrong, or the batch of a capture no number."""
    rows = read_records(path, row_schema("campaign"), CampaignRow)
    for place, row in rows:
        wrong = row.kind == "capture" and not all(size.isdigit() and int(size) for size in row.sizes)
        _refuse([(wrong, "sizes", f"{','.join(row.sizes)} are no batches", "give whole numbers")], path, place)
    return sorted((row for _, row in rows), key=lambda row: row.order)


def as_rows(rows: Iterable[Workload | Plan | Experiment | Import]) -> list[dict[str, Any]]:
    """Return rows as plain dictionaries, for parameters of a job and for JSON."""
    return [{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(r).items()} for r in rows]


def _by_name(rows: list[tuple[str, Row]]) -> dict[str, Row]:
    """Index rows by their first column."""
    return {str(getattr(row, fields(row)[0].name)): row for _, row in rows}
