"""What a question leaves open: which platform a name means, and which cost models serve it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from trioflow.base.errors import InputError, PlatformError, suggest
from trioflow.base.provenance import PACKAGE, read_json, read_table
from trioflow.costmodel.collectives.model import NODES_FILE, CollectiveCostModel, load_collective_model
from trioflow.costmodel.collectives.platform import KIND, PlatformCollectives, load_platform_collectives
from trioflow.costmodel.device_times import DeviceTimes, load_overrides, prepare_device_times
from trioflow.costmodel.files import SHIPPED_MODELS
from trioflow.costmodel.operators.model import load_operator_model, load_shipped_models
from trioflow.hardware.machine import Device, DeviceSheet, Platform, list_fitting
from trioflow.hardware.platform import list_platforms, load_platform
from trioflow.trace.store import Trace

MEASURED = Path("results")
"""Where a workflow run in this folder leaves what it measured."""
THIS_MACHINE = "this-machine"
_USUAL = PACKAGE / "data" / "usual_platforms.tsv"

Collectives = CollectiveCostModel | PlatformCollectives


def find_platform(name: str) -> str | Path:
    """Return what ``load_platform`` takes; PlatformError for a ``this-machine`` never measured here."""
    if name != THIS_MACHINE:
        return name
    path = MEASURED / "platforms" / f"{THIS_MACHINE}.yaml"
    if not path.exists():
        raise PlatformError(
            "this machine has not been measured in this folder",
            file=path,
            fix=f"run `make reproduce`, or use one of {', '.join(list_platforms())}",
        )
    return path


def load_named_platform(name: str, ranks: int) -> Platform:
    """Return a platform by name, file or its GPU (``H100``: on its usual platform); ``this-machine`` is the workflow's own.

    A GPU that no shipped platform has gets the links and the host of one of its form (``usual_platforms.tsv``).
    """
    usual = find_usual_platform(name)
    if usual is None and not _names_platform(name):
        gpus = dict.fromkeys(
            row["gpu"].partition("-sxm")[0].partition("-pcie")[0].upper() for row in read_table(_USUAL)
        )
        raise PlatformError(
            f"no GPU or platform is called {name!r}",
            fix=f"{suggest(name, [*gpus, *list_platforms()])}known GPUs are {', '.join(gpus)}; `trioflow platforms` lists "
            "platforms; docs/my_cluster.md says how to describe a GPU and a cluster of your own",
        )
    if usual is None:
        return load_platform(find_platform(name), ranks)
    sheet, place = usual
    platform = load_platform(place, ranks)
    if platform.device.sheet is not None and platform.device.sheet.name == sheet.name:
        return platform
    doubt = f"trioflow has no platform with {sheet.driver_name}: links and host are those of {place}"
    return replace(platform, device=Device.of(sheet), doubts=(*platform.doubts, doubt))


def find_usual_platform(name: str) -> tuple[DeviceSheet, str] | None:
    """Return the sheet and the usual platform of the GPU that a name stands for; None for a platform's name or file."""
    if _names_platform(name):
        return None
    fitting = {sheet.name: sheet for word in (name, f"RTX {name}") for sheet in list_fitting(word)}
    usual = read_table(_USUAL)
    return next(((fitting[row["gpu"]], row["platform"]) for row in usual if row["gpu"] in fitting), None)


def _names_platform(name: str) -> bool:
    """Return whether a name is a platform's or a file's; else it can only be a GPU's."""
    return name == THIS_MACHINE or name in list_platforms() or name.endswith((".yaml", ".yml")) or "/" in name


def read_gpus(text: str) -> tuple[int, str]:
    """Return the number and the name in ``256xH100``; the name is a GPU, a platform or a platform's file.

    Raises InputError where it is written otherwise.
    """
    count, sign, name = str(text).partition("x")
    if not (count.isascii() and count.isdigit() and len(count) < 10 and int(count) and sign and name):
        raise InputError(
            f"--gpus {text!r:.60} is not a number and a name of GPUs", fix="write for example 256xH100 or 8xdgx-a100"
        )
    return int(count), name


def find_collectives(platform: Platform, named: str | None = None) -> Path | None:
    """Return the file of a platform's measured collectives (``named``: a file or shipped folder instead), or None.

    Groups on several nodes are planned from those inside a node by ``network.across_nodes``. Raises
    InputError when ``named`` is neither.
    """
    if named:
        shipped = SHIPPED_MODELS / named / "collectives.json"
        if "/" not in named and not Path(named).exists() and not shipped.exists():
            raise _refuse_name(named, "collective model", "collectives.json", ["closed-form"], "fit-collectives")
        return Path(named) if Path(named).exists() or not shipped.exists() else shipped
    folder = MEASURED / "cost_models" if platform.name == THIS_MACHINE else SHIPPED_MODELS
    name = platform.name
    if platform.node_collectives:
        name = platform.node_collectives
    path = folder / name / "collectives.json"
    for key, file in (("node_collectives", "collectives.json"), ("between_nodes", NODES_FILE)):
        word = getattr(platform, key)
        if word and not (folder / word / file).exists():
            known = [each.parent.name for each in sorted(folder.glob(f"*/{file}"))]
            raise PlatformError(
                f"no measured collectives are called {word!r}",
                place=key,
                fix=f"{suggest(word, known)}use one of {', '.join(known)}",
            )
    return path if path.exists() else None


def load_collectives(path: Path, method: str | None = None) -> Collectives:
    """Read either kind of collective model; InputError where the model lacks the method."""
    content = read_json(path)
    if isinstance(content, dict) and content.get("kind") == KIND:
        model = load_platform_collectives(path)
        return model.using(method) if method else model
    if method not in (None, "measured"):
        raise InputError(
            "holds measured curves only",
            file=path,
            fix=f"leave --algorithm {method} out, or fit a platform with `trioflow fit-collectives`",
        )
    return load_collective_model(path)


def choose_times(
    traces: Sequence[Trace], device: DeviceSheet | str, cost_model: str | Path | None, override: str | Path | None
) -> DeviceTimes:
    """Return the traces with a device's times, and the operator model for it.

    ``cost_model``: a file, a shipped model's name or ``this-machine`` as measured in this folder; by default chosen among
    those that ship. ``override``: a file of operator times. Raises as
    ``prepare_device_times``, and InputError when a file holds no model or no times.
    """
    overrides = load_overrides(override) if override else None
    named = str(cost_model or "")
    models = {named: load_operator_model(find_operator_model_file(named))} if named else load_shipped_models()
    return prepare_device_times(traces, device, models, overrides=overrides)


_OWN = MEASURED / "cost_models" / THIS_MACHINE / "operators.json"


def find_own_model(platform: Platform) -> str | None:
    """Return ``this-machine``, as for ``choose_times``, of that platform where its operators were measured in this folder."""
    return THIS_MACHINE if platform.name == THIS_MACHINE and _OWN.exists() else None


def find_operator_model_file(name: str) -> Path:
    """Return the file of an operator model by path or shipped name, or as measured here; InputError where there is none."""
    shipped = _OWN if name == THIS_MACHINE else SHIPPED_MODELS / name / "operators.json"
    if "/" not in name and shipped.exists():
        return shipped
    if not Path(name).exists():
        raise _refuse_name(name, "cost model", "operators.json", [], "fit")
    return Path(name)


def _refuse_name(name: str, what: str, file: str, others: Iterable[str], command: str) -> InputError:
    """Return the error of a model that is neither among the shipped ones nor a file."""
    known = [path.parent.name for path in sorted(SHIPPED_MODELS.glob(f"*/{file}"))]
    words = [*known, *others]
    return InputError(
        f"no {what} is called {name!r}, and there is no such file",
        fix=f"{suggest(name, words)}use one of {', '.join(words)}, or a file of `trioflow {command}`",
    )
