from typing import Any

import numpy as np
import pytest
from trioflow.base.errors import SimulationError
from trioflow_evaluation.studies.hop import (
    GRAPHS,
    Edge,
    Floats,
    HopRun,
    HopSettings,
    build_graph,
    simulate_hop,
)

COMPUTE_S, SENDING_S, LATENCY_S, ITERATIONS = 3.0, 1.0, 0.25, 10


def run(
    graph: str = "ring-based",
    slow: dict[int, float] | None = None,
    slow_sender: dict[int, float] | None = None,
    **rules: Any,
) -> HopRun:
    """Eight workers, all alike but for some whose computation or sending takes longer."""
    compute = np.full((8, ITERATIONS), COMPUTE_S)
    for worker, factor in (slow or {}).items():
        compute[worker] *= factor
    edges = build_graph(graph)
    sending = {edge: SENDING_S * (slow_sender or {}).get(edge[0], 1.0) for edge in edges}
    return simulate_hop(sending, compute, HopSettings(**rules), latency_s=LATENCY_S)


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("rules", [{}, {"backup_workers": 1}, {"max_jump": 5}, {"max_gap": 1}])
def test_workers_that_are_alike_run_in_lock_step(graph: str, rules: dict[str, int]) -> None:
    found = run(graph, **rules)
    each = COMPUTE_S + SENDING_S + LATENCY_S
    np.testing.assert_array_equal(found.start_s, np.tile(np.arange(ITERATIONS) * each, (8, 1)))
    assert (found.finish_s == ITERATIONS * each).all()
    assert (found.largest_staleness, found.dropped) == (0, 0)


def test_staleness_hides_communication_that_is_shorter_than_computation() -> None:
    """Nobody waits but for the last updates of others, which are old enough to be there."""
    found = run(staleness=1)
    assert found.time_s == ITERATIONS * COMPUTE_S
    assert found.largest_staleness == 1


@pytest.mark.parametrize("graph", GRAPHS)
def test_one_slow_worker_holds_everyone_up(graph: str) -> None:
    """Its own updates come last, so it never waits; the others wait for it in each iteration."""
    found = run(graph, slow={2: 4.0})
    own_s = ITERATIONS * 4 * COMPUTE_S
    assert found.finish_s[2] == own_s
    assert found.time_s == own_s + SENDING_S + LATENCY_S
    neighbours = [b for a, b in build_graph(graph) if a == 2]
    assert (found.finish_s[neighbours] == found.time_s).all()


def test_a_backup_worker_frees_the_others_of_a_slow_sender() -> None:
    standard = run(slow_sender={2: 20.0})
    backup = run(slow_sender={2: 20.0}, backup_workers=1)
    each = COMPUTE_S + SENDING_S + LATENCY_S
    assert backup.time_s == ITERATIONS * each, "as if nobody were slow"
    assert standard.time_s > 3 * backup.time_s
    # Of each receiver, all updates but the last one's arrival come after it has gone on.
    assert backup.dropped > 0


def test_tokens_keep_those_who_run_ahead_within_the_gap() -> None:
    """With a backup worker and a slow one, its receivers wait for tokens and not for updates."""
    for gap in (1, 2, 3):
        found = run(slow={2: 10.0}, backup_workers=1, max_gap=gap)
        assert found.largest_gap == gap
    # The slow one is in its first iteration, so a neighbour may be in its fourth.
    assert found.start_s[1, 3] < found.start_s[1, 4] == 10 * COMPUTE_S


def test_who_is_behind_skips_and_computes_less() -> None:
    patient = run(slow={2: 10.0}, backup_workers=1)
    skipping = run(slow={2: 10.0}, backup_workers=1, max_jump=4)
    assert skipping.time_s < patient.time_s
    assert skipping.computed[2] < ITERATIONS and patient.computed[2] == ITERATIONS
    assert np.isnan(skipping.start_s[2]).sum() == ITERATIONS - skipping.computed[2]
    started = np.flatnonzero(~np.isnan(skipping.start_s[2]))
    assert np.diff(started).max() <= 4 and started[-1] == ITERATIONS - 1


def test_a_worker_skips_only_as_far_as_the_slowest_it_sends_to() -> None:
    # Worker 0 is slow; of those it sends to, 2 waits for 1, and 1 for nobody.
    edges: dict[Edge, float] = dict.fromkeys([(0, 1), (0, 2), (1, 2), (2, 0), (1, 0)], 0.0)
    compute = np.tile(np.array([[50.0], [1.0], [4.0]]), (1, 20))
    found = simulate_hop(edges, compute, HopSettings(staleness=20, max_jump=20, max_gap=20))
    entered = np.flatnonzero(~np.isnan(found.start_s[0]))
    # At 50 s worker 2 has started iterations 0 to 12, and worker 1 all of its 20.
    assert entered[1] == 12
    assert found.start_s[0, 12] == 50.0


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"max_gap": 0}, "max_gap is 0; it must be at least 1"),
        ({"backup_workers": -1}, "backup_workers is -1"),
        ({"staleness": -1}, "staleness is -1"),
        ({"max_jump": 0}, "max_jump is 0"),
        ({"behind": 0}, "behind is 0"),
        ({"backup_workers": 3}, "3 backup workers and a worker with 3 senders"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, int], told: str) -> None:
    with pytest.raises(SimulationError, match=told):
        run(**rules)


@pytest.mark.parametrize(
    ("sending", "compute", "told"),
    [
        ({(0, 1): 1.0}, np.zeros(3), r"the shape \(3,\)"),
        ({(0, 1): 1.0}, np.zeros((2, 0)), r"the shape \(2, 0\)"),
        ({(0, 1): -1.0}, np.ones((2, 2)), "-1.0 is not a time"),
        ({(0, 1): 1.0}, np.full((2, 2), np.inf), "inf is not a time"),
        ({(0, 0): 1.0}, np.ones((2, 2)), r"the edge \(0, 0\) does not join two of 2 workers"),
        ({(0, 2): 1.0}, np.ones((2, 2)), r"the edge \(0, 2\)"),
    ],
)
def test_inputs_that_make_no_sense_are_refused(
    sending: dict[Edge, float], compute: Floats, told: str
) -> None:
    with pytest.raises(SimulationError, match=told):
        simulate_hop(sending, compute, HopSettings())
