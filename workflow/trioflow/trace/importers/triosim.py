"""Traces in TrioSim's own format (https://github.com/sarchlab/triosim): ``trace.csv`` and ``tensor.csv``.

An operator's time is the union of its kernels' intervals: the other column counts gaps in which the
device waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trioflow.base.errors import TraceError
from trioflow.base.provenance import stamp
from trioflow.base.settings import PRECISIONS
from trioflow.base.units import ns_to_s, us_to_ns
from trioflow.hardware.device_sheet import is_processor
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.consistency import check_trace
from trioflow.trace.flops import count_flop
from trioflow.trace.importers.options import ImportOptions, Reader
from trioflow.trace.importers.triosim_autograd import (
    NodeTensors,
    count_node_flop,
    find_arguments,
    find_parameters,
    join_forward,
)
from trioflow.trace.importers.triosim_tables import (
    TENSOR_FILE,
    TRACE_FILE,
    OperatorRow,
    TensorRow,
    check_folder,
    read_triosim,
)
from trioflow.trace.store import Trace
from trioflow.trace.tensors import MadeInside, TensorRef

_HALF = {"bf16": "c10::BFloat16", "fp16": "c10::Half"}
_DTYPES = {0: "undefined", 1: "bool", 2: "c10::Half", 4: "float", 8: "long int", 16: "c10::complex<double>"}  # fmt: skip
"""The source has sizes of elements only: the types that training uses most."""


def recognise(path: str | Path) -> bool:
    """Return whether a path is a folder in TrioSim's format."""
    return all((Path(path) / name).is_file() for name in (TRACE_FILE, TENSOR_FILE))


def import_triosim(folder: str | Path, options: ImportOptions) -> Trace:
    """Read a trace in TrioSim's format; TraceError names file, line and column, or the flag to give.

    ``options``: GPU and precision, which the files do not hold, and the batch where no image goes
    in first. The step is the sum of its operators' times. Facts besides: ``busy_s`` and ``span_s``
    (sums of both columns [s]), ``span_ns`` (an operator's first kernel start to last end [ns]),
    ``tp_flagged`` (``op_id`` that TrioSim's tensor parallelism splits).

    A processor is known by its name. Host and idle times and modules are not in the source: a layer
    is what runs from one reader of a weight to the next.
    """
    folder = Path(folder)
    check_folder(folder)
    rows = read_triosim(folder)
    facts = _read_facts(folder, rows, options)
    parameters = find_parameters(rows)
    joined = join_forward(rows, parameters)
    nodes = NodeTensors(rows, parameters)
    nodes.complete(joined)
    modules, units = _find_layers(rows, parameters)
    facts |= {"units": units, "parameters": _name_parameters(rows, modules, parameters)}
    facts["warnings"] = _warn(rows, joined, nodes)
    observed = _observe(
        rows, joined, nodes, _DTYPES | {2: _HALF.get(facts["precision"], _DTYPES[2])}
    )
    for place, one in enumerate(observed):
        one.module = modules[place]
    _keep_saved(rows, joined, observed)
    trace = assemble_trace(observed, facts)
    check_trace(trace, folder / TENSOR_FILE)
    return trace


def _read_facts(
    folder: Path, rows: Sequence[OperatorRow], options: ImportOptions
) -> dict[str, Any]:
    """Return the facts of the step; what the files do not say comes from the options."""
    first = next((t for t in rows[0].inputs if t.type == "input" and len(t.shape) == 4), None)
    batch = options.need("batch", folder, first.shape[0] if first else None)
    precision = str(options.need("precision", folder))
    if precision not in PRECISIONS:
        raise TraceError(
            f"unknown precision {precision!r}", file=folder, fix=f"use one of {', '.join(PRECISIONS)}"
        )  # fmt: skip
    halves = any(t.elem_bytes == 2 for one in rows for t in (*one.inputs, *one.outputs))
    if halves != (precision in _HALF):
        raise TraceError(
            f"the trace has {'some' if halves else 'no'} elements of 2 bytes, "
            f"so its precision is not {precision}", file=folder, fix="correct --precision",
        )  # fmt: skip
    device = str(options.need("gpu", folder))
    updates = any(one.stage == "optimizer" for one in rows)
    busy_ns, span_ns = ([us_to_ns(getattr(o, key)) for o in rows] for key in ("busy_us", "span_us"))
    if not sum(busy_ns):
        raise TraceError(
            "no operator takes any time", file=folder / TRACE_FILE,
            place="column Operator_cudatimenooverlap",
        )  # fmt: skip
    return {
        "source": "TrioSim",
        "workload": options.workload or folder.resolve().name,
        "batch": batch,
        "device": "cpu" if is_processor(device) else "cuda",
        "device_name": device,
        "precision": precision,
        "optimizer": options.optimizer or ("unknown (in trace)" if updates else "none"),
        "step_time_s": ns_to_s(sum(busy_ns)),
        "step_time_source": "busy",
        "busy_s": ns_to_s(sum(busy_ns)),
        "span_s": ns_to_s(sum(span_ns)),
        "span_ns": span_ns,
        "tp_flagged": [place for place, one in enumerate(rows) if one.split],
        **stamp((folder / TRACE_FILE, folder / TENSOR_FILE)),
    }


def _warn(
    rows: Sequence[OperatorRow], joined: Sequence[int | None], nodes: NodeTensors
) -> list[str]:
    """Return what the reader must know of this source."""
    warnings = [
        "host and idle times are not in the source: the step time is the device's busy time",
        "modules are not in the source: a layer runs from one reader of a weight to the next",
    ]
    strays = sum(not one.in_order for one in rows)
    if strays:
        warnings.append(
            f"the tensors of {strays} operators do not stand together in {TENSOR_FILE}: "
            "taken by id and size"
        )
    lonely = [one.name.split()[-1] for one, target in zip(rows, joined, strict=True)
              if one.stage == "backward" and target is None]  # fmt: skip
    if lonely:
        warnings.append(
            f"{len(lonely)} backward operators have no forward operator here: "
            f"{', '.join(sorted(set(lonely)))}"
        )
    if nodes.completed:
        warnings.append(
            f"{nodes.completed} backward nodes show only a view in the source: "
            "their tensors are taken from their forward operators and from what comes next"
        )
    return warnings


def _find_layers(
    rows: Sequence[OperatorRow], parameters: set[int]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return each forward operator's layer, and the layers as pipeline units, in order.

    A layer starts with an operator that reads a weight (a parameter of two or more dimensions);
    norms and what comes before the first one have none.
    """
    modules: list[str] = []
    count = 0
    for one in rows:
        starts = one.stage == "forward" and any(
            t.storage in parameters and len(t.shape) > 1 for t in one.inputs
        )
        count += starts
        modules.append(
            f"layers.{max(count - 1, 0)}" if one.stage == "forward" and parameters else ""
        )
    names = list(dict.fromkeys(filter(None, modules)))
    return modules, [{"name": name, "modules": [name]} for name in names]


def _name_parameters(
    rows: Sequence[OperatorRow], modules: Sequence[str], parameters: set[int]
) -> list[dict[str, Any]]:
    """Return the parameters in the order in which forward reads them, with generated names."""
    found: dict[int, dict[str, Any]] = {}
    numbers: dict[str, int] = {}
    for one, module in zip(rows, modules, strict=True):
        for tensor in one.inputs if one.stage == "forward" else []:
            if tensor.storage in parameters and tensor.storage not in found:
                number = numbers[module] = numbers.get(module, -1) + 1
                found[tensor.storage] = {
                    "name": f"{module}.{number}",
                    "shape": list(tensor.shape),
                    "elem_bytes": tensor.elem_bytes,
                }
    return list(found.values())


def _observe(
    rows: Sequence[OperatorRow],
    joined: Sequence[int | None],
    nodes: NodeTensors,
    dtypes: dict[int, str],
) -> list[ObservedOperator]:
    """Convert the rows."""
    observed = []
    for one, target in zip(rows, joined, strict=True):
        shapes = [t.shape for t in one.inputs]
        arguments, written = find_arguments(one.name, shapes)
        flop = None
        if target is not None:
            forward = rows[target]
            factors = [t for t in forward.inputs if len(t.shape) > 1 and nodes.wants_gradient(t)]
            flop = count_node_flop(
                one.name, shapes, [t.shape for t in one.outputs],
                count_flop(
                    forward.name,
                    [t.shape for t in forward.inputs], [t.shape for t in forward.outputs],
                ),
                len(factors),
            )  # fmt: skip
        observed.append(
            ObservedOperator(
                one.name,
                one.stage,
                inputs=[
                    _refer(t, place, dtypes, nodes.parameters)
                    for t, place in zip(one.inputs, arguments, strict=True)
                ],
                outputs=[
                    _refer(t, place, dtypes, nodes.parameters)
                    for place, t in enumerate(one.outputs)
                ],
                written=written,
                flop=flop,
                device_ns=us_to_ns(one.busy_us),
                forward=target,
            )
        )
    return observed


def _refer(
    tensor: TensorRow, argument: int, dtypes: dict[int, str], parameters: set[int]
) -> TensorRef:
    return TensorRef(
        tensor.id, tensor.storage, tensor.elem_bytes, tensor.shape, dtypes[tensor.elem_bytes],
        argument, "parameter" if tensor.storage in parameters else "",
    )  # fmt: skip


def _keep_saved(
    rows: Sequence[OperatorRow],
    joined: Sequence[int | None],
    observed: Sequence[ObservedOperator],
) -> None:
    """Let a forward operator make what only its backward reads: a mask, indices, saved statistics."""
    seen: set[int] = set()
    for place, one in enumerate(rows):
        target = joined[place]
        if one.stage == "backward" and target is not None:
            for tensor, ref in zip(one.inputs, observed[place].inputs, strict=True):
                arrives = tensor.type.startswith("grad") or not tensor.defined
                if ref.storage not in seen and not arrives:
                    source = tuple(observed[target].inputs)
                    observed[target].made.append(MadeInside(ref, source))
                    seen.add(ref.storage)
        for tensor in (*one.inputs, *one.outputs, *one.after):
            seen.add(tensor.storage)


READER = Reader(recognise, import_triosim, "TrioSim's trace.csv and tensor.csv", repeats=False)
