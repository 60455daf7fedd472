"""Run every mutation of every source and write what came of them.

Call it as ``TRIOFLOW_DATA_MIRROR=... python tests/mutation_report.py``; it writes
``docs/import_mutations.md`` and ``tests/property/import_mutations.csv``, whose counts the slow test
does not let grow.
"""

from __future__ import annotations

import csv
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "unit" / "parallel")]

from mutation_sources import SHARES, all_sources, seeds_of  # noqa: E402
from mutations import (  # noqa: E402
    CONTRADICTED,
    PLAUSIBLE,
    VERDICTS,
    EscapedError,
    Outcome,
    Source,
    run_source,
)

TABLE = HERE / "property" / "import_mutations.csv"
PAGE = HERE.parent / "docs" / "import_mutations.md"
COLUMNS = ("group", "importer", "kind", *VERDICTS)
_CHUNK = 100

REASONS = {
    "dependencies removed": "a node that waits for nothing may start at once; who called it is then unknown",
    "dependency added": "a graph may wait for more than it must",
    "duration scaled": "a call or a kernel may take any time that its neighbours leave it",
    "time changed": "as a scaled duration",
    "start shifted": "a call may start at any time at which its caller runs",
    "number changed": "one of the fields of this table took another possible number",
    "type changed": "a field that may be absent, or another name, type or phase, took the place of its own",
    "key dropped": "a field that may be absent was read as absent",
    "attribute changed": "a node's attributes are each other's only witnesses",
    "header changed": "facts of a file or an environment that stand there once",
    "annotation removed": "a profile without an execution trace names a phase once",
    "category renamed": "a profile without an execution trace names a call's category once",
    "entry removed": "a call that nothing refers to is missed by nobody",
    "another's id": "ids of tensors and sequence numbers are used again once their owner is gone",
    "another's rf_id": "as another's id",
    "tensor id changed": "ids of tensors are used again once memory is freed",
    "storage id changed": "ids of memory are used again once it is freed",
    "shape changed": "a profile without an execution trace gives a shape once",
    "shape shortened": "a profile without an execution trace gives a shape once",
    "shape missing": "a profile may have been taken without shapes of some calls",
    "other dtype": "a type of known size stands where another did, and nothing else gives the size",
    "element size changed": "a type is known by its size alone; other rows of the same memory are not compared",
    "another row's value": "a cell took a possible value of its column",
    "cell emptied": "an empty type stands for a result that is not a tensor",
    "phase changed": "a row names its phase once",
    "phase removed": "a step may lack a phase",
    "row removed": "a row that none refers to is missed by nobody",
    "row cut": "as a row removed",
    "rows exchanged": "rows may stand in another order where nothing numbers them",
    "titles exchanged": "two columns of one form have each other's values",
    "column removed": "a column that may be missing",
    "file cut": "the file ends between two rows or messages",
    "bit flipped": "a digit or a letter became another one",
    "bytes missing": "some digits or a row less",
    "bytes inserted": "a digit more",
    "encoding": "a character inside a name",
    "entries exchanged": "entries of equal times stand in another order",
}
"""Why a change of this kind can pass without a word."""


def _run(job: tuple[Source, range, str]) -> list[Outcome] | str:
    source, seeds, folder = job
    try:
        return run_source(source, seeds, Path(folder))
    except EscapedError as error:
        return str(error)


def run_all(
    sources: Iterable[tuple[str, Source]],
    shares: dict[str, int],
    folder: Path,
    workers: int = 2,
    stride: int = 1,
) -> tuple[list[tuple[str, Outcome]], list[str]]:
    """Run mutations of all sources, every ``stride``-th seed; return outcomes with their group, and escapes."""
    jobs, groups = [], []
    for group, source in sources:
        seeds = seeds_of(group, source, shares)[::stride]
        for begin in range(0, len(seeds), _CHUNK):
            jobs.append((source, seeds[begin : begin + _CHUNK], str(folder / str(len(jobs)))))
            groups.append(group)
    with ProcessPoolExecutor(workers) as pool:
        results = list(pool.map(_run, jobs))
    outcomes, escapes = [], []
    for group, result in zip(groups, results, strict=True):
        if isinstance(result, str):
            escapes.append(result)
        else:
            outcomes += [(group, one) for one in result]
    return outcomes, escapes


def count(outcomes: Iterable[tuple[str, Outcome]]) -> dict[tuple[str, str, str], Counter[str]]:
    """Return how often each verdict was reached, by group, importer and kind."""
    found: dict[tuple[str, str, str], Counter[str]] = {}
    for group, one in outcomes:
        found.setdefault((group, one.importer, one.kind), Counter())[one.verdict] += 1
    return found


def read_table(path: Path = TABLE) -> dict[tuple[str, str, str], Counter[str]]:
    """Return the counts that were measured when the report was written."""
    with path.open(newline="") as stream:
        return {
            (row["group"], row["importer"], row["kind"]): Counter(
                {verdict: int(row[verdict]) for verdict in VERDICTS}
            )
            for row in csv.DictReader(stream)
        }


def write_table(counts: dict[tuple[str, str, str], Counter[str]], path: Path = TABLE) -> None:
    """Write the counts."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for key in sorted(counts):
            writer.writerow([*key, *(counts[key][verdict] for verdict in VERDICTS)])


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def describe(counts: dict[tuple[str, str, str], Counter[str]], sources: int) -> str:
    """Return the page."""
    by_importer: dict[str, Counter[str]] = {}
    silent: dict[str, Counter[str]] = {}
    for (_, importer, kind), verdicts in counts.items():
        by_importer.setdefault(importer, Counter()).update(verdicts)
        if verdicts[PLAUSIBLE]:
            silent.setdefault(kind, Counter())[importer] += verdicts[PLAUSIBLE]
    total = sum((Counter(one) for one in by_importer.values()), Counter())
    real = sum(v.total() for (group, _, _), v in counts.items() if group != "small")
    lines = [
        "# What becomes of damaged traces",
        "",
        f"Written by `tests/mutation_report.py`, which ran {total.total():,} seeded mutations of {sources}"
        f" sources, {real:,} of them of real traces (captures of the session and public data). Each changes",
        "one thing in one file (of a whole run: all of its communication, marks, device events, categories",
        "or devices alike) and imports it; the seeds of a source are 0, 1, 2 and so on, and its",
        "name and a seed make the same mutation again. Captured profiles differ a little from session to",
        "session. Every import ended in one of these ways and in no other:",
        "",
        *(f"- **{verdict}**: {meaning}" for verdict, meaning in VERDICTS.items()),
        "",
        _line(["importer", "mutations", *VERDICTS]),
        _line(["---", "---:", *("---:" for _ in VERDICTS)]),
        *(
            _line([importer, verdicts.total(), *(verdicts[v] for v in VERDICTS)])
            for importer, verdicts in sorted(by_importer.items())
        ),
        _line(["all", total.total(), *(total[v] for v in VERDICTS)]),
        "",
        f"## Changed without a word ({total[PLAUSIBLE]})",
        "",
        _line(["kind of mutation", "how often, by importer", "why it goes unnoticed"]),
        _line(["---", "---", "---"]),
        *(
            _line(
                [
                    kind,
                    ", ".join(f"{i} {n}" for i, n in sorted(silent[kind].items())),
                    REASONS[kind],
                ]
            )
            for kind in sorted(silent, key=lambda kind: (-silent[kind].total(), kind))
        ),
        "",
        "`tests/property/import_mutations.csv` holds the counts by kind; the slow test runs every other seed (all with `TRIOFLOW_FUZZ=2`) and",
        "fails when a silent change is added or a contradiction passes.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Capture, run everything, write both files."""
    from captured import CNN, TRANSFORMER, capture_raw

    mirror = os.environ.get("TRIOFLOW_DATA_MIRROR")
    if not mirror:
        raise SystemExit("set TRIOFLOW_DATA_MIRROR: the report covers the public data too")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TRIOFLOW_LOCK_FOLDER"] = name  # nobody looks at these captures' times
        captures = {}
        for word, row in (("small CNN", CNN), ("small transformer", TRANSFORMER)):
            (folder / word).mkdir()
            captures[word] = capture_raw(row, folder / word)
        sources = all_sources(captures, Path(mirror))
        outcomes, escapes = run_all(sources, SHARES, folder / "runs")
    print("\n".join(escapes))
    print("\n".join(str(one) for _, one in outcomes if one.verdict == CONTRADICTED))
    if "--list" in sys.argv:
        print("\n".join(f"{group}: {one}" for group, one in outcomes if one.verdict == PLAUSIBLE))
    if escapes:
        raise SystemExit("other exceptions escaped: nothing is written")
    counts = count(outcomes)
    write_table(counts)
    PAGE.write_text(describe(counts, len(sources)), encoding="utf-8")


if __name__ == "__main__":
    main()
