"""Descriptions of sweeps: what they spell out, and every mistake named with its place and fix.

Parameters: the plans they give, and that the table of results holds every one.

How scenarios become jobs: each once, what shares a graph together, and steady under edits.

The jobs of a sweep: the same table whatever the cut and order, and nothing half-made or damaged in it.
"""

import errno
import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from sweep_files import SMALL, write_sweep
from trioflow import tables
from trioflow.base.errors import InputError, PlanError
from trioflow.base.settings import list_descriptions
from trioflow.parallel.plan import BUCKET_BYTES, FIRST_BUCKET_BYTES, make_plan
from trioflow.sweeps.description import (
    PARAMETERS,
    Scenarios,
    Sweep,
    fill_values,
    load_sweep,
    resolve_batch,
    resolve_plan,
)
from trioflow.sweeps.figures import collect_sweep, read_chunk
from trioflow.sweeps.scenarios import (
    _FIRST,
    JOBS,
    SIMULATED_ONLY,
    TABLE,
    choose_size,
    cut_chunks,
    find_chunk,
    list_chunk_files,
    plan_sweep,
    simulate_sweep,
)

ONE = {"trace": "gpt2-tiny-b8", "platform": "cpu2-gloo"}


def test_a_grid_a_list_and_a_table_give_each_different_scenario_once(tmp_path: Path) -> None:
    table = tmp_path / "rows.tsv"
    table.write_text(
        "trace\tplatform\tdata\tcompute_scale\tsequence_parallel\n"
        "gpt2-tiny-b8\tdgx-a100\t-\t2\tfalse\n\n"
        "gpt2-tiny-b8\tcpu2-gloo\t2\t1\t-\n"
    )
    sweep = load_sweep(
        write_sweep(
            tmp_path,
            {
                "description": "all three",
                "defaults": {"batch": 16},
                "grid": {**ONE, "data": [1, 2], "tensor": [1, 2]},
                "list": [{**ONE, "data": 2}, {**ONE, "data": 8, "batch": 32}],
                "table": str(table),
            },
        )
    )
    told = [(v["platform"], v["data"], v["tensor"], v["batch"], v["compute_scale"]) for v in sweep.scenarios]
    assert told == [
        ("cpu2-gloo", 1, 1, 16, 1.0),
        ("cpu2-gloo", 1, 2, 16, 1.0),
        ("cpu2-gloo", 2, 1, 16, 1.0),
        ("cpu2-gloo", 2, 2, 16, 1.0),
        ("cpu2-gloo", 8, 1, 32, 1.0),
        ("dgx-a100", 0, 1, 16, 2.0),
    ]
    assert all(list(values) == list(PARAMETERS) for values in sweep.scenarios)


def test_a_seed_that_draws_nothing_is_no_other_scenario(tmp_path: Path) -> None:
    grid = {**ONE, "seed": [0, 1, 2], "rank_spread": [0, 0.1]}
    sweep = load_sweep(write_sweep(tmp_path, {"description": "seeds", "grid": grid}))
    assert [(v["seed"], v["rank_spread"]) for v in sweep.scenarios] == [(0, 0.0), (0, 0.1), (1, 0.1), (2, 0.1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("description: x\ngird: []", ["gird", "unknown key", "did you mean grid?"]),
        ("grid: []", ["the key 'description' is missing"]),
        ("description: x", ["no scenarios", "give a grid, a list or a table"]),
        ("description: [", ["not readable as YAML"]),
        ("- 1", ["not a mapping"]),
        ("description: x\ndescription: y", ["written twice"]),
        (
            "description: x\ngrid: [{trace: gpt2-tiny-b8, platform: cpu2-gloo, tenser: 2}]",
            ["grid.0.tenser", "unknown key", "did you mean tensor?"],
        ),
        (
            "description: x\ngrid: [{trace: gpt2-tiny-b8, platform: cpu2-gloo, tensor: [1, 0]}]",
            ["grid.0.tensor.1", "0 is below 1"],
        ),
        (
            "description: x\nlist: [{trace: gpt2-tiny-b8, platform: cpu2-gloo, data: many}]",
            ["list.0.data", "'many' is not of type integer"],
        ),
        (
            "description: x\nlist: [{trace: gpt2-tiny-b9, platform: cpu2-gloo}]",
            ["list.0.trace", "unknown trace 'gpt2-tiny-b9'", "did you mean gpt2-tiny-b8?"],
        ),
        ("description: x\nlist: [{trace: gpt2-tiny-b8}]", ["list.0.platform", "the platform is missing"]),
        (
            "description: x\nlist: [{trace: gpt2-tiny-b8, platform: cpu2-gloo, sharding: fspd}]",
            ["list.0.sharding", "'fspd' is not one of none, zero1"],
        ),
        ("description: x\ntraces: {Big: a}\nlist: [{trace: Big, platform: cpu2-gloo}]", ["'Big'", "small letters"]),
        ("description: x\ntable: nowhere.tsv", ["nowhere.tsv", "no such file", "key table"]),
    ],
)
def test_a_mistake_is_told_with_file_place_and_fix(tmp_path: Path, text: str, words: list[str]) -> None:
    file = write_sweep(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_sweep(file)
    for word in (str(tmp_path) if "nowhere" not in text else "nowhere", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("gpt2-tiny-b8\tcpu2-gloo\ttwo", ["(line 2), column data", "'two' is not of type integer"]),
        ("gpt2-tiny-b8\tcpu2-gloo", ["line 2", "2 cells and 3 columns"]),
        ("gpt2-tiny-b8\tnowhere\t1", ["(line 2).platform", "unknown platform 'nowhere'"]),
    ],
)
def test_a_mistake_in_a_table_is_told_with_its_line(tmp_path: Path, row: str, words: list[str]) -> None:
    table = tmp_path / "rows.tsv"
    table.write_text(f"trace\tplatform\tdata\n{row}\n")
    with pytest.raises(InputError) as caught:
        load_sweep(write_sweep(tmp_path, {"description": "x", "table": str(table)}))
    for word in (str(table), *words):
        assert word in str(caught.value)
    table.write_text("trace\tplatfrom\n")
    with pytest.raises(InputError, match=r"line 1: unknown column 'platfrom'; did you mean platform"):
        load_sweep(write_sweep(tmp_path, {"description": "x", "table": str(table)}))


def test_no_file_and_too_many_scenarios_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_sweep(tmp_path / "missing.yaml")
    monkeypatch.setattr("trioflow.sweeps.description.MOST_SCENARIOS", 3)
    with pytest.raises(InputError, match=r"grid\.0: more than 3 scenarios"):
        load_sweep(write_sweep(tmp_path, SMALL))


def test_the_shipped_descriptions_are_sound() -> None:
    folder = Path(__file__).parents[3] / "config/sweeps"
    sweeps = [load_sweep(file) for file in sorted(folder.glob("*.yaml"))]
    assert "example" in [sweep.name for sweep in sweeps]
    for sweep in sweeps:
        assert {values["trace"] for values in sweep.scenarios} >= {"gpt2-b8", "resnet50-b128"}


@pytest.mark.parametrize("name", [name for name, entry in PARAMETERS.items() if entry.get("minimum") == 1])
@pytest.mark.parametrize("value", [0, -2])
def test_zero_does_not_mean_left_out(name: str, value: int, tmp_path: Path) -> None:
    told = {"description": "none", "list": [{**ONE, name: value}]}
    with pytest.raises(InputError, match=f"{value} is below 1"):
        load_sweep(write_sweep(tmp_path, told))
    with pytest.raises(PlanError, match=f"{name} {value} is below 1"):
        fill_values({**ONE, name: value})


def test_every_parameter_is_a_column_of_its_type() -> None:
    types = {"integer": tables.INT, "number": tables.FLOAT, "string": tables.TEXT}
    for name, entry in PARAMETERS.items():
        field = tables.SWEEP_RESULTS.field(name)
        assert entry["type"] == "boolean" or field.type == types[entry["type"]], name
        assert not field.nullable, name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, make_plan()),
        ({"ranks": 8}, make_plan(data=8)),
        ({"ranks": 8, "tensor": 2, "pipeline": 2}, make_plan(2, 2, 2)),
        ({"data": 4, "sharding": "fsdp"}, make_plan(4, sharding="fsdp")),
        ({"pipeline": 4, "schedule": "1f1b", "micro_batches": 8}, make_plan(1, 1, 4, "1f1b", 8)),
        ({"schedule": "1f1b", "data": 2}, make_plan(2)),
    ],
)
def test_values_give_the_plan_of_the_command_line(given: dict[str, object], expected: object) -> None:
    assert resolve_plan(fill_values(given)) == expected


def test_pytorch_gives_its_first_bucket_a_limit_that_is_given() -> None:
    plan = resolve_plan(fill_values({"data": 2}))
    assert (plan.first_bucket_bytes, plan.bucket_bytes) == (FIRST_BUCKET_BYTES, BUCKET_BYTES)
    plan = resolve_plan(fill_values({"data": 2, "bucket_bytes": 1000}))
    assert (plan.first_bucket_bytes, plan.bucket_bytes) == (1000, 1000)
    plan = resolve_plan(fill_values({"data": 2, "bucket_bytes": 1000, "first_bucket_bytes": 10}))
    assert (plan.first_bucket_bytes, plan.bucket_bytes) == (10, 1000)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 6, "tensor": 4}, "TP4 does not divide 6 GPUs"),
        ({"ranks": 8, "data": 2, "tensor": 2}, "DP2 x TP2 = 4 GPUs, not 8"),
        ({"data": 1, "sharding": "fsdp"}, "fsdp on one rank"),
    ],
)
def test_degrees_that_do_not_fit_are_told(given: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        resolve_plan(fill_values(given))


def test_a_batch_is_given_or_that_of_every_replica() -> None:
    plan = make_plan(data=4)
    assert resolve_batch(fill_values({}), plan, 8) == 32
    assert resolve_batch(fill_values({"samples": 3}), plan, 8) == 12
    assert resolve_batch(fill_values({"samples": 3, "batch": 20}), plan, 8) == 20


GRID: dict[str, Any] = {
    "trace": ["gpt2-tiny-b8", "own"],
    "platform": ["cpu2-gloo", "dgx-a100", "mine"],
    "data": [1, 2, 4, 8],
    "tensor": [1, 2, 4],
    "batch": [16, 32, 64],
    "communication_scale": [1, 2],
}
CONTENT: dict[str, Any] = {
    "description": "many",
    "grid": [GRID],
    "traces": {"own": ["traces/own-b8", "packs/own-b2.zip"]},
    "platforms": {"mine": "mine.yaml"},
}


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
    assert cut_chunks(replace(sweep, chunk=7), 50) == cut_chunks(sweep, 7), "its own size comes first"


def test_what_shares_a_graph_is_rarely_cut_apart(sweep: Sweep) -> None:
    chunks = cut_chunks(sweep, 30)
    jobs = Counter(
        graph for chunk in chunks for graph in {graph_of(sweep.scenarios[number]) for number in chunk.numbers}
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
        range(len(scenarios)), key=lambda n: [*key(scenarios[n]), *(scenarios[n][name] for name in SIMULATED_ONLY)]
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

    grid = {**GRID, "data": [1, 2, 4, 8], "seed": list(range(175)), "rank_spread": [0.1, 0.2]}
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
    assert made[[1, 0]].different("trace") == ["a", "b"]
    assert len(Scenarios.of([])) == 0


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
    "changed", [{"interval": False}, {"traces": {"own": ["elsewhere"]}}, {"platforms": {"mine": "your.yaml"}}]
)
def test_what_a_job_is_told_is_in_its_digest(sweep: Sweep, changed: dict[str, Any]) -> None:
    before, after = (
        {chunk.numbers: chunk.digest for chunk in cut_chunks(one, 30)} for one in (sweep, replace(sweep, **changed))
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
                number for number, v in enumerate(sweep.scenarios) if (v["trace"], v["platform"]) == (trace, platform)
            ]
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


FILES = ("results.parquet", "throughput.svg", "throughput.png", "memory.svg", "memory.png")


def simulate_all(file: Path, folder: Path, size: int) -> list[Path]:
    paths = []
    for chunk in cut_chunks(load_sweep(file), size):
        paths.append(folder / f"{chunk.digest}.parquet")
        simulate_sweep(file, chunk.digest, paths[-1], size)
    return paths


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("sweep")
    file = write_sweep(folder)
    return file, simulate_all(file, folder / "chunks", 5)


def test_the_cut_and_the_order_of_jobs_change_no_byte(
    done: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, chunks = done
    assert len(chunks) >= 4
    collect_sweep(file, chunks, tmp_path / "a/results.parquet", tmp_path / "a", 5)
    collect_sweep(file, chunks[::-1], tmp_path / "b/results.parquet", tmp_path / "b", 5)
    whole = simulate_all(file, tmp_path / "chunks", 1000)
    assert len(whole) == 1
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    monkeypatch.setattr("trioflow.report.style.save_figure", lambda *_: None)  # of the same table
    collect_sweep(file, whole, tmp_path / "c/results.parquet", tmp_path / "c", 1000)
    table = (tmp_path / "c/results.parquet").read_bytes()
    assert table == (tmp_path / "a/results.parquet").read_bytes()


def test_the_table_holds_every_scenario_in_order(
    done: tuple[Path, list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, chunks = done
    collect_sweep(file, chunks, tmp_path / "results.parquet", tmp_path, 5)
    rows = tables.read_table(tmp_path / "results.parquet", TABLE)
    sweep = load_sweep(file)
    assert rows["scenario"].tolist() == list(range(len(sweep.scenarios))) == list(range(16))
    for column in ("platform", "tensor", "communication_scale"):
        assert rows[column].tolist() == [values[column] for values in sweep.scenarios]
    assert rows.loc[(rows["ranks"] == 1) & (rows["tensor"] == 2), "status"].tolist() == ["infeasible"] * 4
    assert rows["step_time_s"].notna().tolist() == (rows["status"] == "ok").tolist()
    assert (rows["reason"] == "").tolist() == (rows["status"] == "ok").tolist()
    assert capsys.readouterr().out == "4 infeasible, 12 ok\n"


def test_rows_are_sorted_a_group_at_a_time_whatever_their_parts(
    done: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a part and a group are in memory; groups of any size hold the same rows."""
    file, chunks = done
    whole = tmp_path / "whole.parquet"
    collect_sweep(file, chunks, whole, tmp_path, 5)
    monkeypatch.setattr("trioflow.sweeps.figures.GROUP_ROWS", 6)
    collect_sweep(file, chunks[::-1], tmp_path / "groups.parquet", tmp_path, 5)
    groups = pq.ParquetFile(tmp_path / "groups.parquet")
    assert [groups.metadata.row_group(n).num_rows for n in range(groups.num_row_groups)] == [6, 6, 4]
    expected = tables.read_table(whole, TABLE)
    pd.testing.assert_frame_equal(tables.read_table(tmp_path / "groups.parquet", TABLE), expected)


def test_many_marks_become_a_picture_in_the_figure(
    done: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, chunks = done
    monkeypatch.setattr("trioflow.sweeps.figures.MOST_MARKS", 1)
    collect_sweep(file, chunks, tmp_path / "results.parquet", tmp_path, 5)
    for name in ("throughput", "memory"):
        assert "data:image/png;base64" in (tmp_path / f"{name}.svg").read_text()


def test_a_job_says_how_far_it_is(
    done: tuple[Path, list[Path]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, chunks = done
    simulate_sweep(file, chunks[0].stem, tmp_path / chunks[0].name, 5)
    lines = capsys.readouterr().out.splitlines()
    count = len(tables.read_table(chunks[0], TABLE))
    assert lines[0] == f"sweep small, chunk {chunks[0].stem}: {count} scenarios"
    assert lines[-1].startswith(f"{count} of {count} scenarios, ")
    assert (tmp_path / chunks[0].name).read_bytes() == chunks[0].read_bytes()


@pytest.mark.parametrize("damage", ["cut", "other", "empty", "text"])
def test_a_damaged_chunk_is_named_and_can_be_removed(
    done: tuple[Path, list[Path]], tmp_path: Path, damage: str
) -> None:
    file, chunks = done
    kept = [tmp_path / path.name for path in chunks]
    for path, copy in zip(chunks, kept, strict=True):
        copy.write_bytes(path.read_bytes())
    content = {
        "cut": chunks[1].read_bytes()[:-100],
        "other": chunks[0].read_bytes(),
        "empty": b"",
        "text": b"half written",
    }[damage]
    kept[1].write_bytes(content)
    with pytest.raises(InputError) as caught:
        collect_sweep(file, kept, tmp_path / "results.parquet", tmp_path, 5)
    assert str(kept[1]) in str(caught.value) and f"remove {kept[1]}" in str(caught.value)
    assert not (tmp_path / "results.parquet").exists()
    with pytest.raises(InputError, match="is missing"):
        collect_sweep(file, [*kept[:1], *kept[2:]], tmp_path / "results.parquet", tmp_path, 5)


@pytest.mark.parametrize("job", ["simulate", "collect"])
def test_a_full_disk_leaves_nothing_half_written(
    done: tuple[Path, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    file, chunks = done

    def write_nothing(writer: object, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_table", write_nothing)
    with pytest.raises(InputError, match="No space left on device; make room"):
        if job == "simulate":
            simulate_sweep(file, chunks[0].stem, tmp_path / "out" / chunks[0].name, 5)
        else:
            collect_sweep(file, chunks, tmp_path / "out" / "results.parquet", tmp_path / "out", 5)
    assert list((tmp_path / "out").iterdir()) == []


def test_numbers_follow_the_description_and_not_the_chunk(done: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """A scenario put before the others moves their numbers and leaves their finished chunks alone."""
    _, chunks = done
    first = {"trace": "gpt2-tiny-b8", "platform": "cpu2-gloo", "data": 2, "batch": 2}
    grid = [{key: [value] for key, value in first.items()}, *SMALL["grid"]]
    longer = load_sweep(write_sweep(tmp_path, {**SMALL, "grid": grid}))
    kept = [chunk for chunk in cut_chunks(longer, 5) if chunk.digest in {path.stem for path in chunks}]
    assert kept, "some chunks are the same"
    for chunk in kept:
        path = next(path for path in chunks if path.stem == chunk.digest)
        rows = read_chunk(path, chunk)
        assert rows["scenario"].to_pylist() == list(chunk.numbers)
        scales = [longer.scenarios[number]["communication_scale"] for number in chunk.numbers]
        assert rows["communication_scale"].to_pylist() == scales
