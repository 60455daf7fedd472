"""The library's packages import only leftwards, and torch stays where it belongs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from trioflow.base import provenance
from trioflow.base.provenance import EVALUATION, PACKAGE, list_modules, list_packages
from trioflow.base.yaml_files import read_yaml
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
    ("sharded",),
    ("formats",),
    ("export",),
    ("measure",),
    ("campaign",),
    ("report",),
    ("sweeps",),
    ("ui",),
    ("cli", "__main__"),
    ("trioflow_evaluation",),
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
TORCH_AT_IMPORT = {
    "trace/capture/meta",
    "trace/capture/rank_program",
    "trace/capture/workload",
    "trace/language/decoder",
    "trace/workloads/build",
    "trace/workloads/configured",
    "trace/workloads/recipe",
}
LIBRARIES = {PACKAGE.name: "", EVALUATION: f"{EVALUATION}/"}
"""Packages that are followed, and what short names of their modules begin with."""
SCRIPTS = PACKAGE.parents[1] / "scripts"
DECLARED = read_yaml(PACKAGE.parents[1] / "rules/packages.yaml")
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


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def imported_names(path: Path, *, types_only: bool = False) -> frozenset[str]:
    """What a file imports when it runs, functions included, or for its types only: modules, and what is taken from them.

    A string that is a module's name counts too (``python -m trioflow.measure.worker``); what is put together at run
    time (entry points, ``importlib``) is not seen.
    """
    tree, names = parse(path), set[str]()
    typed = {part for node in ast.walk(tree) if is_for_types_only(node) for part in ast.walk(node)}
    for node in typed if types_only else set(ast.walk(tree)) - typed:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"trioflow(_evaluation)?(\.\w+)+", str(node.value)):
            names.add(str(node.value))
    return frozenset(names)


@cache
def files_imported(path: Path) -> frozenset[Path]:
    """The library's files that a file's imports run, packages on the way among them."""
    named = (name.split(".") for name in imported_names(path))
    places = {
        PACKAGE.parent.joinpath(*parts[: count + 1])
        for parts in named
        if parts[0] in LIBRARIES
        for count in range(len(parts))
    }
    files = {file for place in places for file in (place / "__init__.py", place.with_suffix(".py"))}
    return frozenset(files & set(SOURCES))


def required_files(script: Path) -> set[Path]:
    """The library's files that a script imports, itself or through others."""
    found, todo = set[Path](), set(files_imported(script))
    while todo:
        found |= todo
        todo = {needed for file in todo for needed in files_imported(file)} - found
    return found


def test_imports_go_leftwards_only() -> None:
    for path in SOURCES:
        here = room(path)
        if here == "__init__":
            wanted: set[str] = set()
        else:
            assert here in LEVEL, f"{here} has no place in the order of packages"
            wanted = {other for other, level in LEVEL.items() if level <= LEVEL[here]}
        # The library's door shows type checkers every room, and opens none by itself.
        typed = set() if here == "__init__" else imported_names(path, types_only=True)
        for name in imported_names(path) | typed:
            there = name.removeprefix("trioflow.").partition(".")[0]
            if there in LEVEL:
                assert there in wanted, f"{short_name(path)} imports {name}, to its right"


ASSEMBLY = {"trioflow.parallel.extrapolate.extrapolate", "trioflow.costmodel.choices.choose_times"}
"""What a plan's step is put together from: `prediction.assembly` calls it, the extrapolation's own stage, nobody else."""


def test_a_step_is_put_together_in_one_place() -> None:
    assembling = {short_name(path) for path in SOURCES if imported_names(path) & ASSEMBLY}
    assert assembling == {"prediction/question", "prediction/assembly", "parallel/extrapolate"}


@pytest.mark.parametrize("rule", [name for name in DECLARED if not name.isupper()])
def test_a_rule_declares_the_packages_that_its_script_imports_and_no_others(rule: str) -> None:
    """Their digest is what an edit of runs the rule again."""
    needed = {
        file
        for file in required_files(SCRIPTS / f"{rule}.py")
        if file.name != "__init__.py" or len(parse(file).body) > 1
    }
    declared = {name: set(list_modules(name)) for name in list_packages(rule, DECLARED)}
    missing = needed - set[Path]().union(*declared.values())
    assert not missing, [short_name(file) for file in missing]
    assert not [name for name, files in declared.items() if not files & needed], "no longer needed"


@pytest.mark.parametrize(
    ("rule", "others"),
    [
        ("extrapolate", {"network", "engine", "prediction"}),
        ("simulate", {"report", "sweeps", "cli"}),
        ("calibrate", {"costmodel", "parallel"}),
        ("capture", {"costmodel", "measure"}),
    ],
)
def test_an_edit_of_a_later_stage_voids_no_earlier_one(rule: str, others: set[str]) -> None:
    rooms = {name.partition("/")[0] for name in list_packages(rule, DECLARED)}
    assert not rooms & {*others, "trioflow_evaluation"}


def test_torch_is_imported_by_capture_and_measure_only() -> None:
    for path in SOURCES:
        everywhere = {name.partition(".")[0] for name in imported_names(path)}
        if everywhere & {"torch", "torchvision"}:
            name = short_name(path)
            assert name in TORCH_AT_IMPORT or room(path) in ("measure", "campaign", "cli"), name
            if room(path) == "cli":
                assert "torch" not in imports_at_import_time(path), name


@pytest.mark.parametrize(
    "words",
    [
        "simulate gpt2-tiny-b8 --plan ddp --ranks 2 --platform cpu2-gloo",
        "show gpt2-tiny-b8",
        "collective all_reduce --bytes 64e6 --ranks 8 --platform dgx-h100",
    ],
)
def test_an_answer_imports_nothing_that_it_does_not_need(words: str) -> None:
    code = (
        f"import json, sys, trioflow.cli; assert trioflow.cli.main({words.split()}) == 0; "
        "print(); print(json.dumps(list(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(run.stdout.splitlines()[-1]))
    libraries = {
        "pandas",
        "torch",
        "torchvision",
        "sklearn",
        "seaborn",
        "matplotlib",
        "scipy",
        "numba",
        "networkx",
        "jsonschema",
    }
    assert not {name.partition(".")[0] for name in loaded} & libraries
    other = {place.rpartition(".")[0] for name, (_, place) in COMMANDS.items()}
    home = COMMANDS[words.split()[0]][1].rpartition(".")[0]
    other -= {home, "trioflow.cli.answer"}  # of memory and show too
    assert not loaded & other, "other subcommands"
    unused = r"trioflow\.(costmodel\.fits|export|formats|report|sharded|trace\.(block|repeat|language\.make))\b|importlib\.metadata|pyarrow\.dataset"
    assert not [name for name in loaded if re.match(unused, name)]


def test_only_scripts_that_run_models_need_torch() -> None:
    with_torch = {path for path in SOURCES if "torch" in imports_at_import_time(path)}
    for script in SCRIPTS.rglob("*.py"):
        needs = not with_torch.isdisjoint(required_files(script))
        assert needs <= (
            script.stem
            in (
                *("capture", "calibrate", "sweep_operation"),
                *("judge_clusters", "judge_cluster_steps", "judge_cluster_peaks", "judge_bridge"),
            )
        ), script.name


def test_data_of_a_module_lies_at_its_own_place_and_counts_into_its_digest() -> None:
    known = provenance._data_of_modules()
    assert all(owner.is_file() and files for owner, files in known.items()), sorted(known)
    names = {short_name(owner): {path.name for path in files} for owner, files in known.items()}
    assert names["tables/schemas"] == {"schemas.tsv"}
    assert names["report/pages"] == {"pages.css", "pages.js", "site.tsv", "files.tsv"}
    assert "attribution.rst" in names["report/sections"], "a folder"
    assert names["trioflow_evaluation/tables"] == {"tables.tsv"}, "of the package beside it"


def test_what_is_registered_is_there_and_lies_at_the_edge() -> None:
    """What is found by its name is imported by nobody to its left."""
    for row in provenance.read_own_table("base/plugins"):
        module, _, name = row["value"].partition(":")
        assert hasattr(importlib.import_module(module), name), row
        assert LEVEL[module.split(".")[1]] > LEVEL["prediction"], row


def test_imports_are_absolute() -> None:
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            assert not (isinstance(node, ast.ImportFrom) and node.level), short_name(path)


MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): short_name(path)
    for path in SOURCES
    if path.name != "__init__.py"
}


def modules_imported(path: Path) -> set[str]:
    """The library's modules that a file imports anywhere, functions included, types alone not."""
    return {
        known for name in imported_names(path) if (known := MODULES.get(name) or MODULES.get(name.rpartition(".")[0]))
    } - {short_name(path)}


def test_no_circle_of_imports() -> None:
    """What two modules need of one another belongs into one of them, or into a third."""
    needs = {short_name(path): modules_imported(path) for path in SOURCES}
    while free := [name for name, others in needs.items() if not others & set(needs)]:
        for name in free:
            del needs[name]
    assert not needs, f"a circle among {', '.join(sorted(needs))}"


def test_what_scripts_outside_the_library_import_is_there() -> None:
    """Some of them (publish, release) run only by hand, where a name that has moved would be found last."""
    root = PACKAGE.parents[1]
    files = [path for folder in ("docs", "scripts", "bench") for path in (root / folder).rglob("*.py")]
    wanted = {
        (path.name, node.module, alias.name)
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in LIBRARIES
        for alias in node.names
    }
    assert len(wanted) > 100
    missing = {
        one
        for one in wanted
        if not hasattr(importlib.import_module(one[1]), one[2]) and not importlib.util.find_spec(f"{one[1]}.{one[2]}")
    }
    assert not missing


def test_a_prediction_imports_no_fit() -> None:
    files = required_files(PACKAGE / "prediction/assembly.py")
    assert not [name for file in files if "/fits/" in (name := short_name(file))]
