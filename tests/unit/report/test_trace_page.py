import re
from dataclasses import replace

import pytest
from trioflow.base.errors import TraceError
from trioflow.report.trace_page import build_trace_page
from trioflow.tables import read_table, records
from trioflow.trace.facts import UNTIMED
from trioflow.trace.store import (
    Trace,
    coverage_of_trace,
    describe_step,
    save_trace,
    summarise_trace,
)


def test_the_page_says_where_each_trace_comes_from_and_what_could_not_be_joined(
    tmp_path, cnn_trace, transformer_trace
):
    facts = replace(cnn_trace.facts, unjoined=["3 device events (4 us) <lost>"], warnings=["old"])
    save_trace(Trace(cnn_trace.operators, cnn_trace.tensors, facts), tmp_path / "first")
    save_trace(transformer_trace, tmp_path / "second")
    folders = [tmp_path / "first", tmp_path / "second"]
    build_trace_page(folders, tmp_path / "traces.html", tmp_path / "traces.parquet")
    page = (tmp_path / "traces.html").read_text()
    cells = re.findall(r"<(?:td|th scope=\"row\")[^>]*>(.*?)</t", page)
    assert "3 device events (4 us) &lt;lost&gt;" in cells
    assert cells.count("nothing") == 1
    assert "first: old" in page
    rows = records(read_table(tmp_path / "traces.parquet", "traces"))
    assert [row["trace"] for row in rows] == ["first", "second"]
    for row, trace in zip(rows, (cnn_trace, transformer_trace), strict=True):
        assert row["flop"] == trace.operators["flop"].sum()
        assert row["device_s"] == pytest.approx(trace.operators["device_ns"].sum() / 1e9)
        counts = [row[f"{p}_operators"] for p in ("forward", "backward", "optimizer")]
        assert sum(counts) == len(trace.operators)
        assert min(counts) > 0


def test_a_missing_trace_leaves_no_page(tmp_path):
    with pytest.raises(TraceError, match="no trace here"):
        build_trace_page([tmp_path / "none"], tmp_path / "p.html", tmp_path / "p.parquet")
    assert not list(tmp_path.iterdir())


def test_coverage_is_of_what_was_measured(cnn_trace):
    step = coverage_of_trace(cnn_trace)
    assert 0.5 < step < 1.0  # on a CPU the interpreter's time is covered by no operator
    operators, tensors, facts = cnn_trace.operators, cnn_trace.tensors, cnn_trace.facts
    gpu = Trace(operators, tensors, replace(facts, device="cuda", joined_share=0.75))
    assert coverage_of_trace(gpu) == 0.75
    untimed = Trace(operators, tensors, replace(facts, step_time_source=UNTIMED, step_time_s=0.0))
    assert coverage_of_trace(untimed) is None
    assert "no times" in describe_step(summarise_trace(untimed, "x"))
