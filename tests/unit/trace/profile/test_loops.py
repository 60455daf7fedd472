"""What a profile of a loop as users write it shows: the step collates its samples, clips gradients, freezes layers."""

import pytest
import torch
from torch import nn
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule
from trioflow import predict
from trioflow.trace.importers.detect import import_trace
from trioflow.trace.importers.sources import ImportOptions

BATCH, INPUTS, WIDTH = 16, 24, 48
SAMPLES = torch.randn(64, INPUTS)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder, frozen = tmp_path_factory.mktemp("loop"), nn.Linear(INPUTS, WIDTH).requires_grad_(False)
    model = nn.Sequential(frozen, nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1)
    files = [folder / "kineto.json", folder / "execution_trace.json"]
    observer = ExecutionTraceObserver().register_callback(str(files[1]))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=1),
        record_shapes=True,
        execution_trace_observer=observer,
        on_trace_ready=lambda done: done.export_chrome_trace(str(files[0])),
    ) as profiler:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.stack([SAMPLES[i] for i in range(BATCH)])).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            profiler.step()
    return import_trace(files, ImportOptions(batch=BATCH, gpu="a CPU", precision="fp32"))


def test_clipping_gradients_is_once_a_step_and_no_forward_pass(trace):
    rows = trace.operators
    last = rows["phase"].tolist()[::-1].index("backward")
    assert set(rows["phase"].iloc[-last:]) == {"optimizer"}
    assert rows.loc[rows["name"].str.contains("norm"), "phase"].tolist() == ["optimizer"] * 2
    assert not trace.facts.warnings


def test_samples_that_the_step_collates_grow_with_the_batch(trace):
    work = trace.operators[trace.operators["flop"] > 0]
    assert (
        work["flop"].tolist()
        == work["batch_flop"].tolist()
        == [2 * BATCH * INPUTS * WIDTH, *[2 * BATCH * WIDTH * 10] * 2]
    )


def test_frozen_weights_are_parameters_that_fsdp_shards(trace):
    frozen_bytes, trained_bytes = 4 * WIDTH * (INPUTS + 1), 4 * 10 * (WIDTH + 1)
    entries = [(entry["frozen"], entry["shape"]) for entry in trace.facts.parameters]
    assert entries == [(True, [WIDTH, INPUTS]), (True, [WIDTH]), (False, [10, WIDTH]), (False, [10])]
    for plan, share in (("ddp", 1), ("fsdp", 2)):
        memory = predict(trace, plan, "cpu2-gloo", ranks=2, batch=2 * BATCH).memory[0]
        assert memory["categories"]["parameter"] == (frozen_bytes + trained_bytes) / share
