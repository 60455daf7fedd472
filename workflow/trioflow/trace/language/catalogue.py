"""Published language models by name, from a table that ships with its sources."""

from __future__ import annotations

import csv
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from trioflow.trace.language.sizes import LanguageModel

TABLE = Path(__file__).parent.parent.parent / "data" / "language_models.tsv"
"""A row a model: the fields of `LanguageModel`, the published number of parameters, how far ours may
be from it, and where the sizes stand."""


@cache
def published_models() -> dict[str, LanguageModel]:
    """Return the models that are known by name."""
    return {row["name"]: _read_row(row) for row in read_table()}


def read_table() -> list[dict[str, str]]:
    """Return the rows of the table as text."""
    with TABLE.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


def _read_row(row: dict[str, str]) -> LanguageModel:
    readers: dict[str, Any] = {"int": int, "float": float, "bool": lambda text: text == "true"}
    values = {
        field.name: readers.get(str(field.type), str)(row[field.name])
        for field in fields(LanguageModel)
        if field.name in row
    }
    return LanguageModel(**values).check(str(TABLE.name))
