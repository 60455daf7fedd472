import os

import pytest
from trioflow.base.errors import InputError, MeasurementError
from trioflow.base.provenance import read_json
from trioflow.trace.capture.workload import exclusive_measurement

torch = pytest.importorskip("torch", reason="capture needs torch (extra [capture])")


def test_the_environment_says_what_ran_where(raw_transformer):
    facts = read_json(raw_transformer / "environment.json")
    assert facts["threads"] == 1
    assert len(facts["step_times_s"]) == 2
    assert facts["step_time_s"] > 0
    assert facts["torch"] == torch.__version__
    assert [u["name"] for u in facts["units"]] == ["embedding", "blocks.0", "blocks.1", "head"]


def test_pinning_is_undone():
    from trioflow.trace.capture.workload import pinned_to

    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pinned_to(0) as (core, warnings):
            assert os.sched_getaffinity(0) == {core}
            assert torch.get_num_threads() == 1
            assert warnings == []
        assert os.sched_getaffinity(0) == before
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_too_few_cores_are_said_not_refused():
    from trioflow.trace.capture.workload import pinned_to

    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        with pinned_to(1) as (core, warnings):
            assert core == min(cores)
            assert any("share core" in warning for warning in warnings)
    finally:
        os.sched_setaffinity(0, cores)


def test_missing_affinity_is_said_not_refused(monkeypatch):
    from trioflow.trace.capture.workload import pinned_to

    monkeypatch.delattr(os, "sched_getaffinity")
    with pinned_to(0) as (core, warnings):
        assert core is None
        assert any("no processor affinity" in warning for warning in warnings)


def test_a_second_measurement_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIOFLOW_LOCK_FOLDER", str(tmp_path))
    refused = pytest.raises(MeasurementError, match="another capture or measurement")
    with exclusive_measurement("first"), refused, exclusive_measurement("second"):
        pass
    with exclusive_measurement("third"):
        pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"family": "rnn"}, "unknown family 'rnn'"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
        ({"heads": 5}, "not a multiple of heads 5"),
        ({"precision": "int8"}, "unknown precision"),
        ({"family": "torchvision", "model": "gpt9"}, "unknown torchvision model 'gpt9'"),
    ],
)
def test_unusable_rows_are_refused(change, words):
    from captured import TRANSFORMER
    from trioflow.trace.workloads.build import build_workload

    with pytest.raises(InputError, match=words):
        build_workload({**TRANSFORMER, **change})


def test_an_absent_gpu_is_refused():
    from trioflow.trace.capture.workload import choose_device

    if torch.cuda.is_available():
        pytest.skip("a GPU is present")
    assert choose_device("auto") == "cpu"
    with pytest.raises(InputError, match="no CUDA device"):
        choose_device("cuda")


def test_stages_compute_what_the_whole_model_computes():
    from captured import CNN, TRANSFORMER
    from trioflow.trace.workloads.build import build_workload

    for row in (CNN, TRANSFORMER):
        workload = build_workload(row)
        workload.model.eval()
        inputs, _ = workload.make_batch(2, 1)
        names = list(workload.units)
        value = inputs
        for part in (names[:2], names[2:]):
            value = workload.make_stage(part)(value)
        torch.testing.assert_close(value, workload.model(inputs))


def test_freed_memory_stays_mapped():
    import subprocess
    import sys

    code = """
import resource, torch
from trioflow.trace.capture.workload import keep_freed_memory
print(keep_freed_memory())
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(16_000_000).add_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min(faults() for _ in range(10)))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    if out[0] != "[]":
        pytest.skip(f"this allocator cannot keep freed memory: {out[0]}")
    # 64 MB on fresh pages are 15,625 faults each time; a kept block is found again sooner or later.
    assert int(out[1]) < 1000
