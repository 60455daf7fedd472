"""What was aimed at on nanotron's runs: each line counts every case, and README shows the same lines.

Odds of survival: the fit finds what made the ends, a model is judged without its own, tables count every case.

Megatron-Bridge's pages: rows read, plans as the rows say, scores; refused rows keep their reason.
"""

import html
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from page_numbers import STEPS, SURVIVAL, describe_clusters
from trioflow.base.errors import InputError, TableError
from trioflow.parallel.memory import peak as shipped
from trioflow.parallel.memory.peak import Survival
from trioflow.tables import write_table
from trioflow_evaluation.clusters import bridge
from trioflow_evaluation.clusters import scores as survival
from trioflow_evaluation.clusters.bridge import Rate, cut_stages, judge_rates, plan_rate, read_rates
from trioflow_evaluation.clusters.page import (
    CAREFUL,
    build_bridge_page,
    describe_causes,
    judge_aims,
    render_aims,
    score_intervals,
    score_rates,
    write_degrees,
    write_rates_table,
)
from trioflow_evaluation.clusters.scores import (
    BEFORE,
    FAILED,
    FITTED,
    RAN,
    find_odds,
    list_needs,
    mark_crowded,
    score_chances,
    score_steps,
)
from trioflow_evaluation.evaluate import Reached
from trioflow_evaluation.tables import CLUSTER_RATES

pytest.importorskip("sklearn")

GIB = 2**30


def make_steps() -> pd.DataFrame:
    """Six runs in two cells: right, 20 % and 60 % off on one node, refused and 10 % off on four; one on two to fit on."""
    rows = [
        # nodes, tensor, measured, predicted, mfu
        (1, 1, 1.0, 1.0, 0.4),
        (1, 2, 2.0, 2.4, 0.3),
        (1, 4, 5.0, 2.0, 0.05),
        (4, 1, 1.0, None, 0.2),
        (4, 2, 2.0, 1.8, 0.2),
        (4, 4, 4.0, 4.4, 0.09),
        (2, 1, 1.0, 1.5, 0.3),
    ]
    cases = pd.DataFrame(rows, columns=["nodes", "tensor", "measured_s", "predicted_s", "mfu"])
    same = {
        "parameters": 1.34,
        "data": 1,
        "pipeline": 1,
        "zero": 0,
        "micro_batch": 1,
        "accumulate": 4,
        "stages": 1,
        "network": "fast",
    }
    ends = {"low_s": cases["predicted_s"] * 0.95, "high_s": cases["predicted_s"] * 1.05}
    fitted = cases["nodes"].eq(2).map({True: FITTED, False: RAN})
    return cases.assign(**same, **ends, set=fitted)


def make_memory() -> pd.DataFrame:
    """Three runs, one of which no card should hold, two that ran out of memory, and two that failed otherwise."""
    rows = [
        (RAN, "Success", 10, 10.2, 12),
        (RAN, "Success", 10, 12, 90),
        (FITTED, "Success", 20, 20, 30),
        (FAILED, "OOM", None, 90, 95),
        (FAILED, "OOM", None, 9, 9),
        (FAILED, "Other", None, 9, 9),
        (FAILED, "Other", None, 90, 99),
    ]
    names = ["set", "status", "measured_bytes", "reserved_bytes", "fullest_bytes"]
    cases = pd.DataFrame(rows, columns=names)
    for name in names[2:]:
        cases[name] = cases[name] * GIB
    degrees = {"nodes": 1, "tensor": [1, 2, 4, 1, 2, 4, 8], "data": 1, "pipeline": 1, "zero": 0}
    return cases.assign(
        parameters=1.34,
        **degrees,
        micro_batch=1,
        accumulate=4,
        allocated_bytes=cases["reserved_bytes"],
        fullest_reserved_bytes=cases["fullest_bytes"],
        update_bytes=GIB,
        measured_update_bytes=1.25 * GIB,
    )


@pytest.fixture(scope="module")
def lines() -> dict[str, Reached]:
    return {line.what: line for line in judge_aims(make_memory(), make_steps())}


def test_every_line_counts_all_cases(lines: dict[str, Reached]) -> None:
    assert lines["step, median error: tensor groups inside a node"].cases == 6
    assert lines["step, median error: tensor groups inside a node"].value == pytest.approx(0.15)
    assert lines["step, median error: MFU above 10 %"].cases == 4
    assert lines["step, median error: all of these"].cases == 6
    assert lines["steps within 10 %"].value == pytest.approx(2 / 6), "a refused run is missed"
    assert lines["measured step inside the 80 % interval"].value == pytest.approx(1 / 6)
    ends = lines["runs whose odds say rightly whether they survive, their model left out"]
    assert ends.cases == 5 and ends.value == pytest.approx(3 / 5) and not ends.reached
    reserved = lines["reserved peak, median error"]
    assert reserved.cases == 2 and reserved.value == pytest.approx(0.11), "without the run to fit on"
    assert lines["allocated peak of the update, median error"].value == pytest.approx(0.2)


def test_an_aim_may_be_a_least(lines: dict[str, Reached]) -> None:
    order = lines["pairs of a model's runs on as many nodes of one network in the measured order"]
    assert order.write_aim() == "at least 85 %"
    assert order.reached == (order.value >= 0.85)
    assert Reached("", 1, 0.9, 0.85, more=True).reached and not Reached("", 1, 0.9, 0.85).reached
    choice = lines["throughput lost by the plan predicted to be fastest, mean of cells"]
    assert choice.cases == 2
    assert set(choice.others or {}) == {"rule", "constant MFU"}


def test_intervals_are_judged_beside_one_for_all() -> None:
    """Of two models each one's naive interval is the other's error; a refused run is outside."""
    cases = pd.concat([make_steps().assign(predicted_s=1.0), make_steps().assign(parameters=80.0)])
    cases = cases.assign(low_s=cases["measured_s"] / 2, high_s=cases["measured_s"] * 2)
    found = score_intervals(cases).set_index("group")
    assert found.loc["all runs", "ours_covered"] == 1.0
    assert found.loc["all runs", "ours_width"] == pytest.approx(4.0)
    assert found.loc["all runs", "ours_score"] == pytest.approx(math.log(4.0))
    assert found.loc["all runs", "naive_covered"] < 11 / 12 and found.loc["on one node", "runs"] == 6
    missed = score_intervals(cases.assign(low_s=cases["measured_s"] * 2, high_s=cases["measured_s"] * 4))
    assert missed["ours_covered"].eq(0).all()
    assert missed.iloc[0]["ours_score"] == pytest.approx(math.log(2.0) * (1 + 10))


def test_what_putting_unlikely_plans_behind_loses_is_a_line_of_its_own() -> None:
    """The second run's allocator is predicted to hold 90 GB: it is known by its degrees, and the careful pass it over."""
    cases = make_steps().assign(predicted_s=[1.5, 1.0, 2.0, 1.0, 2.0, 4.0, 1.0])
    marked = mark_crowded(make_memory(), cases)
    assert marked["crowded"].tolist() == [False, True, *[False] * 5]
    bare, careful = ({line.what: line.value for line in judge_aims(None, runs)} for runs in (cases, marked))
    fastest = "throughput lost by the plan predicted to be fastest, mean of cells"
    assert bare[fastest] == careful[fastest] == pytest.approx(0.5 / 2)
    assert careful[f"the same, {CAREFUL}"] == 0.0 and f"the same, {CAREFUL}" not in bare


def test_probabilities_are_of_runs_that_somebody_could_choose_among() -> None:
    found = score_chances(make_steps().dropna())
    assert found["pairs"].sum() == 3 + 1 and (found["low"] >= 0.5).all()
    one = make_steps().dropna().assign(network=list("abcdef"))
    assert score_chances(one).empty, "each on a network of its own"


def test_pipelines_before_their_fix_are_reported_and_judged_with_nothing() -> None:
    cases = make_steps()
    broken = cases.assign(set=BEFORE, predicted_s=0.01, low_s=0.0, high_s=0.02)
    alone, both = ({one.what: one for one in judge_aims(None, rows)} for rows in (cases, pd.concat([cases, broken])))
    assert both.pop(f"step, median error: {BEFORE}").value > 0.9
    assert both == alone


def test_fitted_runs_stand_apart() -> None:
    groups = score_steps(make_steps()).set_index("group")["cases"]
    assert groups[FITTED] == 1 and groups["on one node"] == 3 and groups["all others"] == 6
    assert BEFORE not in groups


def test_readme_and_pages_hold_the_same_lines(lines: dict[str, Reached]) -> None:
    result = describe_clusters(list(lines.values()), "Why.")
    ((_, headline),) = result.lines
    assert [row[1] for row in result.rows] == [str(lines[what].cases) for what in (STEPS, SURVIVAL)]
    page = render_aims(list(lines.values()))
    for line in lines.values():
        assert html.escape(line.what) in page
        bold = f"**{line.write_value()}**" if line.reached else line.write_value()
        assert f"| {line.what} | {line.cases} | {line.write_aim()} | {bold} |" in result.body
        assert not line.headline or f"{line.headline} {bold}" in headline
    assert any(line.reached for line in lines.values()) and result.body.endswith("\n\nWhy.")


def test_causes_name_each_way_to_lie_on_nodes() -> None:
    cases = make_steps().assign(pipeline=[1, 1, 1, 1, 1, 2, 1], tensor=[1, 1, 1, 16, 2, 4, 1])
    text = describe_causes(pd.concat([cases, cases[:1].assign(set=BEFORE, predicted_s=0.1)]))
    assert f"{BEFORE} (their cause is known, nothing here models it) 90.0" in text
    assert "on one node 20.0" in text and "pipelines over nodes 10.0" in text
    assert "tensor groups beyond a node" in text


TRUE = Survival(0.2, 0.08, 0.4, 0.02)


def make_cases(count: int = 2000) -> pd.DataFrame:
    """Runs of two models whose ends are drawn by ``TRUE``."""
    random = np.random.default_rng(1)
    peak = 84e9 * np.exp(random.normal(-0.25, 0.35, count))
    cases = pd.DataFrame(
        {
            "parameters": np.where(np.arange(count) % 2, 1.34, 8.86),
            "data": 2,
            "tensor": 2,
            "pipeline": 1,
            "fullest_bytes": peak,
            "fullest_reserved_bytes": peak * (1 + random.uniform(0, 0.5, count)),
            "measured_bytes": 10.0,
            "reserved_bytes": 9.0,
            "measured_update_bytes": 10.0,
            "update_bytes": 10.0,
            "set": survival.RAN,
        }
    )
    survived = random.random(count) < find_odds(list_needs(cases), TRUE)
    return cases.assign(status=np.where(survived, "Success", "OOM"))


def test_the_fit_finds_what_made_the_ends() -> None:
    found = survival.fit_survival(survival.choose_cases(make_cases()))
    assert vars(found) == pytest.approx(vars(TRUE), abs=0.05)


def test_each_model_is_judged_by_what_was_fitted_without_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "survival.tsv"
    file.write_text("# what it is\nleft_out\truns\tfailed\tlocation_log\tscale_log\tkept_share\tlapse\n")
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
    assert judged.loc[own.index, "odds"].to_numpy() == pytest.approx(find_odds(list_needs(own), without), abs=1e-2)
    scores = survival.score_survival(judged)
    assert scores["survived"].iloc[0] + scores["failed"].iloc[0] == 600
    assert scores["accuracy"].iloc[0] > 0.8 and scores["brier"].iloc[0] < 0.12
    assert scores["reserved"].tolist() == pytest.approx([0.1] * 3) and scores["update"].eq(0).all()
    # Pipelines before their fix have a row of their own, and their sizes are in no other.
    apart = judged.assign(set=np.where(judged["parameters"] == 1.34, survival.BEFORE, survival.RAN))
    groups = survival.score_survival(apart).set_index("group")
    sized, ran = groups["sized"], groups["survived"]
    assert sized[survival.BEFORE] == ran["nanotron-1.34b"] and sized["nanotron-1.34b"] == 0
    assert sized["all"] == sized["nanotron-8.86b"] == ran["nanotron-8.86b"]
    bins = survival.tabulate_reliability(judged)
    assert bins["runs"].sum() == 600 and (bins["odds"] - bins["survived"]).abs().max() < 0.25
    text = survival.write_survival_scores(judged)
    assert text.startswith("| model") and "nanotron-1.34b" in text
    shipped.load_survival.cache_clear()


NEWER = """# Performance
## 30.01 NeMo Container
### Pre-Training Performance
#### Model: LLAMA3_8B
| System | #-GPUs | Precision | GBS | MBS | Sequence Length | TP | PP | CP | VP | EP | Tokens / sec / GPU | TF |
|--------|--------|-----------|-----|-----|-----|----|----|----|----|----|------|-----|
| DGX-GB300 | 8 | MXFP8 | 128 | 4 | 8192 | 1 | 1 | 1 | n/a | n/a | 9 | 9 |
| DGX-H100 | 16 | FP8 | 128 | 1 | 8192 | 2 | 4 | 1 | 2 | n/a | 1200 | 700[^note] |
"""
OLDER = """## 29.01 NeMo Container
### Pre-Training Performance
#### System: DGX-H100
| Model | #-GPUs | GBS | MBS | Sequence Length | FSDP | TP | PP | CP | VP | EP | GA | Tokens / sec / GPU | TF |
|-------|--------|-----|-----|----|------|----|----|----|----|----|----|----|----|
| LLAMA3_8B | 8 | 128 | 1 | 8192 | 8 | 1 | 1 | 1 | n/a | 1 | 16 | 1000 (900) | 7 |
| Unheard_Of (tokendrop) | 8 | 128 | 1 | 8192 | 0 | 1 | 1 | 1 | n/a | 1 | 16 | 77 | 7 |
"""
SPLIT = Rate("30.01", "Pre-Training", "LLAMA3_8B", "FP8", 16, 128, 1, 8192, 0, 2, 4, 1, 2, 1, 1200)
SHARDED = Rate("29.01", "Pre-Training", "LLAMA3_8B", "", 8, 128, 1, 8192, 8, 1, 1, 1, 1, 1, 1000)


@pytest.fixture
def rates(tmp_path):
    files = tmp_path / "new.md", tmp_path / "old.md"
    for file, text in zip(files, (NEWER, OLDER), strict=True):
        file.write_text(text)
    return read_rates(files)


@pytest.fixture
def cases(rates, monkeypatch):
    asked = []

    def predict(rate):
        asked.append(rate)
        if rate.model != "LLAMA3_8B":
            raise InputError("no such network is built")
        step_s = rate.batch * rate.sequence / rate.gpus / (1100 if rate.fsdp else 900)
        return pd.Series([step_s, step_s / 1.2, step_s * 1.2]).to_numpy()

    monkeypatch.setattr(bridge, "predict_step_s", predict)
    found = judge_rates([*rates, replace(rates[0], release="28.01", measured_tokens_per_s=1000)])
    assert len(asked) == 3  # what releases share is predicted once
    return found


def test_rows_of_h100_are_read_from_both_kinds_of_page(rates):
    assert rates[:2] == [SPLIT, SHARDED]
    assert [rate.model for rate in rates] == ["LLAMA3_8B", "LLAMA3_8B", "Unheard_Of (tokendrop)"]


@pytest.mark.parametrize("text", ["# nothing", NEWER.replace("| 16 |", "| many |")])
def test_a_page_of_another_form_is_refused(tmp_path, text):
    file = tmp_path / "page.md"
    file.write_text(text)
    with pytest.raises(TableError):
        read_rates([file])


def test_a_plan_has_the_degrees_that_its_row_says():
    plan = plan_rate(SPLIT, 2, 64)
    assert (plan.data, plan.tensor, plan.pipeline, plan.stages_per_rank) == (2, 2, 4, 2)
    assert (plan.schedule, plan.sharding, plan.micro_batches) == ("interleaved", "distributed", 64)
    assert plan.sequence_parallel and plan.vocabulary_parallel
    overlaps = [
        plan_rate(replace(SPLIT, model=name), 2, 64).tensor_overlap
        for name in ("LLAMA3_70B", "Qwen3_235B_a22B (tokendrop)", "Unheard_Of")
    ]
    assert overlaps == ["products", "backward", "auto"]
    assert plan_rate(SHARDED, 8, 16).tensor_overlap == "auto"  # tensors are not cut
    experts = plan_rate(replace(SPLIT, expert=4), 2, 64)
    assert (experts.expert, experts.expert_cut) == (4, 1)
    handed_on = plan_rate(replace(SPLIT, model="DeepSeekV3 (dropless)", expert=4), 2, 64)
    assert (experts.expert_domain, handed_on.expert_domain, handed_on.expert_hops) == (0, 8, (1, 4))
    assert plan_rate(replace(SPLIT, model="DeepSeekV3"), 2, 64).expert_domain == 0
    qwen = replace(SPLIT, model="Qwen3_235B_a22B", expert=4)
    assert plan_rate(qwen, 2, 64).expert_overlap and not handed_on.expert_overlap
    assert not plan_rate(replace(qwen, stages_per_rank=1), 2, 64).expert_overlap
    sharded = plan_rate(SHARDED, 8, 16)
    assert sharded.shards_units and sharded.accumulate == 16


def test_embedding_and_loss_count_where_blocks_alone_do_not_divide():
    units = ["first", *(f"b{i}" for i in range(6)), "last"]
    assert [len(stage) for stage in cut_stages(units, 3)] == [3, 2, 3]
    assert [len(stage) for stage in cut_stages(units, 4)] == [2, 2, 2, 2]
    assert cut_stages(units, 1) is None
    assert [len(stage) for stage in cut_stages(units, 5)] == [2, 2, 2, 1, 1]
    with pytest.raises(InputError, match="6 blocks"):
        cut_stages(units, 9)
    deep = cut_stages(["first", *(f"b{i}" for i in range(61)), "last"], 32)
    assert [deep[0], deep[-1], {len(stage) for stage in deep[:-1]}] == [["first", "b0"], ["last"], {2}]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "Unheard_Of"}, "no such network"),
        ({"training": "LoRA"}, "adapters"),
        ({"batch": 100}, "do not divide"),
    ],
)
def test_what_is_not_predicted_says_why(changes, why):
    found = judge_rates([replace(SPLIT, **changes)]).iloc[0]
    assert why in found["refused"]
    assert pd.isna(found["predicted_tokens_per_s"])


def test_scores_count_every_row_and_pairs_by_what_was_asked(cases, tmp_path):
    assert cases["predicted_tokens_per_s"].tolist()[:2] == pytest.approx([900, 1100])
    scores = score_rates(cases).set_index("group")
    everything = scores.loc["all"]
    assert (everything["cases"], everything["predicted"]) == (4, 3)
    assert everything["median_error"] == pytest.approx(0.1)  # 25, 10 and 10 %
    assert everything["covered"] == pytest.approx(2 / 3)
    # Measured 1,100 in the mean of two releases against 1,000, and predicted 900 against 1,100.
    assert everything["in_order"] == 0
    assert pd.isna(scores.loc["Unheard_Of", "median_error"])
    path, page = tmp_path / "rates.parquet", tmp_path / "bridge.html"
    write_table(cases, "cluster_rates", path, {}, CLUSTER_RATES)
    build_bridge_page(path, page)
    text = page.read_text()
    assert "no such network is built" in text and "1,200" in text
    assert "| all | 4 | 3 |" in write_rates_table(cases)


def test_degrees_are_written_in_words():
    assert write_degrees(vars(SPLIT)) == "tensor 2, pipeline 4, stages a rank 2"
