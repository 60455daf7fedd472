"""Plans with pipeline schedules, from names, degrees and rows of plans.tsv.

What tensor parallelism cuts in traces that name no rules.
"""

import inspect
import itertools
import json
from dataclasses import replace

import pytest
from captured import BATCH
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from trioflow.base.columns import Columns, Texts
from trioflow.base.errors import PlanError, TableError
from trioflow.base.experiments import Plan, Workload, as_rows, load_experiments, load_plans, row_schema
from trioflow.base.plan_row import SCHEDULES
from trioflow.base.provenance import read_json
from trioflow.parallel import plan as plans_module
from trioflow.parallel.model_graph import ModelGraph
from trioflow.parallel.plan import check_plan, fit_framework, make_plan, micro_batch_sizes, named_plan, vary_plan
from trioflow.parallel.splits.pipeline import assign_units, balance_stages, build_buckets, partition, partition_trace
from trioflow.parallel.splits.tensor_split import (
    LAYERS,
    VOCABULARY,
    count_heads,
    find_layers,
    kind_of_module,
    prepare_split,
    split_like_megatron,
)
from trioflow.trace.store import Trace, load_trace, pipeline_units, save_trace

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
    full = write(tmp_path / "full.tsv", ROW.format("deep", 2, "interleaved", 4) + " 3", header=f"{OLD} stages_per_rank")
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
    sizes = dict.fromkeys(("image_size", "sequence", "hidden", "layers", "heads", "vocabulary", "causal"))
    workload = Workload("w", "user", "a:b", (2,), **sizes, optimizer="sgd", precision="fp32")
    path = write(tmp_path / "experiments.tsv", "e live w p 4", header="experiment set workload plan batch")
    with pytest.raises(TableError, match=r"column plan: .* schedule zbv, which is not measured yet"):
        load_experiments(path, {"w": workload}, plans)


def test_a_schedule_without_a_pipeline_is_none():
    assert make_plan(data=2, schedule="1f1b").schedule == "none"
    assert make_plan(pipeline=2, schedule="none").schedule == "gpipe"
    assert named_plan("zbv", 2).stages_per_rank == named_plan("dualpipev", 2, 4).stages_per_rank == 2


def test_replicas_share_a_batch_evenly():
    assert micro_batch_sizes(make_plan(data=2, pipeline=2, micro_batches=2), 10) == [3, 2]
    with pytest.raises(PlanError, match=r"batch 9 does not divide into 2 replica\(s\); use a multiple of 2"):
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
        ({"attention_heads": [12]}, None, 5, "12 heads.* 2, 3, 4, 6, 12"),
        ({"attention_heads": [12]}, None, 8, "12 heads.* 2, 3, 4, 6, 12"),
        ({"attention_heads": [8, 32]}, None, 16, "8 KV heads .32 query.* 2, 4, 8"),
        ({"row": {"heads": "6"}}, None, 4, "6 heads.* 2, 3, 6"),
        ({}, [[4, 7, 16, 8]] * 3, 2, "7 heads.* degree of 7"),
        ({}, [[4, 9, 16, 8], [4, 4, 16, 8]], 3, "4 KV heads .9.*degree of 1"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_degrees_that_do(facts, shapes, degree, fix, transformer_trace):
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


@pytest.fixture(scope="module")
def tiny():
    return load_trace("gpt2-tiny-b8")


def renamed(trace: Trace, modules: dict[str, str]) -> Trace:
    named = trace.operators["module"].map(lambda module: modules.get(module, ""))
    return Trace(trace.operators.assign(module=named), trace.tensors, trace.facts)


def test_megatron_s_rules_are_those_whose_modules_the_trace_has(tiny):
    first = str(tiny.operators["module"][tiny.operators["module"] != ""].iloc[0])
    trace = renamed(tiny, {first: "transformer.h.3.mlp.c_fc"})
    told = split_like_megatron(trace).facts.tensor_split
    assert told == {"*.mlp.c_fc": "column"}
    assert not set(LAYERS) & set(VOCABULARY)
    with pytest.raises(PlanError, match="no module of"):
        split_like_megatron(renamed(tiny, {first: "lm_head"}))


def test_a_table_of_another_tool_is_cut_by_the_names_of_its_modules(tiny):
    first, second = [m for m in dict.fromkeys(tiny.operators["module"]) if m][:2]
    named = renamed(tiny, {first: "transformer.h.3.mlp.c_fc", second: "lm_head"})
    nameless = replace(named.facts, tensor_split=None)
    trace = Trace(named.operators, named.tensors, nameless)
    for vocabulary, wanted in ((False, set()), (True, {"lm_head"})):
        plan = make_plan(tensor=2, vocabulary_parallel=vocabulary)
        check_plan(plan, trace, 8)
        rules = prepare_split(trace, plan).facts.tensor_split
        assert set(rules) == {"*.mlp.c_fc"} | wanted
    other = renamed(trace, {first: "elsewhere"})
    with pytest.raises(PlanError, match="no layers that a tensor split cuts"):
        check_plan(make_plan(tensor=2), other, 8)


def test_a_trace_s_own_rules_go_before_names(tiny):
    graph = ModelGraph.of(tiny)
    assert prepare_split(graph, make_plan(tensor=2)) is graph


def test_megatron_s_plan_shares_the_vocabulary_where_the_model_has_one(tiny):
    def shares(trace, name="tp"):
        return fit_framework(named_plan(name, 2), trace).vocabulary_parallel

    assert shares(tiny) and not shares(tiny, "tp-layers")
    first, second = [m for m in dict.fromkeys(tiny.operators["module"]) if m][:2]
    for head, shared in (("lm_head", True), ("elsewhere", False)):
        named = renamed(tiny, {first: "transformer.h.3.mlp.c_fc", second: head})
        nameless = replace(named.facts, tensor_split=None)
        assert shares(Trace(named.operators, named.tensors, nameless)) == shared
    wordless = Trace(tiny.operators, tiny.tensors.assign(category="buffer"), tiny.facts)
    assert not shares(wordless)
    # Megatron-LM's messages go beside backward's products, whoever asked for its recipe.
    for recipe, name, overlap in (
        ("megatron-bf16", "none", "backward"),
        ("nanotron-bf16", "none", "none"),
        ("megatron-bf16", "1f1b", "backward"),
        ("megatron-bf16", "zero-bubble", "none"),
    ):
        facts = replace(tiny.facts, precision_recipe=recipe, language_model={"layers": 2})
        stages = 2 if name != "none" else 1
        plan = make_plan(tensor=2, pipeline=stages, schedule=name, micro_batches=2 if stages > 1 else None)
        found = fit_framework(plan, Trace(tiny.operators, tiny.tensors, facts))
        assert found.tensor_overlap == overlap, (recipe, name)
    for overlap in ("none", "backward"):  # who names it is followed
        plan = make_plan(tensor=2, tensor_overlap=overlap)
        assert fit_framework(plan, Trace(tiny.operators, tiny.tensors, facts)).tensor_overlap == overlap
    # Who asks for it by its column is told that there is none.
    assert fit_framework(make_plan(tensor=2, vocabulary_parallel=True), wordless).vocabulary_parallel


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("Qwen2ForCausalLM", {}),
        ("MistralForCausalLM", {}),
        ("LlamaForCausalLM", {}),
        ("ViTForImageClassification", {}),
        (
            "WhisperForConditionalGeneration",
            {
                "encoder_layers": 1,
                "decoder_layers": 1,
                "d_model": 32,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
            },
        ),
    ],
)
def test_every_product_of_a_block_is_cut_by_its_name(tiny, model, sizes):
    torch = pytest.importorskip("torch", reason="the models are PyTorch's")
    pytest.importorskip("transformers", reason="the models come from transformers")
    from trioflow.trace.workloads.configured import import_transformers

    library = import_transformers("test")
    kind = getattr(library, model)
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.device("meta"):
        built = kind(kind.config_class(**(sizes or small)))
    modules = dict(built.named_modules())
    trace = ModelGraph(Columns({"module": Texts.of(modules)}), Columns({}), tiny.facts)
    rules = find_layers(trace)
    products = {
        name: module
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear) and any(part.isdigit() for part in name.split("."))
    }
    kinds = {name: kind_of_module(name, rules) for name in products}
    assert products and set(kinds.values()) == {"column", "row"}, kinds
    ends = ("o_proj", "out_proj", "down_proj", "fc2", "output.dense")
    assert {n for n, found in kinds.items() if found == "row"} == {n for n in kinds if n.endswith(ends)}


def test_a_recipe_of_fully_shard_is_refused_where_nothing_is_sharded(tiny):
    facts = replace(tiny.facts, precision_recipe="fsdp2-mixed")
    trace = Trace(tiny.operators, tiny.tensors, facts)
    for name in ("fsdp", "zero2", "zero3"):
        check_plan(named_plan(name, 2), trace, 8)
    for name in ("ddp", "distributed", "tp", "1f1b"):
        with pytest.raises(PlanError, match="fsdp2-mixed is what fully_shard computes in"):
            check_plan(named_plan(name, 2), trace, 8)


MIB = 2**20


def gradients(*sizes):
    return [{"name": f"p{i}", "size_bytes": size, "ready_after_op_id": 10 * i} for i, size in enumerate(sizes)]


def test_a_bucket_closes_after_it_reaches_its_limit():
    buckets = build_buckets(gradients(MIB // 2, MIB, 10 * MIB, 20 * MIB, 3 * MIB), MIB, 25 * MIB)
    assert [b.size_bytes for b in buckets] == [MIB // 2 + MIB, 30 * MIB, 3 * MIB]
    assert [b.ready_after_op_id for b in buckets] == [10, 30, 40]
    assert buckets[1].names == ("p2", "p3")


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 50), st.integers(1, 200))
def test_buckets_hold_every_gradient_once_in_order(sizes, first, limit):
    buckets = build_buckets(gradients(*sizes), first, limit)
    assert [n for b in buckets for n in b.names] == [f"p{i}" for i in range(len(sizes))]
    for index, bucket in enumerate(buckets[:-1]):
        bound = limit if index else first
        assert bucket.size_bytes >= bound
        assert bucket.size_bytes - bucket.sizes_bytes[-1] < bound


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), st.integers(1, 4))
def test_stages_are_cut_as_well_as_any_cut(times, stages):
    if len(times) < stages:
        with pytest.raises(PlanError):
            balance_stages(times, stages)
        return
    sizes = balance_stages(times, stages)
    assert sum(sizes) == len(times) and min(sizes) >= 1 and len(sizes) == stages

    def longest(cuts):
        edges = [0, *cuts, len(times)]
        return max(sum(times[a:b]) for a, b in itertools.pairwise(edges))

    best = min(longest(c) for c in itertools.combinations(range(1, len(times)), stages - 1))
    mine = longest(list(itertools.accumulate(sizes))[:-1])
    assert mine == pytest.approx(best)


def test_every_operator_has_a_unit_in_order(cnn_trace):
    units = assign_units(cnn_trace)
    forward = units[: (cnn_trace.operators["phase"] == "forward").sum()]
    assert (forward[1:] >= forward[:-1]).all()
    assert set(units) == set(range(len(pipeline_units(cnn_trace))))


def test_the_partition_file_says_what_a_real_run_needs(tmp_path, cnn_trace):
    save_trace(cnn_trace, tmp_path / "trace")
    partition_trace([tmp_path / "trace"], [1, 2, 3], tmp_path / "partition.json")
    content = read_json(tmp_path / "partition.json")
    assert set(content["stages"]) == {"2", "3"}
    assert content["stages"]["3"] == partition(cnn_trace, 3)
    assert [u for stage in content["stages"]["2"] for u in stage] == list(pipeline_units(cnn_trace))
    assert content["traced_steps_s"] == {str(BATCH): cnn_trace.facts.step_time_s}
    assert content["parameter_bytes"] == sum(g["size_bytes"] for g in cnn_trace.facts.gradients)


def with_times(trace, phases):
    """Return the trace with a millisecond for each operator of some phases, none for the others."""
    operators = trace.operators.copy()
    operators["device_ns"] = operators["phase"].isin(phases).astype("int64") * 1_000_000
    operators["cpu_ns"] = operators["cpu_ns"] * 0
    return Trace(operators, trace.tensors, trace.facts)


def test_the_optimizer_decides_no_stage():
    trace = load_trace("gpt2-b8")
    assert trace.operators.query("phase == 'optimizer'")["module"].nunique() == 1, "one for all"
    alone = partition(with_times(trace, ["forward", "backward"]), 6)
    assert partition(with_times(trace, ["forward", "backward", "optimizer"]), 6) == alone
    assert max(map(len, alone)) <= 3


def test_a_trace_without_times_is_cut_by_layers():
    trace = with_times(load_trace("gpt2-b8"), [])
    stages = partition(trace, 6)
    assert stages == partition(trace, 6, "count")
    assert max(map(len, stages)) == 3
