"""What measured runs showed of a platform beside its own numbers: the platform with it, and its file."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trioflow.base.errors import PlatformError
from trioflow.base.yaml_files import read_yaml
from trioflow.hardware.machine import Platform
from trioflow.hardware.platform import find_file, write_content

Corrections = Mapping[str, float]
"""Numbers by component: factors on times, seconds or bytes where the name ends so."""
MICRO_BATCH, EXCHANGE = "micro_batch_s", "exchange_per_rank_s"
"""What is added to the host's costs of the same names [s]."""
_LONGEST = 256
"""Characters of a file's name."""


def correct_platform(platform: Platform, corrections: Corrections) -> Platform:
    """Return a platform with numbers that measured runs showed, beside or in place of its own."""
    values = dict(corrections)
    launches = values.pop("launches", 1.0)
    host = {key: value * launches if key.startswith("launch") else value for key, value in platform.host.items()}
    host |= {key: host.get(key, 0.0) + values.pop(key) for key in (MICRO_BATCH, EXCHANGE) if key in values}
    own = dict(platform.corrections)
    own |= {
        key: value + own.get(key, 0.0) if key.endswith(("_s", "_bytes")) else value * own.get(key, 1.0)
        for key, value in values.items()
    }
    return replace(platform, host=host, corrections=own)


def save_corrected(name_or_path: str | Path, corrections: Mapping[str, float], path: str | Path, source: str) -> None:
    """Write a platform's file again, with numbers that runs showed: of ``corrections``, launches and micro-batches as host costs.

    Files that it names are named by their whole path.
    """
    origin = find_file(name_or_path)
    content = _name_files(read_yaml(origin, PlatformError), origin.parent)
    host, own = content.setdefault("host", {}), content.setdefault("corrections", {})
    for key, value in corrections.items():
        if key == "launches":
            launches = {name: one for name, one in host.items() if name.startswith("launch")}
            host |= {
                name: {"value": one["value"] * value, "source": f"{source}, {value:.3g} times: {one['source']}"}
                for name, one in launches.items()
            }
            continue
        place = host if key in (MICRO_BATCH, EXCHANGE) else own
        before = place.get(key, {}).get("value", 0.0 if key.endswith(("_s", "_bytes")) else 1.0)
        after = before + value if key.endswith(("_s", "_bytes")) else before * value
        place[key] = {"value": after, "source": source}
    write_content({key: one for key, one in content.items() if one != {}}, path)


def _name_files(content: Any, folder: Path) -> Any:
    """Return a file's content in which files beside it are named by their whole path."""
    if isinstance(content, dict):
        return {key: _name_files(one, folder) for key, one in content.items()}
    is_file = isinstance(content, str) and len(content) < _LONGEST and "." in content
    return str((folder / content).resolve()) if is_file and (folder / content).is_file() else content
