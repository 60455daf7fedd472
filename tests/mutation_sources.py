"""Files that import cleanly, for mutations: hand-written ones, captures of the session, public data."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import triosim_files
from mutation_runs import parallel_files
from mutations import Source
from small_step import small_step
from trioflow.datasets.catalogue import MODEL_TABLES, load_catalogue
from trioflow.trace.importers.options import ImportOptions

CPU = ImportOptions(gpu="a CPU", batch=4, precision="fp32")
SMALL = ImportOptions(batch=8, precision="fp32")
H100 = ImportOptions(gpu="NVIDIA H100 80GB HBM3", precision="tf32")
RAW = "triosim/vgg13-h100-b512-raw"
PROFILE, GRAPH = "kineto.json", "execution_trace.json"


def small_sources() -> list[Source]:
    """Return hand-written sources of every format but NeuSight's."""
    profile, graph = small_step()
    pair = {PROFILE: json.dumps(profile).encode(), GRAPH: json.dumps(graph).encode()}
    with tempfile.TemporaryDirectory() as folder:
        tables = _read_folder(triosim_files.write_files(Path(folder) / "t"), "t")
    return [
        Source("a small GPU step", "kineto with execution trace", pair, list(pair), SMALL),
        Source("a small GPU step, profile alone", "kineto alone", {PROFILE: pair[PROFILE]},
               [PROFILE], SMALL),
        _converted("a small GPU step, converted", profile, graph, SMALL, gpu="a GPU"),
        _exported("a small GPU step, exported", pair, SMALL),
        Source("small tables", "triosim", tables, ["t"], H100),
        *_whole_runs(_parallel_sources()),
    ]  # fmt: skip


def _parallel_sources() -> Iterator[Source]:
    """Yield a parallel run, with and without the execution trace; ``--gpu`` names its device."""
    pair = parallel_files(PROFILE, GRAPH)
    said = replace(SMALL, gpu="NVIDIA H100 80GB HBM3")
    yield Source("small parallel steps", "kineto with execution trace", pair, list(pair), said)
    yield Source("small parallel steps, profile alone", "kineto alone", {PROFILE: pair[PROFILE]},
                 [PROFILE], said)  # fmt: skip


def _whole_runs(sources: Iterable[Source]) -> list[Source]:
    """Return the profiles again, to be changed as whole runs."""
    return [
        replace(one, name=f"{one.name}, whole", whole=True)
        for one in sources
        if one.importer.startswith("kineto")
    ]


def captured_sources(name: str, folder: Path) -> list[Source]:
    """Return the sources that one capture makes: its folder, its pair, its profile, as Chakra."""
    files = _read_folder(folder, "raw")
    pair = {n: files[f"raw/{n}.gz"] for n in (PROFILE, GRAPH)}
    profile, graph = (json.loads(gzip.decompress(content)) for content in pair.values())
    sources = [
        Source(f"{name}, folder", "capture", files, ["raw"], ImportOptions(), "capture"),
        Source(f"{name}, pair", "kineto with execution trace", pair, list(pair), CPU),
        Source(f"{name}, profile alone", "kineto alone", {PROFILE: pair[PROFILE]}, [PROFILE], CPU),
        _converted(f"{name}, converted", profile, graph, CPU),
        _exported(f"{name}, exported", pair, CPU),
    ]
    return [*sources, *_whole_runs(sources)]


def public_sources(mirror: Path) -> list[Source]:
    """Return the sources of the public data: a raw pair, TrioSim's tables, NeuSight's tables."""
    catalogue = load_catalogue()
    raw = {path.name: path.read_bytes() for path in catalogue.held_files(mirror, [RAW])}
    profile = next(name for name in raw if name.startswith("profiler"))
    sources = [
        Source("VGG-13 on an H100, pair", "kineto with execution trace", raw, list(raw),
               ImportOptions()),
        Source("VGG-13 on an H100, profile alone", "kineto alone", {profile: raw[profile]},
               [profile], ImportOptions(batch=512)),
    ]  # fmt: skip
    sources += _whole_runs(sources)
    for model in ("vgg13", "resnet50"):
        held = catalogue.held_files(mirror, [f"triosim/{model}-h100-b128"])
        files = {f"{model}/{path.name}": path.read_bytes() for path in held}
        sources.append(Source(f"{model} on an H100", "triosim", files, [model], H100))
    for table in catalogue.held_files(mirror, MODEL_TABLES, ".csv"):
        sources.append(_neusight(table))
    return sources


def _neusight(table: Path) -> Source:
    """Return a table with its layer once, which is read in a tenth of the time."""
    name = f"{table.parent.name}/{table.name}"
    sidecar = table.with_suffix(".json")
    files = {name: table.read_bytes()}
    if sidecar.exists():
        measured = json.loads(sidecar.read_text()) | {"num_layer": 1}
        files[f"{table.parent.name}/{sidecar.name}"] = json.dumps(measured).encode()
    beside = {n: 0.1 for n in files if n.endswith(".json")}
    title = f"{table.stem} on {table.parent.name.replace('_', ' ')}"
    options = ImportOptions(repeat_layers=None if sidecar.exists() else 1)
    return Source(title, "neusight", files, [name], options, weights=beside)


def _read_folder(folder: Path, name: str) -> dict[str, bytes]:
    return {f"{name}/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}


def _exported(name: str, pair: dict[str, bytes], options: ImportOptions) -> Source:
    """Return a Chakra file that trioflow writes of a profile."""
    from same_model import ProportionalModel
    from trioflow.export.chakra import size_trace, write_chakra
    from trioflow.parallel.extrapolate import extrapolate
    from trioflow.parallel.plan import make_plan
    from trioflow.trace.importers.kineto import import_kineto

    with tempfile.TemporaryDirectory() as folder:
        for file, content in pair.items():
            (Path(folder) / file).write_bytes(content)
        trace = import_kineto(Path(folder) / PROFILE, Path(folder) / GRAPH, options)
        tasks = extrapolate(trace, make_plan(), ProportionalModel())
        source = size_trace([trace], make_plan(), tasks.metadata.batch)
        content = write_chakra(tasks, Path(folder) / "step", source)[0].read_bytes()
    return Source(name, "chakra", {"step.0.et": content}, ["step.0.et"], ImportOptions())


def _converted(
    name: str, profile: dict[str, Any], graph: dict[str, Any], options: ImportOptions, gpu: str = ""
) -> Source:
    """Return a Chakra file as PyTorch's converter writes it: calls, and the kernels they launch."""
    from trioflow.trace.importers.chakra_nodes import (
        add_attribute,
        new_metadata,
        new_node,
        write_messages,
    )

    timed = [e for e in profile["traceEvents"] if e.get("ph") == "X" and "args" in e]
    begin = min(e["ts"] for e in timed) - 1
    calls = {e["args"]["Record function id"]: e for e in timed if "Record function id" in e["args"]}
    kernels = {e["args"]["External id"]: e for e in timed if e.get("cat") == "kernel"}
    known = {n["id"] for n in graph["nodes"]}
    messages, further = [new_metadata()], max(known)
    for node in sorted(graph["nodes"], key=lambda n: n["id"]):
        attributes = {a["name"]: a["value"] for a in node["attrs"]}
        event = calls.get(attributes["rf_id"])
        message = new_node(node["id"], node["name"], "COMP_NODE")
        if node["ctrl_deps"] in known and node["ctrl_deps"] != node["id"]:
            message.ctrl_deps.append(node["ctrl_deps"])
        _set_times(message, event, begin)
        for side in ("inputs", "outputs"):
            info = getattr(message, side)
            for key in ("values", "shapes", "types"):
                # Converters write either; JSON is read faster.
                setattr(info, key, (str if gpu else json.dumps)(node[side][key]))
        add_attribute(message, "is_cpu_op", "bool_val", True)
        add_attribute(message, "op_schema", "string_val", attributes["op_schema"])
        add_attribute(message, "seq_id", "int64_val", attributes["seq_id"])
        messages.append(message)
        kernel = kernels.get(event["args"]["External id"]) if event else None
        if kernel:
            further += 1
            one = new_node(further, kernel["name"], "COMP_NODE")
            one.ctrl_deps.append(node["id"])
            _set_times(one, kernel, begin)
            add_attribute(one, "is_cpu_op", "bool_val", False)
            messages.append(one)
    with tempfile.TemporaryDirectory() as folder:
        write_messages(Path(folder) / "x.et", messages)
        content = (Path(folder) / "x.et").read_bytes()
    said = ImportOptions(gpu=options.gpu or gpu, batch=options.batch, precision=options.precision)
    return Source(name, "chakra", {"step.et": content}, ["step.et"], said)


def _set_times(message: Any, event: dict[str, Any] | None, begin: float) -> None:
    if event:
        message.start_time_micros = int(event["ts"] - begin)
        end = int(event["ts"] + event["dur"] - begin)
        message.duration_micros = end - message.start_time_micros


GROUPS = ("public", "captured", "small")
SHARES = {
    "capture": 80, "kineto with execution trace": 150, "kineto alone": 150, "chakra": 120,
    "triosim": 600, "neusight": 90, "small": 150, "whole": 20, "small, whole": 120,
}  # fmt: skip
"""Mutations of one source in the whole suite, by its importer."""
FEW = {
    "capture": 6, "kineto with execution trace": 12, "kineto alone": 8, "chakra": 8,
    "triosim": 20, "neusight": 2, "small": 35, "whole": 2, "small, whole": 40,
}  # fmt: skip
"""Those in the fast tier."""


def all_sources(captures: dict[str, Path], mirror: Path | None) -> list[tuple[str, Source]]:
    """Return every source with its group; without a mirror those of the public data are missing."""
    found = [("small", source) for source in small_sources()]
    for name, folder in captures.items():
        found += [("captured", source) for source in captured_sources(name, folder)]
    if mirror is not None:
        found += [("public", source) for source in public_sources(mirror)]
    return found


def seeds_of(group: str, source: Source, shares: dict[str, int]) -> range:
    """Return the seeds that a source runs."""
    if source.whole:
        return range(shares["small, whole" if group == "small" else "whole"])
    return range(shares["small" if group == "small" else source.importer])
