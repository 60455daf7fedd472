"""Public profiles as people take them, from the data mirror: parallel runs and odd files."""

import gzip
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from mirror import find_mirror, find_public
from trioflow import predict
from trioflow.base.errors import TraceError
from trioflow.costmodel.features import base_class
from trioflow.costmodel.fits.curves import trace_rows
from trioflow.costmodel.operators.curves import ANY, load_small_kernels
from trioflow.parallel.plan import make_plan, named_plan
from trioflow.trace.importers.detect import find_rank_files
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.ranks import import_ranks
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.kineto import read_profile
from trioflow.trace.profile.merge import observe_step
from trioflow.trace.profile.messages import describe_program
from trioflow.trace.profile.steps import find_spans, load_step
from trioflow.trace.store import Trace, load_trace
from trioflow_evaluation.fits.operators import load_published

SAID = ImportOptions(batch=32, precision="fp32")


def load(dataset: str, ending: str, options: ImportOptions = SAID):
    return import_kineto(find_public([dataset], ending)[0], None, options)


def kind_ms(trace) -> dict[str, float]:
    return (trace.operators.groupby("kind")["device_ns"].sum() / 1e6).to_dict()


def test_compute_under_an_all_reduce_is_kept_and_the_device_sets_the_step_time():
    """ResNet-18 on 8 MI300X."""
    trace = load("kineto/profiles", "resnet_act_checkpoint.json.gz", ImportOptions(batch=256))
    times = kind_ms(trace)
    # What began under an all-reduce was lost before: 3.02 ms were left.
    assert times["compute"] == pytest.approx(7.04, abs=0.01)
    assert times["collective"] == pytest.approx(15.7, abs=0.1)
    facts = trace.facts
    assert facts.device_name == "AMD Instinct MI300X"
    assert facts.step_time_source == "device period"
    assert facts.step_time_s == pytest.approx(18.77e-3, abs=1e-5)
    assert facts.other["profiled_step_s"] == pytest.approx(15.95e-3, abs=1e-5)
    assert any(w.startswith("4 operators communicate") and "of it beside compute" in w for w in facts.warnings)


def test_a_recommendation_model_keeps_its_compute():
    trace = load("kineto/profiles-many-devices", "control.json.gz")
    times = kind_ms(trace)
    assert times["compute"] + times["memcpy"] == pytest.approx(49.86, abs=0.01)
    assert times["collective"] > 30


def test_kernels_launched_before_the_profile_began_are_the_step_before_s():
    trace = load("kineto/profiles", "Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", ImportOptions(batch=16))
    assert sum(kind_ms(trace).values()) == pytest.approx(31.9, abs=0.01)
    assert trace.operators["kernels"].sum() == 1198
    assert trace.facts.warnings[0].startswith("501 device events (13.4 ms) were launched before")


def test_a_profile_of_pytorch_1_9_is_refused():
    with pytest.raises(TraceError, match="of a PyTorch before 2"):
        load("kineto/resnet50-v100", "1623143089861.pt.trace.json.gz")


def test_a_step_that_was_begun_and_not_run_is_skipped_and_rocm_counts_processors_too():
    trace = load("kineto/profiles-many-devices", "mi250_minitoy_train_ROCm6_2_kineto.json.gz")
    assert (len(trace.operators), trace.facts.other["profiled_steps"]) == (20, 1)
    assert trace.facts.device_name == "AMD Radeon Graphics"


def test_a_shared_name_may_be_made_precise_but_not_of_another_vendor():
    path = find_public(["kineto/profiles-many-devices"], "mi250_minitoy_train_ROCm6_2_kineto.json.gz")[0]
    named = ImportOptions(gpu="AMD Instinct MI250X", batch=32, precision="fp32")
    assert import_kineto(path, None, named).facts.device_name == "AMD Instinct MI250X"
    for other in ("NVIDIA A100-SXM4-40GB", "AMD EPYC 7763"):
        with pytest.raises(TraceError, match=f"a device of AMD, --gpu says {other}"):
            import_kineto(path, None, ImportOptions(gpu=other, batch=32, precision="fp32"))


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("mtia_inference_rank_0.json.gz", "1313 events of the category mtia_ccp_events"),
        ("rank_non_gpu.json.gz", "used an accelerator .* and its device events are not in"),
    ],
)
@pytest.mark.parametrize("gpu", [None, "NVIDIA A100-SXM4-40GB", "AMD EPYC 7763"])
def test_an_accelerator_s_run_never_passes_as_a_processor_s(ending, words, gpu):
    with pytest.raises(TraceError, match=words):
        load("kineto/profiles-many-devices", ending, ImportOptions(gpu=gpu, batch=32, precision="fp32"))


def test_a_profile_with_metadata_tells_the_messages_of_the_plan():
    """ResNet-50 under DistributedDataParallel on 2 A100: buffers and buckets, in order and to the byte."""
    profile = read_profile(find_public(["kineto/profiles-many-devices"], "nccl_data.json.gz")[0])
    step = load_step(profile, find_spans(profile)[1])
    facts = describe_program(profile.header, step, observe_step(step, None).operators)
    tasks = predict("resnet50-b128", named_plan("ddp", 2), "dgx-a100", interval=False).task_graph.tasks
    mine = tasks[(tasks["rank"] == 0) & (tasks["kind"] == "collective")]
    planned = list(zip(mine["name"], mine["message_bytes"], strict=True))
    assert [(m["name"], m["message_bytes"]) for m in facts["communication"]] == planned
    assert len(planned) == 7
    assert all(m["ranks"] == [0, 1] for m in facts["communication"])
    assert facts["program"]["world_size"] == 2


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory):
    """Return the two files of rank 0."""
    folder = tmp_path_factory.mktemp("dlrm")
    for ending in ("dlrm_kineto.tar.gz", "dlrm_pytorch_et.tar.gz"):
        with tarfile.open(find_public(["kineto/dlrm-8-v100"], ending)[0]) as archive:
            names = [n for n in archive.getnames() if "worker0_" in n or n.endswith("_0.json")]
            archive.extractall(folder, names, filter="data")
    return next(folder.glob("*/worker0_*")), folder / "dlrm_pytorch_et" / "dlrm_eg_0.json"


def test_files_that_differ_in_annotations_and_two_calls_are_of_one_run(dlrm):
    trace = import_kineto(*dlrm, ImportOptions(batch=32, precision="fp32"))
    warnings = trace.facts.warnings
    assert "2 calls of the profile are not in the execution trace (first: aten::select)" in warnings
    assert trace.facts.other["operators_without_tensors"] == 20  # 18 of them bare launches
    assert trace.operators["write_bytes"].sum() > 0


def test_rank_0_of_a_recommendation_model_stands_for_eight(dlrm):
    """DLRM on 8 V100; the eight measured steps take 12.5 to 19.9 ms, nothing is fitted."""
    trace = import_kineto(*dlrm, SAID)
    sizes = [(m["name"], m["message_bytes"]) for m in trace.facts.communication]
    assert sizes == [
        ("all_to_all", 24576),
        ("all_to_all", 192),
        ("all_to_all", 1536),
        ("all_to_all", 13568),
        ("all_reduce", 1576964),
        ("all_to_all", 24576),
        ("all_reduce", 448),
        ("all_reduce", 907840),
    ]
    plan = replace(make_plan(data=8), plan="as-traced")
    found = predict(trace, plan, "dgx1-v100", as_traced=True)
    assert found.step_time_s == pytest.approx(12.3e-3, rel=0.02)
    # Rank 2 as measured; rank 0's 14.455 ms, 17 % more than predicted, is one of the fifth that lies outside.
    assert found.low_s < 13.0e-3 < found.high_s
    assert found.fits_memory is None
    assert found.to_dict()["folded"]


def test_a_folder_of_eight_ranks_becomes_eight_programs(tmp_path):
    """DLRM on 8 V100: all ranks compute alike, and differ by how long they wait."""
    for ending in ("dlrm_kineto.tar.gz", "dlrm_pytorch_et.tar.gz"):
        with tarfile.open(find_public(["kineto/dlrm-8-v100"], ending)[0]) as archive:
            archive.extractall(tmp_path, filter="data")
    sources = [tmp_path / name for name in ("dlrm_kineto", "dlrm_pytorch_et")]
    times = import_ranks(find_rank_files(sources), SAID, tmp_path / "dlrm")
    assert [one.rank for one in times] == list(range(8))
    assert {one.message_bytes for one in times} == {2_549_700}
    steps_ms = sorted(round(one.step_s * 1e3, 1) for one in times)
    assert steps_ms == [12.5, 13.0, 13.1, 14.5, 17.8, 18.0, 19.3, 19.9]
    assert all(1.0e-3 < one.compute_s < 1.2e-3 < one.communication_s for one in times)
    traces = [load_trace(tmp_path / "dlrm" / f"rank-{rank}") for rank in range(8)]
    found = predict(traces, replace(make_plan(data=8), plan="as-traced"), "dgx1-v100", as_traced=True)
    assert found.step_time_s == pytest.approx(13.5e-3, rel=0.02)


SMALL_BYTES = 1e6
"""What an operator that reads and writes less takes, its launch sets and not its bytes."""


def measure_small_kernels(traces: list[Trace]) -> dict[str, float]:
    """Return what the small operators of traces timed by kernels take, by class: ``small_kernels.tsv`` [s].

    The median of each trace, and of all traces' medians; ``ANY`` of the classes.
    """
    medians = []
    for trace in traces:
        rows = trace_rows(trace.operators)
        data = rows["read_bytes"] + rows["write_bytes"]
        small = rows[(rows["time_s"] > 0) & (data > 0) & (data < SMALL_BYTES)]
        medians.append(small.groupby(small["operator_class"].map(base_class))["time_s"].median())
    found = pd.concat(medians).groupby(level=0).median()
    return {str(name): float(time_s) for name, time_s in found.items()} | {ANY: float(found.median())}


def import_old(folder: Path) -> Trace:
    """Import the profile of PyTorch 1.9 with its categories as version 2 calls them."""
    found = find_public(["kineto/resnet50-v100"], "worker0.1623143089861.pt.trace.json.gz")[0]
    profile = json.loads(gzip.decompress(found.read_bytes()))
    new = {
        "Operator": "cpu_op",
        "Runtime": "cuda_runtime",
        "Kernel": "kernel",
        "Memcpy": "gpu_memcpy",
        "Memset": "gpu_memset",
    }
    for event in profile["traceEvents"]:
        marks = event["name"].startswith(("ProfilerStep#", "Optimizer."))
        event["cat"] = "user_annotation" if marks else new.get(event.get("cat"), "")
    (folder / "new.json").write_text(json.dumps(profile), encoding="utf-8")
    return import_kineto(folder / "new.json", None, SAID)


def test_small_kernels_that_ship_are_those_of_the_profiles(dlrm, tmp_path):
    """What a small operator takes once its launch is over: three GPUs, none of them timed call by call."""
    profiles = [
        load("kineto/profiles", "Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz", ImportOptions(batch=1)),
        load("kineto/profiles-many-devices", "control.json.gz"),
        import_old(tmp_path),
        import_kineto(*dlrm, SAID),
    ]
    triosim = load_published(find_mirror(), ["NVIDIA H100 80GB HBM3"])[0]
    profiles += [trace for trace in triosim.traces if trace.facts.timer_floor_s is None]
    measured = measure_small_kernels(profiles)
    assert measured == pytest.approx(dict(load_small_kernels()))
    assert min(measured.values()) >= 1e-6
