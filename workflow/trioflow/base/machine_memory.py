"""How much memory this process may still take: what the machine, its groups and its limits leave."""

import resource
from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Limit, use, and the key of what can be given back, by version 2 and 1 of control groups."""


def find_available_bytes() -> float | None:
    """Return the memory that this process may still take, None where the system does not say [bytes].

    The least of what Linux calls available, of what is left of the limit of each control group that
    holds the process (version 1 or 2), and of the limit of its address space (``ulimit -v``). Pages
    of files that are no longer used count as left.
    """
    fields, limits = _read_fields(_MEMINFO), []
    if "MemAvailable" in fields:
        limits.append(fields["MemAvailable"] * 1024)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        limits.append(max(limit - _read_fields(_STATUS).get("VmSize", 0.0) * 1024, 0.0))
    for folder, files in _list_groups():
        limits += _read_group(folder, *files)
    return min(limits, default=None)


def _list_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the folders of the groups that hold this process, from its own to the root."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        for name, files in _FILES.items():
            if name in controllers.split(","):
                place = Path(own.lstrip("/"))
                for part in (place, *place.parents):
                    yield _GROUPS / name / part, files


def _read_group(folder: Path, limit: str, used: str, given_back: str) -> list[float]:
    try:
        most, now = (float((folder / name).read_text()) for name in (limit, used))
    except (OSError, ValueError):
        return []  # No limit: the file says "max", or is not there.
    return [max(most - now + _read_fields(folder / "memory.stat").get(given_back, 0.0), 0.0)]


def _read_fields(file: Path) -> dict[str, float]:
    """Return the numbers of a file of names and numbers; nothing where it cannot be read."""
    values = {}
    try:
        for line in file.read_text().splitlines():
            words = line.replace(":", " ").split()
            if len(words) > 1 and words[1].isdigit():
                values[words[0]] = float(words[1])
    except OSError:
        pass
    return values
