"""Predicted ranks as profiles: every task is there, and Holistic Trace Analysis itself reads them."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import trioflow
from trioflow.base.errors import InputError
from trioflow.cli import main
from trioflow.export.rank_files import write_kineto, write_nccl_log

ROOT = Path(__file__).parents[3]
HTA = """
import json, sys
from hta.trace_analysis import TraceAnalysis

analysis = TraceAnalysis(trace_dir=sys.argv[1])
spent = analysis.get_temporal_breakdown(visualize=False)
hidden = analysis.get_comm_comp_overlap(visualize=False)
kernels = analysis.get_gpu_kernel_breakdown(visualize=False)[0]
print(json.dumps({
    "spent": spent.to_dict("records"), "hidden": hidden.to_dict("records"),
    "kinds": kernels.to_dict("records"),
}))
"""


@pytest.fixture(scope="module")
def predicted() -> trioflow.Prediction:
    plan = trioflow.make_plan(data=2, tensor=2)
    return trioflow.predict("llama-3-2-1b-b4", plan, "dgx-h100", batch=8)


@pytest.fixture(scope="module")
def profiles(predicted: trioflow.Prediction, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "profiles"
    write_kineto(predicted.timeline, folder)
    return folder


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    words = ["--quiet", "--no-deps", "--target", str(folder), "--requirement", "envs/peers.lock"]
    pip = [sys.executable, "-m", "pip", "install", *words]
    run = subprocess.run(pip, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"Holistic Trace Analysis cannot be installed: {run.stderr.strip()[-200:]}")
    return folder


def busy_us(tasks: pd.DataFrame) -> float:
    """The union of intervals [us]."""
    total = end = 0.0
    for row in tasks.sort_values("start_s").itertuples():
        total += max(0.0, float(row.end_s) - max(end, float(row.start_s)))
        end = max(end, float(row.end_s))
    return total * 1e6


@pytest.mark.slow
def test_holistic_trace_analysis_finds_what_was_predicted(
    predicted: trioflow.Prediction, profiles: Path, peers: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", HTA, str(profiles)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(peers), "PYTHONPATH": str(peers)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    timeline = predicted.timeline  # HTA cuts times to whole microseconds, so sums agree within 1 %
    assert [row["rank"] for row in found["spent"]] == [0, 1, 2, 3]
    for row, overlap in zip(found["spent"], found["hidden"], strict=True):
        own = timeline[timeline["rank"] == row["rank"]]
        compute = own[own["kind"] == "compute"]
        both = own[own["kind"].isin(["compute", "collective", "memcpy"])]
        assert row["compute_time(us)"] == pytest.approx(busy_us(compute), rel=0.01)
        idle_us = row["kernel_time(us)"] - busy_us(both)
        assert row["idle_time(us)"] == pytest.approx(idle_us, abs=0.01 * row["kernel_time(us)"])
        assert 0 <= overlap["comp_comm_overlap_pctg"] <= 100
    assert {row["kernel_type"] for row in found["kinds"]} >= {"COMPUTATION", "COMMUNICATION"}


def test_every_task_on_a_device_is_a_kernel_or_a_copy(predicted: trioflow.Prediction, profiles: Path) -> None:
    files = sorted(profiles.iterdir())
    assert [file.name for file in files] == [f"rank-{rank}.json.gz" for rank in range(4)]
    for rank, file in enumerate(files):
        content = json.loads(gzip.decompress(file.read_bytes()))
        assert content["distributedInfo"] == {"backend": "nccl", "rank": rank, "world_size": 4}
        own = predicted.timeline[predicted.timeline["rank"] == rank]
        wanted = own[(own["kind"] != "host") & (own["end_s"] > own["start_s"])]
        events = [e for e in content["traceEvents"] if e["cat"] in ("kernel", "gpu_memcpy")]
        assert len(events) == len(wanted)
        sum_us = sum(event["dur"] for event in events)
        assert sum_us == pytest.approx(1e6 * (wanted["end_s"] - wanted["start_s"]).sum(), rel=1e-4)
        groups = {e["args"]["Process Group Ranks"] for e in events if "Collective name" in e["args"]}
        tensor = [rank // 2 * 2, rank // 2 * 2 + 1]
        sent = [e["args"]["In msg nelems"] for e in events if "Collective name" in e["args"]]
        messages = own[own["kind"] == "collective"].sort_values(["start_s", "task_id"])
        assert sent == messages["message_bytes"].tolist()  # DDP and tensor parallel sum, all of them
        assert groups == {json.dumps(tensor), json.dumps([rank % 2, rank % 2 + 2])}


CALL = re.compile(
    r"node(\d+):(\d+):\2 \[(\d+)\] NCCL INFO (\w+): opCount ([0-9a-f]+) sendbuff \(nil\) recvbuff \(nil\) count (\d+) "
    r"datatype 1 op 0 root (\d+) comm (0x[0-9a-f]+) \[nranks=(\d+)\] stream (0x[0-9a-f]+)"
)
BEGIN = re.compile(r".*ncclCommInitRank comm (0x[0-9a-f]+) rank (\d+) nranks (\d+) .* - Init COMPLETE")


def test_collectives_are_logged_as_nccl_logs_them(predicted: trioflow.Prediction, tmp_path: Path) -> None:
    files = write_nccl_log(predicted.timeline, tmp_path / "logs", ranks_per_node=2)
    assert [file.name for file in files] == [f"rank-{rank}.log" for rank in range(4)]
    for rank, file in enumerate(files):
        lines = file.read_text().splitlines()
        own = {match[1]: match for line in lines if (match := BEGIN.fullmatch(line))}
        calls = [match for line in lines if (match := CALL.fullmatch(line))]
        assert len(own) + len(calls) == len(lines) and {call[8] for call in calls} == own.keys()
        assert {(call[1], call[2], call[3]) for call in calls} == {(str(rank // 2), str(rank), str(rank % 2))}
        timeline = predicted.timeline[predicted.timeline["rank"] == rank]
        messages = timeline[timeline["kind"] == "collective"].sort_values(["start_s", "task_id"])
        assert [int(call[6]) for call in calls] == messages["message_bytes"].tolist()
        assert {call[4] for call in calls} == {"AllReduce"}
        places = {(int(match[2]), int(match[3])) for match in own.values()}
        assert places == {(rank % 2, 2), (rank // 2, 2)}, "tensor ranks side by side, replicas beyond"
        for comm in own:
            counts = [int(call[5], 16) for call in calls if call[8] == comm]
            assert counts == list(range(len(counts)))


def test_parts_and_sends_are_counted_as_nccl_counts_them(tmp_path: Path) -> None:
    rows = [
        ("collective", "all_gather", 0, (0, 1)),
        ("collective", "all_to_all", 1, (0, 1)),
        ("send", "activation", 2, (0,)),
        ("recv", "activation", 2, (1,)),
    ]
    timeline = pd.DataFrame(
        [
            {
                "task_id": 10 * place + rank,
                "rank": rank,
                "stream": "s",
                "kind": kind,
                "name": name,
                "match_id": match,
                "message_bytes": 80,
                "start_s": float(place),
                "end_s": place + 0.5,
            }
            for place, (kind, name, match, ranks) in enumerate(rows)
            for rank in ranks
        ]
    )
    files = write_nccl_log(timeline, tmp_path / "logs")
    told = [
        [
            (match[4], int(match[5]), int(match[6]), int(match[7]))
            for line in file.read_text().splitlines()
            if (match := CALL.fullmatch(line))
        ]
        for file in files
    ]
    exchanged = [(name, 1, 40, peer) for peer in (0, 1) for name in ("Send", "Recv")]
    assert told == [
        [("AllGather", 0, 40, 0), *exchanged, ("Send", 2, 80, 1)],
        [("AllGather", 0, 40, 0), *exchanged, ("Recv", 2, 80, 0)],
    ]


def test_a_folder_with_files_and_a_processor_are_refused(
    predicted: trioflow.Prediction, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-9.json").write_text("{}")
    for write in (write_kineto, write_nccl_log):
        with pytest.raises(InputError, match="not empty; name a new one"):
            write(predicted.timeline, tmp_path)
    goal = tmp_path / "out"
    words = ["gpt2-tiny-b8", "--plan", "ddp", "--ranks", "2", "--platform", "cpu2-gloo"]
    assert main(["export", "kineto", *words, "-o", str(goal)]) == 2
    assert "cpu2-gloo has no GPU" in capsys.readouterr().err and not goal.exists()
    assert main(["export", "nccl", *words, "-o", str(goal)]) == 0
    assert "2 ranks in" in capsys.readouterr().out and "AllReduce" in (goal / "rank-1.log").read_text()
