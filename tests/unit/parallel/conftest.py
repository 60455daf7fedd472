"""Task graphs of one trace share what depends on the trace alone, as those of a search do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from trioflow.parallel.remembered import Memory, remembering


@pytest.fixture(scope="module", autouse=True)
def one_memory() -> Iterator[None]:
    """Let a file's graphs answer from one memory; ``test_remembered`` compares with graphs that have none."""
    with remembering(Memory()):
        yield
