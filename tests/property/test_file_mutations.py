"""Damaged trace folders, packs, platforms and plans: refused in a sentence, or taken and said."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz import SHARE
from mutation_folders import EDITS, FOLDER, FolderBench
from mutation_kinds import BYTES, Sheet
from trioflow.base.errors import InputError
from trioflow.base.experiments import load_plans
from trioflow.hardware.platform import SHIPPED, load_platform
from trioflow.trace.store import load_trace, pack_trace, read_pack

BUDGET = max(1, int(SHARE))
"""How many times the usual number of seeds run."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> FolderBench:
    return FolderBench("gpt2-tiny-b8", tmp_path_factory.mktemp("folders"))


@pytest.mark.parametrize("kind", FOLDER)
def test_a_folder_that_contradicts_itself_is_refused(kind: str, bench: FolderBench) -> None:
    for seed in range(3 * BUDGET):
        folder, evidence = bench.change(kind, seed, digests=bool(seed % 2))
        assert evidence
        with pytest.raises(InputError) as error:
            load_trace(folder)
        text = str(error.value)
        assert str(folder) in text and "\n" not in text and len(text) < 1500, (kind, seed)


@pytest.mark.parametrize("kind", EDITS)
def test_no_edit_of_a_folder_passes_without_a_word(kind: str, bench: FolderBench) -> None:
    for seed in range(2 * BUDGET):
        folder, evidence = bench.change(kind, seed)
        assert not evidence
        assert any("edited after" in one for one in load_trace(folder).facts.warnings), seed


def check_bytes(
    file: Path, form: str, seeds: int, read: Callable[[Path], Any], folder: Path
) -> int:
    """Damage a file's bytes; return how often it was refused, nothing else having happened."""
    content, refused = file.read_bytes(), 0
    sheet = Sheet(file.name, form, content)
    for seed in range(seeds):
        chance = random.Random(f"{file.name}/{seed}")
        made = BYTES[chance.choice(list(BYTES))](chance, sheet)
        if made is None:
            continue
        changed = folder / file.name
        changed.write_bytes(made[0])
        try:
            read(changed)
        except InputError as error:
            text = str(error)
            assert file.name in text and "\n" not in text and len(text) < 1500, (seed, text)
            refused += 1
    return refused


def test_a_damaged_pack_is_refused_or_the_same_trace(tmp_path: Path) -> None:
    pack_trace("gpt2-tiny-b8", tmp_path / "whole.zip")
    told = read_pack(tmp_path / "whole.zip").facts

    def read(path: Path) -> None:
        assert read_pack(path).facts == told

    (tmp_path / "damaged").mkdir()
    refused = check_bytes(tmp_path / "whole.zip", "chakra", 20 * BUDGET, read, tmp_path / "damaged")
    assert refused >= 10


def test_a_damaged_platform_is_refused_or_a_platform(tmp_path: Path) -> None:
    file = SHIPPED / "cpu2-gloo.yaml"
    assert check_bytes(file, "text", 30 * BUDGET, load_platform, tmp_path) >= 10


def test_a_damaged_table_of_plans_is_refused_or_a_table(tmp_path: Path) -> None:
    file = ROOT / "config/plans.tsv"
    assert check_bytes(file, "text", 40 * BUDGET, load_plans, tmp_path) >= 10
