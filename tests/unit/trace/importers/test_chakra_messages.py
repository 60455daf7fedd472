"""Chakra's messages on the wire, by the published field numbers; broken files name their place."""

import tracemalloc

import chakra_wire as wire
import pytest
from trioflow.base.errors import TraceError
from trioflow.trace.importers.chakra_nodes import (
    add_attribute,
    new_metadata,
    new_node,
    read_attributes,
    read_messages,
    write_messages,
)

# et_def.proto: field of each kind of value, and the wire type that its type has.
NUMBERS = {
    "double": (3, 1.5),
    "float": (5, 0.25),
    "int32": (7, 7),
    "int64": (9, 1 << 40),
    "uint32": (11, 5),
    "uint64": (13, 1 << 63),
    "sint32": (15, -3),
    "sint64": (17, -(1 << 40)),
    "fixed32": (19, 9),
    "fixed64": (21, 11),
    "sfixed32": (23, 4),
    "sfixed64": (25, 6),
    "bool": (27, True),
    "string": (29, "text"),
    "bytes": (31, b"raw"),
}


def example():
    node = new_node(300, "aten::mm", "COMP_NODE")
    node.ctrl_deps.append(1)
    node.data_deps.extend([1, 299])
    node.start_time_micros, node.duration_micros = 12, 345
    node.inputs.values, node.inputs.shapes, node.inputs.types = "[1]", "[[2]]", "['Tensor(float)']"
    node.outputs.values = "[2]"
    add_attribute(node, "is_cpu_op", "bool_val", False)
    add_attribute(node, "num_ops", "int64_val", 1 << 40)
    add_attribute(node, "involved_dim", "bool_list", [True, False])
    return node


def test_a_node_has_the_published_field_numbers(tmp_path):
    path = tmp_path / "x.et"
    write_messages(path, [new_metadata(), example()])
    metadata, (node,) = wire.read(path)
    assert metadata == {"version": "0.0.4"}
    assert (node["id"], node["name"], node["type"]) == (300, "aten::mm", 4)
    assert (node["ctrl_deps"], node["data_deps"]) == ([1], [1, 299])
    assert (node["start"], node["duration"]) == (12, 345)
    assert node["inputs"] == {"values": "[1]", "shapes": "[[2]]", "types": "['Tensor(float)']"}
    assert node["outputs"] == {"values": "[2]"}
    assert node["attr"] == {"is_cpu_op": False, "num_ops": 1 << 40, "involved_dim": [True, False]}
    # A consumer asks which field of the oneof is set: false and 0 must be on the wire too.
    assert node["kinds"]["is_cpu_op"] == "bool_val"


@pytest.mark.parametrize("kind", NUMBERS)
def test_every_kind_of_value_has_its_field_for_one_and_for_a_list(kind, tmp_path):
    number, value = NUMBERS[kind]
    node = new_node(0, "", "COMP_NODE")
    add_attribute(node, "one", f"{kind}_val", value)
    add_attribute(node, "many", f"{kind}_list", [value, value])
    add_attribute(node, "none", f"{kind}_list", [])
    write_messages(tmp_path / "x.et", [new_metadata(), node])
    _, raw = wire.messages(tmp_path / "x.et")
    attributes = [dict(wire.fields(v)) for n, v in wire.fields(raw) if n == 10]
    assert [set(a) - {1} for a in attributes] == [{number}, {number + 1}, {number + 1}]
    assert {n for n, _ in wire.fields(attributes[1][number + 1])} == {1}
    (_, back) = [m for _, m in read_messages(tmp_path / "x.et")]
    assert read_attributes(back) == {"one": value, "many": [value, value], "none": []}


def test_a_file_written_by_hand_is_read(tmp_path):
    attribute = b"\x0a\x09comm_size\x48\x80\x08"  # name=1, int64_val=9: 1024
    node = b"\x08\x05\x12\x01n\x18\x07\x22\x01\x03\x52" + bytes([len(attribute)]) + attribute
    data = b"\x07\x0a\x050.0.4" + bytes([len(node)]) + node
    (tmp_path / "x.et").write_bytes(data)
    (_, head), (place, read) = read_messages(tmp_path / "x.et")
    assert head.version == "0.0.4" and place == "message 1, byte 8"
    assert (read.id, read.name, read.type, list(read.ctrl_deps)) == (5, "n", 7, [3])
    assert read_attributes(read) == {"comm_size": 1024}


def test_an_empty_message_is_not_the_end(tmp_path):
    (tmp_path / "x.et").write_bytes(b"\x00\x00\x02\x18\x04")
    assert [m.ByteSize() for _, m in read_messages(tmp_path / "x.et")] == [0, 0, 2]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\x05ab", "message 0, byte 0: this is not a GlobalMetadata message"),
        (b"\x00\xff", "message 1, byte 1: this is not a Node message"),
        (b"\xff" * 20, "message 0, byte 0: this is not"),
        (b'{"nodes": [' + b" " * 200, "this is not a GlobalMetadata message"),
        (
            b"\x00\x03\x98\x06\x01",
            "message 1, byte 1: this is not a Node message: it has fields that schema 0.0.4",
        ),
        (b"\x00\x03\x12\x01\xff", "message 1, byte 1: this is not a Node message"),
    ],
)
def test_what_is_no_chakra_file_is_refused_with_its_place(data, words, tmp_path):
    (tmp_path / "x.et").write_bytes(data)
    with pytest.raises(TraceError) as error:
        list(read_messages(tmp_path / "x.et"))
    assert words in str(error.value) and "x.et" in str(error.value)
    assert error.value.fix


def test_a_length_beyond_any_node_is_refused_before_it_fills_the_memory(tmp_path):
    path = tmp_path / "x.et"
    with path.open("wb") as stream:
        stream.write(b"\x00\x80\x80\x80\x80\x01")  # 256 MiB follow, all holes
        stream.truncate((1 << 28) + 100)
    tracemalloc.start()
    with pytest.raises(TraceError, match="is not a Chakra node"):
        list(read_messages(path))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path, words in ((tmp_path / "none.et", "no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(TraceError, match=words):
            list(read_messages(path))


def test_reading_holds_one_message_at_a_time(tmp_path):
    path = tmp_path / "x.et"
    large = new_node(1, "x" * 100_000, "COMP_NODE")
    write_messages(path, [new_metadata(), *[large] * 100])
    tracemalloc.start()
    count = sum(1 for _ in read_messages(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 101 and peak < 1_000_000 < path.stat().st_size / 5
