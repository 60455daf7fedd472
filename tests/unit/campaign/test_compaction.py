from __future__ import annotations

import gzip
import json

import pytest
from trioflow.base.errors import InputError
from trioflow.campaign.compaction import (
    Content,
    compact_kineto,
    pack_json,
    pack_raw,
    read_raw,
    restore_file,
    unpack_content,
)

KERNEL = {
    "ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 5.5, "dur": 2.125,
    "args": {
        "External id": 3, "correlation": 9, "device": 0, "stream": 7, "grid": [1, 1, 1],
        "block": [128, 1, 1], "registers per thread": 32, "shared memory": 64, "graph id": 1,
        "queued": 0, "context": 1, "blocks per SM": 1.5, "warps per SM": 3.0,
        "est. achieved occupancy %": 13,
    },
}  # fmt: skip
OPERATOR = {
    "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.5, "dur": 9.0,
    "args": {
        "External id": 3, "Record function id": 4, "Sequence number": 5, "Fwd thread id": 1,
        "Input Dims": [[2, 2]], "Input type": ["float"], "Collective name": "all_reduce", "Ev Idx": 7,
    },
}  # fmt: skip
COPY = {
    "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 7, "ts": 6, "dur": 1,
    "args": {"correlation": 8, "bytes": 64, "stream": 7, "memory bandwidth (GB/s)": 0.06},
}  # fmt: skip


def test_what_joins_stays_and_estimates_go():
    kernel, operator, copy = compact_kineto({"traceEvents": [KERNEL, OPERATOR, COPY]})[
        "traceEvents"
    ]
    assert set(KERNEL["args"]) - set(kernel["args"]) == {
        "queued", "context", "blocks per SM", "warps per SM", "est. achieved occupancy %",
    }  # fmt: skip
    assert set(OPERATOR["args"]) - set(operator["args"]) == {"Ev Idx"}
    assert set(COPY["args"]) - set(copy["args"]) == {"memory bandwidth (GB/s)"}
    for key in ("ts", "dur", "cat", "name", "tid", "pid"):
        assert kernel[key] == KERNEL[key]


def test_python_functions_go_but_modules_stay():
    def frame(name):
        return {"ph": "X", "cat": "python_function", "name": name, "ts": 0, "dur": 1, "tid": 1}

    profile = {"traceEvents": [frame("nn.Module: Conv2d_3"), frame("threading.py(1): run")]}
    assert [e["name"] for e in compact_kineto(profile)["traceEvents"]] == ["nn.Module: Conv2d_3"]


def test_arrows_memory_samples_and_the_temporary_path_go_the_rest_stays():
    profile = {
        "schemaVersion": 1, "deviceProperties": [{"id": 0}], "baseTimeNanoseconds": 5,
        "traceName": "/tmp/x/trace.json",
        "traceEvents": [
            {"ph": "s", "cat": "ac2g", "id": 1, "ts": 1}, {"ph": "f", "cat": "fwdbwd", "id": 1, "ts": 2},
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 3},
            {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        ],
    }  # fmt: skip
    kept = compact_kineto(profile)
    assert [e["ph"] for e in kept["traceEvents"]] == ["M"]
    assert kept["baseTimeNanoseconds"] == 5
    assert "traceName" not in kept
    assert "traceName" in profile, "what was given is not changed"


@pytest.mark.parametrize("key", ["traceEvents", "nodes"])
def test_a_packed_file_comes_back(tmp_path, key):
    value = {"schema": "1.1.1", key: [OPERATOR, COPY, "odd", {"args": {}}], "end": None}
    restore_file(pack_json(value), tmp_path / "deep" / "file.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "deep" / "file.json.gz").read_bytes())) == value


def test_a_plain_name_is_restored_plain(tmp_path):
    restore_file(pack_json({"batch": 4}), tmp_path / "environment.json")
    assert read_raw(tmp_path / "environment.json") == {"batch": 4}


def test_columns_make_a_real_profile_less_than_half(raw_transformer):
    profile = read_raw(raw_transformer / "kineto.json.gz")
    plain = pack_json(["not an object", profile["traceEvents"]])
    assert len(pack_raw(profile).packed) < 0.6 * len(plain.packed)


def test_equal_input_gives_equal_bytes(raw_transformer):
    path = raw_transformer / "execution_trace.json.gz"
    assert pack_raw(read_raw(path)) == pack_raw(read_raw(path))


@pytest.mark.parametrize("damage", ["cut", "swap", "size"])
def test_damaged_content_is_refused(damage):
    good = pack_json({"nodes": [{"id": 1}]})
    bad = {
        "cut": Content(good.packed[:-6], good.size_bytes),
        "swap": Content(b"x" * 40, good.size_bytes),
        "size": Content(good.packed, 3),
    }[damage]
    with pytest.raises(InputError, match="damaged content"):
        unpack_content(bad, "item/file")


def test_a_raw_file_cut_short_is_refused(tmp_path):
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b'{"a": 1}')[:-9])
    with pytest.raises(InputError, match=r"cut\.json\.gz: not a complete JSON file"):
        read_raw(tmp_path / "cut.json.gz")
