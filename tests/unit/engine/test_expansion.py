"""Tasks that would not fit into memory are refused before they are made."""

import numpy as np
import pytest
from trioflow.costmodel.operators.model import SHIPPED_MODELS, load_operator_model
from trioflow.engine.folding import fold as folding
from trioflow.engine.folding.fold import (
    TooLargeError,
    check_division,
    check_expansion,
    estimate_bytes,
)
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.folded import FoldedTaskGraph
from trioflow.parallel.plan import make_plan
from trioflow.trace.store import load_trace

RANKS = 8


@pytest.fixture
def graph() -> FoldedTaskGraph:
    model = load_operator_model(SHIPPED_MODELS / "cpu2-gloo" / "operators.json")
    made = extrapolate(load_trace("gpt2-tiny-b8"), make_plan(data=RANKS), model, batch=8 * RANKS)
    assert isinstance(made, FoldedTaskGraph)
    return made


def test_the_estimate_is_above_what_the_tables_of_all_ranks_take(graph: FoldedTaskGraph) -> None:
    assert graph.fold is not None
    said_bytes = estimate_bytes(graph.fold, graph.fold.task_total)
    taken = graph.tasks.memory_usage(deep=True).sum() + graph.dependencies.memory_usage().sum()
    assert taken < said_bytes < 4 * taken


def test_what_does_not_fit_is_told_with_ranks_tasks_and_memory(graph: FoldedTaskGraph) -> None:
    fold = graph.fold
    assert fold is not None
    needed_bytes = estimate_bytes(fold, fold.task_total)
    check_expansion(fold, "asked for", available_bytes=needed_bytes)
    told = rf"all {RANKS} ranks are needed \(asked for\): [\d.]+ k tasks take some [\d.]+ MB .*fewer ranks"
    with pytest.raises(TooLargeError, match=told):
        check_expansion(fold, "asked for", available_bytes=needed_bytes - 1)
    family = len(fold.families) - 1
    groups = np.arange(len(fold.families[family].groups))
    check_division(fold, {family: groups}, "they differ", available_bytes=needed_bytes)
    with pytest.raises(TooLargeError, match=f"1 of {RANKS} ranks"):
        check_division(fold, {}, "they differ", available_bytes=1.0)


def test_a_simulation_that_would_not_fit_ends_before_its_tasks_are_made(
    graph: FoldedTaskGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "find_available_bytes", lambda: 1e5)
    platform = load_platform("h100x8-nvlink", RANKS)
    result = simulate(graph, platform)
    assert result.summary.folded, "what is executed once fits"
    with pytest.raises(TooLargeError, match="a timeline of them is asked for"):
        _ = result.timeline
    with pytest.raises(TooLargeError, match=rf"all {RANKS} ranks .*not asked for"):
        simulate(graph, platform, fold=False)
    slow = [1.0 + rank for rank in range(RANKS)]
    with pytest.raises(TooLargeError, match="no two ranks do the same"):
        simulate(graph, platform, compute_scale=slow)
    assert graph.fold is not None, "nothing was expanded"
    assert len(graph.tasks), "whoever asks for the tables gets them"
    assert not simulate(graph, platform, fold=False).summary.folded, "they are there already"
