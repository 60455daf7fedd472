"""What is known by name: models, recorded traces, workloads to capture, and platforms: sizes, sources, what is measured."""

import pandas as pd

from trioflow.base.errors import PlatformError
from trioflow.base.provenance import read_json, read_table
from trioflow.base.units import format_time
from trioflow.costmodel.choices import find_collectives, measured_chips
from trioflow.costmodel.operators.model import load_shipped_models
from trioflow.hardware.machine import Platform, is_processor
from trioflow.hardware.platform import list_platforms, load_platform
from trioflow.trace.language.read import TABLE
from trioflow.trace.store import SHIPPED, shipped_traces
from trioflow.trace.workloads.catalog import CATALOG

_SIZES = ("layers", "hidden", "heads", "kv_heads", "feed_forward", "vocabulary", "experts")


def models() -> pd.DataFrame:
    """Return the models that are known by name, a row each.

    ``use``: how the name can be used: ``by name`` (a language model, which ``predict`` takes with PyTorch installed),
    ``trace`` (operators that ship, without PyTorch) or ``capture`` (a model that ``trioflow capture`` runs first);
    ``parameters`` as published; ``measured``: what was timed, empty where a cost model predicts all times;
    ``source`` of the sizes; ``left_out``: parts of the model that are not built.
    """
    rows = [
        {"name": row["name"], "use": "by name", "parameters": row["published_parameters"], **row}
        for row in read_table(TABLE)
    ]
    for name in shipped_traces():
        facts = read_json(SHIPPED / name / "trace.json")
        time_s = facts["step_time_s"]
        timed = f"a step of {format_time(time_s)} on {facts['device_name']}" if time_s else ""
        source = f"captured at batch {facts['batch']}" + ", shapes alone" * (not timed)
        rows.append({"name": name, "use": "trace", "measured": timed, "source": source})
    rows += [{"name": row["workload"], "use": "capture", "source": row["family"], **row} for row in read_table(CATALOG)]
    frame = pd.DataFrame(rows).replace("-", None)
    for name in ("parameters", *_SIZES):
        frame[name] = pd.to_numeric(frame[name]).astype("Int64")
    words = ("measured", "source", "left_out")
    return frame.fillna(dict.fromkeys(words, ""))[["name", "use", "parameters", *_SIZES, *words]]


def platforms() -> pd.DataFrame:
    """Return the platforms that ship, a row each: sizes of a GPU, what is measured, and the ``sources`` of all numbers.

    ``ranks``: GPUs of the machine, missing where any number can be asked for; ``operators``, ``collectives``: where
    their times come from; ``unmeasured``: keys of numbers that nobody measured on such a machine.
    """
    rows = []
    for name in list_platforms():
        try:
            platform, ranks = load_platform(name), True
        except PlatformError:  # of any number of ranks
            platform, ranks = load_platform(name, 1), False
        device = platform.device
        rows.append(
            {
                "name": name,
                "device": device.name,
                "ranks": platform.ranks if ranks else None,
                "ranks_per_node": platform.ranks_per_node,
                "memory_bytes": device.memory_bytes,
                "memory_bytes_per_s": device.memory_bandwidth_bytes_per_s,
                "bf16_flop_per_s": device.peak_flop_per_s.get("bf16"),
                "operators": _describe_operators(platform),
                "collectives": _describe_collectives(platform),
                "unmeasured": list(platform.unmeasured),
                "sources": dict(platform.sources),
            }
        )
    return pd.DataFrame(rows).astype({"ranks": "Int64", "ranks_per_node": "Int64"})


def _describe_operators(platform: Platform) -> str:
    """Return what the times of operators on a platform's device rest on."""
    sheet = platform.device.sheet
    if sheet is None or is_processor(platform.device.name) or sheet.name in load_shipped_models():
        return "measured"
    return "measured in part" if sheet.chip in measured_chips() else "transferred from other GPUs"


def _describe_collectives(platform: Platform) -> str:
    """Return what the times of collectives on a platform rest on."""
    inside = "measured" if find_collectives(platform) else "data sheet"
    if platform.ranks_per_node is None:
        return inside
    return f"{inside} in a node, {'measured' if platform.between_nodes else 'data sheet'} between nodes"
