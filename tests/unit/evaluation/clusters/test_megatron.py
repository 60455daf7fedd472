"""Peaks of Megatron-LM's tests: read, predicted on the rank that logged them, refused with the reason."""

import json

import pytest
from trioflow import tables
from trioflow.base.errors import TableError
from trioflow.base.units import BYTES_PER_MIB
from trioflow_evaluation.clusters.bridge import KEPT, PEAK, count_test_workspaces, judge_peaks, read_cases
from trioflow_evaluation.clusters.page import peaks_section, score_peaks
from trioflow_evaluation.clusters.steps import keep_depth
from trioflow_evaluation.tables import CLUSTER_PEAKS

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

CONFIG = """
ENV_VARS:
  CUBLAS_WORKSPACE_CONFIG: :4096:2:16:8
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --vocab-size: 32768
  --seq-length: 64
  --micro-batch-size: 2
  --global-batch-size: 16
  --pipeline-model-parallel-size: 2
  --transformer-impl: transformer_engine
  --bf16: true
"""
CUBLAS = 2 * (2 * 4096 + 8 * 16) * 1024
"""Bytes, of two handles."""


def write_case(folder, suite, name, more="", values=None, device="h100"):
    """Write a test's folder and return its logged values' file."""
    place = folder / suite / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "model_config.yaml").write_text(CONFIG + more)
    logged = values or {PEAK: {"1": 50e6, "2": "nan", "3": 60e6}, KEPT: {"1": 8e6, "3": 9e6}}
    file = place / f"golden_values_dev_dgx_{device}.json"
    file.write_text(json.dumps({key: {"values": value} for key, value in logged.items()}))
    return file


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    files = [
        write_case(folder, "gpt", "dense"),
        write_case(folder, "gpt", "dense", device="a100"),
        write_case(folder, "moe", "experts", "  --num-experts: 8\n  --expert-model-parallel-size: 4\n"),
        write_case(folder, "moe", "cut", "  --num-experts: 8\n  --expert-tensor-parallel-size: 2\n"),
        write_case(folder, "bert", "encoder"),
        write_case(folder, "gpt", "context", "  --context-parallel-size: 2\n"),
        write_case(folder, "gpt", "too-many", "  --context-parallel-size: 8\n"),
    ]
    configs = [file.parent / "model_config.yaml" for file in files]
    return judge_peaks(read_cases([*files, *configs])).set_index(["case", "device"])


def test_the_last_rank_is_predicted_with_its_head_and_the_workspaces(judged):
    row = judged.loc["dense", "h100"]
    assert (row["measured_bytes"], row["kept_bytes"]) == (60e6, 9e6)
    assert (row["data"], row["tensor"], row["pipeline"]) == (4, 1, 2)
    assert row["workspace_bytes"] == CUBLAS + 32 * BYTES_PER_MIB
    # The scores of 128 tokens, in bf16 and in fp32, and the tied embedding at 18 bytes a weight.
    least = 128 * 32768 * 6 + 64 * 32768 * 18
    assert least < row["predicted_bytes"] - row["workspace_bytes"] < 1.3 * least
    smaller = judged.loc["dense", "a100"]
    assert row["predicted_bytes"] - smaller["predicted_bytes"] == 28 * BYTES_PER_MIB


def test_ranks_that_share_a_sequence_hold_their_tokens(judged):
    whole, half = judged.loc["dense", "h100"], judged.loc["context", "h100"]
    assert (half["data"], half["pipeline"]) == (2, 2)
    # The scores of 64 tokens fewer; buckets and the rest stay.
    spared = whole["predicted_bytes"] - half["predicted_bytes"]
    assert spared == pytest.approx(64 * 32768 * 6, rel=0.1)
    assert "more than 8 ranks" in judged.loc["too-many", "h100"]["refused"]


def test_what_is_refused_stays_in_the_table_with_the_reason(judged):
    refused = judged[judged["refused"] != ""]["refused"].to_dict()
    assert "experts cut among 2 ranks beside 1 tensor-parallel" in refused["cut", "h100"]
    assert "pretrain_bert.py" in refused["encoder", "h100"]
    assert judged.loc["cut", "h100"].isna()["predicted_bytes"]


def test_experts_are_predicted_with_two_of_eight_on_the_last_rank(judged):
    dense, experts = judged.loc["dense", "h100"], judged.loc["experts", "h100"]
    assert (experts["data"], experts["refused"]) == (4, "")
    # Of two blocks each one expert more at 18 bytes a weight, a router, and each token twice.
    added = 2 * 18 * ((64 + 1) * 256 + (256 + 1) * 64 + 64 * 8)
    more = experts["predicted_bytes"] - dense["predicted_bytes"]
    assert added < more < 2 * added


def test_the_section_scores_what_is_predicted_and_counts_what_is_not(judged, tmp_path):
    path = tmp_path / "peaks.parquet"
    tables.write_table(judged.reset_index(), "cluster_peaks", path, {}, CLUSTER_PEAKS)
    cases = tables.read_table(path, "cluster_peaks", CLUSTER_PEAKS)
    scores = score_peaks(cases).set_index("group")
    assert scores.loc["all that are predicted", "cases"] == scores.loc["2 stages", "cases"] == 4
    text = "".join(peaks_section(cases).parts)
    assert "7 runs on eight A100 or H100, 4 of them predicted" in text
    assert "experts cut among 2 ranks" in text and "4 x 1 x 2" in text
    assert "<summary>Every prediction: 4 cases" in text, "hundreds of rows open when they are asked for"


def test_without_an_engine_of_its_own_products_are_pytorch_s(tmp_path):
    config = write_case(tmp_path, "gpt", "local").parent / "model_config.yaml"
    config.write_text(CONFIG.replace("transformer_engine", "local"))
    assert count_test_workspaces(config, "h100") == CUBLAS
    config.write_text(CONFIG + "  --moe-grouped-gemm: true\n")
    assert count_test_workspaces(config, "h100") == CUBLAS + 5 * 32 * BYTES_PER_MIB
    assert count_test_workspaces(config, "a100") == CUBLAS + 5 * 4 * BYTES_PER_MIB


def test_a_file_without_peaks_is_refused(tmp_path):
    file = write_case(tmp_path, "gpt", "none", values={"lm loss": {"1": 10.0}})
    with pytest.raises(TableError, match="no logged peaks"):
        read_cases([file])


def test_a_stage_for_the_loss_alone_counts_as_one():
    cut = [["embedding", "0"], ["1", "2"], ["3", "head"]]
    assert keep_depth(cut, 4) == [["embedding", "0"], ["1", "2"], ["3"], ["head"]]
    assert keep_depth(cut, 5) == [["embedding", "0"], ["1"], ["2"], ["3"], ["head"]]
    assert keep_depth([["embedding", "0"]], 2) == [["embedding", "0"]]
    assert keep_depth(cut, 3) == cut
