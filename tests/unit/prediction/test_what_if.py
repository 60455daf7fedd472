"""What a faster network, slower operators and a slow rank make of a step."""

import pytest
from trioflow.cli.main import main
from trioflow.parallel.plan import named_plan
from trioflow.prediction.answer import Prediction
from trioflow.prediction.assembly import predict

TRACE, PLATFORM = "gpt2-tiny-b8", "dgx-h100"


def ask(**options: object) -> Prediction:
    return predict(TRACE, named_plan("ddp", 4), PLATFORM, interval=False, **options)  # type: ignore[arg-type]


def test_operators_take_their_factor_whether_ranks_are_folded_or_not() -> None:
    plain = ask()
    tasks = plain.task_graph.tasks
    meant = (
        (tasks["kind"] == "compute") & tasks["name"].str.endswith("::linear") & (tasks["rank"] == 0)
    )
    more_s = float(tasks["duration_s"][meant].sum())
    assert more_s > 0
    for fold in (True, False):
        scaled = ask(operator_scales=[("linear", 2.0)], fold=fold)
        assert scaled.compute_s == pytest.approx(plain.compute_s + more_s)
        assert "what if: operators linear take 2 times as long" in scaled.warnings
    undone = ask(operator_scales=[("*", 2.0), ("*", 0.5)])
    assert undone.compute_s == pytest.approx(plain.compute_s)


def test_the_others_wait_for_a_slow_rank() -> None:
    plain, slow = ask(), ask(slow_ranks=[(3, 2.0)])
    assert slow.compute_s == pytest.approx(2 * plain.compute_s)
    assert slow.step_time_s > 1.9 * plain.step_time_s
    by_rank = slow.breakdown("rank").set_index("name")["compute_s"]
    assert by_rank["3"] == pytest.approx(2 * by_rank["0"])


def test_the_network_is_as_many_times_as_fast(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", TRACE, "--plan", "ddp", "--ranks", "4", "--platform", PLATFORM]
    assert ask(communication_scale=0.5).communication_s == pytest.approx(ask().communication_s / 2)
    assert main([*words, "--scale-network", "2"]) == 0
    assert "what if: messages take 0.5 times as long" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--scale-operator", "Norm", "2"], "did you mean '*norm*', which aten::"),
        (
            ["--scale-operator", "conv9d", "2"],
            "no operator of the step has such a name; the step has aten::",
        ),
        (["--scale-operator", "mm", "two"], "'two' is not a number"),
        (["--slow-rank", "4", "2"], "the plan has ranks 0 to 3"),
        (["--slow-rank", "1", "0"], "--slow-rank 1: the factor 0 is not positive"),
        (["--scale-network", "nan"], "--scale-network: the factor nan is not positive"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = ["simulate", TRACE, "--plan", "ddp", "--ranks", "4", "--platform", PLATFORM]
    assert main([*step, *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_processor_s_times_are_not_a_gpu_s() -> None:
    """The shipped trace's step takes 0.4 s on one core."""
    answer = ask()
    assert answer.step_time_s < 0.1
    assert answer.confidence == "extrapolated"
    assert any("those of a processor" in warning for warning in answer.warnings)
