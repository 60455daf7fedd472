"""The optimizer is shared out by what each rank owns, whatever form it runs in."""

from math import prod

import pandas as pd
import pytest
from captured import BATCH, TRANSFORMER, with_steady_times
from same_model import ProportionalModel
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.splits.updates import find_owners, list_updates, scale_work

pytest.importorskip("torch", reason="capture needs torch (extra [capture])")

FORMS = ("adamw", "adamw-foreach", "adamw-fused")
STATE = "optimizer_state"
PLANS = {
    "tensor": make_plan(tensor=2),
    "pipeline": make_plan(pipeline=2, schedule="1f1b", micro_batches=2),
    "interleaved": make_plan(
        pipeline=2, schedule="interleaved", micro_batches=2, stages_per_rank=2
    ),
    "both": make_plan(tensor=2, pipeline=2, schedule="1f1b", micro_batches=2),
    "zero1": make_plan(data=3, sharding="zero1"),
    "fsdp": make_plan(data=3, sharding="fsdp"),
    "fsdp and tensor": make_plan(data=2, tensor=2, sharding="fsdp"),
}


def test_a_share_of_an_operator_that_is_not_there_is_refused() -> None:
    work = ("flop", "read_bytes", "write_bytes")
    columns = {name: [10, 20, 30] for one in work for name in (one, f"batch_{one}")}
    operators = pd.DataFrame(columns, index=[5, 6, 7])
    assert scale_work(operators, {6: 0.5})["flop"].tolist() == [10, 10, 30]
    with pytest.raises(KeyError, match="99"):
        scale_work(operators, {99: 0.5})


@pytest.fixture(scope="module")
def forms():
    """One step with its optimizer as a loop over parameters, over lists of them, and in one call."""
    from trioflow.trace.capture.meta import capture_meta

    made = {}
    for form in FORMS:
        made[form] = with_steady_times(
            capture_meta({**TRANSFORMER, "optimizer": form}, BATCH, target="cpu")
        )
    return made


def build(trace, plan):
    # Four units, two a stage: the loop and the lists are cut in the same place.
    names = [unit["name"] for unit in trace.facts.units]
    size = -(-len(names) // plan.stages)
    stages = [names[i : i + size] for i in range(0, len(names), size)]
    return extrapolate(
        trace,
        plan,
        ProportionalModel(),
        batch=BATCH * plan.data,
        stages=stages if plan.pipeline > 1 else None,
    )


def held(graph, category):
    """Return what each rank holds of a category [bytes]."""
    return {
        rank: entry["categories"].get(category, 0)
        for entry in graph.metadata.memory
        for rank in entry["ranks"]
    }


@pytest.mark.parametrize("name", PLANS)
def test_each_rank_holds_the_state_of_its_parameters(name, forms):
    graphs = {form: build(trace, PLANS[name]) for form, trace in forms.items()}
    loop = held(graphs["adamw"], STATE)
    for form in FORMS[1:]:
        # A loop makes single numbers, such as counts of steps, for every parameter.
        assert held(graphs[form], STATE) == pytest.approx(loop, rel=0.01), form
        for category in ("parameter", "gradient"):
            assert held(graphs[form], category) == held(graphs["adamw"], category), form


@pytest.mark.parametrize("name", ["tensor", "pipeline", "interleaved", "both", "zero1", "fsdp"])
@pytest.mark.parametrize("form", FORMS[1:])
def test_each_rank_does_the_work_of_its_parameters(name, form, forms):
    plan, trace = PLANS[name], forms[form]
    tasks = build(trace, plan).tasks
    updates = tasks[
        (tasks["phase"] == "optimizer")
        & tasks["op_id"].isin(list_updates(trace.operators))
        & (tasks["kind"] == "compute")
    ]
    operators = trace.operators.set_index("op_id")
    host_s = operators["cpu_ns"] / 1e9
    done = updates.assign(work_s=updates["duration_s"] - updates["op_id"].map(host_s))
    by_operator = done.groupby("op_id")["work_s"].sum()
    assert len(by_operator) == len(list_updates(trace.operators))
    rules, parts = trace.facts.tensor_split, plan.tensor
    # Layers that are split are done once by all tensor ranks, the others once by each.
    whole = sum(prod(p["shape"]) for p in trace.facts.parameters)
    split = sum(prod(p["shape"]) for p in trace.facts.parameters if is_cut(p["name"], rules))
    copies = 1 + (parts - 1) * (1 - split / whole)
    expected = operators["device_ns"] / 1e9 * copies
    # Rows that do not divide are padded, and each operator takes at least what its launch does.
    assert by_operator.to_dict() == pytest.approx(expected[by_operator.index].to_dict(), rel=0.05)


def is_cut(name, rules):
    from trioflow.parallel.splits.tensor_split import is_sharded

    module = name.rpartition(".")[0]
    return is_sharded({"name": name, "module": module}, rules) or (
        name.endswith("bias")
        and is_sharded({"name": module + ".weight", "module": module}, rules)
        and not name.endswith(("projection.bias", "down.bias"))
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_state_has_its_parameter(form, forms):
    trace = forms[form]
    owners = find_owners(trace).of_storage
    rows = trace.tensors.drop_duplicates("storage_id")
    states = rows[(rows["category"] == STATE) & rows["shape"].map(len).gt(0)]
    parameters = trace.facts.parameters
    assert len(states) >= 2 * len(parameters)
    for storage, shape in zip(states["storage_id"], states["shape"], strict=True):
        assert list(shape) == parameters[owners[storage]]["shape"]
    kept = states[states["producer_op_id"].isna()]
    assert sorted(owners[s] for s in kept["storage_id"]) == sorted([*range(len(parameters))] * 2)
