"""What golden questions make without a command: fits of made-up measurements, and what they then answer.

The questions call these by name. Numbers of fits are kept to six digits: a refit on another processor differs beyond.
"""

import json
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from costmodel import gpu_synthetic, synthetic, test_collectives, test_nccl_model, test_new_gpu
from costmodel.test_step_precision import A100, make_convolutions, make_linear
from msgspec import structs
from trioflow.costmodel.collectives.model import COLLECTIVES
from trioflow.costmodel.collectives.platform import METHODS, NcclMachine, choose, load_constants
from trioflow.costmodel.fits.collectives import fit_collective_model, fit_platform_collectives
from trioflow.costmodel.fits.operators import fit_device_model, fit_named_model
from trioflow.costmodel.new_gpu.carry import derive_operator_model, retime_trace, scale_trace
from trioflow.costmodel.operators.precision import in_precision
from trioflow.hardware.machine import find_device, load_device
from trioflow.hardware.platform import load_platform
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import predict
from trioflow.prediction.question import time_operators
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.sizes import LanguageModel, LanguageStep
from trioflow_evaluation.fits.new_gpu import describe_pairs, pair_gpus, predict_held_out, summarise_residuals

SIZES = (0, 8, 1024, 4096, 3 << 15, 4 << 20, 50 << 20, 1 << 33)


def rounded(value: Any) -> Any:
    """Return a value with its numbers to six digits, tables as lists of columns."""
    if isinstance(value, pd.DataFrame):
        value = value.drop(columns=[name for name in value if name.endswith("_shapes")]).to_dict("list")
    if isinstance(value, dict):
        return {str(key): rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _content(model: Any) -> Any:
    """Return what a model's file holds, but where it comes from."""
    with TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.json")
        return {k: v for k, v in json.loads((Path(folder) / "model.json").read_text()).items() if k != "provenance"}


def _answers(model: Any, steps: list[pd.DataFrame]) -> Any:
    """Return a model's times for operators, for the first ones at other sizes, and of whole steps."""
    return {
        "predicted": dict(enumerate(map(model.predict, steps))),
        "rescaled": {n: model.rescale(steps[0], step) for n, step in enumerate(steps) if len(step) == len(steps[0])},
        "intervals": [model.step_interval(kind) for kind in ("rescale", "predict")],
        "widening": [model.step_interval("rescale", distance) for distance in (0.1, 1.0, 5.0)],
    }


def operator_fit(method: str) -> Any:
    """Fit made-up workloads of a processor; ask for known and for unknown sizes and names."""
    model, table = fit_named_model(synthetic.make_traces(noise=0.1), method=method)
    steps = [
        synthetic.make_operators(widths, batch) for widths, batch in (([64, 128], 4), ([64, 128], 16), ([2048], 9))
    ]
    steps.append(steps[0].assign(name="vendor::new"))
    return rounded({"model": _content(model), "table": table, **_answers(model, steps)})


def device_fit(method: str) -> Any:
    """Fit made-up workloads of a GPU, with its tiles and waves."""
    model, table = fit_device_model(gpu_synthetic.make_gpu_traces()[:9], gpu_synthetic.LIMITS, method=method)
    steps = [gpu_synthetic.make_step(width, batch) for width, batch in ((512, 3), (512, 4), (640, 5))]
    return rounded({"model": _content(model), "table": table, **_answers(model, steps)})


def collective_fit() -> Any:
    """Fit two ranks' all-reduces and gathers; ask for every collective, below, between and beyond what was timed."""
    gathers = test_collectives.make_samples({1000: 7_000, 5000: 4_000, 10**8: 80_000_000}, "all_gather", 4)
    model = fit_collective_model(pd.concat([test_collectives.make_samples(test_collectives.GLOO_NS), gathers]))
    asked = [model.time_s(*one) for one in product(COLLECTIVES, (2, 4, 16), SIZES)]
    return rounded(
        {"model": _content(model), "comparison": model.comparison, "times": pd.DataFrame(map(structs.asdict, asked))}
    )


def nccl_fit() -> Any:
    """Calibrate NCCL's formulas to made-up rings, and ask every method."""
    machine = test_nccl_model.A100
    model = fit_platform_collectives(test_nccl_model.make_samples(), "box", "NCCL 2.27.3", machine)
    asked = [
        model.using(method).time_s(collective, ranks, size, nodes=1)
        for method, collective, ranks, size in product(METHODS, COLLECTIVES, (2, 3, 8, 16), SIZES[1:])
    ]
    return rounded({"model": _content(model), "times": pd.DataFrame(map(structs.asdict, asked))})


def nccl_choices(version: str) -> Any:
    """Return what NCCL's own formulas choose, in a node and between nodes, and what its parts take."""
    sizes = np.array(SIZES[1:], dtype=float)
    machines = (
        (NcclMachine("ampere", "nvlink", 240e9), 4, 1),
        (NcclMachine("hopper", "nvlink", 360e9, network_bytes_per_s=10e9), 16, 2),
    )
    return rounded(
        {
            f"{collective} {ranks}": structs.asdict(
                choose(collective, ranks, nodes, sizes, machine, load_constants(version))
            )
            for collective in ("all_reduce", "all_gather", "broadcast", "send")
            for machine, ranks, nodes in machines
        }
    )


def new_gpu(rule: str) -> Any:
    """Carry operators from one GPU to others by a rule, and judge it on a known law."""
    source = load_device("h100-sxm")
    moved = {
        (name, precision): scale_trace(
            test_new_gpu.operators(),
            source,
            load_device(name),
            rule=rule,
            precision=precision,
            model=test_new_gpu.PLAIN,
        )
        for name, precision in (("a40", "fp32"), ("a40", "bf16"), ("v100-pcie-32gb", "tf32"), ("h100-sxm", "fp32"))
    }
    pairs = describe_pairs(pair_gpus(gpu_synthetic.law_rows(noise=0.02)))
    held = predict_held_out(pairs, rule)
    bands, steps = summarise_residuals({rule: held})
    classes = {name: structs.asdict(one) for name, one in bands[rule].items()}
    return rounded(
        {"moved": moved, "held_out": held[["held_out_s"]], "bands": classes, "step": structs.asdict(steps[rule])}
    )


def moved_trace(target: str) -> Any:
    """Carry a trace over, and a model that was fitted to such traces."""
    trace = retime_trace(test_new_gpu.gpu_trace(), target)
    base, _ = fit_named_model([test_new_gpu.gpu_trace()], method="roofline")
    derived = derive_operator_model(base, find_device(target), precision="tf32")
    return rounded(
        {"facts": trace.facts.to_dict(), "operators": trace.operators, **_answers(derived, [trace.operators])}
    )


def in_half(sheet: str, precision: str) -> Any:
    """Return a GPU's times in a precision for layers, products thin and square, and convolutions."""
    base, _ = fit_device_model(gpu_synthetic.make_gpu_traces(), gpu_synthetic.LIMITS, method="tile")
    model = in_precision(structs.replace(base, device_name=A100), load_device(sheet), precision)
    step = gpu_synthetic.make_step(1024, 8).assign(kind="compute")
    steps = [step, gpu_synthetic.make_step(1024, 4), make_linear(16, 8192, 8192), make_linear(8192, 8192, 8192)]
    return rounded(_answers(model, [*steps, make_convolutions(2)]))


MODELS = {
    "dense": LanguageModel("dense", 4, 256, 8, 4, 32, 512, 1024),
    "tied": LanguageModel("tied", 4, 256, 8, 4, 32, 512, 1022, tied=True),
    "experts": LanguageModel(
        "experts",
        3,
        512,
        8,
        4,
        64,
        1024,
        1024,
        experts=8,
        experts_per_token=2,
        shared_feed_forward=512,
        dense_layers=1,
        dense_feed_forward=1024,
    ),
}


@cache
def _times(name: str, precision: str, gpu: str) -> Any:
    if name not in MODELS:
        return time_operators(name, gpu)
    return time_operators(make_trace(MODELS[name], LanguageStep(128, 2, precision)), gpu)


def step(
    name: str,
    ranks_of: str = "dgx-h100",
    *,
    precision: str = "megatron-bf16",
    batch: int = 16,
    routing: str = "balanced",
    fold: bool = False,
    mode: str = "train",
    **degrees: Any,
) -> Any:
    """Predict a small model's step: the answer, and each rank's tasks, what they wait for, and its memory over the step."""
    platform = load_platform(ranks_of, 8)
    times = _times(name, precision, platform.device.name)
    found = predict(times, make_plan(**degrees), ranks_of, batch=batch, fold=fold, routing=routing, mode=mode)
    graph = found.task_graph
    return {
        "answer": found.to_dict(),
        "tasks": graph.tasks,
        "waits": graph.dependencies,
        "curves": rounded(graph.metadata.memory_curves),
        "warnings": len(graph.metadata.warnings),
    }
