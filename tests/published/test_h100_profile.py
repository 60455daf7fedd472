"""The public raw profile of VGG-13 on an H100 (batch 512, PyTorch 2.1), from the data mirror."""

import pytest
from trioflow.base.errors import TraceError
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.events import busy_ns, span_ns
from trioflow.trace.profile.kineto import read_profile
from trioflow.trace.profile.steps import find_spans, load_step

FOLDER = "sarchlab+triosim/tracer/data"
PROFILE, GRAPH = "profiler/profiler_vgg13-iter41.json", "graph/graph_vgg13-iter41.json"
NOTHING_SAID = ImportOptions()
VGG13 = (64, 64, "M", 128, 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
"""Channels of the convolutions and the poolings between them (arXiv 1409.1556, table 1, column B)."""


@pytest.fixture(scope="module")
def files(mirror):
    paths = [mirror / FOLDER / name for name in (PROFILE, GRAPH)]
    for path in paths:
        if not path.exists():
            pytest.skip(f"the mirror lacks {path.name}")
    return paths


@pytest.fixture(scope="module")
def trace(files):
    return import_kineto(*files, NOTHING_SAID)


@pytest.fixture(scope="module")
def step(files):
    profile = read_profile(files[0])
    return load_step(profile, find_spans(profile)[0])


def test_every_kernel_has_its_operator_and_the_busy_time_is_the_published_sum(trace, step):
    device = [k for kernels in step.launched for k in kernels]
    assert len(device) == 292 + 33
    assert not step.loose and not step.unjoined
    # The profile's own sum over kernels and fills: 346.37 ms.
    assert busy_ns(device) == pytest.approx(346.37e6, rel=1e-3)
    assert trace.operators["device_ns"].sum() == pytest.approx(346.37e6, rel=1e-3)
    assert trace.facts.joined_share == 1.0
    assert trace.facts.other["operators_without_tensors"] == 0


def test_every_convolution_has_its_shapes_and_flop(trace):
    forward = trace.operators[trace.operators["name"] == "aten::conv2d"]
    backward = trace.operators[trace.operators["name"] == "aten::convolution_backward"]
    size, channels, expected = 224, 3, []
    for entry in VGG13:
        if entry == "M":
            size //= 2
        else:
            expected.append(([512, channels, size, size], [entry, channels, 3, 3], entry))
            channels = entry
    assert [shapes[:2] for shapes in forward["input_shapes"]] == [[x, w] for x, w, _ in expected]
    for row, (x, weight, out) in zip(forward.to_dict("records"), expected, strict=True):
        assert row["output_shapes"] == [[512, out, *x[2:]]]
        assert row["flop"] == 2 * 512 * out * x[2] * x[3] * weight[1] * 9
        assert row["batch_flop"] == row["flop"]
    # Backward costs a gradient of the input and one of the weight; the image needs none.
    flop = forward["flop"].tolist()
    assert backward["flop"].tolist()[::-1] == [flop[0], *(2 * f for f in flop[1:])]
    assert backward["forward_op_id"].tolist()[::-1] == forward["op_id"].tolist()


def test_the_model_is_found(trace):
    gradients = trace.facts.gradients
    # 133.05 million parameters of 4 bytes (torchvision's count).
    assert sum(g["size_bytes"] for g in gradients) == 133_047_848 * 4
    assert len(gradients) == 26
    ready = [g["ready_after_op_id"] for g in gradients]
    assert ready == sorted(ready)
    assert trace.facts.device_name == "NVIDIA H100 80GB HBM3"
    assert (trace.facts.batch, trace.facts.optimizer) == (512, "adam")
    assert set(trace.operators["phase"]) == {"forward", "backward", "optimizer"}
    modules = trace.operators[trace.operators["name"] == "aten::conv2d"]["module"]
    assert modules.tolist() == [f"VGG_0.Sequential_0.Conv2d_{i}" for i in range(10)]


def test_the_gaps_between_an_operator_s_kernels_are_nobody_s_time(step):
    """The reading that TrioSim calls cudatime counts them, the other and ours do not."""
    together = sum(busy_ns(kernels) for kernels in step.launched)
    summed = sum(k.end_ns - k.start_ns for kernels in step.launched for k in kernels)
    spans = sum(span_ns(kernels) for kernels in step.launched)
    assert together == pytest.approx(summed, rel=2e-5)  # one stream: two roundings overlap
    gaps = spans - together
    assert gaps > 0
    # The gaps lie where an operator runs several kernels, and only there.
    single = [kernels for kernels in step.launched if len(kernels) == 1]
    assert sum(span_ns(kernels) - busy_ns(kernels) for kernels in single) == 0


def test_kineto_alone_gives_the_same_times_flop_and_gradients(files, trace):
    alone = import_kineto(files[0], None, NOTHING_SAID)
    for column in ("name", "phase", "module", "device_ns", "flop"):
        assert alone.operators[column].tolist() == trace.operators[column].tolist(), column
    sizes = [[g["size_bytes"] for g in t.facts.gradients] for t in (alone, trace)]
    assert sizes[0] == sizes[1]
    assert any("no execution trace" in w for w in alone.facts.warnings)


def test_the_profile_says_all_and_is_not_contradicted(files, trace):
    assert trace.facts.precision == "tf32"
    with pytest.raises(TraceError, match="batch 512, --batch says 128"):
        import_kineto(*files, ImportOptions(batch=128))
    with pytest.raises(TraceError, match="precision tf32, --precision says fp32"):
        import_kineto(*files, ImportOptions(precision="fp32"))
