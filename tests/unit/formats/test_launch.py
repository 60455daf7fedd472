"""Launch configurations: what is written for a plan is read back to the same answer, or the framework says what it lacks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trioflow
from trioflow.base.errors import InputError
from trioflow.cli.main import main
from trioflow.formats.launch import FRAMEWORKS, express
from trioflow.parallel.plan import make_plan
from trioflow.trace.language.read import find_configuration, parse_configuration
from trioflow.trace.language.sizes import BLOCKS, Configuration

MEGATRON: dict[str, Any] = {"sharding": "distributed", "sequence_parallel": True, "vocabulary_parallel": True}
TITAN: dict[str, Any] = {"sharding": "fsdp", "sequence_parallel": True, "vocabulary_parallel": True}
PIPELINE: dict[str, Any] = {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2, "micro_batches": 4}


def ask(framework: str, model: str, batch: int, **more: Any) -> Configuration:
    found = find_configuration(model)
    assert found is not None
    precision, _, fusion = FRAMEWORKS[framework].recipe.partition("+")
    step = {"sequence": 256, "precision": precision} | ({"fusion": fusion} if fusion else {})
    return replace(found, step=step, global_batch=batch, **more)


@pytest.mark.parametrize(
    ("framework", "model", "columns"),
    [
        ("megatron", "llama-3.2-1b", {"data": 2, "tensor": 2, **PIPELINE, **MEGATRON}),
        ("megatron", "gpt2", {"data": 4, "sharding": "distributed", "gather_overlap": True, "recompute": "full"}),
        ("nemo", "qwen2.5-0.5b", {"data": 2, "tensor": 2, "accumulate": 2, **MEGATRON}),
        ("nemo", "llama-3.2-1b", {"data": 2, "pipeline": 2, "schedule": "1f1b", "micro_batches": 4}),
        ("torchtitan", "llama-3.1-8b", {"data": 2, "tensor": 2, **PIPELINE, **TITAN}),
        ("torchtitan", "qwen3-0.6b", {"data": 4, "sharding": "hsdp", "shard": 2, "recompute": "full", "accumulate": 2}),
        ("deepspeed", "llama-3.2-1b", {"data": 4, "sharding": "distributed", "accumulate": 2}),
        ("deepspeed", "llama-3.2-1b", {"data": 4, "sharding": "partitioned", "recompute": "full"}),
        ("accelerate", "llama-3.2-1b", {"data": 4, "sharding": "zero2", "accumulate": 2}),
    ],
)
def test_a_launch_configuration_is_read_back_to_the_same_answer(
    framework: str, model: str, columns: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, asked = make_plan(**columns), ask(framework, model, 16)
    told = trioflow.predict(model, plan, "dgx-h100", batch=16, options=trioflow.Options(**asked.step))
    stages = told.task_graph.metadata.stages
    if plan.pipeline > 1:
        asked = replace(asked, stages=tuple(sum(unit.startswith(BLOCKS) for unit in stage) for stage in stages))
    text, why = express(framework, asked, plan, model)
    assert not why
    file = tmp_path / FRAMEWORKS[framework].file
    file.write_text(text)
    assert main(["simulate", str(file), "--gpus", f"{plan.ranks}xH100", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step_time_s"], answer["peak_memory_bytes"]) == (told.step_time_s, told.peak_memory_bytes)
    text = answer["plan_text"].replace("recompute uniform:1", "full recompute")  # Megatron-LM's words for it
    assert text == told.task_graph.metadata.plan_text


@pytest.mark.parametrize(
    ("framework", "model", "columns", "reason"),
    [
        ("megatron", "llama-3.2-1b", {"data": 4, "sharding": "fsdp"}, "sharding fsdp"),
        ("megatron", "gpt-oss-20b", {"data": 4}, "router_bias, window, sinks"),
        ("torchtitan", "mistral-7b", {"data": 4, "sharding": "fsdp"}, "it has no mistral-7b"),
        ("torchtitan", "llama-3.1-8b", {"data": 4, "sharding": "distributed"}, "sharding distributed"),
        ("deepspeed", "llama-3.2-1b", {"data": 2, "tensor": 2}, "tensor 2"),
        ("accelerate", "llama-3.2-1b", {"data": 4, "sharding": "distributed"}, "sharding distributed"),
    ],
)
def test_what_a_framework_cannot_express_is_named(
    framework: str, model: str, columns: dict[str, Any], reason: str
) -> None:
    text, why = express(framework, ask(framework, model, 16), make_plan(**columns), model)
    assert text == "" and reason in why


def test_a_users_own_file_is_read_with_its_frameworks_defaults() -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n[parallelism]\n'
    text += 'data_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n[activation_checkpoint]\nmode = "selective"\n'
    found = parse_configuration(text, "run.toml")
    assert found.model.name == "llama-3.1-8b" and found.step["batch"] == 2 and "data" not in found.degrees
    wanted = {"tensor": 2, "sharding": "fsdp", "recompute": "save:torchtitan", "sequence_parallel": True}
    assert wanted.items() <= found.degrees.items()


def test_what_the_training_script_fills_in_is_as_if_not_said() -> None:
    said = {"zero_optimization": {"stage": 3}, "trioflow": {"model": "llama-3.1-8b", "sequence": 4096}}
    filled = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    found = parse_configuration(json.dumps(said | filled), "ds.json")
    assert found == parse_configuration(json.dumps(said), "ds.json") and found.step["sequence"] == 4096


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("fsdp.yaml", "num_processes: eight\nfsdp_config: {}\n", "num_processes: 'eight' is no whole number"),
        ("run.toml", "[training]\nseq_len = 2.5\n[parallelism]\n", "run.toml.*seq_len: 2.5 is no whole number"),
        ("run.toml", "[training\n", "not readable as TOML"),
        (
            "run.toml",
            '[training]\n[parallelism]\npipeline_parallel_schedule = "Best"\n',
            "run.toml.*schedule: 'Best' is not known here",
        ),
        ("ds.json", '{"zero_optimization": {"stage": 1}}', "names no known model"),
        ("fsdp.yaml", "# model: nobody\nfsdp_config: {fsdp_version: 2}\n", "names no known model: nobody"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_with_its_place(file: str, text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse_configuration(text, file)


TITAN_FILE = """
[job]
description = "Llama 3 8B training"
[model]
name = "llama3"
flavor = "8B"
converters = CONVERTERS
[training]
local_batch_size = 1
seq_len = 8192
[activation_checkpoint]
mode = "none"
[parallelism]
data_parallel_shard_degree = -1
"""


def test_torchtitan_s_usual_recipe_is_fsdp_s_and_what_is_not_followed_is_said():
    found = parse_configuration(TITAN_FILE.replace("CONVERTERS", "[]"), "train.toml")
    assert (found.step["precision"], found.degrees["sharding"], found.notes) == ("fsdp2-mixed", "fsdp", ())
    typo = TITAN_FILE.replace("CONVERTERS", '["float8"]') + "tensor_parallel_degre = 4\n"
    note, unsaid = parse_configuration(typo.replace('mode = "none"\n', ""), "train.toml").notes
    assert "activation_checkpoint.mode is not in the file" in unsaid
    assert "model.converters" in note and "(did you mean parallelism.tensor_parallel_degree?)" in note


def test_deepspeed_s_accumulation_and_recipe_are_followed_and_offload_is_said():
    zero = {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}
    file = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}}
    text = json.dumps({**file, "zero_optimization": zero, "trioflow": {"model": "llama-3.1-8b"}})
    found = parse_configuration(text, "deepspeed.json")
    assert (found.step["batch"], found.accumulate, found.step["precision"]) == (2, 4, "deepspeed-bf16")
    assert len(found.notes) == 1 and "zero_optimization.offload_optimizer.device" in found.notes[0]
