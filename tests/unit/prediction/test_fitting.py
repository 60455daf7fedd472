"""Whether a step fits: its odds and sizes are simulate's, its changes real plans, and what is unknown stays unknown."""

import json
from dataclasses import replace

import pytest
from trioflow.cli import main
from trioflow.cli.answer import draw_bar
from trioflow.hardware.platform import load_platform
from trioflow.parallel.memory.peak import count_workspaces
from trioflow.parallel.memory.survival import DOUBTED, Survival, load_survival
from trioflow.parallel.plan import make_plan, vary_plan
from trioflow.prediction.assembly import prepare_step
from trioflow.prediction.fitting import answer_memory, size_step

TRACE = "gpt2-tiny-b8"


def test_the_command_answers_what_simulate_does_and_shows_the_last_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = "--pipeline-parallel 2 --schedule 1f1b --micro-batches 4"
    words = f"{TRACE} {plan} --platform dgx-h100".split()
    answers = []
    for command in ("memory", "simulate"):
        assert main([command, *words, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    found, simulated = answers
    shared = {"memory", "peak_memory_bytes", "outside_bytes", "fit_probability", "fits_memory"}
    assert {key: found[key] for key in shared} == {key: simulated[key] for key in shared}
    assert found["fullest_rank"]["peak_bytes"] == found["peak_memory_bytes"]
    assert 1 in found["last_rank"]["ranks"] and found["changes"] == []
    workspaces = count_workspaces(load_platform("dgx-h100", 1).device)
    assert found["last_rank"]["categories"]["workspace"] == workspaces == 2 * 32 * 1024**2
    assert main(["memory", *words]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80, text
    assert "last: rank 1" in text and "over 99 % likely to fit" in text and "O  optimizer" in text


def test_changes_are_evaluated_where_the_step_may_not_fit() -> None:
    plan, machine = make_plan(2), load_platform("dgx-a100", 2)
    step = prepare_step(TRACE, plan, machine, batch=64)
    room = step.needed_bytes / load_survival().find_limit(0.3, 1.0) + step.outside_bytes
    tight = replace(machine, device=replace(machine.device, memory_bytes=round(room)))
    found = answer_memory(TRACE, plan, tight, batch=64)
    assert found["fit_probability"] == pytest.approx(0.3, rel=0.01) and found["left_bytes"] < 0
    changes = {row["flags"]: row for row in found["changes"]}
    for flags, column in (
        ("--sharding zero1", {"sharding": "zero1"}),
        ("--accumulate 2", {"accumulate": 2}),
    ):
        expected = size_step(prepare_step(TRACE, vary_plan(plan, **column), tight, batch=64))
        assert changes[flags] == {"flags": flags, **expected}
    assert any(row["fit_probability"] >= DOUBTED for row in found["changes"])


def test_what_is_unknown_stays_unknown() -> None:
    step = prepare_step(TRACE, make_plan(2), "dgx-a100")
    step.graph.metadata.memory.clear()
    sizes = size_step(step)
    assert set(sizes) > {"plan_text"} and not any(sizes[key] for key in sizes if key != "plan_text")


def test_odds_fall_with_need_and_the_bar_ends_at_the_card() -> None:
    survival = Survival(0.2, 0.05, 0.25, 0.01)
    odds = [survival.find_probability(need, 100.0) for need in (10, 70, 81.8731, 95, 1000)]
    assert odds == sorted(odds, reverse=True) and odds[0] == pytest.approx(0.99)
    assert odds[2] == pytest.approx(0.495, rel=1e-4) and odds[-1] < 1e-9
    assert survival.find_probability(1.0, 0.0) < 1e-9
    entry = {"peak_bytes": 80, "reserved_bytes": 90, "wanted_bytes": 100}
    assert survival.count_needed(entry) == 85
    assert draw_bar({("P", ""): 50, ("A", ""): 25}, 100) == f"[{'P' * 38}{'A' * 19}{'.' * 19}]"
    assert draw_bar({("P", ""): 200}, 100) == f"[{'P' * 38}|{'P' * 38}]"
