"""Print which share of each room's statements ran, of a run of `coverage`: `python tests/coverage_by_room.py .coverage`."""

import sys
from collections import Counter
from pathlib import Path

import coverage
import trioflow

LIBRARY = Path(trioflow.__file__).parents[1]


def main(data_file: str) -> None:
    """Read the run's file and print a line a room, those without a line run included."""
    measured = coverage.Coverage(data_file, source=[str(LIBRARY)])
    measured.load()
    statements: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for path in sorted(LIBRARY.glob("trioflow*/**/*.py")):
        _, lines, _, not_run, _ = measured.analysis2(str(path))
        room = "/".join(path.relative_to(LIBRARY).parent.parts[:2])
        statements[room] += len(lines)
        missed[room] += len(not_run)
    for room, count in sorted(statements.items()):
        if count:
            print(f"{1 - missed[room] / count:6.1%} of {count:5d}  {room}")
    print(f"{1 - missed.total() / statements.total():6.1%} of {statements.total():5d}  all")


if __name__ == "__main__":
    main(*sys.argv[1:])
