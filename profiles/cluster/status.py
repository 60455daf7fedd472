#!/usr/bin/env python3
"""Print running, success or failed for a job of Grid Engine; Snakemake calls it with the job's id."""

import subprocess
import sys


def tell_status(job: str) -> str:
    """Return the job's status: the queue knows what waits and runs, the accounting what ended.

    Between the two a job is in neither for some seconds, and counts as running.
    """
    queued = subprocess.run(["qstat", "-j", job], capture_output=True, check=False)
    if queued.returncode == 0:
        return "running"
    ended = subprocess.run(["qacct", "-j", job], capture_output=True, text=True, check=False)
    if ended.returncode:
        return "running"
    facts = dict(line.split(None, 1) for line in ended.stdout.splitlines() if len(line.split()) > 1)
    codes = (facts.get("failed", "1").split()[0], facts.get("exit_status", "1").split()[0])
    return "success" if codes == ("0", "0") else "failed"


if __name__ == "__main__":
    print(tell_status(sys.argv[1]))
