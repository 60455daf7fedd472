"""Fixtures shared by all tests."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Small products in two threads are mostly two threads that wait for each other.
for library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

for folder in ("", "unit/parallel", "unit/trace/importers", "../docs"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

from captured import BERT, CNN, TRANSFORMER, capture_raw, make_once  # noqa: E402
from cpu_spent import pytest_runtest_logstart, pytest_runtest_makereport, pytest_terminal_summary  # noqa: E402, F401
from fuzz import count_examples  # noqa: E402
from mirror import find_mirror  # noqa: E402
from warm_start import close_servers  # noqa: E402

# Deterministic, and without a clock: a busy machine is not a failure.
settings.register_profile("trioflow", deadline=None, derandomize=True, max_examples=count_examples())
settings.load_profile("trioflow")


gc.disable()  # until everything is imported and collected


def pytest_collection_finish():
    """Leave out of garbage collections what stays to the end: they took a third of a capture's time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(items):
    """Begin with the long ones, so that no worker ends alone with one of them."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def _own_measurement_lock(tmp_path_factory):
    """Let tests capture while a workflow measures: nobody looks at their times."""
    os.environ["TRIOFLOW_LOCK_FOLDER"] = str(tmp_path_factory.mktemp("lock"))


@pytest.fixture(scope="session", autouse=True)
def _end_warm_processes():
    yield
    close_servers()


def _make_raw(row, tmp_path_factory):
    pytest.importorskip("torch", reason="capture needs torch (extra [capture])")
    return make_once(tmp_path_factory, row["workload"], lambda folder: capture_raw(row, folder))


@pytest.fixture(scope="session")
def mirror():
    """Folder of the public data."""
    return find_mirror()


@pytest.fixture(scope="session")
def raw_transformer(tmp_path_factory):
    """Folder with the raw profile of a small transformer."""
    return _make_raw(TRANSFORMER, tmp_path_factory)


@pytest.fixture(scope="session")
def raw_cnn(tmp_path_factory):
    """Folder with the raw profile of a small CNN."""
    return _make_raw(CNN, tmp_path_factory)


@pytest.fixture(scope="session")
def transformer_trace(raw_transformer):
    """Trace of a small transformer."""
    from trioflow.trace.profile.merge import merge_trace

    return merge_trace(raw_transformer)


@pytest.fixture(scope="session")
def bert_trace(tmp_path_factory):
    """Trace of a small BERT-like transformer."""
    from trioflow.trace.profile.merge import merge_trace

    return merge_trace(_make_raw(BERT, tmp_path_factory))


@pytest.fixture(scope="session")
def cnn_trace(raw_cnn):
    """Trace of a small CNN."""
    from trioflow.trace.profile.merge import merge_trace

    return merge_trace(raw_cnn)
