"""Draws of a predicted step: deterministic, without spread the step itself, and comparable between plans."""

import json

import numpy as np
import pytest
from trioflow.base.errors import InputError
from trioflow.cli import main
from trioflow.costmodel.spread import Spread
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.prediction.assembly import predict

TRACE, PLATFORM = "gpt2-tiny-b8", "dgx-h100"
WIDE = Spread(0.01, 0.05, 0.02, 0.02, 0.05)


def draw(plan, **changes):
    return predict(TRACE, plan, PLATFORM, batch=32, **changes).draws


def test_without_spread_every_draw_is_the_simulated_step() -> None:
    told = predict(TRACE, named_plan("ddp", 4), PLATFORM, draws=3, spread=Spread())
    assert told.draws.step_s == pytest.approx([told.step_time_s] * 3, rel=1e-12)
    assert all(one["wait_s"] == pytest.approx(one["steady_wait_s"]) for one in told.draws.waits)


def test_a_seed_gives_its_steps_again_and_folding_changes_none() -> None:
    plan = named_plan("ddp", 4)
    first = draw(plan, draws=9, seed=3).step_s
    assert np.array_equal(first, draw(plan, draws=9, seed=3).step_s)
    assert first == pytest.approx(draw(plan, draws=9, seed=3, fold=False).step_s, rel=1e-12)
    assert not np.array_equal(first, draw(plan, draws=9, seed=4).step_s)


def test_ranks_that_differ_wait_and_the_slowest_sets_the_step() -> None:
    told = predict(TRACE, named_plan("ddp", 8), PLATFORM, draws=200, spread=WIDE)
    assert told.draws.expected_s > told.step_time_s * 1.02
    (data,) = told.draws.waits
    assert (data["group"], data["exchanges"] > 0) == ("data", True)
    assert data["wait_s"] > data["steady_wait_s"]
    shares = [one["share"] for one in told.draws.late]
    assert len(shares) == 8
    assert sum(shares) == pytest.approx(1.0, abs=0.02)


def test_what_is_new_in_each_operator_averages_out_but_not_between_exchanges() -> None:
    """Tensor-parallel ranks meet after a few operators: they lose what one rank alone does not."""
    noise, steady = Spread(operator_log=0.3), Spread()
    gains = []
    for plan in (named_plan("single", 1), named_plan("tp", 2)):
        drawn, told = (
            predict(TRACE, plan, PLATFORM, draws=20, spread=one, batch=8).draws.step_s
            for one in (noise, steady)
        )
        gains.append(drawn.mean() / told.mean() - 1)
        assert len(set(drawn.tolist())) == 20
    assert abs(gains[0]) < gains[1] / 3


def test_stages_of_a_replica_share_its_micro_batches() -> None:
    """Only the spread of micro-batches: a pipeline without replicas has no rank that differs from others."""
    plan = make_plan(pipeline=2, micro_batches=1, schedule="gpipe")
    told = predict(TRACE, plan, PLATFORM, draws=40, spread=Spread(micro_batch_log=0.1), batch=8)
    step = predict(TRACE, plan, PLATFORM, draws=40, spread=Spread(step_log=0.1), batch=8)
    # One micro-batch in all passes spreads the step as a factor on the whole step does.
    assert np.log(told.draws.step_s).std() == pytest.approx(
        np.log(step.draws.step_s).std(), rel=0.5
    )


def test_two_plans_are_compared_draw_by_draw() -> None:
    ours = draw(make_plan(data=4), draws=50, seed=1)
    slow = draw(make_plan(data=4), draws=50, seed=1, slow_ranks=[(0, 2.0)])
    assert (ours.beats(slow), slow.beats(ours), ours.beats(ours)) == (1.0, 0.0, 0.5)
    with pytest.raises(InputError, match="drawn apart"):
        ours.beats(draw(make_plan(data=4), draws=50, seed=2))


def test_the_command_draws_what_python_draws_and_nothing_without(capsys) -> None:
    words = ["simulate", TRACE, "--plan", "ddp", "--ranks", "4", "--platform", PLATFORM]
    assert main([*words, "--draws", "20", "--seed", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["draws"]
        == predict(TRACE, named_plan("ddp", 4), PLATFORM, draws=20, seed=5).draws.to_dict()
    )
    assert main([*words, "--draws", "20"]) == 0
    text = capsys.readouterr().out
    assert "drawn" in text
    assert "of its exchanges" in text
    assert main([*words, "--json"]) == 0
    assert "draws" not in json.loads(capsys.readouterr().out)
    assert main([*words, "--draws", "-1"]) == 2
