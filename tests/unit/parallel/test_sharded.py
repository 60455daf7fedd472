"""Sharded data parallelism: FSDP units, parts of the optimizer, hooks on the host; replicas of one process.

What runs where and waits for what, golden answers keep (`made.step`) and tests/conformance compares with PyTorch.
"""

import json
from dataclasses import replace

import pytest
from captured import BATCH
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from same_model import ProportionalModel
from test_staged_program import run_graph
from trioflow.base.errors import PlanError, TableError
from trioflow.base.experiments import SHARDINGS, as_rows, load_plans, row_schema
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import micro_batch_sizes, named_plan
from trioflow.parallel.splits.pipeline import list_parameters
from trioflow.parallel.splits.sharding import build_units, describe_units, partition_parameters
from trioflow.tables import records
from trioflow.trace.store import Trace
from trioflow_evaluation.one_process.programs import BUFFER_BYTES, coalesce

MODEL = ProportionalModel()
COLLECTIVE_S, OPERATOR_S, COPY_S = 2**-1, 1.0, 2**-10
"""Times that tell the kinds of task apart, and leave all-gathers room beside compute."""


@pytest.fixture(scope="module")
def gpu_trace(transformer_trace):
    """The small transformer as if a device with streams had run it, launched at once."""
    operators = transformer_trace.operators.copy()
    operators["cpu_ns"] = 0
    facts = replace(transformer_trace.facts, device="cuda", tail_s=0.0)
    return Trace(operators, transformer_trace.tensors, facts)


def run(graph):
    """Return the tasks of rank 0 with the times at which they start and end."""
    tasks = graph.tasks
    tasks.loc[tasks["kind"] == "collective", "duration_s"] = COLLECTIVE_S
    tasks.loc[tasks["kind"] == "compute", "duration_s"] = OPERATOR_S
    tasks.loc[tasks["kind"] == "memcpy", "duration_s"] = COPY_S
    ends = run_graph(graph)
    rows = [row for row in records(tasks) if row["rank"] == 0]
    for row in rows:
        row["end"] = ends[row["task_id"]]
        row["start"] = row["end"] - (row["duration_s"] or 0.0)
    return rows


def test_hooks_cost_the_host_of_a_cpu_and_run_beside_a_gpu(transformer_trace, gpu_trace):
    costs = {"sharded_forward_s": 0.25, "sharded_backward_s": 0.5}
    for trace, stream in ((transformer_trace, "compute"), (gpu_trace, "host")):
        graph = extrapolate(trace, named_plan("fsdp", 2), MODEL, host=costs)
        tasks = graph.tasks[(graph.tasks["rank"] == 0) & (graph.tasks["kind"] == "host")]
        hooks = tasks[tasks["name"] == "fully_shard: hooks"]
        assert set(hooks["stream"]) == {stream}
        # Three units: each enters forward; in backward each enters and leaves.
        assert hooks["duration_s"].tolist() == [0.25] * 3 + [0.5] * 6


def test_the_table_of_plans_names_shardings(tmp_path):
    header = "plan data tensor pipeline schedule micro_batches first_bucket_bytes bucket_bytes"
    row = "{} 4 1 1 none 1 1048576 26214400 {} {} {}"

    def load(*rows):
        lines = [f"{header} sharding shard accumulate", *rows]
        path = tmp_path / "plans.tsv"
        path.write_text("\n".join("\t".join(line.split()) for line in lines) + "\n")
        return load_plans(path)

    plans = load(*(row.format(s, s, 2 if s == "hsdp" else 1, 2) for s in SHARDINGS))
    assert [(p.sharding, p.accumulate) for p in plans.values()] == [(s, 2) for s in SHARDINGS]
    for told in as_rows(plans.values()):
        Draft202012Validator(row_schema("plans")).validate(json.loads(json.dumps(told)))
    with pytest.raises(TableError, match=r"row 1 .*column shard: .* several groups of 3"):
        load(row.format("a", "hsdp", 3, 1))
    with pytest.raises(TableError, match=r"column sharding: .*zero4"):
        load(row.format("a", "zero4", 1, 1))


BLOCKS = ["blocks.0", "blocks.1"]


def with_facts(trace, **facts):
    return Trace(trace.operators, trace.tensors, replace(trace.facts, **facts))


def test_every_gradient_of_a_unit_is_ready_when_its_backward_ends(cnn_trace, transformer_trace):
    for trace in (cnn_trace, transformer_trace):
        ready = {g["name"]: g["ready_after_op_id"] for g in trace.facts.gradients}
        for unit in build_units(trace)[:-1]:
            assert max(ready[p.name] for p in unit.parameters) <= unit.last_backward


def test_a_unit_that_shares_a_parameter_is_left_to_the_root(tied_trace):
    units = tied_trace.facts.units
    assert {unit.name for unit in build_units(tied_trace)} == {u["name"] for u in units[1:-1]} | {""}
    # With a unit behind it, the one that uses the embedding's weight again is an inner one.
    longer = [*units, {"name": "nothing", "modules": ["nothing"]}]
    found = build_units(with_facts(tied_trace, units=longer))
    assert {unit.name for unit in found} == {u["name"] for u in units[1:-1]} | {""}


def test_repeated_blocks_are_units_where_none_are_named(transformer_trace, cnn_trace):
    nameless = with_facts(transformer_trace, units=[])
    told, found = build_units(transformer_trace), build_units(nameless)
    assert [u.name for u in found] == [u.name for u in told] == [*BLOCKS, ""]
    assert found == told
    assert describe_units(nameless) == "units: 2 x blocks.* + rest"
    assert describe_units(with_facts(cnn_trace, units=[])).startswith("units: 2 x layer1.* + 2 x")
    text = extrapolate(nameless, named_plan("fsdp", 2), ProportionalModel()).metadata.plan_text
    assert text.endswith(", FSDP, mbs 4, units: 2 x blocks.* + rest")


def test_a_model_without_blocks_is_one_unit_and_says_so(transformer_trace):
    operators = transformer_trace.operators.assign(module="")
    trace = replace(with_facts(transformer_trace, units=[]), operators=operators)
    (root,) = build_units(trace)
    assert len(root.parameters) == len(transformer_trace.facts.parameters)
    assert describe_units(trace) == "units: the whole model at once"


def test_a_unit_whose_input_has_no_gradient_is_reduced_at_the_end(transformer_trace):
    units = [{"name": "nothing", "modules": ["nothing"]}, *transformer_trace.facts.units]
    found = build_units(with_facts(transformer_trace, units=units))
    assert [(u.name, u.in_graph) for u in found] == [
        ("embedding", False),
        ("blocks.0", True),
        ("blocks.1", True),
        ("", False),
    ]


def test_parameters_are_found_where_only_gradients_are_told(transformer_trace):
    told = {p.name: p for p in list_parameters(transformer_trace)}
    found = list_parameters(with_facts(transformer_trace, parameters=[]))
    assert {p.name: p for p in found} == told
    with pytest.raises(PlanError, match="does not say which parameters"):
        list_parameters(with_facts(transformer_trace, parameters=[], gradients=[]))


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 5))
def test_parts_hold_every_parameter_once_and_differ_by_one_at_most(sizes, ranks):
    parts = partition_parameters(sizes, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    sums = [sum(sizes[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(sizes, default=0)


MIB = 2**20


def as_gpu(trace: Trace, cpu_ns: int | None = None) -> Trace:
    """Return a trace as of a device beside its host."""
    operators = trace.operators if cpu_ns is None else trace.operators.assign(cpu_ns=cpu_ns)
    facts = replace(trace.facts, device="cuda", tail_s=0.0)
    return replace(trace, operators=operators, facts=facts)


def of_rank(graph, rank):
    return graph.tasks[graph.tasks["rank"] == rank]


def test_a_broadcasts_buffer_closes_once_it_is_full():
    sizes = [(6 * MIB, 4), (6 * MIB, 4), (1, 8), (3 * MIB, 4), (2, 8)]
    assert coalesce(sizes) == [12 * MIB, 3 * MIB, 3]
    assert coalesce([(BUFFER_BYTES, 4), (1, 4)]) == [BUFFER_BYTES, 1]
    assert coalesce([]) == coalesce([], sums=True) == []


def test_a_sums_buffer_closes_before_it_overflows():
    sizes = [(6 * MIB, 4), (6 * MIB, 4), (1, 8), (30 * MIB, 4), (3 * MIB, 4)]
    assert coalesce(sizes, sums=True) == [6 * MIB, 6 * MIB, 30 * MIB, 3 * MIB, 1]
    assert coalesce([(BUFFER_BYTES, 4), (1, 4)], sums=True) == [BUFFER_BYTES, 1]


def test_replicas_are_launched_in_turn_under_the_lock(transformer_trace):
    """Launches far longer than kernels: forward takes as long as all replicas' launches together."""
    trace = as_gpu(transformer_trace, cpu_ns=1_000_000)
    graph = extrapolate(trace, named_plan("dp", 3), MODEL, batch=3 * BATCH)
    host = graph.tasks[graph.tasks["stream"] == "host"]
    forward, backward = (host[host["phase"] == phase] for phase in ("forward", "backward"))
    assert set(forward["rank"]) == {0} and set(backward["rank"]) == {0, 1, 2}
    operators = trace.operators
    model = (operators["phase"] == "forward") & (
        operators["op_id"]
        <= operators.loc[(operators["phase"] == "forward") & (operators["module"] != ""), "op_id"].max()
    )
    loss = (operators["phase"] == "forward") & ~model
    assert len(forward) == 3 * model.sum() + loss.sum()
    result = simulate(graph, load_platform("a100x4-nvlink", 3))
    phases = operators["phase"].value_counts()
    # Backward has a thread for each device, so its launches do not add up.
    expected = (len(forward) + phases["backward"] + phases["optimizer"]) * 1e-3
    assert result.summary.step_time_s == pytest.approx(expected, rel=0.05)


def test_a_last_device_may_get_fewer_samples_or_none(transformer_trace):
    plan = named_plan("dp", 4)
    graph = extrapolate(transformer_trace, plan, MODEL, batch=7)
    assert "mbs up to 2, DataParallel" in graph.metadata.plan_text
    sizes = of_rank(graph, 0)
    assert sizes.loc[sizes["name"] == "send inputs", "message_bytes"].tolist() == [256, 256, 128]
    graph = extrapolate(transformer_trace, plan, MODEL, batch=6)
    idle = of_rank(graph, 3)
    assert idle["duration_s"].sum() == 0 and idle["message_bytes"].isna().all()
    assert set(graph.tasks["group"].dropna()) == {"0,1,2"}
    simulate(graph, load_platform("a100x4-nvlink", 4))
    with pytest.raises(PlanError, match="batch 0 is not positive"):
        micro_batch_sizes(plan, 0)


def test_outputs_must_be_known(transformer_trace):
    tensors = transformer_trace.tensors.assign(category="input")
    with pytest.raises(PlanError, match="no output of the model that its loss reads"):
        extrapolate(replace(transformer_trace, tensors=tensors), named_plan("dp", 2), MODEL)
