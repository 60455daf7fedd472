"""The library's packages import only leftwards, and torch stays where it belongs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from trioflow.base import provenance
from trioflow.base.imports import LIBRARIES, imported_names, required_modules
from trioflow.base.provenance import PACKAGE, digest_modules, find_home
from trioflow.cli.main import COMMANDS

ORDER = (
    ("base",),
    ("tables",),
    ("hardware",),
    ("datasets",),
    ("trace",),
    ("costmodel",),
    ("parallel",),
    ("network",),
    ("engine",),
    ("prediction",),
    ("export",),
    ("measure",),
    ("campaign",),
    ("report",),
    ("sweeps",),
    ("cli", "__main__"),
    ("trioflow_evaluation",),
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
TORCH_AT_IMPORT = {
    "trace/capture/meta",
    "trace/capture/rank_program",
    "trace/capture/rank_process",
    "trace/capture/training_step",
    "trace/capture/workload",
    "trace/language/decoder",
    "trace/workloads/build",
    "trace/workloads/precision",
    "trace/workloads/recipe",
    "trace/workloads/torchvision_models",
    "trace/workloads/user_model",
}
SOURCES = sorted(path for name in LIBRARIES for path in (PACKAGE.parent / name).rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def short_name(path: Path) -> str:
    library, _, name = path.relative_to(PACKAGE.parent).with_suffix("").as_posix().partition("/")
    return LIBRARIES[library] + name


def room(path: Path) -> str:
    """The package or top module that a file belongs to; all of the evaluation is one."""
    return short_name(path).partition("/")[0]


def imports_at_import_time(path: Path) -> set[str]:
    """Top names imported outside functions and outside ``if TYPE_CHECKING``."""
    names: set[str] = set()
    todo: list[ast.AST] = [parse(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
        todo.extend(ast.iter_child_nodes(node))
    return names


def test_imports_go_leftwards_only() -> None:
    for path in SOURCES:
        here = room(path)
        if here == "__init__":
            wanted: set[str] = set()
        else:
            assert here in LEVEL, f"{here} has no place in the order of packages"
            wanted = {other for other, level in LEVEL.items() if level <= LEVEL[here]}
        # The library's door shows type checkers every room, and opens none by itself.
        typed = set() if here == "__init__" else parsed_names(parse(path), types_only=True)
        for name in imported_names(path) | typed:
            there = name.removeprefix("trioflow.").partition(".")[0]
            if there in LEVEL:
                assert there in wanted, f"{short_name(path)} imports {name}, to its right"


ASSEMBLY = {"trioflow.parallel.extrapolate.extrapolate", "trioflow.costmodel.choices.choose_times"}
"""What a plan's step is put together from: `prediction.assembly` alone calls it, everybody else `prediction`."""


def test_a_step_is_put_together_in_one_place() -> None:
    assembling = {short_name(path) for path in SOURCES if imported_names(path) & ASSEMBLY}
    assert assembling == {"prediction/assembly"}


def test_rules_that_predict_need_neither_pages_nor_the_command() -> None:
    """An edit of a page's words runs no simulation again."""
    scripts = PACKAGE.parents[1] / "scripts"
    for name in ("extrapolate", "simulate", "simulate_sweep"):
        rooms = {module.partition("/")[0] for module in required_modules(scripts / f"{name}.py")}
        assert not rooms & {"report", "cli", "trioflow_evaluation"}, name


def test_torch_is_imported_by_capture_and_measure_only() -> None:
    for path in SOURCES:
        everywhere = {name.partition(".")[0] for name in imported_names(path)}
        if everywhere & {"torch", "torchvision"}:
            name = short_name(path)
            assert name in TORCH_AT_IMPORT or room(path) in ("measure", "campaign", "cli"), name
            if room(path) == "cli":
                assert "torch" not in imports_at_import_time(path), name


def test_an_answer_imports_nothing_that_it_does_not_need() -> None:
    words = ["simulate", "gpt2-tiny-b8", "--plan", "ddp", "--ranks", "2", "--platform", "cpu2-gloo"]
    code = (
        f"import json, sys, trioflow.cli; assert trioflow.cli.main({words}) == 0; "
        "print(); print(json.dumps(list(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout.splitlines()[-1]))
    assert "trioflow.prediction.assembly" in loaded
    libraries = {
        "torch",
        "torchvision",
        "seaborn",
        "matplotlib",
        "scipy",
        "numba",
        "networkx",
        "jsonschema",
    }
    assert not {name.partition(".")[0] for name in loaded} & libraries
    other = {
        place.rpartition(".")[0] for name, (_, place) in COMMANDS.items() if name != "simulate"
    }
    other -= {"trioflow.cli.answer"}  # simulate describes a model as show does
    assert not loaded & other, "other subcommands"


def test_only_scripts_that_run_models_need_torch() -> None:
    scripts = sorted((PACKAGE.parents[1] / "scripts").rglob("*.py"))
    assert scripts
    with_torch = {path for path in SOURCES if "torch" in imports_at_import_time(path)}
    for script in scripts:
        files = [find_home(module) / f"{module}.py" for module in required_modules(script)]
        needs = any(file in with_torch for file in files)
        assert needs <= (
            script.stem
            in (
                "capture",
                "measure",
                "judge_clusters",
                "judge_cluster_steps",
                "judge_cluster_peaks",
                "judge_bridge",
            )
        ), script.name


def test_required_modules_follow_imports_through_packages_and_functions(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def f():\n    from trioflow.parallel import task_graph\nimport os\n")
    found = required_modules(script)
    assert {"__init__", "parallel/__init__", "parallel/task_graph"} <= set(found)
    assert {"tables/files", "base/errors", "base/provenance"} <= set(found), (
        "imports of imports count"
    )
    assert "base/job_log" not in found and "base/imports" not in found
    assert digest_modules(*found) == digest_modules(*reversed(found))


def test_data_of_a_module_lies_at_its_own_place_and_counts_into_its_digest() -> None:
    known = provenance._data_of_modules()
    assert all(owner.is_file() and files for owner, files in known.items()), sorted(known)
    names = {short_name(owner): {path.name for path in files} for owner, files in known.items()}
    assert names["tables/schemas"] == {"schemas.tsv"}
    assert names["report/pages"] == {"pages.css", "pages.js", "site.tsv", "files.tsv"}
    assert "attribution.rst" in names["report/sections"], "a folder"
    assert names["trioflow_evaluation/tables"] == {"tables.tsv"}, "of the package beside it"


def test_modules_that_run_as_processes_of_their_own_are_required_too() -> None:
    found = required_modules(PACKAGE.parents[1] / "scripts/measure.py")
    assert {"measure/worker", "trace/workloads/build"} <= set(found)


def test_a_script_that_needs_nothing_of_the_library_requires_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nfrom pathlib import Path\nimport trioflowers\n")
    assert required_modules(script) == []


def test_imports_are_absolute() -> None:
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            assert not (isinstance(node, ast.ImportFrom) and node.level), short_name(path)


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def parsed_names(tree: ast.AST, *, types_only: bool = False) -> set[str]:
    """What a file imports when it runs, or for its types only, as Python's own parser reads it."""
    names: set[str] = set()
    typed = {part for node in ast.walk(tree) if is_for_types_only(node) for part in ast.walk(node)}
    for node in typed if types_only else set(ast.walk(tree)) - typed:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(
            r"trioflow(_evaluation)?(\.\w+)+", str(node.value)
        ):
            names.add(str(node.value))
    return names


def test_imports_read_line_by_line_are_those_that_the_parser_finds() -> None:
    scripts = sorted((PACKAGE.parents[1] / "scripts").rglob("*.py"))
    for path in (*SOURCES, *scripts):
        assert imported_names(path) == parsed_names(parse(path)), path.name


def test_imported_names_hold_the_module_and_what_is_taken_from_it() -> None:
    names = imported_names(PACKAGE / "parallel" / "task_graph.py")
    assert {
        "trioflow",
        "trioflow.tables",
        "trioflow.base.errors",
        "trioflow.base.errors.TableError",
    } <= names


MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): short_name(path)
    for path in SOURCES
    if path.name != "__init__.py"
}


def modules_imported(path: Path) -> set[str]:
    """The library's modules that a file imports anywhere, functions included, types alone not."""
    return {
        known
        for name in imported_names(path)
        if (known := MODULES.get(name) or MODULES.get(name.rpartition(".")[0]))
    } - {short_name(path)}


def test_no_circle_of_imports() -> None:
    """What two modules need of one another belongs into one of them, or into a third."""
    needs = {short_name(path): modules_imported(path) for path in SOURCES}
    while free := [name for name, others in needs.items() if not others & set(needs)]:
        for name in free:
            del needs[name]
    assert not needs, f"a circle among {', '.join(sorted(needs))}"
