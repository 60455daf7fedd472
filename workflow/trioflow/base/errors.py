"""The errors that trioflow raises on purpose.

Every message is one sentence that names the file and the place and says what
to do; the command prints it on standard error and exits with status 2.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

KEYWORDS = {name.replace("_", "-"): name for name in ("price_per_gpu_hour", "power_w", "memory_margin")}
KEYWORDS |= {
    name: name
    for name in ("plan", "ranks", "batch", "platform", "top", "jobs", "sort", "tokens", "budget", "price", "gpus")
}
"""Keywords of Python's functions by the flag that sentences name them by; ``arguments.documented`` adds those of fields."""


class TrioflowError(Exception):
    """Base of every deliberate error: something outside trioflow must change.

    ``of_command``: the sentence with the command's flags, where what Python shows has the keywords of its functions.
    """

    of_command = ""

    def spell_keywords(self) -> None:
        """Name arguments as Python spells them."""
        self.of_command = self.of_command or str(self)
        self.args = (spell_keywords(self.of_command),)


def spell_keywords(sentence: str) -> str:
    """Name arguments as Python spells them: ``--scale-operator mm`` becomes ``operator_scales mm``, ``--ranks 8`` ``ranks=8``."""

    def spell(flag: re.Match[str]) -> str:
        word = KEYWORDS.get(flag[1])
        return flag[0] if word is None else word + ("=" if flag[2] else "")

    return re.sub(r"--([a-z][a-z-]*[a-z])( (?=-?[\d.]))?", spell, sentence)


def how_to_install(extra: str) -> str:
    """Return the command that installs what an extra of trioflow needs, from where it runs: no index has trioflow itself."""
    clone = Path(__file__).parents[3]
    if (clone / "pyproject.toml").is_file():
        return f"install it: run make in {clone}, or pip install '{clone}[{extra}]'"
    from importlib import metadata

    needed = [line.split(";") for line in metadata.requires("trioflow") or []]
    names = [f"'{name.strip()}'" for name, *when in needed if f'extra == "{extra}"' in "".join(when)]
    return f"install it: pip install {' '.join(names)}"


class InputError(TrioflowError):
    """A file or an argument that trioflow cannot use.

    ``problem``: what is wrong, with the offending value; ``file``: the file that holds it;
    ``place``: where in the file: a row, a column, a JSON key; ``fix``: what would mend it.
    """

    def __init__(self, problem: str, *, file: str | Path | None = None, place: str = "", fix: str = "") -> None:
        self.problem, self.file, self.place, self.fix = problem, file, place, fix
        where = ", ".join(str(part) for part in (file, place) if part)
        text = f"{where}: {problem}" if where else problem
        super().__init__(f"{text}; {fix}" if fix else text)


class TableError(InputError):
    """A table that breaks its schema."""


class TraceError(InputError):
    """A trace that cannot be read or joined."""


class DatasetError(InputError):
    """Public data that is not in the catalogue, cannot be reached, or is not what was pinned."""


class PlanError(InputError):
    """A parallel plan that does not fit the model, the ranks or the batch."""


class PlatformError(InputError):
    """A platform description that is incomplete or contradicts itself."""


class SimulationError(TrioflowError):
    """A simulation that cannot finish: a deadlock, an unreachable rank, groups that do not match."""


class MeasurementError(TrioflowError):
    """A real run that failed or that another measurement would disturb."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a question that names the known word nearest to ``word``, with a space at its end; "" when none is near."""
    import difflib  # only for a message

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


_SUBJECT = re.compile(r"^([a-z_]+) on ")
"""An operation at the head of a warning about its group of ranks."""


def group_warnings(warnings: Sequence[str]) -> list[str]:
    """Return warnings in order, as one those that differ in their numbers, or in the operation at their head.

    The first speaks for its group: its operations are named, and how many warnings are alike.
    """
    alike: dict[str, list[str]] = {}
    for warning in warnings:
        alike.setdefault(re.sub(r"\d+", "#", _SUBJECT.sub("", warning)), []).append(warning)
    return [_join(group) for group in alike.values()]


def _join(group: Sequence[str]) -> str:
    names = list(dict.fromkeys(match[1] for warning in group if (match := _SUBJECT.match(warning))))
    text = group[0]
    if len(names) > 1:
        text = f"{', '.join(names[:-1])} and {names[-1]} on {_SUBJECT.sub('', text)}"
        if len({_SUBJECT.sub("", warning) for warning in group}) > 1:
            text += f" (numbers of {names[0]})"
    more = len(set(group)) - max(len(names), 1)
    return f"{text} (and {more} more like it)" if more > 0 else text
