"""Hop on drawn graphs: against a recurrence of its own, and its bounds."""

import math
from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trioflow_evaluation.studies.hop import (
    Edge,
    Floats,
    HopRun,
    HopSettings,
    simulate_hop,
)


@dataclass
class Case:
    sending_s: dict[Edge, float]
    compute_s: Floats
    settings: HopSettings
    latency_s: float

    def run(self) -> HopRun:
        return simulate_hop(self.sending_s, self.compute_s, self.settings, latency_s=self.latency_s)


@st.composite
def cases(draw: st.DrawFn, most_jump: int = 6) -> Case:
    workers, iterations = draw(st.integers(2, 6)), draw(st.integers(1, 12))
    # A ring keeps it connected; any further edges may lead one way only.
    edges = {(w, (w + 1) % workers) for w in range(workers)}
    pairs = st.tuples(st.integers(0, workers - 1), st.integers(0, workers - 1))
    edges |= {pair for pair in draw(st.lists(pairs, max_size=12)) if pair[0] != pair[1]}
    times = st.integers(0, 40).map(lambda value: value / 4)
    sending = {edge: draw(times) for edge in sorted(edges)}
    compute = np.array(draw(st.lists(times, min_size=workers, max_size=workers)))[:, np.newaxis]
    factors = draw(
        st.lists(st.integers(1, 4), min_size=workers * iterations, max_size=workers * iterations)
    )
    fewest = min(sum(b == w for _, b in edges) for w in range(workers))
    chosen = HopSettings(
        max_gap=draw(st.integers(1, 5)),
        backup_workers=draw(st.integers(0, fewest - 1)),
        staleness=draw(st.integers(0, 4)),
        max_jump=draw(st.integers(1, most_jump)),
        behind=draw(st.integers(1, 3)),
    )
    drawn = np.array(factors, dtype=float).reshape(workers, iterations)
    return Case(sending, compute * drawn, chosen, draw(times))


def solve_by_recurrence(case: Case) -> tuple[Floats, Floats]:
    """Starts of all iterations, and finishes, one iteration after the other: no events, no queues.

    Without skipping, whoever starts iteration k has computed k - 1, has what it waits for, and
    every receiver of its updates has started iteration k - gap.
    """
    workers, iterations = case.compute_s.shape
    rules = case.settings
    starts = np.zeros((workers, iterations + 1))
    arrivals = {edge: [0.0] * iterations for edge in case.sending_s}
    free = dict.fromkeys(case.sending_s, 0.0)
    for k in range(iterations):
        for (sender, receiver), sending_s in case.sending_s.items():
            edge = (sender, receiver)
            free[edge] = max(starts[sender, k] + case.compute_s[sender, k], free[edge]) + sending_s
            arrivals[edge][k] = free[edge] + case.latency_s
        for worker in range(workers):
            old = k - rules.staleness
            found = sorted(
                times[old] if old >= 0 else 0.0
                for (_, receiver), times in arrivals.items()
                if receiver == worker
            )
            needed = found[: len(found) - rules.backup_workers]
            starts[worker, k + 1] = max([starts[worker, k] + case.compute_s[worker, k], *needed])
        finish = starts[:, k + 1].copy()
        # A token for iteration k + 1 is there once every receiver has entered k + 1 - gap.
        back = k + 1 - rules.max_gap
        if back >= 1:
            for sender, receiver in case.sending_s:
                starts[sender, k + 1] = max(starts[sender, k + 1], starts[receiver, back])
    return starts[:, :-1], finish


@given(cases(most_jump=1))
def test_without_skipping_it_equals_the_recurrence(case: Case) -> None:
    run = case.run()
    starts, finish = solve_by_recurrence(case)
    np.testing.assert_array_equal(run.start_s, starts)
    np.testing.assert_array_equal(run.finish_s, finish)
    assert (run.computed == case.compute_s.shape[1]).all()


@given(cases())
def test_it_always_ends_and_bounds_hold(case: Case) -> None:
    run = case.run()
    rules = case.settings
    assert np.isfinite(run.finish_s).all()
    assert 0 <= run.largest_gap <= rules.max_gap
    assert 0 <= run.largest_staleness <= rules.staleness
    if not rules.backup_workers:
        # A worker waits for those that send to it, those for others, round to where it sends to.
        edges = nx.DiGraph(list(case.sending_s))
        farthest = max(nx.shortest_path_length(edges, there, here) for here, there in edges.edges)
        assert run.largest_gap <= (rules.staleness + 1) * farthest
    assert np.isfinite(run.start_s[:, -1]).all(), "nobody skips the last iteration"
    for starts, counted in zip(run.start_s, run.computed, strict=True):
        done = starts[~np.isnan(starts)]
        assert len(done) == counted and (np.diff(done) >= 0).all()
    if rules.max_jump == 1:
        assert not np.isnan(run.start_s).any()


@given(cases())
def test_entered_iterations_never_lead_by_more_than_the_gap(case: Case) -> None:
    """The bound again, read from the starts themselves."""
    run = case.run()
    for sender, receiver in case.sending_s:
        for k in np.flatnonzero(~np.isnan(run.start_s[sender])):
            start_s = run.start_s[sender, k]
            entered = np.flatnonzero(run.start_s[receiver] <= start_s)
            assert k - (entered[-1] if len(entered) else -1) <= case.settings.max_gap


@given(cases())
def test_it_is_the_same_again_and_powers_of_two_scale_exactly(case: Case) -> None:
    one, other = case.run(), case.run()
    slower = Case(
        {edge: 2 * time_s for edge, time_s in case.sending_s.items()},
        2 * case.compute_s,
        case.settings,
        2 * case.latency_s,
    ).run()
    np.testing.assert_array_equal(one.start_s, other.start_s)
    np.testing.assert_array_equal(slower.start_s, 2 * one.start_s)
    assert (one.dropped, one.largest_gap) == (slower.dropped, slower.largest_gap)


def largest_cycle_mean(weights: Floats) -> float:
    """Karp's theorem: the largest mean weight of a cycle; -inf where there is no edge."""
    count = len(weights)
    best = np.full((count + 1, count), -math.inf)
    best[0] = 0.0
    for length in range(count):
        best[length + 1] = (best[length][:, np.newaxis] + weights).max(axis=0)
    lengths = (count - np.arange(count))[:, np.newaxis]
    with np.errstate(invalid="ignore"):
        means = (best[count] - best[:count]) / lengths
    return float(np.nanmax(np.min(means, axis=0)))


@pytest.mark.parametrize("seed", range(5))
def test_the_pace_of_the_standard_rules_is_the_largest_cycle_mean(seed: int) -> None:
    """Max-plus theory: in the long run an iteration takes the largest mean weight of a cycle.

    A link that carries one update after the other is a cycle of its own.
    """
    generator = np.random.default_rng(seed)
    workers, iterations = 5, 400
    edges = [(w, (w + step) % workers) for w in range(workers) for step in (1, workers - 1)]
    compute = generator.integers(1, 20, workers).astype(float)
    sending = {edge: float(generator.integers(0, 20)) for edge in edges}
    run = simulate_hop(sending, np.repeat(compute[:, None], iterations, axis=1), HopSettings())
    weights = np.full((workers, workers), -math.inf)
    np.fill_diagonal(weights, compute)
    for (sender, receiver), sending_s in sending.items():
        weights[sender, receiver] = compute[sender] + sending_s
    # Differences over a stretch that every period up to 5 divides are exact once it is periodic.
    stretch = 60
    pace = (run.start_s[:, -1] - run.start_s[:, -1 - stretch]) / stretch
    expected = max(largest_cycle_mean(weights), *sending.values())
    np.testing.assert_allclose(pace, expected, rtol=1e-12)
