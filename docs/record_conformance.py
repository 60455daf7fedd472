"""Run the conformance tests and write what they compared with the real PyTorch into the table that ships.

    .venv/bin/python docs/record_conformance.py

Takes some minutes; needs torch (extra ``[capture]``). The report shows the table.
"""

from __future__ import annotations

import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Recorder:
    """Collects what tests compared, and which of them compared nothing."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.silent: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Read the comparisons when a test is over."""
        if report.when == "teardown":
            told = dict(report.user_properties).get("conformance")
            self.found += told or []
            if not told:
                self.silent.append(report.nodeid)


def main() -> int:
    """Write the table; return the status of the tests."""
    import torch
    from trioflow.report.build import write_conformance

    os.environ["TRIOFLOW_RECORD_CONFORMANCE"] = "1"
    recorder = Recorder()
    status = int(
        pytest.main(["-q", "-p", "no:xdist", "-o", "addopts=", str(ROOT / "tests" / "conformance")], plugins=[recorder])
    )
    if not recorder.found:
        print("nothing was compared; the table stays as it was", file=sys.stderr)
        return status or 1
    write_conformance(recorder.found, str(torch.__version__), date.today().isoformat())
    for test in recorder.silent:
        print(f"not in the table, compared nothing: {test}")
    return status


if __name__ == "__main__":
    sys.exit(main())
