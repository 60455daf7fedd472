"""Facts of a trace: what is read is written back, and what nobody said is not."""

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from few_facts import few_facts
from trioflow.base.errors import TraceError
from trioflow.trace.facts import DIGESTS, Facts
from trioflow.trace.store import SHIPPED, load_trace, save_trace, shipped_traces

LEAST = {"workload": "w", "batch": 2, "device_name": "d", "step_time_s": 0.5}


def test_what_is_read_is_written_back():
    """Absent facts stay absent, empty ones empty, and unknown ones as they are."""
    content = {**LEAST, "unjoined": [], "core": 3, "row": {"layers": "2"}, "warnings": []}
    facts = Facts.read(content)
    assert facts.to_dict() == content | {"gradients": []}
    assert facts.unjoined == [] and facts.buffers is None and facts.other == {"core": 3}
    assert Facts.read(facts.to_dict()) == facts


@pytest.mark.parametrize("name", ["gpt2-tiny-b8", "resnet50-b128"])
def test_a_shipped_trace_is_written_as_it_lies_there(name, tmp_path):
    save_trace(load_trace(name), tmp_path)
    mine, theirs = (json.loads((folder / "trace.json").read_text()) for folder in (tmp_path, SHIPPED / name))
    # The tables' digests depend on the version of the library that wrote them.
    digests = [facts.pop(DIGESTS) for facts in (mine, theirs)]
    assert mine == theirs
    assert digests[0]["trace.json"] == digests[1]["trace.json"]


@pytest.mark.parametrize("name", shipped_traces())
def test_a_shipped_trace_carries_digests_so_that_an_edited_copy_is_named(name, tmp_path):
    assert not [w for w in load_trace(name).facts.warnings if "edited" in w]
    copy = Path(shutil.copytree(SHIPPED / name, tmp_path / name))
    facts = json.loads((copy / "trace.json").read_text())
    (copy / "trace.json").write_text(json.dumps(facts | {"seed": 12345}))
    assert any("trace.json was edited" in w for w in load_trace(copy).facts.warnings)


def test_null_is_as_good_as_absent():
    assert Facts.read({**LEAST, "optimizer": None}).to_dict() == Facts.read(LEAST).to_dict()


def test_facts_are_not_written_into():
    facts = few_facts(warnings=("first",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        facts.batch = 3
    changed = replace(facts, warnings=facts.warn("second"))
    assert changed.to_dict()["warnings"] == ["first", "second"]
    assert facts.to_dict()["warnings"] == ["first"]


def test_what_every_stage_needs_is_missed_at_once():
    for name in LEAST:
        with pytest.raises(TraceError, match=f"the fact '{name}' is missing"):
            Facts.read({key: value for key, value in LEAST.items() if key != name})
