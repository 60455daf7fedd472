from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Platform
from trioflow.hardware.topologies.grids import build_mesh
from trioflow.network.collectives import compute_wire_bytes
from trioflow.parallel.task_graph import GraphMetadata, TaskGraph, TaskGraphBuilder
from trioflow_evaluation.studies import triosim
from trioflow_evaluation.studies.triosim import (
    TRACES,
    WaferCase,
    WaferSteps,
    draw_wafer,
    load_study_device,
    load_timed_trace,
    place_ranks,
    trace_ring,
)
from trioflow_evaluation.tables import WAFER

ROWS, COLUMNS, BYTES = 2, 4, 400_000_000
RANKS = ROWS * COLUMNS
WIRE_BYTES = compute_wire_bytes("all_reduce", BYTES, RANKS)
STEPS_S = 2 * (RANKS - 1) * triosim.LINK_LATENCY_S


def make_graph(all_reduces: int = 1) -> TaskGraph:
    """A second of computation, then all-reduces."""
    builder = TaskGraphBuilder()
    work = [builder.add(r, "compute", "compute", "work", duration_s=1.0) for r in range(RANKS)]
    for _ in range(all_reduces):
        match = builder.new_match()
        for rank in range(RANKS):
            builder.add(
                rank,
                "communication",
                "collective",
                "all_reduce",
                after=[work[rank]],
                message_bytes=BYTES,
                group=",".join(map(str, range(RANKS))),
                match_id=match,
            )
    return builder.build(GraphMetadata(workload="made-up"))


@pytest.fixture(scope="module")
def steps() -> WaferSteps:
    return WaferSteps(make_graph(), ROWS, COLUMNS)


@pytest.mark.parametrize(("rows", "columns"), [(7, 12), (2, 2), (3, 4), (2, 8)])
def test_the_ring_visits_every_place_and_takes_one_link_at_a_time(rows: int, columns: int) -> None:
    walk = trace_ring(rows, columns)
    assert sorted(walk) == list(range(rows * columns))
    for one, other in zip(walk, [*walk[1:], walk[0]], strict=True):
        distance = abs(one // columns - other // columns) + abs(one % columns - other % columns)
        assert distance == 1


def test_ranks_that_are_placed_along_the_ring_are_neighbours() -> None:
    links = place_ranks(build_mesh(84, 1.0, 0.0, rows=7, columns=12), trace_ring(7, 12))
    joined = {(link.source, link.target) for link in links}
    assert len(joined) == len(links) == 2 * (7 * 11 + 6 * 12)
    assert {(f"rank{rank}", f"rank{(rank + 1) % 84}") for rank in range(84)} <= joined


def test_the_mesh_step_is_the_rings_closed_form(steps: WaferSteps) -> None:
    row = steps.run_mesh("snake", 1e9)
    assert steps.ideal_s == 1.0
    assert row["step_s"] == pytest.approx(1.0 + STEPS_S + WIRE_BYTES / 1e9, rel=1e-12)
    assert row["network_share"] == pytest.approx(1 - 1 / row["step_s"], rel=1e-12)


def test_a_ring_row_by_row_shares_links_and_is_slower(steps: WaferSteps) -> None:
    snake, naive = (steps.run_mesh(name, 1e9)["step_s"] for name in ("snake", "row-major"))
    assert naive > snake


def test_the_mesh_step_is_the_same_as_that_of_simulate(steps: WaferSteps) -> None:
    links = build_mesh(RANKS, 3e9, triosim.LINK_LATENCY_S, rows=ROWS, columns=COLUMNS)
    platform = Platform("mesh", load_study_device(), RANKS, tuple(links))
    told = simulate(steps.graph, platform).summary.step_time_s
    assert steps.run_mesh("row-major", 3e9)["step_s"] == told


@pytest.mark.parametrize("bundle", triosim.BUNDLES)
def test_circuits_take_their_set_up_once_and_every_time_without_reuse(bundle: int) -> None:
    several = WaferSteps(make_graph(all_reduces=3), ROWS, COLUMNS)
    first, later, anew = several.run_circuits(bundle)
    # A circuit crosses two links: up to the fabric and down from it.
    each = 2 * STEPS_S + WIRE_BYTES / (484e9 / 8 * bundle)
    assert first["step_s"] == pytest.approx(1.0 + 0.020 + 3 * each, rel=1e-12)
    assert later["step_s"] == pytest.approx(1.0 + 3 * each, rel=1e-12)
    assert anew["step_s"] == pytest.approx(1.0 + 3 * (0.020 + each), rel=1e-12)
    established = [row["established"] for row in (first, later, anew)]
    assert established == [RANKS, 0, 3 * RANKS]
    assert [row["torn_down"] for row in (first, later, anew)] == [0, 0, 3 * RANKS]


def test_the_bandwidth_of_a_share_is_found(steps: WaferSteps) -> None:
    bandwidth = steps.find_bandwidth(0.75)
    # 1 s of 4 s is computation, so the all-reduce takes 3 s.
    assert bandwidth == pytest.approx(WIRE_BYTES / (3.0 - STEPS_S), rel=1e-9)
    assert steps.run_mesh("snake", bandwidth)["network_share"] == pytest.approx(0.75, rel=1e-9)


def test_every_case_fills_the_wafer_and_has_its_trace() -> None:
    for case in triosim.CASES:
        assert case.data * case.tensor * case.pipeline == triosim.GPUS == 84
        assert (TRACES / case.trace / "trace.json").exists()


def test_traces_are_timed_for_the_device_of_the_studies() -> None:
    trace = load_timed_trace("vgg19-b128").traces[0]
    assert trace.facts.device_name == load_study_device().name
    assert trace.facts.step_time_source == "predicted"
    assert trace.operators["device_ns"].sum() > 0


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    """The study of one small plan and of one that the paper reports on, at a few ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triosim, "ROWS", ROWS)
        patch.setattr(triosim, "COLUMNS", COLUMNS)
        patch.setattr(triosim, "WaferSteps", lambda graph: WaferSteps(graph, ROWS, COLUMNS))
        cases = (
            WaferCase("vgg19-b128", 2, data=RANKS, paper_share=0.9),
            WaferCase("vgg19-b128", 4, data=4, pipeline=2, micro_batches=2),
        )
        return pd.DataFrame([row for case in cases for row in triosim.sweep_case(case)])


def test_a_sweep_has_every_bandwidth_bundle_and_the_papers_share(rows: pd.DataFrame) -> None:
    assert set(rows.columns) == set(WAFER.names)
    links, ports = (rows[rows["sweep"] == name] for name in ("link", "port"))
    assert len(links) == 2 * 2 * len(triosim.MESH_BANDWIDTHS_BYTES_PER_S)
    assert len(ports) == 2 * 3 * len(triosim.BUNDLES)
    paper = rows[rows["sweep"] == "paper"]
    assert paper["network_share"].tolist() == pytest.approx([0.9], rel=1e-9)
    assert (rows["step_s"] >= rows["ideal_s"]).all()
    for _, line in links.groupby(["plan", "variant"]):
        assert (line.sort_values("link_bandwidth_bytes_per_s")["step_s"].diff().dropna() <= 0).all()


def test_the_study_writes_its_table_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: pd.DataFrame
) -> None:
    found = rows.to_dict("records")
    monkeypatch.setattr(triosim, "CASES", triosim.CASES[:1])
    monkeypatch.setattr(triosim, "sweep_case", lambda case: found)
    triosim.study_wafer(tmp_path / "wafer.parquet", tmp_path / "wafer")
    assert {p.name for p in tmp_path.iterdir()} == {"wafer.parquet", "wafer.svg", "wafer.png"}
    table = pq.read_table(tmp_path / "wafer.parquet")
    assert table.num_rows == len(rows)


def test_the_figure_has_a_panel_for_every_case(rows: pd.DataFrame) -> None:
    titles = [" ".join(axes.get_title(loc="left").split()) for axes in draw_wafer(rows).axes]
    assert titles[:2] == ["vgg19, 2 samples 8 data", "vgg19, 4 samples 4 data x 2 pipeline"]


def test_both_engines_give_the_same_step(steps: WaferSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    execute = triosim.run_program
    monkeypatch.setattr(
        triosim, "run_program", lambda *given, compiled: ran.append(compiled) or execute(*given, compiled=compiled)
    )
    found = []
    for often in (True, False):
        monkeypatch.setattr(triosim, "is_repaid", lambda _, often=often: often)
        found.append((steps.run_mesh("snake", 1e9), steps.run_circuits(1)))
    assert found[0] == found[1]
    # Circuits are driven flow by flow, uncompiled.
    assert ran == [True, *[False] * 7]
