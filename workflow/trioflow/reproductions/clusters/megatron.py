"""Megatron-LM's own functional tests: peaks of memory that its training measured, beside what trioflow predicts.

Each test is a folder with ``model_config.yaml`` (environment and all arguments)
and the values that its run logged on one node of eight A100 or H100.

References
----------
Megatron-LM, ``training_log`` (``mem-max-allocated-bytes`` is the allocator's
``allocated_bytes.all.peak``, never reset, as the last rank writes it); its test
recipes (one node of eight GPUs); Transformer Engine's
``get_cublas_workspace_size_bytes``; PyTorch, ``CUBLAS_WORKSPACE_CONFIG``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from trioflow.base.errors import InputError, TableError, TrioflowError
from trioflow.base.plan_row import Plan
from trioflow.base.units import BYTES_PER_KIB, BYTES_PER_MIB
from trioflow.base.yaml_files import parse_yaml
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import build_graph, time_operators
from trioflow.prediction.options import Options
from trioflow.trace.language.read import read_configuration, trace_of
from trioflow.trace.language.sizes import Configuration

DATASET = "megatron/peaks"
FOLDER = "NVIDIA+Megatron-LM/tests/functional_tests/test_cases"
GPUS = 8
CONFIG = "model_config.yaml"
PEAK, KEPT = "mem-max-allocated-bytes", "mem-allocated-bytes"
DEVICES = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3"}
"""By the end of a file's name."""
OTHER_NETWORKS = {
    "bert": "an encoder with two heads (pretrain_bert.py): not built from a configuration",
    "t5": "an encoder and a decoder (pretrain_t5.py): not built from a configuration",
}
"""Test suites, by the folder of each, whose program trains another network than pretrain_gpt.py."""
_CUBLAS_HANDLES = 2
"""The thread that runs forward has one, and the one that runs backward."""
_TE_WORKSPACE_BYTES = {"a100": 4 * BYTES_PER_MIB, "h100": 32 * BYTES_PER_MIB}
"""Of Transformer Engine's products."""
_TE_STREAMS = 4
"""Streams of its grouped products, each with a workspace (``get_multi_stream_cublas_workspace``)."""


@dataclass(frozen=True)
class Case:
    """One run of one test; ``suite`` is gpt, moe, bert or t5, ``kept_bytes`` what lay there between steps, at the end."""

    folder: Path
    suite: str
    name: str
    device: str
    peak_bytes: float
    kept_bytes: float


def read_cases(files: Iterable[str | Path]) -> list[Case]:
    """Read ``golden_values_dev_dgx_<device>.json`` beside ``model_config.yaml``; TableError where one is damaged."""
    found = []
    for path in sorted(Path(file) for file in files):
        device = path.stem.rpartition("_")[2]
        if path.suffix != ".json" or device not in DEVICES:
            continue
        try:
            logged = json.loads(path.read_text(encoding="utf-8"))
            peak, kept = (_list_numbers(logged[name]["values"]) for name in (PEAK, KEPT))
            found.append(Case(path.parent, path.parent.parent.name, path.parent.name, device, max(peak), kept[-1]))  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise TableError(f"no logged peaks: {error!r}", file=path, fix=f"retrieve {DATASET} again") from None  # fmt: skip
    return found


def _list_numbers(values: Mapping[str, Any]) -> list[float]:
    return [float(value) for value in values.values() if value != "nan"]


def judge_peaks(cases: Iterable[Case]) -> pd.DataFrame:
    """Return ``CLUSTER_PEAKS``, a row a case; of a refused one the prediction is missing."""
    frame = pd.DataFrame([_judge(case) for case in cases])
    numbers = ["data", "tensor", "pipeline", "workspace_bytes", "predicted_bytes"]
    return frame.astype(dict.fromkeys(numbers, "Int64"))


def _judge(case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {
        "suite": case.suite, "case": case.name, "device": case.device,
        "measured_bytes": case.peak_bytes, "kept_bytes": case.kept_bytes,
        "data": None, "tensor": None, "pipeline": None, "attention": "",
        "workspace_bytes": None, "predicted_bytes": None, "not_followed": "", "refused": "",
    }  # fmt: skip
    try:
        if case.suite in OTHER_NETWORKS:
            raise InputError(OTHER_NETWORKS[case.suite])
        found = _predict(case.folder / CONFIG)
    except TrioflowError as error:
        return {**row, "refused": getattr(error, "problem", str(error))}
    workspace = count_workspaces(case.folder / CONFIG, case.device)
    return {**row, **found, "workspace_bytes": workspace, "predicted_bytes": found["predicted_bytes"] + workspace}  # fmt: skip


@cache
def _predict(file: Path) -> dict[str, Any]:
    """Return degrees and peak of the last rank, which writes the log, whatever GPU it is; TrioflowError when refused."""
    found, plan, batch = plan_case(file)
    times = time_operators(trace_of(found, {}), DEVICES["h100"])
    graph = build_graph(
        times, plan, batch=batch,
        options=Options(stages=found.name_stages()),
    )  # fmt: skip
    last = next(entry for entry in graph.metadata.memory if GPUS - 1 in entry["ranks"])
    return {
        "data": plan.data, "tensor": plan.tensor, "pipeline": plan.pipeline,
        "attention": found.step["attention"], "not_followed": "; ".join(found.notes),
        "predicted_bytes": int(last["peak_bytes"]),
    }  # fmt: skip


def plan_case(file: Path) -> tuple[Configuration, Plan, int]:
    """Return a test's configuration, its plan on one node and its samples of a step; TrioflowError when refused."""
    found = read_configuration(file)
    columns = dict(found.degrees)
    tensor, pipeline = int(columns.pop("tensor")), int(columns.pop("pipeline"))
    context = int(columns.get("context", 1))
    data = GPUS // (tensor * context * pipeline)
    if not data:
        raise InputError(
            f"more than {GPUS} ranks: {tensor} tensor x {context} context x {pipeline} pipeline",
            file=str(file),
        )
    pieces = _count_pieces(found, data, file)
    columns |= {"pipeline": pipeline, "micro_batches": pieces} if pipeline > 1 else {"accumulate": pieces}  # fmt: skip
    if data * context == 1:
        columns.pop("sharding", None)
    batch = data * pieces * int(found.step["batch"])
    return found, make_plan(data, tensor, **columns), batch


def _count_pieces(found: Configuration, data: int, file: Path) -> int:
    samples = data * int(found.step["batch"])
    pieces, rest = divmod(found.global_batch or 0, samples)
    if rest or not pieces:
        raise InputError(f"{found.global_batch} samples on {data} replicas", file=str(file))
    return pieces


def count_workspaces(file: Path, device: str) -> int:
    """Return what libraries keep for their products, in PyTorch's allocator, as a test asks for it [bytes]."""
    content = parse_yaml(file.read_text(encoding="utf-8"), file)
    setting = str((content.get("ENV_VARS") or {}).get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    sizes = [int(n) for n in setting.strip(":").split(":")]
    cublas = sum(size * count for size, count in zip(sizes[::2], sizes[1::2], strict=True))
    engine = content["MODEL_ARGS"].get("--transformer-impl", "transformer_engine")
    fused = _TE_WORKSPACE_BYTES[device] if engine == "transformer_engine" else 0
    if content["MODEL_ARGS"].get("--moe-grouped-gemm"):
        fused *= 1 + _TE_STREAMS
    return _CUBLAS_HANDLES * cublas * BYTES_PER_KIB + fused
