from __future__ import annotations

import pytest
from trioflow.report.experiment import choose_anchor

SESSION = {
    "anchors": {
        "4": {"traced_step_s": 1.0, "single": 1.1, "busy": [1.2, 1.3]},
        "16": {"traced_step_s": 3.0, "single": 1.5, "busy": [1.6, 1.8]},
    }
}


def test_one_rank_is_anchored_on_the_quiet_step():
    assert choose_anchor(SESSION, 1, {"4": 1.0}) == 1.1


def test_several_ranks_are_anchored_on_their_own_busy_steps():
    assert choose_anchor(SESSION, 2, {"16": 1.0}) == [1.6, 1.8]


def test_between_two_traces_the_anchors_mix_by_their_share_of_time():
    assert choose_anchor(SESSION, 1, {"4": 0.25, "16": 0.75}) == pytest.approx(1.4)
    assert choose_anchor(SESSION, 2, {"4": 0.5, "16": 0.5}) == pytest.approx([1.4, 1.55])
