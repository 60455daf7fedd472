"""Sequence and vocabulary parallelism, and DataParallel, against PyTorch's own.

The first two run on gloo under ``torch.distributed.tensor``. DataParallel needs
GPUs: its Python is run here on tensors without values, with its copies and
collectives noted where it hands them to C++.
"""

from pathlib import Path

import pytest
from captured import BATCH, BERT, CNN, TRANSFORMER
from rank_runs import run_ranks
from test_messages import Same
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan
from trioflow_evaluation.one_process.programs import coalesce

torch = pytest.importorskip("torch", reason="the real run needs torch (extra [capture])")

STYLES = {"sequence": (True, False), "vocabulary": (False, True), "both": (True, True)}
ROWS = {"transformer_trace": TRANSFORMER, "bert_trace": BERT}


def run_styles(row, folder: Path) -> list[dict]:
    """Run all styles in one pair of processes; return what each rank recorded."""
    job = {"row": row, "plans": STYLES, "batch": BATCH, "ranks": 2}
    return run_ranks("real_tensor_rank.py", job, folder)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What the ranks of a run recorded; each run takes place once."""
    known = {}

    def find(trace):
        if trace not in known:
            known[trace] = run_styles(ROWS[trace], tmp_path_factory.mktemp(trace))
        return known[trace]

    return find


def list_messages(graph, rank):
    tasks = graph.tasks[(graph.tasks["rank"] == rank) & graph.tasks["message_bytes"].notna()]
    return [[n, b] for n, b in zip(tasks["name"], tasks["message_bytes"].astype(int), strict=True)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("trace", ROWS)
def test_collectives_are_those_of_the_real_run(trace, style, real, request, compare):
    sequence, vocabulary = STYLES[style]
    plan = make_plan(tensor=2, sequence_parallel=sequence, vocabulary_parallel=vocabulary)
    graph = extrapolate(request.getfixturevalue(trace), plan, Same(), batch=BATCH)
    about = {"plan": plan, "batch": BATCH, "row": ROWS[trace], "ranks": 2}
    for rank in range(2):
        found = real(trace)[rank][style]
        generated = list_messages(graph, rank)
        if not sequence:
            compare("messages", generated, found["model"], **about)
            assert not found["optimizer"]
            continue
        *model, (name, size) = generated
        compare("messages of forward and backward", model, found["model"], **about)
        # Megatron adds up the gradients that a rank has of its own tokens once; DTensor does so
        # in each of the optimizer's operators that read them.
        again = [message for message in found["optimizer"] if message[0] == "all_reduce"]
        assert again == found["optimizer"]
        assert name == "all_reduce"
        reads = sum(b for _, b in again) // size
        assert reads > 1
        assert sum(b for _, b in again) == reads * size


class Noted(torch.nn.DataParallel):
    """DataParallel on devices that are not there; notes what it asks of them."""

    def __init__(self, module, devices, monkeypatch):
        torch.nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device, self.dim = (module, list(range(devices)), 0, 0)
        self.src_device_obj = torch.device("meta")
        self.notes = []
        comm = torch.nn.parallel.comm
        for name in ("broadcast_coalesced", "scatter", "gather", "reduce_add"):
            monkeypatch.setattr(comm, name, getattr(self, f"note_{name}"))

    def parallel_apply(self, replicas, inputs, kwargs):
        self.notes.append(("forward", len(replicas)))
        return [r(*i, **k) for r, i, k in zip(replicas, inputs, kwargs, strict=True)]

    def note_broadcast_coalesced(self, tensors, devices):
        self.notes.append(("broadcast", sum(t.nbytes for t in tensors)))
        return [[t.clone() for t in tensors] for _ in devices]

    def note_scatter(self, tensor, devices, sizes, dim, streams=None):
        parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(sizes, dim)
        self.notes.append(("scatter", [p.nbytes for p in parts]))
        return tuple(p.clone() for p in parts)

    def note_gather(self, tensors, dim, destination):
        self.notes.append(("gather", [t.nbytes for t in tensors]))
        return torch.cat(tensors, dim)

    def note_reduce_add(self, inputs, destination):
        self.notes.append(("reduce", inputs[0].nbytes))
        return torch.stack(list(inputs)).sum(0)


@pytest.mark.parametrize(
    ("row", "trace", "devices", "batch"),
    [(CNN, "cnn_trace", 2, 8), (CNN, "cnn_trace", 3, 8), (TRANSFORMER, "transformer_trace", 4, 6)],
)
def test_data_parallel_asks_for_what_the_graph_does(row, trace, devices, batch, monkeypatch, request, compare):
    from trioflow.trace.workloads.build import build_workload

    workload = build_workload(row, device="meta")
    model = Noted(workload.model, devices, monkeypatch)
    inputs, targets = workload.make_batch(batch, 0, "meta")
    workload.loss(model(inputs), targets).backward()
    plan = named_plan("dp", devices)
    graph = extrapolate(request.getfixturevalue(trace), plan, Same(), batch=batch)
    tasks = graph.tasks
    used = next(size for name, size in model.notes if name == "forward")
    assert used == -(-batch // -(-batch // devices))
    assert tasks[tasks["phase"] == "backward"]["rank"].nunique() == used

    told = tasks[(tasks["rank"] == 0) & tasks["message_bytes"].notna()]
    generated = list(zip(told["name"], told["message_bytes"].astype(int), strict=True))
    # The first device's own part stays where it is, and C++ cuts broadcasts into buffers.
    words = {"scatter": ["send inputs", "send output gradients"], "gather": ["recv outputs"], "reduce": ["reduce"]}
    asked = []
    for name, size in model.notes:
        if name in ("scatter", "gather"):
            word = words[name].pop(0)
            asked += [(word, part) for part in size[1:]]
        elif name == "reduce":
            asked.append((name, size))
    assert used > 1
    compare(
        "copies and sums",
        [m for m in generated if m[0] != "broadcast"],
        asked,
        plan=plan,
        batch=batch,
        row=row,
        ranks=devices,
        against="DataParallel, on tensors without values",
    )
    broadcasts = [size for name, size in model.notes if name == "broadcast"]
    assert sum(size for name, size in generated if name == "broadcast") == sum(broadcasts)
    order = [name for name, _ in generated]
    begin, end = order.index("broadcast"), len(order) - order[::-1].index("broadcast")
    assert order[:begin] == ["send inputs"] * (used - 1)
    assert set(order[begin:end]) == {"broadcast"}
    assert [n for n, _ in model.notes][: 1 + len(broadcasts)] == ["scatter", *["broadcast"] * len(broadcasts)]


@pytest.mark.parametrize("limit", [64, 100, 1000])
def test_sums_are_coalesced_as_pytorch_does(limit):
    from torch._utils import _take_tensors

    kinds = [torch.float32, torch.float32, torch.int64]
    tensors = [torch.zeros(n, dtype=kinds[n % 3]) for n in (3, 7, 1, 12, 30, 2, 2, 8, 16, 25, 1)]
    expected = [sum(t.nbytes for t in chunk) for chunk in _take_tensors(tensors, limit)]
    assert coalesce([(t.nbytes, t.element_size()) for t in tensors], limit, sums=True) == expected
