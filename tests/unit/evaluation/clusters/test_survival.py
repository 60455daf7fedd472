"""Odds of survival: the fit finds what made the ends, a model is judged without its own, tables count every case."""

import numpy as np
import pandas as pd
import pytest
from trioflow.parallel.memory import survival as shipped
from trioflow.parallel.memory.survival import Survival
from trioflow_evaluation.clusters import scores as survival
from trioflow_evaluation.clusters.scores import find_odds, list_needs

TRUE = Survival(0.2, 0.08, 0.4, 0.02)


def make_cases(count: int = 2000) -> pd.DataFrame:
    """Runs of two models whose ends are drawn by ``TRUE``."""
    random = np.random.default_rng(1)
    peak = 84e9 * np.exp(random.normal(-0.25, 0.35, count))
    cases = pd.DataFrame({
        "parameters": np.where(np.arange(count) % 2, 1.34, 8.86), "data": 2, "tensor": 2, "pipeline": 1,
        "fullest_bytes": peak, "fullest_reserved_bytes": peak * (1 + random.uniform(0, 0.5, count)),
        "measured_bytes": 10.0, "reserved_bytes": 9.0, "measured_update_bytes": 10.0, "update_bytes": 10.0,
    })  # fmt: skip
    survived = random.random(count) < find_odds(list_needs(cases), TRUE)
    return cases.assign(status=np.where(survived, "Success", "OOM"))


def test_the_fit_finds_what_made_the_ends() -> None:
    found = survival.fit_survival(survival.choose_cases(make_cases()))
    assert vars(found) == pytest.approx(vars(TRUE), abs=0.05)


def test_each_model_is_judged_by_what_was_fitted_without_it(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "survival.tsv"
    file.write_text(
        "# what it is\nleft_out\truns\tfailed\tlocation_log\tscale_log\tkept_share\tlapse\n"
    )
    for module in (survival, shipped):
        monkeypatch.setattr(module, "SURVIVAL", file)
    shipped.load_survival.cache_clear()
    cases = survival.choose_cases(make_cases(600))
    other = make_cases(3).assign(status="Other")
    assert len(survival.choose_cases(pd.concat([cases, other]))) == 600
    survival.write_survival(cases)
    judged = survival.judge_survival(cases)
    without = survival.fit_survival(cases[cases["parameters"] == 8.86])
    own = cases[cases["parameters"] == 1.34]
    assert judged.loc[own.index, "odds"].to_numpy() == pytest.approx(find_odds(list_needs(own), without), abs=1e-2)  # fmt: skip
    scores = survival.score_survival(judged)
    assert scores["survived"].iloc[0] + scores["failed"].iloc[0] == 600
    assert scores["accuracy"].iloc[0] > 0.8 and scores["brier"].iloc[0] < 0.12
    assert scores["reserved"].tolist() == pytest.approx([0.1] * 3) and scores["update"].eq(0).all()
    bins = survival.tabulate_reliability(judged)
    assert bins["runs"].sum() == 600 and (bins["odds"] - bins["survived"]).abs().max() < 0.25
    text = survival.write_survival_scores(judged)
    assert text.startswith("| model") and "nanotron-1.34b" in text
    shipped.load_survival.cache_clear()
