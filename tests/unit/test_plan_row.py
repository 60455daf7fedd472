import json

import pytest
from trioflow.base.errors import PlanError, TableError
from trioflow.base.experiments import load_experiments, load_plans, load_workloads
from trioflow.cli.main import main
from trioflow.parallel.plan import describe_plan, make_plan, named_plan

DP, GATHER = {"replication": "dp"}, {"tensor_style": "gather"}
PAIRED = {"data": 4, "expert": 4, "expert_overlap": True}
TOKENS, WORDS = {"sequence_parallel": True}, {"vocabulary_parallel": True}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"data": 2, "tensor": 2, **DP}, "dp with tensor parallelism"),
        ({"data": 2, "pipeline": 2, **DP}, "dp with a pipeline"),
        ({"data": 2, "sharding": "fsdp", "accumulate": 2, **DP}, "dp with fsdp, accumulated micro-steps"),
        (DP, "dp on one rank"),
        ({"data": 2, **GATHER}, "gather without tensor parallelism"),
        ({"tensor": 2, **GATHER, **TOKENS}, "gather with sequence_parallel"),
        ({"tensor": 2, **GATHER, **WORDS}, "gather with vocabulary_parallel"),
        ({"tensor": 2, "data": 2, **GATHER}, "gather with data-parallel replicas"),
        ({"tensor": 2, "pipeline": 2, **GATHER}, "gather with a pipeline"),
        ({"data": 2, **TOKENS}, "sequence_parallel without tensor parallelism"),
        ({"pipeline": 2, **WORDS}, "vocabulary_parallel without tensor parallelism"),
        ({"context_method": "all-to-all"}, "without context parallelism"),
        ({"context": 2, "data": 2, "replication": "dp"}, "context parallelism"),
        ({"context": 2, "tensor": 2, "tensor_style": "gather"}, "gather with context"),
        ({"context": 4, "data": 3, "sharding": "hsdp", "shard": 6}, "sequences that 4 share"),
        ({"pipeline": 2, "offload": "activations"}, "activations in a pipeline of 2 is not simulated"),
        ({"recompute": "full", "offload": "activations"}, "with recompute full is not simulated"),
        ({"data": 2, "sharding": "zero1", "offload": "optimizer"}, "optimizer with zero1"),
        ({"data": 2, "sharding": "zero4"}, "unknown sharding 'zero4'; did you mean zero3\\? use one of none, zero1"),
        ({"sharding": "fsdp"}, "fsdp on one rank; give a data degree"),
        (
            {"data": 2, "pipeline": 2, "sharding": "fsdp", "schedule": "gpipe-recompute"},
            "fsdp with gpipe-recompute, whose stages are one process's; use gpipe",
        ),
        ({"data": 4, "sharding": "hsdp"}, "4 data-parallel ranks do not make several groups of 1"),
        ({"data": 4, "sharding": "hsdp", "shard": 3}, "groups of 3; use a shard that divides 4, between 1 and 4"),
        ({"data": 4, "sharding": "hsdp", "shard": 4}, "several groups of 4"),
        ({"data": 4, "sharding": "fsdp", "shard": 2}, "groups of 2 ranks with sharding fsdp"),
        ({"pipeline": 2, "accumulate": 2}, "2 accumulated micro-steps in a pipeline"),
        ({"data": 2, "accumulate": 0}, "accumulate 0 is below 1"),
        ({"data": 2, "accumulate": 2, "no_sync": True}, "no_sync without accumulated micro-steps of sharded"),
        ({"data": 6, "expert": 4}, "4 expert-parallel ranks do not divide 6 data-parallel ones"),
        ({"data": 4, "expert": 2, "tensor": 2}, "without sequence parallelism"),
        ({"data": 4, "tensor": 2, "expert_tensor": 1}, "without sequence parallelism"),
        ({"data": 4, "expert": 2, "tensor": 4, "expert_tensor": 3}, "cut among 3 ranks beside 4"),
        (
            {"data": 2, "expert": 8, "tensor": 2, "expert_tensor": 1, "sequence_parallel": True},
            "8 expert-parallel x 1 expert-tensor-parallel ranks do not divide the 4 ranks of a stage",
        ),
        ({"data": 6, "expert": 6, "expert_domain": 4}, "domains of 4 ranks do not divide 6"),
        ({"data": 6, "expert_domain": 4}, "domains of 4 ranks do not divide 1"),
        ({"data": 4, "expert_overlap": True}, "expert_overlap without expert parallelism"),
        ({**PAIRED, "pipeline": 2, "schedule": "1f1b"}, "expert_overlap with 1f1b, in which no forward"),
        ({**PAIRED, "recompute": "full"}, "recompute full, which runs exchanges again"),
        ({**PAIRED, "sharding": "fsdp"}, "expert_overlap with fsdp is not simulated"),
        ({"data": 8, "expert": 4, "sharding": "hsdp", "shard": 2}, "do not divide groups of 2"),
        ({"data": 2, "sharding": "distributed", "accumulate": 2, "gradient_sync": "micro-batch"}, "reduces once"),
        ({"data": 2, "sharding": "fsdp", "accumulate": 2, "gradient_sync": "micro-batch", "no_sync": True}, "no_sync"),
        ({"data": 2, "sharding": "partitioned", "accumulate": 2, "gradient_sync": "step"}, "keeps gradients whole"),
        ({"data": 2, "sharding": "partitioned", "pipeline": 2}, "partitioned with a pipeline"),
        ({"data": 2, "sharding": "distributed", "offload": "optimizer"}, "whose ranks share the optimizer themselves"),
        ({"data": 8, "sharding": "fsdp", "shard": 2}, "with sharding fsdp"),
        ({"data": 8, "sharding": "zero1", "shard": 3}, "do not make several groups of 3"),
        (
            {"data": 8, "tensor": 2, "sharding": "zero1", "expert": 2, **TOKENS},
            "with experts and tensor parallelism is not simulated",
        ),
        ({"data": 2, "sharding": "fsdp", "gather_overlap": True}, "gather_overlap with sharding fsdp"),
        ({"pipeline": 2, "schedule": "gpipe-recompute", "recompute": "full"}, "runs forwards again itself; write none"),
        ({"micro_batches": 4}, "without a pipeline"),
        ({"data": 0}, "data degree 0"),
        ({"pipeline": 4, "schedule": "dualpipev", "micro_batches": 2}, "2 micro-batches are fewer than"),
        ({"pipeline": 2, "schedule": "fifo"}, "unknown schedule 'fifo'; .*use one of gpipe"),
        ({"pipeline": 2, "stages_per_rank": 2}, "gpipe: 2 stages a rank"),
        ({"stages_per_rank": 2}, "2 stages a rank without a pipeline"),
        *(
            ({"recompute": kind}, "unknown recomputation.*block:N")
            for kind in ("block", "block:0", "uniform:x", "some")
        ),
    ],
)
def test_what_does_not_go_together_is_refused(given, problem):
    with pytest.raises(PlanError, match=problem):
        make_plan(**given)


def test_what_goes_together_is_told():
    plan = make_plan(data=2, tensor=4, pipeline=2, micro_batches=2, **TOKENS, **WORDS)
    assert describe_plan(plan, 32) == "DP2 x TP4 x PP2, GPipe, SP, mbs 8, 2 micro-batches, vocabulary parallel"
    assert describe_plan(named_plan("dp", 4), 32) == "DP4, mbs 8, DataParallel in one process"
    assert describe_plan(named_plan("tp-gather", 2), 8).endswith("layer outputs gathered")
    make_plan(data=2, tensor=2, sharding="fsdp", **TOKENS, **WORDS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--plan", "dp", "--ranks", "2", "--batch", "7"], "mbs up to 4, DataParallel"),
        (["--plan", "tp-gather", "--ranks", "2"], "layer outputs gathered"),
        (["--tensor-parallel", "2", "--tensor-style", "gather"], "layer outputs gathered"),
        (["--tensor-parallel", "2", "--sequence-parallel", "--vocabulary-parallel"], "SP, mbs 8, vocabulary parallel"),
    ],
)
def test_the_command_line_simulates_them(arguments, told, capsys):
    common = ["simulate", "gpt2-tiny-b8", "--platform", "a100x4-nvlink", "--json"]
    assert main([*common, *arguments]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert told in answer["plan_text"]
    assert answer["step_time_s"] > 0 and answer["ranks"] == 2


def test_the_command_line_refuses_in_one_sentence(capsys):
    common = ["simulate", "gpt2-tiny-b8", "--platform", "a100x4-nvlink", "--tensor-parallel", "2"]
    assert main([*common, "--tensor-style", "gather", "--sequence-parallel"]) == 2
    error = capsys.readouterr().err
    assert "gather with sequence_parallel" in error and len(error.strip().splitlines()) == 1


def test_tables_name_the_column_and_measurements_are_refused(tmp_path):
    header = "plan\tdata\ttensor\tpipeline\tschedule\tmicro_batches\tfirst_bucket_bytes\tbucket_bytes"
    row = "p\t2\t1\t1\tnone\t1\t1048576\t26214400"
    plans = tmp_path / "plans.tsv"
    plans.write_text(f"{header}\treplication\tsequence_parallel\n{row}\tddp\ttrue\n")
    with pytest.raises(TableError, match="column sequence_parallel"):
        load_plans(plans)
    plans.write_text(f"{header}\treplication\n{row}\tdp\n")
    workloads = tmp_path / "workloads.tsv"
    cells = {
        "workload": "w",
        "family": "torchvision",
        "model": "vgg11",
        "batches": "2,4",
        "image_size": "64",
        **dict.fromkeys(["sequence", "hidden", "layers", "heads", "vocabulary", "causal"], "-"),
        "optimizer": "sgd",
        "precision": "fp32",
    }
    workloads.write_text("\n".join("\t".join(part) for part in (cells, cells.values())) + "\n")
    experiments = tmp_path / "experiments.tsv"
    experiments.write_text("experiment\tset\tworkload\tplan\tbatch\nx\ts\tw\tp\t8\n")
    with pytest.raises(TableError, match="DataParallel, which is not measured"):
        load_experiments(experiments, load_workloads(workloads), load_plans(plans))
