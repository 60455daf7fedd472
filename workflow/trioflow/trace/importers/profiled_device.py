"""On which device a profile was taken, as far as the file tells, and what contradicts that."""

from __future__ import annotations

from collections.abc import Iterable

from trioflow.errors import TraceError
from trioflow.hardware.device_names import is_processor, read_name
from trioflow.hardware.device_sheet import list_devices, load_device
from trioflow.trace.importers.options import ImportOptions
from trioflow.trace.kernels import LAUNCHES
from trioflow.trace.kineto import DEVICE, Profile
from trioflow.trace.profiler_fields import kineto_words, vendors
from trioflow.trace.steps import Step


def name_device(profile: Profile, step: Step, options: ImportOptions) -> str:
    """Return the name of the device that a step ran on, from the file and the options.

    A file names its devices in its header. Where it lists them without the
    number that its kernels carry (ROCm counts processors too), and all are of
    one name, it is that one. A name that many chips share counts as none.

    Raises
    ------
    TraceError
        When the device events are of a kind that trioflow does not read, a run
        on an accelerator lacks them, or ``--gpu`` contradicts the file.
    """
    if profile.foreign:
        word, number = max(profile.foreign.items(), key=lambda item: item[1])
        raise TraceError(
            f"the profile is of a device that trioflow does not read ({number} events of the"
            f" category {word})", file=profile.path,
            fix="give a profile of a GPU, or of a run on the processor alone",
        )  # fmt: skip
    if not step.on_device:
        _check_processor(profile, options)
        return str(options.need("gpu", profile.path))
    found = _listed_name(profile, step)
    if options.gpu is None:
        return str(options.need("gpu", profile.path, found))
    if found is None or found in kineto_words("shared_device_name"):
        _check_vendor(profile, found, options.gpu)
        return options.gpu
    if read_name(found).fits(read_name(options.gpu)):
        return found
    return str(options.need("gpu", profile.path, found))


def _listed_name(profile: Profile, step: Step) -> str | None:
    """Return the device's name in the file's header; None where there is none."""
    number = next(k.details.get("device", 0) for ks in step.launched for k in ks)
    listed = {
        properties.get("id"): properties["name"]
        for properties in profile.header.get(kineto_words("devices")[0]) or []
        if isinstance(properties, dict) and isinstance(properties.get("name"), str)
    }
    names = set(listed.values())
    return listed.get(number) or (names.pop() if len(names) == 1 else None)


def _check_processor(profile: Profile, options: ImportOptions) -> None:
    """Refuse a run on an accelerator without its device events, whatever ``--gpu`` says."""
    words = kineto_words("accelerator_call")
    sign = next((name for name in profile.names if name.startswith(words)), None)
    if profile.is_category(*DEVICE).any():
        sign = sign or "kernels of other steps"
    if sign is not None:
        raise TraceError(
            f"the run used an accelerator ({sign}) and its device events are not in the profile",
            file=profile.path, fix="profile with ProfilerActivity.CUDA among the activities",
        )  # fmt: skip
    if options.gpu is not None and _is_gpu(options.gpu):
        raise TraceError(
            f"--gpu names the GPU {options.gpu} and the profile holds no device event: the step ran"
            " on a processor", file=profile.path,
            fix="name the processor, or profile with ProfilerActivity.CUDA among the activities",
        )  # fmt: skip


def _is_gpu(name: str) -> bool:
    """Tell whether a name is a GPU's: of a product with a sheet, or with a vendor's word for GPUs."""
    sheets = (load_device(device) for device in list_devices())
    products = {read_name(one).product for sheet in sheets for one in sheet.driver_names}
    return read_name(name).product in products or _vendor_of([name]) is not None


def _check_vendor(profile: Profile, found: str | None, given: str) -> None:
    """Refuse a processor, and a GPU of another vendor than the file's device or driver calls."""
    launched = profile.is_category(*LAUNCHES)
    calls = [profile.names[code] for code in set(profile.column("name")[launched].tolist())]
    seen = _vendor_of([found or ""]) or _vendor_of_calls(calls)
    named = "a processor" if is_processor(given) else _vendor_of([given])
    if seen is not None and named is not None and seen != named:
        raise TraceError(
            f"the profile is of a device of {seen}, --gpu says {given}", file=profile.path,
            fix="leave --gpu out or correct it",
        )  # fmt: skip


def _vendor_of(names: Iterable[str]) -> str | None:
    """Return whose GPUs go by some names; None where no word tells."""
    for name in names:
        parts = name.lower().replace("-", " ").replace("_", " ").split()
        for vendor, words in vendors("device_words").items():
            if any(part.startswith(tuple(words)) for part in parts):
                return vendor
    return None


def _vendor_of_calls(names: Iterable[str]) -> str | None:
    """Return whose driver some calls are of; None where they are of several, or of none known."""
    prefixes = {v: tuple(words) for v, words in vendors("driver_calls").items()}
    found = {v for name in names for v, words in prefixes.items() if name.startswith(words)}
    return found.pop() if len(found) == 1 else None
