"""Kineto's entries read many at once, and one by one where one of them is odd: the same columns, the same errors."""

import copy
import gzip
import json

import pytest
from trioflow.base.errors import TraceError
from trioflow.trace.profile import json_stream, kineto
from trioflow.trace.profile.kineto import CODES, NUMBERS, read_profile

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
    monkeypatch.setattr(json_stream, "BLOCK", 2000)


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
    columns = [
        profile.column(name).tolist() for name in ("start_ns", "end_ns", *CODES[:3], *NUMBERS)
    ]
    details = [profile.details[number] for number in profile.column("details").tolist()]
    return columns, details, profile.names, profile.categories, profile.foreign, profile.header


def both_ways(path, monkeypatch):
    """Return what is told with many entries at once, and with each by itself; and how many lists were decoded."""
    decoded = []
    decode = kineto._decode_events
    with monkeypatch.context() as patched:
        patched.setattr(
            kineto, "_decode_events", lambda t: decoded.append(decode(t)) or decoded[-1]
        )
        many = told(path)
        patched.setattr(kineto, "_decode_events", lambda _: None)
        each = told(path)
    return many, each, sum(entries is not None for entries in decoded)


def events(change=None, count=60):
    """Return events of growing times, one of them changed."""
    found = []
    for number in range(count):
        event = copy.deepcopy(EVENT) | {"ts": EVENT["ts"] + number}
        if number == count // 2 and change is not None:
            event = change(event)
        found.append(event)
    return found


def test_a_real_profile_is_the_same_both_ways(raw_transformer, monkeypatch):
    for name in ("kineto.json.gz", "kineto_steps.json.gz"):
        many, each, decoded = both_ways(raw_transformer / name, monkeypatch)
        assert many == each and decoded > 20


FIELDS = {
    "nanoseconds": {"ts": 1_700_000_000_000_000_123, "dur": 1234},
    "whole microseconds": {"ts": 1_700_000_000_000_123, "dur": 12},
    "more decimals": {"ts": 4743411230850.12, "dur": 0.4685},
    "text": {"ts": "4743411230850.499", "dur": "1"},
    "an exponent": {"dur": 1e-3},
    "no arguments": {"args": None},
    "another thread": {"tid": "stream 7"},
    "a name that is no Unicode": {"name": "\ud800"},
    "an annotation": {"name": "ProfilerStep#3"},
    "a frame of Python": {"cat": "python_function", "name": "train.py(3): step"},
    "a flow": {"ph": "s", "ts": None, "args": [1]},
    "a foreign device": {"cat": "mtia_kernel", "dur": -1},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_what_a_file_may_hold_is_the_same_both_ways(tmp_path, monkeypatch, fields):
    path = write(tmp_path, json.dumps({"traceEvents": events(lambda e: e | fields)}))
    many, each, decoded = both_ways(path, monkeypatch)
    assert many == each and not isinstance(many, str) and decoded


ODD = {
    "no time": ({"ts": None}, "None is not a time"),
    "a time of words": ({"dur": "long"}, "long is not a time"),
    "backwards": ({"dur": -1.5}, "negative duration -1.5"),
    "eleven days": ({"dur": 1e13}, "no call takes 10000000000000.0"),
    "a time of no clock": ({"ts": 1 << 62}, "4611686018427387904 is not a time"),
    "an id of words": ({"args": {"External id": "7"}}, "Expected `int`, got `str`.*External id"),
    "a shape of words": ({"args": {"Input Dims": [["a"]]}}, r"\['a'\] is not a shape"),
    "types without shapes": (
        {"args": {"Input Dims": [], "Input type": ["float"]}},
        "it has the shapes of 0 arguments",
    ),
    "a name of numbers": ({"name": 5}, "5 is not a name"),
    "arguments in a list": ({"args": [1]}, r"\[1\] are no arguments"),
}


@pytest.mark.parametrize(("fields", "why"), ODD.values(), ids=ODD)
def test_an_odd_event_is_refused_with_its_place_both_ways(tmp_path, monkeypatch, fields, why):
    path = write(tmp_path, json.dumps({"traceEvents": events(lambda e: e | fields)}))
    many, each, decoded = both_ways(path, monkeypatch)
    assert many == each and decoded
    with pytest.raises(TraceError, match=rf"traceEvents\[30\]: the event .* cannot be read: {why}"):
        read_profile(path)


@pytest.mark.parametrize("word", ["name", "ts", "dur"])
def test_an_event_that_lacks_a_field_is_refused_both_ways(tmp_path, monkeypatch, word):
    cut = events(lambda e: {key: value for key, value in e.items() if key != word})
    path = write(tmp_path, json.dumps({"traceEvents": cut}))
    many, each, _ = both_ways(path, monkeypatch)
    assert many == each
    with pytest.raises(TraceError, match=rf"traceEvents\[30\]: the event lacks '{word}'"):
        read_profile(path)


def test_an_entry_that_is_no_event_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path, json.dumps({"traceEvents": events(lambda _: ["name"])}))
    many, each, _ = both_ways(path, monkeypatch)
    assert many == each and "traceEvents[30]: ['name'] is not an event" in many


def test_a_file_that_is_cut_is_named_with_its_key(tmp_path):
    text = json.dumps({"traceEvents": events()})
    cut = text[: text.index('"tid"', len(text) * 2 // 3) + 2]
    with pytest.raises(TraceError, match="traceEvents: not a complete JSON file"):
        read_profile(write(tmp_path, cut))


def test_entries_need_no_commas_between_them(tmp_path, monkeypatch):
    whole = told(write(tmp_path, json.dumps({"traceEvents": events()})))
    loose = " , ".join(json.dumps(e) + " , " * (n % 7 == 0) for n, e in enumerate(events()))
    many, each, _ = both_ways(write(tmp_path, f'{{"traceEvents": [{loose}]}}'), monkeypatch)
    assert many == each == whole


def test_details_keep_every_digit(tmp_path):
    path = write(
        tmp_path,
        json.dumps(
            {
                "traceEvents": events(
                    lambda e: e | {"args": {"Input Dims": [[1]], "Concrete Inputs": [0.1]}}
                )
            }
        ).replace("0.1]", "0.10000000000000001]"),
    )
    _, details, *_ = told(path)
    assert details[30] == {"shapes": [[1]], "values": ["0.10000000000000001"]}


def test_a_packed_file_is_the_same(tmp_path):
    path = write(tmp_path, json.dumps({"traceEvents": events()}))
    packed = tmp_path / "kineto.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert told(path) == told(packed)
