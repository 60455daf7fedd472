"""Public measured steps on the data itself: what the data holds, what TrioSim printed, what is reached."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from judged import read_or_make
from mirror import find_public
from trioflow import tables
from trioflow.costmodel.uncertainty import load_band, load_residuals
from trioflow.datasets.catalogue import MODEL_TABLES, load_catalogue
from trioflow.parallel.plan import named_plan
from trioflow.report.errors import list_scaling, score_published
from trioflow.tables import PUBLISHED_CASES
from trioflow.trace.importers.triosim import read_triosim
from trioflow_evaluation.published.cases import SETS, load_published_rows, rows_of_set
from trioflow_evaluation.published.judge import (
    ANCHORS,
    RecordedStep,
    find_step_band,
    judge_anchored_steps,
    judge_cases,
    list_residuals,
    measure_band,
    predict_by_triosim,
    prepare_set,
    read_measured,
)

ROOT = Path(__file__).resolve().parents[2]
TABLE, IMPORTS = ROOT / "config/published.tsv", ROOT / "config/imports.tsv"
VGG13 = "sarchlab+triosim/sample_trace/trace2-h100-bs128/vgg13"
PARAMETER_BYTES, BATCH = 4 * 133_047_848, 128
"""torchvision's VGG-13: 133,047,848 parameters in fp32."""

PRINTED_MS = {
    "dp": {2: 102.226, 4: 102.226, 8: 102.226, 16: 102.226, 32: 102.226},
    "ddp": {1: 94.038, 2: 94.038, 4: 94.038, 8: 94.038, 16: 94.038, 32: 94.038},
    "tp": {2: 142.378, 8: 55.055, 16: 40.501, 32: 33.224},
    "gpipe": {1: 94.038, 2: 103.524, 4: 141.861},
}
"""What TrioSim's public code (3fb3c06) printed for this trace at its default 65 GB/s [ms]."""
PRINTED_OTHERWISE_MS = {
    ("tp", 4): (84.082, 84.163),
    ("gpipe", 8): (190.092, 187.918),
    ("gpipe", 16): (293.851, 291.402),
    ("gpipe", 32): (468.810, 466.903),
}
"""What it printed and what these rules say: where the optimizer's operators make stages of their own, it adds 0.4 to 1.1 %."""


@pytest.fixture(scope="module")
def mirror(mirror: Path) -> Path:
    find_public(MODEL_TABLES)
    return mirror


@pytest.fixture(scope="module")
def four_gpus(mirror: Path) -> pd.DataFrame:
    nothing = pd.DataFrame(columns=ANCHORS.names)
    return judge_cases(*prepare_set("h100-4gpu", mirror, IMPORTS, TABLE, nothing))


def read_triosim_step(folder: Path) -> RecordedStep:
    """Return what the rules read of a trace in TrioSim's own format, with its own tags and sizes."""
    operators = read_triosim(folder)
    sizes = [sum(one.elements * one.elem_bytes for one in row.outputs) for row in operators]
    return RecordedStep(
        np.array([row.busy_us for row in operators], np.float64) * 1e-6,
        np.array(sizes, np.float64),
        np.array([row.split for row in operators]),
        np.array([row.stage == "forward" for row in operators]),
        float(PARAMETER_BYTES),
        BATCH,
    )


def predict_printed(mirror: Path, name: str, ranks: int) -> float | None:
    step = read_triosim_step(mirror / VGG13)
    plan = named_plan("ddp" if name == "dp" else name, ranks, 1 if name == "gpipe" else None)
    if ranks == 1:
        plan = named_plan("single", 1)
    return predict_by_triosim(step, plan, BATCH * plan.data, overlap=name != "dp")


def test_triosim_s_rules_give_what_its_code_printed(mirror: Path) -> None:
    for name, printed in PRINTED_MS.items():
        for ranks, value_ms in printed.items():
            told = predict_printed(mirror, name, ranks)
            assert told is not None
            assert round(1e3 * told, 3) == value_ms, (name, ranks)


def test_where_triosim_s_code_printed_something_else_is_known(mirror: Path) -> None:
    for (name, ranks), (printed_ms, ours_ms) in PRINTED_OTHERWISE_MS.items():
        told = predict_printed(mirror, name, ranks)
        assert told is not None
        assert round(1e3 * told, 3) == ours_ms, (name, ranks)
        assert ours_ms == pytest.approx(printed_ms, rel=0.012)


def test_every_measured_value_on_four_gpus_is_judged(mirror: Path) -> None:
    held = {
        file.relative_to(mirror).as_posix()
        for ending in ("-dp4.json", "-tp4.json", "-pp4_1.json")
        for file in load_catalogue().held_files(mirror, MODEL_TABLES, ending)
    }
    rows = rows_of_set(load_published_rows(TABLE), "h100-4gpu", TABLE)
    assert {row.measured for row in rows} == held
    assert all(read_measured(row, mirror).time_s > 0.1 for row in rows)


def test_every_throughput_of_the_shipped_table_is_judged(mirror: Path) -> None:
    rows = [row for row in load_published_rows(TABLE).values() if row.set.startswith("resnet50")]
    found = {(read_measured(row, mirror).source, row.ranks) for row in rows}
    assert len(found) == len(rows) == 16


def test_the_aim_on_four_gpus_is_reached(four_gpus: pd.DataFrame) -> None:
    scores = score_published(four_gpus).set_index("model")
    assert scores.loc["trioflow", "mean_absolute_error"] < SETS["h100-4gpu"].aim
    assert scores.loc["trioflow", "ordered"] == 1.0
    for rival in ("TrioSim's public rules", "analytical"):
        assert scores.loc[rival, "mean_absolute_error"] > scores.loc["trioflow", "mean_absolute_error"]


def test_a_trace_at_the_rank_s_batch_is_its_own_oracle(four_gpus: pd.DataFrame) -> None:
    told = four_gpus.set_index("case")
    for plan in ("dp4", "pp4"):
        own = told.loc[f"gpt2-large-{plan}"]
        other = told.filter(like=f"gpt2-large-{plan}-from", axis=0).iloc[0]
        assert own["oracle_s"] == pytest.approx(own["predicted_s"])
        assert other["oracle_s"] == pytest.approx(own["predicted_s"])
        assert other["predicted_s"] != own["predicted_s"]
    assert told.filter(like="tp4", axis=0)["oracle_s"].isna().all()
    assert told.loc["gpt3-xl-pp4", "oracle_s"] != told.loc["gpt3-xl-pp4", "oracle_s"]


def test_no_model_saw_the_judged_workload(four_gpus: pd.DataFrame) -> None:
    for row in four_gpus.to_dict("records"):
        assert f"without {row['workload']}" in row["learned_from"]


def test_scaling_to_eight_h100_is_within_its_aim(mirror: Path) -> None:
    nothing = pd.DataFrame(columns=ANCHORS.names)
    cases = judge_cases(*prepare_set("resnet50-h100", mirror, IMPORTS, TABLE, nothing))
    told = list_scaling(cases)
    assert told["ranks"].tolist() == [2, 4, 8]
    assert told["error"].abs().mean() < SETS["resnet50-h100"].scaling_aim
    assert find_step_band(nothing, "resnet50") == (1.0, 1.0)
    beyond = cases["measured_s"] / cases["high_s"]
    assert beyond.max() < 1.02, "a batch five times the traced one, and ranks that were not recorded"
    several = cases[cases["ranks"] > 1]
    assert cases["oracle_s"].isna().tolist() == [True, False, False, False]
    # With one GPU's measured step for compute, what is left is what scaling misses.
    left = (several["oracle_s"] / several["measured_s"] - 1).to_numpy()
    assert abs(left).max() < abs(several["predicted_s"] / several["measured_s"] - 1).min() / 5
    assert left == pytest.approx(-told["error"].to_numpy(), abs=0.003)


@pytest.mark.slow
def test_the_rebuilt_interval_of_the_anchor_is_the_shipped_one(mirror: Path) -> None:
    anchors = read_or_make(
        "published/anchors.parquet",
        lambda path: tables.read_table(path, "anchors", ANCHORS),
        lambda: judge_anchored_steps(mirror),
    )
    told = measure_band(anchors)
    assert (told["low"], told["high"]) == pytest.approx(load_band(), rel=1e-9)
    rebuilt = list_residuals(anchors, pd.DataFrame(columns=PUBLISHED_CASES.names))
    shipped = [one for one in load_residuals() if one.device_kind == "cuda" and one.ranks == 1]
    assert sorted(one.error for one in rebuilt) == pytest.approx(sorted(one.error for one in shipped), abs=1e-3)
