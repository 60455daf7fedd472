"""Nsight Systems' databases, written here after the schema that NVIDIA documents."""

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from trioflow.base.errors import TraceError
from trioflow.cli import main
from trioflow.trace.importers.detect import detect_format, import_trace
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.store import load_trace

OPTIONS = ImportOptions(precision="fp32", batch=8)
GPU = "NVIDIA H100 80GB HBM3"
MAIN, BACKWARD, PROCESS = (7 << 24) | 1, (7 << 24) | 2, 7 << 24
LINEAR = "aten::linear, seq = 4, op_id = 1, sizes = [[8, 16], [32, 16], [32]]"
NODE = "autograd::engine::evaluate_function: AddmmBackward0, seq = 4, op_id = 2"
PRODUCT = "aten::mm, op_id = 3, sizes = [[32, 8], [8, 16]], input_op_ids = [(1,0)]"


class Report:
    """A database in the making; times in microseconds."""

    def __init__(self, *, inline: bool = False) -> None:
        self.inline = inline  # a range's text in its own column, as versions before 2021 wrote it
        self.strings: dict[str, int] = {}
        self.ranges: list[tuple] = []
        self.calls: list[tuple] = []
        self.kernels: list[tuple] = []
        self.copies: list[tuple] = []

    def name(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings) + 1)

    def range(self, text: str, start: int, end: int, thread: int = MAIN, kind: int = 59) -> None:
        own = (text, None) if self.inline else (None, self.name(text))
        self.ranges.append((start * 1000, end * 1000, kind, *own, thread))

    def launch(self, name: str, at: int, start: int, end: int, thread: int = MAIN, process: int = PROCESS) -> None:
        number = len(self.calls) + 1
        self.calls.append((at * 1000, (at + 1) * 1000, thread, number, self.name("cudaLaunchKernel_v7000")))
        stream = 13 if name.startswith("nccl") else 7
        self.kernels.append((start * 1000, end * 1000, 0, stream, number, process, self.name(name)))

    def copy(self, kind: int, size: int, at: int, start: int, end: int) -> None:
        number = len(self.calls) + 1
        self.calls.append((at * 1000, (at + 1) * 1000, MAIN, number, self.name("cudaMemcpyAsync_v3020")))
        self.copies.append((start * 1000, end * 1000, 0, 7, number, PROCESS, size, kind))

    def write(self, path: Path, *, without: tuple[str, ...] = ()) -> Path:
        columns = {
            "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
            "NVTX_EVENTS": "start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT",
            "CUPTI_ACTIVITY_KIND_RUNTIME": "start INT, end INT, globalTid INT, correlationId INT, nameId INT",
            "CUPTI_ACTIVITY_KIND_KERNEL": "start INT, end INT, deviceId INT, streamId INT, correlationId INT, "
            "globalPid INT, demangledName INT",
            "CUPTI_ACTIVITY_KIND_MEMCPY": "start INT, end INT, deviceId INT, streamId INT, correlationId INT, "
            "globalPid INT, bytes INT, copyKind INT",
            "TARGET_INFO_GPU": "id INT, name TEXT",
            "META_DATA_EXPORT": "name TEXT, value TEXT",
        }
        rows = {
            "StringIds": [(number, text) for text, number in self.strings.items()],
            "NVTX_EVENTS": self.ranges,
            "CUPTI_ACTIVITY_KIND_RUNTIME": self.calls,
            "CUPTI_ACTIVITY_KIND_KERNEL": self.kernels,
            "CUPTI_ACTIVITY_KIND_MEMCPY": self.copies,
            "TARGET_INFO_GPU": [(0, GPU)],
            "META_DATA_EXPORT": [("EXPORT_SCHEMA_VERSION", "3.14.1")],
        }
        base = sqlite3.connect(path)
        for table, words in columns.items():
            if table not in without:
                base.execute(f"CREATE TABLE {table} ({words})")
                marks = ", ".join("?" * len(words.split(", ")))
                base.executemany(f"INSERT INTO {table} VALUES ({marks})", rows[table])
        base.commit()
        base.close()
        return path


def write_step(report: Report, begin: int, longer: int = 0, sequence: int = 4) -> None:
    """One step of a linear layer: forward, loss's copy, backward on its own thread, all-reduce, update."""
    report.range("train step", begin, begin + 400)
    report.range("encoder.layer", begin + 10, begin + 60)
    linear, node = (text.replace("seq = 4", f"seq = {sequence}") for text in (LINEAR, NODE))
    report.range(linear, begin + 20, begin + 50)
    report.launch("sm90_xmma_gemm_f32", begin + 30, begin + 40, begin + 90 + longer)
    report.range("aten::to", begin + 62, begin + 70)
    report.copy(2, 4, begin + 64, begin + 100, begin + 102)
    report.range(node, begin + 110, begin + 160, BACKWARD)
    report.range(f"AddmmBackward0, seq = {sequence}", begin + 112, begin + 158, BACKWARD)
    report.range(PRODUCT, begin + 120, begin + 150, BACKWARD)
    report.launch("sm90_xmma_gemm_f32", begin + 130, begin + 140, begin + 200, BACKWARD)
    report.range("c10d::allreduce_", begin + 170, begin + 190)
    report.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin + 175, begin + 210, begin + 290)
    report.range("Optimizer.step#AdamW.step", begin + 300, begin + 380)
    own = "" if sequence == 4 else f", op_id = {sequence}, sizes = []"
    report.range(f"aten::_foreach_add_{own}", begin + 310, begin + 330)
    report.launch("multi_tensor_apply_kernel", begin + 315, begin + 320, begin + 340)


def steps(*, inline: bool = False) -> Report:
    report = Report(inline=inline)
    for number, longer in enumerate((0, 10, 40)):
        write_step(report, 1000 * (number + 1), longer)
    return report


@pytest.mark.parametrize("inline", [False, True])
def test_a_report_becomes_the_trace_of_a_step(tmp_path, inline):
    path = steps(inline=inline).write(tmp_path / "rank-0.sqlite")
    assert detect_format([path]) == "nsight"
    trace = import_trace([path], OPTIONS)
    facts, rows = trace.facts, trace.operators.set_index("name")
    assert list(rows.index) == ["aten::linear", "aten::to", "aten::mm", "c10d::allreduce_", "aten::_foreach_add_"]
    assert rows["phase"].tolist() == ["forward", "forward", "backward", "forward", "optimizer"]
    assert rows["kind"].tolist() == ["compute", "memcpy", "compute", "collective", "compute"]
    assert rows.loc["aten::linear", "device_ns"] == 60_000, "the median of 50, 60 and 90 us"
    assert rows.loc["aten::mm", "device_ns"] == 60_000
    assert rows.loc["aten::linear", "flop"] == 2 * 8 * 16 * 32
    assert rows.loc["aten::mm", "flop"] == 2 * 32 * 8 * 16
    assert rows.loc["aten::mm", "forward_op_id"] == rows.loc["aten::linear", "op_id"]
    assert rows.loc["aten::linear", "module"] == "encoder.layer"
    assert (facts.batch, facts.device_name, facts.precision, facts.optimizer) == (8, GPU, "fp32", "adamw")
    assert facts.step_time_s == pytest.approx(400e-6) and facts.other["profiled_steps"] == 3
    assert facts.source == "Nsight Systems" and facts.workload == "rank-0"
    assert list(facts.other["inputs"]) == ["rank-0.sqlite"] and "ranges hold no types" in facts.warnings[0]


def list_tables(database):
    """Return every table of a database, as a folder's files hold them."""
    with closing(sqlite3.connect(database)) as base:
        names = [name for (name,) in base.execute("SELECT name FROM sqlite_master")]
        return {name: pd.read_sql(f"SELECT * FROM {name}", base, dtype_backend="numpy_nullable") for name in names}


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_folder_of_tables_is_read_as_their_database(tmp_path, suffix, inline):
    database, folder = steps(inline=inline).write(tmp_path / "rank.sqlite"), tmp_path / "rank"
    folder.mkdir()
    for name, table in list_tables(database).items():
        write = table.to_parquet if suffix == "parquet" else table.to_feather
        write(folder / f"{name}.{suffix}")
    assert detect_format([folder]) == "nsight"
    one, other = (import_trace([path], OPTIONS) for path in (database, folder))
    pd.testing.assert_frame_equal(one.operators, other.operators)
    pd.testing.assert_frame_equal(one.tensors, other.tensors)
    assert f"NVTX_EVENTS.{suffix}" in other.facts.other["inputs"]
    assert f"META_DATA_EXPORT.{suffix}" not in other.facts.other["inputs"]
    (folder / f"NVTX_EVENTS.{suffix}").write_bytes(b"broken")
    with pytest.raises(TraceError, match="cannot be read"):
        import_trace([folder], OPTIONS)


def write_rows(database, path):
    """The lines of newer versions: a row each, its table among the columns, in order of keys; nothing where null."""
    rows = [
        {"table": name} | {key: value for key, value in row.items() if not pd.isna(value)}
        for name, table in list_tables(database).items()
        for row in table.astype(object).to_dict("records")
    ]
    path.write_text("".join(f"{json.dumps(row, sort_keys=True)}\n" for row in rows))


def write_events(database, path, *, apart):
    """The lines of older versions: events, whose numbers are texts, and all texts at the front or each by itself."""
    tables = list_tables(database)
    texts = ["", *tables["StringIds"].sort_values("id")["value"]]
    lines = [{"data": texts}]
    if apart:
        lines = [{"type": "String", "id": str(n), "value": text} for n, text in enumerate(texts)]
    for row in tables["NVTX_EVENTS"].astype(object).to_dict("records"):
        said = {
            "Type": int(row["eventType"]),
            "Timestamp": str(row["start"]),
            "EndTimestamp": str(row["end"]),
            "GlobalTid": str(row["globalTid"]),
            "DomainId": "0",
        }
        named = {"TextId": row["textId"]} if pd.isna(row["text"]) else {"Text": row["text"]}
        lines.append({"Type": 59, "NvtxEvent": said | {key: str(value) for key, value in named.items()}})
    for row in tables["CUPTI_ACTIVITY_KIND_RUNTIME"].to_dict("records"):
        said = {
            "startNs": str(row["start"]),
            "endNs": str(row["end"]),
            "correlationId": int(row["correlationId"]),
            "name": str(row["nameId"]),
            "globalTid": str(row["globalTid"]),
        }
        lines.append({"Type": 48, "TraceProcessEvent": said})
    for kind in ("KERNEL", "MEMCPY"):
        for row in tables[f"CUPTI_ACTIVITY_KIND_{kind}"].to_dict("records"):
            said = {
                "startNs": str(row["start"]),
                "endNs": str(row["end"]),
                "streamId": str(row["streamId"]),
                "correlationId": int(row["correlationId"]),
                "globalPid": str(row["globalPid"]),
            }
            own = (
                {"demangledName": str(row["demangledName"])}
                if kind == "KERNEL"
                else {"sizebytes": str(row["bytes"]), "copyKind": str(row["copyKind"])}
            )
            lines.append({"Type": 79, "CudaEvent": said | {kind.lower(): own}})
    lines += [{"Type": 106, "CudaEvent": {"startNs": "0", "sync": {}}}, {"Type": 49, "DiagnosticEvent": {}}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("form", ["rows", "events", "events apart"])
def test_json_lines_are_read_as_their_database(tmp_path, form, inline):
    database, lines = steps(inline=inline).write(tmp_path / "rank.sqlite"), tmp_path / "rank.jsonl"
    if form == "rows":
        write_rows(database, lines)
    else:
        write_events(database, lines, apart=form == "events apart")
    assert detect_format([lines]) == "nsight"
    # Events name no GPU.
    one, other = (import_trace([path], replace(OPTIONS, gpu=GPU)) for path in (database, lines))
    pd.testing.assert_frame_equal(one.operators, other.operators)
    pd.testing.assert_frame_equal(one.tensors, other.tensors)
    assert list(other.facts.other["inputs"]) == ["rank.jsonl"]
    lines.write_text(lines.read_text() + "{broken\n")
    number = len(lines.read_text().splitlines())
    with pytest.raises(TraceError, match=rf"rank.jsonl, line {number}: not a line of nsys export"):
        import_trace([lines], OPTIONS)
    lines.write_text('{"table": "StringIds", "id": 1}\n{"table": "NVTX_EVENTS", "end": 3}\n')
    with pytest.raises(TraceError, match="the tables cannot be read"):
        import_trace([lines], OPTIONS)


def test_the_command_imports_and_shows_it(tmp_path, capsys):
    path = steps().write(tmp_path / "mine.sqlite")
    assert main(["import", str(path), "--precision", "bf16", "--batch", "8", "-o", str(tmp_path / "trace")]) == 0
    assert main(["show", str(tmp_path / "trace")]) == 0
    assert "Nsight Systems" in capsys.readouterr().out


def test_a_report_of_several_processes_becomes_a_trace_a_process(tmp_path, capsys):
    """Numbered by the GPUs that they used, the first of which is the second process's here."""
    one = steps().write(tmp_path / "one.sqlite")
    both = tmp_path / "both.sqlite"
    shutil.copy(one, both)
    with closing(sqlite3.connect(both)) as base:
        for table in (
            "NVTX_EVENTS",
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            "CUPTI_ACTIVITY_KIND_KERNEL",
            "CUPTI_ACTIVITY_KIND_MEMCPY",
        ):
            columns = [row[1] for row in base.execute(f"PRAGMA table_info({table})")]
            other = {
                "globalTid": f"globalTid + {1 << 24}",
                "globalPid": f"globalPid + {1 << 24}",
                "correlationId": "correlationId + 100",
            }
            words = ", ".join(other.get(column, column) for column in columns)
            base.execute(f"INSERT INTO {table} SELECT {words} FROM {table}")
        for kind, more in (("KERNEL", ", end = end + 5000"), ("MEMCPY", "")):
            base.execute(f"UPDATE CUPTI_ACTIVITY_KIND_{kind} SET deviceId = 1{more} WHERE globalPid = {PROCESS}")
        base.commit()
    with pytest.raises(TraceError, match="kernels of 2 processes or more; import it with trioflow import"):
        import_trace([both], OPTIONS)
    said = ["--precision", "fp32", "--batch", "8", "--gpu", GPU, "-o", str(tmp_path / "ranks")]
    assert main(["import", str(both), *said]) == 0
    times = [load_trace(tmp_path / f"ranks/rank-{n}").operators["device_ns"] for n in (0, 1)]
    assert times[0].tolist() == import_trace([one], OPTIONS).operators["device_ns"].tolist()
    assert times[1].iloc[0] == times[0].iloc[0] + 5000


def answer(path):
    """Return what an answer is made of, and the warnings; nothing where the file is refused."""
    try:
        trace = import_trace([path], replace(OPTIONS, gpu=GPU))
    except TraceError:
        return None, set()
    facts = trace.facts
    return (trace.operators.to_json(), trace.tensors.to_json(), facts.step_time_s), {*facts.warnings}


@pytest.mark.parametrize("order", ["SNRKM", "SRKMN", "SMKRN", "SKNRM", "by start", "events", "sqlite"])
def test_an_export_that_is_cut_anywhere_says_so(order, tmp_path):
    """Its answer is the same, or there is none, or a new warning; each operator's range has a text of its own."""
    report = Report()
    for number, longer in enumerate((0, 10, 40)):
        write_step(report, 1000 * (number + 1), longer, sequence=number)
    path = report.write(tmp_path / "whole.sqlite")
    if order == "events":
        write_events(path, path := tmp_path / "whole.jsonl", apart=True)
    elif order != "sqlite":
        write_rows(path, path := tmp_path / "whole.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        place = {
            "StringIds": "S",
            "NVTX_EVENTS": "N",
            "CUPTI_ACTIVITY_KIND_RUNTIME": "R",
            "CUPTI_ACTIVITY_KIND_KERNEL": "K",
            "CUPTI_ACTIVITY_KIND_MEMCPY": "M",
        }
        rows = [row for row in rows if row["table"] in place]
        key = (
            (lambda row: row.get("start", 0)) if order == "by start" else (lambda row: order.index(place[row["table"]]))
        )
        path.write_text("".join(f"{json.dumps(row)}\n" for row in sorted(rows, key=key)))
    whole, known = answer(path)
    content, cut = path.read_bytes(), tmp_path / f"cut{path.suffix}"
    ends = [place + 1 for place, byte in enumerate(content) if byte == ord("\n")]
    places = range(0, len(content), 997) if order == "sqlite" else [*ends[::2], *(e - 9 for e in ends[::7])]
    for place in places:
        cut.write_bytes(content[:place])
        found, said = answer(cut)
        assert found in (None, whole) or said - known, place


def test_ranges_that_name_no_operator_are_refused_with_the_way_to_record_them(tmp_path):
    report = Report()
    report.range("step 1", 0, 100)
    report.launch("gemm", 10, 20, 30)
    with pytest.raises(TraceError, match=r"no NVTX range is an operator's.*emit_nvtx"):
        import_trace([report.write(tmp_path / "plain.sqlite")], OPTIONS)


@pytest.mark.parametrize("table", ["NVTX_EVENTS", "StringIds"])
def test_a_database_without_its_tables_is_refused(tmp_path, table):
    path = steps().write(tmp_path / "cut.sqlite", without=(table,))
    with pytest.raises(TraceError, match=f"table {table}"):
        import_trace([path], OPTIONS)


def test_a_gpu_that_is_not_named_is_asked_for(tmp_path):
    path = steps().write(tmp_path / "nameless.sqlite", without=("TARGET_INFO_GPU",))
    with pytest.raises(TraceError, match="--gpu"):
        import_trace([path], OPTIONS)
    trace = import_trace([path], ImportOptions(precision="fp32", batch=8, gpu=GPU))
    assert trace.facts.device_name == GPU


def test_a_broken_file_and_one_without_precision_name_the_file(tmp_path):
    path = steps().write(tmp_path / "a.sqlite")
    with pytest.raises(TraceError, match=r"a\.sqlite.*--precision"):
        import_trace([path], ImportOptions())
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    with pytest.raises(TraceError, match=r"a\.sqlite"):
        import_trace([path], OPTIONS)


def test_ranges_without_sizes_give_times_alone(tmp_path, monkeypatch):
    """As ``emit_nvtx`` writes them by default."""
    for name, text in (("LINEAR", LINEAR), ("PRODUCT", PRODUCT)):
        monkeypatch.setitem(globals(), name, text.partition(", sizes")[0])
    trace = import_trace([steps().write(tmp_path / "report.sqlite")], OPTIONS)
    assert trace.unshaped_share == 1.0 and trace.operators["device_ns"].sum() > 0
    assert any("holds no shapes" in warning for warning in trace.facts.warnings)
