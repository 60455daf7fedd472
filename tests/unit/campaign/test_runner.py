import pytest

torch = pytest.importorskip("torch", reason="a campaign needs torch (extra [capture])")

from trioflow.campaign import call  # noqa: E402
from trioflow.campaign.call import ATTEMPTS, Budget, DeviceLost, Stopped, run_items  # noqa: E402
from trioflow.campaign.items import Item  # noqa: E402
from trioflow.campaign.packing import Result, State  # noqa: E402
from trioflow.campaign.sweeps import is_out_of_memory  # noqa: E402


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
        return run_items(
            self.items, self.state, self.execute, self.budget, check_device=self.check_device
        )

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
    assert {n: r.status for n, r in setting.state.results.items()} == {
        "bad": "failed",
        "good": "done",
    }
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
