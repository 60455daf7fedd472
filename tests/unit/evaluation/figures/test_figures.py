"""The paper's averages: which of them stands beside which case.

The data of a figure: all of a set, each row with its label, and an error that names what is empty.

What each figure needs, and which of them public data add to.

Figures of predictions: each panel says what it rests on, and shows what its table holds.

Plans as the figures tell them apart.

A figure's files: vector and raster pictures and the table, the same on every run.

Rows of runs of this machine, and their busy times.

Panels of lines and dots.

Scenarios of a figure: predicted as a sweep's, and told as what was only simulated.

Rows of public measurements.

Where a step goes: parts that add up, measured above predicted.

Times of the simulator: what is timed is what is predicted.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from test_report_page import Page
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.settings import list_descriptions
from trioflow.sweeps.description import fill_values, load_sweep
from trioflow.sweeps.scenarios import PredictionCache, list_sweep_files
from trioflow.tables import to_arrow, validate
from trioflow_evaluation.figures.build import (
    SCHEMAS,
    build_figure_data,
    build_figures_page,
    count_right_pairs,
    draw_evidence,
    keep_rivals,
    list_panels,
    make_figure,
    predict_scenarios,
    time_simulations,
)
from trioflow_evaluation.figures.catalogue import (
    DATA_PARALLEL,
    DDP,
    FIGURES,
    PIPELINE,
    SINGLE,
    TENSOR,
    describe_averages,
    find_averages,
    find_descriptions,
    find_family,
    find_figure,
    list_figures,
    list_inputs,
    load_averages,
    name_plan,
    read_short_plan,
)
from trioflow_evaluation.figures.points import (
    BUSY,
    COLUMN_IN,
    SMALLEST_PT,
    column_style,
    count_busy_s,
    draw_points,
    list_live_rows,
    list_live_shares,
    list_predicted_rows,
    list_predicted_shares,
    list_published_rows,
    list_validation_rows,
    make_points,
    measure_height,
    measure_rank_shares,
    new_column_figure,
    read_live_errors,
    shorten_device,
    spread_places,
    use_busy_time,
)
from trioflow_evaluation.tables import EVIDENCE, EVIDENCE_KINDS, HOP, SHARES, SIMULATOR_TIMES, WAFER

from evaluation.figures.figure_cases import (
    PLANS,
    make_errors,
    make_evidence,
    make_plans,
    make_profile,
    make_sweep,
    make_validation,
    write,
    write_files,
)
from evaluation.studies.test_study_page import make_hop, make_wafer


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"figure": "fig06", "family": SINGLE, "device": "NVIDIA A40"}, [0.0110]),
        ({"figure": "fig06", "family": SINGLE, "device": ""}, [0.0110, 0.0325]),
        ({"figure": "fig07", "family": DATA_PARALLEL}, [0.0739]),
        ({"figure": "fig07", "family": DDP}, []),
        ({"figure": "fig08", "family": DDP, "device": "NVIDIA A100-SXM4-80GB", "ranks": 8}, [0.0273]),
        ({"figure": "fig09", "family": TENSOR, "ranks": 2}, [0.0454]),
        ({"figure": "fig10", "family": PIPELINE, "ranks": 2, "micro_batches": 4}, [0.1510]),
        ({"figure": "fig10", "family": PIPELINE, "ranks": 8, "micro_batches": 2}, [0.0658, 0.0896]),
        ({"figure": "fig11", "family": TENSOR, "source_gpu": "A", "device": "B"}, [0.0907]),
        ({"figure": "fig11", "family": DDP, "source_gpu": "B", "device": "B"}, [0.0669]),
        ({"figure": "fig12", "family": DDP}, []),
    ],
)
def test_the_nearest_averages_are_found(told: dict[str, Any], expected: list[float]) -> None:
    assert [one.error for one in find_averages(make_evidence(**told))] == expected


def test_words_carry_the_numbers() -> None:
    row = make_evidence(figure="fig08", family=DDP, device="NVIDIA A40")
    assert describe_averages(row) == "DDP, 2 A40: 2.91 %"
    assert all(0 < one.error < 0.2 for one in load_averages()), "shares, not per cents"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return write_files(tmp_path_factory.mktemp("figures"))


BUILT = [name for name, figure in FIGURES.items() if not figure.study and figure.form != "speed"]
EVIDENCED = [name for name in BUILT if FIGURES[name].form != "shares"]


@pytest.mark.parametrize("name", BUILT)
def test_a_figure_holds_its_kind_of_rows_in_its_schema(name: str, files: dict[str, list[str]]) -> None:
    frame = build_figure_data(name, files, make_plans())
    figure = FIGURES[name]
    schema = SCHEMAS[figure.form]
    validate(to_arrow(frame, name, schema=schema), name, schema=schema)
    assert set(frame["figure"]) == {name}
    live = frame[frame["evidence"] == "measured here"]
    assert figure.live == (len(live) > 0)
    assert (frame["evidence"] == "only simulated").any()
    assert set(frame["evidence"]) <= set(EVIDENCE_KINDS)


@pytest.mark.parametrize("name", EVIDENCED)
def test_public_measurements_come_with_the_published_name_only(name: str, files: dict[str, list[str]]) -> None:
    figure = FIGURES[name]
    plain = build_figure_data(name, files, make_plans())
    assert "measured, public" not in set(plain["evidence"])
    if figure.validation or figure.published:
        frame = build_figure_data(f"published-{name}", files, make_plans())
        public = frame[frame["evidence"] == "measured, public"]
        assert len(public) and public["measured_s"].notna().all()
        assert len(frame) == len(plain) + len(public)


def test_the_papers_averages_stand_where_they_are_drawn(files: dict[str, list[str]]) -> None:
    frame = build_figure_data("fig08", files, make_plans())
    told = dict(zip(frame["evidence"], frame["paper"], strict=True))
    assert told["measured here"] and told["only simulated"] == ""
    frame = build_figure_data("fig11", files, make_plans())
    assert (frame[frame["family"] == "DDP"]["paper"] != "").all(), "nothing was measured there"


def test_tensor_parallelism_is_told_in_busy_time(files: dict[str, list[str]]) -> None:
    frame = build_figure_data("fig09", files, make_plans())
    assert set(frame["quantity"]) == {"busy time"}
    live = frame[frame["evidence"] == "measured here"]
    assert live["measured_s"].tolist() == pytest.approx([2.0 * 0.8])


def test_an_empty_or_missing_set_is_named_with_its_figure(files: dict[str, list[str]], tmp_path: Path) -> None:
    few = write(make_errors(("one",)), "errors", tmp_path / "error.parquet")
    with pytest.raises(InputError, match="fig08: no measured experiment with a plan of the kind DDP"):
        build_figure_data("fig08", {**files, "errors": [few]}, make_plans())
    with pytest.raises(InputError, match="published-fig06: the set batch-change is missing"):
        build_figure_data("published-fig06", {**files, "validation": []}, make_plans())
    empty = write(make_sweep()[:0], "sweep_results", tmp_path / "net.parquet")
    with pytest.raises(InputError, match="fig07: no predicted scenario"):
        build_figure_data("fig07", {**files, "predictions": [empty]}, make_plans())
    with pytest.raises(TableError, match="fig15: not a study table"):
        build_figure_data("fig15", {"study": [few]}, make_plans())


def test_rivals_are_the_plans_of_one_training() -> None:
    rows = [
        make_evidence(case=case, plan=plan, workload=net)
        for case, plan, net in (("a", "ddp4", "net"), ("b", "tp4", "net"), ("c", "ddp4", "lone"))
    ]
    assert [row["case"] for row in keep_rivals(rows)] == ["a", "b"]
    with pytest.raises(InputError, match="under several plans"):
        keep_rivals(rows[2:])


def test_nothing_depends_on_the_order_of_the_files(files: dict[str, list[str]]) -> None:
    one = build_figure_data("published-fig06", files, make_plans())
    other = build_figure_data("published-fig06", {**files, "validation": files["validation"][::-1]}, make_plans())
    pd.testing.assert_frame_equal(one, other)


FOLDER = Path(__file__).parents[4] / "config/figures"
DESCRIPTIONS = list_descriptions(FOLDER)


def test_all_figures_of_the_paper_from_6_to_16_are_there() -> None:
    assert list(FIGURES) == [f"fig{number:02}" for number in range(6, 17)]
    assert list_figures(DESCRIPTIONS, published=False) == list(FIGURES)


def test_public_data_add_to_those_that_have_any() -> None:
    names = list_figures(DESCRIPTIONS, published=True)
    assert [name.removeprefix("published-") for name in names] == list(FIGURES)
    plain = {name for name in names if not name.startswith("published-")}
    assert plain == {"fig07", "fig14", "fig15", "fig16"}


def test_every_description_is_one_and_belongs_to_a_figure() -> None:
    used = {
        name
        for figure in list_figures(DESCRIPTIONS, published=True)
        for name in find_descriptions(figure, DESCRIPTIONS)
    }
    assert used == set(DESCRIPTIONS)
    for file in DESCRIPTIONS.values():
        assert load_sweep(file).scenarios


def test_inputs_follow_from_what_a_figure_compares() -> None:
    def inputs(name: str) -> dict[str, list[str]]:
        return list_inputs(name, DESCRIPTIONS, ["net"], ["net-tp"], ["some-set"])

    assert inputs("fig07") == {"predictions": ["figures/predictions/fig07.parquet"]}
    assert inputs("fig14") == {"times": ["figures/simulator_times.parquet"]}
    assert inputs("fig15") == {"study": ["studies/wafer.parquet"]}
    assert inputs("fig09")["timelines"] == ["timelines/net-tp/timeline.parquet"]
    public = inputs("published-fig11")
    assert public["validation"] == ["validation/new-gpu.parquet"]
    assert public["published"] == ["published/some-set.parquet"] and "errors" not in public
    assert public["predictions"][1] == "figures/predictions/published-fig11.parquet"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    files = write_files(tmp_path_factory.mktemp("figures"))
    return build_figure_data("published-fig08", files, make_plans())


def test_titles_carry_the_three_marks_measured_first(rows: pd.DataFrame) -> None:
    panels = list_panels(FIGURES["fig08"], rows)
    first = [panel.title.partition(" (")[0] for panel in panels]
    assert first == ["MEASURED HERE", "MEASURED, PUBLIC", "ONLY SIMULATED"]
    assert "mean |error| 20.0 %; 80 % interval holds 1 of 1" in panels[0].title
    assert [panel.errors for panel in panels] == [True, True, False]
    assert panels[0].points["x"][0] == pytest.approx(20.0)
    assert panels[0].points["papers"][0] == ((pytest.approx(-2.91), pytest.approx(2.91)),)
    assert pd.isna(panels[2].points["x"].iloc[-1]), "what does not fit stays"


def test_without_a_measurement_the_averages_stand_around_the_predictions() -> None:
    row = make_evidence(figure="fig07", evidence="only simulated", family="DataParallel", measured_s=None)
    (panel,) = list_panels(FIGURES["fig07"], pd.DataFrame([row]))
    ((low, high),) = panel.points["papers"][0]
    assert (low, high) == (pytest.approx(1.1 * (1 - 0.0739)), pytest.approx(1.1 * (1 + 0.0739)))


def test_it_fits_a_column_and_no_text_is_smaller_than_seven_points(rows: pd.DataFrame) -> None:
    drawing = draw_evidence(FIGURES["fig08"], rows)
    assert drawing.get_figwidth() == COLUMN_IN <= 3.4
    texts = [
        text for axes in drawing.axes for text in (*axes.get_yticklabels(), *axes.get_xticklabels(), axes.xaxis.label)
    ]
    assert min(text.get_fontsize() for text in texts) >= SMALLEST_PT >= 7
    renderer = drawing.canvas.get_renderer()  # type: ignore[attr-defined]
    width, height = drawing.get_size_inches() * drawing.dpi
    for axes in drawing.axes:
        box = axes._left_title.get_window_extent(renderer)
        assert box.x0 >= 0 and box.x1 <= width and box.y1 <= height, "titles lie inside the figure"


def test_rival_plans_are_shown_by_sample_and_their_order_is_counted() -> None:
    plans = (("ddp2", 8, 1.0, 1.2), ("tp2", 4, 1.0, 1.1), ("pp2", 8, 3.0, 0.8))
    rows = [
        make_evidence(
            figure="fig12", plan=plan, series=plan, batch=batch, measured_s=measured_s, predicted_s=predicted_s
        )
        for plan, batch, measured_s, predicted_s in plans
    ]
    # By sample measured ddp2 < tp2 < pp2, predicted pp2 < ddp2 < tp2.
    assert count_right_pairs(rows) == (1, 3)
    (panel,) = list_panels(FIGURES["fig12"], pd.DataFrame(rows, columns=EVIDENCE.names))
    assert "1 of 3 pairs of plans in the right order" in panel.title
    assert tuple(panel.points.loc[1, ["x", "measured"]]) == (pytest.approx(0.275), 0.25)


def test_the_title_counts_the_intervals_that_hold() -> None:
    rows = [make_evidence(), make_evidence(measured_s=1.31), make_evidence(low_s=None, high_s=None)]
    (panel,) = list_panels(FIGURES["fig08"], pd.DataFrame(rows).astype({"low_s": float}))
    assert "80 % interval holds 1 of 2" in panel.title


def test_different_quantities_are_not_averaged_together() -> None:
    rows = [
        make_evidence(figure="fig06", family="single", quantity=quantity, predicted_s=predicted_s)
        for quantity, predicted_s in (("whole step", 1.1), ("whole step", 0.7), ("sum of operators", 1.02))
    ]
    (panel,) = list_panels(FIGURES["fig06"], pd.DataFrame(rows))
    assert "mean |error|: whole step 20.0 %, sum of operators 2.0 %" in panel.title


def test_the_kind_follows_from_the_degrees_and_not_from_the_name() -> None:
    assert [find_family(plan) for plan in PLANS] == ["single", "DDP", "TP", "PP", "sharded"]
    assert find_family(replace(PLANS[1], replication="dp")) == "DataParallel"
    assert find_family(replace(PLANS[1], tensor=2)) == "hybrid"


def test_names_tell_chunks_schedule_and_sharding() -> None:
    assert name_plan(PLANS[3]) == "PP, 4 chunks"
    assert name_plan(replace(PLANS[3], micro_batches=1, schedule="1f1b")) == "PP, 1 chunk, 1f1b"
    assert name_plan(PLANS[4]) == "FSDP" and name_plan(PLANS[2]) == "TP"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("single", ("single", 0)),
        ("ddp4", ("DDP", 0)),
        ("tp4", ("TP", 0)),
        ("dp2", ("DataParallel", 0)),
        ("tp-gather4", ("TP", 0)),
        ("gpipe4-m1", ("PP", 1)),
        ("1f1b4-m8", ("PP", 8)),
        ("t2-d2-p2-m8", ("hybrid", 0)),
        ("anything", ("hybrid", 0)),
    ],
)
def test_a_public_cases_short_plan_is_read(text: str, expected: tuple[str, int]) -> None:
    assert read_short_plan(text) == expected


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    files = write_files(folder)
    times = pd.DataFrame(
        [
            {
                "trace": "net-b8",
                "workload": "net",
                "family": "DDP",
                "plan": "2 data",
                "ranks": 2,
                "events": 100,
                "repeats": 3,
                "build_s": 0.1,
                "wall_s": 0.02,
                "wall_low_s": 0.01,
                "wall_high_s": 0.03,
                "step_s": 1.0,
            }
        ]
    )
    tables.write_table(times, "times", folder / "times.parquet", schema=SIMULATOR_TIMES)
    tables.write_table(make_wafer(), "study", folder / "wafer.parquet", schema=WAFER)
    hop = make_hop()
    tables.write_table(hop, "study", folder / "hop.parquet", schema=HOP)
    files |= {"times": [str(folder / "times.parquet")]}
    for name, kind in (("fig08", ""), ("fig13", ""), ("fig14", ""), ("fig15", "wafer"), ("fig16", "hop")):
        study = {"study": [str(folder / f"{kind}.parquet")]} if kind else {}
        make_figure(name, {**files, **study}, make_plans(), folder / "drawn" / name)
    return folder


def test_every_figure_is_there_as_vectors_pixels_and_numbers(made: Path) -> None:
    drawn = made / "drawn"
    assert {path.name for path in drawn.iterdir()} == {
        f"fig{number}.{suffix}"
        for number in ("08", "13", "14", "15", "16")
        for suffix in ("pdf", "svg", "png", "parquet")
    }
    assert all((drawn / f"fig{n}.pdf").read_bytes().startswith(b"%PDF") for n in ("08", "13", "16"))
    assert len(tables.read_table(drawn / "fig08.parquet", "fig08", schema=EVIDENCE)) == 4
    assert len(tables.read_table(drawn / "fig13.parquet", "fig13", schema=SHARES)) == 8
    assert b"/Type3" not in (drawn / "fig08.pdf").read_bytes(), "text stays text"


def test_the_same_tables_give_the_same_bytes(made: Path) -> None:
    files = write_files(made) | {"times": [str(made / "times.parquet")]}
    make_figure("fig08", files, make_plans(), made / "again" / "fig08")
    for suffix in ("pdf", "svg", "png", "parquet"):
        name = f"fig08.{suffix}"
        assert (made / "again" / name).read_bytes() == (made / "drawn" / name).read_bytes(), suffix


def test_the_table_says_which_files_it_was_made_from(made: Path) -> None:
    told = str(pq.read_metadata(made / "drawn" / "fig08.parquet").metadata)
    assert "error.parquet" in told and "net.parquet" in told


def test_the_page_shows_every_figure_with_its_three_labels(made: Path) -> None:
    page = made / "report" / "figures.html"
    build_figures_page(sorted(str(path) for path in (made / "drawn").iterdir()), page)
    text = page.read_text(encoding="utf-8")
    found = Page(text)
    drawn = [f"../drawn/fig{number}.svg" for number in ("08", "13", "14", "15", "16")]
    assert found.sources == [*drawn, "pages.js"]
    assert all((page.parent / source).exists() for source in (*found.sources,))
    for label in ("measured here", "measured, public", "only simulated", "paper, other cases"):
        assert text.count(f"<dt>{label}</dt>") >= 5, label
    assert "DDP, 2 A40: 2.91" in text and "92.21" in text
    assert "<dt>only simulated</dt><dd>3 rows</dd>" in text
    assert "9 GB do not fit 8 GB" in text.replace("&nbsp;", " ")


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(make_errors(), "errors", tmp_path / "error.parquet")


def test_experiments_are_chosen_by_their_plan_and_none_is_left_out(file: str) -> None:
    errors = read_live_errors(file, make_plans(), ("DDP", "PP"))
    assert errors["experiment"].tolist() == ["replicas", "stages"]
    rows = list_live_rows(errors, "here", "{workload}, {batch}")
    assert [row["series"] for row in rows] == ["DDP", "PP, 4 chunks"]
    assert [row["micro_batches"] for row in rows] == [0, 4]
    assert rows[1]["evidence"] == "measured here" and rows[1]["label"] == "model, 4"
    assert (rows[1]["measured_s"], rows[1]["predicted_s"]) == (1.5, 3.0)


def test_a_kind_of_plan_that_was_not_measured_is_named(file: str) -> None:
    with pytest.raises(InputError, match="no measured experiment with a plan of the kind DataParallel"):
        read_live_errors(file, make_plans(), ("DataParallel",))
    with pytest.raises(InputError, match="plans two-stages are not in the table of plans"):
        read_live_errors(file, [p for p in make_plans() if p["plan"] != "two-stages"], ("DDP",))


def test_busy_time_is_that_of_any_rank_without_the_host() -> None:
    profile = make_profile(("shards",))
    assert count_busy_s(profile) == 8.0, "0 to 4 and 5 to 9"
    assert count_busy_s(profile[profile["rank"] == 1]) == 6.0
    assert count_busy_s(profile[:0]) == 0.0


def test_busy_times_replace_step_times_and_keep_the_interval_in_proportion(file: str) -> None:
    rows = list_live_rows(read_live_errors(file, make_plans(), ("TP",)), "here")
    profile = make_profile(("shards",))
    timeline = pd.DataFrame({"kind": ["compute", "host"], "start_s": [0.0, 1.1], "end_s": [1.1, 2.2]})
    (row,) = use_busy_time(rows, profile, {"shards": timeline})
    assert row["quantity"] == "busy time"
    assert row["measured_s"] == pytest.approx(2.0 * 0.8)
    assert row["predicted_s"] == pytest.approx(1.1)
    assert row["high_s"] / row["predicted_s"] == pytest.approx(1.3)
    with pytest.raises(InputError, match="no predicted timeline of shards"):
        use_busy_time(rows, profile, {})
    with pytest.raises(InputError, match="no profile of a real step of shards"):
        use_busy_time(rows, profile[:0], {"shards": timeline})


POINTS = make_points(
    [
        {"label": "a", "series": "x", "x": 2.0, "low": 1.0, "high": 4.0, "papers": ((1.9, 2.1),)},
        {"label": "a", "series": "y", "x": 8.0, "measured": 7.0, "papers": ()},
        {"label": "b", "series": "x", "x": None, "papers": ()},
    ]
)


def test_every_case_is_drawn_at_its_place_and_a_missing_one_as_a_cross() -> None:
    with column_style():
        axes = new_column_figure(2.0).subplots()
        draw_points(axes, POINTS, ["x", "y"])
        spread_places(axes, POINTS, errors=False)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    drawn = {
        line.get_marker(): float(line.get_xdata()[0])
        for line in axes.lines
        if line.get_marker() in "osx" and len(line.get_xdata())
    }
    assert drawn == {"o": 2.0, "s": 8.0, "x": 0.02}
    low, high = axes.get_xlim()
    assert low < 1.0 and high > 8.0 and axes.get_xscale() == "log"
    assert measure_height(POINTS) == 2 * 1.3
    words = {label for label in axes.get_legend_handles_labels()[1] if label}
    assert words == {"x", "y", "80 % interval", "measured", "paper, other cases", "does not fit, or cannot be done"}


def test_errors_reach_as_far_to_both_sides_and_hold_the_papers_averages() -> None:
    rows = [
        {"label": "a", "series": "", "x": 3.0, "papers": ((-10.0, 10.0),)},
        {"label": "b", "series": "", "x": -5.0, "papers": ()},
    ]
    with column_style():
        axes = new_column_figure(2.0).subplots()
        spread_places(axes, make_points(rows), errors=True)
    low, high = axes.get_xlim()
    assert low == -high and high > 10


DESCRIPTION = """\
description: "two plans"
grid:
  - {trace: gpt2-tiny-b8, platform: dgx-a100, tensor: [1, 2]}
list:
  - {trace: gpt2-tiny-b8, platform: dgx-a100, tensor: 3}
"""


def test_scenarios_are_predicted_as_a_sweep_predicts_them(tmp_path: Path) -> None:
    description = tmp_path / "two.yaml"
    description.write_text(DESCRIPTION)
    assert list_sweep_files(description) == []
    frame = predict_scenarios(description, tmp_path / "two.parquet")
    again = tables.read_table(tmp_path / "two.parquet", "sweep_results")
    assert frame["status"].tolist() == ["ok", "ok", "infeasible"]
    given = fill_values({"trace": "gpt2-tiny-b8", "platform": "dgx-a100", "tensor": 2})
    assert again["step_time_s"][1] == PredictionCache().predict(0, given)["step_time_s"]
    rows = list_predicted_rows([tmp_path / "two.parquet"], label="{trace} at {batch}")
    assert [row["plan"] for row in rows] == ["single", "TP", "TP"]
    assert rows[2]["predicted_s"] is None and "does not divide" in rows[2]["reason"]
    assert rows[0]["label"] == "gpt2-tiny-b8 at 8" and rows[1]["ranks"] == 2


def test_files_that_do_not_ship_are_told_to_the_workflow(tmp_path: Path) -> None:
    description = tmp_path / "own.yaml"
    description.write_text(
        "description: own\nlist: [{trace: own, platform: dgx-a100}]\ntraces: {own: results/imported/own}\n"
    )
    files = list_sweep_files(description)
    assert "results/imported/own/trace.json" in files


def test_predictions_are_marked_and_those_without_a_step_stay(tmp_path: Path) -> None:
    file = write(make_sweep(), "sweep_results", tmp_path / "net.parquet")
    rows = list_predicted_rows([file], series="{gpus}")
    assert {row["evidence"] for row in rows} == {"only simulated"}
    assert all(row["measured_s"] is None for row in rows)
    assert [row["series"] for row in rows] == ["2 A40", "4 A100", "2 A40"]
    assert [row["family"] for row in rows] == ["DDP", "PP", "DDP"]
    assert [row["micro_batches"] for row in rows] == [0, 2, 0]
    assert (rows[2]["status"], rows[2]["predicted_s"]) == ("out of memory", None)


def test_busy_times_keep_the_interval_in_proportion(tmp_path: Path) -> None:
    file = write(make_sweep(), "sweep_results", tmp_path / "net.parquet")
    row = list_predicted_rows([file], quantity=BUSY)[0]
    assert (row["low_s"], row["predicted_s"], row["high_s"]) == (0.75, 1.0, 1.5)
    assert row["quantity"] == "busy time"


def test_whole_training_steps_of_the_shipped_model_are_taken(tmp_path: Path) -> None:
    file = write(make_validation("batch-change", "shipped"), "validation", tmp_path / "one.parquet")
    rows = list_validation_rows(file, "batch-change")
    assert [row["predicted_s"] for row in rows] == [1.1, 0.98]
    assert [row["series"] for row in rows] == ["whole step", "operator sum"]
    assert {row["evidence"] for row in rows} == {"measured, public"}
    assert rows[0]["source_gpu"] == rows[0]["device"] == "NVIDIA A100 80GB PCIe"
    assert rows[0]["workload"] == "bert"


def test_another_gpu_is_told_with_where_it_comes_from(tmp_path: Path) -> None:
    file = write(make_validation("new-gpu", "ours"), "validation", tmp_path / "one.parquet")
    row = list_validation_rows(file, "new-gpu")[0]
    assert row["label"] == "H100 to A100 PCIe" and row["source_gpu"] != row["device"]


def test_public_cases_are_chosen_by_their_plan(tmp_path: Path) -> None:
    files = write_files(tmp_path)["published"]
    rows = list_published_rows(files, ("DDP", "PP"))
    assert [(row["case"], row["family"], row["micro_batches"]) for row in rows] == [
        ("public-ddp", "DDP", 0),
        ("public-pp", "PP", 1),
    ]
    assert rows[0]["device"] == "NVIDIA A100-SXM4-80GB"
    assert rows[0]["panel"] == "traced on another GPU"
    assert list_published_rows(files, ("single",))[0]["panel"] == "traced on the same GPU"
    with pytest.raises(InputError, match="no public case with a plan of the kind DataParallel"):
        list_published_rows(files, ("DataParallel",))
    with pytest.raises(InputError, match="no file at all"):
        list_published_rows([], ("DDP",))


def test_devices_are_told_apart_in_few_letters() -> None:
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 80GB HBM3", "Tesla V100-PCIE-32GB")
    assert [shorten_device(name) for name in names] == ["A100", "A100 PCIE 40GB", "H100", "V100 PCIE 32GB"]


PARTS = ("compute_share", "communication_share", "idle_share")


def test_the_rank_that_computes_most_is_told() -> None:
    assert measure_rank_shares(make_profile(("one",))) == pytest.approx(
        {"compute_share": 0.6, "communication_share": 0.2, "idle_share": 0.2}
    )


def test_measured_stands_before_predicted(tmp_path: Path) -> None:
    file = write(make_errors(), "errors", tmp_path / "error.parquet")
    errors = read_live_errors(file, make_plans(), ("DDP", "PP"))
    rows = list_live_shares(errors, make_profile(("replicas", "stages")))
    assert [row["origin"] for row in rows] == ["measured", "predicted"] * 2
    assert rows[1]["compute_share"] == pytest.approx(0.6)
    assert rows[1]["communication_share"] == pytest.approx(0.1)
    assert all(sum(row[part] for part in PARTS) == pytest.approx(1) for row in rows)
    with pytest.raises(InputError, match="no profile of a real step of stages"):
        list_live_shares(errors, make_profile(("replicas",)))


def test_scenarios_without_a_step_have_no_parts(tmp_path: Path) -> None:
    file = write(make_sweep(), "sweep_results", tmp_path / "net.parquet")
    rows = list_predicted_shares([file])
    assert [row["case"] for row in rows] == ["net-b8", "net-b8"]
    assert rows[0]["idle_share"] == pytest.approx(0.2)
    assert {row["evidence"] for row in rows} == {"only simulated"}
    file = write(make_sweep()[2:], "sweep_results", tmp_path / "none.parquet")
    with pytest.raises(InputError, match="no predicted step"):
        list_predicted_shares([file])


ONE = "description: one\nlist: [{trace: gpt2-tiny-b8, platform: dgx-a100, tensor: %d}]\n"


def test_every_step_is_timed_and_told_with_its_events(tmp_path: Path) -> None:
    description = tmp_path / "one.yaml"
    description.write_text(ONE % 2)
    time_simulations(description, tmp_path / "times.parquet", repeats=2)
    frame = tables.read_table(tmp_path / "times.parquet", "times", schema=SIMULATOR_TIMES)
    row = frame.iloc[0]
    given = fill_values({"trace": "gpt2-tiny-b8", "platform": "dgx-a100", "tensor": 2})
    expected = PredictionCache().predict(0, given)
    assert (row["step_s"], row["events"]) == (expected["step_time_s"], expected["events"])
    assert (row["family"], row["ranks"], row["repeats"]) == ("TP", 2, 2)
    assert 0 < row["wall_low_s"] <= row["wall_s"] <= row["wall_high_s"] and row["build_s"] > 0


def test_what_is_missing_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    none = pd.DataFrame(columns=EVIDENCE.names)
    empty = write(make_sweep()[:0], "sweep_results", tmp_path / "empty.parquet")
    nobody = write(make_validation("new-gpu", "nobody"), "validation", tmp_path / "one.parquet")
    for words, ask, told in (
        ("no figure 'fig99'", find_figure, ("fig99",)),
        (r"fig08 has no description fig08\.yaml", list_inputs, ("fig08", {}, [], [], [])),
        ("fig08: no row to draw", draw_evidence, (FIGURES["fig08"], none)),
        (r"no predicted scenario in .*empty\.parquet", list_predicted_rows, ([empty],)),
        ("no whole training step in the set new-gpu", list_validation_rows, (nobody, "new-gpu")),
    ):
        with pytest.raises(InputError, match=words):
            ask(*told)
    assert len(list(tmp_path.iterdir())) == 2
