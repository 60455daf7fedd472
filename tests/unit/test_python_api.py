"""The public API, as a script outside the repository uses it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import trioflow
from trioflow.base.provenance import PACKAGE
from trioflow.cli.main import main
from trioflow.hardware.platform import list_platforms

ROOT = PACKAGE.parents[1]
PAGES = ("README.md", "docs/python.md")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(code: str, folder: Path) -> str:
    """Run code in an empty folder that knows the library by its path alone."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_of_each_page_runs_outside_the_repository(tmp_path):
    pages = ["".join(PYTHON.findall((ROOT / page).read_text())) for page in PAGES]
    assert all(pages)
    # Each in a namespace of its own, in one process: what it imports takes longer than what it says.
    told = run(f"for page in {pages!r}:\n    print(exec(page, {{}}), 'at its end')", tmp_path)
    for said in told.split("None at its end\n")[:-1]:
        assert "Prediction of gpt2-tiny on cpu2-gloo: DP2, mbs 16" in said
    assert told.count("None at its end") == len(PAGES)
    assert not list(tmp_path.iterdir())


def test_every_public_name_is_there_and_none_is_loaded_before_it_is_used(tmp_path):
    code = (
        "import json, sys, trioflow\n"
        "loaded = [name for name in sys.modules if name.startswith('trioflow.')]\n"
        "import trioflow.cli\n"
        "found = {name: callable(getattr(trioflow, name)) for name in trioflow.__all__}\n"
        "print(json.dumps([loaded, found, set(trioflow.__all__) <= set(dir(trioflow))]))"
    )
    loaded, found, listed = json.loads(run(code, tmp_path))
    assert loaded == [] and all(found.values()) and listed
    assert (PACKAGE / "py.typed").is_file()


def test_type_checkers_see_every_public_name_where_it_is_defined():
    typed = {}
    for node in ast.walk(ast.parse((PACKAGE / "__init__.pyi").read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                typed |= {alias.name: line.module for alias in line.names}
    assert sorted(typed) == trioflow.__all__, "a name without an import there is Any to a checker"
    for name, module in typed.items():
        assert getattr(trioflow, name) is getattr(import_module(module), name)
    assert inspect.signature(trioflow.predict).return_annotation is trioflow.Prediction


def test_a_name_that_is_not_public_is_refused_as_python_does_it():
    with pytest.raises(AttributeError, match="has no attribute 'load'"):
        trioflow.load("gpt2-tiny-b8")


def test_traces_plans_and_platforms_are_short_to_read():
    trace = repr(trioflow.load_trace("gpt2-tiny-b8"))
    assert trace.startswith("<Trace gpt2-tiny, batch 8, on ") and "operators, step" in trace
    machine = trioflow.load_named_platform("a100x4-nvlink", 4)
    assert repr(machine).startswith("<Platform a100x4-nvlink: 4 x ")
    assert repr(trioflow.named_plan("ddp", 8)) == "<Plan ddp: 8 ranks, data=8>"
    shown = repr(trioflow.make_plan(data=2, pipeline=2, schedule="1f1b", micro_batches=4))
    assert shown.endswith(": 4 ranks, data=2, pipeline=2, schedule='1f1b', micro_batches=4>")


def test_names_degrees_and_ranks_make_the_plan_that_objects_do():
    made = {
        "named": ({"plan": "fsdp", "ranks": 8}, {"data": 8, "sharding": "fsdp"}),
        "named and cut": ({"plan": "fsdp", "ranks": 8, "tensor": 2}, {"data": 4, "tensor": 2, "sharding": "fsdp"}),
        "a schedule and what is left": ({"plan": "1f1b", "ranks": 8, "tensor": 2}, {"tensor": 2, "pipeline": 4}),
        "degrees": ({"data": 2, "tensor": 4, "recompute": "full"}, {"data": 2, "tensor": 4, "recompute": "full"}),
        "data is what is left": ({"ranks": 8, "tensor": 4}, {"data": 2, "tensor": 4}),
        "nothing": ({}, {}),
        "an object, changed": ({"plan": trioflow.make_plan(8), "recompute": "full"}, {"data": 8, "recompute": "full"}),
    }
    for name, (asked, columns) in made.items():
        plan = trioflow.predict("gpt2-tiny-b8", platform="dgx-h100", interval=False, **asked).task_graph.metadata.plan
        usual = {"data": 1, "tensor": 1, "pipeline": 1, "sharding": "none", "recompute": "none"}
        assert {key: getattr(plan, key) for key in usual} == usual | columns, name
    for asked, problem in (
        ({"ranks": 8}, "choose how to parallelise"),
        ({"ranks": 8, "tensor": 3}, "TP3 does not divide 8 GPUs"),
        ({"plan": "ddp", "ranks": 8, "data": 2}, "DP2 = 2 GPUs, not 8"),
        ({"tensr": 3}, r"unknown option 'tensr'; did you mean tensor\?$"),
    ):
        with pytest.raises(trioflow.TrioflowError, match=problem):
            trioflow.predict("gpt2-tiny-b8", platform="dgx-h100", **asked)


def test_checkers_editors_and_notebooks_know_every_keyword(tmp_path):
    shown = inspect.signature(trioflow.predict).parameters
    assert {"tensor", "sharding", "precision", "operator_scales", "ranks", "batch"} <= shown.keys()
    assert not any(one.kind is one.VAR_KEYWORD for one in shown.values())
    file = tmp_path / "asks.py"
    file.write_text(
        "import trioflow\n"
        "a = trioflow.predict('m', 'fsdp', 'p', ranks=8, tensor=2, precision='fp32').step_time_s\n"
        "b = trioflow.predict('m', 'fsdp', 'p', tensor='2')\n"
        "c = trioflow.search('m', 8, 'p', sequenc=3)\n"
    )
    words = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(file)]
    environment = {**os.environ, "MYPYPATH": str(PACKAGE.parent)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True).stdout
    found = {line.split(":")[1] for line in done.splitlines() if ": error:" in line}
    assert found == {"3", "4"}, done


def test_what_python_returns_and_takes_can_be_pickled_and_tabulated():
    machine = trioflow.load_named_platform("a100x4-nvlink", 4)
    ranking = trioflow.search("gpt2-tiny-b8", 4, machine, top=2)
    best = trioflow.predict("gpt2-tiny-b8", ranking.plans[0], machine, draws=3)
    assert best.step_time_s == ranking.best["step_time_s"] == ranking["ranking"][0]["step_time_s"]
    alone = trioflow.predict("gpt2-tiny-b8", platform=machine, data=1, fold=False)
    parts = (ranking.plans[0], trioflow.load_trace("gpt2-tiny-b8"), best.step.options)
    for one in (ranking, best, alone, machine, *parts):
        again = pickle.loads(pickle.dumps(one))
        assert repr(again) == repr(one)
        if hasattr(one, "to_dict"):
            assert again.to_dict() == one.to_dict()
    assert list(ranking.to_frame()["step_time_s"]) == [row["step_time_s"] for row in ranking.to_dict()["ranking"]]
    assert best.to_frame()["step_time_s"].item() == best.step_time_s
    assert "the best first" in repr(ranking) and "<table" in ranking._repr_html_()
    with pytest.raises(trioflow.TrioflowError, match="has 4 ranks, not 8"):
        trioflow.search("gpt2-tiny-b8", 8, machine)


def test_models_and_platforms_are_listed_with_sizes_sources_and_what_is_measured(capsys):
    models, machines = trioflow.models(), trioflow.platforms()
    by_name = models.set_index(["name", "use"])
    llama = by_name.loc["llama-3.1-8b", "by name"]
    assert (llama["parameters"], llama["layers"], llama["kv_heads"]) == (8030261248, 32, 8) and llama["source"]
    assert "on AMD EPYC" in by_name.loc["gpt2-tiny-b8", "trace"]["measured"]
    assert "resnet50" in set(models["name"][models["use"] == "capture"])
    assert sorted(machines["name"]) == list_platforms()
    dgx = machines.set_index("name").loc["dgx-h100"]
    assert (dgx["ranks_per_node"], dgx["operators"]) == (8, "measured") and "NVLink" in str(dgx["sources"])
    assert dgx["collectives"] == "measured in a node, data sheet between nodes" and dgx["ranks"] is pd.NA
    for command, frame in (("models", models), ("platforms", machines)):
        assert main([command, "--json"]) == 0
        assert [row["name"] for row in json.loads(capsys.readouterr().out)[command]] == list(frame["name"])
        assert main([command]) == 0
        assert frame["name"].iloc[0] in capsys.readouterr().out
    assert main(["platforms", "dgx-h100"]) == 0
    assert "sheet (2023)" in capsys.readouterr().out
    assert main(["models", "lama-3.1-8b"]) == 2
    assert "did you mean llama-3.1-8b" in capsys.readouterr().err


def rebuild(trace):
    """Make the tables anew from records: whole numbers that lack some become floats."""
    trace.operators, trace.tensors = (
        pd.DataFrame(table.astype(object).where(table.notna(), None).to_dict("records"))
        for table in (trace.operators, trace.tensors)
    )


def add_columns(trace):
    trace.operators["when"] = pd.Timestamp("2026-01-01")
    trace.operators["mine"] = "a note"


@pytest.mark.parametrize("edit", [rebuild, add_columns])
@pytest.mark.parametrize("degrees", [{}, {"data": 2, "tensor": 2, "pipeline": 2, "micro_batches": 2}])
def test_a_trace_that_was_edited_in_pandas_answers_as_before(edit, degrees):
    trace, edited = (trioflow.load_trace("gpt2-tiny-b8") for _ in range(2))
    edit(edited)
    before_s, after_s = (trioflow.predict(one, platform="dgx-a100", **degrees).step_time_s for one in (trace, edited))
    assert after_s == before_s


def test_a_word_where_a_number_is_due_is_named_with_its_place():
    trace = trioflow.load_trace("gpt2-tiny-b8")
    trace.operators["flop"] = "many"
    with pytest.raises(trioflow.TrioflowError, match="row 0, column flop: many is negative or not a number"):
        trioflow.predict(trace, platform="dgx-a100")
