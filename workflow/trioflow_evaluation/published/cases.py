"""Public measured cases: the rows of ``config/published.tsv``, what their sets aim at, and what others published.

Everything here that is not computed is a fact with its source; nothing else on the page or in the
README repeats it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

from trioflow.base.arguments import declare
from trioflow.base.errors import PlanError, TableError
from trioflow.base.experiments import row_schema
from trioflow.base.plan_row import Plan
from trioflow.base.provenance import read_own_records, read_own_table
from trioflow.base.settings import NOTHING, read_cells, read_records, suggest_name

from trioflow_evaluation import DATA

_SOME = "^(?!-$)."
"""Of a cell that says something."""


@dataclass(frozen=True)
class PublishedRow:
    """One public measured step."""

    case: str = declare("name of the case", pattern=_SOME)
    set: str = declare("cases that are averaged together", pattern=_SOME)
    workload: str = declare("model that was trained", pattern=_SOME)
    traces: tuple[str, ...] = declare("rows of imports.tsv that the prediction starts from, comma between")
    platform: str = declare(
        "platform that was measured: a shipped one's name, or a file beside this table", pattern=_SOME
    )
    gpu: str = declare("sheet of the measured GPU", pattern=_SOME)
    plan: str = declare("single, ddp, tp or a pipeline schedule", pattern=_SOME)
    ranks: int = declare("GPUs", minimum=1)
    micro_batches: int = declare("pieces that a pipeline cuts a batch into; 0 without one", minimum=0)
    batch: int = declare("samples of the whole step", minimum=1)
    mode: str = declare("what the measured time spans", pattern=_SOME)
    measured: str = declare(
        "file of the public data that holds the measured time, or 'throughput of' a GPU of the shipped table",
        pattern=_SOME,
    )
    changes: str = declare("what else differs between trace and measurement; - for nothing")

    def __post_init__(self) -> None:
        if self.changes in NOTHING:
            object.__setattr__(self, "changes", "")

    @property
    def made_plan(self) -> Plan:
        """The plan, with the degrees that the ranks make of it."""
        from trioflow.parallel.plan import named_plan  # which imports pandas, only where it is needed

        return named_plan(self.plan, self.ranks, self.micro_batches or None)

    @property
    def plan_name(self) -> str:
        """The plan in short."""
        if self.plan == "single":
            return self.plan
        pieces = f"-m{self.micro_batches}" if self.micro_batches else ""
        return f"{self.plan}{self.ranks}{pieces}"


_COLUMNS = [field.name for field in fields(PublishedRow)]


def list_published_sets(path: str | Path) -> list[str]:
    """Return the sets of ``published.tsv`` in order, without a look at the cases; TableError where it is damaged."""
    return list(dict.fromkeys(cells["set"] for _, cells in read_cells(path, _COLUMNS, {})))


def load_published_rows(path: str | Path) -> dict[str, PublishedRow]:
    """Read ``published.tsv`` into rows by case; a platform's file is relative to it.

    Raises TableError when it is missing, a column or number is wrong, a name stands twice, or a
    plan does not fit its ranks.
    """
    rows = read_records(path, row_schema("published", PublishedRow), PublishedRow)
    for place, row in rows:
        column = f"{place}, column plan"
        try:
            plan = row.made_plan
        except PlanError as error:
            raise TableError(error.problem, file=path, place=column, fix=error.fix) from None
        if row.batch % (plan.data * plan.pieces):
            raise TableError(
                f"{row.batch} samples do not divide into {plan.data * plan.pieces} pieces",
                file=path,
                place=f"{place}, column batch",
            )
    return {row.case: row for _, row in rows}


def rows_of_set(rows: dict[str, PublishedRow], name: str, path: str | Path) -> list[PublishedRow]:
    """Return the rows of one set, in the table's order; TableError where there is no such set."""
    chosen = [row for row in rows.values() if row.set == name]
    if not chosen:
        known = list(dict.fromkeys(row.set for row in rows.values()))
        raise TableError(f"no row of the set {name!r}", file=path, fix=suggest_name(name, known))
    return chosen


SOURCE = "the project, set before the first case was judged"


SETS: Mapping[str, SimpleNamespace] = {
    name: SimpleNamespace(**{"aim": None, "scaling_aim": None, **words})
    for name, words in read_own_records(f"{DATA}/published/cases/sets").items()
}
"""Sets in words, in the order of the page; the file says what each field is. One without words is shown by its name."""

PUBLISHED = tuple(
    SimpleNamespace(**{**row, "error": float(row["error"])})
    for row in read_own_table(f"{DATA}/published/cases/averages")
)
"""Averages of the papers. None but vTrain's is of the cases here: they were measured by others, on other machines."""


DISCLOSED: tuple[tuple[str, str], ...] = (
    (
        "h100-4gpu",
        "Three choices were made after a first run of the set h100-4gpu had been seen, so that its error is not a blind prediction: "
        "the timer's floor is taken off each operator (settled on single-GPU steps, see the section on anchors); copies into and out of DDP's "
        "buckets are priced as single operators; tensor parallelism cuts embedding and head, as Megatron-LM does. The sensitivities of the set "
        "show what each of them changes.",
    ),
    (
        "resnet50-",
        "The interval of a step rescaled to another batch was widened after its coverage of the ResNet-50 sets had been seen, so that "
        "their coverage is not a blind one. Nothing was fitted to their measured values.",
    ),
)
"""First letters of the sets concerned, and what was chosen with results in sight."""


def list_disclosures(names: set[str]) -> list[str]:
    """Return what was chosen after results of some of these sets were seen."""
    return [text for start, text in DISCLOSED if any(name.startswith(start) for name in names)]


def describe_set(name: str) -> SimpleNamespace:
    """Return a set's words; its bare name where there are none."""
    return SETS.get(name) or SimpleNamespace(title=name, judged="", limits="", aim=None, scaling_aim=None)
