import json

import pytest
from trioflow.base.errors import PlanError, TableError
from trioflow.base.experiments import load_experiments, load_plans, load_workloads
from trioflow.cli.main import main
from trioflow.parallel.plan import describe_plan, make_plan, named_plan

DP, GATHER = {"replication": "dp"}, {"tensor_style": "gather"}
TOKENS, WORDS = {"sequence_parallel": True}, {"vocabulary_parallel": True}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"data": 2, "tensor": 2, **DP}, "dp with tensor parallelism"),
        ({"data": 2, "pipeline": 2, **DP}, "dp with a pipeline"),
        (
            {"data": 2, "sharding": "fsdp", "accumulate": 2, **DP},
            "dp with fsdp, accumulated micro-steps",
        ),
        (DP, "dp on one rank"),
        ({"data": 2, **GATHER}, "gather without tensor parallelism"),
        ({"tensor": 2, **GATHER, **TOKENS}, "gather with sequence_parallel"),
        ({"tensor": 2, **GATHER, **WORDS}, "gather with vocabulary_parallel"),
        ({"tensor": 2, "data": 2, **GATHER}, "gather with data-parallel replicas"),
        ({"tensor": 2, "pipeline": 2, **GATHER}, "gather with a pipeline"),
        ({"data": 2, **TOKENS}, "sequence_parallel without tensor parallelism"),
        ({"pipeline": 2, **WORDS}, "vocabulary_parallel without tensor parallelism"),
    ],
)
def test_what_does_not_go_together_is_refused(given, problem):
    with pytest.raises(PlanError, match=problem):
        make_plan(**given)


def test_what_goes_together_is_told():
    plan = make_plan(data=2, tensor=4, pipeline=2, micro_batches=2, **TOKENS, **WORDS)
    assert describe_plan(plan, 32).endswith("(gpipe), sequence parallel, vocabulary parallel")
    assert describe_plan(named_plan("dp", 4), 32) == (
        "4 ranks = 4 data, 8 samples a rank, DataParallel in one process"
    )
    assert describe_plan(named_plan("tp-gather", 2), 8).endswith("outputs of layers gathered")
    make_plan(data=2, tensor=2, sharding="fsdp", **TOKENS, **WORDS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--plan", "dp", "--ranks", "2", "--batch", "7"],
            "at most 4 samples a rank, DataParallel",
        ),
        (["--plan", "tp-gather", "--ranks", "2"], "outputs of layers gathered"),
        (["--tensor-parallel", "2", "--tensor-style", "gather"], "outputs of layers gathered"),
        (
            ["--tensor-parallel", "2", "--sequence-parallel", "--vocabulary-parallel"],
            "sequence parallel, vocabulary parallel",
        ),
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
    header = (
        "plan\tdata\ttensor\tpipeline\tschedule\tmicro_batches\tfirst_bucket_bytes\tbucket_bytes"
    )
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
