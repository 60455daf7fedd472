"""The search for a plan: what it looks at, what it drops and why, and that the order is right.

Which plan is better and how sure that is.
"""

import json
import math
import multiprocessing
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from trioflow.base.ahead import Ahead
from trioflow.base.errors import InputError
from trioflow.base.plan_row import find_plan_problem
from trioflow.cli import main
from trioflow.cli.search import _print_left_out, describe_rest, read_ranks
from trioflow.costmodel.uncertainty import load_residuals
from trioflow.hardware.platform import SHIPPED
from trioflow.parallel.memory.peak import DOUBTED, LIKELY, count_outside, load_survival
from trioflow.parallel.plan import make_plan, vary_plan
from trioflow.prediction.assembly import predict
from trioflow.prediction.question import Options
from trioflow.sweeps import search
from trioflow.sweeps.scenarios import PredictionCache
from trioflow.sweeps.search import Candidate, Variants, _simulate_best, search_plans
from trioflow.sweeps.search_space import (
    FATES,
    QUANTILE,
    Fates,
    RankedStep,
    Space,
    _list_stages,
    add_costs,
    enumerate_plans,
    find_front,
    list_degrees,
    list_divisors,
    mark_front,
    own_deviation,
    probability_faster,
)
from trioflow.trace.store import load_trace

TRACE = "gpt2-tiny-b8"
SMALL = Space(
    schedules=("1f1b",),
    shardings=("none", "fsdp"),
    recomputations=("none",),
    sequence_parallel=(False,),
    buckets_bytes=(26214400,),
    most_pieces=2,
)


@pytest.fixture(scope="module")
def cache() -> PredictionCache:
    return PredictionCache()


def test_degrees_are_all_products_of_the_ranks() -> None:
    assert list_divisors(12) == [1, 2, 3, 4, 6, 12]
    found = list_degrees(12)
    assert len(found) == len(set(found)) == 18
    assert all(data * tensor * pipeline == 12 for data, tensor, pipeline in found)


def test_the_space_holds_every_plan_that_goes_together_and_counts_the_others() -> None:
    trace, fates = load_trace(TRACE), Fates()
    plans = list(enumerate_plans(trace, 8, 32, Space(), fates))
    assert len(set(plans)) == len(plans) > 100
    for plan in plans:
        assert plan.ranks == 8 and find_plan_problem(plan) is None
        assert plan.data == 1 or plan.pieces <= 32 // plan.data
        assert plan.tensor in (1, 2, 4), "of 4 heads"
    for column, values in (
        ("schedule", {"none", *Space().schedules}),
        ("sharding", set(Space().shardings)),
        ("micro_batches", {1, 2, 4, 8, 16, 32}),
        ("accumulate", {1, 2, 4, 8, 16}),
        ("sequence_parallel", {False, True}),
        ("bucket_bytes", set(Space().buckets_bytes)),
    ):
        assert {getattr(plan, column) for plan in plans} == values, column
    assert sum(fates.list_reasons().values()) > 0
    assert any("TP8 does not divide" in reason for reason in fates.list_reasons("tensor"))
    assert not any(reason.startswith("plan ") for reason in fates.list_reasons())


def test_a_batch_that_does_not_divide_is_refused_and_counted() -> None:
    fates = Fates()
    plans = list(enumerate_plans(load_trace(TRACE), 4, 6, SMALL, fates))
    assert {plan.data for plan in plans} == {1, 2}
    assert any("6 does not divide into 4 replica" in reason for reason in fates.list_reasons("fsdp"))


def test_what_became_of_every_plan_is_counted(cache: PredictionCache, tmp_path: Path) -> None:
    """Of each kind: those refused, too large, slower by their estimate and shown are all that there are."""
    fates = Fates()
    all_plans = list(enumerate_plans(load_trace(TRACE), 8, 128, Space(), fates))
    refused = sum(fates.list_reasons().values())
    assert any("more than 64 micro-batches" in reason for reason in fates.list_reasons())
    machine = str(small_machine(tmp_path, 1.5e9))
    found = search_plans(cache, TRACE, machine, 8, 128, top=2)
    rows = {row["family"]: row for row in found.fates.list_families()}
    for row in rows.values():
        assert row["plans"] == sum(row[fate] for fate in FATES) > 0
        assert sum(row["reasons"].values()) == row["refused"]
        assert (row["nearest"] is None) == (row["out_of_memory"] == 0)
        assert (row["fastest_slower_s"] is None) == (row["slower"] == 0)
    shardings = ("ddp", *Space().shardings[1:])
    schedules = ("gpipe", "1f1b", "interleaved", "zero-bubble")
    replicated = [plan for plan in all_plans if plan.data > 1]
    for kinds, plans in ((shardings, replicated), (schedules, [plan for plan in all_plans if plan.pipeline > 1])):
        carried_out = sum(rows[kind]["plans"] - rows[kind]["refused"] for kind in kinds)
        assert carried_out == len(plans)
    assert sum(found.fates.list_reasons().values()) == refused
    assert rows["fsdp"]["out_of_memory"] > 0 and rows["zero1"]["refused"] > 0
    assert {"context parallelism", "hsdp", "zbv"} <= set(found.left_out)


def test_interleaved_stages_share_the_model_evenly_and_grow_by_half() -> None:
    """The tiny GPT-2 has 4 blocks beside embedding and head: on two ranks they are 2 stages each, on one 4."""
    space = Space(schedules=("interleaved",))
    assert list(_list_stages(2, 82, space)) == [("interleaved", n) for n in (0, 4, 8)]
    assert list(_list_stages(8, 82, space)) == [("interleaved", n) for n in (0, 5)]
    assert list(_list_stages(8, 26, space)) == [("interleaved", n) for n in (0, 3)]
    assert list(_list_stages(8, 30, Space())) == [(name, 0) for name in Space().schedules]
    plans = enumerate_plans(load_trace("gpt2-b8"), 2, 16, space, Fates())
    assert {plan.stages_per_rank for plan in plans if plan.pipeline == 2} == {2, 3, 6}


def test_the_best_of_the_full_simulation_is_found(cache: PredictionCache) -> None:
    """With every plan simulated in full, none is faster than what the search put first."""
    few = search_plans(cache, TRACE, "dgx-a100", 8, 64, top=3, space=SMALL)
    every = search_plans(cache, TRACE, "dgx-a100", 8, 64, top=1000, space=SMALL)
    assert len(every.ranking) == every.estimated > len(few.ranking) >= 3
    best = [row["step_time_s"] for row in every.ranking]
    assert best == sorted(best)
    assert [row["step_time_s"] for row in few.ranking[:2]] == best[:2]
    low, high = every.estimate_error
    assert few.ranking[2]["step_time_s"] <= best[2] * (1 + high - low)
    assert -0.2 < low <= high < 0.2
    first = every.ranking[0]
    assert first["first_faster_probability"] == 0.5
    chances = [row["first_faster_probability"] for row in every.ranking[1:]]
    assert all(chance >= 0.5 for chance in chances) and chances[-1] > 0.9
    assert first["low_s"] < first["step_time_s"] < first["high_s"]


def small_machine(folder: Path, memory_bytes: float) -> Path:
    """A DGX A100 whose devices hold less."""
    content = yaml.safe_load((SHIPPED / "dgx-a100.yaml").read_text())
    content["device"] = {
        "name": "NVIDIA A100-SXM4-80GB",
        "kind": "gpu",
        "memory_bytes": {"value": memory_bytes, "source": "made small for a test"},
        "peak_flop_per_s": {"fp32": {"value": 19.5e12, "source": "NVIDIA A100 data sheet"}},
    }
    file = folder / f"memory-{memory_bytes:.0f}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def test_plans_that_do_not_fit_are_dropped_with_the_reason(cache: PredictionCache, tmp_path: Path) -> None:
    plans = [make_plan(4), make_plan(4, sharding="fsdp"), make_plan(1, 1, 4, "1f1b", 4)]
    whole = search_plans(cache, TRACE, "dgx-a100", 4, 64, plans=plans)
    peaks = sorted(row["peak_memory_bytes"] for row in whole.ranking)
    outside = predict(TRACE, plans[0], "dgx-a100", batch=64).step.outside_bytes
    assert outside == count_outside([4])
    needs = sorted(predict(TRACE, plan, "dgx-a100", batch=64).step.needed_bytes for plan in plans)
    room = (needs[0] + needs[1]) / 2 / load_survival().find_limit(LIKELY, 1.0) + outside
    found = search_plans(cache, TRACE, str(small_machine(tmp_path, room)), 4, 64, plans=plans)
    assert [row["peak_memory_bytes"] for row in found.ranking] == peaks[:1]
    assert len(found.fates.dropped) == 2
    for entry in found.fates.dropped:
        assert entry["fit_probability"] < LIKELY and entry["needed_bytes"] > outside
        assert "% likely to fit" in entry["reason"] and entry["plan_text"]
    nothing = search_plans(cache, TRACE, str(small_machine(tmp_path, 2e8)), 4, 64, plans=plans)
    assert nothing.ranking == [] and len(nothing.fates.dropped) == 3


def test_a_plan_that_may_not_fit_stands_behind_the_others(cache: PredictionCache, tmp_path: Path) -> None:
    """It more likely fits than not, but less than one would bet a run on."""
    plans = [make_plan(4), make_plan(4, recompute="full")]
    fast, slow = search_plans(cache, TRACE, "dgx-a100", 4, 64, plans=plans).ranking
    assert fast["peak_memory_bytes"] > slow["peak_memory_bytes"] and not fast["crowded"]
    needed_bytes = predict(TRACE, plans[0], "dgx-a100", batch=64).step.needed_bytes
    room = needed_bytes / load_survival().find_limit(0.7, 1.0) + count_outside([4])
    tight = str(small_machine(tmp_path, room))
    found = search_plans(cache, TRACE, tight, 4, 64, plans=plans)
    assert [row["crowded"] for row in found.ranking] == [False, True]
    assert found.ranking[1]["expected_s"] < found.ranking[0]["expected_s"]
    told = predict(TRACE, plans[0], tight, batch=64)
    assert LIKELY < told.fit_probability < DOUBTED and told.fits_memory
    assert found.ranking[1]["fit_probability"] == told.fit_probability
    assert told.warnings[0].startswith("memory: the step is 70 % likely to fit")


def test_simulating_goes_on_while_the_estimate_leaves_the_order_open() -> None:
    class One:
        def __init__(self, candidate: Candidate, time_s: float) -> None:
            self.candidate, self.prediction = candidate, self
            self.time_s, self.row = time_s, {"crowded": False}

    plan = make_plan()
    groups = [Variants(Candidate(time_s, plan, 0)) for time_s in (1.0, 1.1, 1.2, 1.3, 5.0, 6.0)]

    def simulate(answer: Callable[[float], float | None]) -> list[One]:
        def run(variants: Variants) -> One | None:
            time_s = answer(variants.best.time_s)
            return None if time_s is None else One(variants.best, time_s)

        return _simulate_best(groups, 2, run)

    assert len(simulate(lambda s: s)) == 2
    # The second was estimated as half of what it takes, so that others may still be better.
    assert len(simulate(lambda s: 2.2 if s == 1.1 else s)) >= 3
    # The first was estimated at twice its time: so may all others be.
    assert len(simulate(lambda s: 0.5 if s == 1.0 else s)) == 4, "5.0 / 2 is more than the second best"
    without = simulate(lambda s: None if s < 1.2 else s)
    assert [one.candidate.time_s for one in without] == [1.2, 1.3], "what does not fit does not count"


BUCKETS = (1 << 18, 1 << 20, 1 << 22, 100 << 20)


@pytest.mark.parametrize("platform", ["cpu2-gloo", "dgx-a100"])
def test_a_plan_is_shown_once_with_its_best_bucket_size(cache: PredictionCache, platform: str) -> None:
    """Simulated one by one, no other bucket size is better, and those called alike are."""
    plans = [
        vary_plan(make_plan(2, sharding=sharding), bucket_bytes=size, first_bucket_bytes=size)
        for sharding in ("none", "zero1")
        for size in BUCKETS
    ]
    found = search_plans(cache, TRACE, platform, 2, 16, plans=plans)
    assert found.estimated == len(plans) and {r["sharding"] for r in found.ranking} == {"none", "zero1"}
    assert len(found.ranking) == 2
    for row in found.ranking:
        alone = {
            plan.bucket_bytes: search_plans(cache, TRACE, platform, 2, 16, plans=[plan]).ranking[0]
            for plan in plans
            if plan.sharding == row["sharding"]
        }
        best_s = min(other["step_time_s"] for other in alone.values())
        assert row["step_time_s"] <= best_s * 1.002
        others = [other["bucket_bytes"] for other in row["other_buckets"]]
        assert sorted([row["bucket_bytes"], *others]) == sorted(BUCKETS)
        estimated = [other["outlined_s"] for other in row["other_buckets"]]
        assert [row["outlined_s"], *estimated] == sorted([row["outlined_s"], *estimated])
        alike = others[: row["alike_buckets"]]
        for size in others:
            slower = alone[size]["step_time_s"] / row["step_time_s"] - 1
            assert slower < 0.02 if size in alike else slower > 0.005, size
        assert all(not other["other_buckets"] for other in alone.values())


def test_other_bucket_sizes_are_told_in_words() -> None:
    mib = 1 << 20
    row = {
        "data": 2,
        "sharding": "none",
        "bucket_bytes": 5 * mib,
        "alike_buckets": 1,
        "other_buckets": [{"bucket_bytes": 25 * mib}, {"bucket_bytes": 100 * mib}],
    }
    assert describe_rest(row) == ", buckets of 5 MiB (or 25, alike)"
    assert describe_rest({**row, "alike_buckets": 2}) == ", buckets of 5 MiB (or 25 or 100, alike)"
    assert describe_rest({**row, "alike_buckets": 0}) == ", buckets of 5 MiB"
    assert describe_rest({**row, "sharding": "fsdp"}) == describe_rest({**row, "data": 1}) == ""


def test_a_plan_that_does_not_fit_is_dropped_with_all_its_bucket_sizes(cache: PredictionCache, tmp_path: Path) -> None:
    plans = [vary_plan(make_plan(2), bucket_bytes=size) for size in BUCKETS]
    whole = search_plans(cache, TRACE, "dgx-a100", 2, 16, plans=plans)
    machine = str(small_machine(tmp_path, whole.ranking[0]["peak_memory_bytes"] - 1))
    found = search_plans(cache, TRACE, machine, 2, 16, plans=plans)
    assert found.ranking == [] and len(found.fates.dropped) == len(plans)


def test_cost_and_energy_are_those_of_all_ranks() -> None:
    rows = [
        {"ranks": 8, "expected_s": 2.0, "peak_memory_bytes": 5.0},
        {"ranks": 4, "expected_s": 3.0, "peak_memory_bytes": 9.0},
    ]
    assert add_costs(rows, None, None) == ["expected_s", "peak_memory_bytes"]
    columns = add_costs(rows, 3600.0, 100.0)
    assert columns == ["expected_s", "peak_memory_bytes", "cost_per_step", "energy_j"]
    assert [(row["cost_per_step"], row["energy_j"]) for row in rows] == [(16.0, 1600.0), (12.0, 1200.0)]
    mark_front(rows, columns)
    assert [row["pareto"] for row in rows] == [True, True]
    mark_front(rows, ["expected_s", "peak_memory_bytes"])
    assert [row["pareto"] for row in rows] == [True, False]


def test_the_command_ranks_and_says_what_it_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", TRACE, "--gpus", "2xcpu2-gloo", "--batch", "18", "--top", "3"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100 and "--explain" in text
    assert main([*words, "--explain"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("gpt2-tiny on 2 ranks of cpu2-gloo, 18 samples a step: ")
    assert "log-normal errors" in text and "the quick estimates were within" in text
    assert "plans are refused" in text and "looped-bfs, zbv, dualpipev, gpipe-recompute" in text
    assert "* Pareto-optimal in time and memory" in text
    kinds = text[text.index("\nkind ") :].splitlines()[3:]
    assert {"ddp", "fsdp", "tensor", "1f1b"} <= {line.split("  ")[0].strip() for line in kinds}
    assert any(line.startswith("tensor ") and "the fastest is estimated as" in line for line in kinds)
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    times = [row["step_time_s"] for row in told["ranking"]]
    assert times == sorted(times) and len(times) >= 3
    assert told["ranking"][0]["pareto"] and 0.5 <= told["first_beats_second"] <= 1
    assert told["plans"] + sum(told["refused"].values()) > 50
    assert sum(row["simulated"] for row in told["families"]) > 0 and "hsdp" in told["not_searched"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "two"], "--ranks two: no numbers of ranks"),
        (["--ranks", "0"], "no numbers of ranks"),
        (["--ranks", "2", "--batch", "0"], "must be positive"),
        (["--ranks", "2", "--top", "0"], "must be positive"),
        (["--ranks", "2", "--power-w", "-1"], "--power-w -1.0 is not positive"),
        (["--ranks", "4"], "cpu2-gloo has 2 devices"),
    ],
)
def test_a_wrong_question_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["search", TRACE, "--platform", "cpu2-gloo", *words]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_numbers_of_ranks_are_read_once_each() -> None:
    assert read_ranks("16, 8,16") == [8, 16]
    with pytest.raises(InputError):
        read_ranks("8,,16")


def test_draws_decide_the_order_where_they_are_asked_for(cache: PredictionCache) -> None:
    plans = [make_plan(data=4), make_plan(pipeline=4, micro_batches=4, schedule="1f1b")]
    asked = {"plans": plans, "top": 2}
    steady = search_plans(cache, TRACE, "dgx-h100", 4, 64, **asked)
    found = search_plans(cache, TRACE, "dgx-h100", 4, 64, options=Options(draws=40, seed=2), **asked)
    assert all("first_faster_drawn" not in row for row in steady.ranking)
    assert found.estimate_error == steady.estimate_error
    told = [
        predict(TRACE, plan, "dgx-h100", batch=64, draws=40, seed=2).draws
        for plan in sorted(plans, key=lambda plan: plan.pipeline != found.ranking[0]["pipeline"])
    ]
    assert [row["expected_s"] for row in found.ranking] == [one.expected_s for one in told]
    assert told[0].expected_s < told[1].expected_s
    assert [row["first_faster_drawn"] for row in found.ranking] == [0.5, told[0].beats(told[1])]


def test_the_command_says_how_often_the_first_wins_by_drift(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", TRACE, "--ranks", "2", "--platform", "dgx-h100", "--batch", "16"]
    assert main([*words, "--top", "2", "--draws", "20"]) == 0
    assert "% of samples" in capsys.readouterr().out
    assert main([*words, "--draws", "-3"]) == 2


def test_plans_tried_ahead_on_other_cores_are_those_tried_in_turn(
    cache: PredictionCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is found, warnings and refusals too, whichever process looked at a plan."""
    monkeypatch.setattr(search, "Ahead", partial(Ahead, worth_s=0.0))
    one, several = (search_plans(cache, TRACE, "dgx-a100", 4, 32, top=3, space=SMALL, jobs=jobs) for jobs in (1, 2))
    assert one == several and len(one.ranking) > 3
    assert not multiprocessing.active_children()


def test_a_question_whose_process_failed_or_ended_is_answered_by_the_first() -> None:
    here = os.getpid()

    def answer(question: str) -> str:
        if os.getpid() != here and question == "raise":
            raise ValueError(question)
        if os.getpid() != here and question == "end":
            os._exit(1)
        return f"{question}: {os.getpid() == here}"

    questions = ["first", "raise", "end", "plain"]
    with Ahead(answer, questions, 2, worth_s=0.0) as ahead:
        found = [ahead.take(place) for place in range(3)]
    assert found == ["first: True", "raise: True", "end: True"]
    with Ahead(lambda _: {}["missing"], questions, 2, worth_s=0.0) as ahead, pytest.raises(KeyError):
        ahead.take(0)
    assert not multiprocessing.active_children()


def test_a_daemon_answers_all_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with Ahead(str, [1, 2, 3], 2, worth_s=0.0) as ahead:
        assert [ahead.take(place) for place in range(3)] == ["1", "2", "3"]


@pytest.mark.parametrize(("reasons", "rest"), [(6, "and 1 more reason ("), (7, "and 2 more reasons (")])
def test_reasons_left_out_are_counted(reasons: int, rest: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused = {f"reason {number}": 1 for number in range(reasons)}
    left = {"out_of_memory": [], "refused": refused, "families": [], "not_searched": []}
    _print_left_out(left)
    assert rest in capsys.readouterr().out


def test_equal_plans_are_even_and_chances_add_up() -> None:
    one, other = RankedStep(1.0, 0.3, 0.1), RankedStep(1.2, 0.2, 0.15)
    assert probability_faster(one, one) == 0.5
    assert probability_faster(one, other) + probability_faster(other, one) == pytest.approx(1.0)
    assert 0.5 < probability_faster(one, other) < 1


def test_what_plans_share_cancels() -> None:
    """However uncertain compute is, a plan that depends on it as the other does stays the faster one."""
    sure = probability_faster(RankedStep(1.0, 0.0, 0.0), RankedStep(1.1, 0.0, 0.0))
    assert probability_faster(RankedStep(1.0, 2.0, 0.5), RankedStep(1.1, 2.0, 0.5)) == sure
    assert probability_faster(RankedStep(1.0, 0.5, 0.0), RankedStep(1.1, 0.0, 0.0)) < sure
    assert probability_faster(RankedStep(1.0, 0.0, 0.0), RankedStep(1.1, 0.0, 0.5)) < sure


def test_the_probability_is_what_drawing_the_errors_gives() -> None:
    one, other = RankedStep(1.0, 0.30, 0.02), RankedStep(1.08, 0.15, 0.20)
    draw = random.Random(1).gauss
    wins = 0
    for _ in range(40_000):
        compute, network = draw(0, 1 / QUANTILE), draw(0, 1 / QUANTILE)
        times = [
            math.log(p.time_s) + compute * p.compute_log + network * p.communication_log + draw(0, own_deviation())
            for p in (one, other)
        ]
        wins += times[0] < times[1]
    assert wins / 40_000 == pytest.approx(probability_faster(one, other), abs=0.01)


def test_a_plans_own_error_comes_from_measured_plans() -> None:
    rows = [one for one in load_residuals() if one.device_kind == "cpu" and one.ranks > 1]
    assert len(rows) > 15
    assert 0.01 < own_deviation() < 0.2


def test_the_front_holds_what_nothing_beats() -> None:
    rows = [
        {"a": 1.0, "b": 9.0},
        {"a": 2.0, "b": 5.0},
        {"a": 2.0, "b": 6.0},
        {"a": 3.0, "b": 5.0},
        {"a": 4.0, "b": 1.0},
        {"a": 1.0, "b": 9.0},
    ]
    assert find_front(rows, ["a", "b"]) == [0, 1, 4], "of two equal rows the first"
    assert find_front(rows, ["b"]) == [4]
    assert find_front([], ["a"]) == []
    generator = random.Random(2)
    many = [{c: float(generator.randrange(8)) for c in "abc"} for _ in range(60)]
    front = find_front(many, "abc")
    for place, row in enumerate(many):
        beaten = any(
            all(other[c] <= row[c] for c in "abc") and (other != row or i < place)
            for i, other in enumerate(many)
            if i != place
        )
        assert (place in front) == (not beaten)
