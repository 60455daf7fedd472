"""Comparing a model that was fitted again with the one that ships."""

from collections.abc import Iterator
from typing import Any

import pytest

CLOSE = 5e-3
"""Relative difference of fitted numbers: soft losses are flat about their minimum."""


def leaves(content: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the places and values of a JSON file's content."""
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, value in pairs:
            yield from leaves(value, f"{place}.{key}")
    else:
        yield place, content


def assert_refitted(rebuilt: Any, shipped: Any, close: float = CLOSE) -> None:
    fresh, kept = dict(leaves(rebuilt)), dict(leaves(shipped))
    numbers = {place: value for place, value in kept.items() if isinstance(value, int | float)}
    assert {p: fresh[p] for p in numbers} == pytest.approx(numbers, rel=close, abs=1e-12)
    assert fresh == kept | {place: fresh[place] for place in numbers}
