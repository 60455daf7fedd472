"""What PyTorch's versions call the fields of their profiles: ``data/profiler_fields.json``, where new ones go."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "data" / "profiler_fields.json"


@cache
def load_fields() -> dict[str, Any]:
    """Return the whole table."""
    content: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return content


@cache
def kineto_words(name: str) -> tuple[str, ...]:
    """Return the known spellings, or name prefixes, of one entry of the ``kineto`` part."""
    return tuple(load_fields()["kineto"][name])


@cache
def categories() -> Mapping[str, str]:
    """Return the category that each spelling of it stands for."""
    table: Mapping[str, list[str]] = load_fields()["kineto"]["categories"]
    return {word: category for category, words in table.items() for word in words}


_CLASS_WORDS = re.compile(r"\b(?:struct|class|enum) ")
"""What MSVC writes before the name of a class."""


@cache
def _element_types() -> Mapping[str, tuple[int, str]]:
    """Return size [bytes] and gcc's name of each spelling of an element type."""
    table: Mapping[str, list[Any]] = load_fields()["element_types"]
    return {word: (size, words[0]) for size, *words in table.values() for word in words}


def element_type(dtype: str) -> str:
    """Return an element type as gcc names it, whichever compiler's name it has; what is none as it is."""
    word = _CLASS_WORDS.sub("", dtype)
    return _element_types().get(word, (0, dtype))[1]


def element_bytes(dtype: str) -> int | None:
    """Return the size of an element type as profiles name it [bytes]; None where unknown."""
    return _element_types().get(element_type(dtype), (None,))[0]


def noted_bytes(name: str) -> int | None:
    """Return the size of an element type by PyTorch's own name of it [bytes]; None where unknown."""
    size: int | None = load_fields()["element_types"].get(name, [None])[0]
    return size


def precision_of(dtype: str) -> str | None:
    """Return the precision that an element type says; "" for fp32 or tf32, None for no float."""
    word: str | None = load_fields()["precisions"].get(dtype)
    return word
