"""Where the time of a run goes: CPU seconds by file, children's included, printed at its end.

CPU seconds and not the clock's: they say the same on a busy machine.
"""

import os
from collections import Counter
from typing import Any

import pytest

LISTED = 20
"""Files that the table lists."""


class Meter:
    """Measures what a process and its ended children used between two calls."""

    def __init__(self) -> None:
        self.added_s = 0.0
        self.used_s = self.count_s()

    def add(self, cpu_s: float) -> None:
        """Count what ended elsewhere."""
        self.added_s += cpu_s

    def count_s(self) -> float:
        used = os.times()
        own_s = used.user + used.system + used.children_user + used.children_system
        return own_s + self.added_s

    def take_s(self) -> float:
        before, self.used_s = self.used_s, self.count_s()
        return self.used_s - before


METER = Meter()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart() -> None:
    """Leave out what lay between two tests: collection, and waiting for a worker."""
    METER.take_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    """Note on each report what its phase used; workers hand it over with the report."""
    report = yield
    report.cpu_s = METER.take_s()
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the files that used most."""
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if cpu_s := getattr(report, "cpu_s", 0.0):
                spent[report.nodeid.partition("::")[0]] += cpu_s
    terminalreporter.section("CPU seconds by file, children's included")
    for name, cpu_s in spent.most_common(LISTED):
        terminalreporter.line(f"{cpu_s:8.1f}  {name}")
    terminalreporter.line(f"{sum(spent.values()):8.1f}  in {len(spent)} files")
