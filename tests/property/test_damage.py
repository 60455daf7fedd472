"""No damage to a file ends in anything but one sentence or what can be kept; what contradicts the rest is never taken in silence."""

import csv
import gzip
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import test_nsight
import test_xla
import triosim_files
from fuzz import count_examples
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from same_model import ProportionalModel
from small_step import parallel_steps, small_step
from trioflow.base.errors import InputError, TrioflowError
from trioflow.base.experiments import load_plans
from trioflow.export.rank_files import size_trace, write_chakra
from trioflow.hardware.platform import SHIPPED, load_platform
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.trace.importers.chakra_nodes import add_attribute, new_metadata, new_node, read_messages, write_messages
from trioflow.trace.importers.detect import import_trace
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.store import Trace, load_trace, pack_trace, read_pack, save_trace

OPTIONS = ImportOptions(gpu="NVIDIA H100 80GB HBM3", batch=8, precision="fp32")
PROFILE, GRAPH = "kineto.json", "execution_trace.json"
SIMAI = """HYBRID_TRANSFORMER_FWD_IN_BCKWD model_parallel_NPU_group: 2 ep: 1 pp: 1 vpp: 1 ga: 1 all_gpus: 8
2
attention -1 900 ALLREDUCE 4096 700 NONE 0 500 ALLGATHER 2048 100
mlp -1 800 NONE 0 600 ALLREDUCE 4096 400 ALLREDUCE 1024 100
"""
WORSE = (
    "text",
    "",
    7,
    1.5,
    None,
    True,
    [],
    {},
    [[1, 2]],
    {"a": 1},
    "12 ",
    -1,
    0,
    1 << 63,
    10**40,
    float("nan"),
    "nan",
    "Tensor(floot)",
    "Tensor(double)",
    "1e3",
    "٣",
)
"""Values that cannot be, or are unlikely to be, where another one stood."""

Document = Any
"""A file's content: JSON's values, or the rows of a table."""


def write_document(name: str, content: Document) -> bytes:
    """Return a file's content as its tool writes it: a table of cells or of words, or JSON."""
    if isinstance(content, bytes):
        return content
    rows = [row if isinstance(row, list) else [row] for row in content]
    text = io.StringIO(newline="")
    if name.endswith(".csv"):
        csv.writer(text, lineterminator="\n").writerows(rows)
    elif name.endswith(".txt"):
        text.writelines(" ".join(map(str, row)) + "\n" for row in rows)
    elif name.endswith(".jsonl"):
        text.writelines(json.dumps(row) + "\n" for row in content)
    else:
        text.write(json.dumps(content))
    made = text.getvalue().encode()
    return gzip.compress(made) if name.endswith(".gz") else made


def make_chakra() -> list[Any]:
    """Return the messages of the small step's calls as PyTorch's converter writes them."""
    profile, graph = small_step()
    calls = {e["args"].get("Record function id"): e for e in profile["traceEvents"]}
    nodes = [new_metadata()]
    for node in graph["nodes"][1:]:
        event = calls[node["attrs"][0]["value"]]
        one = new_node(node["id"], node["name"], "COMP_NODE")
        one.ctrl_deps.append(node["ctrl_deps"])
        one.start_time_micros, one.duration_micros = event["ts"], event["dur"]
        for side in ("inputs", "outputs"):
            for key, cells in node[side].items():
                setattr(getattr(one, side), key, json.dumps(cells))
        add_attribute(one, "is_cpu_op", "bool_val", True)
        nodes.append(one)
    return nodes


def export_chakra(trace: Trace, folder: Path) -> list[Any]:
    """Return the messages of a file that trioflow writes of a trace."""
    graph = extrapolate(trace, make_plan(), ProportionalModel())
    source = size_trace([trace], make_plan(), graph.metadata.batch)
    file, _ = write_chakra(graph, folder / "step", source)
    return [message for _, message in read_messages(file)]


def spell_out(messages: list[Any]) -> list[dict[str, Any]]:
    return [MessageToDict(one, preserving_proto_field_name=True) for one in messages]


def write_files(files: dict[str, Document], folder: Path) -> list[Path]:
    """Write some documents; return the paths that an import is given."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(write_document(name, content))
    return [folder] if "trace.csv" in files else [folder / name for name in files]


def make_nsight() -> dict[str, dict[str, Document]]:
    """Return a report's lines as its newer and its older versions write them."""
    with TemporaryDirectory() as folder:
        database, path = test_nsight.steps().write(Path(folder) / "rank.sqlite"), Path(folder) / "rank.jsonl"
        found = {}
        for form, write in (
            ("rows", test_nsight.write_rows),
            ("events", partial(test_nsight.write_events, apart=True)),
        ):
            write(database, path)
            lines = path.read_text(encoding="utf-8").splitlines()
            found[f"nsight {form}"] = {path.name: [json.loads(line) for line in lines]}
    return found


def make_xla() -> Document:
    """Return a profile of two steps."""
    with TemporaryDirectory() as folder:
        path = test_xla.write(Path(folder), *test_xla.on_gpu(0), *test_xla.on_gpu(1000, 1))
        return json.loads(gzip.decompress(path.read_bytes()))


def make_sources() -> dict[str, dict[str, Document]]:
    """Return small sources, each of some files."""
    pair, parallel = (dict(zip((PROFILE, GRAPH), made, strict=True)) for made in (small_step(), parallel_steps()))
    pair[PROFILE]["deviceProperties"][0]["name"] = OPTIONS.gpu
    tables = {
        "trace.csv": [triosim_files.TRACE, *triosim_files.trace_rows()],
        "tensor.csv": [triosim_files.TENSOR, *triosim_files.tensor_rows()],
    }
    return {
        "kineto with execution trace": pair,
        "kineto alone": {PROFILE: pair[PROFILE]},
        "parallel steps": parallel,
        "parallel steps alone": {PROFILE: parallel[PROFILE]},
        "chakra": {"step.et": spell_out(make_chakra())},
        "triosim": tables,
        **make_nsight(),
        "xla": {"host.trace.json.gz": make_xla()},
        "simai": {"workload.txt": [line.split() for line in SIMAI.splitlines()]},
    }


SOURCES = make_sources()


def load_damaged(files: dict[str, Document], folder: Path) -> Trace | None:
    """Import files and keep the trace; None where they are refused as they must be."""
    paths = write_files(files, folder / "source")
    output = folder / "trace"
    shutil.rmtree(output, ignore_errors=True)
    try:
        trace = import_trace(paths, replace(OPTIONS, batch=4 if "trace.csv" in files else 8))
        save_trace(trace, output)
    except TrioflowError as error:
        text = str(error)
        assert any(path.name in text for path in (*paths, folder / "source")), text
        assert "\n" not in text and len(text) < 1500 and not output.exists(), text
        return None
    loaded = load_trace(output)
    assert len(loaded.operators) == len(trace.operators)
    return loaded


def find_places(value: Document) -> list[tuple[Any, Any]]:
    return [*(value.items() if isinstance(value, dict) else enumerate(value))]


@st.composite
def damage_document(draw: DrawFn, document: Document) -> Document:
    """Change one place of a document: another value, none, a second one, or a neighbour's."""
    changed = deepcopy(document)
    container = changed
    while True:
        key, inner = draw(st.sampled_from(find_places(container)))
        if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 3)) == 0:
            break
        container = inner
    how = draw(st.sampled_from(("replace", "drop", "twice", "exchange")))
    if how == "drop":
        del container[key]
    elif how == "twice" and isinstance(container, list):
        container.insert(key, inner)
    elif how == "exchange":
        other, value = draw(st.sampled_from(find_places(container)))
        container[key], container[other] = value, inner
    else:
        container[key] = draw(st.sampled_from(WORSE))
    return changed


def damage_bytes(content: bytes) -> SearchStrategy[bytes]:
    """Cut, flip, lose or insert bytes of a file, pack it, or write something else."""
    place = st.integers(0, len(content) - 1)
    flip = lambda p, bit: content[:p] + bytes([content[p] ^ 1 << bit]) + content[p + 1 :]  # noqa: E731
    packed = gzip.compress(content)
    others = [
        b"",
        b"{}",
        b"[]",
        b"\0" * 64,
        b"null",
        content * 2,
        packed,
        packed[:-9],
        b"\xef\xbb\xbf" + content,
        content.replace(b"\n", b"\r\n"),
    ]
    return st.one_of(
        place.map(lambda p: content[:p]),
        st.builds(flip, place, st.integers(0, 7)),
        st.builds(lambda p, n: content[:p] + content[p + n :], place, st.integers(1, 60)),
        st.builds(lambda p, b: content[:p] + b + content[p:], place, st.binary(min_size=1, max_size=40)),
        st.sampled_from(others),
    )


def check_documents(files: dict[str, Document], full: int, folder: Path) -> None:
    """Damage documents again and again; some have to be refused and some kept."""
    kept: Counter[bool] = Counter()

    @settings(max_examples=count_examples(full))
    @given(st.data())
    def check(data):
        name = data.draw(st.sampled_from([*files]))
        damaged = files | {name: data.draw(damage_document(files[name]))}
        kept[load_damaged(damaged, folder) is not None] += 1

    assert load_damaged(files, folder) is not None
    check()
    assert min(kept[True], kept[False]) > 0


@pytest.mark.parametrize("source", SOURCES)
def test_a_damaged_document_is_refused_or_a_trace_that_can_be_kept(source, tmp_path):
    check_documents(SOURCES[source], 160, tmp_path)


def test_a_damaged_export_is_refused_or_a_trace_that_can_be_kept(tmp_path):
    trace = load_damaged(SOURCES["kineto with execution trace"], tmp_path)
    messages = export_chakra(trace, tmp_path)
    check_documents({"step.0.et": spell_out(messages)}, 160, tmp_path)


@pytest.mark.parametrize("source", SOURCES)
def test_a_file_of_damaged_bytes_is_refused_or_a_trace_that_can_be_kept(source, tmp_path):
    files = {name: write_document(name, content) for name, content in SOURCES[source].items()}
    if source == "chakra":
        write_messages(tmp_path / "step.et", make_chakra())
        files["step.et"] = (tmp_path / "step.et").read_bytes()

    @settings(max_examples=count_examples(60))
    @given(st.data())
    def check(data):
        name = data.draw(st.sampled_from([*files]))
        load_damaged(files | {name: data.draw(damage_bytes(files[name]))}, tmp_path)

    check()


def test_a_damaged_capture_is_refused_or_a_trace_that_can_be_kept(raw_cnn, tmp_path):
    files = {
        path.name: gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for path in raw_cnn.iterdir()
    }
    folder = tmp_path / "raw"

    @settings(max_examples=count_examples(24))
    @given(st.data())
    def check(data):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(raw_cnn, folder)
        name = data.draw(st.sampled_from(sorted(files)))
        text = json.dumps(data.draw(damage_document(json.loads(files[name])))).encode()
        (folder / name).write_bytes(gzip.compress(text, 1) if name.endswith(".gz") else text)
        try:
            save_trace(import_trace([folder], ImportOptions()), tmp_path / "trace")
        except TrioflowError as error:
            assert str(folder) in str(error) and "\n" not in str(error)
        else:
            load_trace(tmp_path / "trace")

    check()


def add_up(trace: Trace) -> dict[str, Any]:
    """Return what a prediction is made from, summed over the trace."""
    operators, facts = trace.operators, trace.facts
    names = ("device_ns", "cpu_ns", "kernels", "flop", "read_bytes", "write_bytes", "batch_flop")
    moves = operators["kind"] == "collective"
    return {
        **{name: int(operators[name].sum()) for name in names},
        **Counter(operators["phase"]),
        "collectives_ns": (int(moves.sum()), int(operators["device_ns"][moves].sum())),
        "parameters": len(facts.gradients),
        "step_s": facts.step_time_s,
        "device": facts.device_name,
    }


def assert_not_silent(source: str, changed: dict[str, Document], note: object, folder: Path) -> None:
    """Fail where changed files give other sums and no warning that was not there before."""
    before, after = load_damaged(SOURCES[source], folder), load_damaged(changed, folder)
    if after is not None and add_up(after) != add_up(before):
        assert set(after.facts.warnings) - set(before.facts.warnings), note


Event = dict[str, Any]


def _set(*path: Any, value: Any) -> Callable[[Event], None]:
    def change(one: Event) -> None:
        for key in path[:-1]:
            one = one[key]
        one[path[-1]] = value

    return change


def _calls(event: Event) -> bool:
    return event.get("cat") in ("cpu_op", "user_annotation") and "trioflow" not in event["name"]


def _launched(event: Event) -> bool:
    return "correlation" in event["args"]


def _has_tensors(node: Event) -> bool:
    return bool(node["inputs"]["values"])


ONE_SIDED: dict[str, tuple[str, Callable[[Event], bool], Callable[[Event], None]]] = {
    "call renamed": (PROFILE, _calls, _set("name", value="another")),
    "call of another kind": (PROFILE, _calls, _set("cat", value="kernel")),
    "call gone": (PROFILE, _calls, _set("ph", value="i")),
    "an id that stands twice": (PROFILE, _calls, _set("args", "Record function id", value=3)),
    "launch gone, or its kernel": (PROFILE, _launched, _set("ph", value="i")),
    "launch of another number": (PROFILE, _launched, _set("args", "correlation", value=77)),
    "node renamed": (GRAPH, lambda n: n["id"] > 10, _set("name", value="another")),
    "node of another number": (GRAPH, lambda n: n["id"] > 10, _set("attrs", 0, "value", value=777)),
    "elements": (GRAPH, _has_tensors, _set("inputs", "values", 0, 3, value=5)),
    "element's size": (GRAPH, _has_tensors, _set("inputs", "values", 0, 4, value=2)),
    "shape": (GRAPH, _has_tensors, _set("inputs", "shapes", 0, value=[3, 3])),
    "type": (GRAPH, _has_tensors, _set("inputs", "types", 0, value="Tensor(double)")),
    "device": (GRAPH, _has_tensors, _set("inputs", "values", 0, 5, value="cuda:5")),
}
"""Of each such event or node of the pair: what the other file, or the entry itself, contradicts."""


@pytest.mark.parametrize("kind", ONE_SIDED)
def test_what_the_other_file_contradicts_is_refused_or_said(kind, tmp_path):
    name, is_meant, change = ONE_SIDED[kind]
    source = "kineto with execution trace"
    key = "traceEvents" if name == PROFILE else "nodes"
    entries = SOURCES[source][name][key]
    places = [place for place, entry in enumerate(entries) if is_meant(entry)]
    assert places
    for place in places:
        files = deepcopy(SOURCES[source])
        change(files[name][key][place])
        assert_not_silent(source, files, entries[place], tmp_path)


def _rename_communication(event: Event, depth: int) -> Event:
    """Rename kernels; then also the calls; then also what their metadata say."""
    if event["cat"] == "kernel" and "nccl" in event["name"]:
        event["name"] = "mover"
    elif depth > 0 and event["name"].startswith(("c10d::", "record_param_comms")):
        event["name"] = "mine::move"
    if depth > 1:
        event["args"].pop("Collective name", None)
    return event


def _keep(words: tuple[str, ...], key: str = "name") -> Callable[[Event], Event | None]:
    return lambda event: None if event[key].startswith(words) else event


WHOLE_RUNS: dict[str, Callable[[Event], Event | None]] = {
    **{f"communication renamed, {depth}": lambda e, depth=depth: _rename_communication(e, depth) for depth in range(3)},
    "device events removed": _keep(("kernel", "gpu_"), "cat"),
    "kernels and launches removed": _keep(("kernel", "cuda_"), "cat"),
    "steps' annotations removed": _keep(("ProfilerStep#",)),
    "annotations removed": _keep(("user_annotation",), "cat"),
    "communication removed": _keep(("c10d::", "record_param_comms")),
    "kernels of another device from some time on": lambda e: (
        {**e, "args": e["args"] | {"device": 2}} if e["cat"] == "kernel" and e["ts"] > 3000 else e
    ),
    "an empty last step": lambda e: (
        {**e, "ts": 10**7, "name": "ProfilerStep#99"} if e["name"] == "ProfilerStep#3" else e
    ),
    "kernels launched before the profile": lambda e: (
        {**e, "args": e["args"] | {"correlation": 1}} if e["name"] == "kernel_4" else e
    ),
}
"""What another setting, version or rank would have written of every event of a run; None leaves one out."""


@pytest.mark.parametrize("kind", WHOLE_RUNS)
@pytest.mark.parametrize("source", ["parallel steps", "parallel steps alone"])
def test_a_run_that_was_recorded_otherwise_is_refused_or_said(source, kind, tmp_path):
    files = deepcopy(SOURCES[source])
    changed = (WHOLE_RUNS[kind](event) for event in files[PROFILE]["traceEvents"])
    files[PROFILE]["traceEvents"] = [event for event in changed if event is not None]
    assert_not_silent(source, files, kind, tmp_path)


@pytest.mark.parametrize(
    ("name", "read"), [("whole.zip", read_pack), ("cpu2-gloo.yaml", load_platform), ("plans.tsv", load_plans)]
)
def test_an_own_file_of_damaged_bytes_is_refused_or_read(name, read, tmp_path):
    pack_trace("gpt2-tiny-b8", tmp_path / "whole.zip")
    shutil.copy(SHIPPED / "cpu2-gloo.yaml", tmp_path)
    shutil.copy(Path(__file__).parents[2] / "config/plans.tsv", tmp_path)
    file, refused = tmp_path / name, Counter()
    content, whole = file.read_bytes(), read(file)

    @settings(max_examples=count_examples(120))
    @given(damage_bytes(content))
    def check(damaged):
        file.write_bytes(damaged)
        try:
            made = read(file)
        except InputError as error:
            text = str(error)
            assert name in text and "\n" not in text and len(text) < 1500
            refused[True] += 1
        else:
            assert name != "whole.zip" or made.facts == whole.facts

    check()
    assert refused[True] > 3
