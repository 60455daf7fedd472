import gzip
import random
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from trioflow.base.errors import InputError, TableError
from trioflow.campaign.__main__ import make_parser
from trioflow.campaign.items import OPERATIONS, Item, list_items, list_points, read_rows
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
    unpack_campaign,
)
from trioflow.campaign.sweeps import kernels_by_window
from trioflow.trace.profile.merge import RAW_FILES, merge_trace

from .conftest import HUGE, TINY, write_table

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
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["captures-1.parquet", ITEMS_FILE, SWEEPS_FILE]


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
    assert back.results == state.results and back.sessions == state.sessions, "once more changes nothing"


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


@pytest.mark.parametrize("fixture", ["raw_transformer", "raw_cnn"])
def test_what_is_unpacked_merges_like_the_original(fixture, request, tmp_path):
    raw = request.getfixturevalue(fixture)
    files = {
        name: Content.of(gzip.decompress(content) if name.endswith(".gz") else content)
        for name in RAW_FILES
        if (raw / name).exists() and (content := (raw / name).read_bytes())
    }
    state = State(tmp_path / "state")
    state.store("net-b4-fp32", Result(), files)
    pack_campaign([Item("net-b4-fp32", "workload", 0, 1.0)], state, tmp_path / "out")
    (folder,) = unpack_campaign(tmp_path / "out", tmp_path / "traces")
    assert folder == tmp_path / "traces" / "net-b4-fp32"
    assert {path.name for path in folder.iterdir()} == set(files)
    packed, original = merge_trace(folder), merge_trace(raw)
    pd.testing.assert_frame_equal(packed.operators, original.operators)
    pd.testing.assert_frame_equal(packed.tensors, original.tensors)
    # The digests are those of smaller files; all else is equal.
    assert packed.facts.inputs.keys() == original.facts.inputs.keys()
    assert packed.facts == replace(original.facts, inputs=packed.facts.inputs)


@pytest.mark.parametrize("damage", ["cut", "swap", "size"])
def test_damaged_content_is_refused(tmp_path, damage):
    good = Content.of(b'{"nodes": [{"id": 1}]}')
    bad = {
        "cut": Content(good.packed[:-6], good.size_bytes),
        "swap": Content(b"x" * 40, good.size_bytes),
        "size": Content(good.packed, 3),
    }[damage]
    with pytest.raises(InputError, match="damaged content"):
        bad.restore(tmp_path / "item/file")


def test_names_that_leave_the_target_are_refused(tmp_path):
    content = Content.of(b"{}")
    row = {"item": "../evil", "file": "x.json", "size_bytes": content.size_bytes}
    _write(tmp_path / "captures-1.parquet", "files", [{**row, "content": content.packed}])
    with pytest.raises(InputError, match="are not file names"):
        unpack_campaign(tmp_path, tmp_path / "target")
    assert not (tmp_path / "evil").exists()


def test_a_folder_without_captures_is_refused(tmp_path):
    with pytest.raises(InputError, match="no captures"):
        unpack_campaign(tmp_path, tmp_path / "target")


def test_unpacking_needs_no_torch():
    import subprocess
    import sys

    from .conftest import LIBRARY

    code = "import sys, trioflow.campaign.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=LIBRARY, check=False).returncode == 0


def test_the_order_is_ceilings_then_every_workload_once_then_coarse_sweeps(tmp_path):
    second = ["other", *TINY[1:]]
    rows = read_rows(write_table(tmp_path / "t.tsv", TINY, second))
    items = list_items(rows)
    kinds = [item.kind for item in items]
    first_sweep = kinds.index("sweep")
    ceilings = kinds.count("ceiling")
    assert set(kinds[:ceilings]) == {"ceiling"} and items[0].name == "ceiling-device_copy"
    assert [i.name for i in items[ceilings:first_sweep]] == ["tiny-b4-fp32", "other-b4-fp32"]
    assert [item.position for item in items] == list(range(len(items)))
    assert len({item.name for item in items}) == len(items)
    place = {item.name: item.position for item in items}
    gemm = [place[f"sweep-gemm-bf16-{level}-0"] for level in (0, 1, 2)]
    assert gemm == sorted(gemm)
    assert place["tiny-b2-fp32"] > place["sweep-gemm-bf16-1-0"], "sweeps before further batches"
    assert place["tiny-b4-bf16"] < place["tiny-b2-bf16"]
    assert place["sweep-layer_norm-fp32-0-0"] < place["sweep-gemm-fp32-1-0"], "all coarse first"


def test_batches_are_the_rows_own_then_those_of_all_workloads(tmp_path):
    items = list_items(read_rows(write_table(tmp_path / "t.tsv", TINY)))
    own = [i for i in items if i.kind == "workload" and i.name.endswith("fp32")]
    assert [i.arguments["batch"] for i in own] == [4, 2, 128, 256, 32, 64, 8, 16]
    assert own[2].estimate_s == 32 * own[0].estimate_s, "of 128 samples instead of 4"


def test_every_precision_of_the_brief_is_listed(tmp_path):
    items = list_items(read_rows(write_table(tmp_path / "t.tsv", TINY)))
    found = {i.arguments["precision"] for i in items if i.arguments.get("operation") == "conv2d"}
    assert found == {"fp32", "tf32", "bf16", "fp16"}
    workloads = {i.arguments["row"]["precision"] for i in items if i.kind == "workload"}
    assert workloads == {"fp32", "tf32", "bf16", "fp16"}


def test_levels_of_a_sweep_do_not_overlap_and_none_is_empty():
    for operation in OPERATIONS:
        levels = [list_points(operation, n) for n in range(len(OPERATIONS[operation]["levels"]))]
        assert len(OPERATIONS[operation]["priorities"]) == len(levels)
        points = [str(sorted(p.items())) for level in levels for p in level]
        assert all(levels), operation
        assert len(set(points)) == len(points), operation
        assert list_points(operation, 0, quick=True)


def test_the_default_table_is_one_that_ships():
    rows = read_rows()
    assert {"vgg11", "resnet18"} <= {row["workload"] for row in rows}
    assert all(isinstance(batch, int) for row in rows for batch in row["batches"])


@pytest.mark.parametrize("cell", ["", "0", "4,x"])
def test_a_row_without_batches_is_refused(tmp_path, cell):
    row = [*HUGE]
    row[3] = cell
    with pytest.raises(InputError, match=r"line 2, batches: .* are not batch sizes"):
        read_rows(write_table(tmp_path / "t.tsv", row))


def test_a_workload_listed_twice_is_refused(tmp_path):
    rows = read_rows(write_table(tmp_path / "t.tsv", TINY, TINY))
    with pytest.raises(InputError, match="tiny-b4-fp32 is listed twice"):
        list_items(rows)


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(tmp_path / "none.tsv")


PAGE = Path(__file__).parents[3] / "docs" / "capture_campaign.md"


def test_the_page_names_every_option_and_no_other():
    said = set(re.findall(r"--[a-z][a-z-]*", PAGE.read_text()))
    known = {
        word
        for action in make_parser()._actions
        for word in action.option_strings
        if word.startswith("--") and word not in ("--help", "--until")
    }
    assert said == known


def test_the_page_says_the_limits_that_hold():
    options = make_parser().parse_args([])
    assert (options.files, options.file_mib, options.total_mib) == (8, 16, 60)
    limits = Limits()
    assert limits.files == options.files
    assert limits.file_bytes == options.file_mib * 2**20
    assert limits.total_bytes == options.total_mib * 2**20
    assert "8 files, 16 MiB each, 60 MiB together" in PAGE.read_text()


def event(cat, name, ts, dur, tid=1, correlation=None):
    arguments = {} if correlation is None else {"correlation": correlation}
    made = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}
    return {**made, "args": arguments}


def test_kernels_belong_to_the_window_that_launched_them_on_any_thread():
    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "a", 0, 10),
        event("user_annotation", "a", 20, 10),
        event("user_annotation", "b", 40, 10),
        event("user_annotation", "other", 0, 100),
        event("cuda_runtime", "cudaLaunchKernel", 2, 1, 1, 11),
        event("cuda_runtime", "cudaLaunchKernel", 4, 1, 2, 12),
        event("cuda_runtime", "cudaLaunchKernel", 22, 1, 1, 13),
        event("cuda_driver", "cuLaunchKernel", 24, 1, 2, 14),
        event("cuda_runtime", "cudaLaunchKernel", 15, 1, 1, 15),
        event("cuda_runtime", "cudaDeviceSynchronize", 45, 1, 1, 16),
        # The device runs late and out of order: only the launch decides.
        event("kernel", "first", 60, 2, 7, 11),
        event("kernel", "second", 50, 3.5, 7, 12),
        event("kernel", "first", 70, 4, 7, 13),
        event("gpu_memset", "fill", 74, 1.5, 7, 14),
        event("kernel", "between windows", 80, 9, 7, 15),
    ]
    assert kernels_by_window(events, {"a", "b"}) == {"a": (5500, ["first", "fill"])}
