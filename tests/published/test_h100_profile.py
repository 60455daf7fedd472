"""The public raw profile of VGG-13 on an H100 (batch 512, PyTorch 2.1), from the data mirror."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from trioflow.trace.kernels import busy_ns, index_kernels, kernels_of
from trioflow.trace.kineto import DEVICE, is_operator, nest, read_events

PROFILE = "sarchlab+triosim/tracer/data/profiler/profiler_vgg13-iter41.json"


@pytest.fixture
def profile():
    mirror = os.environ.get("TRIOFLOW_DATA_MIRROR")
    if not mirror:
        pytest.skip("TRIOFLOW_DATA_MIRROR is not set: the public data is not at hand")
    path = Path(mirror) / PROFILE
    if not path.exists():
        pytest.skip(f"the mirror lacks {PROFILE}")
    return path


def test_every_kernel_has_its_operator_and_the_busy_time_is_the_published_sum(profile):
    events = read_events(profile)
    nest(events)
    device = [e for e in events if e.category in DEVICE]
    kernels = index_kernels(device)
    operators = [
        e
        for e in events
        if e.category == "cpu_op"
        and is_operator(e.name)
        and not any(is_operator(above.name) for above in e.ancestors())
    ]
    joined = [k for e in operators for k in kernels_of(e, kernels)]
    assert len(device) == 292 + 33
    assert len(joined) == len(set(map(id, joined)))
    # The profile's own sum over kernels and fills: 346.37 ms.
    assert busy_ns(device) == pytest.approx(346.37e6, rel=1e-3)
    assert sum(busy_ns(kernels_of(e, kernels)) for e in operators) == pytest.approx(
        346.37e6, rel=1e-3
    )
