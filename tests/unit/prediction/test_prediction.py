"""One way to predict: the command, Python and the workflow's experiments give the same numbers."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE, read_json, write_json
from trioflow.cli import main
from trioflow.costmodel.choices import choose_times, load_named_platform
from trioflow.costmodel.features import SHIPPED_MODELS
from trioflow.export.step_files import simulate_experiment
from trioflow.parallel.extrapolate import extrapolate_experiment, phase_times
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.prediction.assembly import predict
from trioflow.prediction.question import CLOSED_FORM, Options
from trioflow.sweeps.description import fill_values
from trioflow.sweeps.scenarios import PredictionCache
from trioflow.sweeps.search import search_plans
from trioflow.trace.store import find_trace, load_trace

TRACE, PLATFORM = "gpt2-tiny-b8", "cpu2-gloo"
COMMANDS = [
    (["--plan", "ddp", "--ranks", "2", "--batch", "32"], named_plan("ddp", 2), {"batch": 32}),
    (
        ["--pipeline-parallel", "2", "--micro-batches", "4", "--stages", "count"],
        make_plan(pipeline=2, micro_batches=4, schedule="gpipe"),
        {"stages": "count"},
    ),
    (
        ["--plan", "tp", "--ranks", "2", "--mode", "forward", "--collectives", "closed-form"],
        named_plan("tp", 2),
        {"mode": "forward", "collectives": CLOSED_FORM},
    ),
]


def answer(capsys, *words):
    assert main(["simulate", TRACE, "--platform", PLATFORM, "--json", *map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


def same(found):
    """Return an answer without the wall time, as JSON has it."""
    return json.loads(json.dumps({k: v for k, v in found.items() if k != "simulator_wall_s"}))


@pytest.mark.parametrize(("words", "plan", "asked"), COMMANDS, ids=lambda one: str(one)[:24])
def test_the_command_and_python_give_the_same_dictionary(capsys, words, plan, asked):
    told = predict(load_trace(TRACE), plan, PLATFORM, **asked).to_dict()
    assert same(told) == same(answer(capsys, *words))
    assert predict(TRACE, plan, PLATFORM, **asked).step_time_s == told["step_time_s"]


def test_search_and_sweeps_give_the_prediction_of_the_plan():
    plan, cache = named_plan("ddp", 2), PredictionCache()
    told = predict(TRACE, plan, PLATFORM, batch=16)
    row = search_plans(cache, TRACE, PLATFORM, 2, 16, plans=[plan]).ranking[0]
    swept = PredictionCache().predict(0, fill_values({"trace": TRACE, "platform": PLATFORM, "data": 2}))
    for key in ("step_time_s", "low_s", "high_s", "peak_memory_bytes"):
        assert row[key] == swept[key] == getattr(told, key)
    assert swept["confidence"] == told.confidence


def test_a_step_without_room_is_told_what_to_try():
    found = predict("gpt2-b8", named_plan("ddp", 2), "dgx-a100", batch=512)
    assert found.fits_memory is False
    (warning,) = (text for text in found.warnings if text.startswith("out of memory"))
    assert "recompute" in warning and "smaller micro-batch" in warning


def test_a_prediction_shows_itself():
    found = predict(TRACE, named_plan("ddp", 2), PLATFORM)
    text, page = repr(found), found._repr_html_()
    assert "gpt2-tiny on cpu2-gloo: DP2, mbs 8" in text and "80 % interval" in text
    assert page.startswith("<table>") and page.count("<tr>") == text.count("\n")
    assert found.low_s < found.step_time_s < found.high_s
    assert found.breakdown("rank")["ranks"].sum() == 2
    assert len(found.timeline) == len(found.task_graph.tasks)
    assert found.provenance["traces"][0]["batch"] == 8 and found.fits_memory
    assert found.peak_memory_bytes == max(entry["peak_bytes"] for entry in found.memory)


def test_without_an_interval_the_ends_are_the_step():
    found = predict(TRACE, named_plan("ddp", 2), PLATFORM, interval=False)
    assert found.low_s == found.high_s == found.step_time_s and "low_s" not in found.to_dict()


def test_options_that_make_no_sense_are_refused_before_anything_is_computed():
    with pytest.raises(InputError, match="unknown anchor 'quiet'"):
        Options(anchor="quiet")
    with pytest.raises(InputError, match="a session was given with the anchor 'timer'"):
        Options(session="session.json")


REPEATS = {"steps": 7, "step_log": 0.03, "pass_log": 0.0, "operator_log": 0.2, "autocorrelation": 0.1}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder in which the shipped trace was measured: its session, and its experiment."""
    folder = tmp_path_factory.mktemp("measured")
    trace = load_trace(TRACE)
    traced = phase_times(trace)
    slower = {phase: 1.1 * time_s for phase, time_s in traced.items()}
    busy = [{phase: factor * time_s for phase, time_s in traced.items()} for factor in (1.3, 1.4)]
    anchors = {"traced_step_s": trace.facts.step_time_s, "single": slower, "busy": busy}
    session = {"workload": "gpt2-tiny", "device_names": [trace.facts.device_name] * 2, "anchors": {"8": anchors}}
    home = folder / "results" / "calibration" / "gpt2-tiny"
    write_json(home / "session.json", session)
    write_json(folder / "partition.json", {"stages": {}})
    shutil.copytree(find_trace(TRACE), folder / "traced")
    facts = read_json(folder / "traced/trace.json")
    write_json(folder / "repeated.json", facts | {"repeats": REPEATS})
    return folder


def predict_experiment(folder: Path, plan, batch):
    models, platform = SHIPPED_MODELS / PLATFORM, PACKAGE / f"data/platforms/{PLATFORM}.yaml"
    home = folder / "results" / "calibration" / "gpt2-tiny"
    extrapolate_experiment(
        [folder / "traced"],
        models / "operators.json",
        folder / "partition.json",
        platform,
        {"experiment": "one", "batch": batch},
        asdict(plan),
        folder / "graph",
    )
    simulate_experiment(
        folder / "graph",
        platform,
        models / "collectives.json",
        home / "session.json",
        [folder / "traced"],
        [folder / "repeated.json"],
        folder / "simulated",
    )
    return read_json(folder / "simulated" / "summary.json")


@pytest.mark.parametrize(("name", "batch"), [("ddp", 16), ("gpipe", 8)])
def test_the_anchor_session_gives_the_number_of_the_report(measured, capsys, monkeypatch, name, batch):
    summary = predict_experiment(measured, named_plan(name, 2), batch)
    monkeypatch.chdir(measured)
    told = answer(capsys, "--plan", name, "--ranks", 2, "--batch", batch, "--anchor", "session")
    for key in ("step_time_s", "low_s", "high_s", "confidence", "trace_only_step_time_s"):
        assert told[key] == summary[key], key
    drawn = summary["drawn"]
    assert drawn["low_s"] < drawn["median_s"] < drawn["high_s"]
    spread = drawn["spread"]
    assert (spread["rank_log"], spread["step_log"], spread["operator_log"]) == (0.03, 0.0, 0.2)
    alone = answer(capsys, "--plan", name, "--ranks", 2, "--batch", batch)
    assert alone["step_time_s"] == told["trace_only_step_time_s"] < told["step_time_s"]
    assert main(["simulate", TRACE, "--platform", PLATFORM, "--plan", name, "--ranks", "2", "--anchor", "session"]) == 0
    assert "from the trace alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"workload": "resnet18"}, "it measured resnet18, not gpt2-tiny"),
        ({"device_names": ["another"]}, "it ran on another, and the platform's device is"),
        ({"anchors": {}}, "it holds no single-rank steps"),
        ({"anchors": {"4": {}}}, "it has no step of the traced batch 8, only of 4"),
        ({"anchors": {"8": {"traced_step_s": 9.0}}}, "it belongs to another capture at batch 8"),
        ({"anchors": {"8": {"busy": [{}]}}}, "1 ranks were busy at once, and the plan has 2"),
    ],
)
def test_a_session_of_something_else_is_refused(measured, tmp_path, changes, problem):
    session = read_json(measured / "results" / "calibration" / "gpt2-tiny" / "session.json")
    write_json(tmp_path / "session.json", session | changes)
    asked = Options(anchor="session", session=tmp_path / "session.json")
    with pytest.raises(InputError, match="does not anchor this step: ") as refused:
        predict(TRACE, named_plan("ddp", 2), PLATFORM, options=asked)
    assert problem in str(refused.value)


def test_without_a_session_the_command_says_where_it_was_looked_for(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = ["simulate", TRACE, "--platform", PLATFORM, "--anchor", "session"]
    assert main(asked) == 2
    assert "no session of gpt2-tiny was measured in this folder" in capsys.readouterr().err


def test_prepared_times_and_a_platform_as_an_object_are_taken_as_they_are():
    machine, plan = load_named_platform(PLATFORM, 2), named_plan("ddp", 2)
    times = choose_times([load_trace(TRACE)], machine.device.name, None, None)
    found, named = predict(times, plan, machine), predict(TRACE, plan, PLATFORM)
    assert same(found.to_dict()) == same(named.to_dict())


def test_models_in_the_current_folder_count_for_this_machine_alone(tmp_path, monkeypatch):
    """They were measured on it; nobody else named them."""
    file = tmp_path / "results/cost_models/this-machine/operators.json"
    write_json(file, {"kind": "something else"})
    monkeypatch.chdir(tmp_path)
    platform = load_named_platform("cpu2-gloo", 2)
    assert predict("gpt2-tiny-b8", "ddp", platform, ranks=2).step.cost_model.startswith("cpu2-gloo")
    with pytest.raises(InputError, match="not an operator cost model"):
        predict("gpt2-tiny-b8", "ddp", replace(platform, name="this-machine"), ranks=2)


def test_a_step_without_memory_is_the_same_step():
    plan = make_plan(pipeline=2, micro_batches=4, schedule="1f1b")
    whole, bare = (predict(TRACE, plan, PLATFORM, memory=told) for told in (True, False))
    assert (bare.step_time_s, bare.low_s, bare.high_s) == (whole.step_time_s, whole.low_s, whole.high_s)
    assert whole.memory and bare.memory == [] and bare.peak_memory_bytes is None


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "looped-bfs"])
def test_a_pipeline_of_very_many_micro_batches_follows_from_two_of_fewer(schedule, monkeypatch):
    plan = make_plan(data=2, pipeline=3, schedule=schedule, micro_batches=24)
    answers = []
    for most in (1 << 40, 1):
        monkeypatch.setattr("trioflow.prediction.step._MOST_OPERATORS", most)
        answers.append(predict("gpt2-tiny-b8", plan, "dgx-a100", batch=192).to_dict())
    whole, followed = answers
    assert any("of 24 micro-batches 9 were simulated" in one for one in followed["warnings"])
    numbers = [key for key, value in whole.items() if isinstance(value, float)]
    for key in set(numbers) - {"simulator_wall_s"}:
        near = 1e-6 if key in ("step_time_s", "low_s", "high_s") else 0.03  # until all have begun
        assert followed[key] == pytest.approx(whole[key], rel=near), key
    for key in ("plan_text", "batch", "events", "peak_memory_bytes", "ranks"):
        assert followed[key] == whole[key], key


@pytest.mark.parametrize("platform", ["dgx-h100", "dgx-a100", "p5-h100"])
@pytest.mark.parametrize("sharding", ["none", "distributed", "zero2", "fsdp"])
def test_more_nodes_never_wait_less(sharding, platform):
    """At equal work per GPU only the optimizer, whose shards shrink, may get shorter."""
    waits_s = []
    for ranks in (8, 16, 64, 256):
        plan = make_plan(data=ranks, sharding=sharding)
        found = predict("gpt2-b8", plan, platform, interval=False, memory=False)
        waits_s.append(found.step_time_s - found.compute_s)
    assert waits_s == sorted(waits_s)
