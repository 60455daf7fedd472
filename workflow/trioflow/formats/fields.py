"""Fields of a configuration, checked as a reader takes them."""

from collections.abc import Iterable, Mapping
from typing import Any

from trioflow.base.errors import InputError, suggest


class Fields:
    """The fields of a configuration as a reader takes them; what nobody took is left. ``file``: for messages."""

    def __init__(self, content: Mapping[str, Any], file: str) -> None:
        self.content, self.file = dict(content), file
        self.taken: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return a field's value; the default where it is missing or null."""
        self.taken.add(name)
        value = self.content.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number; InputError where it is none, or missing without a default."""
        value = self.take(name, default)
        if value is None:
            raise InputError(f"{name} is missing", file=self.file, fix=f"add {name} to it")
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 19:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 10**15:
            raise InputError(f"{value!r:.40} is not a whole number from 1 on", file=self.file, place=name)
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a yes or no; a bare flag of a command line is a yes."""
        value = self.take(name, default)
        if isinstance(value, str):
            value = {"true": True, "false": False, "": True}.get(value.lower(), value)
        if not isinstance(value, bool):
            raise InputError(f"{value!r:.40} is neither true nor false", file=self.file, place=name)
        return value

    def share(self, name: str, default: float) -> float:
        """Return a number from 0 to below 1."""
        value = self.take(name, default)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if not 0.0 <= number < 1.0:
            raise InputError(f"{value!r:.40} is not a number from 0 to below 1", file=self.file, place=name)
        return number

    def word(self, name: str, words: Mapping[str, str], default: str) -> str:
        """Return what a word stands for; InputError where it is not known."""
        value = str(self.take(name, default))
        if value not in words:
            raise InputError(
                f"{value!r:.40} is not known here", file=self.file, place=name, fix=f"use one of {', '.join(words)}"
            )
        return words[value]

    def read_latent(self, plain: str, rotary: str, value: str, latent: str, query_latent: str) -> dict[str, int]:
        """Return the sizes of latent attention, all but the queries' needed; the names are those of its fields."""
        rotated = self.size(rotary)
        return {
            "head_size": self.size(plain) + rotated,
            "rotary_size": rotated,
            "value_size": self.size(value),
            "latent": self.size(latent),
            "query_latent": self.size(query_latent) if self.take(query_latent) else 0,
        }

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        """Refuse fields that change the network into one that is not built: InputError above 1, or for a word."""
        for name in names:
            value = self.take(name)
            if value is True or value not in (None, False, 0, 1, "0", "1", "false", "", []):
                raise InputError(f"{name} {value!r:.40}: {why}", file=self.file, place=name)

    def list_unknown(self, harmless: frozenset[str]) -> list[str]:
        """Return the fields that nobody took and that are not known to leave the work alone."""
        return [
            name
            for name, value in self.content.items()
            if name not in self.taken and name not in harmless and value not in (None, False)
        ]


def note_unknown(names: list[str], known: Iterable[str]) -> list[str]:
    """Return the sentence about fields that are not followed, with likely names; nothing where there are none."""
    if not names:
        return []
    shown = ", ".join(name_likely(name, known) for name in sorted(names))
    return [f"the configuration's {shown} may change the work and are not followed"]


def name_likely(name: str, known: Iterable[str]) -> str:
    """Return an unknown name, and in parentheses the known one that it is likely to be."""
    likely = suggest(name, known).strip()
    return f"{name} ({likely})" if likely else name
