"""NeuSight's published operator tables on four GPUs, from the data mirror."""

import csv
import json
from math import prod

import pytest
from mirror import find_public
from same_model import ProportionalModel
from trioflow.costmodel.uncertainty import Anchoring
from trioflow.datasets.catalogue import MODEL_TABLES
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.trace.importers.neusight import import_neusight, recognise
from trioflow.trace.importers.sources import ImportOptions

TABLES = 37
# Published counts: GPT-2 large 774,030,080 parameters; BERT-Large with both pre-training heads
# 336,226,108, of which 30,522 are the biases of a head that the table does not show.
PARAMETERS = {"gpt2_large": 774_030_080, "bert_large-train": 336_226_108 - 30_522}


@pytest.fixture(scope="module")
def traces():
    files = find_public(MODEL_TABLES, ".csv")
    return {file: import_neusight(file, ImportOptions()) for file in files}


def test_every_table_is_read_without_options(traces):
    assert len(traces) == TABLES
    assert all(recognise(path) for path in traces)
    for path, trace in traces.items():
        assert trace.facts.device_name.replace(" ", "_") == path.parent.name
        assert int(path.stem.rpartition("-")[2]) == trace.facts.batch
        assert trace.facts.precision == "fp32"


def test_nothing_of_a_table_is_lost(traces):
    """Device time and host-only time make up all its times, the layer's as often as it occurs."""
    for path, trace in traces.items():
        with path.open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        layers = json.loads(path.with_suffix(".json").read_text())["num_layer"]
        total_ms = sum(
            (layers if ".h.0" in row["meta"] or ".layer.0" in row["meta"] else 1)
            * sum(float(row[f"{key}_latency"]) for key in ("fw", "bw", "acc"))
            for row in rows
        )
        kept_s = trace.facts.busy_s + trace.facts.other["host_only_s"]
        assert kept_s * 1e3 == pytest.approx(total_ms, rel=1e-6), path.stem


def test_parameters_are_the_published_ones(traces):
    for path, trace in traces.items():
        count = sum(prod(p["shape"]) for p in trace.facts.parameters)
        gradients = sum(g["size_bytes"] for g in trace.facts.gradients)
        for name, known in PARAMETERS.items():
            if path.stem.startswith(name):
                assert count == known
        assert gradients == (4 * count if trace.facts.mode == "train" else 0)


def test_work_follows_from_the_parameters(traces):
    """Each token meets every weight of a product once forward, twice backward."""
    trace = next(t for p, t in traces.items() if p.stem == "gpt2_large-train-1024-4")
    flop = trace.operators.groupby("phase")["flop"].sum()
    weights = sum(
        prod(p["shape"])
        for p in trace.facts.parameters
        if len(p["shape"]) == 2 and p["name"] != "transformer.wpe.weight"
    )
    attention = 36 * 2 * 2 * 4 * 1024 * 1024 * 1280
    assert flop["forward"] == 2 * weights * 4 * 1024 + attention
    assert flop["backward"] == 2 * flop["forward"]


def test_without_the_timers_floor_sums_meet_what_was_measured(traces):
    """In inference on H100 the model's measured time is the operators' within 5 %."""
    off = {
        path.stem: trace.facts.other["busy_over_measured"] - 1
        for path, trace in traces.items()
        if "H100" in path.parent.name and trace.facts.mode == "inf"
    }
    assert len(off) == 8
    assert max(map(abs, off.values())) < 0.05
    assert abs(off["gpt2_large-inf-1024-4"]) < 0.001


def test_known_disagreements_are_reported_not_tuned(traces):
    off = {(path.parent.name, path.stem): trace.facts.other["busy_over_measured"] - 1 for path, trace in traces.items()}
    assert off["NVIDIA_A100_80GB_PCIe", "gpt3_27-train-2048-1"] == pytest.approx(-0.174, abs=0.002)
    forty = "NVIDIA_A100-PCIE-40GB"
    assert off[forty, "bert_large-inf-512-8"] == pytest.approx(0.515, abs=0.002)
    assert off[forty, "gpt2_large-inf-1024-8"] == pytest.approx(0.168, abs=0.002)
    warned = traces[next(p for p in traces if p.parent.name == forty)].facts.warnings
    assert any("more than the whole model's measured" in warning for warning in warned)


def test_plans_run(traces):
    trace = next(t for p, t in traces.items() if "H100" in p.parent.name and p.stem == "gpt2_large-train-1024-4")
    for way, told in (("none", "busy_s"), ("timer", "measured_end_to_end_s")):
        single = extrapolate(trace, named_plan("single", 1), ProportionalModel(), anchoring=Anchoring(way)).tasks
        compute = single[single["kind"] == "compute"]["duration_s"].sum()
        assert compute == pytest.approx(getattr(trace.facts, told), rel=1e-12)
    ddp = extrapolate(trace, named_plan("ddp", 4), ProportionalModel(), batch=4).tasks
    reduced = ddp[(ddp["rank"] == 0) & ddp["name"].str.contains("all_reduce")]
    assert reduced["message_bytes"].sum() == 4 * PARAMETERS["gpt2_large"]
    pipe = extrapolate(trace, named_plan("gpipe", 4), ProportionalModel()).tasks
    sent = set(pipe[pipe["kind"] == "send"]["message_bytes"])
    assert sent == {4 * 1024 * 1280}, "one sample's activations"
