"""How scenarios become jobs: each once, what shares a graph together, and steady under edits."""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sweep_files import write_sweep
from trioflow.base.errors import InputError
from trioflow.base.settings import list_descriptions
from trioflow.sweeps.description import PARAMETERS, Scenarios, Sweep, fill_values, load_sweep
from trioflow.sweeps.workshop import (
    _FIRST,
    JOBS,
    SIMULATED_ONLY,
    choose_size,
    cut_chunks,
    find_chunk,
    list_chunk_files,
    plan_sweep,
)

GRID: dict[str, Any] = {
    "trace": ["gpt2-tiny-b8", "own"], "platform": ["cpu2-gloo", "dgx-a100", "mine"],
    "data": [1, 2, 4, 8], "tensor": [1, 2, 4], "batch": [16, 32, 64], "communication_scale": [1, 2],
}  # fmt: skip
CONTENT: dict[str, Any] = {
    "description": "many", "grid": [GRID], "traces": {"own": ["traces/own-b8", "packs/own-b2.zip"]},
    "platforms": {"mine": "mine.yaml"},
}  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return load_sweep(write_sweep(tmp_path, CONTENT))


def graph_of(values: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(values[name] for name in PARAMETERS if name not in SIMULATED_ONLY)


def test_every_scenario_is_in_one_chunk_of_the_size_asked_for(sweep: Sweep) -> None:
    for size in (1, 7, 50, 1000):
        chunks = cut_chunks(sweep, size)
        numbers = [number for chunk in chunks for number in chunk.numbers]
        assert sorted(numbers) == list(range(len(sweep.scenarios)))
        assert max(len(chunk.numbers) for chunk in chunks) <= size
        assert len({chunk.digest for chunk in chunks}) == len(chunks)
        for chunk in chunks[:: 1 + len(chunks) // 20]:  # each is found by cutting all of them again
            assert find_chunk(sweep, chunk.digest, size) == chunk
    assert cut_chunks(replace(sweep, chunk=7), 50) == cut_chunks(sweep, 7), (
        "its own size comes first"
    )


def test_what_shares_a_graph_is_rarely_cut_apart(sweep: Sweep) -> None:
    chunks = cut_chunks(sweep, 30)
    jobs = Counter(
        graph
        for chunk in chunks
        for graph in {graph_of(sweep.scenarios[number]) for number in chunk.numbers}
    )
    assert sum(jobs.values()) <= len(jobs) + len(chunks) - 1
    for chunk in chunks:
        graphs = [graph_of(sweep.scenarios[number]) for number in chunk.numbers]
        seen = list(dict.fromkeys(graphs))
        assert sorted(graphs, key=seen.index) == graphs, "scenarios of a graph follow one another"


def test_chunks_are_those_of_cutting_scenario_by_scenario(sweep: Sweep) -> None:
    """Columns are cut where the rule as it is written cuts dictionaries one by one."""
    scenarios = list(sweep.scenarios)

    def key(values: dict[str, Any]) -> list[Any]:
        first = [values[name] for name in _FIRST]
        return first + [values[n] for n in PARAMETERS if n not in (*_FIRST, *SIMULATED_ONLY)]

    order = sorted(
        range(len(scenarios)),
        key=lambda n: [*key(scenarios[n]), *(scenarios[n][name] for name in SIMULATED_ONLY)],
    )
    for size in (7, 30, 64):
        expected: list[list[int]] = [[]]
        for number, following in zip(order, [*order[1:], None], strict=True):
            expected[-1].append(number)
            last = following is None or key(scenarios[number]) != key(scenarios[following])
            digest = hashlib.sha256(json.dumps(key(scenarios[number])).encode()).digest()
            cut = last and 2 * len(expected[-1]) >= size and digest[0] < 32
            if following is not None and (len(expected[-1]) >= size or cut):
                expected.append([])
        assert [list(chunk.numbers) for chunk in cut_chunks(sweep, size)] == expected


def test_the_size_of_chunks_grows_with_the_sweep_and_seldom() -> None:
    sizes = [choose_size(count) for count in (1, 64 * JOBS, 64 * JOBS + 1, 100_000, 1_000_000)]
    assert sizes == [64, 64, 128, 8192, 8192]
    assert len({choose_size(count) for count in range(1, 200_000, 97)}) == 8


def test_a_hundred_thousand_scenarios_are_cut_without_spelling_them_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every job cuts its sweep again: dictionaries are made of a few scenarios, not of all."""
    made: list[int] = []
    plain = Scenarios.__getitem__

    def count(self: Scenarios, place: Any) -> Any:
        made.append(place)
        return plain(self, place)

    grid = {
        **GRID, "data": [1, 2, 4, 8], "seed": list(range(175)), "rank_spread": [0.1, 0.2],
    }  # fmt: skip
    monkeypatch.setattr(Scenarios, "__getitem__", count)
    many = load_sweep(write_sweep(tmp_path, {**CONTENT, "grid": [grid]}))
    chunks = cut_chunks(many)
    assert len(many.scenarios) == 2 * 3 * 4 * 3 * 3 * 2 * 175 * 2 > 100_000
    assert JOBS // 2 <= len(chunks) <= 2 * JOBS
    assert len(made) < 1000


def test_scenarios_as_columns_are_the_rows_that_were_given() -> None:
    rows = [{"trace": "a", "data": 2, "seed": 3}, {"trace": "b"}, {"trace": "a", "data": 2}]
    made = Scenarios.of(rows)
    assert list(made) == [fill_values(rows[0]), fill_values(rows[1])], "a seed draws nothing"
    assert made.different("trace", [1, 0]) == ["a", "b"]
    assert Scenarios.of([]).codes.shape == (0, len(PARAMETERS))


def test_the_order_of_the_description_does_not_matter(sweep: Sweep) -> None:
    turned = replace(sweep, scenarios=sweep.scenarios[::-1])
    digests = [chunk.digest for chunk in cut_chunks(sweep, 30)]
    assert [chunk.digest for chunk in cut_chunks(turned, 30)] == digests


def test_most_chunks_outlive_an_edit(sweep: Sweep) -> None:
    before = {chunk.digest for chunk in cut_chunks(sweep, 30)}
    gone = ("own", 2, 4, 32)
    kept = [v for v in sweep.scenarios if (v["trace"], v["tensor"], v["data"], v["batch"]) != gone]
    without = replace(sweep, scenarios=Scenarios.of(kept))
    after = {chunk.digest for chunk in cut_chunks(without, 30)}
    assert before != after
    assert len(before & after) >= 2 * len(after) / 3


@pytest.mark.parametrize(
    "changed",
    [{"interval": False}, {"traces": {"own": ["elsewhere"]}}, {"platforms": {"mine": "your.yaml"}}],
)
def test_what_a_job_is_told_is_in_its_digest(sweep: Sweep, changed: dict[str, Any]) -> None:
    before, after = (
        {chunk.numbers: chunk.digest for chunk in cut_chunks(one, 30)}
        for one in (sweep, replace(sweep, **changed))
    )
    for numbers, digest in before.items():
        used = [sweep.scenarios[number] for number in numbers]
        concerns = (
            "interval" in changed
            or ("traces" in changed and any(v["trace"] == "own" for v in used))
            or ("platforms" in changed and any(v["platform"] == "mine" for v in used))
        )
        assert (after[numbers] != digest) == concerns


def test_a_chunk_that_is_gone_asks_for_a_new_start(sweep: Sweep) -> None:
    with pytest.raises(InputError, match=r"has no chunk 0123.*start Snakemake again"):
        find_chunk(sweep, "0123")


def test_a_chunk_needs_its_own_files_only(sweep: Sweep) -> None:
    own = ["operators.parquet", "tensors.parquet", "trace.json"]
    files = [*(f"traces/own-b8/{name}" for name in own), "packs/own-b2.zip"]
    chosen = {"gpt2-tiny-b8": [], "own": files}
    for trace, expected in chosen.items():
        for platform, more in (("cpu2-gloo", []), ("mine", ["mine.yaml"])):
            numbers = [
                number for number, v in enumerate(sweep.scenarios)
                if (v["trace"], v["platform"]) == (trace, platform)
            ]  # fmt: skip
            assert list_chunk_files(sweep, numbers) == expected + more


def test_snakemake_is_told_names_chunks_and_files(tmp_path: Path) -> None:
    file = write_sweep(tmp_path, CONTENT, "one-two")
    assert list_descriptions(tmp_path) == {"one-two": str(file)}
    assert list_descriptions(tmp_path / "nowhere") == {}
    plan = plan_sweep(str(file), 40)
    assert list(plan) == [chunk.digest for chunk in cut_chunks(load_sweep(file), 40)]
    assert any("mine.yaml" in files for files in plan.values())
    write_sweep(tmp_path, CONTENT, "One_two")
    with pytest.raises(InputError, match="'One_two' is not a name"):
        list_descriptions(tmp_path)
