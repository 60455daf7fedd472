"""What is wrong with a source is refused in one sentence with file, place and fix, and nothing is written."""

import copy
import gzip
import json
import os
import shutil
from dataclasses import replace

import pandas as pd
import pytest
import triosim_files
from small_step import small_step
from trioflow import tables
from trioflow.base.errors import TableError, TraceError, TrioflowError
from trioflow.cli import main
from trioflow.trace.importers.detect import import_trace
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.merge import merge_trace_folder
from trioflow.trace.store import Trace, save_trace

SAID = ImportOptions(batch=8, precision="fp32")
PROFILE, GRAPH = "kineto.json", "execution_trace.json"


@pytest.fixture
def load(tmp_path):
    """Import the small step after a change of its profile and its execution trace."""

    def load(change=lambda p, g: None, alone=False, options=SAID):
        profile, graph = copy.deepcopy(small_step())
        change(profile, graph)
        (tmp_path / PROFILE).write_text(json.dumps(profile))
        (tmp_path / GRAPH).write_text(json.dumps(graph))
        given = [PROFILE] if alone else [PROFILE, GRAPH]
        return import_trace([tmp_path / one for one in given], options)

    return load


def event(profile, name, category="cpu_op"):
    events = profile["traceEvents"]
    return next(e for e in events if e["name"] == name and e["cat"] == category)


def node(graph, name):
    return next(n for n in graph["nodes"] if n["name"] == name)


def attribute(one, name):
    return next(a for a in one["attrs"] if a["name"] == name)


def twice(change):
    """Append a copy of a profile's event, changed."""

    def apply(profile, graph):
        one = copy.deepcopy(event(profile, "aten::relu"))
        change(one)
        profile["traceEvents"].append(one)

    return apply


def test_the_step_itself_is_imported_without_a_warning(load):
    trace = load()
    assert trace.facts.warnings == []
    counts = trace.operators["phase"].value_counts()
    assert counts.to_dict() == {"forward": 3, "backward": 3, "optimizer": 1}
    assert trace.operators["device_ns"].sum() == 103_000
    assert len(trace.facts.gradients) == 1
    assert len(load(alone=True).facts.warnings) == 1


BAD_PROFILES = {
    "both the call 3": lambda p, g: attribute(g["nodes"][5], "rf_id").update(value=3),
    "record id 5 stands on": twice(lambda e: e["args"].update({"External id": 0})),
    "external id 905 stands on": twice(lambda e: e["args"].pop("Record function id")),
    "a kernel stands twice": lambda p, g: p["traceEvents"].append(event(p, "kernel_4", "kernel")),
    "1e+30 is not a time": lambda p, g: event(p, "aten::relu").update(dur=1e30),
    "no call takes 200": lambda p, g: event(p, "aten::relu").update(dur=2 * 10**13),
    "negative duration -1": lambda p, g: event(p, "aten::relu").update(dur=-1),
    "begins inside 'aten::linear' and ends": lambda p, g: event(p, "aten::t").update(dur=60),
    "Expected `int` >= 0 - at `$[0][0]`": lambda p, g: event(p, "aten::relu")["args"].update({"Input Dims": [[-8, 4]]}),
    "the shapes of 2 arguments and the types of 1": lambda p, g: event(p, "aten::relu")["args"].update(
        {"Input Dims": [[8, 4], [8, 4]]}
    ),
    "Expected `array | null`, got `int`": lambda p, g: event(p, "aten::relu")["args"].update({"Input Dims": 7}),
    "devices 0, 1": lambda p, g: event(p, "kernel_5", "kernel")["args"].update(device=1),
    "no GPU events": lambda p, g: p.update(traceEvents=[e for e in p["traceEvents"] if e["cat"] != "kernel"]),
    "33 elements in a tensor of shape [8, 4]": lambda p, g: node(g, "aten::relu")["inputs"]["values"][0].__setitem__(
        3, 33
    ),
    "0 bytes for an element of type float": lambda p, g: node(g, "aten::relu")["inputs"]["values"][0].__setitem__(4, 0),
    "unknown element type 'floot'": lambda p, g: node(g, "aten::relu")["inputs"].update(types=["Tensor(floot)"]),
    "node 13 encloses itself": lambda p, g: (
        node(g, "aten::t").update(ctrl_deps=node(g, "aten::t")["id"] + 1)
        or node(g, "aten::mm").update(ctrl_deps=node(g, "aten::t")["id"])
    ),
    "schema '3.0' is not known": lambda p, g: g.update(schema="3.0"),
    "more than any step": lambda p, g: _enlarge(node(g, "aten::linear")),
}


def _enlarge(one):
    """Give a product's factors sizes that no memory holds, consistently."""
    for place, shape in enumerate(([1 << 30, 1 << 20], [1 << 20, 1 << 20])):
        one["inputs"]["shapes"][place] = shape
        one["inputs"]["values"][place][3] = shape[0] * shape[1]


@pytest.mark.parametrize("words", BAD_PROFILES)
def test_a_profile_that_contradicts_itself_is_refused(load, words, tmp_path):
    with pytest.raises(TraceError) as error:
        load(BAD_PROFILES[words])
    text = str(error.value)
    assert words in text and str(tmp_path) in text and "\n" not in text
    assert error.value.fix


def test_a_profile_alone_with_an_unknown_type_is_refused(load):
    def change(profile, graph):
        event(profile, "aten::mm")["args"]["Input type"] = ["floot", "float"]

    with pytest.raises(TraceError, match=r"unknown element type 'floot' of an argument of aten::mm"):
        load(change, alone=True)
    load(change)  # the execution trace knows better


def test_a_profile_without_shapes_of_one_operator_says_so(load):
    def change(profile, graph):
        del event(profile, "aten::relu")["args"]["Input type"]

    warnings = load(change, alone=True).facts.warnings
    assert "1 of 7 operators have no tensors recorded" in warnings


def test_shapes_that_differ_between_steps_are_warned_of(load):
    """A second step, the same operators on other sizes: its times are not mixed in."""

    def change(profile, graph):
        later = copy.deepcopy(profile["traceEvents"])
        for one in later:
            one["ts"] += 5000
            one["dur"] *= 2 if one["cat"] == "kernel" else 1
            one["name"] = one["name"].replace("ProfilerStep#1", "ProfilerStep#2")
            for key in ("External id", "Record function id", "correlation"):
                if key in one["args"]:
                    one["args"][key] += 3000
        event({"traceEvents": later}, "aten::relu")["args"]["Input Dims"] = [[9, 4]]
        profile["traceEvents"] += later

    trace = load(change)
    assert any("1 of 2 steps ran other operators, shapes or kernels" in w for w in trace.facts.warnings)
    assert trace.operators["device_ns"].sum() == 103_000


@pytest.mark.parametrize("batch", [0, -3, True])
def test_a_batch_that_is_none_is_refused(load, batch, tmp_path):
    with pytest.raises(TraceError, match="is not a number of samples; give it with --batch") as error:
        load(options=ImportOptions(batch=batch, precision="fp32"))
    assert str(tmp_path) in str(error.value)


def test_a_batch_that_no_input_has_is_warned_of(load):
    trace = load(options=ImportOptions(batch=7, precision="fp32"))
    assert any("no input has 7 samples" in w for w in trace.facts.warnings)


# The folder that a capture fills


def _packed(name, change):
    """Rewrite one packed file of a capture's folder."""

    def apply(folder):
        content = json.loads(gzip.decompress((folder / name).read_bytes()))
        change(content)
        (folder / name).write_bytes(gzip.compress(json.dumps(content).encode(), 1))

    return apply


def _environment(**changes):
    def change(folder):
        path = folder / "environment.json"
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return change


def _without(words):
    def change(profile):
        named = (e for e in profile["traceEvents"] if not str(e.get("name")).startswith(words))
        profile["traceEvents"] = list(named)

    return _packed(KINETO, change)


KINETO, EXECUTION = "kineto.json.gz", "execution_trace.json.gz"
BAD_CAPTURES = {
    "step_time_s: 99.0 s is not the median of step_times_s": _environment(step_time_s=99.0),
    "seed: nan is not finite": _environment(seed=float("nan")),
    "parameters[0].shape: ": _environment(parameters=[{"name": "x", "shape": None}]),
    "units[0]: ": _environment(units=[{"name": "x"}]),
    "warnings: 3 is not a possible value": _environment(warnings=3),
    "workload: [] is not a possible value": _environment(workload=[]),
    "shows no update": _without("Optimizer.step"),
    "and the step updates parameters": _environment(optimizer="none"),
    "the annotation 'trioflow: step' is missing": _without("trioflow: step"),
    "batch: '4' is not a possible value": _environment(batch="4"),
    "not a step time": _environment(step_time_s=0),
    "device_name": _environment(device_name=None),
    f"{KINETO}: it holds no list traceEvents": _packed(KINETO, lambda c: c.pop("traceEvents")),
    "holds no operator": _packed(KINETO, lambda c: c.update(traceEvents=[])),
    "traceEvents[9]": _packed(KINETO, lambda c: c["traceEvents"][9].pop("dur")),
    "negative": _packed(KINETO, lambda c: c["traceEvents"][9].update(dur=-1)),
    "schema '0.9'": _packed(EXECUTION, lambda c: c.update(schema="0.9")),
    "occurs twice": _packed(EXECUTION, lambda c: c["nodes"].append(c["nodes"][3])),
    "nodes[4]": _packed(EXECUTION, lambda c: c["nodes"][4].pop("inputs")),
    "not a complete JSON": lambda folder: os.truncate(folder / KINETO, 1000),
}


@pytest.mark.parametrize("words", BAD_CAPTURES)
def test_a_damaged_capture_is_refused(tmp_path, raw_cnn, words):
    folder = shutil.copytree(raw_cnn, tmp_path / "raw")
    BAD_CAPTURES[words](folder)
    with pytest.raises(TraceError) as error:
        merge_trace_folder(folder, tmp_path / "out")
    assert words in str(error.value) and str(folder) in str(error.value)
    assert not (tmp_path / "out").exists()


# Writing


def test_a_trace_that_cannot_be_kept_leaves_nothing(tmp_path, cnn_trace):
    worse = cnn_trace.tensors.assign(elem_bytes=-4)
    with pytest.raises(TableError, match=r"tensors\.parquet.*row 0, column elem_bytes"):
        save_trace(Trace(cnn_trace.operators, worse, cnn_trace.facts), tmp_path / "a")
    facts = replace(cnn_trace.facts, tail_s=float("inf"))
    with pytest.raises(TraceError, match=r"trace\.json, tail_s"):
        save_trace(Trace(cnn_trace.operators, cnn_trace.tensors, facts), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_number_that_fits_no_table_is_refused(tmp_path):
    frame = pd.DataFrame({"task_id": [1 << 70], "depends_on": [0]}, dtype=object)
    with pytest.raises(TableError, match=r"x\.parquet: table dependencies"):
        tables.write_table(frame, "dependencies", tmp_path / "x.parquet")


# The command


def _cut(folder):
    (folder / PROFILE).write_text(json.dumps(small_step()[0])[:-900])
    return [folder / PROFILE]


def _cut_packed(folder):
    path = folder / f"{PROFILE}.gz"
    path.write_bytes(gzip.compress(json.dumps(small_step()[0]).encode())[:-20])
    return [path]


def _graph_alone(folder):
    (folder / GRAPH).write_text(json.dumps(small_step()[1]))
    return [folder / GRAPH]


def _other(folder):
    (folder / "notes.txt").write_text("no trace\n")
    return [folder / "notes.txt"]


def _tables(folder):
    triosim_files.write_files(folder / "t")
    text = (folder / "t" / "trace.csv").read_text()
    (folder / "t" / "trace.csv").write_text(text.replace("forward", "sideways", 1))
    return [folder / "t"]


def _chakra(folder):
    from trioflow.trace.importers.chakra_nodes import new_metadata, new_node, write_messages

    waits = new_node(1, "x", "COMP_NODE")
    waits.data_deps.append(1)
    write_messages(folder / "x.et", [new_metadata(), waits])
    return [folder / "x.et"]


BAD_FILES = {
    "kineto.json, traceEvents": _cut,
    "kineto.json.gz": _cut_packed,
    "an execution trace holds no times": _graph_alone,
    "notes.txt: not a source that trioflow knows": _other,
    "trace.csv, line 2, column stage": _tables,
    "it waits, in a circle, for itself": _chakra,
}


@pytest.mark.parametrize("words", BAD_FILES)
def test_the_command_says_one_sentence_and_writes_nothing(tmp_path, capsys, words):
    (tmp_path / "in").mkdir()
    sources = [str(path) for path in BAD_FILES[words](tmp_path / "in")]
    out = tmp_path / "out" / "trace"
    said = ["--gpu", "a GPU", "--batch", "8", "--precision", "fp32"]
    status = main(["import", *sources, *said, "-o", str(out)])
    text = capsys.readouterr().err
    assert status == 2 and words in text
    assert text.count("\n") == 1 and "Traceback" not in text
    assert not out.exists() and not out.parent.exists()


def test_every_refusal_is_of_the_kind_that_the_command_reports():
    assert issubclass(TraceError, TrioflowError) and issubclass(TableError, TrioflowError)
