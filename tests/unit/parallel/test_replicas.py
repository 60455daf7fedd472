from dataclasses import replace

import pytest
from captured import BATCH
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan, replica_sizes
from trioflow.trace.store import Trace
from trioflow_evaluation.one_process.gathered_layers import (
    BUFFER_BYTES,
    coalesce_broadcasts,
    coalesce_sums,
)

MODEL = ProportionalModel()
MIB = 2**20


def as_gpu(trace: Trace, cpu_ns: int | None = None) -> Trace:
    """Return a trace as of a device beside its host."""
    operators = trace.operators if cpu_ns is None else trace.operators.assign(cpu_ns=cpu_ns)
    facts = replace(trace.facts, device="cuda", tail_s=0.0)
    return replace(trace, operators=operators, facts=facts)


def parameter_bytes(trace):
    return sum(g["size_bytes"] for g in trace.facts.gradients)


def of_rank(graph, rank):
    return graph.tasks[graph.tasks["rank"] == rank]


def test_a_broadcasts_buffer_closes_once_it_is_full():
    sizes = [(6 * MIB, 4), (6 * MIB, 4), (1, 8), (3 * MIB, 4), (2, 8)]
    assert coalesce_broadcasts(sizes) == [12 * MIB, 3 * MIB, 3]
    assert coalesce_broadcasts([(BUFFER_BYTES, 4), (1, 4)]) == [BUFFER_BYTES, 1]
    assert coalesce_broadcasts([]) == coalesce_sums([]) == []


def test_a_sums_buffer_closes_before_it_overflows():
    sizes = [(6 * MIB, 4), (6 * MIB, 4), (1, 8), (30 * MIB, 4), (3 * MIB, 4)]
    assert coalesce_sums(sizes) == [6 * MIB, 6 * MIB, 30 * MIB, 3 * MIB, 1]
    assert coalesce_sums([(BUFFER_BYTES, 4), (1, 4)]) == [BUFFER_BYTES, 1]


@pytest.mark.parametrize("devices", [2, 3])
def test_a_step_moves_parameters_twice_and_samples_twice(cnn_trace, devices):
    batch = 2 * devices
    graph = extrapolate(cnn_trace, named_plan("dp", devices), MODEL, batch=batch)
    tasks = of_rank(graph, 0)

    def moved(name):
        return int(tasks.loc[tasks["name"] == name, "message_bytes"].sum())

    buffers = sum(
        (1 if not b["shape"] else b["shape"][0]) * b["elem_bytes"] for b in cnn_trace.facts.buffers
    )
    assert moved("broadcast") == parameter_bytes(cnn_trace) + buffers
    assert moved("reduce") == parameter_bytes(cnn_trace)
    others = batch - 2
    assert moved("send inputs") == others * 3 * 32 * 32 * 4
    assert moved("recv outputs") == moved("send output gradients") == others * 1000 * 4
    for rank in range(1, devices):
        mine = of_rank(graph, rank)
        assert (
            int(mine.loc[mine["name"] == "recv inputs", "message_bytes"].sum())
            == 2 * 3 * 32 * 32 * 4
        )


def test_only_the_first_device_has_loss_and_optimizer(transformer_trace):
    graph = extrapolate(transformer_trace, named_plan("dp", 2), MODEL, batch=2 * BATCH)
    for rank in range(2):
        tasks = of_rank(graph, rank)
        loss = tasks["name"].str.contains("cross_entropy|nll_loss|log_softmax")
        assert loss.any() == (rank == 0)
        assert (tasks["phase"] == "optimizer").any() == (rank == 0)
    # The loss is of the whole batch, twice the traced one, and replicas are of the traced one.
    tasks, whole = of_rank(graph, 0), transformer_trace.operators
    row = whole[whole["name"] == "aten::_log_softmax_backward_data"].iloc[0]
    took = tasks.loc[tasks["name"] == row["name"], "duration_s"].iloc[0]
    assert took == pytest.approx((2 * row["device_ns"] + row["cpu_ns"]) / 1e9)
    linear = whole[(whole["phase"] == "backward") & (whole["flop"] > 0)].iloc[0]
    took = tasks.loc[tasks["op_id"] == linear["op_id"], "duration_s"].iloc[0]
    assert took == pytest.approx((linear["device_ns"] + linear["cpu_ns"]) / 1e9)


def test_nothing_overlaps_and_sums_come_last(transformer_trace):
    trace = as_gpu(transformer_trace, cpu_ns=0)
    graph = extrapolate(trace, named_plan("dp", 2), MODEL, batch=2 * BATCH)
    assert set(graph.tasks["stream"]) == {"host", "compute"}
    order = of_rank(graph, 0)[lambda t: t["stream"] == "compute"]
    backward = order[(order["phase"] == "backward") & order["op_id"].notna()]["task_id"].max()
    update = order[order["phase"] == "optimizer"]["task_id"].min()
    sums = order[order["name"] == "reduce"]["task_id"]
    assert backward < sums.min() and sums.max() < update
    # With launches that cost nothing the step is what the first device does, one after the other.
    result = simulate(graph, load_platform("a100x4-nvlink", 2))
    mine = result.timeline[
        (result.timeline["rank"] == 0) & (result.timeline["stream"] == "compute")
    ]
    idle = result.summary.step_time_s - (mine["end_s"] - mine["start_s"]).sum()
    assert abs(idle) < 0.01 * result.summary.step_time_s


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
        <= operators.loc[
            (operators["phase"] == "forward") & (operators["module"] != ""), "op_id"
        ].max()
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
    assert replica_sizes(plan, 6) == [2, 2, 2]
    assert replica_sizes(plan, 7) == [2, 2, 2, 1]
    graph = extrapolate(transformer_trace, plan, MODEL, batch=7)
    assert "at most 2 samples a rank, DataParallel" in graph.metadata.plan_text
    sizes = of_rank(graph, 0)
    assert sizes.loc[sizes["name"] == "send inputs", "message_bytes"].tolist() == [256, 256, 128]
    graph = extrapolate(transformer_trace, plan, MODEL, batch=6)
    idle = of_rank(graph, 3)
    assert idle["duration_s"].sum() == 0 and idle["message_bytes"].isna().all()
    assert set(graph.tasks["group"].dropna()) == {"0,1,2"}
    simulate(graph, load_platform("a100x4-nvlink", 4))
    with pytest.raises(PlanError, match="batch 0 is not positive"):
        replica_sizes(plan, 0)


def test_the_first_device_alone_holds_optimizer_state(transformer_trace):
    graph = extrapolate(transformer_trace, named_plan("dp", 2), MODEL, batch=2 * BATCH)
    first, other = graph.metadata.memory
    size = parameter_bytes(transformer_trace)
    for rank in (first, other):
        assert rank["categories"]["parameter"] == pytest.approx(size, rel=0.01)
    assert first["categories"]["optimizer_state"] >= 2 * size
    assert "optimizer_state" not in other["categories"]
    assert first["peak_bytes"] > other["peak_bytes"]


def test_outputs_must_be_known(transformer_trace):
    tensors = transformer_trace.tensors.assign(category="input")
    with pytest.raises(PlanError, match="no output of the model that its loss reads"):
        extrapolate(replace(transformer_trace, tensors=tensors), named_plan("dp", 2), MODEL)
