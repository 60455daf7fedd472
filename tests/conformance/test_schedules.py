"""Schedule tables are PyTorch's own: action by action, rank by rank, and what it refuses we refuse."""

import itertools
import logging
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from captured import CNN, TRANSFORMER
from rank_runs import run_ranks
from same_model import ProportionalModel
from trioflow.base.errors import PlanError
from trioflow.parallel.backward import split_backward
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.parallel.schedules.build import (
    add_communication,
    build_schedule,
    check_schedule,
    lower_schedule,
    read_schedule,
    write_schedule,
)
from trioflow.parallel.schedules.table import leaves
from trioflow.parallel.splits.pipeline import split_samples, stages_of_operators

torch = pytest.importorskip("torch", reason="the real tables need torch (extra [capture])")
real = pytest.importorskip("torch.distributed.pipelining.schedules")

LOOPED = {
    "interleaved": real.ScheduleInterleaved1F1B,
    "looped-bfs": real.ScheduleLoopedBFS,
    "zero-bubble": real.ScheduleInterleavedZeroBubble,
    "zbv": real.ScheduleZBVZeroBubble,
    "dualpipev": real.ScheduleDualPipeV,
}
MODEL = ProportionalModel()
RANKS, MICRO_BATCHES, STAGES = range(2, 9), range(1, 17), range(1, 5)
REFUSALS = (ValueError, AssertionError)
"""What PyTorch raises for shapes that a schedule does not allow."""


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.ERROR)


def make_real(kind, p, m, v):
    """Return PyTorch's schedule, made on rank 0 of ``p`` with stages that do nothing."""
    stages = [
        SimpleNamespace(num_stages=p * v, group_size=p, group_rank=0, stage_index=i * p, submod=None) for i in range(v)
    ]
    return LOOPED[kind](stages, m)


def texts(row):
    """Return a row as cells; None idles."""
    return [None if action is None else str(action) for action in row]


def is_refused(make, *shape):
    """Tell whether PyTorch refuses a shape."""
    try:
        return None, make(*shape)
    except REFUSALS as error:
        return error, None


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow if k in ("zero-bubble", "looped-bfs") else ()) for k in LOOPED]
)
def test_looped_tables_are_those_of_pytorch(kind, compare):
    about = {"plan": kind, "ranks": "2 to 8", "against": "its classes"}
    accepted = refused = 0
    for p, m, v in itertools.product(RANKS, MICRO_BATCHES, STAGES):
        error, theirs = is_refused(make_real, kind, p, m, v)
        if error is not None:
            with pytest.raises(PlanError) as caught:
                check_schedule(lower_schedule(build_schedule(kind, p, m, v)))
            numbers = str(caught.value)
            assert str(m) in numbers or f"{v} stages" in numbers, (p, m, v, numbers, error)
            refused += 1
            continue
        ours = build_schedule(kind, p, m, v)
        lowered = lower_schedule(ours)
        for rank in range(p):
            for what, row, real_row in (
                ("schedule, compute", ours.rows[rank], theirs.pipeline_order[rank]),
                ("schedule with messages", lowered.rows[rank], theirs.pipeline_order_with_comms[rank]),
            ):
                compare(what, texts(row), texts(real_row), **about)
        assert ours.rank_of_stage == theirs.stage_index_to_group_rank
        check_schedule(ours)
        check_schedule(lowered)
        accepted += 1
    few = sum(m < 2 * p for p, m in itertools.product(RANKS, MICRO_BATCHES))
    uneven = sum(m % max(1, m // p) > 0 for p, m in itertools.product(RANKS, MICRO_BATCHES))
    assert (
        refused
        == {
            "interleaved": uneven * len(STAGES),
            "zero-bubble": uneven * len(STAGES),
            "looped-bfs": 0,
            "zbv": len(RANKS) * len(MICRO_BATCHES) * (len(STAGES) - 1),
            "dualpipev": len(RANKS) * len(MICRO_BATCHES) * (len(STAGES) - 1) + few,
        }[kind]
    )
    assert accepted + refused == len(RANKS) * len(MICRO_BATCHES) * len(STAGES)


class Recorder:
    """A stage that notes what a schedule asks of it, and moves nothing."""

    has_backward = True

    def __init__(self, rank, ranks):
        self.stage_index, self.num_stages = rank, ranks
        self.is_first, self.is_last = rank == 0, rank == ranks - 1
        self.calls = []

    def forward_one_chunk(self, micro_batch, *_, **__):
        self.calls.append(f"{self.stage_index}F{micro_batch}")
        return torch.zeros(())

    def backward_one_chunk(self, micro_batch, *_, full_backward=True, last_backward=False, **__):
        assert full_backward
        self.calls.append(f"{self.stage_index}B{micro_batch}")
        self.last_backward = (micro_batch, last_backward)

    def perform_reduce_grad(self, scale):
        self.calls.append(f"{self.stage_index}REDUCE_GRAD")
        self.scale = scale

    def _messages(self, kind, other, micro_batch):
        if 0 <= other < self.num_stages:
            self.calls.append(f"{self.stage_index}{kind}{micro_batch}")
        return []

    def get_fwd_recv_ops(self, micro_batch):
        return self._messages("RECV_F", self.stage_index - 1, micro_batch)

    def get_fwd_send_ops(self, micro_batch):
        return self._messages("SEND_F", self.stage_index + 1, micro_batch)

    def get_bwd_recv_ops(self, micro_batch):
        return self._messages("RECV_B", self.stage_index + 1, micro_batch)

    def get_bwd_send_ops(self, micro_batch):
        return self._messages("SEND_B", self.stage_index - 1, micro_batch)


def record_single(kind, rank, p, m):
    """Run one rank's step of PyTorch's GPipe or 1F1B and return the recorder."""
    stage = Recorder(rank, p)
    schedule = kind(stage, m, loss_fn=lambda output, target: output)
    schedule._initialize_stage = lambda *_, **__: None
    schedule._step_microbatches(target_mbs=[None] * m)
    return stage


@pytest.mark.parametrize(("name", "kind"), [("gpipe", real.ScheduleGPipe), ("1f1b", real.Schedule1F1B)])
def test_single_stage_tables_are_what_pytorch_calls(name, kind, compare):
    about = {"plan": name, "ranks": "2 to 8", "against": "its classes"}
    refused = 0
    for p, m in itertools.product(RANKS, MICRO_BATCHES):
        error, _ = is_refused(kind, Recorder(0, p), m)
        if error is not None:
            # Megatron-LM runs what PyTorch refuses: test_schedules.py of the unit tests.
            assert (name, m < p) == ("1f1b", True)
            refused += 1
            continue
        ours = build_schedule(name, p, m)
        lowered = lower_schedule(ours)
        for rank in range(p):
            stage = record_single(kind, rank, p, m)
            computed = [c for c in stage.calls if not c[1:].startswith(("SEND", "RECV", "RED"))]
            compare("schedule, compute", texts(ours.rows[rank]), computed, **about)
            assert stage.last_backward == (m - 1, True)
            assert stage.scale == m and stage.calls[-1] == f"{rank}REDUCE_GRAD"
            # The messages of each direction, in order: they are asked for early and late otherwise.
            for message in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
                asked = [c for c in stage.calls if message in c]
                told = [c for c in texts(lowered.rows[rank]) if message in c]
                compare("schedule, messages", told, asked, **about)
        check_schedule(lowered)
    assert refused == (0 if name == "gpipe" else sum(p - 1 for p in RANKS))


def test_messages_of_single_stage_tables_are_those_of_the_runtime():
    for name, p, m in (("gpipe", 3, 5), ("1f1b", 2, 4), ("1f1b", 4, 7), ("1f1b", 8, 16)):
        ours = build_schedule(name, p, m)
        rows = {rank: [real._Action.from_str(cell) for cell in texts(row)] for rank, row in enumerate(ours.rows)}
        theirs = real._add_send_recv(rows, stage_to_rank=lambda s: s, num_stages=p)
        assert [texts(row) for row in add_communication(ours).rows] == [texts(theirs[rank]) for rank in range(p)]


@pytest.mark.parametrize("kind", LOOPED)
def test_each_reads_the_other_s_files(kind, tmp_path):
    p, m, v = 4, 8, 2
    theirs, ours = make_real(kind, p, m, v), build_schedule(kind, p, m, v)
    lowered = lower_schedule(ours)
    for form, mine in (("compute_only", ours), ("compute_comms", lowered)):
        theirs._dump_csv(str(tmp_path / "theirs.csv"), format=form)
        write_schedule(mine, tmp_path / "ours.csv")
        assert (tmp_path / "ours.csv").read_bytes() == (tmp_path / "theirs.csv").read_bytes()
        assert read_schedule(tmp_path / "theirs.csv", kind) == mine
    write_schedule(ours, tmp_path / "ours.csv")
    runtime = real._PipelineScheduleRuntime(theirs._stages, m)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    assert runtime.pipeline_order == theirs.pipeline_order
    assert runtime.pipeline_order_with_comms == theirs.pipeline_order_with_comms
    write_schedule(lowered, tmp_path / "lowered.csv")
    runtime._load_csv(str(tmp_path / "lowered.csv"), format="compute_comms")
    assert runtime.pipeline_order_with_comms == theirs.pipeline_order_with_comms


def test_pytorch_accepts_the_table_with_recomputation(tmp_path):
    """A forward that runs twice passes PyTorch's own validation of tables."""
    write_schedule(build_schedule("gpipe-recompute", 2, 3), tmp_path / "pipe.csv")
    stage = SimpleNamespace(num_stages=2, group_size=2, group_rank=0, stage_index=0, submod=None)
    schedule = real.PipelineScheduleMulti([stage], 3)
    schedule._load_csv(str(tmp_path / "pipe.csv"))
    assert texts(schedule.pipeline_order[1]) == ["1F0", "1F1", "1F2", "1B2", "1F1", "1B1", "1F0", "1B0"]


def test_micro_batches_that_do_not_divide_are_cut_as_pytorch_cuts_them():
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _split_tensor

    for batch, m in itertools.product(range(1, 40), range(1, 17)):
        if batch < m:
            with pytest.raises(AssertionError):
                _split_tensor(torch.zeros(batch), TensorChunkSpec(0), m)
            with pytest.raises(PlanError, match=f"{batch} samples"):
                split_samples(batch, m)
            continue
        theirs = _split_tensor(torch.zeros(batch), TensorChunkSpec(0), m)
        assert split_samples(batch, m) == [len(chunk) for chunk in theirs]


def run_real(row, name, p, v, m, batch, cut, folder):
    """Run a schedule on ``p`` gloo ranks; return what each recorded."""
    schedule = build_schedule(name, p, m, v)
    job = {
        "row": row,
        "schedule": name,
        "ranks": p,
        "micro_batches": m,
        "batch": batch,
        "stages": cut,
        "stages_of_rank": [schedule.stages_of_rank(rank) for rank in range(p)],
    }
    return run_ranks("real_schedule_rank.py", job, folder)


@pytest.mark.parametrize(
    ("trace", "row", "name", "v", "m"),
    [
        ("cnn_trace", CNN, "1f1b", 1, 4),
        ("transformer_trace", TRANSFORMER, "1f1b", 1, 4),
        ("cnn_trace", CNN, "interleaved", 2, 4),
        ("transformer_trace", TRANSFORMER, "interleaved", 2, 2),
        ("cnn_trace", CNN, "zero-bubble", 1, 2),
        ("transformer_trace", TRANSFORMER, "zbv", 2, 4),
        ("transformer_trace", TRANSFORMER, "dualpipev", 2, 5),
    ],
)
def test_real_ranks_send_and_compute_what_the_graph_says(trace, row, name, v, m, tmp_path, request, compare):
    trace, p = request.getfixturevalue(trace), 2
    batch = 4 * m
    plan = make_plan(pipeline=p, schedule=name, micro_batches=m, stages_per_rank=v)
    graph = extrapolate(trace, plan, MODEL, batch=batch)
    cut = graph.metadata.stages
    recorded = run_real(row, name, p, v, m, batch, cut, tmp_path)
    about = {"plan": plan, "batch": batch, "row": row, "ranks": p}
    for rank in range(p):
        tasks = graph.tasks[(graph.tasks["rank"] == rank) & graph.tasks["message_bytes"].notna()]
        generated = list(zip(tasks["kind"], tasks["message_bytes"].astype(int), strict=True))
        messages = [tuple(message) for message in recorded[rank]["messages"]]
        for kind in ("send", "recv"):  # nobody waits for a send, so each kind has its own order
            ours, theirs = ([m for m in ms if m[0] == kind] for ms in (generated, messages))
            compare("messages", ours, theirs, **about)
        assert len(generated) == len(messages) > 0
        actions = recorded[rank]["operators"]
        if name in LOOPED:  # only the runtime names its actions
            lowered = lower_schedule(build_schedule(name, p, m, v))
            compare("actions", texts(lowered.rows[rank]), list(actions), **about)
        parts = check_operators(trace, cut, actions)
        row_of = leaves(build_schedule(name, p, m, v).rows[rank])
        assert parts == sum(action.kind in ("I", "W") for action in row_of)


def check_operators(trace, cut, actions):
    """Compare the operators that PyTorch runs in I and in W with our two parts; count them."""
    compared = 0
    stage_of = stages_of_operators(trace, cut)
    names = trace.operators["name"].tolist()
    for action, counted in actions.items():
        match = re.fullmatch(r"(\d+)([IW])(\d+)", action)
        if not match:
            continue
        split = split_backward(trace, stage_of, int(match[1]))
        part = split.for_input if match[2] == "I" else split.for_weight
        ours = Counter(n for op, n in ((op, names[op]) for op in part) if is_work(n))
        assert ours == {n: c for n, c in counted.items() if is_work(n)}, action
        compared += 1
    return compared


def is_work(name):
    """Tell the operators that compute a gradient from views, sums and what they are made of."""
    return name == "aten::mm" or (name.endswith("_backward") and name not in ("aten::embedding_dense_backward",))


def test_pytorch_stops_at_micro_batches_of_different_sizes(transformer_trace, tmp_path):
    """Receive buffers have the first one's size; our prediction warns of it."""
    plan = make_plan(pipeline=2, micro_batches=2)
    graph = extrapolate(transformer_trace, plan, MODEL, batch=5)
    assert any("would stop" in warning for warning in graph.metadata.warnings)
    recorded = run_real(TRANSFORMER, "gpipe", 2, 1, 2, 5, graph.metadata.stages, tmp_path)
    assert all("error" in step for step in recorded)
    assert any("size" in step["error"] for step in recorded)
