"""Step times out of logs of training: a line of each framework as its source writes it, with numbers of our own."""

from pathlib import Path

import pytest
from trioflow.base.errors import InputError
from trioflow.formats.logs import read_logged_steps

MEGATRON = (
    " [2026-01-01 00:00:00] iteration {:8d}/    5000 | consumed samples:          128 | elapsed time per iteration (ms): {} |"
    " throughput per GPU (TFLOP/s/GPU): 80.2 | learning rate: 6.9E-08 | global batch size:   128 | lm loss: 1.0E+01 |"
)
NANOTRON = "[INFO|DP=0|PP=0|TP=0|ip-1]: iteration: 2 / 20 | consumed_tokens: 2.1M | {}time_per_iteration_ms: {} | tokens_per_sec: 213K | lr: 3e-4"


@pytest.mark.parametrize(
    ("text", "step_s"),
    [
        ("\n".join(MEGATRON.format(i, t) for i, t in enumerate((9000.5, 500.0, 510.0, 490.0))), 0.5),
        (NANOTRON.format("elapsed_", "1.23K"), 1.23),
        (NANOTRON.format("", "987"), 0.987),
        ("{'train_runtime': 44.1, 'train_samples_per_second': 435.8, 'train_steps_per_second': 8.0}", 0.125),
        ("step 10 loss 3.1 time 0.532 s\nsaved a checkpoint of step 10 in 12.1 s", 0.532),
        ("Iteration 3/9: 250 ms", 0.25),
        (" 10%|# | 10/100 [00:12<01:50,  1.25s/it]\r 11%| | 11/100 [00:13<01:49, 1.25s/it]", 1.25),
        (" 10%|# | 10/100 [00:12<01:50,  4.00it/s]", 0.25),
    ],
)
def test_each_framework_writes_its_steps_in_its_own_words(tmp_path: Path, text: str, step_s: float) -> None:
    (tmp_path / "run.log").write_text(f"NCCL version 2.21.5\n{text}\nlast words\n")
    assert read_logged_steps(tmp_path / "run.log").median_s == pytest.approx(step_s)


def test_torchtitan_counts_tokens_of_a_gpu_and_says_what_it_reserved(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(
        "[rank0]:INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.1 \x1b[38m memory: 38.00GiB(47.5%)  "
        "\x1b[34mtps: 8,192  \x1b[36mtflops: 412.00  \x1b[35mmfu: 41.6%\x1b[39m\n"
    )
    steps = read_logged_steps(path)
    assert steps.reserved_bytes == 38 * 2**30
    assert steps.of_tokens(16384).median_s == pytest.approx(2.0)
    with pytest.raises(InputError, match="the predicted step has none"):
        steps.of_tokens(None)


def test_a_global_batch_is_kept_and_a_log_without_steps_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text(MEGATRON.format(1, 500.0))
    assert read_logged_steps(path).batch == 128
    path.write_text("hello\n")
    with pytest.raises(InputError, match="no line tells the time of a step"):
        read_logged_steps(path)
