"""The trace of a language model's training step, made on fake tensors and kept for the next time."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

from trioflow.base.errors import InputError, TrioflowError, how_to_install
from trioflow.base.precision_recipes import RECIPES, PrecisionRecipe, choose_recipe
from trioflow.base.provenance import digest_modules
from trioflow.base.settings import LANGUAGE
from trioflow.trace.language.scaled import add_to_main_gradients, scale_products
from trioflow.trace.language.sizes import BLOCKS, GRADIENTS, LanguageModel, LanguageStep
from trioflow.trace.repeat import repeat_block
from trioflow.trace.store import Trace, pack_trace, read_pack, save_trace

CAPTURED_BLOCKS = 2
"""Blocks that run, beside first ones of another kind; the last one stands for all further ones. All run where two
kinds take turns."""
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}
"""The profiler's own messages say nothing to who runs the command."""
_CAPTURES = Lock()
"""PyTorch's profiler and its modes of dispatch crash where two threads use them at once."""
ROUTER = "experts: a router's auxiliary loss is left out"
MODULES = ("trace", "tables", "base/precision_recipes")
"""What a kept trace depends on beside the model, the step and PyTorch."""


def make_trace(model: LanguageModel, step: LanguageStep) -> Trace:
    """Return the operators of a training step, without times, as ``trioflow capture --device meta`` does.

    Identical blocks run once: any depth takes seconds. The trace is kept in `cache_folder`, named
    by everything that decides it; ``facts.language_model`` has sizes, parameters, ``sequence`` and
    ``attention``. Raises InputError as `LanguageStep.settle`; when PyTorch is not installed, a
    learned table of positions is too short, or experts are to be computed in another format than
    bf16 or replayed from CUDA graphs.
    """
    step = step.settle()
    if model.positions == "learned" and step.sequence > model.longest:
        raise InputError(
            f"{model.name} has {model.longest} positions, fewer than --sequence {step.sequence}",
            fix="use a shorter sequence",
        )
    if model.experts and not _computes_experts(choose_recipe(step.precision)):
        known = ", ".join(name for name, recipe in RECIPES.items() if _computes_experts(recipe))
        raise InputError(
            f"--precision {step.precision}: experts are computed by grouped products of weights in bf16",
            fix=f"use one of {known}",
        )
    if model.experts and step.cuda_graphs:
        raise InputError(
            "--cuda-graphs: how many tokens an expert gets changes from step to step, and a graph's sizes cannot",
            fix="leave it out for a mixture of experts",
        )
    path = cache_folder() / f"{_name(model, step)}.trace"
    with _CAPTURES:
        with suppress(TrioflowError, OSError):  # one that cannot be read is made again
            if path.exists():
                return read_pack(path)
        trace = _capture(model, step)
        _keep(trace, path)
    return trace


def _computes_experts(recipe: PrecisionRecipe) -> bool:
    """Whether grouped products take a recipe's weights: PyTorch's are in bf16 alone."""
    return recipe.casts_model and recipe.arithmetic == "bf16"


def quieten_profiler() -> None:
    """Silence the profiler's own messages; before PyTorch loads."""
    for name, level in _QUIET.items():
        os.environ.setdefault(name, level)


def cache_folder() -> Path:
    """Return the folder of the traces kept; safe to delete at any time."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "trioflow" / "traces"


def _name(model: LanguageModel, step: LanguageStep) -> str:
    """Return a name made of all that decides a trace."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    decides = [asdict(model), asdict(step), digest_modules(*MODULES), torch]
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    plain = re.sub("[^a-z0-9.-]+", "-", model.name.lower()).strip("-")[:40]
    return f"{plain}-{digest[:16]}"


def _capture(model: LanguageModel, step: LanguageStep) -> Trace:
    """Run the step on fake tensors with few blocks, and repeat the last."""
    quieten_profiler()
    try:
        from trioflow.trace.capture.meta import capture_meta
    except ImportError as error:
        raise InputError(
            f"the trace of a model given by its configuration is made with PyTorch ({error})",
            fix=how_to_install("capture"),
        ) from None
    captured = min(model.layers, model.dense_layers + CAPTURED_BLOCKS)
    if model.window or re.search(r"[\d?\[]", step.freeze):  # blocks may differ
        captured = model.layers
    row = {
        "workload": model.name, "family": LANGUAGE, "model": model.name,
        "layers": captured, "sequence": step.sequence,
        "attention": step.attention, "fusion": step.fusion, "loss": step.loss, "optimizer": step.optimizer, "precision": step.precision,
        "language_model": json.dumps(asdict(model), sort_keys=True), "freeze": step.freeze,
        "lora": step.lora or None, "lora_targets": step.lora_targets, "lora_dropout": step.lora_dropout,
    }  # fmt: skip
    trace = capture_meta(row, step.batch)
    products = choose_recipe(step.precision).products
    if step.fusion == GRADIENTS:
        trace = add_to_main_gradients(trace)
    if products:
        trace = scale_products(trace, products)
    if model.layers > captured:
        last = f"{BLOCKS}.{captured - 1}"
        trace = repeat_block(trace, last, model.layers - captured + 1)
    described = asdict(model) | {
        "parameters": model.parameters, "sequence": step.sequence, "attention": step.attention, "fusion": step.fusion,
        "cuda_graphs": step.cuda_graphs, "loss": step.loss, **({"deterministic": True} if step.deterministic else {}),
    }  # fmt: skip
    if step.freeze or step.lora:
        trained = [p for p in trace.facts.parameters or [] if not p["frozen"]]
        described |= {
            "freeze": step.freeze,
            "lora": step.lora,
            "trained_parameters": sum(prod(p["shape"]) for p in trained),
        }
    facts = replace(trace.facts, language_model=described, source="configuration of a model")
    if model.experts:
        facts = replace(facts, warnings=facts.warn(ROUTER))
    return Trace(trace.operators, trace.tensors, facts)


def _keep(trace: Trace, path: Path) -> None:
    """Write a trace for the next time; a folder that cannot be written is not an error."""
    with suppress(OSError), TemporaryDirectory() as temporary:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_trace(trace, temporary)
        pack_trace(temporary, path)
