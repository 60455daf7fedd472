"""No damage to a trace's file ends in anything but a sentence or a trace that can be kept."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from fuzz import SHARE
from mutation_report import REASONS, count, read_table, run_all
from mutation_runs import RUN
from mutation_sources import FEW, SHARES, all_sources
from mutations import CONTRADICTED, PLAUSIBLE, REFUSED, WARNED

MIRROR = os.environ.get("TRIOFLOW_DATA_MIRROR")
BUDGET = max(1, int(SHARE))
"""How many times the usual number of seeds the fast tier runs on the small sources, where every kind is drawn."""
STRIDE = max(1, round(2 / max(SHARE, 0.25)))
"""The slow tier runs every other seed of the table's where ``TRIOFLOW_FUZZ`` is 1, all where it is 2."""
SURE = 12
"""A kind that is drawn so many times the stride in all seeds is drawn among every stride-th, too."""
CAPTURED_MARGIN, CAPTURED_SPARE = 1.5, 5
"""A capture's times differ from session to session, and with them what fits between its calls."""


@pytest.fixture(scope="module")
def captures(raw_cnn, raw_transformer):
    return {"small CNN": raw_cnn, "small transformer": raw_transformer}


def run(sources, shares, folder, stride=1):
    outcomes, escapes = run_all(sources, shares, folder / "runs", stride=stride)
    assert not escapes, "\n".join(escapes)
    wrong = [str(one) for _, one in outcomes if one.verdict == CONTRADICTED]
    assert not wrong, "\n".join(wrong)
    silent = {one.kind for _, one in outcomes if one.verdict == PLAUSIBLE}
    assert silent <= set(REASONS), f"silent without a reason: {silent - set(REASONS)}"
    return outcomes


def test_damage_ends_in_a_sentence_or_in_a_trace_that_can_be_kept(captures, tmp_path):
    mirror = Path(MIRROR) if MIRROR else None
    sources = all_sources({"small CNN": captures["small CNN"]}, mirror)
    shares = {
        name: count * BUDGET if name.startswith("small") else max(1, round(count * SHARE))
        for name, count in FEW.items()
    }
    outcomes = run(sources, shares, tmp_path)
    counts = count(outcomes)
    refused = sum(verdicts[REFUSED] for verdicts in counts.values())
    assert 0.3 * len(outcomes) < refused < 0.9 * len(outcomes)
    assert sum(verdicts[WARNED] for verdicts in counts.values()) > 5
    assert {kind for kinds in RUN.values() for kind in kinds} <= {kind for _, _, kind in counts}


@pytest.mark.slow
@pytest.mark.published
def test_mutations_of_all_real_traces_are_as_silent_as_measured(captures, tmp_path):
    if not MIRROR:
        pytest.skip("TRIOFLOW_DATA_MIRROR is not set: the public data is not at hand")
    sources = all_sources(captures, Path(MIRROR))
    outcomes = run(sources, SHARES, tmp_path, STRIDE)
    assert sum(group != "small" for group, _ in outcomes) >= 5000 / STRIDE
    measured, more = read_table(), []
    ran, often = Counter(), Counter()
    for counts, found in ((measured, often), (count(outcomes), ran)):
        for (_, _, kind), verdicts in counts.items():
            found[kind] += verdicts.total()
    missing = [kind for kind, times in often.items() if times >= SURE * STRIDE and not ran[kind]]
    assert not missing, missing
    for (group, importer, kind), verdicts in count(outcomes).items():
        known = measured.get((group, importer, kind), {}).get(PLAUSIBLE, 0)
        if group == "captured":
            known = known * CAPTURED_MARGIN + CAPTURED_SPARE
        if verdicts[PLAUSIBLE] > known:
            more.append(f"{group}, {importer}, {kind}: {verdicts[PLAUSIBLE]}, measured {known:g}")
    assert not more, "\n".join(more)
