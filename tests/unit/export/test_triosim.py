"""Traces written as TrioSim's CSV pair: exact headers, whole microseconds, read back alike."""

import csv
from dataclasses import replace

import pytest
from trioflow.base.errors import TraceError
from trioflow.export.triosim import write_triosim
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.importers.triosim import import_triosim
from trioflow.trace.store import Trace, load_trace
from triosim_files import TENSOR, TRACE, trace_rows, write_files

OPTIONS = ImportOptions(gpu="NVIDIA H100", precision="tf32", workload="small")
LOST = {"module", "cpu_ns", "start_ns", "device_ns", "sequence_number", "forward_op_id", "kernels"}
"""Columns of a captured trace that the format does not hold exactly."""


@pytest.fixture
def imported(tmp_path):
    return import_triosim(write_files(tmp_path / "source"), OPTIONS)


@pytest.fixture
def captured():
    return load_trace("gpt2-tiny-b8")


def read(folder, file):
    with (folder / file).open(newline="") as stream:
        return list(csv.reader(stream))


def columns(frame, without=()):
    return {c: frame[c].astype(str).tolist() for c in frame.columns if c not in without}


def test_headers_are_those_of_the_published_files(imported, tmp_path):
    write_triosim(imported, tmp_path)
    assert read(tmp_path, "trace.csv")[0] == TRACE
    assert read(tmp_path, "tensor.csv")[0] == TENSOR


def test_rows_of_an_imported_trace_come_back_where_the_format_allows(imported, tmp_path):
    write_triosim(imported, tmp_path)
    rows = read(tmp_path, "trace.csv")[1:]
    source = [[str(cell) for cell in row] for row in trace_rows()]
    same = [TRACE.index(c) for c in ("OperatorName", "Operator_cudatime", "gpuid", "stage", "tpflag")]
    same.append(TRACE.index("Operator_cudatimenooverlap"))
    for place in same:
        assert [row[place] for row in rows] == [row[place] for row in source]
    for title in ("InputSize", "OutputSize"):
        place = TRACE.index(title)
        differing = [row[1] for row, old in zip(rows, source, strict=True) if row[place] != old[place]]
        assert differing == ["autograd::engine::evaluate_function: AddmmBackward0"], (
            "only the node that shows a view is completed"
        )


def test_read_back_an_imported_trace_is_the_same(imported, tmp_path):
    write_triosim(imported, tmp_path)
    again = import_triosim(tmp_path, OPTIONS)
    assert columns(again.operators) == columns(imported.operators)
    assert columns(again.tensors) == columns(imported.tensors)
    told, read_back = imported.facts.to_dict(), again.facts.to_dict()
    changed = {k for k in told if read_back[k] != told[k]}
    assert changed == {"inputs", "warnings"}, "digests, and the warning about the completed node"


def test_a_captured_trace_keeps_its_work_and_shapes(captured, tmp_path):
    write_triosim(captured, tmp_path)
    batch = captured.facts.batch
    again = import_triosim(tmp_path, ImportOptions(gpu="x", precision="fp32", batch=batch))
    assert columns(again.operators, LOST) == columns(captured.operators, LOST)
    exact = captured.operators["device_ns"]
    assert (again.operators["device_ns"] - exact).abs().max() < 1000
    assert abs(again.operators["device_ns"].sum() - exact.sum()) <= 500, "the sum is kept"
    assert sum(g["size_bytes"] for g in again.facts.gradients) == sum(g["size_bytes"] for g in captured.facts.gradients)
    joined = again.operators["forward_op_id"].dropna()
    told = captured.operators["forward_op_id"][joined.index]
    assert len(joined) > 60
    assert joined.tolist() == told.tolist(), "what is joined is joined rightly"


def test_split_operators_follow_from_the_work_where_no_one_tells(imported, tmp_path):
    flags = imported.facts.tp_flagged
    imported.facts = replace(imported.facts, tp_flagged=None)
    write_triosim(imported, tmp_path)
    place = TRACE.index("tpflag")
    rows = read(tmp_path, "trace.csv")[1:]
    assert [n for n, row in enumerate(rows) if row[place] == "1"] == flags


def test_spans_of_another_length_are_not_used(imported, tmp_path):
    imported.facts = replace(imported.facts, span_ns=imported.facts.span_ns[1:])
    write_triosim(imported, tmp_path)
    rows = read(tmp_path, "trace.csv")[1:]
    assert [row[4] for row in rows] == [row[5] for row in rows]


def test_the_kinds_of_tensors_are_named(imported, tmp_path):
    write_triosim(imported, tmp_path)
    kinds = [row[5] for row in read(tmp_path, "tensor.csv")[1:]]
    assert kinds[:3] == ["input", "weight", "output"]
    assert {"grad_output", "bias=None", "target"} <= set(kinds)


def test_a_trace_without_times_is_refused_and_leaves_nothing(captured, tmp_path):
    facts = replace(captured.facts, step_time_source="none", step_time_s=0.0)
    with pytest.raises(TraceError, match="holds no times"):
        write_triosim(Trace(captured.operators, captured.tensors, facts), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_same_trace_same_bytes(captured, tmp_path):
    write_triosim(captured, tmp_path / "a")
    write_triosim(captured, tmp_path / "b")
    for file in ("trace.csv", "tensor.csv"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_processors_trace_comes_back_as_a_processors(captured, tmp_path):
    write_triosim(captured, tmp_path)
    said = ImportOptions(precision="fp32", batch=captured.facts.batch)
    again = import_triosim(tmp_path, replace(said, gpu="AMD EPYC, one core"))
    assert again.facts.device == "cpu"
    assert import_triosim(tmp_path, replace(said, gpu="NVIDIA A40")).facts.device == "cuda"
