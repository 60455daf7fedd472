"""Remove the lock of a killed run, once nothing of that run is left.

Snakemake releases its lock when it is interrupted but cannot when it is killed
outright (power, memory, SIGKILL). A lock is stale when no Snakemake works in
this directory; jobs that outlived their Snakemake are waited for, because two
measurements at a time would disturb one another.
"""

import shutil
import sys
import time
from pathlib import Path

import psutil

LOCKS = Path(".snakemake/locks")


def working_here() -> tuple[list[int], list[int]]:
    """Return the ids of the Snakemakes and of the jobs that run in this directory."""
    snakemakes, jobs = [], []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) != Path.cwd():
                continue
            words = process.cmdline()
        except (psutil.Error, OSError):
            continue
        if any(".snakemake/scripts/" in word for word in words):
            jobs.append(process.pid)
        elif any(Path(word).name == "snakemake" for word in words[:3]):
            snakemakes.append(process.pid)
    return snakemakes, jobs


def main() -> int:
    """Wait for orphaned jobs and unlock the directory; refuse while a Snakemake works in it."""
    reported = False
    while True:
        locked = LOCKS.is_dir() and any(LOCKS.iterdir())
        snakemakes, jobs = working_here()
        if snakemakes and locked:
            print(f"Snakemake already works here (process {snakemakes[0]})", file=sys.stderr)
            return 2
        if snakemakes or not jobs:
            break
        if not reported:
            print(f"waiting for a job of a killed run to end (process {jobs[0]})", flush=True)
            reported = True
        time.sleep(1)
    if locked:
        print("removing the lock of a run that was killed", flush=True)
        shutil.rmtree(LOCKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
