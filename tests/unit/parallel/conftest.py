"""A trace of a model with a shared weight."""

import pytest
from captured import capture_raw, make_once
from trioflow.trace.profile.merge import merge_trace
from trioflow.trace.store import Trace

TIED = {
    "workload": "test-tied",
    "family": "user",
    "model": "tied_model:make",
    "optimizer": "adamw",
    "precision": "fp32",
}


@pytest.fixture(scope="session")
def tied_trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Trace of a small model whose head reads the token embedding's weight."""
    pytest.importorskip("torch", reason="capture needs torch (extra [capture])")
    return merge_trace(make_once(tmp_path_factory, "tied", lambda to: capture_raw(TIED, to)))
