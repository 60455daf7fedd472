"""The page of public cases, and the README's block, from made-up cases.

Scores of public cases, against numbers worked out by hand.

The table of public cases: what it may hold, and what is said of a wrong cell.

Baselines by hand: TrioSim's rules, data sheets.
"""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from page_numbers import describe_published
from test_report_page import Page
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.base.experiments import load_imports
from trioflow.costmodel.operators.model import load_shipped_models
from trioflow.hardware.machine import load_device
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.report.attribution import CAUSES
from trioflow.report.attribution_section import draw_tornado, summarise_changes
from trioflow.report.errors import APART, list_scaling, score_published
from trioflow.report.pages import write_time
from trioflow.report.style import save_figure
from trioflow.trace.store import Trace, load_trace
from trioflow_evaluation.published.cases import (
    DISCLOSED,
    PublishedRow,
    list_disclosures,
    load_published_rows,
    rows_of_set,
)
from trioflow_evaluation.published.judge import (
    ANCHORS,
    PROPORTIONAL,
    RESCALED,
    AnalyticalModel,
    RecordedStep,
    UpkeepModel,
    find_step_band,
    list_residuals,
    predict_by_triosim,
    read_measured,
    read_recorded_step,
)
from trioflow_evaluation.published.page import build_published_page, draw_cases, read_cases, sum_growth

from evaluation.published.published_cases import make_case, make_cases

CAUSE_ROWS = [
    ("h100-4gpu", "a", "part", "compute", "", 0.9),
    ("h100-4gpu", "a", "part", "communication that no compute hides", "", 0.1),
    ("h100-4gpu", "a", "part", "waiting", "", 0.02),
    ("h100-4gpu", "a", "replaced", "compute", "measured on one such GPU at the same batch", 1.01),
    ("h100-4gpu", "a", "sensitivity", "compute time", "x 1.1", 1.122),
    ("h100-4gpu", "b", "sensitivity", "compute time", "x 1.1", 2.0),
    ("h100-4gpu", "a", "sensitivity", "latency of collectives", "x 2", 1.03),
    ("resnet50-a40", "e", "growth", "forward: convolution", PROPORTIONAL, 1.5),
    ("resnet50-a40", "e", "growth", "forward: convolution", RESCALED, 0.7),
    ("resnet50-a40", "e", "growth", "optimizer: optimizer", PROPORTIONAL, 0.4),
    ("resnet50-a40", "e", "growth", "optimizer: optimizer", RESCALED, 0.1),
]
ANCHOR_ROWS = [("NVIDIA A40", "m", "train", 1, 4, 1.0, 1.01, 1.05, 1.2)]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    files = []
    cases = make_cases()
    for name, rows in cases.groupby("set"):
        files.append(folder / f"published/{name}.parquet")
        tables.write_table(rows, "published_cases", files[-1])
    causes = folder / "published/h100-4gpu-causes.parquet"
    frame = pd.DataFrame(CAUSE_ROWS, columns=CAUSES.names)
    tables.write_table(frame, "causes", causes, schema=CAUSES)
    anchors = folder / "published/anchors.parquet"
    frame = pd.DataFrame(ANCHOR_ROWS, columns=ANCHORS.names)
    tables.write_table(frame, "anchors", anchors, schema=ANCHORS)
    page, table = folder / "report/published.html", folder / "report/published.parquet"
    scores = build_published_page(files[::-1], [causes], anchors, page, table)
    return folder, scores, page.read_text(encoding="utf-8")


def test_every_case_and_its_error_stand_on_the_page(built):
    _, _, text = built
    rows: dict[str, list[str]] = {}
    for row in Page(text).rows:
        if len(row) > 5:
            rows.setdefault(row[0], row)
    for case in make_cases().to_dict("records"):
        told = rows[case["case"]]
        assert float(told[1]) == case["measured_s"]
        assert float(told[3]) == pytest.approx(case["predicted_s"] / case["measured_s"] - 1)
    assert (rows["a"][4], rows["c"][4]) == ("yes", "no")
    assert "gpipe4-m1, 4 GPUs, 4" in text


def test_the_page_is_whole_and_needs_nothing_from_outside(built):
    folder, _, text = built
    parsed = Page(text)
    anchors = {place.removeprefix("#") for place in parsed.links if place.startswith("#")}
    assert anchors <= set(parsed.addresses)
    assert "http://" not in text and "https://" not in text
    for name, shown in (("h100-4gpu", "data"), ("resnet50-a40", "data"), ("h100-4gpu-sensitivity", "src")):
        assert f'{shown}="published/{name}.svg"' in text
        for suffix in ("svg", "png"):
            assert (folder / f"report/published/{name}.{suffix}").stat().st_size > 0
    assert not (folder / "report/published/resnet50-a40-sensitivity.svg").exists()
    assert text.index('id="h100-4gpu"') < text.index('id="resnet50-a40"')
    assert '<section id="h100-4gpu"><h2>' in text, "the first set is open, others when they are asked for"
    assert '<section id="resnet50-a40"><details class="fold"><summary>' in text


def test_an_aim_is_reached_or_not_as_the_scores_say(built):
    _, scores, _ = built
    ours = scores[scores["model"] == "trioflow"].set_index("set")
    assert ours.loc["h100-4gpu", "mean_absolute_error"] > 0.04
    rows = describe_published(make_cases()).body.splitlines()
    assert any(row.startswith("| Four H100") and "| 4 % | 9.0 % |" in row for row in rows)
    assert len({row.count("|") for row in rows if row.startswith("|")}) == 1
    good = make_cases().assign(predicted_s=make_cases()["measured_s"])
    assert "**0.0 %**" in describe_published(good).body
    assert "(TrioSim's public rules)" in describe_published(make_cases()).body


def test_readme_has_a_line_for_each_set():
    result = describe_published(make_cases())
    assert len(result.lines) == make_cases()["set"].nunique() and result.page == "accuracy.md"
    told = dict(result.lines)["Four H100: data, tensor and pipeline parallelism"]
    assert told.startswith("9.0 %") and told.endswith(" cases)")
    with pytest.raises(InputError, match="no public case"):
        describe_published(make_cases().head(0))


def test_points_without_a_traced_gpu_leave_no_residual():
    none = pd.DataFrame(columns=ANCHORS.names)
    left = list_residuals(none, make_cases())
    assert left
    assert not list_residuals(none, make_cases().assign(source_gpu=""))


def test_what_a_change_does_is_averaged_over_the_cases_that_have_it():
    causes = pd.DataFrame(CAUSE_ROWS, columns=CAUSES.names)
    told = summarise_changes(make_cases(), causes, "h100-4gpu").set_index("parameter")
    assert told.index[0] == "compute time"
    assert told.loc["compute time", "cases"] == 2
    assert told.loc["compute time", "change"] == pytest.approx((0.1 + (2.0 / 1.9 - 1)) / 2)
    assert told.loc["compute time", "error"] == pytest.approx(0.122 / 2)
    assert told.loc["latency of collectives", "base_error"] == pytest.approx(0.02)


def test_many_cases_are_drawn_as_points_and_none_is_refused():
    many = pd.DataFrame([make_case(f"case {n}", "ddp4", 1.0 + n, 1.1 + n) for n in range(60)])
    figure = draw_cases(many, "h100-4gpu")
    assert len(figure.axes) == 1
    assert len(draw_cases(make_cases(), "h100-4gpu").axes[0].get_yticklabels()) == 3
    with pytest.raises(InputError, match="no case"):
        draw_cases(many, "none")
    with pytest.raises(InputError, match="no sensitivity"):
        draw_tornado(pd.DataFrame(columns=["parameter"]), "none")


def test_a_case_that_stands_twice_is_refused(tmp_path):
    file = tmp_path / "cases.parquet"
    tables.write_table(make_cases(), "published_cases", file)
    with pytest.raises(InputError, match="stands twice"):
        read_cases([file, file])
    tables.write_table(make_cases().head(0), "published_cases", file)
    with pytest.raises(InputError, match="no public case to report"):
        read_cases([file])


def test_an_error_at_a_batch_that_was_not_traced_is_a_sum_of_parts(built):
    causes = pd.DataFrame(CAUSE_ROWS, columns=CAUSES.names)
    parts = sum_growth(make_cases(), causes, "resnet50-a40").loc["e"]
    # Operators: 1.9 s in proportion, 0.8 s as predicted, of a step predicted at 1.0 and measured at 2.5 s.
    assert parts[["growth", "plan", "rest"]].tolist() == pytest.approx([-0.44, 0.08, -0.24])
    assert parts[["growth", "plan", "rest"]].sum() == pytest.approx(parts["error"]) == -0.6
    text = built[2].partition('<section id="resnet50-a40">')[2].partition("</section>")[0]
    for value in (-0.44, 0.08, -0.24):
        assert any(abs(float(key) - value) < 1e-9 for key in re.findall('data-sort="(-?[0-9][0-9.e-]*)"', text))
    assert "holds 0 of 1" in text.replace("&nbsp;", " ")
    assert sum_growth(make_cases(), causes, "h100-4gpu").empty


def test_every_score_of_every_set_stands_in_the_summary(built):
    _, scores, text = built
    summary = text.partition('<section id="summary">')[2].partition("</section>")[0]
    keys = (
        "mean_absolute_error",
        "median_absolute_error",
        "worst_error",
        "bias",
        "rank_correlation",
        "coverage",
        "mean_relative_width",
        "interval_score",
    )
    for row in scores[scores["model"] == "trioflow"].to_dict("records"):
        for key in keys:
            value = row[key]
            assert pd.isna(value) or f'data-sort="{float(value)!r}"' in summary, (row["set"], key)


def test_what_was_chosen_with_results_in_sight_is_said_beside_the_sets_concerned(built):
    text = built[2].partition('<section id="disclosed">')[2].partition("</section>")[0]
    assert text.count("<li>") == len(DISCLOSED) == 2
    for words in ("timer", "copies", "embedding and head", "interval"):
        assert words in text
    assert len(list_disclosures({"resnet50-h100"})) == 1
    assert list_disclosures({"vtrain-a100"}) == []


def test_a_row_of_the_figure_says_its_numbers(tmp_path):
    cases = make_cases()
    name = str(cases["set"].iloc[0])
    rows = cases[cases["set"] == name]
    text = save_figure(draw_cases(cases, name), tmp_path / "figure")[0].read_text(encoding="utf-8")
    notes = re.findall("<title>(.+?): measured .+?</title>", text)
    assert notes == [*rows["case"]], "from the top down"
    assert f"trioflow {write_time(rows['predicted_s'].iloc[0])} (" in text


@pytest.fixture(scope="module")
def scores():
    return score_published(make_cases()).set_index(["set", "model"])


def test_errors_are_those_of_every_case(scores):
    ours = scores.loc[("h100-4gpu", "trioflow")]
    assert ours["cases"] == 3
    assert ours["mean_absolute_error"] == pytest.approx((0.02 + 0.05 + 0.2) / 3)
    assert ours["median_absolute_error"] == pytest.approx(0.05)
    assert ours["worst_error"] == pytest.approx(0.2)
    assert ours["bias"] == pytest.approx((0.02 - 0.05 + 0.2) / 3)


def test_intervals_are_ours_alone(scores):
    ours = scores.loc[("h100-4gpu", "trioflow")]
    assert ours["coverage"] == pytest.approx(2 / 3)
    assert ours["mean_relative_width"] == pytest.approx(0.2 * (1.02 + 0.95 + 1.2) / 3)
    missed = (0.9 * 3.6 - 3.0) / 3.0
    assert ours["interval_score"] == pytest.approx(ours["mean_relative_width"] + 10 * missed / 3)
    assert pd.isna(scores.loc[("h100-4gpu", "analytical")]["coverage"])


def test_who_predicts_nothing_has_no_row(scores):
    assert ("h100-4gpu", "regression") not in scores.index
    assert ("resnet50-a40", "analytical") not in scores.index
    assert scores.loc[("h100-4gpu", "oracle")]["cases"] == 1


def test_the_order_of_plans_is_counted_in_pairs(scores):
    assert scores.loc[("h100-4gpu", "trioflow")]["rank_correlation"] == 1
    assert scores.loc[("h100-4gpu", "analytical")]["rank_correlation"] == -1
    rules = scores.loc[("h100-4gpu", "TrioSim's public rules")]
    assert (rules["pairs"], rules["ordered"]) == (3, pytest.approx(2 / 3))


def test_plans_of_nearly_one_time_or_of_other_batches_make_no_pair():
    rows = [
        make_case("a", "ddp4", 1.0, 1.0),
        make_case("b", "tp4", 1.0 + APART / 2, 1.0),
        make_case("c", "gpipe4-m1", 9.0, 1.0, batch=8),
        make_case("d", "ddp4", 9.0, 1.0),
    ]
    assert score_published(pd.DataFrame(rows))["pairs"].tolist() == [1]


def test_scaling_is_apart_from_the_error_of_one_gpu(scores):
    told = list_scaling(make_cases())
    assert told[["case", "ranks"]].to_numpy().tolist() == [["e", 2]]
    assert told["measured"][0] == pytest.approx(0.8)
    assert told["error"][0] == pytest.approx(0.25)
    ours = scores.loc[("resnet50-a40", "trioflow")]
    assert ours["scaling_error"] == pytest.approx(0.25)
    assert ours["single_error"] == pytest.approx(0.5)


def test_a_band_leaves_the_judged_workload_out():
    anchors = pd.DataFrame(
        {
            "workload": ["seen"] * 11 + ["judged"] * 50,
            "measured_s": [1.0] * 61,
            "timer_s": [0.95 + 0.01 * n for n in range(11)] + [9.0] * 50,
        }
    )
    low, high = find_step_band(anchors, "judged")
    assert low == pytest.approx(1 / 1.04, rel=1e-3)
    assert high == pytest.approx(1 / 0.96, rel=1e-3)
    assert find_step_band(anchors.head(7), "judged") == (1.0, 1.0)


ROOT = Path(__file__).resolve().parents[4]
TABLE = ROOT / "config/published.tsv"
CELLS = {
    "case": "one",
    "set": "some",
    "workload": "model",
    "traces": "model-b1,model-b4",
    "platform": "h100x8-nvlink",
    "gpu": "h100-sxm",
    "plan": "ddp",
    "ranks": "4",
    "micro_batches": "0",
    "batch": "8",
    "mode": "whole step",
    "measured": "a/b.json",
    "changes": "-",
}


def write_table(folder: Path, **changed: str) -> Path:
    cells = CELLS | changed
    file = folder / "published.tsv"
    file.write_text("\t".join(cells) + "\n" + "\t".join(cells.values()) + "\n")
    return file


def make_row(folder: Path, **changed: str) -> PublishedRow:
    return next(iter(load_published_rows(write_table(folder, **changed)).values()))


def test_the_project_s_table_names_traces_that_exist_and_plans_that_fit():
    rows = load_published_rows(TABLE)
    imports = load_imports(ROOT / "config/imports.tsv")
    assert {row.set for row in rows.values()} == {"h100-4gpu", "resnet50-h100", "resnet50-a40", "resnet50-a100"}
    assert {name for row in rows.values() for name in row.traces} <= set(imports)
    assert all(row.made_plan.ranks == row.ranks for row in rows.values())
    assert {row.plan_name for row in rows_of_set(rows, "h100-4gpu", TABLE)} == {"ddp4", "tp4", "gpipe4-m1"}


def test_a_row_is_read(tmp_path):
    row = make_row(tmp_path)
    assert row.traces == ("model-b1", "model-b4")
    assert (row.ranks, row.micro_batches, row.batch, row.changes) == (4, 0, 8, "")
    assert row.made_plan.data == 4


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"ranks": "four"}, "column ranks"),
        ({"batch": "0"}, "column batch"),
        ({"batch": "6"}, "column batch"),
        ({"plan": "ddq"}, "column plan"),
        ({"plan": "single"}, "column plan"),
        ({"gpu": "-"}, "column gpu"),
        ({"sett": "x"}, "'sett'"),
    ],
)
def test_a_wrong_cell_is_named(tmp_path, changed, told):
    with pytest.raises(TableError) as raised:
        make_row(tmp_path, **changed)
    assert told in str(raised.value)


def test_a_case_stands_once_and_a_set_must_exist(tmp_path):
    file = write_table(tmp_path)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, lines[1]]) + "\n")
    with pytest.raises(TableError, match="'one' stands already in row 1"):
        load_published_rows(file)
    rows = load_published_rows(write_table(tmp_path))
    with pytest.raises(TableError, match="no row of the set 'other'"):
        rows_of_set(rows, "other", file)


def test_a_missing_table_or_column_is_named(tmp_path):
    with pytest.raises(TableError, match="no such file"):
        load_published_rows(tmp_path / "none.tsv")
    (tmp_path / "short.tsv").write_text("case\tset\n")
    with pytest.raises(TableError, match="column 'workload' is missing"):
        load_published_rows(tmp_path / "short.tsv")


def test_a_measured_time_comes_from_a_sidecar(tmp_path):
    row = make_row(tmp_path)
    (tmp_path / "a").mkdir()
    file = tmp_path / "a/b.json"
    file.write_text(json.dumps({"e2e_latency": 12.5}))
    found = read_measured(row, tmp_path)
    assert found == (0.0125, "a/b.json")
    file.write_text(json.dumps({"e2e_latency": 0}))
    with pytest.raises(InputError, match="0 is not a time"):
        read_measured(row, tmp_path)
    file.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        read_measured(row, tmp_path)


def test_a_measured_time_comes_from_a_throughput(tmp_path):
    told = {"measured": "throughput of NVIDIA A40", "ranks": "2", "batch": "992"}
    found = read_measured(make_row(tmp_path, **told), tmp_path)
    assert found.time_s == pytest.approx(992 / 782.43)
    assert "2xA40" in found.source
    with pytest.raises(InputError, match="496 on each of 2 GPUs"):
        read_measured(make_row(tmp_path, **told | {"batch": "990"}), tmp_path)
    with pytest.raises(InputError, match="no throughput of 2 x 'NVIDIA A41'"):
        read_measured(make_row(tmp_path, **told | {"measured": "throughput of NVIDIA A41"}), tmp_path)


STEP = RecordedStep(
    time_s=np.array([0.4, 0.1, 0.2, 0.3]),
    output_bytes=np.array([1e9, 2e9, 4e9, 8e9]),
    tagged=np.array([True, False, True, False]),
    forward=np.array([True, True, False, False]),
    parameter_bytes=6.5e9,
    batch=2,
)


@pytest.fixture(scope="module")
def tiny():
    return load_trace("gpt2-tiny-b8")


def test_triosim_s_replicas_hide_the_all_reduce_or_add_it():
    assert predict_by_triosim(STEP, named_plan("ddp", 4), 8) == pytest.approx(1.0)
    added = predict_by_triosim(STEP, named_plan("ddp", 4), 8, overlap=False)
    assert added == pytest.approx(1.0 + 6.5 / 65)


def test_triosim_s_batch_scales_times_and_parameters_alike():
    twice = predict_by_triosim(STEP, named_plan("ddp", 4), 16, overlap=False)
    assert twice == pytest.approx(2 * (1.0 + 6.5 / 65))


def test_triosim_s_shards_divide_what_is_tagged_and_move_its_outputs():
    told = predict_by_triosim(STEP, named_plan("tp", 2), 2, 1e10)
    assert told == pytest.approx(0.4 + 0.6 / 2 + 5 / 2 / 10)


def test_triosim_s_stages_send_the_results_of_their_last_operators():
    told = predict_by_triosim(STEP, named_plan("gpipe", 2, 1), 2, 1e10)
    assert told == pytest.approx(1.0 + (1 + 4) / 10)


def test_triosim_s_rules_know_neither_micro_batches_nor_products_of_degrees():
    assert predict_by_triosim(STEP, named_plan("gpipe", 2, 2), 2) is None
    assert predict_by_triosim(STEP, make_plan(2, 2), 4) is None


def test_triosim_s_tags_are_products_that_read_a_parameter(tiny):
    step = read_recorded_step(tiny)
    operators = tiny.operators[tiny.operators["device_ns"] > 0].reset_index(drop=True)
    assert step.time_s.sum() == pytest.approx(tiny.operators["device_ns"].sum() * 1e-9)
    tagged = set(operators.loc[step.tagged, "name"])
    assert "aten::linear" in tagged
    assert not any("gelu" in name or "layer_norm" in name for name in tagged)
    with pytest.raises(InputError, match="recorded times"):
        read_recorded_step(Trace(tiny.operators.assign(device_ns=0), tiny.tensors, tiny.facts))


def test_a_data_sheet_adds_work_over_peak_and_bytes_over_bandwidth():
    sheet = load_device("h100-sxm")
    operators = pd.DataFrame({"flop": [10**12, 0], "read_bytes": [10**9, 5], "write_bytes": [10**9, 5]})
    told = AnalyticalModel.of_sheet(sheet, "tf32").predict(operators)
    wanted = 1e12 / sheet.peak("tf32") + 2e9 / sheet.memory_bandwidth_bytes_per_s
    assert told["time_s"][0] == pytest.approx(wanted)
    other = AnalyticalModel.of_sheet(sheet, "tf32").rescale(operators, operators * 2)
    assert other["time_s"][0] == pytest.approx(2 * wanted)


def test_what_is_predicted_is_upkeep(tiny):
    base = load_shipped_models()["h100-sxm"]
    model = UpkeepModel(base, 3.0)
    told, alone = model.predict(tiny.operators), base.predict(tiny.operators)
    assert told["time_s"].to_numpy() == pytest.approx(3 * alone["time_s"].to_numpy())
    assert model.rescale(tiny.operators, tiny.operators).equals(base.rescale(tiny.operators, tiny.operators))
