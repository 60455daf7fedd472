"""Scenarios as columns: a hundred thousand spelled out, told apart and sorted in a fraction of a second."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.sweeps.parameters import PARAMETERS, fill_value

Codes = NDArray[np.int32]


class Scenarios(Sequence[dict[str, Any]]):
    """A value for every parameter of each scenario: which of its ``levels``, ``codes`` say [scenarios, parameters]."""

    def __init__(self, levels: Sequence[Sequence[Any]], codes: Codes) -> None:
        self.levels, self.codes = levels, codes

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Scenarios:
        """Return scenarios of given values, what is left out with its default; each different one once."""
        given = list(rows)
        block = Block(len(given))
        block.set_rows(given)
        return join_blocks([block])

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Scenarios(self.levels, self.codes[place])
        codes = self.codes[place].tolist()
        return {
            name: values[code]
            for name, values, code in zip(PARAMETERS, self.levels, codes, strict=True)
        }

    def column(self, name: str) -> Codes:
        """Return which value of a parameter each scenario has."""
        return self.codes[:, _PLACES[name]]

    def different(self, name: str, numbers: Sequence[int]) -> list[Any]:
        """Return the values of a parameter among some scenarios, in the order of `levels`."""
        values = self.levels[_PLACES[name]]
        return [values[code] for code in np.unique(self.column(name)[list(numbers)])]

    def list_columns(self, numbers: Sequence[int]) -> dict[str, list[Any]]:
        """Return the values of each parameter in some scenarios; one value where all share it."""
        codes = self.codes[list(numbers)]
        shared = (codes == codes[:1]).all(axis=0)
        return {
            name: [values[code] for code in column[: 1 if same else None].tolist()]
            for name, values, column, same in zip(
                PARAMETERS, self.levels, codes.T, shared, strict=True
            )
        }

    def rank(self, names: Sequence[str]) -> list[Codes]:
        """Return the rank of each scenario's value among its parameter's sorted values [scenarios]; shared ones are left out."""
        ranks = []
        for name in names:
            values = self.levels[_PLACES[name]]
            if len(values) > 1:
                order = sorted(range(len(values)), key=values.__getitem__)
                ranks.append(np.argsort(order).astype(np.int32)[self.column(name)])
        return ranks


_PLACES = {name: place for place, name in enumerate(PARAMETERS)}


class Block:
    """Scenarios of one part of a description: values of the parameters that it gives, by scenario."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.given: dict[str, tuple[list[Any], Codes]] = {}

    def set_axes(self, axes: Mapping[str, Sequence[Any]]) -> None:
        """Combine values, each with each, the last parameter's changing fastest."""
        shape = [len(values) for values in axes.values()]
        for place, (name, values) in enumerate(axes.items()):
            each = np.arange(len(values), dtype=np.int32)
            inner = int(np.prod(shape[place + 1 :], dtype=np.int64))
            outer = int(np.prod(shape[:place], dtype=np.int64))
            self.given[name] = list(values), np.tile(np.repeat(each, inner), outer)

    def set_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take scenarios one by one."""
        levels: dict[str, dict[Any, int]] = {}
        for number, row in enumerate(rows):
            for name, value in row.items():
                if name not in self.given:
                    self.given[name] = [], np.full(self.count, -1, dtype=np.int32)
                    levels[name] = {}
                known = levels[name]
                self.given[name][1][number] = known.setdefault(value, len(known))
        for name, known in levels.items():
            self.given[name] = list(known), self.given[name][1]

    def first_places(self, name: str) -> list[tuple[Any, int]]:
        """Return the values of a parameter, None where it is left out, and which scenario has each first."""
        if not self.count:
            return []
        values, codes = self.given.get(name, ([], np.full(1, -1, dtype=np.int32)))
        found, places = np.unique(codes, return_index=True)
        told = zip([None if code < 0 else values[code] for code in found], places, strict=True)
        return sorted(((value, int(place)) for value, place in told), key=lambda pair: pair[1])


def join_blocks(blocks: Sequence[Block]) -> Scenarios:
    """Return the scenarios of all blocks, each once, where it first stands; the seed of one that draws nothing is 0."""
    total = sum(block.count for block in blocks)
    codes = np.zeros((total, len(PARAMETERS)), dtype=np.int32)
    columns: list[list[Any]] = []
    for place, name in enumerate(PARAMETERS):
        levels: dict[Any, int] = {}
        first = 0
        for block in blocks:
            values, own = block.given.get(name, ([], None))
            # The last entry, which -1 names, is what a scenario has that gives none.
            known = [fill_value(name, value) for value in (*values, None)]
            if own is not None and block.count and own.min() >= 0:
                known.pop()
            numbers = np.array([levels.setdefault(v, len(levels)) for v in known], dtype=np.int32)
            codes[first : first + block.count, place] = numbers[-1] if own is None else numbers[own]
            first += block.count
        columns.append(list(levels))
    spread, seed = _PLACES["rank_spread"], _PLACES["seed"]
    still = np.array([not value for value in columns[spread]])[codes[:, spread]]
    if still.any():
        if 0 not in columns[seed]:
            columns[seed].append(0)
        codes[still, seed] = columns[seed].index(0)
    varied = [place for place, values in enumerate(columns) if len(values) > 1]
    if not varied:
        return Scenarios(columns, codes[:1])
    _, first_places = np.unique(codes[:, varied], axis=0, return_index=True)
    return Scenarios(columns, codes[np.sort(first_places)])
