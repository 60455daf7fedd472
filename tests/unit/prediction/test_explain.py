"""What measured steps say of a machine: numbers that were put into it come out again, and the cause is named."""

from dataclasses import replace
from functools import partial

import pytest
from trioflow import Options, load_named_platform, make_plan, predict
from trioflow.base.precision_recipes import NANOTRON
from trioflow.hardware.corrections import EXCHANGE, Corrections, correct_platform
from trioflow.parallel.remembered import Memory, remembering
from trioflow.prediction.explain import Measured, explain


def step(pieces: int, work_s: float, launches: int, nodes: int, corrections: Corrections) -> float:
    """Return the time of a step of our own: micro-batches that compute or wait for the host, then messages [s]."""
    some = dict(corrections)
    work_s *= some.get("compute", 1.0)
    host_s = launches * 30e-6 * some.get("launches", 1.0)
    bytes_s = 0.05 * some.get("between_nodes", 1.0) * (nodes > 1)
    steps_s = 40 * (nodes - 1) * some.get("between_nodes_step_s", 0.0)
    inside_s = 0.02 * some.get("communication", 1.0)
    return (
        pieces * (max(work_s, host_s) + inside_s + some.get("micro_batch_s", 0.0))
        + max(bytes_s - 0.02, 0.0)
        + steps_s
    )


ROWS = ((1, 0.2, 1000, 1), (8, 0.05, 1000, 8), (2, 0.01, 4000, 4), (1, 0.1, 100, 32))


@pytest.mark.parametrize(
    ("truth", "cause"),
    [
        ({"between_nodes": 6.0}, "network"),
        ({"between_nodes_step_s": 75e-6}, "network"),
        ({"micro_batch_s": 1.2}, "engine"),
        ({"launches": 2.5}, "launches"),
        ({"compute": 1.3}, "compute"),
        ({}, ""),
    ],
)
def test_what_deviates_is_named_and_other_steps_come_right(
    truth: dict[str, float], cause: str
) -> None:
    rows = [
        Measured(f"{row}", step(*row, truth), partial(step, *row), pieces=row[0]) for row in ROWS
    ]
    explanation = explain(rows)
    assert explanation.cause == cause
    assert {one.component.name for one in explanation.estimates if one.deviates} == set(truth)
    for one in explanation.estimates:
        if one.component.name in truth:
            assert one.low < truth[one.component.name] < one.high
    other = (4, 0.08, 2000, 16)
    measured, before, after = (step(*other, some) for some in (truth, {}, explanation.corrections))
    assert abs(after / measured - 1) <= max(abs(before / measured - 1) / 2, 0.01)


@pytest.mark.parametrize(
    ("row", "measured_s", "cause"),
    [
        ((8, 0.05, 1000, 8), 9.0, "engine"),
        ((1, 0.05, 100, 64), 0.3, "network"),
        ((8, 0.05, 1000, 1), 0.58, ""),
    ],
)
def test_one_step_is_explained_by_what_is_likeliest(
    row: tuple[int, float, int, int], measured_s: float, cause: str
) -> None:
    explanation = explain([Measured("one", measured_s, partial(step, *row), pieces=row[0])])
    assert explanation.cause == cause
    assert explanation.after_s[0] == pytest.approx(measured_s, rel=0.05)


def test_corrections_change_the_step_where_they_belong() -> None:
    """A micro-batch's time is there once for each, bytes between nodes only where there are nodes."""
    options = Options(sequence=128, interval=False, memory=False)
    machine = load_named_platform("dgx-h100", 16)

    def ask(ranks: int, corrections: Corrections) -> float:
        plan = make_plan(data=ranks, accumulate=4)
        corrected = correct_platform(replace(machine, ranks=ranks), corrections)
        return predict("gpt2", plan, corrected, batch=4 * ranks, options=options).step_time_s

    with remembering(Memory()):
        alone_s, two_s = ask(8, {}), ask(16, {})
        assert ask(16, {"micro_batch_s": 0.5}) == pytest.approx(two_s + 2.0)
        assert ask(8, {"between_nodes": 50.0}) == alone_s
        assert ask(16, {"between_nodes": 50.0}) > two_s
        assert ask(16, {"between_nodes_step_s": 1e-2}) > two_s + 0.1
        assert ask(8, {"compute": 100.0}) > 5 * alone_s


def test_corrections_are_added_to_those_that_a_platform_has() -> None:
    platform = replace(load_named_platform("dgx-h100", 16), corrections={"compute": 2.0})
    more = {"compute": 1.5, "between_nodes_step_s": 1e-5, "micro_batch_s": 0.1, "launches": 3.0}
    again = correct_platform(platform, more)
    assert again.corrections == {"compute": 3.0, "between_nodes_step_s": 1e-5}
    assert again.host["micro_batch_s"] == 0.1
    assert again.host["launch_pytorch_s"] == 3 * platform.host["launch_pytorch_s"]


def test_what_an_exchange_takes_reaches_the_hosts_of_nanotrons_runs_over_nodes() -> None:
    platform, plan = load_named_platform("p5-h100", 16), make_plan(data=2, tensor=8)
    slower = correct_platform(platform, {EXCHANGE: 300e-6})
    key = "tensor_parallel_forward_s"
    before, after = (one.host_of(plan, NANOTRON).get(key, 0.0) for one in (platform, slower))
    assert after - before == pytest.approx(8 * 300e-6)
