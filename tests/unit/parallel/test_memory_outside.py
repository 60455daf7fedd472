"""What a device holds that no framework's allocator hands out: context and communicators."""

from dataclasses import replace

import pytest
from trioflow.hardware.device_sheet import load_device
from trioflow.parallel.memory.peak import CONTEXT_BYTES, count_outside, count_plan_outside
from trioflow.parallel.memory.survival import LIKELY, load_survival
from trioflow.parallel.plan import make_plan
from trioflow.prediction.answer import describe_memory
from trioflow.prediction.assembly import predict


def test_each_group_has_a_communicator_and_a_processor_none_of_it() -> None:
    assert count_outside([]) == count_outside([1, 1]) == CONTEXT_BYTES
    pair, more = (count_outside([size]) - CONTEXT_BYTES for size in (2, 8))
    assert 0.3e9 < pair < more < 0.5e9 and count_outside([64]) == count_outside([8])
    assert count_outside([8, 4, 2]) == CONTEXT_BYTES + 2 * more + pair
    assert count_outside([8], "cpu") == 0 == count_plan_outside(make_plan(4), "cpu")
    plan = make_plan(8, 4, 2, "1f1b", 4)
    assert count_plan_outside(plan, "gpu") == count_outside([8, 4, 2])
    with_experts = count_plan_outside(replace(plan, expert=8), "gpu")
    assert with_experts - count_outside([8, 4, 2, 8]) > 3e9, (
        "an all-to-all has a link to every peer"
    )


def test_nanotron_s_fullest_failed_runs_left_room_for_it() -> None:
    """Of the playbook's failed runs the last logged 77.4 GiB: what a card has less than that is outside."""
    card = load_device("h100-sxm").usable_memory_bytes
    assert count_outside([2, 2, 2]) < card - 77.4 * 1024**3 < count_outside([8, 8, 8]) + 0.1e9


def test_the_verdict_counts_it_and_the_answer_shows_it() -> None:
    plan = make_plan(4)
    told = predict("gpt2-tiny-b8", plan, "dgx-a100")
    assert told.to_dict()["outside_bytes"] == count_outside([4])
    assert told.to_dict()["memory_bytes"] == load_device("a100-sxm4-80gb").usable_memory_bytes
    platform, survival, odds = told.step.platform, load_survival(), []
    for probability in (0.02, LIKELY - 0.01, LIKELY + 0.01, 0.95):
        share = survival.find_limit(probability, 1.0)
        room = round(told.step.needed_bytes / share + count_outside([4]))
        device = replace(platform.device, memory_bytes=room)
        step = replace(told.step, platform=replace(platform, device=device))
        assert step.fit_probability == pytest.approx(probability * (1 - survival.lapse), rel=1e-3)
        assert step.fits_memory is (probability > LIKELY)
        odds.append(step.fit_probability)
    assert odds == sorted(odds)
    text = describe_memory(80_000_000_000, 1_000_000_000, 80_990_000_000, 0.02)
    assert text == (
        "80 GB, with context and communicators 81 GB of 80.99 GB a rank: OUT OF MEMORY, 2 % likely to fit"
    )
    assert describe_memory(10**9, 0, 2 * 10**9, 0.97) == "1 GB of 2 GB a rank: 97 % likely to fit"
    assert describe_memory(0, 0, 1, 1e-9).endswith("less than 1 % likely to fit")
    assert describe_memory(0, 0, 10**9, None) == "not estimated"


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("h100-sxm", 84.9e9, 85.6e9),
        ("a100-sxm4-80gb", 84.9e9, 85.3e9),
        ("t4", 15.6e9, 16e9),
        ("a40", 47.5e9, 48e9),
    ],
)
def test_what_cards_report_is_what_their_memory_is(name: str, least: float, most: float) -> None:
    assert least < load_device(name).usable_memory_bytes < most
