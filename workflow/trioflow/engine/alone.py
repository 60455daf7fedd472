"""One collective by itself on a platform: how long it takes when nothing disturbs it."""

from __future__ import annotations

import numpy as np
import pandas as pd

from trioflow.engine.compilation import is_repaid
from trioflow.engine.compiled import run_compiled
from trioflow.engine.exchanges import Exchanges
from trioflow.engine.program import Program
from trioflow.engine.reference import run_reference
from trioflow.hardware.machine import Platform
from trioflow.network.fair_share import FairShareNetwork
from trioflow.network.message_planner import RunAlone
from trioflow.network.messages import CollectiveMessages


def make_run_alone(platform: Platform) -> RunAlone:
    """Return what runs a collective by itself, its messages sharing the platform's links.

    Parameters
    ----------
    platform : Platform
        Its links and its routing are the network.
    """

    def run(plan: CollectiveMessages) -> float:
        program = _make_program(plan)
        network = FairShareNetwork(platform.links, platform.routing)
        execute = run_compiled if is_repaid(program.events) else run_reference
        return float(execute(program, network).end_s[0])

    return run


def _make_program(plan: CollectiveMessages) -> Program:
    """Return a program of one task, which stands for all members of the collective."""
    one, none = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    ends = np.array([0, 1], dtype=np.int64)
    exchanges = Exchanges(one, one, ends, [plan], one, np.zeros(1), [], [])
    name = plan.pattern.collective
    return Program(
        one, one, ["alone"], pd.Series([name], dtype="str"), np.zeros(1), none, none, exchanges
    )
