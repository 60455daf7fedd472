"""A trace folder that contradicts itself is refused with the place; one that was edited says so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import read_json
from trioflow.cli.main import main
from trioflow.trace.store import load_trace, pack_trace, save_trace

SHIPPED = "gpt2-tiny-b8"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_trace(load_trace(SHIPPED), tmp_path / "trace")
    return tmp_path / "trace"


def edit_facts(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        facts = json.loads((folder / "trace.json").read_text())
        change(facts)
        (folder / "trace.json").write_text(json.dumps(facts))

    return edit


def edit_table(name: str, change: Callable[[pd.DataFrame], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        frame = tables.read_table(folder / f"{name}.parquet", name)
        made = change(frame)
        frame = frame if made is None else made
        pq.write_table(tables.to_arrow(frame, name), folder / f"{name}.parquet")

    return edit


def scale(column: str, factor: float) -> Callable[[pd.DataFrame], None]:
    def change(frame: pd.DataFrame) -> None:
        frame[column] = (frame[column] * factor).astype("int64")

    return change


def put(column: str, row: int, value: Any) -> Callable[[pd.DataFrame], None]:
    def change(frame: pd.DataFrame) -> None:
        frame.at[row, column] = value

    return change


CONTRADICTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "times x 1000": (edit_table("operators", scale("device_ns", 1000)), "the operators take 417.* more than the step"),
    "times / 1000": (edit_table("operators", scale("device_ns", 0.001)), "nothing else is in the step"),
    "times all 0": (edit_table("operators", scale("device_ns", 0)), "column device_ns: all are 0"),
    "no such operator": (
        edit_facts(lambda f: f["gradients"][0].update(ready_after_op_id=889)),
        r"gradients\[0\]\.ready_after_op_id: operator 889 does not exist",
    ),
    "before the step": (
        edit_facts(lambda f: f["gradients"][0].update(ready_after_op_id=-1)),
        "operator -1 does not exist",
    ),
    "gradient twice": (
        edit_facts(lambda f: f["gradients"].append(f["gradients"][0])),
        r"gradients\[0\]\.name: 'head.vocabulary",
    ),
    "gradient's size": (
        edit_facts(lambda f: f["gradients"][0].update(size_bytes=4)),
        "4 bytes, its parameter has 8388608",
    ),
    "parameter's shape": (edit_facts(lambda f: f["parameters"][0].update(shape=[1, 1])), "its parameter has 4"),
    "elem_bytes -4": (edit_table("tensors", scale("elem_bytes", -1)), "row 0, column elem_bytes: -8 is negative"),
    "a parameter's elem_bytes -4": (
        edit_facts(lambda f: f["parameters"][0].update(elem_bytes=-4)),
        r"parameters\[0\]\.elem_bytes: .*Expected `int` >= 1",
    ),
    "a buffer's elem_bytes -4": (
        edit_facts(lambda f: f["buffers"].append({"name": "b", "shape": [8], "elem_bytes": -4})),
        r"buffers\[0\]\.elem_bytes: .*Expected `int` >= 1",
    ),
    "a parameter's shape": (
        edit_facts(lambda f: f["parameters"][0].update(shape=[-8192, -256])),
        r"parameters\[0\]\.shape\[0\]: .*Expected `int` >= 0",
    ),
    "elem_bytes 2": (
        edit_table("tensors", put("elem_bytes", 1, 2)),
        "bytes an element of 'float', and 2 in another row",
    ),
    "tensor's shape": (edit_table("tensors", put("shape", 1, [8192, 512])), "not the shapes of these tensors"),
    "no such tensor": (
        edit_table("operators", put("input_ids", 1, [1, 5000])),
        "row 1, column input_ids: a tensor does not exist",
    ),
    "no such producer": (edit_table("tensors", put("producer_op_id", 0, 5000)), "operator 5000 does not exist"),
    "read more than there is": (edit_table("operators", put("read_bytes", 1, 10**9)), "its tensors hold 8396800"),
    "more grows than is": (edit_table("operators", put("batch_flop", 0, 5)), "5 grow with the batch, of 0"),
    "differentiates itself": (
        edit_table("operators", put("forward_op_id", 600, 600)),
        "600 is not an operator before it",
    ),
    "an empty phase": (edit_table("operators", put("phase", 3, "")), "row 3, column phase: the phase is empty"),
    "batch 16": (edit_facts(lambda f: f.update(batch=16)), "not a multiple of the batch, 16"),
    "batch 4": (edit_facts(lambda f: f.update(batch=4)), "no input of the step has 4 samples"),
    "flop": (edit_table("operators", scale("flop", 2)), "facts, flop: 34091302912 is stated"),
    "operators gone": (edit_table("operators", lambda frame: frame.iloc[:888]), "facts, operators: 889 is stated"),
    "a word for a number": (edit_facts(lambda f: f.update(tail_s="1")), "tail_s: '1' is not a possible value"),
    "a number for a word": (edit_facts(lambda f: f.update(precision=16)), "precision: 16 is not a possible value"),
    "no such clock": (edit_facts(lambda f: f.update(step_time_source="sun")), "'sun' is not one of un-profiled"),
    "a list for a mapping": (
        edit_facts(lambda f: f.update(tensor_split=[1])),
        "tensor_split: .* is not a possible value",
    ),
    "a number for the facts": (lambda folder: (folder / "trace.json").write_text("7") and None, "not a JSON object"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_its_place(name: str, folder: Path) -> None:
    spoil, words = CONTRADICTIONS[name]
    spoil(folder)
    with pytest.raises(InputError, match=words) as error:
        load_trace(folder)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_a_key_written_twice_is_refused(folder: Path) -> None:
    text = (folder / "trace.json").read_text()
    (folder / "trace.json").write_text(text.replace('"batch":', '"batch": 8, "batch":', 1))
    with pytest.raises(InputError, match=r"trace\.json: .*the key 'batch' is written twice"):
        load_trace(folder)


def test_what_was_written_is_read_without_a_word(folder: Path) -> None:
    assert load_trace(folder).facts == load_trace(SHIPPED).facts
    again = folder.parent / "again"
    save_trace(load_trace(folder), again)
    assert (again / "trace.json").read_bytes() == (folder / "trace.json").read_bytes()


def test_an_edit_that_holds_is_taken_and_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_table("operators", put("device_ns", 1, 300_000))(folder)
    (warning,) = load_trace(folder).facts.warnings
    assert warning.startswith("operators.parquet was edited after the trace was captured")
    edit_facts(lambda facts: facts.update(seed=7))(folder)
    (warning,) = load_trace(folder).facts.warnings
    assert warning.startswith("trace.json and operators.parquet were edited")
    pack_trace(folder, folder.parent / "pack.zip")
    assert load_trace(folder.parent / "pack.zip").facts.warnings == [warning]
    assert not main(["simulate", str(folder), "--platform", "cpu2-gloo", "--json"])
    assert warning in json.loads(capsys.readouterr().out)["warnings"]
    save_trace(load_trace(folder), folder)  # a new trace, whose facts say what it was made of
    assert load_trace(folder).facts.warnings == [warning]


def test_the_digests_are_of_the_form_in_which_facts_are_read(folder: Path) -> None:
    facts = read_json(folder / "trace.json")
    (folder / "trace.json").write_text(json.dumps(facts))  # another form of the same facts
    assert load_trace(folder).facts.warnings == []
    assert set(facts["digests"]) == {"operators.parquet", "tensors.parquet", "trace.json"}
