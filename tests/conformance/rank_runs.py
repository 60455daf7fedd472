"""Real ranks over gloo, each a process of its own."""

import json
import os
from pathlib import Path
from typing import Any

from warm_start import TORCH, warm_server

PATIENCE_S = 600
"""Ranks that take longer hang; how long they take is up to the machine."""


def run_ranks(script: str, job: dict[str, Any], folder: Path) -> list[Any]:
    """Run a script on each rank of a job; return what each wrote into ``found-RANK.json``."""
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    words = [str(Path(__file__).with_name(script)), str(path)]
    ranks = [
        warm_server(TORCH).start([*words, str(rank)], folder / f"said-{rank}", Path.cwd(), environment)
        for rank in range(job["ranks"])
    ]
    ends = [rank.finish(PATIENCE_S) for rank in ranks]
    assert [status for status, _ in ends] == [0] * job["ranks"], ends
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(job["ranks"])]
