"""``trioflow plan``: the best plans on one screen, with the numbers of ``search`` and ``simulate``; GPUs by their name."""

import json
from pathlib import Path
from typing import Any

import pytest
import trioflow
from trioflow.base.errors import TrioflowError
from trioflow.cli.main import main
from trioflow.cli.search import format_plans, format_ranking
from trioflow.costmodel.choices import load_named_platform, read_gpus
from trioflow.parallel.plan import cut_batch, make_plan
from trioflow.sweeps.search import BestPlans, choose_batch, choose_shown
from trioflow.trace.language.read import find_configuration

SMALL = {"sequence": 512, "batch": 8, "jobs": 1, "top": 1}


@pytest.fixture(scope="module")
def best() -> BestPlans:
    return trioflow.plan("llama-3.2-1b", gpus="4xH100", tokens=1e10, price=2.0, **SMALL)


def test_the_first_plan_is_what_simulate_answers_and_search_ranks_first(best: BestPlans) -> None:
    answer = best.to_dict()
    first = answer["shown"][0]
    assert best.prediction.step_time_s == first["step_time_s"] == answer["best"]["step_time_s"]
    assert (
        first == best.found["ranking"][0]
        and best.prediction.task_graph.metadata.plan.ranks == 4
        and len(best.to_frame()) == len(answer["ranking"])
    )
    assert first["run"]["cost"] == pytest.approx(1e10 / first["tokens_per_s"] * 4 / 3600 * 2.0)
    assert first["run"]["energy_j"] == pytest.approx(first["run"]["gpu_hours"] * 3600 * 700)
    assert sum(answer["parts_s"].values()) == pytest.approx(first["step_time_s"])
    assert answer["assumed"] == {"platform": "dgx-h100", "power_w": 700.0}
    json.dumps(answer)


def test_the_screen_has_eighty_columns_and_all_that_was_asked(best: BestPlans) -> None:
    lines = format_plans(best, best.to_dict(), "EUR ").splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in (
        "tokens/s/GPU",
        "MFU [%]",
        "days",
        "cost [EUR ]",
        "energy [kWh]",
        "memory fits",
        "C compute",
        "dgx-h100",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("share", "words"), [(1e-3, (" minutes", "kWh")), (0.1, (" hours", "kWh")), (100, (" days", "MWh"))]
)
def test_a_run_is_told_in_units_of_its_size(best: BestPlans, share: float, words: tuple[str, str]) -> None:
    answer = best.to_dict()
    row = answer["shown"][0]
    row = {**row, "run": {name: value * share for name, value in row["run"].items()}}
    text = " ".join(format_plans(best, {**answer, "shown": [row], "ranking": [row]}, "EUR ").split())
    assert all(word in text for word in words) and "take 0.0" not in text
    assert words[0].strip() in format_ranking({**answer, "ranking": [row]})


def test_plans_keep_their_place_in_the_ranking_on_the_screen(best: BestPlans) -> None:
    answer = best.to_dict()
    first, *others = answer["ranking"]
    answer["shown"] = [first, {**first, "notation": "DP2 x TP2"}]
    answer["ranking"] = [first, {**first, "notation": "left out"}, answer["shown"][1], *others]
    text = format_plans(best, answer, "EUR ")
    assert "\n  3  DP2 x TP2\n" in text and "Plan 1 against plan 3:" in " ".join(text.split())
    assert "plan 3" in text and "plan 2" not in text


def test_plans_shown_beside_one_another_differ_in_degrees_or_sharding() -> None:
    def row(data: int, stages: int, sharding: str = "none") -> dict[str, Any]:
        return {"data": data, "stages_per_rank": stages, "sharding": sharding}

    ranking = [row(8, 4), row(8, 2), row(8, 2, "fsdp"), row(4, 1), row(2, 1)]
    assert choose_shown(ranking) == [ranking[0], ranking[2], ranking[3]]


@pytest.mark.parametrize(
    ("model", "sequence", "ranks", "batch"),
    [
        ("llama-3.1-70b", 8192, 256, 512),
        ("llama-3.1-70b", 8192, 24, 528),
        ("llama-3.1-70b", 8192, 1000, 625),
        ("gpt2", 1024, 2, 512),
    ],
)
def test_a_usual_batch_is_one_that_the_gpus_can_share(model: str, sequence: int, ranks: int, batch: int) -> None:
    configuration = find_configuration(model)
    assert configuration is not None and configuration.usual_sequence == sequence
    assert choose_batch(configuration, sequence, ranks) == batch


@pytest.mark.parametrize(
    ("text", "platform", "device"),
    [
        ("256xH100", "dgx-h100", "NVIDIA H100 80GB HBM3"),
        ("8xA100-40GB", "dgx-a100", "NVIDIA A100-SXM4-40GB"),
        ("2x4090", "rtx4090x8-pcie", "NVIDIA GeForce RTX 4090"),
        ("16xp5-h100", "p5-h100", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_gpus_are_found_by_their_name_on_their_usual_platform(text: str, platform: str, device: str) -> None:
    count, name = read_gpus(text)
    machine = load_named_platform(name, count)
    assert (machine.name, machine.device.name, machine.ranks) == (platform, device, count)
    assert any("no platform with" in doubt for doubt in machine.doubts) == (text == "8xA100-40GB")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["llama-3.2-1b", "--gpus", "H100"], "is not a number and a name of GPUs"),
        (["llama-3.2-1b", "--gpus", "8xH1000"], "no GPU or platform is called 'H1000'; did you mean H100?"),
        (["llama-3.2-1b", "--gpus", "8xH100", "--memory-margin", "1.5"], "must be at least 0 and below 1"),
        (["llama-3.2-1b", "--gpus", "8xH100", "--power-w", "-5"], "--power-w -5.0 is not positive"),
        (
            ["llama-3.1-70b", "--gpus", "1xH100", "--sequence", "512", "--batch", "1"],
            "no plan fits 1xH100; the nearest",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_language_model_runs_micro_batches_of_one_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", "llama-3.2-1b", "--plan", "fsdp", "--gpus", "2xH100", "--batch", "8", "--sequence", "128"]
    for more, told in (
        ([], "mbs 1, 4 gradient"),
        (["--micro-batch", "2"], "mbs 2, 2 gradient"),
        (["--accumulate", "1"], "mbs 4"),
    ):
        plan = ["--data-parallel", "2", "--sharding", "fsdp"] if "--accumulate" in more else words[2:4]
        assert main([*words[:2], *plan, *words[4:], *more, "--json"]) == 0
        assert told in json.loads(capsys.readouterr().out)["plan_text"]
    with pytest.raises(TrioflowError, match="does not divide into micro-batches of 3"):
        cut_batch(make_plan(data=2), 8, 3)
    assert cut_batch(make_plan(data=2, pipeline=2), 16, 2).micro_batches == 4


def test_a_frameworks_file_is_planned_and_compared_with_its_own_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.sh"
    sizes = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
    file.write_text(
        f"torchrun --nproc_per_node 4 pretrain_gpt.py {sizes} --bf16 --micro-batch-size 1 --global-batch-size 8"
        " --tensor-model-parallel-size 2 --use-distributed-optimizer\n"
    )
    assert main(["plan", str(file), "--gpus", "4xH100", "--top", "1", "--jobs", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "your plan DP2 x TP2, ZeRO-1, mbs 1, 4 gradient" in text and "batch 8 = 1.02k tokens per step," in text
    assert main(["simulate", str(file), "--gpus", "4xH100", "--explain"]) == 0
    assert "nproc" not in capsys.readouterr().err


def test_launch_files_are_written_whatever_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama-3.2-1b", "--gpus", "2xH100", "--sequence", "512", "--batch", "8", "--top", "1", "--jobs", "1"]
    assert main(["plan", *words, "--frameworks", "megatron", "--output", str(tmp_path / "launch"), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["launch"].values()
    assert (tmp_path / "launch" / one["file"]).read_text() == one["text"]
