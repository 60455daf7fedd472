"""What plans share is made once inside a memory, never mixed up, and never kept outside of one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from trioflow.base.experiments import Plan
from trioflow.costmodel.choices import choose_times
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, vary_plan
from trioflow.parallel.remembered import Memory, remembered, remembering, remembering_within
from trioflow.parallel.splits.pipeline import assign_units, partition
from trioflow.parallel.task_graph import TaskGraph
from trioflow.trace.store import load_trace

PLANS = (
    make_plan(2),
    vary_plan(make_plan(2), bucket_bytes=1 << 18, first_bucket_bytes=1 << 18),
    make_plan(1, 2),
    make_plan(1, 2, sequence_parallel=True),
    make_plan(1, 2, vocabulary_parallel=True),
    make_plan(1, 1, 2, "gpipe", 4),
    make_plan(2, 1, 2, "zero-bubble", 4),
    make_plan(4, sharding="zero1"),
    make_plan(4, sharding="fsdp"),
    make_plan(4, sharding="fsdp", recompute="full"),
    make_plan(1, 2, 2, "interleaved", 2, recompute="selective"),
    make_plan(2, accumulate=2),
)


@pytest.fixture(scope="module", autouse=True)
def one_memory() -> None:
    """None is open here but those of the tests."""


@remembered
def count(given: object, times: int = 1) -> list[int]:
    return [id(given), times]


def test_nothing_is_kept_outside_of_a_memory() -> None:
    assert count("a") is not count("a")
    memory = Memory()
    with remembering(memory):
        first = count("a")
        assert count("a") is first and (memory.asked, memory.made) == (2, 1)
    assert count("a") is not first
    with remembering(Memory()):
        assert count("a") is not first, "another memory knows nothing of it"
    with remembering(memory):
        assert count("a") is first


def test_a_memory_of_a_call_ends_with_it_and_is_the_open_one_where_there_is_one() -> None:
    @remembering_within
    def twice() -> tuple[list[int], list[int]]:
        return count("a"), count("a")

    first, again = twice()
    assert first is again and twice()[0] is not first
    with remembering(Memory()):
        kept = count("a")
        assert twice()[0] is kept


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        ((1, 2), (2, 1)),
        ([1], (1,)),
        ({1: 2}, {1: 3}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.zeros(2), np.zeros(3)),
        (np.zeros(2), np.zeros(2, dtype=np.int64)),
        (np.zeros((1, 2)), np.zeros(2)),
        (frozenset({1}), frozenset({2})),
        ({"a"}, {"a", "str"}),
        ({1}, {1.0}),
        ("1", b"1"),
        (None, ""),
        (-0.0, 0),
    ],
)
def test_different_questions_have_answers_of_their_own(one: object, other: object) -> None:
    with remembering(Memory()):
        assert count(one) is not count(other)
        assert count(one) is not count(one, 2)
        assert count(one, times=2) is not count(one, times=3)


def test_equal_values_are_one_question_and_objects_are_themselves() -> None:
    with remembering(Memory()):
        assert count({"a": [np.arange(3)]}) is count({"a": [np.arange(3)]})
        assert count({3, 1}) is count({1, 3})
        frame = pd.DataFrame({"a": [1]})
        assert count(frame) is count(frame) and count(frame) is not count(frame.copy())


def test_an_object_asked_about_is_kept_so_that_its_identity_stays_its_own() -> None:
    memory = Memory()
    with remembering(memory):
        told = {tuple(count(pd.DataFrame({"a": [n]}))) for n in range(50)}
    assert len(told) == 50 == memory.made


def test_a_memory_is_bounded_and_forgets_what_was_not_asked_for_longest() -> None:
    memory = Memory(most=2)
    with remembering(memory):
        first, _ = count("a"), count("b")
        assert count("a") is first
        count("c")
        assert count("a") is first
        assert memory.made == 3
        count("b")
        assert memory.made == 4, "b was forgotten"


def test_errors_are_not_remembered_and_arrays_are_locked() -> None:
    asked = []

    @remembered
    def fail(value: int) -> int:
        asked.append(value)
        raise ValueError(value)

    with remembering(Memory()):
        for _ in range(2):
            with pytest.raises(ValueError, match="7"):
                fail(7)
        units = assign_units(load_trace("gpt2-tiny-b8"))
        with pytest.raises(ValueError, match="read-only"):
            units[0] = 1
    assert asked == [7, 7]


def same(one: TaskGraph, other: TaskGraph) -> bool:
    return (
        one.metadata == other.metadata
        and one.tasks.equals(other.tasks)
        and one.dependencies.equals(other.dependencies)
    )


@pytest.fixture(scope="module")
def build() -> Callable[[Plan], TaskGraph]:
    times = choose_times([load_trace("gpt2-tiny-b8")], "NVIDIA A100-SXM4-80GB", None, None)
    return lambda plan: extrapolate(times.traces, plan, times.model, batch=32)


def test_graphs_are_the_same_with_and_without_a_memory(build: Callable[[Plan], TaskGraph]) -> None:
    """In either order of plans, so that none finds what another one spoilt."""
    alone = [build(plan) for plan in PLANS]
    for order in (range(len(PLANS)), reversed(range(len(PLANS)))):
        memory = Memory()
        with remembering(memory):
            for place in order:
                assert same(build(PLANS[place]), alone[place]), PLANS[place].plan
        assert memory.made < memory.asked / 2


def test_a_changed_trace_is_another_one() -> None:
    """A copy with other facts must not be answered from the first one's results."""
    trace = load_trace("gpt2-tiny-b8")
    units = trace.facts.units
    merged = [{"name": "both", "modules": [*units[0]["modules"], *units[1]["modules"]]}, *units[2:]]
    other = replace(trace, facts=replace(trace.facts, units=merged))
    with remembering(Memory()):
        assert assign_units(trace).max() == len(units) - 1
        assert assign_units(other).max() == len(units) - 2
        assert partition(trace, 2) != partition(other, 2)
