from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from trioflow_evaluation.studies import triosim
from trioflow_evaluation.studies.triosim import (
    GRAPHS,
    Edge,
    HopRun,
    HopSettings,
    HopWork,
    build_workers,
    draw_bandwidths,
    draw_speedups,
    draw_times,
    load_work,
    simulate_hop,
    sweep_hop,
)
from trioflow_evaluation.tables import HOP

WORK = HopWork(0.3, 500_000_000, 128)


def test_graphs_are_those_of_the_paper() -> None:
    ring, double = build_workers("ring-based"), build_workers("double-ring")
    assert set(Counter(a for a, _ in ring).values()) == {3}, "two neighbours and the most distant one"
    assert {(0, 1), (0, 7), (0, 4)} <= set(ring)
    assert set(Counter(a for a, _ in double).values()) == {4}
    assert {(0, 1), (0, 3), (0, 2), (0, 4)} <= set(double)
    for edges in (ring, double):
        assert {(b, a) for a, b in edges} == set(edges), "every edge leads both ways"


def test_the_work_comes_from_the_trace() -> None:
    work = load_work()
    assert work.batch == 128
    assert work.update_bytes == 4 * 132_863_336, "the parameters of VGG-11 (torchvision), in fp32"
    assert 0.1 < work.compute_s < 1.0


@pytest.mark.parametrize("slowed", triosim.SLOWED)
def test_slow_downs_are_drawn_from_the_seed(slowed: str) -> None:
    edges = build_workers("ring-based")

    def draw(seed: int) -> tuple[list[float], list[float]]:
        sending, compute = draw_times(WORK, edges, slowed, seed, bandwidth_bytes_per_s=1e9)
        return list(sending.values()), compute.ravel().tolist()

    assert draw(1) == draw(1) != draw(2)
    sending, compute = (np.array(times) for times in draw(3))
    assert (sending >= 0.5).all() and (sending <= 5.0).all()
    assert (compute >= 0.3).all() and (compute <= 3.0).all()
    assert (slowed in ("sending", "links")) == (sending > 0.5).any()
    assert (slowed in ("GPUs", "moments")) == (compute > 0.3).any()
    if slowed == "moments":
        assert 0.05 < (compute > 0.3).mean() < 0.25, "one in eight"


def test_links_are_as_slow_as_the_slower_of_their_ends() -> None:
    edges = build_workers("double-ring")
    one, _ = draw_times(WORK, edges, "sending", 0, bandwidth_bytes_per_s=1e9)
    both, _ = draw_times(WORK, edges, "links", 0, bandwidth_bytes_per_s=1e9)
    assert all(both[a, b] == max(one[a, b], one[b, a]) for a, b in edges)


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return sweep_hop(WORK, (2e9, 12.5e9), (0, 1), iterations=15)


def test_the_table_is_complete_and_speedups_refer_to_the_standard(rows: pd.DataFrame) -> None:
    assert len(rows) == 2 * 4 * 2 * 2 * len(triosim.VARIANTS)
    assert set(rows.columns) == set(HOP.names)
    keys = ["graph", "slowed", "bandwidth_bytes_per_s", "seed"]
    for _, group in rows.groupby(keys):
        standard = group[group["variant"] == triosim.STANDARD].iloc[0]
        np.testing.assert_allclose(group["speedup"], standard["time_s"] / group["time_s"])
        assert standard["speedup"] == 1 and standard["computed_share"] == 1
    skips = rows["max_jump"] > 1
    assert (rows.loc[~skips, "computed_share"] == 1).all()
    np.testing.assert_allclose(
        rows["samples_per_s"], 8 * 128 * rows["computed_share"] * rows["iterations"] / rows["time_s"]
    )
    assert rows.equals(sweep_hop(WORK, (2e9, 12.5e9), (0, 1), iterations=15))


def test_figures_show_every_rule_and_what_is_slowed(rows: pd.DataFrame) -> None:
    speedups = draw_speedups(rows, 12.5e9)
    labels = [label.get_text() for label in speedups.axes[0].get_yticklabels()]
    assert labels == [f"slow {one}: {name}" for one in triosim.SLOWED for name in list(triosim.VARIANTS)[1:]]
    bandwidths = draw_bandwidths(rows)
    assert len(bandwidths.axes) == len(triosim.GRAPHS) * len(triosim.SLOWED)
    assert all(len(axes.get_lines()) >= len(triosim.VARIANTS) for axes in bandwidths.axes)


def test_the_study_writes_its_table_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: pd.DataFrame
) -> None:
    monkeypatch.setattr(triosim, "sweep_hop", lambda work: rows)
    triosim.study_hop(tmp_path / "hop.parquet", tmp_path / "a", tmp_path / "b")
    names = {"hop.parquet", "a.svg", "a.png", "b.svg", "b.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    schema = pq.read_schema(tmp_path / "hop.parquet")
    assert schema.field("time_s").metadata[b"unit"] == b"s"
    assert b"trace.json" in schema.metadata[b"trioflow"]


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
    edges = build_workers(graph)
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
    neighbours = [b for a, b in build_workers(graph) if a == 2]
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
