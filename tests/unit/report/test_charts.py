"""The pictures of an answer: they show its numbers, and the page that holds them fetches nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
import trioflow
from bokeh.resources import Resources
from trioflow.cli.main import main
from trioflow.cli.scaling import read_counts
from trioflow.prediction.breakdown import PARTS
from trioflow.report.charts import ChartPage, explain_gap, merge_tasks, plot, plot_scaling
from trioflow.sweeps.search import SearchResult

PLANS = {"ddp": trioflow.named_plan("ddp", 4), "1f1b": trioflow.named_plan("1f1b", 4, 4)}


@pytest.fixture(scope="module")
def predictions() -> dict[str, trioflow.Prediction]:
    return {
        name: trioflow.predict("llama-3.2-1b", plan, "dgx-h100", batch=16, sequence=512) for name, plan in PLANS.items()
    }


@pytest.mark.parametrize("name", PLANS)
def test_the_parts_of_a_step_add_up_to_it(predictions: dict[str, trioflow.Prediction], name: str) -> None:
    one = predictions[name]
    assert sum(one.parts_s.values()) == pytest.approx(one.step_time_s)
    assert set(one.parts_s) <= set(PARTS) and min(one.parts_s.values()) > 0
    assert ("pipeline communication" in one.parts_s) == (name == "1f1b")
    rows = one.breakdown("rank")
    assert one.parts_s["forward compute"] == pytest.approx(rows["forward_s"].mean(), rel=0.05)
    hidden = sum(time_s for part, time_s in one.parts_s.items() if "communication" in part)
    assert hidden == pytest.approx(rows["exposed_communication_s"].mean())


@pytest.mark.parametrize("name", PLANS)
def test_figures_hold_the_numbers_of_the_prediction(predictions: dict[str, trioflow.Prediction], name: str) -> None:
    one = predictions[name]
    charts = {chart.title: chart for chart in one.plot().charts}
    parts = charts["Where the step goes"].figure.renderers[0].data_source.data
    assert dict(zip(parts["part"], parts["size"] / 1e3, strict=True)) == pytest.approx(one.parts_s)
    assert parts["right"][-1] == pytest.approx(one.step_time_s * 1e3)
    timeline = one.timeline[one.timeline["end_s"] > one.timeline["start_s"]]
    bars = charts["When it runs"].figure.renderers[0].data_source.data
    assert bars["right"].max() == pytest.approx(timeline["end_s"].max() * 1e3)
    memory = charts["Memory over the step"].numbers
    assert memory["peak_bytes"].max() == one.peak_memory_bytes
    filling = charts["What fills the memory"].numbers
    assert filling["size_bytes"].sum() == one.step.wanted_bytes + one.step.outside_bytes
    work = charts["How near to the GPU's limits"].numbers.set_index("operator_class")
    assert (work["flop_per_s"] < one.step.platform.device.peak_flop_per_s["bf16"]).all()


def test_the_roof_is_named_by_the_precision_whose_peak_it_is() -> None:
    one = trioflow.predict("llama-3.2-1b", "fsdp", "dgx1-v100", ranks=8, batch=8, sequence=512, precision="bf16")
    assert "125 TFLOP/s in fp16" in one.plot().charts[-1].caption, "a V100 has no rate in bf16"


def test_a_long_timeline_is_merged_and_loses_no_time(predictions: dict[str, trioflow.Prediction]) -> None:
    timeline = predictions["1f1b"].timeline
    whole, few = merge_tasks(timeline), merge_tasks(timeline, most=200)
    assert len(few) <= 200 < len(whole) and few["tasks"].sum() == whole["tasks"].sum() == len(whole)
    for end in ("start_s", "end_s"):
        pick = "min" if end == "start_s" else "max"
        assert few.groupby("rank")[end].agg(pick).equals(whole.groupby("rank")[end].agg(pick))


def test_two_plans_are_compared_part_by_part(predictions: dict[str, trioflow.Prediction]) -> None:
    one, other = predictions.values()
    text, gaps = explain_gap(one, other)
    assert sum(gaps.values()) == pytest.approx(other.step_time_s - one.step_time_s)
    fast = "A" if one.step_time_s < other.step_time_s else "B"
    assert f"{fast} is " in text and " less on " in text
    with pytest.raises(trioflow.TrioflowError, match="3 predictions in one page"):
        plot(one, other, one)
    titles = [chart.title for chart in plot(one, other).charts]
    assert titles[:2] == ["Where the step goes", "Why one plan is faster"]


def check_file(path: Path) -> str:
    """Return a page's text without Bokeh's library: all of it is small, and it names no address."""
    text = path.read_text()
    assert len(text.encode()) < 3_000_000 and "default-src 'none'" in text
    text = text.replace("\n".join(Resources(mode="inline", components=["bokeh"], minified=True).js_raw), "")
    assert "://" not in text and "@import" not in text and len(text) < 1_800_000
    return text


@pytest.mark.parametrize("command", ["simulate", "memory"])
def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    path = tmp_path / "answer.html"
    words = [command, "llama-3.2-1b", "--sequence", "512", "--plan", "fsdp", "--ranks", "8", "--platform", "dgx-h100"]
    assert main([*words, "--html", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    text = check_file(path)
    assert " ".join(["trioflow", *words]) in text
    assert answer["plan_text"] in text and '"name": "Figure"' in text


def test_a_search_is_drawn_with_its_best_two_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answer.html"
    words = ["search", "llama-3.2-1b", "--sequence", "512", "--ranks", "4,8", "--batch", "16", "--platform", "dgx-h100"]
    assert main([*words, "--top", "2", "--jobs", "1", "--html", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert "Why one plan is faster" in check_file(path)
    page = SearchResult(answer).plot()
    assert [chart.title for chart in page.charts] == [
        "GPU-seconds per step against time",
        "Memory per GPU against time",
    ]
    drawn = page.charts[0].figure.renderers[0].data_source.data
    assert drawn["y"].tolist() == [row["ranks"] * row["expected_s"] for row in answer["ranking"]]
    assert (drawn["x"] / 1e3).tolist() == pytest.approx([row["step_time_s"] for row in answer["ranking"]])
    assert answer["ranking"][0]["plan_text"] in page.verdict


def test_scaling_answers_as_simulate_does_at_each_number_of_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "answer.html", ["llama-3.2-1b", "--sequence", "512", "--platform", "dgx-h100"]
    degrees = ["--tensor-parallel", "2", "--data-parallel", "1"]
    assert main(["scaling", *model, *degrees, "--gpus", "3..4", "--json"]) == 2
    assert "3" in capsys.readouterr().err
    assert main(["scaling", *model, *degrees, "--gpus", "2..8", "--json", "--html", str(path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in answer["rows"]] == [2, 4, 8] and "tokens/s by GPUs" in check_file(path)
    for row in answer["rows"]:
        words = [*model, "--tensor-parallel", "2", "--data-parallel", str(row["ranks"] // 2), "--json"]
        assert main(["simulate", *words]) == 0
        one = json.loads(capsys.readouterr().out)
        assert {key: one[key] for key in ("step_time_s", "low_s", "mfu")} == {
            key: row[key] for key in ("step_time_s", "low_s", "mfu")
        }
    drawn = plot_scaling(answer).charts[0].figure.renderers[2].data_source.data
    assert drawn["y"].tolist() == [row["tokens_per_s"] for row in answer["rows"]]


def test_scaling_runs_the_plan_of_a_launch_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 512\nglobal_batch_size = 4\n'
        '[parallelism]\ntensor_parallel_degree = 2\n[activation_checkpoint]\nmode = "full"\n'
    )
    answers = []
    for words in (["scaling", "--gpus", "4..16xH100"], ["simulate", "--gpus", "8xH100"]):
        assert main([*words[:1], str(file), *words[1:], "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    scaled, one = answers
    assert [row["ranks"] for row in scaled["rows"]] == [4, 8] and "do not divide" in scaled["warnings"][0]
    assert "TP2" in one["plan_text"] and {scaled["rows"][1][key] == one[key] for key in ("plan_text", "low_s")} == {
        True
    }


@pytest.mark.parametrize(
    ("text", "counts"),
    [("8..64", [8, 16, 32, 64]), ("24,8", [8, 24]), ("3..13", [3, 6, 12]), ("8..", None), ("0..4", None)],
)
def test_numbers_of_gpus_are_read(text: str, counts: list[int] | None) -> None:
    if counts is None:
        with pytest.raises(trioflow.TrioflowError, match="no list of numbers of GPUs"):
            read_counts(text)
    else:
        assert read_counts(text) == counts


def test_nothing_of_the_data_is_markup() -> None:
    page = ChartPage(
        "<script>alert(1)</script>", "</script><hostile>", [("<hostile>", "&")], [], ["<hostile>"], "<hostile>"
    )
    text = page.render()
    assert "<script>alert" not in text and "<hostile>" not in text and "&lt;script&gt;alert(1)" in text
    assert "srcdoc=" in page._repr_html_()


def test_a_page_is_refused_before_anything_is_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "no-such-trace", "--plan", "ddp", "--ranks", "2", "--platform", "cpu2-gloo", "--html"]
    for path, problem in ((tmp_path / "a.pdf", "unknown ending"), (tmp_path / "no/a.html", "no folder")):
        assert main([*words, str(path)]) == 2
        assert problem in capsys.readouterr().err
    assert np.size(list(tmp_path.iterdir())) == 0
