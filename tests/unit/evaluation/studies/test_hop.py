from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from trioflow.base.errors import SimulationError
from trioflow_evaluation.studies import hop
from trioflow_evaluation.studies.hop import (
    HopWork,
    build_graph,
    draw_bandwidths,
    draw_speedups,
    draw_times,
    load_work,
    sweep_hop,
)
from trioflow_evaluation.tables import HOP

WORK = HopWork(0.3, 500_000_000, 128)


def test_graphs_are_those_of_the_paper() -> None:
    ring, double = build_graph("ring-based"), build_graph("double-ring")
    assert set(Counter(a for a, _ in ring).values()) == {3}, (
        "two neighbours and the most distant one"
    )
    assert {(0, 1), (0, 7), (0, 4)} <= set(ring)
    assert set(Counter(a for a, _ in double).values()) == {4}
    assert {(0, 1), (0, 3), (0, 2), (0, 4)} <= set(double)
    for edges in (ring, double):
        assert {(b, a) for a, b in edges} == set(edges), "every edge leads both ways"
    with pytest.raises(SimulationError, match="no graph is called 'star'"):
        build_graph("star")


def test_the_work_comes_from_the_trace() -> None:
    work = load_work()
    assert work.batch == 128
    assert work.update_bytes == 4 * 132_863_336, "the parameters of VGG-11 (torchvision), in fp32"
    assert 0.1 < work.compute_s < 1.0


@pytest.mark.parametrize("slowed", hop.SLOWED)
def test_slow_downs_are_drawn_from_the_seed(slowed: str) -> None:
    edges = build_graph("ring-based")

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
    edges = build_graph("double-ring")
    one, _ = draw_times(WORK, edges, "sending", 0, bandwidth_bytes_per_s=1e9)
    both, _ = draw_times(WORK, edges, "links", 0, bandwidth_bytes_per_s=1e9)
    assert all(both[a, b] == max(one[a, b], one[b, a]) for a, b in edges)
    with pytest.raises(SimulationError, match="nothing is called 'rain'"):
        draw_times(WORK, edges, "rain", 0, bandwidth_bytes_per_s=1e9)


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return sweep_hop(WORK, (2e9, 12.5e9), (0, 1), iterations=15)


def test_the_table_is_complete_and_speedups_refer_to_the_standard(rows: pd.DataFrame) -> None:
    assert len(rows) == 2 * 4 * 2 * 2 * len(hop.VARIANTS)
    assert set(rows.columns) == set(HOP.names)
    keys = ["graph", "slowed", "bandwidth_bytes_per_s", "seed"]
    for _, group in rows.groupby(keys):
        standard = group[group["variant"] == hop.STANDARD].iloc[0]
        np.testing.assert_allclose(group["speedup"], standard["time_s"] / group["time_s"])
        assert standard["speedup"] == 1 and standard["computed_share"] == 1
    skips = rows["max_jump"] > 1
    assert (rows.loc[~skips, "computed_share"] == 1).all()
    np.testing.assert_allclose(
        rows["samples_per_s"],
        8 * 128 * rows["computed_share"] * rows["iterations"] / rows["time_s"],
    )
    assert rows.equals(sweep_hop(WORK, (2e9, 12.5e9), (0, 1), iterations=15))


def test_figures_show_every_rule_and_what_is_slowed(rows: pd.DataFrame) -> None:
    speedups = draw_speedups(rows, 12.5e9)
    labels = [label.get_text() for label in speedups.axes[0].get_yticklabels()]
    assert labels == [
        f"slow {one}: {name}" for one in hop.SLOWED for name in list(hop.VARIANTS)[1:]
    ]
    bandwidths = draw_bandwidths(rows)
    assert len(bandwidths.axes) == len(hop.GRAPHS) * len(hop.SLOWED)
    assert all(len(axes.get_lines()) >= len(hop.VARIANTS) for axes in bandwidths.axes)


def test_the_study_writes_its_table_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: pd.DataFrame
) -> None:
    monkeypatch.setattr(hop, "sweep_hop", lambda work: rows)
    hop.study_hop(tmp_path / "hop.parquet", tmp_path / "a", tmp_path / "b")
    names = {"hop.parquet", "a.svg", "a.png", "b.svg", "b.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    schema = pq.read_schema(tmp_path / "hop.parquet")
    assert schema.field("time_s").metadata[b"unit"] == b"s"
    assert b"trace.json" in schema.metadata[b"trioflow"]
