"""Folders with the profiles of all ranks of a parallel run, written by hand."""

import gzip
import json
import re
import shutil
import sys
from functools import partial

import pytest
from profiled_events import event
from trioflow.base.ahead import Ahead
from trioflow.base.errors import TraceError
from trioflow.cli.main import main
from trioflow.trace.importers import ranks
from trioflow.trace.importers.detect import import_trace
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.store import load_trace

SAID = ["--batch", "8", "--precision", "fp32"]
HANDLER = "plugins/profile/2026_01_05_10_00_00"


def kernel(name, number, launched, ts, dur, stream=7):
    launch = event("cudaLaunchKernel", "cuda_runtime", launched, 2, correlation=number)
    return [launch, event(name, "kernel", ts, dur, tid=stream, correlation=number, stream=stream, device=0)]


def events(late=0, steps=1):
    """Return steps of a product and an all-reduce; the kernel of a late rank's product lasts longer."""
    linear = event(
        "aten::linear", "cpu_op", 1, 20, **{"Input Dims": [[8, 16], [32, 16], [32]], "Input type": ["float"] * 3}
    )
    call = event("c10d::allreduce_", "cpu_op", 40, 20, **{"Input Dims": [[[32, 16]]], "Input type": ["TensorList"]})
    noted = event(
        "record_param_comms",
        "cpu_op",
        41,
        10,
        **{
            "Collective name": "allreduce",
            "In msg nelems": 512,
            "Out msg nelems": 512,
            "Group size": 2,
            "dtype": "Float",
            "Process Group Name": "0",
        },
    )
    found = []
    for number in range(steps):
        one = [
            event(f"ProfilerStep#{number + 1}", "user_annotation", 0, 400),
            linear,
            call,
            noted,
            *kernel("sgemm", 2 * number + 1, 2, 10, 50 + late),
            *kernel("ncclDevKernel_AllReduce", 2 * number + 2, 42, 150, 100 - late, 20),
        ]
        found += [{**entry, "ts": entry["ts"] + 500 * number} for entry in one]
    return found


def write(path, rank=None, world=2, **made):
    """Write a rank's profile; without ``rank`` it says nothing of a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}}
    content = {"deviceProperties": [{"id": 0, "name": "NVIDIA A40"}], **run, "traceEvents": events(**made)}
    packed = path.name.endswith(".gz")
    path.write_bytes((gzip.compress if packed else bytes)(json.dumps(content).encode()))
    return path


def import_folder(*sources, out):
    return main(["import", *map(str, sources), *SAID, "-o", str(out)])


def test_a_trace_of_every_rank_with_its_own_compute_and_communication(tmp_path, capsys):
    write(tmp_path / "run" / "rank-0.json", 0)
    write(tmp_path / "run" / "rank-1.json.gz", 1, late=50)
    out = tmp_path / "theirs"
    assert import_folder(tmp_path / "run", out=out) == 0
    told = capsys.readouterr().out
    assert "50 us to 100 us, median 75 us (67% of it apart)" in told
    assert told.count("2.05 kB") == 2 and f"next: trioflow simulate {out}/rank-* --as-traced" in told
    traces = [load_trace(out / f"rank-{rank}") for rank in (0, 1)]
    assert [t.facts.program["rank"] for t in traces] == [0, 1]
    assert [t.operators["device_ns"].tolist()[:2] for t in traces] == [[50_000, 100_000], [100_000, 50_000]]
    words = ["simulate", *(str(out / f"rank-{rank}") for rank in (0, 1)), "--as-traced", "--platform"]
    assert main([*words, "dgx-a100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")
def test_ranks_that_several_processes_read_are_those_that_one_reads(tmp_path, capsys, monkeypatch):
    for rank in range(4):
        write(tmp_path / "run" / f"rank-{rank}.json", rank, world=4, late=10 * rank)
    told = []
    for jobs in (1, 3):
        monkeypatch.setattr(ranks, "_count_jobs", lambda jobs=jobs: jobs)
        monkeypatch.setattr(ranks, "Ahead", partial(Ahead, worth_s=0.0))
        assert import_folder(tmp_path / "run", out=tmp_path / "theirs") == 0
        files = sorted(path for path in (tmp_path / "theirs").rglob("*") if path.is_file())
        told.append((capsys.readouterr().out, [path.read_bytes() for path in files]))
        shutil.rmtree(tmp_path / "theirs")
    assert told[0] == told[1] and len(told[0][1]) == 4 * 3


@pytest.mark.parametrize("rank_said", [True, False])
def test_files_of_tensorboard_s_handler_are_found_below_its_folder(tmp_path, capsys, rank_said):
    """Of a worker's cycles the last is taken; workers that say no rank are told by their names."""
    for rank in (0, 1):
        for time in (1700000000000, 1700000009999):
            name = f"{'host_77' if rank_said else 'worker'}{rank}.{time}.pt.trace.json.gz"
            write(tmp_path / HANDLER / name, rank if rank_said else None)
    assert import_folder(tmp_path, out=tmp_path / "theirs") == 0
    told = capsys.readouterr()
    assert "1 earlier files of this worker are left out" in told.err
    assert ("--as-traced" in told.out) == rank_said  # without the run's size no message is understood
    assert "1700000009999" in str(load_trace(tmp_path / "theirs" / "rank-1").facts.other["inputs"])


def test_cycles_of_one_worker_alone_are_one_trace(tmp_path):
    files = [write(tmp_path / "run" / f"worker0.{time}.pt.trace.json") for time in (10**12, 2 * 10**12)]
    assert import_folder(tmp_path / "run", out=tmp_path / "one") == 0
    assert list(load_trace(tmp_path / "one").facts.other["inputs"]) == [files[1].name]


def say_no_rank(folder):
    for name in ("one.json", "two.json"):
        write(folder / name)
    return r"one\.json: neither the profile .* says which rank.*name it rank-N\.json"


def miss_ranks(folder):
    for rank in (0, 2):
        write(folder / f"rank-{rank}.json", rank, world=4)
    return r"no profile of ranks 1, 3 of 4; add what is missing"


def give_a_rank_twice(folder):
    for number in (0, 1):
        write(folder / f"rank-{number}.json", 0)
    return r"rank-1\.json: a second profile of rank 0 beside rank-0\.json; give one file a rank"


def mix_runs(folder):
    for rank in (0, 1):
        write(folder / f"rank-{rank}.json", rank, world=2 + 2 * rank)
    return r"rank-1\.json: it is of a run of 4 ranks, rank-0\.json of one of 2"


def record_other_steps(folder):
    for rank in (0, 1):
        write(folder / f"rank-{rank}.json", rank, steps=1 + rank, late=50)
    return r"rank-1\.json: rank 1 recorded 2 steps \(ProfilerStep#1 \.\.\.\), rank 0 1 step .*same schedule"


def exceed_the_run(folder):
    for rank in (0, 5):
        write(folder / f"rank-{rank}.json", rank)
    return r"rank-5\.json: rank 5 of a run of 2 ranks"


def cut_a_file(folder):
    for rank in (0, 1):
        path = write(folder / f"rank-{rank}.json", rank)
    path.write_text(path.read_text()[:-60])
    return r"rank-1\.json, traceEvents: not a complete JSON file"


def hold_an_empty_rank(folder):
    write(folder / "rank-0.json", 0)
    (folder / "rank-1.json.gz").write_bytes(b"")
    return r"rank-1\.json\.gz: neither a Kineto trace nor an execution trace: it is empty, cut"


def cut_the_head_of_a_cycle(folder):
    write(folder / "host_1.1700000000000.pt.trace.json.gz", 0)
    path = write(folder / "host_2.1700000000000.pt.trace.json.gz", 1)
    path.write_bytes(path.read_bytes()[:60])
    return r"host_2\.1700000000000\.pt\.trace\.json\.gz: neither a Kineto trace"


def claim_a_billion_ranks(folder):
    for rank in (0, 1):
        write(folder / f"rank-{rank}.json", rank, world=10**12)
    return r"rank-0\.json: world_size is '1000000000000', no whole number from 0 to 131072"


def number_a_rank_beyond_any(folder):
    for rank in (0, 10**12):
        write(folder / f"rank-{rank}.json")
    return r"rank-1000000000000\.json: rank is '1000000000000', no whole number"


def say_a_rank_in_words(folder):
    for rank in (0, "one"):
        write(folder / f"rank-{int(rank != 0)}.json", rank)
    return r"rank-1\.json: rank is 'one', no whole number"


def join_a_strange_execution_trace(folder):
    for rank in (0, 1):
        write(folder / f"rank-{rank}.json", rank)
    (folder / "steps.json").write_text('{"schema": "1.1.0", "nodes": []}')
    return r"steps\.json: an execution trace whose name names no rank"


def join_one_execution_trace(folder):
    join_a_strange_execution_trace(folder)
    (folder / "steps.json").rename(folder / "et_1.json")
    return r"rank-0\.json: it has no execution trace, other ranks have one"


def hold_several_runs(folder):
    for run in ("a", "b"):
        write(folder / "plugins" / "profile" / run / "rank-0.json", 0)
    return r"holds 2 runs: a, b; give one of them, such as .*b"


@pytest.mark.parametrize(
    "make",
    [
        say_no_rank,
        miss_ranks,
        give_a_rank_twice,
        mix_runs,
        record_other_steps,
        exceed_the_run,
        cut_a_file,
        hold_an_empty_rank,
        cut_the_head_of_a_cycle,
        claim_a_billion_ranks,
        number_a_rank_beyond_any,
        say_a_rank_in_words,
        join_a_strange_execution_trace,
        join_one_execution_trace,
        hold_several_runs,
    ],
    ids=lambda make: make.__name__,
)
def test_what_does_not_go_together_is_refused_and_nothing_is_left(tmp_path, capsys, make):
    words = make(tmp_path / "run")
    assert import_folder(tmp_path / "run", out=tmp_path / "theirs") == 2
    error = capsys.readouterr().err
    assert re.search(words, error), error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_files_of_other_tools_in_the_folder_are_left_out(tmp_path):
    for rank in (0, 1):
        write(tmp_path / "run" / f"rank-{rank}.json", rank)
    for name in ("settings.json", "rank-1-losses.json"):
        (tmp_path / "run" / name).write_text("{}")
    assert import_folder(tmp_path / "run", out=tmp_path / "theirs") == 0


@pytest.mark.parametrize("run", [{"rank": "x"}, {"world_size": 10**12}, {"world_size": None}])
def test_a_profile_alone_that_says_no_run_holds_no_program(tmp_path, run):
    path = write(tmp_path / "one.json", 0)
    content = json.loads(path.read_text())
    content["distributedInfo"] |= run
    path.write_text(json.dumps(content))
    assert import_trace([path], ImportOptions(batch=8, precision="fp32")).facts.program is None


def test_a_number_of_more_digits_than_python_reads_is_placed(tmp_path):
    path = write(tmp_path / "one.json", 0)
    path.write_text(path.read_text().replace('"ts": 10,', f'"ts": {"9" * 5000},'))
    with pytest.raises(
        TraceError, match=r"one\.json, traceEvents\[5\].ts: the event cannot be read: Integer value out of range"
    ):
        import_trace([path], ImportOptions(batch=8, precision="fp32"))


def test_a_folder_that_holds_something_is_left_as_it_is(tmp_path, capsys):
    files = [write(tmp_path / "run" / f"rank-{rank}.json", rank) for rank in (0, 1)]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    assert import_folder(*files, out=tmp_path / "full") == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    with pytest.raises(TraceError, match="a second Kineto trace"):
        import_trace(files, ImportOptions())
    assert main(["import", *map(str, files), *SAID, "--repeat-layers", "4", "-o", str(tmp_path / "x")]) == 2
    assert "leave --repeat-layers out" in capsys.readouterr().err
