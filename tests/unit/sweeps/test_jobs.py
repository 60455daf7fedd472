"""The jobs of a sweep: the same table whatever the cut and order, and nothing half-made or damaged in it."""

import errno
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from sweep_files import SMALL, write_sweep
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.sweeps.description import load_sweep
from trioflow.sweeps.figures import collect_sweep, read_chunk
from trioflow.sweeps.workshop import TABLE, cut_chunks, simulate_sweep

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
    assert (
        rows.loc[(rows["ranks"] == 1) & (rows["tensor"] == 2), "status"].tolist()
        == ["infeasible"] * 4
    )
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
    assert [groups.metadata.row_group(n).num_rows for n in range(groups.num_row_groups)] == [
        6,
        6,
        4,
    ]
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


def test_numbers_follow_the_description_and_not_the_chunk(
    done: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    """A scenario put before the others moves their numbers and leaves their finished chunks alone."""
    _, chunks = done
    first = {"trace": "gpt2-tiny-b8", "platform": "cpu2-gloo", "data": 2, "batch": 2}
    grid = [{key: [value] for key, value in first.items()}, *SMALL["grid"]]
    longer = load_sweep(write_sweep(tmp_path, {**SMALL, "grid": grid}))
    kept = [
        chunk for chunk in cut_chunks(longer, 5) if chunk.digest in {path.stem for path in chunks}
    ]
    assert kept, "some chunks are the same"
    for chunk in kept:
        path = next(path for path in chunks if path.stem == chunk.digest)
        rows = read_chunk(path, chunk)
        assert rows["scenario"].to_pylist() == list(chunk.numbers)
        scales = [longer.scenarios[number]["communication_scale"] for number in chunk.numbers]
        assert rows["communication_scale"].to_pylist() == scales
