"""The items of a campaign, in the order in which they are worth measuring, and what came of each; without torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path

import pandas as pd
import pyarrow as pa

from trioflow.base.errors import InputError, suggest
from trioflow.base.experiments import Workload, load_campaign, load_workloads
from trioflow.base.provenance import stamp
from trioflow.tables import SCHEMAS, read_arrow, write_arrow, write_table
from trioflow.trace.workloads.catalog import CATALOG

_FAILED = 1_000_000
"""Items that failed before come behind all others."""


@dataclass(frozen=True)
class Item:
    """A capture at one batch, or a sweep of one level, in one precision."""

    kind: str  # capture or sweep
    item: str  # workload or operation
    precision: str
    size: str  # batch or level
    position: int = field(compare=False)  # place by value, from 0

    @property
    def name(self) -> str:
        """The item's name, which is the trace's for a capture."""
        return f"{self.item}-{self.precision}-{'b' if self.kind == 'capture' else ''}{self.size}"

    @property
    def place(self) -> str:
        """The file that is there when it is finished, below the folder of results."""
        return f"traces/{self.name}/environment.json" if self.kind == "capture" else self.packed

    @property
    def packed(self) -> str:
        """The file to take along, below the folder of results: a trace's pack, or a table of times."""
        capture = self.kind == "capture"
        return f"campaign/traces/{self.name}.pack" if capture else f"campaign/sweeps/{self.name}.parquet"

    def is_done(self, results: str | Path) -> bool:
        """Whether it is finished, in a folder of results."""
        return (Path(results) / self.place).exists()

    def read_log(self, results: str | Path) -> str | None:
        """Return what the log of an item that is not finished says; None where it never ran."""
        rule = "capture" if self.kind == "capture" else "sweep_operation"
        log = Path(results) / f"logs/{rule}/{self.name}.log"
        return log.read_text(errors="replace").strip() if log.exists() and not self.is_done(results) else None

    def priority(self, results: str | Path) -> int:
        """Return the priority of its job."""
        return -self.position - (_FAILED if self.read_log(results) is not None else 0)

    def list_smaller(self, items: Iterable["Item"]) -> list["Item"]:
        """Return captures of the same at smaller batches that come earlier."""
        return [
            one
            for one in items
            if one.kind == self.kind == "capture"
            and (one.item, one.precision) == (self.item, self.precision)
            and one.position < self.position
            and int(one.size) < int(self.size)
        ]


@cache
def load_items(table: str | Path) -> dict[str, Item]:
    """Return the items of ``campaign.tsv`` by name, each once, the most valuable first; TableError as `load_campaign`."""
    rows = load_campaign(table)
    sizes = [(row, size, precision) for row in rows for size, precision in product(row.sizes, row.precisions)]
    items = [Item(row.kind, row.item, precision, size, at) for at, (row, size, precision) in enumerate(sizes)]
    return {item.name: item for item in dict.fromkeys(items)}


def find_workload_row(name: str, known: Mapping[str, Workload]) -> Workload:
    """Return the row of a campaign's workload, ``<workload>-<precision>``: the catalogue's, else one of ``known``.

    Raises InputError where there is none.
    """
    workload, _, precision = name.rpartition("-")
    rows = {**known, **load_workloads(CATALOG)}
    if workload not in rows:
        raise InputError(f"no workload {workload!r}", fix=f"{suggest(workload, rows)}see trioflow models")
    return replace(rows[workload], workload=name, precision=precision)


def collect_campaign(items: Iterable[Item], results: str | Path, table: Path, times: Path) -> None:
    """Write the table of all items with what came of each, and one of all operations' times that were measured so far."""
    rows, measured, origins = [], [SCHEMAS["operation_times"].empty_table()], {}
    for item in items:
        done, log = item.is_done(results), item.read_log(results)
        status = "done" if done else "pending" if log is None else "failed"
        error = (log or "").rpartition("\n")[2]
        rows.append({"name": item.name, "what": item.kind, "status": status, "error": error})
        if done and item.kind == "sweep":
            one, origins[item.name] = read_arrow(Path(results) / item.place, "operation_times")
            measured.append(one)
    write_table(pd.DataFrame(rows), "campaign_items", table, stamp())
    write_arrow(pa.concat_tables(measured), times, stamp(sweeps=origins))
