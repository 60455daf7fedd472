"""TrioSim's published H100 traces (VGG-13, ResNet-50, batch 128), from the data mirror."""

import csv
from dataclasses import replace
from math import prod

import pytest
from same_model import ProportionalModel
from trioflow.export.triosim import write_triosim
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import named_plan
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.importers.triosim import import_triosim, recognise

FOLDER = "sarchlab+triosim/sample_trace/trace2-h100-bs128"
# Parameters: torchvision's published counts. Multiply-adds of one image's forward pass: the sum
# over the layers of published tables, twice that in operations. Times [us]: sums of the columns.
MODELS = {
    "vgg13": {
        "parameters": 133_047_848,
        "busy_us": 94_038,
        "span_us": 94_462,
        "gmac": 11.31,
        "first": 3 * 64 * 9 * 224 * 224,
        "rows": 77,
        "layers": 13,
    },
    "resnet50": {
        "parameters": 25_557_032,
        "busy_us": 70_723,
        "span_us": 83_309,
        "gmac": 4.09,
        "first": 3 * 64 * 49 * 112 * 112,
        "rows": 396,
        "layers": 54,
    },
}
BATCH = 128
OPTIONS = ImportOptions(gpu="NVIDIA H100 80GB HBM3", precision="tf32", workload="published")


@pytest.fixture(scope="module", params=MODELS)
def published(request, mirror):
    folder = mirror / FOLDER / request.param
    if not folder.exists():
        pytest.skip(f"the mirror lacks {FOLDER}/{request.param}")
    return folder, import_triosim(folder, OPTIONS), MODELS[request.param]


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_times_sizes_and_batch_are_those_of_the_source(published):
    folder, trace, known = published
    assert recognise(folder)
    assert len(trace.operators) == known["rows"]
    assert trace.facts.batch == BATCH
    assert trace.operators["device_ns"].sum() == 1000 * known["busy_us"]
    assert trace.facts.busy_s == pytest.approx(known["busy_us"] / 1e6, rel=1e-12)
    assert trace.facts.other["span_s"] == pytest.approx(known["span_us"] / 1e6, rel=1e-12)
    assert not any("stand together" in warning for warning in trace.facts.warnings)
    gradients = trace.facts.gradients
    assert sum(g["size_bytes"] for g in gradients) == 4 * known["parameters"]
    assert all(g["gradient_storage_id"] >= 0 for g in gradients)
    parameters = trace.tensors[trace.tensors["category"] == "parameter"]
    assert parameters["storage_id"].nunique() == len(gradients)


def test_every_tensor_has_the_elements_that_the_operator_table_says(published):
    folder, trace, _ = published
    completed = 0
    for row, source in zip(trace.operators.itertuples(), rows_of(folder / "trace.csv"), strict=True):
        listed = [int(n) for n in source["InputSize"].strip("[]").split(";") if n]
        tensors = trace.tensors.loc[row.input_ids]
        found = [prod(s) if e else 0 for s, e in zip(tensors["shape"], tensors["elem_bytes"], strict=True)]
        completed += found != listed
    assert completed == sum(one.endswith(": AddmmBackward0") for one in trace.operators["name"]), (
        "only nodes that show a view of their weight are completed"
    )


def test_work_follows_the_closed_form(published):
    _, trace, known = published
    flop = trace.operators.groupby("phase")["flop"].sum()
    assert flop["forward"] / (2 * BATCH * 1e9) == pytest.approx(known["gmac"], abs=0.02)
    # Every product has two gradients, but nobody wants the image's.
    assert flop["backward"] == 2 * flop["forward"] - 2 * BATCH * known["first"]
    assert flop["optimizer"] == 0
    growing = trace.operators[trace.operators["phase"] != "optimizer"]
    assert (growing["batch_flop"] == growing["flop"]).all()


def test_every_backward_operator_finds_its_forward(published):
    _, trace, known = published
    backward = trace.operators[trace.operators["phase"] == "backward"]
    assert backward["forward_op_id"].notna().all()
    names, shapes = trace.operators["name"], trace.operators["input_shapes"]
    products = backward[backward["flop"] > 0]
    assert len(products) == known["layers"]
    assert products["forward_op_id"].is_unique
    for row in products.itertuples():
        forward = int(row.forward_op_id)
        assert names[forward] in ("aten::conv2d", "aten::linear")
        assert shapes[forward][1] in row.output_shapes, "the weight's gradient"


def test_plans_run(published):
    _, trace, known = published
    single = extrapolate(trace, named_plan("single", 1), ProportionalModel()).tasks
    compute = single[single["kind"] == "compute"]["duration_s"].sum()
    assert compute == pytest.approx(known["busy_us"] / 1e6, rel=1e-12)
    ddp = extrapolate(trace, named_plan("ddp", 4), ProportionalModel()).tasks
    reduced = ddp[(ddp["rank"] == 0) & (ddp["name"].str.contains("all_reduce"))]
    assert reduced["message_bytes"].sum() == 4 * known["parameters"]
    pipe = extrapolate(trace, named_plan("gpipe", 2), ProportionalModel()).tasks
    assert (pipe["kind"] == "send").sum() == 4
    assert len(trace.facts.units) == known["layers"]


def test_exported_rows_are_the_published_ones_column_by_column(published, tmp_path):
    folder, trace, known = published
    write_triosim(trace, tmp_path)
    mine, theirs = rows_of(tmp_path / "trace.csv"), rows_of(folder / "trace.csv")
    assert list(mine[0]) == list(theirs[0])
    assert list(rows_of(tmp_path / "tensor.csv")[0]) == list(rows_of(folder / "tensor.csv")[0])
    for column in ("OperatorName", "Operator_cudatime", "Operator_cudatimenooverlap", "gpuid", "stage", "tpflag"):
        assert [row[column] for row in mine] == [row[column] for row in theirs], column
    completed = {n for n, row in enumerate(theirs) if "AddmmBackward0" in row["OperatorName"]}
    for column in ("InputSize", "OutputSize"):
        differing = {n for n, row in enumerate(mine) if row[column] != theirs[n][column]}
        assert differing <= completed, column
    # Tensors are numbered anew: equal numbers here are equal numbers there, and defined ones
    # of one operator stay apart.
    for column in ("Operator_input", "Operator_output"):
        names = {}
        for n, (row, old) in enumerate(zip(mine, theirs, strict=True)):
            if n not in completed:
                pairs = zip(_ids(row[column]), _ids(old[column]), strict=True)
                for new, source in pairs:
                    names.setdefault(new, set()).add(source)
        assert max(map(len, names.values())) == 1, column
    assert known["rows"] == len(mine)


def _ids(cell):
    return [int(number) for number in cell.strip("[]").split(";") if number]


def test_the_split_flags_follow_from_the_work(published, tmp_path):
    folder, trace, _ = published
    facts = replace(trace.facts, tp_flagged=None)
    write_triosim(type(trace)(trace.operators, trace.tensors, facts), tmp_path)
    flags = [[row["tpflag"] for row in rows_of(f / "trace.csv")] for f in (tmp_path, folder)]
    assert flags[0] == flags[1]


def test_read_back_the_trace_is_the_same(published, tmp_path):
    _, trace, _ = published
    write_triosim(trace, tmp_path)
    again = import_triosim(tmp_path, OPTIONS)
    for frame, other in ((trace.operators, again.operators), (trace.tensors, again.tensors)):
        for column in frame.columns:
            assert frame[column].astype(str).tolist() == other[column].astype(str).tolist(), column
    told, read = trace.facts.to_dict(), again.facts.to_dict()
    changed = {key for key in told if told[key] != read[key]}
    assert changed == {"inputs", "warnings"}
