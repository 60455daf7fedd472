"""Recomputed operators are those that ``torch.utils.checkpoint`` runs, in its order."""

from dataclasses import replace

import pytest
from captured import BATCH, CNN, TRANSFORMER
from test_messages import Same
from trioflow.parallel.backward import plan_recomputation
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan

torch = pytest.importorskip("torch", reason="the real run needs torch (extra [capture])")

BOOKKEEPING = {"aten::detach", "aten::empty", "aten::alias"}
"""Operators without work, of which a checkpoint runs a few more."""


def checkpointed(function):
    from torch.utils.checkpoint import checkpoint

    def run(*args, **kwargs):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def wrap_units(workload):
    """Return the model as a chain of its units, each of them checkpointed."""
    stages = [workload.make_stage([unit]) for unit in workload.units]
    for stage in stages:
        stage.forward = checkpointed(stage.forward)
    return torch.nn.Sequential(*stages)


def list_operators(step):
    """Return the outermost ATen operators of one step, in order."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    found = []
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        above = event.cpu_parent
        while above is not None and not above.name.startswith("aten::"):
            above = above.cpu_parent
        if event.name.startswith("aten::") and above is None:
            found.append(event.name)
    return [name for name in found if name not in BOOKKEEPING]


def run_real(row, kind, monkeypatch):
    from trioflow.trace.capture.workload import TrainingStep
    from trioflow.trace.workloads.build import build_workload

    workload = build_workload(row)
    model = wrap_units(workload) if kind == "full" else workload.model
    if kind == "selective":
        attend = torch.nn.functional.scaled_dot_product_attention
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", checkpointed(attend))
    step = TrainingStep(workload, model, BATCH, torch.device("cpu"), 0)
    return list_operators(step)


@pytest.mark.parametrize(
    ("name", "row", "kind"),
    [
        ("cnn_trace", CNN, "none"),
        ("cnn_trace", CNN, "full"),
        ("transformer_trace", TRANSFORMER, "full"),
        ("transformer_trace", TRANSFORMER, "selective"),
    ],
)
def test_operators_and_their_order_are_the_real_step_s(name, row, kind, request, monkeypatch, compare):
    trace = request.getfixturevalue(name)
    plan = replace(make_plan(), recompute=kind)
    tasks = extrapolate(trace, plan, Same(), batch=BATCH).tasks
    tasks = tasks[tasks["kind"] == "compute"]
    regions = plan_recomputation(trace, kind)
    last_of = {region.operators[-1]: region for region in regions}
    generated = []
    for task in tasks.itertuples():
        generated.append(task.name.removeprefix("recompute "))
        stops_at = getattr(last_of.get(task.op_id), "stops_at", None)
        # PyTorch begins one operator more, and leaves it before it computes anything.
        if task.name.startswith("recompute ") and stops_at is not None:
            generated.append(trace.operators["name"][stops_at])
    generated = [name for name in generated if name not in BOOKKEEPING]
    real = run_real(row, kind, monkeypatch)
    assert (len(regions) > 0) is (kind != "none")
    against = "torch.utils.checkpoint" if regions else "the plain step"
    text = f"recompute {kind}"
    compare("operators", generated, real, plan=text, row=row, ranks=1, against=against)


def test_what_a_checkpoint_leaves_out_is_not_computed(transformer_trace):
    """The products that the real step runs are the generated ones: one a block fewer than all."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from trioflow.trace.capture.workload import TrainingStep
    from trioflow.trace.workloads.build import build_workload

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten.addmm.default
            return function(*args, **(kwargs or {}))

    workload = build_workload(TRANSFORMER)
    model = wrap_units(workload)
    step = TrainingStep(workload, model, BATCH, torch.device("cpu"), 0)
    step()
    with Products() as products:
        step()
    plan = replace(make_plan(), recompute="full")
    tasks = extrapolate(transformer_trace, plan, Same(), batch=BATCH).tasks
    linear = tasks[(tasks["kind"] == "compute") & tasks["name"].str.endswith("aten::linear")]
    shapes = transformer_trace.operators.loc[linear["op_id"].astype(int), "input_shapes"]
    with_bias = sum(len(shape) == 3 for shape in shapes)
    assert products.count == with_bias > 0
