"""Facts of a trace of which a test cares about a few."""

from typing import Any

from trioflow.trace.facts import Facts


def few_facts(**told: Any) -> Facts:
    """Return facts in which everything else is a placeholder."""
    needed = {"workload": "w", "batch": 1, "device_name": "d", "step_time_s": 1.0}
    return Facts(**(needed | told))
