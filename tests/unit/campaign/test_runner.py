"""Whole calls of the campaign, in processes of their own, on a CPU."""

import json
import shutil
import subprocess
import sys
import types

import pytest
from trioflow.base.errors import MeasurementError
from trioflow.campaign import call
from trioflow.campaign.call import ATTEMPTS, Budget, DeviceLost, Stopped, run_items
from trioflow.campaign.items import Item
from trioflow.campaign.packing import Result, State, read_items, read_sweeps, unpack_campaign
from trioflow.campaign.sweeps import is_out_of_memory
from trioflow.trace.profile.merge import merge_trace

from .conftest import HUGE, LIBRARY, TINY, run_campaign, write_table

torch = pytest.importorskip("torch", reason="a campaign needs torch (extra [capture])")


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def sweep(name, estimate_s=10.0, operation="gemm"):
    return Item(name, "sweep", 0, estimate_s, operation, {"operation": operation, "points": [1]})


def workload(batch, precision="fp32", name="net"):
    arguments = {"row": {"workload": name, "precision": precision}, "batch": batch}
    return Item(f"{name}-b{batch}-{precision}", "workload", 0, batch / 8, name, arguments)


class Setting:
    """A run with a pretended clock; items take the time that they are told to."""

    def __init__(self, folder, items, seconds=60.0, takes=None, check_device=lambda: True):
        self.clock, self.state, self.ran = Clock(), State(folder), []
        self.items, self.takes, self.check_device = items, takes or {}, check_device
        self.budget = Budget(seconds, seconds, self.clock)

    def execute(self, item, folder):
        assert folder.is_dir()
        self.ran.append(item.name)
        what = self.takes.get(item.name, item.estimate_s)
        if isinstance(what, BaseException):
            raise what
        self.clock.now_s += what
        return Result(), {}

    def run(self):
        return run_items(self.items, self.state, self.execute, self.budget, check_device=self.check_device)

    def estimate(self, item):
        return call.estimate(item, self.items, self.state)


def test_the_budget_is_never_exceeded_and_shorter_items_fill_it(tmp_path):
    items = [sweep(f"s{n}") for n in range(4)] + [sweep("short", 2.0, "softmax")]
    setting = Setting(tmp_path, items, seconds=22)
    setting.run()
    assert setting.ran == ["s0", "short"], "another of 10 s may take 12.5 s of the 12 s left"
    assert setting.clock.now_s <= 22


def test_items_run_in_order_of_value(tmp_path):
    setting = Setting(tmp_path, [sweep(f"s{n}") for n in range(3)])
    setting.run()
    assert list(setting.state.results) == ["s0", "s1", "s2"] == setting.ran


def test_slow_items_raise_the_estimates_of_their_like_alone(tmp_path):
    items = [sweep("s0"), sweep("s1"), sweep("other", operation="softmax")]
    setting = Setting(tmp_path, items, seconds=50, takes={"s0": 30.0})
    assert setting.run() == []
    assert setting.ran == ["s0", "other"], "s1 is now expected to take 30 s of 20 s"


def test_an_item_longer_than_any_call_is_said(tmp_path):
    assert Setting(tmp_path, [sweep("long", 100.0)], seconds=60).run() == ["long"]


def test_the_estimate_of_a_workload_follows_its_other_batch(tmp_path):
    first, second = workload(32), workload(128)
    setting = Setting(tmp_path, [first, second])
    setting.state.store(first.name, Result(time_ns=8_000_000_000))
    assert setting.estimate(second) == 32.0, "twice its guess, as the other batch"
    assert setting.estimate(workload(128, name="other")) == 16.0


def test_memory_that_runs_out_ends_the_ladder_of_its_precisions(tmp_path):
    full = MemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    items = [
        workload(128),
        workload(256),
        workload(32),
        workload(256, "tf32"),
        workload(128, "bf16"),
        workload(256, name="other"),
    ]
    setting = Setting(tmp_path, items, seconds=600, takes={"net-b128-fp32": full})
    setting.run()
    result = setting.state.results["net-b128-fp32"]
    assert result.status == "out_of_memory"
    assert result.facts == {"workload": "net", "batch": 128, "precision": "fp32"}
    assert "Tried to allocate 2 GiB" in result.error
    assert setting.ran == ["net-b128-fp32", "net-b32-fp32", "net-b128-bf16", "other-b256-fp32"]
    skipped = setting.state.results["net-b256-tf32"]
    assert (skipped.status, skipped.error) == ("skipped", "batch 128 already ran out of memory")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (type("OutOfMemoryError", (RuntimeError,), {})("x"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("bad shape"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, expected):
    assert is_out_of_memory(error) is expected


def test_one_failing_item_is_recorded_and_the_rest_goes_on(tmp_path, capsys):
    items = [sweep("bad"), sweep("good")]
    setting = Setting(tmp_path, items, takes={"bad": ValueError("no such layer")})
    setting.run()
    assert {n: r.status for n, r in setting.state.results.items()} == {"bad": "failed", "good": "done"}
    assert "ValueError: no such layer" in setting.state.results["bad"].error
    assert "test_runner.py, line" in setting.state.results["bad"].error
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("bad: failed") and "no such layer" in line for line in lines)


def test_finished_items_are_not_repeated(tmp_path):
    items = [sweep("s0"), sweep("s1"), sweep("bad")]
    Setting(tmp_path, items, seconds=15).run()
    again = Setting(tmp_path, items, takes={"bad": ValueError("x")})
    again.run()
    assert again.ran == ["s1", "bad"]
    third = Setting(tmp_path, items)
    assert third.run() == third.ran == []


def test_a_stop_loses_only_the_item_in_flight_and_is_remembered(tmp_path):
    items = [sweep("s0"), sweep("s1"), sweep("s2")]
    setting = Setting(tmp_path, items, takes={"s1": Stopped()})
    with pytest.raises(Stopped):
        setting.run()
    state = State(tmp_path)
    assert list(state.results) == ["s0"]
    assert [state.interruptions(name) for name in ("s0", "s1", "s2")] == [0, 1, 0]
    assert not list(tmp_path.glob(".scratch-*"))


def test_an_item_in_which_calls_end_is_given_up_and_tried_again_when_asked(tmp_path):
    for _ in range(ATTEMPTS):
        State(tmp_path).begin("s0")  # and nothing after it: the process is gone
    setting = Setting(tmp_path, [sweep("s0"), sweep("s1")])
    setting.run()
    assert setting.ran == ["s1"]
    assert "2 calls ended while it ran" in setting.state.results["s0"].error
    setting.state.forget("failed")
    setting.run()
    assert setting.ran == ["s1", "s0"]


def test_an_item_that_killed_the_process_once_is_tried_again(tmp_path):
    State(tmp_path).begin("s0")
    setting = Setting(tmp_path, [sweep("s0")])
    setting.run()
    assert setting.ran == ["s0"]
    assert State(tmp_path).interruptions("s0") == 0


def test_a_lost_device_ends_the_process_after_recording_the_item(tmp_path):
    items = [sweep("bad"), sweep("next")]
    takes = {"bad": RuntimeError("CUDA error: an illegal memory access was encountered")}
    setting = Setting(tmp_path, items, takes=takes, check_device=lambda: False)
    with pytest.raises(DeviceLost):
        setting.run()
    assert State(tmp_path).results["bad"].status == "failed"
    assert setting.ran == ["bad"]


def test_a_failed_item_keeps_no_memory(tmp_path):
    import gc
    import weakref

    class Block:
        pass

    kept = []

    def execute(item, folder):
        block = Block()
        kept.append(weakref.ref(block))
        raise RuntimeError("out of memory")

    alive = []

    def check_device():
        gc.collect()
        alive.append(kept[0]() is not None)
        return True

    setting = Setting(tmp_path, [sweep("s0")], check_device=check_device)
    setting.execute = execute
    setting.run()
    assert alive == [False], "the frames of the failure hold its tensors"


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
    run = run_campaign("--output", folder / "out", "--minutes", 2, "--device", "cpu", "--quick", "--workloads", table)
    assert run.returncode == 0, run.said
    return folder / "out", run.said


def test_a_whole_campaign_packs_everything_and_leaves_nothing_else(whole):
    output, said = whole
    assert sorted(p.name for p in output.iterdir()) == ["captures-1.parquet", "items.parquet", "sweeps.parquet"]
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

    words = ["--minutes", "1", "--device", "cpu", "--quick", "--workloads", str(table), "--only", "ceiling*"]
    killed = run_campaign("--output", tmp_path / "out", *words, code=KILLED)
    assert killed.returncode == -9
    assert not (tmp_path / "out" / "items.parquet").exists()
    state = State(tmp_path / "out" / "state")
    assert set(state.results) == {"ceiling-device_copy", "ceiling-device_fill", "ceiling-matmul_ceiling-bf16"}
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
        "--output",
        tmp_path / "out",
        "--minutes",
        "0.1",
        "--device",
        "cpu",
        "--quick",
        "--workloads",
        table,
        "--only",
        "ceiling-device_fill",
    )
    run = run_campaign(*words, code=ENDLESS)
    assert run.returncode == 0, run.said
    rows = read_items(tmp_path / "out").set_index("item")
    assert rows.loc["ceiling-device_fill", "status"] == "pending"
    assert rows.loc["ceiling-device_fill", "interruptions"] == 1


def words_of(tmp_path, table) -> list[str]:
    """Words of a minute's quick campaign on the CPU; what is to run follows."""
    words = f"--output {tmp_path / 'out'} --minutes 1 --device cpu --quick --workloads {table} --only"
    return words.split()


def test_a_model_too_large_is_recorded_before_it_is_built(tmp_path):
    from trioflow.campaign.__main__ import main

    table = write_table(tmp_path / "t.tsv", HUGE)
    words = [*words_of(tmp_path, table), "huge*"]
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
def test_what_another_device_or_kind_of_call_finished_is_not_mixed_in(change, message, tmp_path, table, capsys):
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


def test_a_lost_device_starts_the_command_anew_with_the_time_that_is_left(table, tmp_path, monkeypatch):
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
        "--output",
        str(tmp_path / "out"),
        "--device",
        "cpu",
        "--quick",
        "--minutes",
        "1",
        "--workloads",
        str(table),
        "--only",
        "ceiling-launch",
    ]
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
    line = [sys.executable, "-c", code, *words_of(tmp_path, table), "[ts]*-fp32*"]
    run = subprocess.run(line, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    done = {name for name, status in statuses(tmp_path / "out").items() if status == "done"}
    assert "tiny-b2-fp32" in done
    assert "failed" not in statuses(tmp_path / "out").values()


@pytest.fixture
def gpu(monkeypatch):
    """A pretended GPU of a torch that does not name the cache and has no NCCL."""
    properties = types.SimpleNamespace(multi_processor_count=132, total_memory=150_000_000_000)
    cuda = types.SimpleNamespace(
        current_device=lambda: 0,
        get_device_properties=lambda _: properties,
        get_device_name=lambda: "NVIDIA Pretended",
        get_device_capability=lambda: (9, 0),
        device_count=lambda: 1,
    )
    monkeypatch.setattr(call.torch, "cuda", cuda)
    return cuda


def test_a_gpu_is_described_by_what_this_torch_knows(gpu, monkeypatch):
    monkeypatch.setattr(call, "_query", lambda *names: "580.1")
    facts = call.describe_machine("cuda")
    assert facts["device_name"] == "NVIDIA Pretended"
    assert facts["sm_count"] == 132
    assert facts["capability"] == "9.0"
    assert facts["l2_cache_bytes"] is None
    assert facts["nccl"] is None
    assert facts["driver"] == "580.1"


def test_a_device_that_cannot_be_used_is_one_sentence(gpu):
    def refuse(_):
        raise RuntimeError("CUDA driver initialization failed")

    gpu.get_device_properties = refuse
    with pytest.raises(MeasurementError, match="cannot be used: CUDA driver initialization failed"):
        call.describe_machine("cuda")


def test_clocks_are_paired_with_their_names_and_empty_without_the_tool(monkeypatch):
    values = "1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 30, 75.1 W, 700.00 W"
    monkeypatch.setattr(call, "_query", lambda *names: values)
    clocks = call.read_clocks("cuda")
    assert clocks["clocks.sm"] == "1980 MHz"
    assert clocks["power.limit"] == "700.00 W"
    assert call.read_clocks("cpu") == {}

    def missing(*names):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(call, "_query", missing)
    assert call.read_clocks("cuda") == {}
