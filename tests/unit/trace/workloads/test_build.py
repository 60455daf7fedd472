"""Real training steps on the CPU in every precision and with every optimizer, and stages."""

import math
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from trioflow.base.experiments import load_workloads
from trioflow.base.settings import OPTIMIZERS
from trioflow.trace.workloads.catalog import CATALOG, change_workload

torch = pytest.importorskip("torch", reason="workloads need torch (extra [capture])")

from trioflow.trace.workloads.build import INITIAL_SCALE  # noqa: E402

ROWS = load_workloads(CATALOG)
CPU = torch.device("cpu")
SMALL = {
    "torchvision": replace(ROWS["resnet18"], image_size=32),
    "transformers": replace(ROWS["t5-small"], model="tiny-t5", sequence=8),
}
CHAINS = {
    "resnet18": SMALL["torchvision"],
    "densenet121": replace(ROWS["densenet121"], image_size=32),
    "gpt2": replace(ROWS["gpt2"], model="tiny-gpt2", sequence=8),
    "bert": replace(ROWS["bert-base"], model="tiny-bert", sequence=8),
    "llama": replace(ROWS["llama-3-2-1b"], model="tiny-llama", sequence=8),
}


pytestmark = pytest.mark.usefixtures("tiny_models")


def build(row, **changes):
    from trioflow.trace.workloads.build import build_workload

    return build_workload(asdict(change_workload(row, changes)))


def step_of(row, batch=4, **changes):
    from trioflow.trace.capture.workload import TrainingStep

    workload = build(row, **changes)
    return TrainingStep(workload, workload.model, batch, CPU, 0)


def float_formats():
    b = torch.backends
    holders = (b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv)
    return [holder.fp32_precision for holder in holders]


def watch(step):
    """Run a step; return the formats of products inside it and the loss of its start."""
    seen, losses = {"forward": set(), "backward": set()}, []
    module = next(m for m in step.model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d))
    keep_loss = step.workload.loss

    def loss(outputs, targets):
        losses.append(keep_loss(outputs, targets))
        return losses[-1]

    step.workload.loss = loss
    hooks = [
        module.register_forward_hook(lambda _, __, out: seen["forward"].add((out.dtype, *float_formats()))),
        module.register_full_backward_hook(
            lambda _, __, grads: seen["backward"].add((grads[0].dtype, *float_formats()))
        ),
    ]
    step()
    for hook in hooks:
        hook.remove()
    step.workload.loss = keep_loss
    return seen, float(losses[0].detach())


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize(
    ("precision", "dtype", "on_gpu"),
    [("fp32", torch.float32, "ieee"), ("tf32", torch.float32, "tf32"), ("bf16", torch.bfloat16, "ieee")],
)
def test_a_precision_holds_inside_the_step_and_nowhere_else(family, precision, dtype, on_gpu):
    before = float_formats()
    step = step_of(SMALL[family], precision=precision)
    assert float_formats() == before
    seen, loss = watch(step)
    formats = (on_gpu, on_gpu, on_gpu, "ieee", "ieee")
    assert seen == {"forward": {(dtype, *formats)}, "backward": {(dtype, *formats)}}
    assert float_formats() == before
    assert math.isfinite(loss)
    assert all(p.dtype == torch.float32 for p in step.model.parameters())
    assert set(step.phases_ns) == {"forward", "backward", "optimizer"}


def test_fp16_scales_its_loss_and_gives_the_optimizer_unscaled_gradients():
    row = SMALL["transformers"]
    plain, scaled = step_of(row, precision="fp32"), step_of(row, precision="fp16")
    for step in (plain, scaled):
        step.model.eval()  # dropout would differ
    seen, _ = watch(scaled)
    assert {dtype for dtype, *_ in seen["forward"]} == {torch.float16}
    plain()
    assert scaled.scaler.get_scale() == INITIAL_SCALE and not plain.scaler.is_enabled()
    for ours, theirs in zip(scaled.model.parameters(), plain.model.parameters(), strict=True):
        assert float((ours.grad - theirs.grad).norm()) <= 0.05 * float(theirs.grad.norm()) + 1e-6


def test_an_overflow_skips_the_update_and_halves_the_scale():
    step = step_of(SMALL["transformers"], precision="fp16")
    before = [p.detach().clone() for p in step.model.parameters()]
    keep = step.workload.loss
    step.workload.loss = lambda outputs, targets: keep(outputs, targets) * 1e30
    step()
    assert step.scaler.get_scale() == INITIAL_SCALE / 2
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))


def test_formats_are_put_back_after_an_error():
    from trioflow.trace.workloads.build import single_precision

    before = float_formats()
    with pytest.raises(ZeroDivisionError), single_precision("tf32"):
        assert float_formats()[:3] == ["tf32"] * 3
        raise ZeroDivisionError
    assert float_formats() == before


def test_strict_fp32_overrides_what_someone_allowed():
    from trioflow.trace.workloads.build import single_precision

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with single_precision("ieee"):
            assert set(float_formats()) == {"ieee"}
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("family", "precision"),
    [pytest.param("torchvision", "fp32", marks=pytest.mark.slow), ("transformers", "fp32"), ("transformers", "bf16")],
)
def test_every_optimizer_learns_the_batch_in_its_own_way(family, precision):
    """All variants of an algorithm give the same weights; different algorithms do not."""
    results = {}
    for name in OPTIMIZERS:
        step = step_of(SMALL[family], optimizer=name, precision=precision)
        torch.manual_seed(1)
        before = [p.detach().clone() for p in step.model.parameters()]
        step()
        moved = [a - b.detach() for a, b in zip(before, step.model.parameters(), strict=True)]
        assert all(float(m.abs().sum()) > 0 for m in moved), name
        results[name] = torch.cat([m.flatten() for m in moved])
    for name, moved in results.items():
        algorithm = name.partition("-")[0]
        difference = float((moved - results[algorithm]).norm() / moved.norm())
        assert difference < 1e-2, name
    for one, other in pairwise(("sgd", "adam", "adamw")):
        assert not torch.equal(results[one], results[other])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_variant_is_the_one_that_was_named(name):
    from trioflow.trace.workloads.build import make_optimizer

    optimizer = make_optimizer(name, [torch.nn.Parameter(torch.ones(2))])
    algorithm, _, variant = name.partition("-")
    assert type(optimizer).__name__.lower() == algorithm
    assert bool(optimizer.defaults["foreach"]) == (variant == "foreach")
    assert bool(optimizer.defaults["fused"]) == (variant == "fused")
    if algorithm == "sgd":
        assert optimizer.defaults["momentum"] > 0


def test_a_step_lowers_the_loss_of_its_batch():
    for family, row in SMALL.items():
        step = step_of(row, optimizer="adam")
        if family == "transformers":
            step.model.eval()  # dropout would hide a small gain
        losses = [watch(step)[1] for _ in range(4)]
        assert losses[-1] < losses[0], family


@pytest.mark.parametrize("inputs", [torch.ones(2), (torch.ones(2),), {"x": torch.ones(2)}])
def test_inputs_reach_the_model_as_they_are_meant(inputs):
    from trioflow.trace.capture.workload import call_model

    class Double(torch.nn.Module):
        def forward(self, x):
            return 2 * x

    assert call_model(Double(), inputs).tolist() == [2, 2]


def test_the_same_seed_makes_the_same_workload():
    for row in SMALL.values():
        one, two = build(row), build(row)
        pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        a, b = one.make_batch(2, 7), two.make_batch(2, 7)
        assert torch.equal(a[1], b[1]) and not torch.equal(a[1], one.make_batch(2, 8)[1])


@pytest.mark.parametrize("name", CHAINS)
def test_stages_compute_what_the_whole_model_computes(name):
    workload = build(CHAINS[name])
    workload.model.eval().requires_grad_(False)
    inputs, targets = workload.make_batch(2, 1)
    names = list(workload.units)
    value = inputs
    for part in (names[:1], names[1:3], names[3:]):
        value = workload.make_stage(part).eval()(value)
    whole = workload.loss(workload.model(inputs), targets)
    torch.testing.assert_close(workload.loss(value, targets), whole)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "flan"])
def test_attention_without_masks_is_the_library_s_own(name):
    """Neither padded nor packed: the model as transformers builds it gives the same scores."""
    from trioflow.trace.capture.workload import call_model

    workload = build(replace(ROWS["gpt2"], model=f"tiny-{name}", sequence=8))
    model = workload.model.eval()
    inputs, _ = workload.make_batch(2, 1)
    ours = call_model(model, inputs).logits
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(call_model(model, inputs).logits, ours, rtol=1e-4, atol=1e-4)


def test_a_machine_that_only_captures_needs_no_schema_checker():
    code = "import sys; sys.modules['jsonschema'] = None; import trioflow.trace.capture.workload"
    subprocess.run([sys.executable, "-c", code], check=True)
