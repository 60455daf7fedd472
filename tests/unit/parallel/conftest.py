"""Task graphs of one trace share what depends on the trace alone, as those of a search do."""

from collections.abc import Iterator

import pytest
from captured import capture_raw, make_once
from trioflow.parallel.remembered import Memory, remembering
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


@pytest.fixture(scope="module", autouse=True)
def one_memory() -> Iterator[None]:
    """Let a file's graphs answer from one memory; ``test_folded`` compares with graphs that have none."""
    with remembering(Memory()):
        yield
