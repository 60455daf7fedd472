"""Whole calls of the campaign, in processes of their own, on a CPU."""

import json
import shutil
import subprocess
import sys

import pytest
from trioflow.campaign.packing import read_items, read_sweeps, unpack_campaign
from trioflow.trace.profile.merge import merge_trace

torch = pytest.importorskip("torch", reason="captures need torch (extra [capture])")

from .conftest import HUGE, LIBRARY, TINY, run_campaign, write_table  # noqa: E402


def statuses(output):
    table = read_items(output)
    return dict(zip(table["item"], table["status"], strict=True))


def finished(output):
    return {name for name, status in statuses(output).items() if status != "pending"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Output of a whole quick campaign with one small workload."""
    folder = tmp_path_factory.mktemp("campaign")
    table = write_table(folder / "workloads.tsv", TINY)
    run = run_campaign(
        "--output", folder / "out", "--minutes", 2, "--device", "cpu", "--quick",
        "--workloads", table,
    )  # fmt: skip
    assert run.returncode == 0, run.said
    return folder / "out", run.said


def test_a_whole_campaign_packs_everything_and_leaves_nothing_else(whole):
    output, said = whole
    assert sorted(p.name for p in output.iterdir()) == [
        "captures-1.parquet", "items.parquet", "sweeps.parquet",
    ]  # fmt: skip
    assert set(statuses(output).values()) == {"done"}
    assert "37 of 37 items finished" in said


def test_its_sweeps_cover_every_operation_and_ceiling(whole):
    from trioflow.campaign.items import OPERATIONS

    sweeps = read_sweeps(whole[0])
    assert set(OPERATIONS) == set(sweeps["operation"])
    assert {"device_copy", "matmul_ceiling", "host_to_device", "launch"} <= set(sweeps["operation"])
    assert set(sweeps["precision"]) == {"", "fp32", "bf16"}
    assert (sweeps["min_ns"] <= sweeps["median_ns"]).all()
    assert (sweeps["median_ns"] > 0).all()


def test_its_capture_merges_to_a_trace_with_its_step_times(whole, tmp_path):
    (folder,) = unpack_campaign(whole[0], tmp_path)
    trace = merge_trace(folder)
    assert trace.facts.workload == "tiny"
    assert trace.facts.batch == 2
    assert len(trace.facts.step_times_s) == 3
    assert trace.facts.flop > 0
    assert trace.facts.warnings == []


def test_versions_and_device_are_stamped(whole):
    from importlib.metadata import version

    (session,) = read_items(whole[0]).attrs["sessions"]
    machine = session["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["python"] == ".".join(map(str, sys.version_info[:3]))
    assert machine["pandas"] == version("pandas")
    assert machine["device_name"]
    assert {"cuda", "cudnn", "nccl", "driver", "torchvision", "transformers"} <= set(machine)


def test_a_second_call_repeats_nothing(whole, tmp_path, capsys):
    from trioflow.campaign.__main__ import main

    output = tmp_path / "out"
    shutil.copytree(whole[0], output)
    table = write_table(tmp_path / "t.tsv", TINY)
    words = ["--output", str(output), "--minutes", "1", "--device", "cpu", "--quick"]
    assert main([*words, "--workloads", str(table)]) == 0
    said = capsys.readouterr().out
    assert "37 items, 37 finished before" in said
    assert ": done in" not in said
    for name in ("captures-1.parquet", "sweeps.parquet"):
        assert (output / name).read_bytes() == (whole[0] / name).read_bytes()


TERMINATED = """
import os, signal
from trioflow.campaign import call as execute
execute.run_workload = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
"""
"""A call that is told to end as soon as it is inside a workload's capture."""


def test_a_terminated_call_loses_only_what_ran_and_the_next_one_goes_on(table, tmp_path):
    words = ("--minutes", 2, "--device", "cpu", "--quick", "--workloads", table, "--only", "[ct]*")
    run = run_campaign("--output", tmp_path / "out", *words, code=TERMINATED)
    assert run.returncode == 128 + 15
    first = finished(tmp_path / "out")
    assert len(first) == 7 and all(name.startswith("ceiling-") for name in first)
    assert "7 of 8 items finished" in run.said
    resumed = run_campaign("--output", tmp_path / "next", "--resume", tmp_path / "out", *words)
    assert resumed.returncode == 0, resumed.said
    ran = {line.partition(":")[0] for line in resumed.said.splitlines() if ": done in" in line}
    assert ran == {"tiny-b2-fp32"}
    assert "8 of 8 items finished" in resumed.said
    assert first <= set(read_sweeps(tmp_path / "next")["item"]), "what was finished is packed again"
    interrupted = read_items(tmp_path / "out").set_index("item")["interruptions"]
    assert interrupted[interrupted > 0].to_dict() == {"tiny-b2-fp32": 1}
    assert len(read_items(tmp_path / "next").attrs["sessions"]) == 2


KILLED = """
import os
from trioflow.campaign import call as execute
real = execute.run_sweep
def run(item, operation, *rest):
    if operation == "host_to_device":
        os.kill(os.getpid(), 9)
    return real(item, operation, *rest)
execute.run_sweep = run
"""


def test_a_killed_call_leaves_its_finished_items_on_disk(table, tmp_path):
    from trioflow.campaign.packing import State

    words = [
        "--minutes", "1", "--device", "cpu", "--quick", "--workloads", str(table),
        "--only", "ceiling*",
    ]  # fmt: skip
    killed = run_campaign("--output", tmp_path / "out", *words, code=KILLED)
    assert killed.returncode == -9
    assert not (tmp_path / "out" / "items.parquet").exists()
    state = State(tmp_path / "out" / "state")
    assert set(state.results) == {
        "ceiling-device_copy", "ceiling-device_fill", "ceiling-matmul_ceiling-bf16",
    }  # fmt: skip
    assert state.interruptions("ceiling-host_to_device") == 1
    resumed = run_campaign("--output", tmp_path / "next", "--resume", tmp_path / "out", *words)
    assert resumed.returncode == 0, resumed.said
    assert "7 items, 3 finished before" in resumed.said
    assert "7 of 7 items finished" in resumed.said


ENDLESS = """
import time
from trioflow.campaign import call as execute
execute.run_sweep = lambda *_: time.sleep(3600)
"""


def test_a_call_ends_in_time_even_inside_an_item(table, tmp_path):
    words = (
        "--output", tmp_path / "out", "--minutes", "0.1", "--device", "cpu", "--quick",
        "--workloads", table, "--only", "ceiling-device_fill",
    )  # fmt: skip
    run = run_campaign(*words, code=ENDLESS)
    assert run.returncode == 0, run.said
    rows = read_items(tmp_path / "out").set_index("item")
    assert rows.loc["ceiling-device_fill", "status"] == "pending"
    assert rows.loc["ceiling-device_fill", "interruptions"] == 1


def test_a_model_too_large_is_recorded_before_it_is_built(tmp_path):
    from trioflow.campaign.__main__ import main

    table = write_table(tmp_path / "t.tsv", HUGE)
    words = [
        "--output", str(tmp_path / "out"), "--minutes", "1", "--device", "cpu", "--quick",
        "--workloads", str(table), "--only", "huge*",
    ]  # fmt: skip
    assert main(words) == 0
    (row,) = read_items(tmp_path / "out").query("kind == 'workload'").to_dict("records")
    assert row["status"] == "out_of_memory"
    assert json.loads(row["facts"])["batch"] == 1
    assert "weights, gradients and optimizer take" in row["error"]


def test_the_list_names_items_and_times_without_torch(table):
    code = "import sys; sys.modules['torch'] = None; from trioflow.campaign.__main__ import main"
    line = [sys.executable, "-c", f"{code}; main(['--list', '--workloads', {str(table)!r}])"]
    run = subprocess.run(line, capture_output=True, text=True, check=True, cwd=LIBRARY)
    assert "ceiling-device_copy" in run.stdout.splitlines()[0]
    assert "minutes by first guesses" in run.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "x"], "no output folder"),
        (["--output", "o", "--minutes", "0"], "not positive"),
        (["--output", "o", "--files", "1"], "items and sweeps take two"),
        (["--list", "--only", "nothing"], "no item has such a name"),
        (["--unpack", "nowhere", "--output", "o"], "no captures"),
        (["--output", "o", "--resume", "nowhere", "--device", "cpu"], "no campaign here"),
    ],
)
def test_bad_arguments_are_one_sentence(words, message, tmp_path, monkeypatch, capsys):
    from trioflow.campaign.__main__ import main

    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda session: session["machine"].update(device_name="NVIDIA Other"), "NVIDIA Other"),
        (lambda session: session.update(quick=False), "cannot be mixed"),
    ],
)
def test_what_another_device_or_kind_of_call_finished_is_not_mixed_in(
    change, message, tmp_path, table, capsys
):
    from trioflow.campaign.__main__ import main
    from trioflow.campaign.call import describe_machine
    from trioflow.campaign.packing import State

    state = State(tmp_path / "out" / "state")
    session = {"machine": describe_machine("cpu"), "quick": True}
    change(session)
    state.sessions.append(session)
    state.write_sessions()
    words = ["--output", str(tmp_path / "out"), "--device", "cpu", "--quick"]
    assert main([*words, "--workloads", str(table)]) == 2
    assert message in capsys.readouterr().err


def test_a_lost_device_starts_the_command_anew_with_the_time_that_is_left(
    table, tmp_path, monkeypatch
):
    import os

    from trioflow.campaign import call
    from trioflow.campaign.__main__ import main
    from trioflow.campaign.packing import State

    class Anew(Exception):
        pass

    started = []

    def execv(path, words):
        started.append(words)
        raise Anew

    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(os, "closerange", lambda low, high: None)
    monkeypatch.setattr(call, "run_sweep", fail)
    monkeypatch.setattr(call.Executor, "check_device", lambda self: False)
    words = ["--output", str(tmp_path / "out"), "--device", "cpu", "--quick", "--minutes", "1"]
    with pytest.raises(Anew):
        main([*words, "--workloads", str(table)])
    assert list(State(tmp_path / "out" / "state").results) == ["ceiling-device_copy"]
    assert started[0][1:4] == ["-m", "trioflow.campaign", "--output"]
    assert started[0][-1].startswith("--until=")


def test_failed_items_are_tried_again_when_asked(table, tmp_path, monkeypatch, capsys):
    from trioflow.campaign import call as execute
    from trioflow.campaign.__main__ import main

    words = [
        "--output", str(tmp_path / "out"), "--device", "cpu", "--quick", "--minutes", "1",
        "--workloads", str(table), "--only", "ceiling-launch",
    ]  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(execute, "run_sweep", lambda *_: 1 / 0)
        assert main(words) == 0
    assert statuses(tmp_path / "out")["ceiling-launch"] == "failed"
    assert main(words) == 0
    assert statuses(tmp_path / "out")["ceiling-launch"] == "failed"
    assert main([*words, "--retry-failed"]) == 0
    assert statuses(tmp_path / "out")["ceiling-launch"] == "done"


def test_it_needs_nothing_but_torch_and_the_table_packages(table, tmp_path):
    """A GPU machine need not have what only the analysis side uses."""
    code = f"""
import sys
sys.path.insert(0, {str(LIBRARY)!r})
for name in (
    "jsonschema", "scipy", "yaml", "numba", "seaborn", "matplotlib", "sklearn", "snakemake",
    "transformers", "google.protobuf",
):
    sys.modules[name] = None
from trioflow.campaign.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    line = [
        sys.executable, "-c", code, "--output", str(tmp_path / "out"), "--minutes", "1",
        "--device", "cpu", "--quick", "--workloads", str(table), "--only", "[ts]*-fp32*",
    ]  # fmt: skip
    run = subprocess.run(line, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    done = {name for name, status in statuses(tmp_path / "out").items() if status == "done"}
    assert "tiny-b2-fp32" in done
    assert "failed" not in statuses(tmp_path / "out").values()
