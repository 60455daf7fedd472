"""A user's own ``module:function``: what it may return, and how mistakes are said."""

import textwrap
import uuid

import pytest
from trioflow.base.errors import InputError
from trioflow.base.settings import SIZES

torch = pytest.importorskip("torch", reason="workloads need torch (extra [capture])")

OBJECT = """
import torch
from torch import nn

class Regression:
    units = {"first": ["0"], "rest": ["1", "2"]}
    tensor_split = {"0": "column", "2": "row"}

    def __init__(self, width=4):
        self.model = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))

    def make_batch(self, batch, seed, device):
        generator = torch.Generator().manual_seed(seed)
        data = torch.randn(batch, 3, generator=generator).to(device)
        return data, data.sum(1, keepdim=True)

    def loss(self, outputs, targets):
        return nn.functional.mse_loss(outputs, targets)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a module of the user's into the current folder; return its unused name."""
    monkeypatch.chdir(tmp_path)

    def write_module(text):
        name = f"mine_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return write_module


def row_of(target, **changes):
    return {
        "workload": "mine",
        "family": "user",
        "model": target,
        "optimizer": "sgd",
        "precision": "fp32",
        **dict.fromkeys(SIZES),
        **changes,
    }


def build(target, **changes):
    from trioflow.trace.workloads.build import build_workload

    return build_workload(row_of(target, **changes))


def run_step(workload, batch=4):
    from trioflow.trace.capture.workload import TrainingStep

    step = TrainingStep(workload, workload.model, batch, torch.device("cpu"), 0)
    before = [p.detach().clone() for p in workload.model.parameters()]
    step()
    changed = [not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True)]
    return step, changed


def test_an_object_brings_its_own_data_loss_units_and_split(write):
    import sys

    paths = list(sys.path)
    workload = build(write(OBJECT) + ":Regression", optimizer="adam-fused", precision="bf16")
    step, changed = run_step(workload)
    assert step.inputs.shape == (4, 3) and all(changed)
    assert workload.model.training
    assert list(workload.units) == ["first", "rest"]
    assert workload.tensor_split == {"0": "column", "2": "row"}
    whole = workload.model(step.inputs)
    stages = [workload.make_stage([unit]) for unit in workload.units]
    torch.testing.assert_close(stages[1](stages[0](step.inputs)), whole)
    assert sys.path == paths, "the current folder is importable only while it is needed"


def test_a_function_with_one_argument_receives_the_row(write):
    name = write(OBJECT + "\n\ndef make(row):\n    return Regression(row['hidden'])\n")
    assert build(f"{name}:make", hidden=7, input="3").model[0].out_features == 7


def test_a_model_alone_is_fed_images_or_tokens_as_the_row_says(write):
    name = write("""
        from torch import nn

        def images():
            return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(1), nn.LazyLinear(5))

        def tokens():
            return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
    """)
    step, changed = run_step(build(f"{name}:tokens", sequence=6, vocabulary=11))
    assert step.inputs.shape == (4, 6) and int(step.inputs.max()) < 11 and all(changed)
    for said, shape in (({"image_size": 8}, (4, 3, 8, 8)), ({"input": "3x8x6"}, (4, 3, 8, 6))):
        workload = build(f"{name}:images", **said)
        workload.model(workload.make_batch(1, 0)[0])
        step, changed = run_step(workload)
        assert step.inputs.shape == shape and all(changed)


def test_several_inputs_reach_the_model_by_name(write):
    name = write("""
        import torch
        from torch import nn

        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(2, 2)

            def forward(self, left, right):
                return self.layer(left) - right

        class Work:
            def __init__(self):
                self.model = Pair()

            def make_batch(self, batch, seed, device):
                one = torch.ones(batch, 2, device=device)
                return {"right": one, "left": 2 * one}, None

            def loss(self, outputs, targets):
                return outputs.square().sum()
    """)
    _, changed = run_step(build(f"{name}:Work"))
    assert all(changed)


def test_it_is_built_on_the_meta_device_too(write):
    from trioflow.trace.workloads.build import build_workload

    workload = build_workload(row_of(write(OBJECT) + ":Regression"), device="meta")
    assert all(p.is_meta for p in workload.model.parameters())


def test_it_is_captured_like_any_other(write, tmp_path):
    from trioflow.trace.capture.workload import capture_workload
    from trioflow.trace.profile.merge import merge_trace

    raw = tmp_path / "raw"
    row = row_of(write(OBJECT) + ":Regression")
    capture_workload(row, 4, raw, device="cpu", warm_up=1, timed_steps=2, profiled_steps=2)
    trace = merge_trace(raw)
    # Two linear layers: forward, weight gradients, and one input gradient.
    assert trace.facts.flop == 2 * 4 * (3 * 4 * 2 + 4 * 1 * 3)
    assert list(trace.facts.workload) == list("mine")


@pytest.mark.parametrize(
    ("text", "function", "changes", "words"),
    [
        ("", "", {}, "is not module:function; write for example"),
        ("import no_such_thing", ":f", {}, r"does not import \(ModuleNotFoundError.*no_such_thing"),
        ("def f(:", ":f", {}, r"does not import \(SyntaxError"),
        ("1 / 0", ":f", {}, r"does not import \(ZeroDivisionError at .*\.py:1: division by zero"),
        ("", ":f", {}, r"\.py: .* has no 'f'; check the function's name"),
        ("f = 3", ":f", {}, "is a int, not a function"),
        ("def f(): raise ValueError('too\\nwide')", ":f", {}, r"failed \(ValueError at .*: too wide"),
        ("def f(a, b): pass", ":f", {}, "needs the arguments a, b; give it none, or one"),
        ("def f(*, a): pass", ":f", {}, "needs the arguments a;"),
        ("def f(): return 3", ":f", {}, "returns a int without model, make_batch, loss"),
        ("def f(): pass", ":f", {}, "returns a NoneType without"),
        (
            "from torch import nn\ndef f(): return nn.Linear(1, 1)",
            ":f",
            {},
            r"returned a bare nn.Module, so the shape .* add --input 3x224x224 \(or --sequence N --vocab N",
        ),
        (
            "from torch import nn\ndef f(): return nn.Linear(1, 1)",
            ":f",
            {"image_size": 4, "sequence": 4, "vocabulary": 4},
            "its input is a tensor or tokens, not both",
        ),
        (
            "from torch import nn\ndef f(): return nn.Linear(1, 1)",
            ":f",
            {"input": "3xx4"},
            "--input 3xx4 is not a shape; write",
        ),
        (
            OBJECT + "\ndef f(): return Regression()",
            ":f",
            {"input": "3"},
            "takes no row, so input 3 would change nothing",
        ),
        (
            "from torch import nn\ndef f(): return nn.Linear(1, 1)",
            ":f",
            {"image_size": 4, "layers": 2},
            "takes no row, so layers 2 would change nothing",
        ),
        (
            OBJECT + "\ndef f(): return Regression()",
            ":f",
            {"sequence": 9},
            "takes no row, so sequence 9 would change nothing",
        ),
        (
            OBJECT + "\ndef f():\n  r = Regression(); r.model = 3; return r",
            ":f",
            {},
            "returns model a int, make_batch a method",
        ),
        (
            OBJECT + "\ndef f():\n  r = Regression(); r.units = {'x': ['9']}; return r",
            ":f",
            {},
            "the unit x names the module '9', which the model has not",
        ),
        (
            OBJECT + "\ndef f():\n  r = Regression(); r.tensor_split = {'0': 'both'}; return r",
            ":f",
            {},
            "tensor_split of 0 is 'both'; use column or row",
        ),
    ],
)
def test_a_mistake_is_one_clear_sentence(write, text, function, changes, words):
    with pytest.raises(InputError, match=words) as caught:
        build(write(text) + function, **changes)
    assert "\n" not in str(caught.value) and "workload mine" in str(caught.value)


def test_a_module_that_does_not_exist_is_said(write):
    with pytest.raises(InputError, match=r"nowhere_at_all does not import .*; run the command in"):
        build("nowhere_at_all:make")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("r.make_batch = lambda batch, seed, device: 3", r"make_batch returns a int, not the pair"),
        ("r.loss = lambda outputs, targets: outputs", "loss does not return one number"),
        ("r.loss = lambda outputs, targets: 3.0", "loss does not return one number"),
    ],
)
def test_data_and_loss_of_another_kind_are_refused(write, change, words):
    name = write(OBJECT + f"\ndef f():\n  r = Regression(); {change}; return r")
    with pytest.raises(InputError, match=words):
        run_step(build(f"{name}:f"))


def test_a_model_alone_must_return_a_tensor(write):
    name = write("""
        from torch import nn

        class Two(nn.Embedding):
            def forward(self, x):
                return super().forward(x), x

        def f():
            return Two(8, 2)
    """)
    with pytest.raises(InputError, match="the model returns a tuple, not a tensor"):
        run_step(build(f"{name}:f", sequence=2, vocabulary=8))
