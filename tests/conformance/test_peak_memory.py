"""Predicted peaks of memory are those of real steps, as PyTorch's own allocator counts them."""

from dataclasses import replace
from itertools import accumulate

import pytest
from captured import BATCH, CNN, TRANSFORMER
from test_messages import Same
from trioflow.parallel.plan import make_plan, named_plan

torch = pytest.importorskip("torch", reason="the real run needs torch (extra [capture])")

LIMIT = 0.1
"""Of the measured peak. Convolutions' own workspaces, which no trace shows, are the largest part."""
SUM = make_plan(data=2, accumulate=2)
SUM_OF_SHARDS = make_plan(data=2, sharding="fsdp", accumulate=2)
SUM_OF_WHOLE = replace(make_plan(data=2, sharding="fsdp", accumulate=2, no_sync=True), plan="no-sync")
CASES = [
    pytest.param("cnn_trace", CNN, make_plan(), id="cnn-single"),
    pytest.param("transformer_trace", TRANSFORMER, make_plan(), id="transformer-single"),
    pytest.param("transformer_trace", TRANSFORMER, named_plan("fsdp", 2), id="transformer-fsdp"),
    pytest.param(
        "transformer_trace", TRANSFORMER, replace(make_plan(recompute="full"), plan="full"), id="transformer-full"
    ),
    *(
        pytest.param(trace, row, plan, id=f"{row['family']}-{plan.plan}", marks=pytest.mark.slow)
        for trace, row in (("cnn_trace", CNN), ("transformer_trace", TRANSFORMER))
        for plan in (
            named_plan("ddp", 2),
            named_plan("zero1", 2),
            named_plan("zero2", 2),
            SUM,
            SUM_OF_SHARDS,
            SUM_OF_WHOLE,
            named_plan("gpipe", 2, 2),
            named_plan("1f1b", 2, 2),
        )
    ),
    pytest.param("cnn_trace", CNN, named_plan("fsdp", 2), id="cnn-fsdp", marks=pytest.mark.slow),
    pytest.param(
        "transformer_trace", TRANSFORMER, named_plan("tp-layers", 2), id="transformer-tp", marks=pytest.mark.slow
    ),
]


def measure_workspace(operators, samples):
    """Return what oneDNN holds at most beside a convolution's gradients on this processor, which no trace shows [bytes].

    Weights in its own order, partial sums: from one copy of the weight to eight, as the processor's kernels have it.
    """
    most = 0
    for made, read, weight, *_ in operators.loc[operators["name"] == "aten::convolution_backward", "input_shapes"]:
        gradient, inputs = (torch.randn(samples, *map(int, shape[1:])) for shape in (made, read))
        weights = torch.randn(*map(int, weight))
        stride, padding = -(-int(read[2]) // int(made[2])), int(weight[2]) // 2
        with torch.profiler.profile(profile_memory=True) as profile:
            torch.ops.aten.convolution_backward(
                gradient,
                inputs,
                weights,
                None,
                [stride] * 2,
                [padding] * 2,
                [1, 1],
                False,
                [0, 0],
                1,
                [True, True, False],
            )
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        most = max(most, 4 * weights.numel(), *accumulate(sizes, initial=-4 * (inputs.numel() + weights.numel())))
    return most


@pytest.mark.parametrize(("trace", "row", "plan"), CASES)
def test_predicted_peaks_are_those_of_real_steps(trace, row, plan, request):
    from oracles.peak_memory import compare_peaks, make_case

    traced = request.getfixturevalue(trace)
    case = make_case(traced, plan, Same())
    assert (case.batch, case.row["workload"]) == (BATCH * plan.data, row["workload"])
    table = compare_peaks([case])
    assert len(table) >= 1
    # Gloo's threads keep a bucket for a while, now on one rank, now on the other.
    buckets = case.memory[0]["categories"].get("bucket", 0)
    workspace = max(measure_workspace(traced.operators, samples) for samples in (BATCH // 2, BATCH))
    for row in table.itertuples():
        low, high = row.predicted_bytes, row.predicted_bytes + buckets + workspace
        # Shares of the measured peak, as the table's errors are.
        assert low <= row.measured_bytes * (1 + LIMIT), row
        assert high >= row.measured_bytes * (1 - LIMIT), row
