"""The trace of a language model's training step, made on fake tensors and kept for the next time; `make_trace` is the door.

Linear layers of blocks in FP8, as Transformer Engine runs them, are put into the trace of a step in bf16
(`cast_products`). All three products of each linear layer and of each expert's are computed in FP8, with results in
bf16. What they read is cast before: activations where a layer first reads them, once for all layers
that read the same, and the gradients of their results. Hopper multiplies FP8 factors along their
last dimension only, so each cast writes a copy and a transposed one, of which one is kept for
backward. Attention, norms, router, embedding and head stay in bf16. Weights are cast once a step,
which is left out: a few thousandths of it.

References
----------
Transformer Engine, ``Float8CurrentScaling`` (a pass for the largest value, then one that casts) and
``Float8BlockScaling`` (1 x 128 values of activations and 128 x 128 of weights share a scale: one
pass); Megatron-Bridge's performance guide (the linear layers of blocks alone run in FP8).
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

from trioflow.base.errors import InputError, TraceError, TrioflowError, how_to_install
from trioflow.base.precision_recipes import RECIPES, PrecisionRecipe, choose_recipe
from trioflow.base.provenance import digest_modules
from trioflow.base.settings import CONFIGURED, LANGUAGE
from trioflow.tables import records
from trioflow.trace.language.sizes import BLOCKS, GRADIENTS, ConfiguredModel, LanguageModel, LanguageStep
from trioflow.trace.repeat import repeat_block
from trioflow.trace.store import Trace, check_trace, pack_trace, read_pack, save_trace

CAST, LARGEST = "trioflow::quantize", "aten::amax"
PRODUCTS = {"aten::linear": "linear", "aten::mm": "mm", "aten::_grouped_mm": "grouped_mm"}
_CONVERT, _VIEWS = "aten::to", ("aten::t", "aten::detach", "aten::view", "aten::reshape")
PREFIXES = {"fp8": "scaled", "fp8-delayed": "scaled", "fp8-block": "block_scaled"}
"""How products are called, by what a recipe says of them."""
_DTYPE, _COPIES = "c10::Float8_e4m3fn", 2
_Row = dict[str, Any]


def cast_products(trace: Trace, products: str) -> Trace:
    """Return the trace of a language model with the products of its blocks' linear layers in FP8.

    ``products``: a key of ``PREFIXES``. A linear layer is one that the model's tensor split cuts, or the experts'.
    """
    writer = _Writer(trace, products)
    return _rebuild(trace, list(writer.rewrite()), writer.tensors)


def add_to_main_gradients(trace: Trace) -> Trace:
    """Return the trace of a step whose products add to the main gradients: none is cast and added afterwards.

    Megatron Core's ``gradient_accumulation_fusion``: a product adds to the fp32 gradient of its weight as it writes,
    where PyTorch writes one in half precision, casts it and adds it. That it reads it too is left out.
    """
    rows, tensors = records(trace.operators), records(trace.tensors)
    readers: dict[int, list[int]] = {}
    for row in rows:
        for storage in {tensors[index]["storage_id"] for index in row["input_ids"]}:
            readers.setdefault(storage, []).append(row["op_id"])
    ready: dict[int, int] = {}  # operator that makes a gradient, by the one that cast it
    for gradient in trace.facts.gradients:
        cast = rows[gradient["ready_after_op_id"]]
        if cast["name"] != _CONVERT or not cast["output_ids"]:
            continue
        storage = tensors[cast["input_ids"][0]]["storage_id"]
        made = tensors[cast["input_ids"][0]]["producer_op_id"]
        others = {rows[n]["name"] for n in readers[storage] if n != cast["op_id"]} - set(_VIEWS)
        if made is None or rows[int(made)]["name"] not in PRODUCTS or others:
            continue
        ready[cast["op_id"]] = int(made)
        main = tensors[cast["output_ids"][0]]
        for tensor in tensors:
            if tensor["storage_id"] == storage:
                tensor |= {name: main[name] for name in ("storage_id", "elem_bytes", "dtype", "category")}
        for tensor in tensors:
            if tensor["storage_id"] == main["storage_id"]:
                tensor["producer_op_id"] = int(made)
        rows[int(made)]["write_bytes"] = main["elem_bytes"] * prod(main["shape"])
        rows[int(made)]["batch_write_bytes"] = 0  # as large as the weight, whatever the tokens
    gradients = [
        {**g, "ready_after_op_id": ready.get(g["ready_after_op_id"], g["ready_after_op_id"])}
        for g in trace.facts.gradients
    ]
    gradients.sort(key=lambda gradient: int(gradient["ready_after_op_id"]))
    changed = replace(trace.facts, gradients=gradients)
    kept = [row for row in rows if row["op_id"] not in ready]
    return _rebuild(Trace(trace.operators, trace.tensors, changed), kept, tensors)


def _rebuild(trace: Trace, rows: list[_Row], tensors: list[_Row]) -> Trace:
    """Return a trace of other operators, numbered anew; an added one has no number yet."""
    import pandas as pd

    place = {row["op_id"]: n for n, row in enumerate(rows) if row["op_id"] is not None}
    for tensor in tensors:
        tensor["producer_op_id"] = place.get(tensor["producer_op_id"])
    made: dict[int, int] = {}
    for number, row in enumerate(rows):
        if row["op_id"] is None:
            made |= {tensors[i]["storage_id"]: number for i in row["output_ids"]}
        row["op_id"] = number
        if row["forward_op_id"] is not None:
            row["forward_op_id"] = place[row["forward_op_id"]]
        for index in (*row["input_ids"], *row["output_ids"]):
            tensors[index]["last_op_id"] = number
    for tensor in tensors:
        tensor["producer_op_id"] = made.get(tensor["storage_id"], tensor["producer_op_id"])
    gradients = [{**g, "ready_after_op_id": place.get(g["ready_after_op_id"], -1)} for g in trace.facts.gradients]
    operators, described = (
        pd.DataFrame(new, columns=old.columns).astype(old.dtypes)
        for new, old in ((rows, trace.operators), (tensors, trace.tensors))
    )
    facts = replace(trace.facts, gradients=gradients, operators=len(rows))
    return Trace(operators, described, facts)


class _Writer:
    """Goes through a trace's operators in order and keeps what was cast already."""

    def __init__(self, trace: Trace, products: str) -> None:
        self.trace, self.products = trace, products
        self.split = dict(trace.facts.tensor_split or {})
        self.tensors: list[_Row] = records(trace.tensors)
        self.storages = max(row["storage_id"] for row in self.tensors) + 1
        self.cast: dict[int, int] = {}  # a storage's, by that of what was cast
        self.twins: dict[tuple[int, int], int] = {}
        self.scaled: set[int] = set()  # forward products

    def rewrite(self) -> Iterator[_Row]:
        """Yield the operators, casts among them; numbers are still those of the trace."""
        for row in records(self.trace.operators):
            if not self._is_scaled(row):
                if row["write_bytes"]:  # a sum in place makes other values of what was cast
                    for index in row["output_ids"]:
                        self.cast.pop(self.tensors[index]["storage_id"], None)
                yield row
                continue
            row["input_ids"] = list(row["input_ids"])
            for place, index in enumerate(row["input_ids"]):
                tensor = self.tensors[index]
                if tensor["elem_bytes"] != 2:  # where an expert's rows end
                    continue
                storage = tensor["storage_id"]
                if tensor["category"] != "parameter" and storage not in self.cast:
                    yield from self._cast(row, index)
                self._read_twin(row, place, self.cast.get(storage, storage))
            name = PRODUCTS[row["name"]]
            yield {**row, "name": f"trioflow::{PREFIXES[self.products]}_{name}"}

    def _is_scaled(self, row: _Row) -> bool:
        if row["name"] not in PRODUCTS:
            return False
        if row["phase"] == "backward":
            return row["forward_op_id"] in self.scaled
        weights = [i for i in row["input_ids"] if self.tensors[i]["category"] == "parameter"]
        grouped = row["name"] == "aten::_grouped_mm"
        is_split = bool(weights) and (grouped or any(fnmatchcase(row["module"], pattern) for pattern in self.split))
        if is_split:
            self.scaled.add(row["op_id"])
        return is_split

    def _cast(self, row: _Row, index: int) -> Iterator[_Row]:
        """Yield what casts a tensor for a product; it differentiates nothing."""
        tensor = self.tensors[index]
        shape, size = list(tensor["shape"]), prod(tensor["shape"])
        common = {
            **row,
            "op_id": None,
            "flop": 0,
            "batch_flop": 0,
            "input_ids": [index],
            "input_shapes": [shape],
            "forward_op_id": None,
            "sequence_number": None,
            "batch_dim": None,
        }
        common |= dict.fromkeys(("read_bytes", "batch_read_bytes"), tensor["elem_bytes"] * size)
        if self.products == "fp8":
            largest = self._add({**tensor, "shape": [1]}, 4, "float")
            yield common | {
                "name": LARGEST,
                "write_bytes": 4,
                "batch_write_bytes": 0,
                "output_ids": [largest],
                "output_shapes": [[1]],
                "batch_dim": None,
            }
        made = [self._add(tensor, 1, _DTYPE) for _ in range(_COPIES)]
        self.cast[tensor["storage_id"]] = self.tensors[made[0]]["storage_id"]
        self.twins[index, self.cast[tensor["storage_id"]]] = made[0]
        common |= dict.fromkeys(("write_bytes", "batch_write_bytes"), _COPIES * size)
        yield common | {"name": CAST, "output_ids": made, "output_shapes": [shape] * _COPIES}

    def _add(self, tensor: _Row, elem_bytes: int, dtype: str, storage: int | None = None) -> int:
        """Return the number of a tensor like another one, in a storage of its own where none is given."""
        if storage is None:
            storage, self.storages = self.storages, self.storages + 1
        number = len(self.tensors)
        changed = {"tensor_id": number, "storage_id": storage, "elem_bytes": elem_bytes, "dtype": dtype}
        self.tensors.append({**tensor, **changed})
        return number

    def _read_twin(self, row: _Row, place: int, storage: int) -> None:
        """Let a product read a tensor's copy in FP8: half of its bytes."""
        index = row["input_ids"][place]
        tensor = self.tensors[index]
        if (index, storage) not in self.twins:
            self.twins[index, storage] = self._add(tensor, 1, _DTYPE, storage)
        row["input_ids"][place] = self.twins[index, storage]
        saved = prod(tensor["shape"])
        row["read_bytes"] -= saved
        if tensor["category"] != "parameter":
            row["batch_read_bytes"] -= saved


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
            f"--precision {step.precision}: experts are computed by grouped GEMMs of weights in bf16",
            fix=f"use one of {known}",
        )
    if model.experts and step.cuda_graphs:
        raise InputError(
            "--cuda-graphs: how many tokens an expert gets changes from step to step, and a graph's sizes cannot",
            fix="leave it out for a mixture of experts",
        )
    return _keep(model.name, [asdict(model), asdict(step)], lambda: _capture(model, step))


def make_network_trace(network: ConfiguredModel, wanted: Mapping[str, Any]) -> Trace:
    """Return the operators of a training step of a network that transformers or diffusers builds, without times.

    ``asked``: fields of `LanguageStep`; without ``sequence`` the configuration's own. The trace is kept as by `make_trace`. Raises
    InputError when the library is not installed, does not know the network, or something of a decoder's kernels is asked.
    """
    for word in sorted({"attention", "fusion", "cuda_graphs", "deterministic", "loss"} & {*filter(wanted.get, wanted)}):
        raise InputError(
            f"--{word.replace('_', '-')}: {network.kind} is built as its library writes it, not of kernels to choose from",
            file=network.file,
            fix="leave it out",
        )
    step = LanguageStep(**{"sequence": 1, "precision": "bf16", **wanted})  # PyTorch's autocast, which any plan takes
    row = asdict(step) | {
        "workload": network.name,
        "family": CONFIGURED,
        "model": network.kind,
        "sequence": wanted.get("sequence"),
        "lora": step.lora or None,
        "config": network.content,
    }

    def capture() -> Trace:
        capture_meta = _find_capture_meta()
        try:
            trace = capture_meta(row, step.batch)
            check_trace(trace, network.file)
            return trace
        except TraceError:  # blocks that are built alike need not run alike
            return capture_meta(row | {"whole": True}, step.batch)

    try:
        trace = _keep(network.name, [row, step.batch], capture)
    except InputError as error:
        raise InputError(error.problem, file=network.file, place=error.place, fix=error.fix) from error
    return trace.replace(replace(trace.facts, source="configuration of a model"))


def _keep(name: str, decides: list[Any], capture: Callable[[], Trace]) -> Trace:
    """Return a trace kept under all that ``decides`` it; captured, and kept, where there is none."""
    path = cache_folder() / f"{_name(name, decides)}.trace"
    with _CAPTURES:
        with suppress(TrioflowError, OSError):  # one that cannot be read is made again
            if path.exists():
                return read_pack(path)
        trace = capture()
        # A folder that cannot be written is not an error.
        with suppress(OSError), TemporaryDirectory() as temporary:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_trace(trace, temporary)
            pack_trace(temporary, path)
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


def _name(name: str, decides: list[Any]) -> str:
    """Return a name made of all that decides a trace, and the libraries that run it."""
    libraries = []
    for library in ("torch", "transformers", "diffusers"):
        with suppress(PackageNotFoundError):
            libraries.append(f"{library} {version(library)}")
    digest = hashlib.sha256(
        json.dumps([*decides, digest_modules(*MODULES), libraries], sort_keys=True).encode()
    ).hexdigest()
    plain = re.sub("[^a-z0-9.-]+", "-", name.lower()).strip("-")[:40]
    return f"{plain}-{digest[:16]}"


def _find_capture_meta() -> Callable[..., Trace]:
    """Return what captures a step without a device; InputError where PyTorch is missing."""
    quieten_profiler()
    try:
        from trioflow.trace.capture.meta import capture_meta
    except ImportError as error:
        raise InputError(
            f"the trace of a model given by its configuration is made with PyTorch ({error})",
            fix=how_to_install("capture"),
        ) from None
    return capture_meta


def _capture(model: LanguageModel, step: LanguageStep) -> Trace:
    """Run the step on fake tensors with few blocks, and repeat the last."""
    capture_meta = _find_capture_meta()
    captured = min(model.layers, model.dense_layers + CAPTURED_BLOCKS)
    if model.window or re.search(r"[\d?\[]", step.freeze):  # blocks may differ
        captured = model.layers
    row = {
        "workload": model.name,
        "family": LANGUAGE,
        "model": model.name,
        "layers": captured,
        "sequence": step.sequence,
        "attention": step.attention,
        "fusion": step.fusion,
        "loss": step.loss,
        "optimizer": step.optimizer,
        "precision": step.precision,
        "language_model": json.dumps(asdict(model), sort_keys=True),
        "freeze": step.freeze,
        "lora": step.lora or None,
        "lora_targets": step.lora_targets,
        "lora_dropout": step.lora_dropout,
    }
    trace = capture_meta(row, step.batch)
    products = choose_recipe(step.precision).products
    if step.fusion == GRADIENTS:
        trace = add_to_main_gradients(trace)
    if products:
        trace = cast_products(trace, products)
    if model.layers > captured:
        last = f"{BLOCKS}.{captured - 1}"
        trace = repeat_block(trace, last, model.layers - captured + 1)
    described = asdict(model) | {
        "parameters": model.parameters,
        "sequence": step.sequence,
        "attention": step.attention,
        "fusion": step.fusion,
        "cuda_graphs": step.cuda_graphs,
        "loss": step.loss,
        **({"deterministic": True} if step.deterministic else {}),
    }
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
