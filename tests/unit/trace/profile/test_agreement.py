"""What two accounts of the same step do not agree on is said, with the number of cases."""

import copy
import json

import pytest
from small_step import small_step
from trioflow.trace.importers.detect import import_trace
from trioflow.trace.importers.options import ImportOptions

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
    "1 kernels start while another one of their stream runs (first: kernel_5)": change(
        "kernel_4", dur=48
    ),
    "1 operators count as forward although backward began before them (first: aten::mm)": lose_annotation,
    "1 calls are named after autograd's nodes and run outside its backward pass"
    " (first: ReluBackward0)": drop("autograd::engine::evaluate_function: ReluBackward0"),
    "1 operators are annotations in the profile (first: aten::relu)": change(
        "aten::relu", cat="user_annotation"
    ),
    "operators run while another one does, on a thread of their own (first: aten::mm)": change(
        "aten::mm", tid=2
    ),
    "1 calls of the profile are not in the execution trace (first: aten::t)": lambda p, g: g.remove(
        find(g, "aten::t")
    ),
    "1 operators of the execution trace are not in the profile (first: aten::t)": drop("aten::t"),
    "1 calls have other shapes in the profile than in the execution trace (first: aten::relu)": change(
        "aten::relu", args={"Input Dims": [[8, 5]]}
    ),
    "1 calls have another caller in the profile than in the execution trace (first: aten::t)": lambda p, g: (
        find(g, "aten::t").update(ctrl_deps=10)
    ),
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
