"""Capture one training step on the device at hand: profiles, step times and environment; `capture_workload` is the door.

The step (`TrainingStep`) is captured on one rank and measured on many. The process that is measured is alone on its
machine (`exclusive_measurement`), with one thread on a core of its own, and memory that stays mapped.
"""

import ctypes
import gzip
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function

from trioflow.base.errors import InputError, MeasurementError
from trioflow.base.provenance import atomic_path, host_environment, stamp, write_json
from trioflow.tables import PHASES
from trioflow.trace.profile.events import MODULE, PARAMETERS, STEP
from trioflow.trace.workloads.build import Workload, build_workload

_SCALING = "Optimizer.step#gradient scaling"
"""Annotation of fp16's unscaling and checking; it counts as the optimizer's, as its name says."""


def call_model(model: torch.nn.Module, inputs: Any) -> Any:
    """Call a model: a tuple of inputs holds its arguments, a dict its named ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


class TrainingStep:
    """One training step on synthetic data, of a model or a parallel wrapper of it; capture and measurement run the same.

    ``batch``: samples on this rank of each of ``micro_steps``, whose gradients are added up. Of the last step:
    ``marks``, phase and micro-batch, when each forward (with loss), backward and the optimizer began and ended, and ``phases_ns``, their sums
    [ns] on the host's clock.
    """

    def __init__(
        self,
        workload: Workload,
        model: torch.nn.Module,
        batch: int,
        device: torch.device,
        seed: int,
        micro_steps: int = 1,
    ) -> None:
        self.workload, self.model, self.device = workload, model, device
        self.inputs, self.targets = workload.make_batch(batch, seed, str(device))
        self.optimizer = workload.make_optimizer(model.parameters())
        self.scaler = workload.precision.make_scaler(device)
        self.micro_steps = micro_steps
        self.marks: list[tuple[str, int, int, int]] = []

    @property
    def phases_ns(self) -> dict[str, int]:
        """The last step's phases [ns]."""
        spans = dict.fromkeys(PHASES if self.marks else (), 0)
        for phase, _, start_ns, end_ns in self.marks:
            spans[phase] += end_ns - start_ns
        return spans

    def __call__(self) -> None:
        """Run the step."""
        self.marks = []
        with self.workload.precision.arithmetic():
            start = time.perf_counter_ns()
            self.optimizer.zero_grad()
            for number in range(self.micro_steps):
                with self.exchange(number == self.micro_steps - 1):
                    with self.workload.precision.forward(self.device):
                        outputs = call_model(self.model, self.inputs)
                        loss = self.workload.loss(outputs, self.targets)
                        loss = self.scaler.scale(loss / self.micro_steps if self.micro_steps > 1 else loss)
                    # Outputs kept any longer would stand beside the gradients.
                    del outputs
                    middle = time.perf_counter_ns()
                    loss.backward()
                end = time.perf_counter_ns()
                self.marks += [("forward", number, start, middle), ("backward", number, middle, end)]
                start = end
            self._update()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.marks.append(("optimizer", 0, start, time.perf_counter_ns()))

    def exchange(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-step; wrappers exchange gradients in it, or keep them until the ``last``."""
        return nullcontext()

    def _update(self) -> None:
        """Run the optimizer; with scaled gradients only if all of them are finite."""
        if not self.scaler.is_enabled():
            self.optimizer.step()
            return
        with record_function(_SCALING):
            self.scaler.step(self.optimizer)
            self.scaler.update()


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER_BYTES = 2**31 - 1


def keep_freed_memory() -> list[str]:
    """Make the C allocator keep freed memory for the rest of the process; return what is missing, in words.

    glibc returns large blocks at once, so that every step touches fresh pages: up to a third of a
    step here. GPUs' caching allocators keep theirs too.
    """
    try:
        library = ctypes.CDLL(None)
        done = library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)
    except (OSError, AttributeError, TypeError):
        done = False
    return [] if done else ["the C allocator returns freed memory: page faults add to step times"]


@contextmanager
def pinned_to(core_index: int) -> Iterator[tuple[int | None, list[str]]]:
    """Run one thread on a core of its own, where allowed: yields it, or None, and warnings for the report."""
    warnings: list[str] = []
    threads, core, before = torch.get_num_threads(), None, None
    torch.set_num_threads(1)
    if hasattr(os, "sched_getaffinity"):
        before = sorted(os.sched_getaffinity(0))
        core = before[core_index % len(before)]
        if core_index >= len(before):
            warnings.append(f"only {len(before)} core(s) available: ranks share core {core}")
        try:
            os.sched_setaffinity(0, {core})
        except OSError as error:
            warnings.append(f"could not pin the process to core {core}: {error.strerror}")
            core = None
    else:
        warnings.append("this system has no processor affinity: the process is not pinned")
    try:
        yield core, warnings
    finally:
        torch.set_num_threads(threads)
        if before is not None and core is not None:
            os.sched_setaffinity(0, set(before))


@contextmanager
def exclusive_measurement(what: str) -> Iterator[None]:
    """Hold the machine's measurement lock, which the system frees with the process (``what`` runs, for messages).

    ``TRIOFLOW_LOCK_FOLDER`` moves it, for tests. Raises MeasurementError when another measurement
    of the user runs.
    """
    try:
        import fcntl
    except ImportError:  # a system without file locks: nothing to hold
        yield
        return
    owner = os.getuid() if hasattr(os, "getuid") else 0
    folder = os.environ.get("TRIOFLOW_LOCK_FOLDER") or tempfile.gettempdir()
    path = Path(folder) / f"trioflow-measurement-{owner}.lock"
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise MeasurementError(
                f"{what}: another capture or measurement is running on this machine; "
                "wait for it, since two at once would disturb each other's times"
            ) from None
        yield


_HEADS = ("num_attention_heads", "num_key_value_heads")
"""What configurations of transformers call their heads."""


@contextmanager
def module_annotations(model: torch.nn.Module) -> Iterator[None]:
    """Enclose every module's forward in an annotation that carries its dotted path."""
    with ExitStack() as hooks:
        spans: list[Any] = []

        def enter(path: str) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                spans.append(record_function(f"{MODULE}{path}"))
                spans[-1].__enter__()

            return hook

        def leave(*_: Any) -> None:
            spans.pop().__exit__(None, None, None)

        for path, module in model.named_modules():
            if path:
                hooks.callback(module.register_forward_pre_hook(enter(path)).remove)
                hooks.callback(module.register_forward_hook(leave).remove)
        yield


def _profile_steps(step: Callable[[], None], steps: int, path: Path, device: str) -> None:
    """Profile some steps without shapes, each inside its own annotation."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            with record_function(STEP):
                step()
    _export(profiler, path)


def _export(profiler: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(plain))
        _compress(plain, path)


def _compress(plain: Path, path: Path) -> None:
    with (
        atomic_path(path) as target,
        plain.open("rb") as source,
        target.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed,
    ):
        shutil.copyfileobj(source, packed)


def profile_with_tensors(step: Callable[[], None], model: torch.nn.Module, nodes: Path, device: str = "cpu") -> Any:
    """Return the profiler of one step with shapes and modules; its execution trace goes into ``nodes``."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    observer = ExecutionTraceObserver().register_callback(str(nodes))
    with (
        module_annotations(model),
        profile(activities=activities, record_shapes=True, execution_trace_observer=observer) as profiler,
        record_function(STEP),
    ):
        # Nothing else tells a frozen parameter from an input.
        with _RecordFunctionFast(PARAMETERS, list(model.parameters())):
            pass
        step()
    return profiler


def choose_device(device: str) -> str:
    """Return ``cpu`` or ``cuda``; ``auto`` takes CUDA where present. Raises InputError when it is absent or unknown."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: no CUDA device is present", fix="use --device cpu")
    if device not in ("cpu", "cuda"):
        raise InputError(f"unknown device {device!r}", fix="use cpu or cuda")
    return device


def device_name(device: str) -> str:
    """Return the name of the device as its driver or system gives it."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{host_environment()['cpu_model']}, one core"


def describe_model(workload: Workload) -> dict[str, Any]:
    """Return the parameters and buffers of the model, in PyTorch's order."""
    model = workload.model
    return {
        "parameters": [
            {"name": n, "shape": list(p.shape), "elem_bytes": p.element_size(), "frozen": not p.requires_grad}
            # FSDP2 cuts the first dimension unless a parameter's module asks for another.
            | (
                {"shard_dimension": cut}
                if (cut := getattr(model.get_submodule(n.rpartition(".")[0]), "shard_dimension", 0))
                else {}
            )
            for n, p in model.named_parameters()
        ],
        "buffers": [
            {"name": n, "shape": list(b.shape), "elem_bytes": b.element_size()} for n, b in model.named_buffers()
        ],
        "units": [{"name": n, "modules": m} for n, m in workload.units.items()],
        "tensor_split": workload.tensor_split,
        "attention_heads": _list_heads(model),
    }


def _list_heads(model: torch.nn.Module) -> list[int]:
    """Return the heads of queries and of keys that a model's configuration says, each number once."""
    config = getattr(model, "config", None)
    counts = (getattr(config, name, None) for name in _HEADS)
    return sorted({count for count in counts if isinstance(count, int)})


def capture_workload(
    row: Mapping[str, Any],
    batch: int,
    folder: str | Path,
    *,
    device: str = "auto",
    warm_up: int = 5,
    timed_steps: int = 15,
    profiled_steps: int = 7,
    seed: int = 0,
) -> None:
    """Capture one training step of a workload on one rank.

    Writes ``kineto.json.gz`` and ``execution_trace.json.gz`` (one step with shapes, modules and
    tensors), ``kineto_steps.json.gz`` (several profiled lightly, whose medians carry less of the
    profiler) and ``environment.json`` (un-profiled step times, the model, the machine).
    ``timed_steps``: half before, half after the profiler, so that a drift shows. Raises InputError
    when batch, row or device is unusable.
    """
    if batch < 1:
        raise InputError(f"batch {batch} is not positive")
    device = choose_device(device)
    folder = Path(folder)
    with exclusive_measurement("capture"), pinned_to(0) as (core, warnings):
        warnings.extend(keep_freed_memory())
        workload = build_workload(row, seed)
        model_facts = describe_model(workload)
        place = torch.device(device)
        step = TrainingStep(workload, workload.model.to(place), batch, place, seed)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(warm_up):
            step()
        times = [_time(step) for _ in range((timed_steps + 1) // 2)]
        _profile_steps(step, 1, folder / "kineto_steps.json.gz", device)  # first use is slow
        _profile_steps(step, profiled_steps, folder / "kineto_steps.json.gz", device)
        times += [_time(step) for _ in range(timed_steps // 2)]
        with tempfile.TemporaryDirectory() as temporary:
            nodes = Path(temporary) / "nodes.json"
            _export(profile_with_tensors(step, workload.model, nodes, device), folder / "kineto.json.gz")
            _compress(nodes, folder / "execution_trace.json.gz")
    facts = {
        **stamp(torch=str(torch.__version__), seed=seed),
        "workload": str(row["workload"]),
        "row": {key: str(value) for key, value in row.items()},
        "batch": batch,
        "device": device,
        "device_name": device_name(device),
        "core": core,
        "threads": 1,
        "precision": str(row.get("precision", "fp32")),
        "optimizer": str(row["optimizer"]),
        "warm_up": warm_up,
        "step_time_s": statistics.median(times),
        "step_times_s": times,
        "host": host_environment(),
        "warnings": warnings,
    }
    if device == "cuda":
        facts["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        facts["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    write_json(folder / "environment.json", facts | model_facts)


def _time(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
