"""A step of the user's own as one rank of many: what the trace keeps, and what is refused."""

import sys

import pytest
from trioflow.cli.main import main
from trioflow.trace.store import load_trace

torch = pytest.importorskip("torch", reason="a captured rank needs torch (extra [capture])")

STEPS = """
import torch
import torch.distributed as dist

def summed(row):
    dist.init_process_group("nccl")  # there already
    layer = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.ones(row["batch"], 8)
    def step():
        optimizer.zero_grad()
        layer(inputs).sum().backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad, async_op=True)
        optimizer.step()
    return step

def nothing():
    pass

def fails():
    def step():
        raise ValueError("no such thing")
    return step
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    (tmp_path / "own_steps.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_steps", None)


def capture(name: str, *words: str) -> int:
    return main(["capture", name, "--batch", "2", "--device", "cpu", "-o", "traced", *words])


def test_a_rank_keeps_messages_phases_and_who_waits(steps, capsys):
    assert capture("own_steps:summed", "--world-size", "6", "--rank", "2") == 0
    trace = load_trace("traced")
    facts, operators = trace.facts, trace.operators
    assert [(m["name"], m["message_bytes"], m["ranks"]) for m in facts.communication] == [
        ("all_reduce", 128, [0, 1, 2, 3, 4, 5]),
        ("all_reduce", 16, [0, 1, 2, 3, 4, 5]),
    ]
    assert (facts.program["rank"], facts.program["world_size"]) == (2, 6)
    assert facts.optimizer == "sgd"
    assert list(dict.fromkeys(operators["phase"])) == ["forward", "backward", "optimizer"]
    product = operators[operators["name"] == "aten::addmm"].iloc[0]
    assert product["flop"] == 2 * 2 * 8 * 4
    waiting = {earlier: op_id for op_id, earlier in facts.program["waits"]}
    for message in facts.communication:
        first = operators.iloc[waiting[message["op_id"]]]
        assert first["phase"] == "optimizer"
    assert facts.step_time_s > 0
    assert "--as-traced" in capsys.readouterr().out


def test_a_step_for_a_gpu_has_no_times_and_updates_lists(steps):
    assert capture("own_steps:summed", "--world-size", "2", "--target", "cuda") == 0
    trace = load_trace("traced")
    assert trace.facts.step_time_source == "none"
    assert not trace.operators["device_ns"].any()
    assert trace.operators["name"].str.startswith("aten::_foreach").any()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["own_steps:summed", "--rank", "1"], "--rank 1 without --world-size"),
        (["own_steps:summed", "--world-size", "2", "--rank", "2"], "--rank 2 is not one of 2 ranks"),
        (["resnet50", "--world-size", "2"], "'resnet50' does not name one"),
        (["own_steps:nothing", "--world-size", "2"], "returns a NoneType, not a step"),
        (["own_steps:fails", "--world-size", "2"], "the step failed (ValueError: no such thing)"),
        (["own_steps:summed", "--world-size", "2", "--precision", "bf16"], "--precision with --world-size"),
    ],
)
def test_what_cannot_be_captured_is_refused(words, said, steps, capsys):
    assert capture(*words) == 2
    assert said in capsys.readouterr().err
    assert not (steps / "traced").exists()
