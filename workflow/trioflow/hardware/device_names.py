"""What a device's name says: product, memory and form factor, however it is spelt.

The words are those of ``data/device_names.json``; a new spelling is added there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trioflow.provenance import PACKAGE, read_json

TABLE = PACKAGE / "data" / "device_names.json"

_MEMORY = re.compile(r"\b(\d+) ?g(?:i?b)?\b")


@dataclass(frozen=True)
class DeviceName:
    """The parts of a name.

    Attributes
    ----------
    product : tuple of str
        What is left without vendor, memory and form factor: ``("rtx", "2080", "ti")``.
    memory_gb : int or None
        Memory in gigabytes; None where the name does not say.
    form_factor : str or None
        ``PCIe`` or ``SXM``; None where the name does not say.
    """

    product: tuple[str, ...]
    memory_gb: int | None
    form_factor: str | None

    def fits(self, other: DeviceName) -> bool:
        """Tell whether another name may be this device's: nothing that both say differs."""
        return self.product == other.product and all(
            None in pair or pair[0] == pair[1]
            for pair in (
                (self.memory_gb, other.memory_gb),
                (self.form_factor, other.form_factor),
            )
        )


def plain_name(name: str) -> str:
    """Return a name without what tools write differently: case, hyphens, underscores."""
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())


def read_name(name: str) -> DeviceName:
    """Take a name apart.

    Parameters
    ----------
    name : str
        As a driver, a profile or a sheet writes it: ``Tesla V100-DGXS-32GB``.
    """
    text = plain_name(name)
    for board, words in _table()["boards"].items():
        text = re.sub(rf"\b{re.escape(board)}\b", words, text)
    sizes = _MEMORY.findall(text)
    forms: Mapping[str, str] = _table()["form_factors"]
    words = _MEMORY.sub(" ", text).split()
    found = [forms[word] for word in words if word in forms]
    product = tuple(w for w in words if w not in forms and w not in _table()["vendors"])
    return DeviceName(product, int(sizes[0]) if sizes else None, found[0] if found else None)


def is_processor(name: str) -> bool:
    """Tell whether a name is that of a processor, not of a GPU."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\((?:r|tm)\)", " ", name.lower()))
    return any(word in _table()["processors"] for word in words)


@cache
def _table() -> dict[str, Any]:
    """Return the whole table."""
    content: dict[str, Any] = read_json(TABLE)
    return content
