"""The rows of ``config/published.tsv``: public measured steps, and what each is predicted from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from trioflow.errors import PlanError, TableError
from trioflow.plan_row import Plan, declare_cell
from trioflow.settings import read_cells, suggest_name

_NUMBERS = ("ranks", "micro_batches", "batch")
_MAY_BE_ZERO = ("micro_batches",)


@dataclass(frozen=True)
class PublishedRow:
    """One public measured step."""

    case: str = declare_cell("name of the case")
    set: str = declare_cell("cases that are averaged together")
    workload: str = declare_cell("model that was trained")
    traces: tuple[str, ...] = declare_cell(
        "rows of imports.tsv that the prediction starts from, comma between"
    )
    platform: str = declare_cell(
        "platform that was measured: a shipped one's name, or a file beside this table"
    )
    gpu: str = declare_cell("sheet of the measured GPU")
    plan: str = declare_cell("single, ddp, tp or a pipeline schedule")
    ranks: int = declare_cell("GPUs")
    micro_batches: int = declare_cell("pieces that a pipeline cuts a batch into; 0 without one")
    batch: int = declare_cell("samples of the whole step")
    mode: str = declare_cell("what the measured time spans")
    measured: str = declare_cell(
        "file of the public data that holds the measured time, or 'throughput of' a GPU of the shipped table"
    )
    changes: str = declare_cell("what else differs between trace and measurement; - for nothing")

    @property
    def made_plan(self) -> Plan:
        """The plan, with the degrees that the ranks make of it."""
        from trioflow.parallel.plan import named_plan  # with all of pandas, for whoever asks

        return named_plan(self.plan, self.ranks, self.micro_batches or None)

    @property
    def plan_name(self) -> str:
        """The plan in short."""
        if self.plan == "single":
            return self.plan
        pieces = f"-m{self.micro_batches}" if self.micro_batches else ""
        return f"{self.plan}{self.ranks}{pieces}"


COLUMNS = [field.name for field in fields(PublishedRow)]


def list_published_sets(path: str | Path) -> list[str]:
    """Return the names of the sets of ``published.tsv`` in its order, without a look at the cases.

    Raises
    ------
    TableError
        When the table is missing, or a column is unknown or missing.
    """
    return list(dict.fromkeys(cells["set"] for _, cells in read_cells(path, COLUMNS, {})))


def load_published_rows(path: str | Path) -> dict[str, PublishedRow]:
    """Read ``published.tsv`` into rows by the name of the case.

    ``path``: tab-separated table. A platform that is a file is given relative to it.

    Raises
    ------
    TableError
        When the table is missing, a column is unknown or missing, a name stands twice, a number is
        none, or a plan does not fit its ranks.
    """
    file = Path(path)
    rows = [_read_row(cells, file, place) for place, cells in read_cells(file, COLUMNS, {})]
    return {row.case: row for row in rows}


def _read_row(cells: dict[str, str], file: Path, place: str) -> PublishedRow:
    numbers = {}
    for column in _NUMBERS:
        text = cells[column]
        least = 0 if column in _MAY_BE_ZERO else 1
        if not (text.isascii() and text.isdigit() and int(text) >= least):
            raise TableError(
                f"{text!r} is not a whole number of {least} or more", file=file,
                place=f"{place}, column {column}",
            )  # fmt: skip
        numbers[column] = int(text)
    empty = next((c for c, text in cells.items() if text in ("", "-") and c != "changes"), "")
    if empty:
        raise TableError("a value is missing", file=file, place=f"{place}, column {empty}")
    changes = "" if cells["changes"] == "-" else cells["changes"]
    traces = tuple(name.strip() for name in cells["traces"].split(","))
    words = {c: cells[c] for c in cells if c not in (*_NUMBERS, "traces", "changes")}
    row = PublishedRow(**words, **numbers, traces=traces, changes=changes)  # type: ignore[arg-type]
    try:
        plan = row.made_plan
    except PlanError as error:
        raise TableError(
            error.problem, file=file, place=f"{place}, column plan", fix=error.fix
        ) from None
    if row.batch % (plan.data * plan.pieces):
        raise TableError(
            f"{row.batch} samples do not divide into {plan.data * plan.pieces} pieces", file=file,
            place=f"{place}, column batch",
        )  # fmt: skip
    return row


def rows_of_set(rows: dict[str, PublishedRow], name: str, path: str | Path) -> list[PublishedRow]:
    """Return the rows of one set, in the table's order.

    Raises
    ------
    TableError
        When the table has no such set.
    """
    found = [row for row in rows.values() if row.set == name]
    if not found:
        known = list(dict.fromkeys(row.set for row in rows.values()))
        raise TableError(f"no row of the set {name!r}", file=path, fix=suggest_name(name, known))
    return found
