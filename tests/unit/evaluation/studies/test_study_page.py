"""The page of case studies: what it shows is what the tables hold."""

import re
from pathlib import Path

import pandas as pd
import pytest
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.sweeps.description import fill_values
from trioflow.sweeps.scenarios import make_frame
from trioflow_evaluation.studies import triosim
from trioflow_evaluation.studies.distsim import BEST, WORST, list_degrees
from trioflow_evaluation.studies.page import CAPTIONS, FIGURES, STUDIES, build_study_page
from trioflow_evaluation.tables import HOP, WAFER

MESH_STEP_S, IDEAL_S = 11.0, 1.0


def make_wafer() -> pd.DataFrame:
    """Return one case: the mesh takes ten seconds more than no network, circuits 1 to 4 s more."""
    about = {
        "workload": "vgg19",
        "plan": "84 data",
        "batch": 168,
        "samples_per_replica": 2,
        "ideal_s": IDEAL_S,
        "torn_down": 0,
    }
    mesh = {"network": "mesh", "ports_per_circuit": 0, "established": 0}
    rows = [
        about | mesh | {"sweep": "link", "variant": name, "link_bandwidth_bytes_per_s": rate, "step_s": 1 + 1e9 / rate}
        for name in ("snake", "row-major")
        for rate in triosim.MESH_BANDWIDTHS_BYTES_PER_S
    ]
    for bundle in triosim.BUNDLES:
        for number, variant in enumerate(("first step", "later step", "without reuse")):
            extra_s = {"first step": 2.0, "later step": 1.0, "without reuse": 6.0}[variant] + (0.1 * bundle)
            rows.append(
                about
                | {
                    "network": "circuit",
                    "variant": variant,
                    "ports_per_circuit": bundle,
                    "sweep": "port",
                    "link_bandwidth_bytes_per_s": 60.5e9 * bundle,
                    "established": 84 * number,
                    "step_s": IDEAL_S + extra_s,
                }
            )
    paper = {"sweep": "paper", "variant": "snake", "link_bandwidth_bytes_per_s": 3.7e9}
    return pd.DataFrame([*rows, about | mesh | paper | {"step_s": MESH_STEP_S}]).assign(
        network_share=lambda frame: 1 - frame["ideal_s"] / frame["step_s"]
    )


def make_hop() -> pd.DataFrame:
    work = triosim.HopWork(compute_s=0.1, update_bytes=10**9, batch=8)
    rates = (triosim.SHOWN_BANDWIDTH_BYTES_PER_S, 5e9)
    return triosim.sweep_hop(work, rates, seeds=(0, 1, 2), iterations=4)


def make_distsim() -> pd.DataFrame:
    """Return all plans, DistSim's best the fastest and its worst the slowest, a hundred times."""
    rows = []
    for scale in (1.0, 2.0):
        for number, (tensor, pipeline, data) in enumerate(list_degrees()):
            own = (tensor, pipeline, data)
            step_s = {BEST[:3]: 0.5, WORST[:3]: 50.0}.get(own, 1.0 + number)
            given = fill_values(
                {
                    "trace": "bert-48-b4",
                    "platform": "a10x16-4nodes",
                    "batch": 16,
                    "data": data,
                    "tensor": tensor,
                    "pipeline": pipeline,
                    "communication_scale": scale,
                    "schedule": "1f1b" if pipeline > 1 else "none",
                    "micro_batches": 16 // data,
                }
            )
            words = dict.fromkeys(("reason", "workload", "device_name", "plan_text", "graph", "confidence"), "")
            told = {"scenario": len(rows), "status": "ok", "ranks": 16, "step_time_s": step_s}
            rows.append(given | words | told | {"low_s": 0.9 * step_s, "high_s": 1.2 * step_s})
    return make_frame(rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    inputs = {"inputs": {"model/operators.json": "0123456789abcdef"}}
    tables.write_table(make_wafer(), "wafer", folder / "wafer.parquet", inputs, WAFER)
    tables.write_table(make_hop(), "hop", folder / "hop.parquet", {}, HOP)
    tables.write_table(make_distsim(), "sweep_results", folder / "distsim_search.parquet")
    for study in STUDIES.values():
        for figure in study.figures:
            (folder / f"{figure}.svg").write_text(f"<svg>{figure}</svg>")
    return folder


def test_the_page_holds_every_study_with_its_figures_tables_and_seeds(made: Path, tmp_path: Path) -> None:
    page = tmp_path / "report/studies.html"
    build_study_page(made, page)
    text = page.read_text()
    for name, study in STUDIES.items():
        section = text.partition(f'<section id="{name}">')[2].partition("</section>")[0]
        assert "What was swept" in section and "What was assumed" in section and "<table" in section
        assert "<dt>seeds</dt>" in section
        asked, answered = section.index('class="headline"'), section.index('class="verdict"')
        assert asked < answered < section.index("<figure"), "first the question and its answer"
        for figure in study.figures:
            assert f'src="{FIGURES}/{figure}.svg"' in section
            copied = tmp_path / "report" / FIGURES / f"{figure}.svg"
            assert copied.read_text() == f"<svg>{figure}</svg>"
    assert "<dt>seeds</dt><dd>0, 1 and 2</dd>" in text
    assert "model/operators.json" in text and "0123456789abcdef" in text
    assert not re.search(r"\bnan\b", text)
    before = page.read_bytes()
    build_study_page(made, page)
    assert page.read_bytes() == before


def test_the_numbers_are_those_of_the_tables() -> None:
    opening, body = STUDIES["wafer"].render(make_wafer())
    # Of ten seconds of communication circuits leave 1.1 to 1.8, or 6.1 to 6.8.
    assert "82.0&nbsp;% to 89.0&nbsp;%" in body and "32.0&nbsp;% to 39.0&nbsp;%" in body
    assert "as the paper has it: 39.0&nbsp;% (1 port, " in opening
    assert "32.0&nbsp;% to 89.0&nbsp;% of the mesh" in opening
    rows = make_hop()
    _, body = STUDIES["hop"].render(rows)
    chosen = rows[
        (rows["graph"] == "ring-based")
        & (rows["variant"] == "staleness 5")
        & (rows["slowed"] == "sending")
        & (rows["bandwidth_bytes_per_s"] == triosim.SHOWN_BANDWIDTH_BYTES_PER_S)
    ]["speedup"]
    assert f"{chosen.median():.2f} ({chosen.min():.2f} to {chosen.max():.2f})" in body
    opening, body = STUDIES["distsim_search"].render(make_distsim())
    assert "best plan is number 1 of 15 and its worst number 15; first and last are 100 times" in opening
    orders = body.partition("</table>")[0]
    assert orders.count(">1M8P2D<") == orders.count(">16M1P1D<") == 2
    assert ">100<" in orders and "1 of 15" in orders and "15 of 15" in orders


def test_nothing_is_written_where_a_table_or_a_figure_is_missing(made: Path, tmp_path: Path) -> None:
    page = tmp_path / "report/studies.html"
    with pytest.raises(TableError, match="no such file"):
        build_study_page(tmp_path, page)
    for path in made.iterdir():
        if path.name != "hop_bandwidth.svg":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(InputError, match=r"hop_bandwidth\.svg"):
        build_study_page(tmp_path, page)
    assert not page.parent.exists()


def test_every_caption_says_its_limit_and_belongs_to_a_figure() -> None:
    assert {figure for study in STUDIES.values() for figure in study.figures} == set(CAPTIONS)
    assert all(parts[-1].startswith("Limit:") for parts in CAPTIONS.values())
