import random

import pytest
from trioflow.base.errors import InputError, TableError
from trioflow.campaign.items import Item
from trioflow.campaign.packing import (
    ITEMS_FILE,
    SCHEMAS,
    SWEEPS_FILE,
    Content,
    Limits,
    Result,
    State,
    _read_rows,
    _write,
    pack_campaign,
    read_items,
    read_sweeps,
)

KIB = 1024
ROW = {
    "operation": "gemm",
    "phase": "forward",
    "precision": "bf16",
    "shape": '{"m": 2}',
    "flop": 16,
    "read_bytes": 8,
    "write_bytes": 8,
    "repeats": 5,
    "median_ns": 3,
    "min_ns": 1,
    "lower_quartile_ns": 2,
    "upper_quartile_ns": 4,
    "host_ns": 9,
    "timer": "cuda_event",
    "kernel_ns": 2,
    "kernels": ["a", "b"],
}


def fill(folder, captures=10, size=10 * KIB, sweeps=3, rows=4):
    """A state with captures of random content and some sweeps."""
    source, state, items = random.Random(1), State(folder), []
    for number in range(captures):
        items.append(Item(f"c{number:02d}", "workload", len(items), 1.0))
        content = Content(source.randbytes(size), 3 * size)
        state.store(items[-1].name, Result(), {"kineto.json.gz": content})
    for number in range(sweeps):
        items.append(Item(f"s{number}", "sweep", len(items), 1.0))
        made = [{**ROW, "item": items[-1].name, "kernels": [source.randbytes(200).hex()]}]
        state.store(items[-1].name, Result(rows=made * rows))
    return items, state


def stored(output):
    return {row["item"]: row for row in read_items(output).to_dict("records")}


def test_everything_goes_into_few_files(tmp_path):
    items, state = fill(tmp_path / "state")
    assert pack_campaign(items, state, tmp_path / "out") == {}
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["captures-1.parquet", ITEMS_FILE, SWEEPS_FILE]
    assert len(read_sweeps(tmp_path / "out")) == 12
    assert set(stored(tmp_path / "out")) == {item.name for item in items}


@pytest.mark.parametrize("file_kib", [24, 40, 100, 1000])
@pytest.mark.parametrize("files", [2, 3, 5, 8])
@pytest.mark.parametrize("total_kib", [60, 10_000])
def test_the_limits_hold_and_the_least_valuable_are_left_out(tmp_path, file_kib, files, total_kib):
    items, state = fill(tmp_path / "state", captures=40)
    limits = Limits(files, file_kib * KIB, total_kib * KIB)
    left_out = pack_campaign(items, state, tmp_path / "out", limits)
    found = list((tmp_path / "out").iterdir())
    assert len(found) <= files
    assert all(path.stat().st_size <= limits.file_bytes for path in found)
    assert sum(path.stat().st_size for path in found) <= limits.total_bytes
    captures = [item.name for item in items if item.name.startswith("c")]
    kept = [name for name in captures if name not in left_out]
    assert kept == captures[: len(kept)], "equal sizes: what is left out comes last in value"
    table = stored(tmp_path / "out")
    for name in captures:
        assert bool(table[name]["stored_in"]) == (name in kept)
        assert ("no longer fit" in table[name]["note"]) == (name not in kept)
        assert table[name]["status"] == "done", "what is left out is finished all the same"


def test_several_files_are_filled_when_one_is_too_small(tmp_path):
    items, state = fill(tmp_path / "state", captures=12)
    assert pack_campaign(items, state, tmp_path / "out", Limits(8, 40 * KIB)) == {}
    packs = sorted((tmp_path / "out").glob("captures-*"))
    assert len(packs) > 2
    rows = [row for path in packs for row in _read_rows(path, "files")]
    assert sorted(row["item"] for row in rows) == [f"c{n:02d}" for n in range(12)]


def test_sweeps_too_large_for_a_file_lose_their_last_items(tmp_path):
    items, state = fill(tmp_path / "state", captures=0, sweeps=40, rows=1)
    left_out = pack_campaign(items, state, tmp_path / "out", Limits(8, 12 * KIB))
    kept = [item.name for item in items if item.name not in left_out]
    assert 0 < len(kept) < 40
    assert kept == [item.name for item in items[: len(kept)]]
    assert set(read_sweeps(tmp_path / "out")["item"]) == set(kept)


def test_limits_too_small_for_the_table_of_items_are_refused(tmp_path):
    items, state = fill(tmp_path / "state")
    with pytest.raises(InputError, match="table of items alone is too large"):
        pack_campaign(items, state, tmp_path / "out", Limits(8, KIB))
    assert not (tmp_path / "out").exists()


def test_packing_again_replaces_and_removes_what_is_no_longer_needed(tmp_path):
    items, state = fill(tmp_path / "state")
    pack_campaign(items, state, tmp_path / "out", Limits(8, 30 * KIB))
    assert (tmp_path / "out" / "captures-3.parquet").exists()
    pack_campaign(items, state, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "captures-1.parquet",
        ITEMS_FILE,
        SWEEPS_FILE,
    ]


def test_equal_states_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        items, state = fill(tmp_path / name)
        pack_campaign(items, state, tmp_path / f"out-{name}")
    for path in (tmp_path / "out-a").iterdir():
        assert path.read_bytes() == (tmp_path / "out-b" / path.name).read_bytes()


def test_a_pack_is_the_state_again(tmp_path):
    items, state = fill(tmp_path / "state")
    state.sessions.append({"machine": {"device_name": "x"}})
    state.store("c00", Result("failed", "why", 5, 0, facts={"batch": 2}))
    state.begin("late")
    items.append(Item("late", "sweep", 99, 1.0))
    pack_campaign(items, state, tmp_path / "out")
    back = State(tmp_path / "back")
    back.take_over(tmp_path / "out")
    assert back.results == state.results and back.sessions == state.sessions
    assert (back.interruptions("late"), back.interruptions("c01")) == (1, 0)
    assert all(back.load_files(name) == state.load_files(name) for name in state.results)
    pack_campaign(items, back, tmp_path / "again")
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    back.take_over(tmp_path / "out")
    assert back.results == state.results and back.sessions == state.sessions, (
        "once more changes nothing"
    )


def test_unpacked_states_of_two_calls_become_one(tmp_path):
    _, one = fill(tmp_path / "one/state", captures=2)
    one.sessions.append({"machine": {"device_name": "x"}})
    one.write_sessions()
    two = State(tmp_path / "two")
    two.sessions.append({"machine": {"device_name": "x"}})
    two.store("own", Result())
    two.take_over(tmp_path / "one")
    assert set(two.results) == {"own", *one.results} and len(two.sessions) == 2
    assert {two.results[name].session for name in one.results} == {1}
    assert two.load_files("c01") == one.load_files("c01")
    assert State(tmp_path / "two").results == two.results, "on disk too"


def test_the_table_of_items_alone_is_enough_to_go_on(tmp_path):
    items, state = fill(tmp_path / "state", captures=2)
    pack_campaign(items, state, tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        if path.name != ITEMS_FILE:
            path.unlink()
    back = State(tmp_path / "back")
    back.take_over(tmp_path / "out")
    assert set(back.results) == set(state.results)
    pack_campaign(items, back, tmp_path / "again")
    assert [path.name for path in (tmp_path / "again").iterdir()] == [ITEMS_FILE]
    assert stored(tmp_path / "again")["c00"]["note"] == "its content is in an earlier pack"


def test_items_that_the_list_no_longer_has_are_kept(tmp_path):
    items, state = fill(tmp_path / "state", captures=2)
    pack_campaign(items[1:], state, tmp_path / "out")
    table = stored(tmp_path / "out")
    assert table["c00"]["kind"] == "unlisted"
    assert table["c00"]["stored_in"] == "captures-1.parquet"


def test_pending_items_are_listed(tmp_path):
    items, state = fill(tmp_path / "state", captures=1)
    items.append(Item("later", "sweep", 9, 1.0))
    pack_campaign(items, state, tmp_path / "out")
    assert stored(tmp_path / "out")["later"]["status"] == "pending"


def test_a_folder_without_a_campaign_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"no campaign here: items\.parquet is missing"):
        State(tmp_path / "kept").take_over(tmp_path)


def test_a_foreign_table_is_refused(tmp_path):
    _write(tmp_path / ITEMS_FILE, "sweeps", [])
    with pytest.raises(TableError, match="not a table items of a campaign"):
        State(tmp_path / "kept").take_over(tmp_path)
    (tmp_path / ITEMS_FILE).write_bytes(b"PAR1")
    with pytest.raises(TableError, match="not a readable Parquet file"):
        State(tmp_path / "kept").take_over(tmp_path)


def test_a_row_that_breaks_the_schema_is_refused(tmp_path):
    with pytest.raises(TableError, match="a value is missing"):
        _write(tmp_path / "x", "sweeps", [{**ROW, "item": "x", "median_ns": None}])


def test_every_column_says_its_meaning_and_times_and_sizes_their_unit():
    for field in SCHEMAS["sweeps"]:
        metadata = {k.decode(): v.decode() for k, v in field.metadata.items()}
        assert metadata["meaning"]
        for ending, unit in (("_ns", "ns"), ("_bytes", "bytes"), ("flop", "flop")):
            if field.name.endswith(ending):
                assert metadata["unit"] == unit
