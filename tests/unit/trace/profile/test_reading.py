"""Kineto's entries read many at once: what a file may hold, and the errors of what it may not.

Every element type of PyTorch, as gcc, clang with libc++ and MSVC spell it in a profile.

What two accounts of the same step do not agree on is said, with the number of cases.
"""

import copy
import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from small_step import small_step
from trioflow.base.errors import TraceError
from trioflow.trace.importers.detect import import_trace
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile import kineto
from trioflow.trace.profile.kineto import CODES, NUMBERS, read_profile
from trioflow.trace.profile.profiler_fields import element_bytes, element_type, noted_bytes

EVENT = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::mm",
    "pid": 1,
    "tid": 2,
    "ts": 4743411230850.499,
    "dur": 1.25,
    "args": {
        "External id": 7,
        "Record function id": 3,
        "Input Dims": [[4, 4], [4, 4]],
        "Input type": ["float", "float"],
        "Concrete Inputs": ["", "1e-05"],
    },
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kineto, "BLOCK", 2000)


def write(tmp_path, text):
    path = tmp_path / "kineto.json"
    path.write_text(text, encoding="utf-8")
    return path


def told(path):
    """Return all that a profile holds, or why it is refused."""
    try:
        profile = read_profile(path)
    except TraceError as error:
        return str(error)
    columns = [profile.columns[name].tolist() for name in ("start_ns", "end_ns", *CODES[:3], *NUMBERS)]
    details = [profile.details[number] for number in profile.columns["details"].tolist()]
    return columns, details, profile.names, profile.categories, profile.foreign, profile.header


def events(change=None, count=60):
    """Return events of growing times, one of them changed."""
    found = []
    for number in range(count):
        event = copy.deepcopy(EVENT) | {"ts": EVENT["ts"] + number}
        if number == count // 2 and change is not None:
            event = change(event)
        found.append(event)
    return found


def test_a_profile_is_the_same_in_blocks_of_any_size(raw_transformer, monkeypatch):
    for name in ("kineto.json.gz", "kineto_steps.json.gz"):
        small = told(raw_transformer / name)
        with monkeypatch.context() as patched:
            patched.setattr(kineto, "BLOCK", 1 << 22)
            assert told(raw_transformer / name) == small


FIELDS = {
    "nanoseconds": {"ts": 1_700_000_000_000_000_123, "dur": 1234},
    "whole microseconds": {"ts": 1_700_000_000_000_123, "dur": 12},
    "more decimals": {"ts": 4743411230850.12, "dur": 0.4685},
    "text": {"ts": "4743411230850.499", "dur": "1"},
    "an exponent": {"dur": 1e-3},
    "no arguments": {"args": None},
    "another thread": {"tid": "stream 7"},
    "an annotation": {"name": "ProfilerStep#3"},
    "a frame of Python": {"cat": "python_function", "name": "train.py(3): step"},
    "a flow": {"ph": "s", "ts": None},
    "a foreign device": {"cat": "mtia_kernel", "dur": -1},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_what_a_file_may_hold_is_read_as_exact_decimals(tmp_path, monkeypatch, fields):
    path = write(tmp_path, json.dumps({"traceEvents": events(lambda e: e | fields)}))
    fast = told(path)
    monkeypatch.setattr(kineto, "_EXACT_US", 0)
    assert told(path) == fast and not isinstance(fast, str)


@pytest.mark.parametrize("scale", [1, 380])
def test_every_nanosecond_is_kept(tmp_path, scale):
    stamps = [number * scale for number in (4458676522690655, 4458676522690501, 7999999999999999, 1)]
    rows = [EVENT | {"ts": f"{stamp // 1000}.{stamp % 1000:03}"} for stamp in stamps]
    path = write(tmp_path, re.sub(r'"ts": "([\d.]+)"', r'"ts": \1', json.dumps({"traceEvents": rows})))
    assert read_profile(path).start_ns.tolist() == sorted(stamps)


ODD = {
    "no time": ({"ts": None}, "None is not a time"),
    "a time of words": ({"dur": "long"}, "long is not a time"),
    "backwards": ({"dur": -1.5}, "negative duration -1.5"),
    "eleven days": ({"dur": 1e13}, "no call takes 10000000000000.0"),
    "a time of no clock": ({"ts": 1 << 62}, "4611686018427387904 is not a time"),
    "an id of words": ({"args": {"External id": "7"}}, "Expected `int`, got `str`", r"\.args\.External id"),
    "a shape of words": ({"args": {"Input Dims": [["a"]]}}, "Expected `int | array`, got `str`"),
    "a size that is a shape": ({"args": {"Input Dims": [[2, [3]]]}}, r"\[2, \[3\]\] is not a shape"),
    "types without shapes": ({"args": {"Input Dims": [], "Input type": ["float"]}}, "it has the shapes of 0 arguments"),
    "a name of numbers": ({"name": 5}, "Expected `str`, got `int`", r"\.name"),
    "arguments in a list": ({"args": [1]}, r"Expected `object \| null`, got `array`", r"\.args"),
}


@pytest.mark.parametrize(("fields", "why", "key"), [(*odd, "")[:3] for odd in ODD.values()], ids=ODD)
def test_an_odd_event_is_refused_with_its_place(tmp_path, fields, why, key):
    path = write(tmp_path, json.dumps({"traceEvents": events(lambda e: e | fields)}))
    with pytest.raises(TraceError, match=rf"traceEvents\[30\]{key}: the event .*cannot be read: {why}"):
        read_profile(path)


def test_an_event_without_a_time_and_an_entry_that_is_none_are_refused(tmp_path):
    for change in (lambda e: {key: value for key, value in e.items() if key != "ts"}, lambda _: ["name"]):
        with pytest.raises(TraceError, match=r"traceEvents\[30\]"):
            read_profile(write(tmp_path, json.dumps({"traceEvents": events(change)})))


def test_operators_of_several_processes_are_refused(tmp_path):
    path = write(tmp_path, json.dumps({"traceEvents": events(lambda e: e | {"pid": 9, "name": "aten::add"})}))
    with pytest.raises(TraceError, match=r"operators of 2 processes: 1 \(such as aten::mm\), 9 \(such as aten::add\)"):
        read_profile(path)


def test_a_file_that_is_cut_is_named_with_its_key(tmp_path):
    text = json.dumps({"traceEvents": events()})
    cut = text[: text.index('"tid"', len(text) * 2 // 3) + 2]
    with pytest.raises(TraceError, match="traceEvents: not a complete JSON file"):
        read_profile(write(tmp_path, cut))


@pytest.mark.parametrize("word", [b"schemaVersion", b'"cpu_op', b"traceName"])
def test_bytes_that_are_no_text_are_refused(word, tmp_path):
    content = json.dumps({"schemaVersion": 1, "traceEvents": events(), "traceName": "t"}).encode()
    path = tmp_path / "kineto.json"
    path.write_bytes(content.replace(word, word + b"\x80"))
    with pytest.raises(TraceError, match=r"kineto\.json: not a complete JSON file: 'utf-8' codec"):
        read_profile(path)


def test_details_keep_every_digit(tmp_path):
    path = write(
        tmp_path,
        json.dumps(
            {"traceEvents": events(lambda e: e | {"args": {"Input Dims": [[1]], "Concrete Inputs": [0.1]}})}
        ).replace("0.1]", "0.10000000000000001]"),
    )
    _, details, *_ = told(path)
    assert details[30] == {"shapes": [[1]], "values": ["0.10000000000000001"]}


def test_a_packed_file_is_the_same(tmp_path):
    path = write(tmp_path, json.dumps({"traceEvents": events()}))
    packed = tmp_path / "kineto.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert told(path) == told(packed)


_HEADER = Path(torch.__file__).parent / "include/torch/headeronly/core/ScalarType.h"
_LIST = re.search(r"define AT_FORALL_SCALAR_TYPES_WITH_COMPLEX_AND_QINTS\(_\)(.*?)\n\n", _HEADER.read_text(), re.S)
TYPES = re.findall(r"_\((.*?), (\w+)\)", _LIST[1])
SPELLINGS = {  # gcc, clang on Linux, clang on macOS, MSVC
    "uint8_t": ("unsigned char",) * 4,
    "int8_t": ("signed char",) * 4,
    "int16_t": ("short int", "short", "short", "short"),
    "int64_t": ("long int", "long", "long long", "__int64"),
    "uint16_t": ("short unsigned int", "unsigned short", "unsigned short", "unsigned short"),
    "uint32_t": ("unsigned int",) * 4,
    "uint64_t": ("long unsigned int", "unsigned long", "unsigned long long", "unsigned __int64"),
}


@pytest.mark.parametrize(("kind", "name"), TYPES)
def test_every_element_type_is_known_in_each_compiler_s_spelling(kind, name):
    dtype = {
        "Byte": "uint8",
        "Char": "int8",
        "Short": "int16",
        "Int": "int32",
        "Long": "int64",
        "Half": "float16",
        "Float": "float32",
        "Double": "float64",
        "ComplexHalf": "complex32",
        "ComplexFloat": "complex64",
        "ComplexDouble": "complex128",
    }.get(name, name.lower())
    size = getattr(torch, dtype).itemsize
    assert noted_bytes(name) == size
    classes = re.sub(r"c10::", "struct c10::", kind)
    spellings = SPELLINGS.get(kind, (kind, kind, kind, classes))
    assert {element_type(one) for one in spellings} == {spellings[0]}
    assert {element_bytes(one) for one in spellings} == {size}


def test_the_sweep_has_every_type_and_unknown_ones_stay_unknown():
    assert len(TYPES) >= 46
    assert element_bytes("float9") is None and noted_bytes("Float9") is None
    assert element_type("TensorList") == "TensorList"


SAID = ImportOptions(batch=8, precision="fp32")


def find(events, name, category=None):
    return next(e for e in events if e["name"] == name and category in (None, e.get("cat")))


def drop(name, category=None):
    return lambda p, g: p.remove(find(p, name, category))


def change(name, category=None, args=None, **values):
    def apply(profile, graph):
        one = find(profile, name, category)
        one.update(values)
        one["args"].update(args or {})

    return apply


def exchange(profile, graph):
    """Let two kernels of a stream have each other's launch."""
    one, other = (find(profile, name) for name in ("kernel_4", "kernel_5"))
    pair = one["args"]["correlation"], other["args"]["correlation"]
    other["args"]["correlation"], one["args"]["correlation"] = pair


def lose_launches(profile, graph):
    """Keep the kernels of a call without its launch, and one after the step."""
    launches = [e for e in profile if e["name"] == "cudaLaunchKernel"]
    profile.remove(launches[0])
    profile.remove(launches[-1])


def lose_annotation(profile, graph):
    for name in ("autograd::engine::evaluate_function: MmBackward0", "MmBackward0"):
        profile.remove(find(profile, name))


DOUBTS = {
    "1 launches have no kernel in the profile (first: cudaLaunchKernel)": drop("kernel_5"),
    "1 kernels have no launch and go to the call that they name (first: kernel_4)": lose_launches,
    "1 kernels after the step have no launch: some may be the step's": lose_launches,
    "1 kernels start before their launch (first: kernel_5)": change("kernel_5", ts=1060),
    "1 kernels of a stream run in another order than they were launched (first: kernel_5)": exchange,
    "1 kernels start while another one of their stream runs (first: kernel_5)": change("kernel_4", dur=48),
    "1 operators count as forward although backward began before them (first: aten::mm)": lose_annotation,
    "1 calls are named after autograd's nodes and run outside its backward pass (first: ReluBackward0)": drop(
        "autograd::engine::evaluate_function: ReluBackward0"
    ),
    "1 operators are annotations in the profile (first: aten::relu)": change("aten::relu", cat="user_annotation"),
    "operators run while another one does, on a thread of their own (first: aten::mm)": change("aten::mm", tid=2),
    "1 calls of the profile are not in the execution trace (first: aten::t)": lambda p, g: g.remove(find(g, "aten::t")),
    "1 operators of the execution trace are not in the profile (first: aten::t)": drop("aten::t"),
    "1 calls have other shapes in the profile than in the execution trace (first: aten::relu)": change(
        "aten::relu", args={"Input Dims": [[8, 5]]}
    ),
    "1 calls have another caller in the profile than in the execution trace (first: aten::t)": lambda p, g: find(
        g, "aten::t"
    ).update(ctrl_deps=10),
    "1 calls have another sequence number in the execution trace (first: aten::relu)": change(
        "aten::relu", args={"Sequence number": 3}
    ),
}


def load(folder, apply):
    profile, graph = copy.deepcopy(small_step())
    apply(profile["traceEvents"], graph["nodes"])
    files = [folder / "kineto.json", folder / "execution_trace.json"]
    for path, content in zip(files, (profile, graph), strict=True):
        path.write_text(json.dumps(content))
    return import_trace(files, SAID)


@pytest.mark.parametrize("words", DOUBTS)
def test_what_does_not_agree_is_said(tmp_path, words):
    warnings = load(tmp_path, DOUBTS[words]).facts.warnings
    assert any(warning.endswith(words) for warning in warnings), warnings


def test_files_that_agree_raise_no_doubt(tmp_path, cnn_trace, transformer_trace):
    assert load(tmp_path, lambda p, g: None).facts.warnings == []
    assert cnn_trace.facts.warnings == transformer_trace.facts.warnings == []
