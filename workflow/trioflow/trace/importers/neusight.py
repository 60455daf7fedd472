"""NeuSight's operator tables: one transformer layer with embeddings and head, on one GPU.

A table is a traced torch.fx graph with times; the ``.json`` beside it says how often the layer
occurs and how long the model took. Folder and file name hold GPU, model, train or inf, sequence and
batch.

Source: S. Lee et al., NeuSight, ASPLOS 2025; https://github.com/sitar-lab/NeuSight,
``scripts/asplos/label``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.provenance import stamp
from trioflow.base.units import format_time, ms_to_s, ns_to_s
from trioflow.trace.assemble import assemble_trace
from trioflow.trace.consistency import check_trace
from trioflow.trace.gradients import ReadyGradient
from trioflow.trace.importers.neusight_graph import StepBuilder
from trioflow.trace.importers.neusight_tables import (
    FxNode,
    find_floor,
    read_model_config,
    read_nodes,
    read_sidecar,
)
from trioflow.trace.importers.options import ImportOptions, Reader
from trioflow.trace.repeat import repeat_block
from trioflow.trace.store import Trace

_FILE = re.compile(r"(?P<model>.+)-(?P<mode>train|inf)-(?P<sequence>\d{1,9})-(?P<batch>\d{1,9})")
_GPU = re.compile(r"(NVIDIA|Tesla|Quadro|GeForce|AMD)[_ -].+")
_PRECISIONS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
_POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx")


def recognise(path: str | Path) -> bool:
    """Return whether a path is one of NeuSight's operator tables."""
    path = Path(path)
    if path.suffix != ".csv" or not path.is_file():
        return False
    try:
        with path.open(encoding="utf-8-sig") as stream:
            titles = {title.strip() for title in stream.readline(1 << 16).split(",")}
    except (OSError, UnicodeDecodeError):
        return False
    return {"_input_nodes", "fw_latency", "bw_latency", "Name"} <= titles


def import_neusight(csv_path: str | Path, options: ImportOptions) -> Trace:
    """Read one of NeuSight's operator tables and repeat its layer; TraceError names file, line and column, or the flag.

    The step is the sum of its operators' times. Facts besides: ``measured_end_to_end_s``,
    ``measured_forward_s``, ``measured_backward_s`` (of the sidecar), ``busy_over_measured``,
    ``timer_floor_s`` (what the timer shows where nothing runs), ``host_only_s`` (such rows, over
    all layers) [s].

    Rows without a kernel (sizes, indices, views) show the timer's floor of microseconds: they take
    no device time; the floor within others stays. There is no optimizer. Embeddings' rows come from
    NeuSight's configuration, else from the head's width and the sequence; a head as wide as the
    vocabulary shares its weight and has no bias.
    """
    path = Path(csv_path)
    if not path.is_file():
        raise TraceError("no such file", file=path)
    nodes = read_nodes(path)
    sidecar = read_sidecar(path)
    facts = _read_facts(path, nodes, options)
    layers = options.need(
        "repeat_layers", path, int(sidecar["num_layer"]) if "num_layer" in sidecar else None
    )
    block = _find_block(path, nodes, int(layers))
    model = _Model(read_model_config(path, facts["model"]), nodes, block, facts["warnings"])
    step = StepBuilder(find_floor(nodes), facts["mode"] == "train", model.shapes_of, model.tied)
    step.run_forward(nodes)
    step.run_backward()
    facts["units"] = _find_units(nodes, block)
    trace = _assemble(path, step, facts)
    if block and int(layers) > 1:
        trace = repeat_block(trace, block, int(layers))
    trace.facts = replace(trace.facts, **_compare(trace, step, block, int(layers), sidecar))
    return trace


def _assemble(path: Path, step: StepBuilder, facts: dict[str, Any]) -> Trace:
    """Return the trace of the rows as they are, the layer once."""
    parameters = list(step.parameters.values())
    busy_s = ns_to_s(sum(one.device_ns for one in step.operators))
    if not busy_s:
        raise TraceError("no row launches a kernel", file=path, place="column fw_latency")
    facts |= {
        "parameters": parameters if step.ready else [],
        "timer_floor_s": ns_to_s(step.floor.typical_ns),
        "step_time_s": busy_s,
    }
    ready = sorted(
        ReadyGradient(place, tuple(step.parameters[name]["shape"]))
        for name, place in step.ready.items()
    )
    trace = assemble_trace(step.operators, facts, ready=ready)
    check_trace(trace, path)
    trace.facts = replace(trace.facts, parameters=parameters)
    return trace


def _read_facts(path: Path, nodes: Sequence[FxNode], options: ImportOptions) -> dict[str, Any]:
    """Return what path, table and options say of the step."""
    named = _FILE.fullmatch(path.stem)
    folder = path.resolve().parent.name
    gpu = folder.replace("_", " ") if _GPU.fullmatch(folder) else None
    first = next(n for n in nodes if n.op == "placeholder" and n.is_tensor and n.shape)
    if named and int(named["batch"]) != first.shape[0]:
        raise first.row.error(
            "output_shape", f"the input has {first.shape[0]} samples, the file's name says "
            f"{named['batch']}", "give the table under its own name",
        )  # fmt: skip
    kinds = {node.dtype for node in nodes if node.is_float}
    precision = _PRECISIONS.get(next(iter(kinds))) if len(kinds) == 1 else None
    trained = any(node.backward_ns for node in nodes)
    mode = named["mode"] if named else ("train" if trained else "inf")
    if mode == "train" and not trained:
        raise TraceError(
            "the file's name says train, but no row has a gradient's time",
            file=path, place="column bw_latency", fix="give the whole table",
        )  # fmt: skip
    model = named["model"] if named else ""
    files = [path, path.with_suffix(".json")]
    return {
        "source": "NeuSight",
        "workload": options.workload or path.stem,
        "model": model,
        "mode": mode,
        "batch": options.need("batch", path, first.shape[0]),
        "device": "cuda",
        "device_name": options.need("gpu", path, gpu),
        "precision": options.need("precision", path, precision),
        "optimizer": options.need("optimizer", path, "none"),
        "step_time_source": "busy",
        "warnings": [
            "host and idle times are not in the source: the step time is the device's busy time",
            "the source holds no optimizer step and no loss",
        ],
        **stamp(file for file in files if file.is_file()),
    }


def _find_block(path: Path, nodes: Sequence[FxNode], layers: int) -> str:
    """Return the path of the layer: the one module whose name is a number."""
    found: dict[str, FxNode] = {}
    for node in nodes:
        parts = node.module.split(".")
        numbered = next((k for k, part in enumerate(parts) if part.isdecimal()), None)
        if numbered is not None:
            found.setdefault(".".join(parts[: numbered + 1]), node)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise found[second].row.error(
            "meta", f"the table holds the layers {first} and {second}, one is expected"
        )
    if not found and layers > 1:
        raise TraceError(
            f"no module of the table is a numbered layer that could be repeated {layers} times",
            file=path, place="column meta", fix="give --repeat-layers 1",
        )  # fmt: skip
    return next(iter(found), "")


def _find_units(nodes: Sequence[FxNode], block: str) -> list[dict[str, Any]]:
    """Return the pipeline units: what is before the layer, the layer, what is after it."""
    before: list[str] = []
    after: list[str] = []
    seen = False
    for node in nodes:
        inside = bool(block) and f"{node.module}.".startswith(f"{block}.")
        seen |= inside
        if node.op == "call_module" and not inside:
            (after if seen else before).append(node.target)
    units = [("embeddings", before), (block, [block] if block else []), ("head", after)]
    return [{"name": name, "modules": modules} for name, modules in units if modules]


@dataclass
class _Model:
    """The shapes of parameters that the table shows only in part."""

    config: dict[str, Any]
    nodes: Sequence[FxNode]
    block: str
    warnings: list[str]

    def __post_init__(self) -> None:
        self.by_name = {node.name: node for node in self.nodes}
        self.vocabulary = self._find_vocabulary()
        self.tied = self._find_tied()

    def _embeddings(self) -> list[FxNode]:
        return [n for n in self.nodes if n.op == "call_module" and n.module_class == "Embedding"]

    def _heads(self) -> list[FxNode]:
        """Return the linear layers outside the repeated block that widen their input."""
        return [
            node for node in self.nodes
            if node.op == "call_module" and node.module_class == "Linear"
            and not (self.block and node.target.startswith(f"{self.block}."))
            and node.shape and self._input_shape(node)[-1:] < node.shape[-1:]
        ]  # fmt: skip

    def _input_shape(self, node: FxNode) -> tuple[int, ...]:
        return self.by_name[node.inputs[0]].shape if node.inputs else ()

    def _reads_input(self, node: FxNode) -> bool:
        """Return whether an embedding looks up what the model was given."""
        place: FxNode | None = node
        while place and place.inputs:
            before = (self.by_name[name] for name in place.inputs)
            place = next((one for one in before if one.is_tensor), None)
        return place is not None and place.op == "placeholder"

    def _find_vocabulary(self) -> int:
        widest = max((node.shape[-1] for node in self._heads()), default=0)
        stated = self._stated("vocab_size")
        if not stated and not widest and any(map(self._reads_input, self._embeddings())):
            self.warnings.append(
                "nothing says how many rows the vocabulary's embedding has: 1 taken"
            )
        return stated or widest or 1

    def _stated(self, *keys: str) -> int:
        """Return the first of some whole numbers of the configuration, or 0."""
        values = (self.config.get(key) for key in keys)
        return next((value for value in values if type(value) is int and value > 0), 0)

    def _find_tied(self) -> dict[str, str]:
        """Pair heads over the vocabulary with the embedding whose weight they share."""
        if self.config.get("tie_word_embeddings") is False:
            return {}
        tied = {}
        for embedding in filter(self._reads_input, self._embeddings()):
            for head in self._heads():
                width = self._input_shape(head)[-1:]
                if head.shape[-1] == self.vocabulary and width == embedding.shape[-1:]:
                    tied[f"{head.target}.weight"] = f"{embedding.target}.weight"
        return tied

    def shapes_of(self, node: FxNode, given: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a leaf module's parameters by name."""
        if not node.shape or (node.module_class == "Linear" and not given):
            raise node.row.error("output_shape", f"module {node.target} works on a single number")
        width = node.shape[-1]
        if node.module_class == "Embedding":
            return {"weight": (self._rows(node, given), width)}
        if node.module_class == "Linear":
            shapes = {"weight": (width, given[-1]), "bias": (width,)}
            return {
                k: v
                for k, v in shapes.items()
                if f"{node.target}.weight" not in self.tied or k == "weight"
            }
        return {"weight": (width,), "bias": (width,)}

    def _rows(self, node: FxNode, given: tuple[int, ...]) -> int:
        """Return how many rows an embedding has."""
        if self._reads_input(node):
            return self.vocabulary
        if given[:1] == (1,):  # one row of indices for all samples: positions
            return self._stated(*_POSITIONS) or given[-1]
        stated = self._stated("type_vocab_size")
        if not stated:
            self.warnings.append(f"nothing says how many rows {node.target} has: 1 taken")
        return stated or 1


def _compare(
    trace: Trace, step: StepBuilder, block: str, layers: int, sidecar: dict[str, float]
) -> dict[str, Any]:
    """Return the step's facts beside what was measured of the whole model."""
    busy_s = ns_to_s(int(trace.operators["device_ns"].sum()))
    host_ns = sum(
        time_ns * (layers if block and f"{module}.".startswith(f"{block}.") else 1)
        for module, time_ns in step.host_only_ns.items()
    )
    names = {"e2e": "end_to_end", "fw": "forward", "bwall": "backward"}
    measured = {
        f"measured_{name}_s": ms_to_s(sidecar[f"{key}_latency"])
        for key, name in names.items()
        if f"{key}_latency" in sidecar
    }
    facts: dict[str, Any] = {
        "step_time_s": busy_s, "step_time_source": "busy", "busy_s": busy_s,
        "host_only_s": ns_to_s(host_ns), **measured,
    }  # fmt: skip
    if "measured_end_to_end_s" in measured:
        ratio = busy_s / measured["measured_end_to_end_s"]
        facts["busy_over_measured"] = ratio
        facts["warnings"] = trace.facts.warn(
            f"the operators sum to {format_time(busy_s)}, {abs(ratio - 1) * 100:.1f} % "
            f"{'more' if ratio > 1 else 'less'} than the whole model's measured "
            f"{format_time(measured['measured_end_to_end_s'])}"
        )
    return facts


READER = Reader(recognise, import_neusight, "a NeuSight table", repeats=True)
