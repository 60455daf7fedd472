"""The largest batch and sequence that fit: found exactly, in few steps, and told with the next one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trioflow.base.errors import InputError
from trioflow.cli import main
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import load_platform
from trioflow.parallel.memory.survival import DOUBTED, LIKELY
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import prepare_step
from trioflow.prediction.fitting import find_largest, find_most
from trioflow.prediction.options import Options

TRACE = "gpt2-tiny-b8"
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
    return replace(platform, device=replace(platform.device, memory_bytes=round(memory_bytes)))


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    plan, platform = make_plan(2, accumulate=3), small("dgx-a100", 2, 3e9)
    told = find_largest(TRACE, plan, platform, "batch")
    sizes = [told[name]["batch"] for name in ("roomy", "fits", "next")]
    assert sizes[0] < sizes[1] == sizes[2] - 6 and all(size % 6 == 0 for size in sizes)
    steps = [prepare_step(TRACE, plan, platform, batch=size) for size in sizes]
    assert [step.fits_memory for step in steps] == [True, True, False]
    odds = [told[name]["fit_probability"] for name in ("roomy", "fits", "next")]
    assert odds[0] >= DOUBTED > odds[1] >= LIKELY > odds[2]
    one_more = prepare_step(TRACE, plan, platform, batch=sizes[0] + 6)
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
        step = prepare_step(str(tmp_path), plan, platform, batch=2, options=options)
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
