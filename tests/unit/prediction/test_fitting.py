"""Whether a step fits: its odds and sizes are simulate's, its changes real plans, and what is unknown stays unknown.

The largest batch and sequence that fit: found exactly, in few steps, and told with the next one.

Goodput of a long run against brute force and against runs drawn failure by failure.

Nodes of more GPUs than any that was measured: NVL72 takes an eight-GPU node's collectives, and says how far.
"""

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from trioflow.base.errors import InputError
from trioflow.cli import main
from trioflow.cli.answer import draw_bar
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.parallel.memory.peak import DOUBTED, LIKELY, Survival, count_workspaces, load_survival
from trioflow.parallel.plan import make_plan, vary_plan
from trioflow.prediction.assembly import choose_collectives, prepare_step
from trioflow.prediction.breakdown import Faults, choose_interval_s, measure_goodput
from trioflow.prediction.fitting import answer_memory, find_largest, find_most, size_step
from trioflow.prediction.question import Options, resolve

TRACE = "gpt2-tiny-b8"


def test_the_command_answers_what_simulate_does_and_shows_the_last_rank(capsys: pytest.CaptureFixture[str]) -> None:
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
    step = prepare_step(resolve(TRACE, plan, machine, batch=64))
    room = step.needed_bytes / load_survival().find_limit(0.3, 1.0) + step.outside_bytes
    tight = replace(machine, device=structs.replace(machine.device, memory_bytes=round(room)))
    found = answer_memory(TRACE, plan, tight, batch=64)
    assert found["fit_probability"] == pytest.approx(0.3, rel=0.01) and found["left_bytes"] < 0
    changes = {row["flags"]: row for row in found["changes"]}
    for flags, column in (("--sharding zero1", {"sharding": "zero1"}), ("--accumulate 2", {"accumulate": 2})):
        expected = size_step(prepare_step(resolve(TRACE, vary_plan(plan, **column), tight, batch=64)))
        assert changes[flags] == {"flags": flags, **expected}
    assert any(row["fit_probability"] >= DOUBTED for row in found["changes"])


def test_what_is_unknown_stays_unknown() -> None:
    step = prepare_step(resolve(TRACE, make_plan(2), "dgx-a100"))
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


CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}


@pytest.mark.parametrize(
    "need",
    [
        lambda count: 100 + 3 * count,
        lambda count: 100 + 3 * count + 0.01 * count**2,
        lambda count: 50 + 7 * (count // 10),
        lambda count: 2.0 ** min(count, 60),
    ],
)
def test_the_most_that_fits_is_found_exactly_and_soon(need: Callable[[int], float]) -> None:
    for room in (need(1) - 1, need(1), need(7), need(500), need(500) + 0.5):
        asked = []

        def count(number: int, asked: list[int] = asked) -> float:
            asked.append(number)
            return need(number)

        found = find_most(count, room, 4096)
        assert found == max((n for n in range(1, 4097) if need(n) <= room), default=0)
        assert len(set(asked)) <= 24


def small(name: str, ranks: int, memory_bytes: float) -> Platform:
    platform = load_platform(name, ranks)
    return replace(platform, device=structs.replace(platform.device, memory_bytes=round(memory_bytes)))


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    plan, platform = make_plan(2, accumulate=3), small("dgx-a100", 2, 3e9)
    told = find_largest(TRACE, plan, platform, "batch")
    sizes = [told[name]["batch"] for name in ("roomy", "fits", "next")]
    assert sizes[0] < sizes[1] == sizes[2] - 6 and all(size % 6 == 0 for size in sizes)
    steps = [prepare_step(resolve(TRACE, plan, platform, batch=size)) for size in sizes]
    assert [step.fits_memory for step in steps] == [True, True, False]
    odds = [told[name]["fit_probability"] for name in ("roomy", "fits", "next")]
    assert odds[0] >= DOUBTED > odds[1] >= LIKELY > odds[2]
    one_more = prepare_step(resolve(TRACE, plan, platform, batch=sizes[0] + 6))
    assert one_more.fit_probability is not None and one_more.fit_probability < DOUBTED
    assert told["fits"]["peak_memory_bytes"] == steps[1].peak_memory_bytes
    assert told["outside_bytes"] == steps[1].outside_bytes
    with pytest.raises(InputError, match="no batch fits: 6 samples a step need "):
        find_largest(TRACE, plan, small("dgx-a100", 2, 1e9), "batch")


@pytest.mark.slow
def test_the_longest_sequence_of_a_language_model(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plan, platform = make_plan(2, context=2, sharding="fsdp"), small("dgx-h100", 4, 1.6e9)
    told = find_largest(str(tmp_path), plan, platform, "sequence", batch=2)
    longest = told["fits"]["sequence"]
    assert longest % 1024 == 0 and told["next"]["sequence"] == longest + 1024
    for sequence, fits in ((longest, True), (longest + 1024, False)):
        options = Options(sequence=sequence)
        step = prepare_step(resolve(str(tmp_path), plan, platform, batch=2, options=options))
        assert step.fits_memory is fits
    with pytest.raises(InputError, match="sequence of a trace that was captured"):
        find_largest(TRACE, plan, platform, "sequence")


def test_the_command_prints_it_and_refuses_both(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"simulate {TRACE} --plan ddp --ranks 2 --platform cpu2-gloo --largest batch".split()
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "samples a step" in text and "the next does not fit" in text
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["largest"] == "batch" and told["fits"]["batch"] < told["next"]["batch"]
    assert told["roomy"]["batch"] <= told["fits"]["batch"]
    assert main([*words, "--batch", "16"]) == 2
    assert "--batch and --largest batch were both given" in capsys.readouterr().err


RANKS, CHECKPOINT_S = 1024, 60.0
FAULTS = Faults(20_000.0, CHECKPOINT_S, restart_s=300.0)


def test_no_other_interval_keeps_more() -> None:
    best_s = choose_interval_s(CHECKPOINT_S, FAULTS.mtbf_s(RANKS))
    best = measure_goodput(FAULTS, best_s, RANKS)
    others = [measure_goodput(FAULTS, best_s * factor, RANKS) for factor in (0.5, 0.9, 1.1, 2.0)]
    assert max(others) < best < 1
    young_s = math.sqrt(2 * CHECKPOINT_S * FAULTS.mtbf_s(RANKS))
    assert best_s == pytest.approx(young_s, rel=0.05)


def draw_run(interval_s: float, intervals: int, seed: int) -> float:
    """Time of a run whose failures are drawn one by one, restarts hit by failures too."""
    draws = random.Random(seed)
    mtbf_s, clock_s = FAULTS.mtbf_s(RANKS), 0.0
    for _ in range(intervals):
        due_s = interval_s + CHECKPOINT_S
        while (failure_s := draws.expovariate(1 / mtbf_s)) < due_s:
            clock_s += failure_s
            due_s = FAULTS.restart_s + interval_s + CHECKPOINT_S
        clock_s += due_s
    return clock_s


def test_runs_drawn_failure_by_failure_keep_as_much() -> None:
    interval_s, intervals = 4000.0, 4000
    kept = interval_s * intervals / draw_run(interval_s, intervals, seed=3)
    assert measure_goodput(FAULTS, interval_s, RANKS) == pytest.approx(kept, rel=0.01)


def test_nothing_lost_where_nothing_fails_or_saving_is_free() -> None:
    rare = Faults(1e15, 0.0, 0.0)
    assert measure_goodput(rare, 1.0, RANKS) == pytest.approx(1.0, abs=1e-6)
    assert measure_goodput(Faults(1e-9, 1e6, 1e6), 1.0, RANKS) == 0.0


@pytest.mark.parametrize(
    ("words", "flag"),
    [((0.0, 1.0, 1.0), "gpu-hours"), ((1.0, -1.0, 1.0), "checkpoint"), ((1.0, 1.0, math.inf), "restart")],
)
def test_numbers_that_are_no_times_are_refused(words: tuple[float, ...], flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        Faults(*words)


def test_restarts_cost_time_though_saving_costs_none() -> None:
    free = Faults(20_000.0, 0.0, restart_s=300.0)
    interval_s = choose_interval_s(0.0, free.mtbf_s(RANKS))
    assert measure_goodput(free, interval_s, RANKS) == math.exp(-300.0 / free.mtbf_s(RANKS)) < 1


SIZE = 10**9


@pytest.mark.parametrize("per_node", [64, 72])
def test_a_rack_is_one_node_of_measured_collectives(per_node: int) -> None:
    rack = replace(
        load_platform("gb200-nvl72", 2 * per_node), ranks_per_node=per_node, node_collectives="h200x8-nvlink"
    )
    cost = choose_collectives(rack)
    eight, whole = (cost.time_s("all_reduce", ranks, SIZE) for ranks in (8, per_node))
    assert whole.confidence == "extrapolated"
    assert eight.time_s < whole.time_s < 1.5 * eight.time_s
    assert whole.high_s / whole.low_s > 1.5 * eight.high_s / eight.low_s
    alone = replace(load_platform("gb200-nvl72", per_node), ranks_per_node=None)
    known = choose_collectives(replace(alone, node_collectives="h200x8-nvlink"))
    assert known.time_s("all_reduce", per_node, SIZE) == whole
