"""Where the CPU time of a command goes: `python bench/where.py simulate ...` prints the share of each part.

The process looks at itself every few milliseconds of CPU time; each look counts for the package of trioflow whose
function is innermost, what it calls elsewhere included, or for the modules that are being imported.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from types import FrameType

EVERY_S = 0.002
OURS = "/workflow/trioflow/"
PARTS = (
    ("trace/", "trace"),
    ("costmodel/collectives/", "collectives"),
    ("costmodel/", "operator times"),
    ("parallel/memory/", "memory"),
    ("parallel/splits/", "splits"),
    ("parallel/", "task graph"),
    ("hardware/", "platform"),
    ("network/", "routes"),
    ("engine/folding/", "folding"),
    ("engine/", "simulation"),
    ("sweeps/", "cost estimates"),
)
IMPORTS, OTHER = "imports", "answer and the rest"
PASSED = ("base/", "tables/", "parallel/model_graph.py")
"""What works for whoever called it."""
LEAST_SHARE = 0.02


def find_part(frame: FrameType | None) -> str:
    """Return the part of the work that a process is at."""
    part = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "importlib._bootstrap" in name:
            return IMPORTS
        place = name.partition(OURS)[2]
        if place and not part and not place.startswith(PASSED):
            part = next((said for start, said in PARTS if place.startswith(start)), OTHER)
        frame = frame.f_back
    return part or OTHER


def sample(words: Sequence[str]) -> dict[str, float]:
    """Run a command of trioflow in this process and return the share of each part of its CPU time."""
    counts: Counter[str] = Counter()
    signal.signal(signal.SIGPROF, lambda _, frame: counts.update([find_part(frame)]))
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from trioflow.cli.main import main  # counted too

        main(list(words))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return {part: count / counts.total() for part, count in counts.most_common()}


def describe_parts(words: str) -> str:
    """Return in words where the CPU time of a command goes, from a process of its own."""
    command = [sys.executable, __file__, *words.split()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
    shares = json.loads(done.stdout).items()
    return ", ".join(f"{part} {share:.0%}" for part, share in shares if share >= LEAST_SHARE)


if __name__ == "__main__":
    print(json.dumps(sample(sys.argv[1:])))
