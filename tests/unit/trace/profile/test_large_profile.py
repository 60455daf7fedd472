"""A large profile is read within its own size of memory."""

import json
import subprocess
import sys

import pytest
from large_profile import write_large_profile

LIMIT_BYTES = 400_000_000
"""What does not grow with the file, 150 MB, leaves each of its bytes 0.6 of one: in a larger file 0.85 of one would do."""

IMPORT = """
import json, sys
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.options import ImportOptions
trace = import_kineto(sys.argv[1], None, ImportOptions(gpu="x", batch=4, precision="fp32"))
# A process inherits getrusage's maximum from the one that started it, but not this one.
told = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak_bytes = int(told["VmHWM"].split()[0]) * 1024
print(json.dumps([peak_bytes, len(trace.operators), trace.facts.profiled_steps]))
"""


def import_large(raw, tmp_path, size_bytes):
    path = tmp_path / "large.json"
    steps = write_large_profile(raw / "kineto.json.gz", path, size_bytes)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, str(path)], capture_output=True, text=True, check=True
    )
    return steps, json.loads(done.stdout)


def test_steps_of_a_long_profile_are_told_apart(raw_cnn, cnn_trace, tmp_path):
    steps, (_, operators, profiled) = import_large(raw_cnn, tmp_path, 20_000_000)
    assert operators == len(cnn_trace.operators)
    assert 1 < profiled <= min(steps, 30)


@pytest.mark.slow
def test_memory_stays_below_the_size_of_a_large_file(raw_cnn, cnn_trace, tmp_path):
    _, (peak_bytes, operators, profiled) = import_large(raw_cnn, tmp_path, LIMIT_BYTES)
    assert operators == len(cnn_trace.operators)
    assert profiled > 20
    assert peak_bytes < LIMIT_BYTES
