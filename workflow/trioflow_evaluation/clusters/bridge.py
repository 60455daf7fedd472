"""Megatron-Bridge's measured pre-training rates on H100, beside what trioflow predicts of each row.

Every row of its performance pages that ran on DGX H100 counts, whatever release; a row that is not
predicted says why. Nothing is fitted to them. What the pages do not say is taken from Megatron's
own rules: sequence and vocabulary parallel wherever tensors are cut, the distributed optimizer, whole
experts, embedding and loss counted as a block each where the blocks alone do not divide. Routing is
forced to be balanced there (``moe_router_force_load_balancing``), so that rows that drop tokens beyond a
capacity of 1.0, and pad to it, have as many rows an expert as those that drop none.

References
----------
Megatron-Bridge, ``docs/performance-summary*.md`` (rows) and ``scripts/performance`` (FP8 stands for a
scale of each tensor, its own largest value's, and no block is left in bf16;
``configs/*/*_workload_base_configs.py``: an expert-tensor degree of 1, stages of DeepSeek-V3, dispatchers; ``megatron.bridge``,
``apply_moe_token_drop``).

Megatron-LM's own functional tests: peaks of memory that its training measured, beside what trioflow predicts.

Each test is a folder with ``model_config.yaml`` (environment and all arguments)
and the values that its run logged on one node of eight A100 or H100.

References
----------
Megatron-LM, ``training_log`` (``mem-max-allocated-bytes`` is the allocator's
``allocated_bytes.all.peak``, never reset, as the last rank writes it); its test
recipes (one node of eight GPUs); Transformer Engine's
``get_cublas_workspace_size_bytes``; PyTorch, ``CUBLAS_WORKSPACE_CONFIG``.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import make_dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from trioflow.base.errors import InputError, TableError, TrioflowError
from trioflow.base.experiments import Plan
from trioflow.base.provenance import read_table
from trioflow.base.units import BYTES_PER_KIB, BYTES_PER_MIB
from trioflow.base.yaml_files import parse_yaml
from trioflow.formats.megatron import read_file
from trioflow.parallel.plan import make_plan
from trioflow.prediction.assembly import build_graph, predict
from trioflow.prediction.question import Options, time_operators
from trioflow.trace.language.make import make_trace
from trioflow.trace.language.read import open_configuration, published_models, trace_of
from trioflow.trace.language.sizes import Configuration, LanguageStep
from trioflow.trace.store import pipeline_units

from trioflow_evaluation import DATA
from trioflow_evaluation.clusters.parts import extend_steps, plain_model
from trioflow_evaluation.tables import CLUSTER_PEAKS, CLUSTER_RATES

LOGGED_PEAKS = "megatron/peaks"
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


def read_cases(files: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Read ``golden_values_dev_dgx_<device>.json`` beside ``model_config.yaml``: what ``CLUSTER_PEAKS`` says that was measured.

    With ``folder``, where the test lies. Raises TableError where a file is damaged.
    """
    cases = []
    for path in sorted(Path(file) for file in files):
        device = path.stem.rpartition("_")[2]
        if path.suffix != ".json" or device not in DEVICES:
            continue
        try:
            logged = json.loads(path.read_text(encoding="utf-8"))
            peak, kept = (
                [float(value) for value in logged[name]["values"].values() if value != "nan"] for name in (PEAK, KEPT)
            )
            about = {
                "folder": path.parent,
                "suite": path.parent.parent.name,
                "case": path.parent.name,
                "device": device,
            }
            cases.append({**about, "measured_bytes": max(peak), "kept_bytes": kept[-1]})
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise TableError(f"no logged peaks: {error!r}", file=path, fix=f"retrieve {LOGGED_PEAKS} again") from None
    return cases


def judge_peaks(cases: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return ``CLUSTER_PEAKS``, a row a case; of a refused one the prediction is missing."""
    frame = pd.DataFrame([case | _judge(case) for case in cases], columns=CLUSTER_PEAKS.names)
    numbers = ["data", "tensor", "pipeline", "workspace_bytes", "predicted_bytes"]
    return frame.fillna(dict.fromkeys(("attention", "not_followed", "refused"), "")).astype(
        dict.fromkeys(numbers, "Int64")
    )


def _judge(case: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if case["suite"] in OTHER_NETWORKS:
            raise InputError(OTHER_NETWORKS[case["suite"]])
        peaks = _predict_peaks(case["folder"] / CONFIG)
    except TrioflowError as error:
        return {"refused": getattr(error, "problem", str(error))}
    workspace = count_test_workspaces(case["folder"] / CONFIG, case["device"])
    return {**peaks, "workspace_bytes": workspace, "predicted_bytes": peaks["predicted_bytes"] + workspace}


@cache
def _predict_peaks(file: Path) -> dict[str, Any]:
    """Return degrees and peak of the last rank, which writes the log, whatever GPU it is; TrioflowError when refused."""
    configuration, plan, batch = plan_case(file)
    times = time_operators(trace_of(configuration, {}), DEVICES["h100"])
    graph = build_graph(times, plan, batch=batch, options=Options(stages=configuration.name_stages()))
    last = next(entry for entry in graph.metadata.memory if GPUS - 1 in entry["ranks"])
    return {
        "data": plan.data,
        "tensor": plan.tensor,
        "pipeline": plan.pipeline,
        "attention": configuration.step["attention"],
        "not_followed": "; ".join(configuration.notes),
        "predicted_bytes": int(last["peak_bytes"]),
    }


def plan_case(file: Path) -> tuple[Configuration, Plan, int]:
    """Return a test's configuration, its plan on one node and its samples of a step; TrioflowError when refused."""
    configuration = read_file(open_configuration(file.read_text(encoding="utf-8"), str(file)))
    if configuration is None:
        raise InputError("no arguments of Megatron-LM", file=file)
    columns = dict(configuration.degrees)
    tensor, pipeline = int(columns.pop("tensor")), int(columns.pop("pipeline"))
    context = int(columns.get("context", 1))
    data = GPUS // (tensor * context * pipeline)
    if not data:
        raise InputError(
            f"more than {GPUS} ranks: {tensor} tensor x {context} context x {pipeline} pipeline", file=str(file)
        )
    pieces = _count_pieces(configuration, data, file)
    columns |= {"pipeline": pipeline, "micro_batches": pieces} if pipeline > 1 else {"accumulate": pieces}
    if data * context == 1:
        columns.pop("sharding", None)
    if "sharding" in columns:
        columns["shard"] = configuration.count_shard(data * context)
    batch = data * pieces * int(configuration.step["batch"])
    return configuration, make_plan(data, tensor, **columns), batch


def _count_pieces(configuration: Configuration, data: int, file: Path) -> int:
    samples = data * int(configuration.step["batch"])
    pieces, rest = divmod(configuration.global_batch or 0, samples)
    if rest or not pieces:
        raise InputError(f"{configuration.global_batch} samples on {data} replicas", file=str(file))
    return pieces


def count_test_workspaces(file: Path, device: str) -> int:
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


DATASET, PLATFORM, SYSTEM = "megatron/rates", "dgx-h100", "DGX-H100"
RECIPES = DATA / "clusters/bridge.tsv"
"""What the pages do not say of a row, by the pages' name of its model: from the benchmark's own recipes."""
_PRECISIONS = {**dict.fromkeys(("FP8", "FP8-CS", ""), "fp8-params-bf16-reduce"), "BF16": "megatron-bf16-reduce"}
"""The first release names none, and says of its H100 rows that they run in FP8. All recipes reduce gradients in bf16,
those in FP8 hold and gather weights in FP8 (``megatron.bridge``, ``bf16_with_fp8_current_scaling_mixed``)."""
_NUMBERS = {
    "gpus": "#-GPUs",
    "batch": "GBS",
    "micro_batch": "MBS",
    "sequence": "Sequence Length",
    "fsdp": "FSDP",
    "tensor": "TP",
    "pipeline": "PP",
    "context": "CP",
    "stages_per_rank": "VP",
    "expert": "EP",
    "measured_tokens_per_s": "Tokens / sec / GPU",
}


Rate: Any = make_dataclass(
    "Rate", CLUSTER_RATES.names[: CLUSTER_RATES.names.index("measured_tokens_per_s") + 1], frozen=True
)
"""A row of the pages: the columns of ``CLUSTER_RATES`` that are read."""


@cache
def load_recipes() -> dict[str, dict[str, str]]:
    """Return how Megatron-Bridge's benchmark trains models on H100, beside what a row says, by the pages' name of a model.

    ``network`` is trioflow's name, the others columns of a plan: ``expert_domain`` 8 for DeepEP or
    HybridEP (``moe_token_dispatcher_type`` flex), ``expert_overlap`` from ``moe_a2a_overlap``.
    """
    return {row["model"]: row for row in read_table(RECIPES)}


def read_rates(files: Iterable[str | Path]) -> list[Rate]:
    """Read the rows of H100 of all pages; TableError where a page has no table of them or a cell is not a number."""
    rates = []
    for file in files:
        rows = list(_read_page(Path(file)))
        if not rows:
            raise TableError("no table of rates", file=file, fix=f"retrieve {DATASET} again")
        rates += [row for system, row in rows if system == SYSTEM]
    return rates


def _read_page(path: Path) -> Iterable[tuple[str, Rate]]:
    release = kind = model = system = ""
    names: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("## "):
            release = line.removeprefix("## ").removesuffix(" NeMo Container")
        elif line.startswith("### "):
            kind = line.removeprefix("### ").removesuffix(" Performance")
        elif line.startswith("#### "):
            word, _, name = line.removeprefix("#### ").partition(": ")
            model, system = (name, "") if word == "Model" else ("", name)
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) > 2 and cells[0] in ("System", "Model"):
            names = cells
        elif len(cells) == len(names) > 2 and not set(cells[0]) <= {"-", ":"}:
            content = {"System": system, "Model": model} | dict(zip(names, cells, strict=True))
            yield content["System"], _read_row(content, release, kind, f"{path}:{number}")


def _read_row(cells: dict[str, str], release: str, kind: str, place: str) -> Rate:
    numbers: dict[str, Any] = {}
    for field, name in _NUMBERS.items():
        # What stands in brackets was measured another way.
        text = cells.get(name, "").partition("(")[0].partition("[")[0].strip()
        try:
            numbers[field] = int(text) if text not in ("", "n/a") else 0
        except ValueError:
            raise TableError(f"{text!r:.40} is not a number of {name}", place=place) from None
    for degree in ("stages_per_rank", "expert"):
        numbers[degree] = max(numbers[degree], 1)
    return Rate(release, kind, cells["Model"], cells.get("Precision", "").partition(" ")[0], **numbers)


def judge_rates(rates: Sequence[Rate]) -> pd.DataFrame:
    """Return ``CLUSTER_RATES`` of each row; rows of several releases that ask for the same are predicted once."""
    known: dict[Rate, dict[str, Any]] = {}
    rows = []
    for rate in rates:
        recipe = _PRECISIONS[rate.precision]
        question = replace(rate, release="", precision=recipe, measured_tokens_per_s=0.0)
        if question not in known:
            known[question] = _predict(question)
        rows.append({**vars(rate), **known[question]})
    return pd.DataFrame(rows, columns=CLUSTER_RATES.names)


_ENDS = ("predicted_tokens_per_s", "high_tokens_per_s", "low_tokens_per_s")


def _predict(rate: Rate) -> dict[str, Any]:
    """Return, of a row whose ``precision`` is trioflow's, the rate of a GPU [tokens/s] and the ends of its 80 % interval, or why it is not predicted."""
    try:
        step_s = predict_step_s(rate)
    except TrioflowError as error:
        return {**dict.fromkeys(_ENDS, math.nan), "refused": getattr(error, "problem", str(error))}
    rates = rate.batch * rate.sequence / rate.gpus / step_s
    return {**dict(zip(_ENDS, rates.tolist(), strict=True)), "refused": ""}


def predict_step_s(rate: Rate) -> NDArray[np.float64]:
    """Return the step of a row, whose ``precision`` is trioflow's, and the ends of its 80 % interval [s].

    In a full pipeline every round of micro-batches adds the same: of more than three, two and three
    are simulated. Raises TrioflowError when the model is not built, or the plan is refused.
    """
    model = plain_model(rate.model)
    recipe = load_recipes().get(model)
    if recipe is None or recipe["network"] not in published_models():
        raise InputError(f"{model}: no such network is built")
    if rate.training == "LoRA":
        raise InputError("low-rank adapters are trained, and here all weights are")
    replicas, rest = divmod(rate.gpus, rate.tensor * rate.pipeline * rate.context)
    pieces, left = divmod(rate.batch, replicas * rate.micro_batch or 1)
    if rest or left or not pieces:
        raise InputError(f"{rate.batch} samples on {rate.gpus} GPUs do not divide as the row says")
    simulate, turn = partial(_simulate, replace(rate, batch=0), replicas), rate.pipeline
    most = 3 * turn if pieces % turn == 0 else pieces
    return np.asarray(extend_steps(simulate, pieces, most, most - turn), np.float64)


@cache
def _simulate(rate: Rate, replicas: int, pieces: int) -> NDArray[np.float64]:
    """Return the step of so many micro-batches, and the ends of its interval [s]; ``batch`` is not read."""
    name = load_recipes()[plain_model(rate.model)]["network"]
    step = LanguageStep(rate.sequence, rate.micro_batch, rate.precision)
    times = time_operators(make_trace(published_models()[name], step), DEVICES["h100"])
    stages = cut_stages(list(pipeline_units(times.traces[0])), rate.pipeline * rate.stages_per_rank)
    plan, batch = plan_rate(rate, replicas, pieces), replicas * rate.micro_batch * pieces
    options = Options(stages=stages, memory=False)
    prediction = predict(times, plan, PLATFORM, batch=batch, options=options)
    return np.array([prediction.step_time_s, prediction.low_s, prediction.high_s])


def plan_rate(rate: Rate, replicas: int, pieces: int) -> Plan:
    """Return a row's plan, with so many micro-batches."""
    several = rate.stages_per_rank > 1
    columns: dict[str, Any] = {"accumulate": pieces}
    if rate.pipeline > 1:
        columns = {
            "pipeline": rate.pipeline,
            "micro_batches": pieces,
            "schedule": "interleaved" if several else "1f1b",
            "stages_per_rank": rate.stages_per_rank,
        }
    if replicas > 1:
        columns["sharding"] = "fsdp" if rate.fsdp else "distributed"
    if rate.context > 1:
        columns |= {"context": rate.context, "context_method": "ring"}
    split, recipe = rate.tensor > 1, load_recipes().get(plain_model(rate.model))
    if split and recipe:
        columns["tensor_overlap"] = recipe["tensor_overlap"]
    if rate.expert > 1 and recipe:
        columns["expert_domain"] = int(recipe["expert_domain"])
        # Megatron refuses it in a pipeline of one stage a rank.
        columns["expert_overlap"] = recipe["expert_overlap"] == "1" and (several or rate.pipeline == 1)
    return make_plan(
        replicas,
        rate.tensor,
        expert=rate.expert,
        expert_tensor=int(rate.expert > 1),
        sequence_parallel=split,
        vocabulary_parallel=split,
        **columns,
    )


def cut_stages(units: Sequence[str], stages: int) -> list[list[str]] | None:
    """Return the units of each stage, equally many blocks each; None of one stage.

    Where they do not divide, embedding and loss count as a block each, then the last stages have
    one less: of DeepSeek-V3 on 32 stages the recipe's own ``Et|(tt|)*30mL``. Raises InputError when
    there are fewer units than stages.
    """
    if stages == 1:
        return None
    first, *blocks, last = units
    whole = len(blocks) % stages == 0
    counted = blocks if whole else [first, *blocks, last]
    each, rest = divmod(len(counted), stages)
    if not each:
        raise InputError(f"{len(blocks)} blocks are too few for {stages} stages")
    ends = [0, *accumulate(each + (i < rest) for i in range(stages))]
    cut = [list(counted[a:b]) for a, b in pairwise(ends)]
    if whole:
        cut[0].insert(0, first)
        cut[-1].append(last)
    return cut
