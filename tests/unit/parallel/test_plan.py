"""Plans with pipeline schedules, from names, degrees and rows of plans.tsv."""

import inspect
import json
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator
from trioflow.base.errors import PlanError, TableError
from trioflow.base.experiments import (
    Plan,
    Workload,
    as_rows,
    load_experiments,
    load_plans,
    row_schema,
)
from trioflow.base.plan_row import SCHEDULES
from trioflow.parallel import plan as plans_module
from trioflow.parallel.plan import (
    check_plan,
    make_plan,
    micro_batch_sizes,
    named_plan,
    vary_plan,
)
from trioflow.parallel.splits.tensor_split import count_heads

OLD = "plan data tensor pipeline schedule micro_batches first_bucket_bytes bucket_bytes"
ROW = "{} 1 1 {} {} {} 1048576 26214400"


def write(path, *rows, header=OLD):
    path.write_text("\n".join("\t".join(line.split()) for line in (header, *rows)) + "\n")
    return path


def test_stages_of_a_rank_may_be_left_out_of_the_table(tmp_path):
    rows = [ROW.format(name, 2, name, 4) for name in SCHEDULES]
    plans = load_plans(write(tmp_path / "plans.tsv", *rows))
    assert {name: plan.schedule for name, plan in plans.items()} == {n: n for n in SCHEDULES}
    assert {plan.stages_per_rank for plan in plans.values()} == {1}
    full = write(
        tmp_path / "full.tsv",
        ROW.format("deep", 2, "interleaved", 4) + " 3",
        header=f"{OLD} stages_per_rank",
    )
    deep = load_plans(full)["deep"]
    assert deep.stages_per_rank == 3 and deep.stages == 6 and deep.ranks == 2
    for row in as_rows([deep, *plans.values()]):
        Draft202012Validator(row_schema("plans")).validate(json.loads(json.dumps(row)))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (ROW.format("a", 1, "1f1b", 1) + " 1", "'1f1b' does not go with a pipeline degree of 1"),
        (ROW.format("a", 2, "none", 2) + " 1", "write none for one rank and a schedule for more"),
        (ROW.format("a", 1, "none", 1) + " 2", "column stages_per_rank: 2 stages a rank without"),
        (ROW.format("a", 2, "interleaved", 2) + " 0", "column stages_per_rank"),
        (ROW.format("a", 2, "1f2b", 2) + " 1", "column schedule: .*1f2b"),
    ],
)
def test_rows_that_are_no_pipeline_are_refused(tmp_path, row, words):
    path = write(tmp_path / "plans.tsv", row, header=f"{OLD} stages_per_rank")
    with pytest.raises(TableError, match=words):
        load_plans(path)


def test_schedules_that_no_session_runs_are_no_experiments(tmp_path):
    plans = load_plans(write(tmp_path / "plans.tsv", ROW.format("p", 2, "zbv", 2)))
    sizes = dict.fromkeys(
        ("image_size", "sequence", "hidden", "layers", "heads", "vocabulary", "causal")
    )
    workload = Workload("w", "user", "a:b", (2,), **sizes, optimizer="sgd", precision="fp32")
    path = write(
        tmp_path / "experiments.tsv", "e live w p 4", header="experiment set workload plan batch"
    )
    with pytest.raises(
        TableError, match=r"column plan: .* schedule zbv, which is not measured yet"
    ):
        load_experiments(path, {"w": workload}, plans)


def test_a_schedule_without_a_pipeline_is_none():
    assert make_plan(data=2, schedule="1f1b").schedule == "none"
    assert make_plan(pipeline=2, schedule="none").schedule == "gpipe"
    assert (
        named_plan("zbv", 2).stages_per_rank == named_plan("dualpipev", 2, 4).stages_per_rank == 2
    )


def test_replicas_share_a_batch_evenly():
    assert micro_batch_sizes(make_plan(data=2, pipeline=2, micro_batches=2), 10) == [3, 2]
    with pytest.raises(
        PlanError, match=r"batch 9 does not divide into 2 replica\(s\); use a multiple of 2"
    ):
        micro_batch_sizes(make_plan(data=2, pipeline=2), 9)


COUNTS = [name for name, cell in Plan.__dataclass_fields__.items() if cell.metadata.get("minimum")]


@pytest.mark.parametrize("value", [0, -1, 1.5])
@pytest.mark.parametrize("name", COUNTS)
def test_zero_is_no_number_of_anything(name, value, transformer_trace):
    words = f"{name.replace('_', '[ _]')}(=| degree | ){value} is"
    if name in inspect.signature(make_plan).parameters:
        with pytest.raises(PlanError, match=words):
            make_plan(**{"data": 4, "pipeline": 2, name: value})
    with pytest.raises(PlanError, match=words):
        vary_plan(make_plan(data=2), **{name: value})
    # Nor in a row that nobody looked at.
    with pytest.raises(PlanError, match=words):
        check_plan(replace(make_plan(), **{name: value}), transformer_trace, 4)


@pytest.mark.parametrize(
    ("facts", "shapes", "degree", "fix"),
    [
        ({"attention_heads": [12]}, None, 5, "12 attention heads .* 2, 3, 4, 6, 12"),
        ({"attention_heads": [12]}, None, 8, "12 attention heads .* 2, 3, 4, 6, 12"),
        ({"attention_heads": [8, 32]}, None, 16, "8 and 32 attention heads .* 2, 4, 8"),
        ({"row": {"heads": "6"}}, None, 4, "6 attention heads .* 2, 3, 6"),
        ({}, [[4, 7, 16, 8]] * 3, 2, "7 attention heads .* degree of 7"),
        ({}, [[4, 9, 16, 8], [4, 4, 16, 8]], 3, "4 and 9 .* degree of 1"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_degrees_that_do(
    facts, shapes, degree, fix, transformer_trace
):
    operators = transformer_trace.operators.copy()
    attention = operators["name"].str.contains("scaled_dot_product")
    assert attention.any()
    operators = operators[~attention] if shapes is None else operators
    for place in operators.index[attention.loc[operators.index]]:
        operators.at[place, "input_shapes"] = shapes
    known = replace(transformer_trace.facts, **{"row": {}, **facts})
    trace = replace(transformer_trace, operators=operators, facts=known)
    with pytest.raises(PlanError, match=fix):
        check_plan(make_plan(tensor=degree), trace, 4)
    check_plan(make_plan(), trace, 4)


def test_a_trace_alone_says_how_many_heads_there_are(transformer_trace):
    facts = replace(transformer_trace.facts, row=None, attention_heads=None)
    assert count_heads(replace(transformer_trace, facts=facts)) == [4]


def test_a_named_plan_of_other_ranks_than_asked_for_is_refused(monkeypatch):
    """A branch of our own is checked as a package's function is: else 3 ranks are answered for 2."""
    make = plans_module._make_named

    def make_pairs(name, ranks, *rest):
        return make_plan(data=ranks // 2, tensor=2) if name == "pairs" else make(name, ranks, *rest)

    monkeypatch.setattr(plans_module, "_make_named", make_pairs)
    assert named_plan("pairs", 4).plan == "pairs"
    with pytest.raises(PlanError, match="the plan 'pairs' returned a plan of 2 ranks"):
        named_plan("pairs", 3)
