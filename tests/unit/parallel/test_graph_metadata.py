"""What a task graph's file says of where the graph comes from is checked, key by key."""

import json

import pytest
from same_model import ProportionalModel
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.parallel.task_graph import (
    UNKNOWN,
    GraphMetadata,
    TaskGraphBuilder,
    TimesOrigin,
    load_task_graph,
)


@pytest.fixture(scope="module")
def found(transformer_trace):
    return extrapolate(transformer_trace, named_plan("ddp", 2), ProportionalModel()).metadata


def test_what_is_written_is_read_again(found, tmp_path):
    text = json.dumps(found.to_dict(), sort_keys=True)
    assert GraphMetadata.from_dict(json.loads(text), "x") == found
    assert "experiment" not in found.to_dict()
    told = UNKNOWN.to_dict() | {
        "operator_times": {"cost_model": "c", "confidence": "d", "warnings": []}
    }
    assert GraphMetadata.from_dict(told, "x").operator_times == TimesOrigin("c", "d", [])
    TaskGraphBuilder().build().save(tmp_path)
    assert load_task_graph(tmp_path).metadata == UNKNOWN == GraphMetadata.from_dict({}, "x")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": "two"}, "metadata ranks: "),
        ({"batch": True}, "metadata batch: "),
        ({"warnings": None}, "metadata warnings: "),
        ({"step": 1}, "metadata: unknown key 'step'"),
        ({"plan": {"data": 2}}, "metadata plan: .*`plan`"),
        ({"operator_times": {"cost_model": "c"}}, "metadata operator_times: .*`confidence`"),
        *[
            ({"compute_interval": wrong}, "metadata compute_interval")
            for wrong in ([1.1, 0.9], [0.0, 1.0], [1.0], ["a", "b"])
        ],
    ],
)
def test_what_is_wrong_is_named(found, tmp_path, changes, words):
    graph = TaskGraphBuilder().build()
    told = {**found.to_dict(), **changes}
    tables.write_table(graph.tasks, "tasks", tmp_path / "tasks.parquet", told)
    tables.write_table(graph.dependencies, "dependencies", tmp_path / "dependencies.parquet")
    with pytest.raises(InputError, match=f"tasks.parquet, .*{words}"):
        load_task_graph(tmp_path)


def test_a_key_that_is_missing_is_named(found):
    told = found.to_dict()
    del told["batch"]
    with pytest.raises(InputError, match="a file, metadata: no key 'batch'; make the task graph"):
        GraphMetadata.from_dict(told, "a file")
