import json
from pathlib import Path

import pytest
from trioflow.cli.main import main

pytest.importorskip("torch", reason="a trace without a device needs torch (extra [capture])")

ARGUMENTS = """
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 64
  --num-attention-heads: 4
  --vocab-size: 1000
  --seq-length: 64
  --max-position-embeddings: 64
  --micro-batch-size: 2
  --global-batch-size: 16
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --overlap-grad-reduce: true
  --hidden-dropout: 0.0
  --attention-dropout: 0.0
  --bf16: true
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model_config.yaml"
    path.write_text(ARGUMENTS)
    return str(path)


def simulate(capsys, *words):
    assert main(["simulate", *words, "--platform", "dgx-h100", "--json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_megatron_arguments_alone_give_the_step_and_the_plan(file, capsys):
    told, said = simulate(capsys, "--megatron", file)
    assert "does not say how many GPUs run it: 8" in said
    assert told["plan_text"].startswith("DP2 x TP2 x PP2, 1F1B, ZeRO-1, SP, mbs 2, 4 micro-batches")
    assert "vocabulary parallel" in told["plan_text"]
    assert (told["batch"], told["sequence"], told["precision"]) == (16, 64, "megatron-bf16")
    assert told["stages_by"] == "given" and told["stage_units"] == [3, 3]
    assert not any("not followed" in warning for warning in told["warnings"])


def test_optimizer_instances_are_groups_of_replicas(file, capsys):
    Path(file).write_text(f"{ARGUMENTS}  --num-distributed-optimizer-instances: 2\n")
    told, _ = simulate(capsys, "--megatron", file, "--ranks", "16", "--batch", "16")
    assert "ZeRO-1 in groups of 2" in told["plan_text"]
    assert main(["simulate", "--megatron", file, "--ranks", "12", "--platform", "dgx-h100"]) == 2
    assert "3 replicas do not make 2 groups" in capsys.readouterr().err


def test_arguments_of_the_command_win_over_the_file(file, capsys):
    words = ["--ranks", "4", "--batch", "8", "--precision", "pure-bf16", "--recompute", "full"]
    told, said = simulate(capsys, "--megatron", file, *words)
    assert told["plan_text"].startswith("TP2 x PP2")
    assert told["precision"] == "pure-bf16"
    assert "recompute" in told["plan_text"]
    assert not said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "6"], "TP2 x PP2 does not divide 6 GPUs"),
        (["--batch", "6"], "6 samples a step do not divide into micro-batches of 2 on 2 replicas"),
        (["--plan", "ddp"], "--megatron gives the model and the plan"),
    ],
)
def test_what_does_not_fit_the_file_is_refused(words, message, file, capsys):
    assert main(["simulate", "--megatron", file, *words, "--platform", "dgx-h100"]) == 2
    assert message in capsys.readouterr().err


def test_without_a_trace_one_is_asked_for(capsys):
    assert main(["simulate", "--platform", "dgx-h100"]) == 2
    assert "no TRACE was given" in capsys.readouterr().err


def test_ranks_share_sequences_as_the_file_says(tmp_path, capsys):
    path = tmp_path / "model_config.yaml"
    path.write_text(ARGUMENTS + "  --context-parallel-size: 2\n  --cp-comm-type: a2a\n")
    answer, _ = simulate(capsys, "--megatron", str(path), "--ranks", "16")
    assert "DP2 x TP2 x CP2 x PP2" in answer["plan_text"]
    assert "CP by all-to-all" in answer["plan_text"]
    assert answer["exposed_by_group_s"]["context"] > 0
