"""Timing the points of one sweep, and naming the kernels that they run.

Timing one piece of work: with events on a CUDA device, with the clock on a CPU.

The operations that sweeps time, built for a size and an element type.
"""

import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from trioflow.base.errors import InputError
from trioflow.base.units import ns_to_s, s_to_ns, us_to_ns
from trioflow.trace.profile.events import DEVICE, LAUNCHES
from trioflow.trace.workloads.precision import single_precision

Call = Callable[[], Any]

REPEATS = (5, 24)
"""Timed repeats at least and at most."""
BATCH = 8
"""Repeats handed to the device at once."""
BUDGET_S, QUICK_BUDGET_S = 0.06, 0.002
"""Time for the repeats of one piece of work, where the least number allows it [s]."""
_HOLD_LIMIT_S = 0.1
_CYCLES_PER_S = 2.0e9
"""At least the clock of current devices: a hold is then at least as long as wanted."""
_FLUSH_BYTES = 256 << 20
"""More than any second-level cache so far; used where torch does not say its size."""


@dataclass(frozen=True)
class Timing:
    """Repeated times of one piece of work."""

    times_ns: list[int]  # time of each repeat [ns]
    host_ns: int  # host time to hand the work over once [ns]
    timer: str

    def columns(self) -> dict[str, Any]:
        """Return the timing's columns of the sweep table."""
        low, median, high = statistics.quantiles(self.times_ns, n=4, method="inclusive")
        return {
            "repeats": len(self.times_ns),
            "median_ns": round(median),
            "min_ns": min(self.times_ns),
            "lower_quartile_ns": round(low),
            "upper_quartile_ns": round(high),
            "host_ns": self.host_ns,
            "timer": self.timer,
        }


class HostStopwatch:
    """Times work that is over when it returns, or when ``finish`` has waited for it, in ``budget_s`` [s]."""

    def __init__(self, budget_s: float = BUDGET_S, finish: Call = lambda: None) -> None:
        self.budget_s, self.finish = budget_s, finish

    def measure(self, work: Call) -> Timing:
        """Time some work after running it once."""
        work()
        self.finish()
        first_ns = self._once(work)
        repeats = choose_repeats(ns_to_s(first_ns), self.budget_s)
        times = [self._once(work) for _ in range(repeats)]
        return Timing(times, round(statistics.median(times)), "perf_counter")

    def _once(self, work: Call) -> int:
        start = time.perf_counter_ns()
        work()
        self.finish()
        return time.perf_counter_ns() - start


class CudaStopwatch:
    """Times work on the current CUDA stream with events, in ``budget_s`` [s].

    The device is held busy while the host hands over a batch, so that it never waits between two
    kernels of one repeat; the second-level cache is overwritten before each.
    """

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self.budget_s = budget_s
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # Named by torch from about 2.5 on.
        cache_bytes = int(getattr(properties, "L2_cache_size", 0) or 0)
        size_bytes = 2 * cache_bytes if cache_bytes else _FLUSH_BYTES
        self.scratch = torch.empty(size_bytes, dtype=torch.int8, device="cuda")
        self.events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS[1])
        ]
        # An event is made when it is first recorded, which takes longer.
        for pair in self.events:
            for event in pair:
                event.record()
        torch.cuda.synchronize()

    def measure(self, work: Call) -> Timing:
        """Time some work after running it twice."""
        work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        host_s = time.perf_counter() - start
        torch.cuda.synchronize()
        whole_s = time.perf_counter() - start
        repeats, times = choose_repeats(whole_s, self.budget_s), list[int]()
        for first in range(0, repeats, BATCH):
            batch = self.events[: min(BATCH, repeats - first)]
            # Flushing and events take the host some 20 us a repeat as well.
            hold_device((host_s + 2e-5) * len(batch) * 1.3 + 1e-4)
            for before, after in batch:
                self.scratch.zero_()
                before.record()
                work()
                after.record()
            torch.cuda.synchronize()
            # Torch says milliseconds.
            times += [s_to_ns(before.elapsed_time(after) * 1e-3) for before, after in batch]
        return Timing(times, s_to_ns(host_s), "cuda_event")


def hold_device(time_s: float) -> None:
    """Keep the current stream busy for about some time [s], without any memory traffic."""
    # Private in all of torch 2.4 to 2.13; without it short work is timed as the host launches it.
    spin = getattr(torch.cuda, "_sleep", None)
    if spin is not None:
        spin(int(min(time_s, _HOLD_LIMIT_S) * _CYCLES_PER_S))


def choose_repeats(once_s: float, budget_s: float) -> int:
    """Return how often to repeat work that takes so long once [s], within a budget [s]."""
    least, most = REPEATS
    return max(least, min(most, int(budget_s / max(once_s, 1e-9))))


Point = Mapping[str, Any]


@dataclass
class Case:
    """One operation of one size, ready to run."""

    run: Callable[[], Any]  # runs it forward and returns its output, or None
    inputs: list[Tensor]  # what it reads; those that require a gradient are differentiated
    # Floating-point operations forward, multiply and add counted apart; None where no formula
    # applies.
    flop: int | None = None
    phase: str = "forward"
    outputs: list[Tensor] = field(default_factory=list)  # what it writes, where it returns nothing
    on_host: bool = False  # timed by the host's clock: a copy of pageable memory keeps the host


@dataclass
class Work:
    """One phase of a case: what is timed."""

    phase: str
    run: Callable[[], Any]
    flop: int | None
    read_bytes: int
    write_bytes: int
    on_host: bool = False


def list_work(case: Case) -> Iterator[Work]:
    """Yield a case's phases: forward, and backward where it has gradients.

    Backward reads the output's gradient and the inputs, writes theirs, and costs twice the FLOPs
    where all have one.
    """
    output = case.run()
    outputs = [output] if isinstance(output, Tensor) else case.outputs
    read, written = _bytes(case.inputs), _bytes(outputs)
    yield Work(case.phase, case.run, case.flop, read, written, case.on_host)
    wanted = [t for t in case.inputs if t.requires_grad]
    if not wanted or not isinstance(output, Tensor):
        return
    gradient = torch.randn_like(output)

    def backward() -> Any:
        return torch.autograd.grad(output, wanted, gradient, retain_graph=True)

    flop = None if case.flop is None else 2 * case.flop
    yield Work("backward", backward, flop, _bytes([gradient, *case.inputs]), _bytes(wanted))


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def build_case(operation: str, point: Point, dtype: torch.dtype, device: str) -> Case:
    """Build an operation on random data; InputError where it is unknown, or this torch lacks what the point asks for."""
    if operation not in _BUILDERS:
        raise InputError(f"unknown operation {operation!r}", fix=f"use one of {', '.join(_BUILDERS)}")
    return _BUILDERS[operation](point, Data(dtype, device))


@dataclass
class Data:
    """Makes random tensors on the device."""

    dtype: torch.dtype
    device: str

    def floats(self, *shape: int, grad: bool = True) -> Tensor:
        """Return normal values; zeros would run faster than real data on some devices."""
        made = torch.randn(shape, dtype=self.dtype, device=self.device)
        return made.requires_grad_() if grad else made

    def indices(self, limit: int, *shape: int) -> Tensor:
        """Return whole numbers below a limit."""
        return torch.randint(limit, shape, device=self.device)


def _conv2d(p: Point, data: Data) -> Case:
    x = data.floats(p["batch"], p["channels"], p["height"], p["width"], grad=False)
    shape = (p["outputs"], p["channels"] // p["groups"], p["kernel"], p["kernel"])
    weight = data.floats(*shape, grad=False)
    if p["layout"] == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
        weight = weight.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    weight.requires_grad_()
    step, padding = p["stride"], p["padding"]
    high = (p["height"] + 2 * padding - p["kernel"]) // step + 1
    wide = (p["width"] + 2 * padding - p["kernel"]) // step + 1
    flop = 2 * p["batch"] * high * wide * weight.numel()
    run = lambda: F.conv2d(x, weight, None, step, padding, 1, p["groups"])  # noqa: E731
    return Case(run, [x, weight], flop)


_BACKENDS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH", "cudnn": "CUDNN_ATTENTION"}


def choose_backend(name: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what restricts attention to a backend while it is entered; InputError where this torch has none such."""
    if name == "default":
        return nullcontext
    # Not part of every torch's `import torch`; the cuDNN backend is there from 2.5 on.
    attention = importlib.import_module("torch.nn.attention")
    backend = getattr(attention.SDPBackend, _BACKENDS[name], None)
    if backend is None:
        raise InputError(f"this torch has no attention backend {name!r}")
    return lambda: attention.sdpa_kernel(backend)


def _attention(p: Point, data: Data) -> Case:
    restrict = choose_backend(p["backend"])
    shape = (p["batch"], p["heads"], p["sequence"], p["head_width"])
    q, k, v = (data.floats(*shape) for _ in range(3))

    def run() -> Tensor:
        with restrict():
            return F.scaled_dot_product_attention(q, k, v, is_causal=p["causal"])

    # The whole square counts, as in PyTorch's own counter: a causal kernel may do half of it.
    flop = 4 * p["batch"] * p["heads"] * p["sequence"] ** 2 * p["head_width"]
    return Case(run, [q, k, v], flop)


def _batch_norm(p: Point, data: Data) -> Case:
    x = data.floats(p["batch"], p["channels"], p["height"], p["width"])
    # Under autocast weights and running statistics stay in single precision.
    own = Data(torch.float32, data.device)
    weight, bias = own.floats(p["channels"]), own.floats(p["channels"])
    mean = torch.zeros(p["channels"], device=data.device)
    variance = torch.ones(p["channels"], device=data.device)
    run = lambda: F.batch_norm(x, mean, variance, weight, bias, training=True)  # noqa: E731
    return Case(run, [x, weight, bias])


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "silu": F.silu,
    "copy": torch.clone,
    "dropout": lambda x: F.dropout(x, 0.1, training=True),
    "cast": lambda x: x.to(torch.bfloat16 if x.dtype == torch.float32 else torch.float32),
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"add": torch.add, "mul": torch.mul}


def _elementwise(p: Point, data: Data) -> Case:
    x, name = data.floats(p["elements"]), p["function"]
    if name in _UNARY:
        return Case(lambda: _UNARY[name](x), [x])
    y = data.floats(p["elements"])
    return Case(lambda: _BINARY[name](x, y), [x, y])


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "mean_rows": lambda x: x.mean(1),
    "sum_rows": lambda x: x.sum(1),
    "sum_columns": lambda x: x.sum(0),
    "amax": lambda x: x.amax(1),
    "norm": torch.linalg.vector_norm,
}


def _cat(p: Point, data: Data) -> Case:
    parts = [data.floats(p["elements"]) for _ in range(p["tensors"])]
    return Case(lambda: torch.cat(parts), parts)


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps, **ways: torch.optim.SGD(ps, lr=1e-3, momentum=0.9, **ways),
    "adam": lambda ps, **ways: torch.optim.Adam(ps, lr=1e-4, **ways),
    "adamw": lambda ps, **ways: torch.optim.AdamW(ps, lr=1e-4, **ways),
}
_STATES = {"sgd": 1, "adam": 2, "adamw": 2}
_WAYS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}


def _optimizer(p: Point, data: Data) -> Case:
    weights = [data.floats(p["elements"]) for _ in range(p["tensors"])]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    # A fused implementation that this version lacks raises here, and the point is recorded so.
    optimizer = _OPTIMIZERS[p["optimizer"]](weights, **_WAYS[p["implementation"]])
    optimizer.step()  # makes the state
    states = weights * _STATES[p["optimizer"]]
    gradients = [w.grad for w in weights if w.grad is not None]
    return Case(optimizer.step, [*weights, *gradients, *states], phase="optimizer", outputs=weights + states)


def _copy(source: str, target: str) -> Callable[[Point, Data], Case]:
    """Return what builds a copy between places, ``host`` (pinned or pageable memory) or ``device``."""

    def build(p: Point, data: Data) -> Case:
        pinned, places = bool(p.get("pinned")), {"host": "cpu", "device": data.device}
        read, written = (
            torch.zeros(p["size_bytes"], dtype=torch.uint8, device=places[place], pin_memory=pinned and place == "host")
            for place in (source, target)
        )
        run = lambda: written.copy_(read, non_blocking=pinned)  # noqa: E731
        return Case(run, [read], phase="copy", on_host=source != target)

    return build


def _fill(p: Point, data: Data) -> Case:
    written = torch.zeros(p["size_bytes"], dtype=torch.uint8, device=data.device)
    return Case(lambda: written.fill_(1), [], phase="copy")


def _launch(p: Point, data: Data) -> Case:
    one = torch.zeros(1, device=data.device)

    def run() -> None:
        for _ in range(p["launches"] if p["kernel"] == "add" else 0):
            one.add_(1)

    return Case(run, [one], phase="launch", outputs=[one])


def _of(
    sizes: tuple[tuple[str, ...], ...],
    function: Callable[..., Tensor],
    flop: Callable[[Point], int] = lambda p: 0,
    grad: bool = True,
) -> Callable[[Point, Data], Case]:
    """Return a builder of cases that call ``function`` on the point and on tensors.

    ``sizes``: for each tensor the names of its sizes; a tensor of whole numbers has ``<`` and the name of their upper
    limit first. ``flop``: 0 where no formula applies.
    """

    def build(p: Point, data: Data) -> Case:
        inputs = [
            data.indices(p[names[0][1:]], *(p[name] for name in names[1:]))
            if names[0].startswith("<")
            else data.floats(*(p[name] for name in names), grad=grad)
            for names in sizes
        ]
        return Case(lambda: function(p, *inputs), inputs, flop(p) or None)

    return build


_ROWS, _IMAGES = ("rows", "width"), ("batch", "channels", "height", "width")
_GEMM = _of(
    (("m", "k"), ("k", "n")), lambda p, a, b: torch.mm(a, b), lambda p: int(2 * p["m"] * p["n"] * p["k"]), grad=False
)
_BUILDERS: dict[str, Callable[[Point, Data], Case]] = {
    "device_copy": _copy("device", "device"),
    "device_fill": _fill,
    "matmul_ceiling": _GEMM,
    "host_to_device": _copy("host", "device"),
    "device_to_host": _copy("device", "host"),
    "launch": _launch,
    "gemm": _GEMM,
    "bmm": _of(
        (("b", "m", "k"), ("b", "k", "n")),
        lambda p, a, b: torch.bmm(a, b),
        lambda p: int(2 * p["b"] * p["m"] * p["n"] * p["k"]),
        grad=False,
    ),
    "linear": _of(
        (("tokens", "inputs"), ("outputs", "inputs"), ("outputs",)),
        lambda p, x, w, b: F.linear(x, w, b),
        lambda p: int(2 * p["tokens"] * p["inputs"] * p["outputs"]),
    ),
    "conv2d": _conv2d,
    "attention": _attention,
    "layer_norm": _of((_ROWS, _ROWS[1:], _ROWS[1:]), lambda p, x, w, b: F.layer_norm(x, (p["width"],), w, b)),
    "softmax": _of((_ROWS,), lambda p, x: F.softmax(x, -1)),
    "batch_norm": _batch_norm,
    "elementwise": _elementwise,
    "reduction": _of((_ROWS,), lambda p, x: _REDUCTIONS[p["function"]](x)),
    "embedding": _of(
        (("<vocabulary", "tokens"), ("vocabulary", "width")), lambda p, tokens, table: F.embedding(tokens, table)
    ),
    "cross_entropy": _of(
        (("rows", "classes"), ("<classes", "rows")), lambda p, x, targets: F.cross_entropy(x, targets)
    ),
    "max_pool2d": _of((_IMAGES,), lambda p, x: F.max_pool2d(x, p["kernel"], p["stride"])),
    "cat": _cat,
    "optimizer": _optimizer,
}


DTYPES = {
    "": torch.float32,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Element type of each precision."""

PROFILED = 3
"""Profiled repeats of each point."""


def run_sweep(
    item: str,
    operation: str,
    precision: str,
    points: Iterable[Mapping[str, Any]],
    device: str,
    folder: Path,
    quick: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Time every point of a sweep, forward and backward; return its rows and facts.

    A point that fails (no such kernel, not enough memory) is noted in the facts and does not end the sweep; when all
    fail, the last error does.
    """
    torch.manual_seed(0)
    with single_precision("tf32" if precision == "tf32" else "ieee"):
        dtype, budget_s = DTYPES[precision], QUICK_BUDGET_S if quick else BUDGET_S
        watch = CudaStopwatch(budget_s) if device == "cuda" else HostStopwatch(budget_s)
        rows, failed = list[dict[str, Any]](), list[dict[str, Any]]()
        timed: list[tuple[Mapping[str, Any], list[dict[str, Any]]]] = []
        last: Exception | None = None
        for point in points:
            try:
                found = _time_point(item, operation, precision, point, watch, dtype, device)
            except Exception as error:
                if device == "cuda":
                    torch.cuda.synchronize()  # raises when the device is lost: then the item fails
                failed.append({"point": dict(point), "error": f"{type(error).__name__}: {error}"[:300]})
                last = error.with_traceback(None)
                if is_out_of_memory(error):
                    free_memory(device)
                continue
            rows += found
            timed.append((point, found))
        if last is not None and not rows:
            raise last
        facts: dict[str, Any] = {"points": len(timed), "failed_points": failed}
        if device == "cuda":
            try:
                _name_kernels(operation, timed, dtype, device, folder)
            except Exception as error:
                torch.cuda.synchronize()
                facts["kernels_missing"] = f"{type(error).__name__}: {error}"[:300]
        return rows, facts


def _time_point(
    item: str,
    operation: str,
    precision: str,
    point: Mapping[str, Any],
    watch: CudaStopwatch | HostStopwatch,
    dtype: torch.dtype,
    device: str,
) -> list[dict[str, Any]]:
    """Return a point's rows, one a phase; their kernels are not known yet."""
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    host = HostStopwatch(watch.budget_s, finish)
    return [
        {
            "item": item,
            "operation": operation,
            "phase": work.phase,
            "precision": precision,
            "shape": json.dumps(dict(point)),
            "flop": work.flop,
            "read_bytes": work.read_bytes,
            "write_bytes": work.write_bytes,
            "kernel_ns": None,
            "kernels": [],
            **(host if work.on_host else watch).measure(work.run).columns(),
        }
        for work in list_work(build_case(operation, point, dtype, device))
    ]


def _name_kernels(
    operation: str,
    timed: list[tuple[Mapping[str, Any], list[dict[str, Any]]]],
    dtype: torch.dtype,
    device: str,
    folder: Path,
) -> None:
    """Profile all points once more, a few repeats each, and add their kernels to the rows.

    One profile for all of them, since starting it takes longer than a point;
    times come from events all the same, which the profiler does not stretch.
    """
    trace, number, targets = folder / "kernels.json", 0, dict[str, dict[str, Any]]()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for point, rows in timed:
            phases = {row["phase"]: row for row in rows}
            for work in list_work(build_case(operation, point, dtype, device)):
                work.run()  # the kernel's choice and its memory belong to no window
                window = f"trioflow: point {number}"
                targets[window], number = phases[work.phase], number + 1
                for _ in range(PROFILED):
                    with record_function(window):
                        work.run()
            torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    for window, (kernel_ns, names) in kernels_by_window(events, set(targets)).items():
        targets[window]["kernel_ns"], targets[window]["kernels"] = kernel_ns, names


def free_memory(device: str) -> None:
    """Give the device's memory back that nothing refers to any more."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def kernels_by_window(events: Iterable[Mapping[str, Any]], windows: set[str]) -> dict[str, tuple[int, list[str]]]:
    """Return each window's kernel time, median over its repeats [ns], and the kernels of its last one in order of launch.

    ``windows``: names of annotations of a Kineto profile, which do not overlap. A kernel belongs to
    the one in which the host launched it, on any thread: host times alone are compared.
    """
    complete = [e for e in events if isinstance(e, Mapping) and e.get("ph") == "X"]
    complete.sort(key=lambda event: float(event["ts"]))
    kernels: dict[Any, list[Mapping[str, Any]]] = {}
    for event in complete:
        if event.get("cat") in DEVICE:
            kernels.setdefault(event.get("args", {}).get("correlation"), []).append(event)
    launches = [
        (float(event["ts"]), kernels.get(event["args"].get("correlation"), []))
        for event in complete
        if event.get("cat") in LAUNCHES and event.get("args", {}).get("correlation") is not None
    ]
    repeats: dict[str, list[list[Mapping[str, Any]]]] = {}
    for span in complete:
        if span.get("cat") == "user_annotation" and span["name"] in windows:
            start, end = float(span["ts"]), float(span["ts"]) + float(span["dur"])
            if launched := [kernel for at, some in launches if start <= at <= end for kernel in some]:
                repeats.setdefault(str(span["name"]), []).append(launched)
    return {
        name: (
            round(statistics.median(sum(us_to_ns(float(k["dur"])) for k in one) for one in several)),
            [str(kernel["name"]) for kernel in several[-1]],
        )
        for name, several in repeats.items()
    }


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on the device or the host."""
    # torch.OutOfMemoryError since 2.5, torch.cuda.OutOfMemoryError before; some libraries raise
    # a plain RuntimeError with these words, and their handles fail to be made in full memory.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    words = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return bool(kinds & {"OutOfMemoryError", "MemoryError"}) or any(word in str(error) for word in words)
