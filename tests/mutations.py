"""Seeded mutations of traces' files, and what importing a mutated file comes to.

A source is a set of files that imports cleanly. A mutation changes one thing in one of them;
what follows is one of the verdicts below. `mutation_kinds` makes the changes,
`mutation_sources` the sources.
"""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mutation_kinds import NUMBER, Mutation, Sheet, mutate
from trioflow.base.errors import TrioflowError
from trioflow.tables import PHASES
from trioflow.trace.importers.detect import import_trace
from trioflow.trace.importers.options import ImportOptions
from trioflow.trace.store import Trace, load_trace, save_trace

REFUSED, UNCHANGED, WARNED = "refused", "unchanged", "warned"
PLAUSIBLE, CONTRADICTED = "plausible", "contradicted"
VERDICTS = {
    REFUSED: "a sentence that names the file; nothing is written",
    UNCHANGED: "accepted, every total as before: nobody reads what was hit",
    WARNED: "accepted with other totals, and a warning that was not there before",
    PLAUSIBLE: "accepted with other totals and no word: a possible value took the place of another",
    CONTRADICTED: "accepted with other totals and no word, although the files contradict themselves",
}
"""What importing a mutated file can come to, from best to worst."""


@dataclass
class Source:
    """Files that import cleanly.

    Attributes
    ----------
    name, importer : str
        What the files are, and what reads them.
    files : dict
        Content by path below a folder.
    given : list of str
        Paths that the importer is given.
    weights : dict
        How likely a file is chosen, where not as likely as the others.
    whole : bool
        Whether a mutation changes a whole run (``mutation_runs``): then a
        warning counts only where its words, not just its numbers, are new.
    """

    name: str
    importer: str
    files: dict[str, bytes]
    given: list[str]
    options: ImportOptions
    form: str | None = None
    weights: dict[str, float] = field(default_factory=dict)
    whole: bool = False

    @cached_property
    def sheets(self) -> dict[str, Sheet]:
        """The parsed files."""
        return {name: Sheet.read(name, content, self.files) for name, content in self.files.items()}

    def load(self, folder: Path) -> Trace:
        """Import the files that lie in a folder."""
        return import_trace([folder / one for one in self.given], self.options, self.form)

    def write(self, folder: Path) -> None:
        """Put the files into a folder."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


@dataclass(frozen=True)
class Outcome:
    """What one mutation came to; `changes` are the totals before and after."""

    source: str
    importer: str
    seed: int
    kind: str
    verdict: str
    note: str
    evidence: str = ""
    text: str = ""
    changes: tuple[tuple[str, Any, Any], ...] = ()

    def __str__(self) -> str:
        """Say how to make it again, and what happened."""
        changes = "; ".join(f"{name}: {old} -> {new}" for name, old, new in self.changes)
        return (
            f"source {self.source!r}, seed {self.seed}: {self.kind} ({self.note}): {self.verdict}"
            f" [{self.text or changes}]{' against ' + self.evidence if self.evidence else ''}"
        )


class EscapedError(AssertionError):
    """An import ended in none of the ways that it may."""


def totals(trace: Trace) -> dict[str, Any]:
    """Return what a prediction is made from, summed over the trace."""
    operators, tensors = trace.operators, trace.tensors
    found: dict[str, Any] = {"operators": len(operators), "tensors": len(tensors)}
    for column in (
        "kernels",
        "device_ns",
        "cpu_ns",
        "flop",
        "read_bytes",
        "write_bytes",
        "batch_flop",
        "batch_read_bytes",
    ):
        found[column] = sum(map(int, operators[column]))
    parameters = tensors[tensors["category"] == "parameter"]
    found["parameters"] = parameters["storage_id"].nunique()
    found["gradients"] = len(trace.facts.gradients)
    moves = operators["kind"] == "collective"
    found["collectives"] = int(moves.sum())
    found["communication_ns"] = int(operators["device_ns"][moves].sum())
    counts = Counter(operators["phase"])
    found |= {phase: counts[phase] for phase in PHASES}
    found |= {
        key: getattr(trace.facts, key)
        for key in ("batch", "step_time_s", "device_name", "precision")
    }
    return found


class Bench:
    """One source laid out in a folder of its own, mutated and imported again and again."""

    def __init__(self, source: Source, folder: Path) -> None:
        self.source = source
        self.folder, self.output = folder / "source", folder / "trace"
        source.write(self.folder)
        self.before = source.load(self.folder)
        save_trace(self.before, self.output)
        self.totals = totals(load_trace(self.output))
        shutil.rmtree(self.output)
        self.warnings = self._warnings(self.before)

    def run(self, seed: int) -> Outcome:
        """Make one mutation, import what it left, and tell what that came to.

        Raises
        ------
        EscapedError
            When the import ends in another exception, in a message that does
            not name the file or has several lines, in an output that cannot be
            read back, or in an output although it was refused.
        """
        chance = random.Random(f"{self.source.name}/{seed}")
        mutation = mutate(chance, self.source.sheets, self.source.weights, self.source.whole)
        path = self.folder / mutation.file
        path.write_bytes(mutation.content)
        try:
            return self._judge(seed, mutation)
        except EscapedError as error:
            raise EscapedError(
                f"source {self.source.name!r}, seed {seed}: {mutation.kind} in {mutation.file}"
                f" ({mutation.note}): {error}"
            ) from error.__cause__
        finally:
            path.write_bytes(self.source.files[mutation.file])
            shutil.rmtree(self.output, ignore_errors=True)

    def _judge(self, seed: int, mutation: Mutation) -> Outcome:
        said = (self.source.name, self.source.importer, seed, mutation.kind)
        try:
            trace = self.source.load(self.folder)
            if _equal(trace, self.before):  # which was saved and read back
                return Outcome(*said, UNCHANGED, mutation.note, mutation.evidence)
            save_trace(trace, self.output)
        except TrioflowError as error:
            self._check_refusal(str(error))
            return Outcome(*said, REFUSED, mutation.note, text=str(error))
        except Exception as error:
            raise EscapedError(f"{type(error).__name__}: {error}") from error
        try:
            loaded = load_trace(self.output)
            after = totals(loaded)
        except Exception as error:
            raise EscapedError(f"saved, then {type(error).__name__}: {error}") from error
        if len(loaded.operators) != len(trace.operators):
            raise EscapedError("operators were lost on the way to the disk")
        changes = tuple(
            (name, old, after[name])
            for name, old in self.totals.items()
            if not _same(old, after[name])
        )
        fresh = self._warnings(loaded) - self.warnings
        if not changes:
            verdict = UNCHANGED
        elif fresh:
            verdict = WARNED
        else:
            verdict = CONTRADICTED if mutation.evidence else PLAUSIBLE
        text = "; ".join(sorted(fresh)) if verdict == WARNED else ""
        return Outcome(*said, verdict, mutation.note, mutation.evidence, text, changes)

    def _warnings(self, trace: Trace) -> set[str]:
        said = set(trace.facts.warnings)
        if not self.source.whole:
            return said
        return {NUMBER.sub("N", one.partition(" (first:")[0]) for one in said}

    def _check_refusal(self, text: str) -> None:
        if self.output.exists():
            raise EscapedError(f"refused and yet written: {text}")
        if not any(Path(name).name in text for name in (*self.source.files, *self.source.given)):
            raise EscapedError(f"the message names no file: {text}")
        if "\n" in text or len(text) > 1500:
            raise EscapedError(f"no one-sentence message: {text[:300]!r}")


def _equal(trace: Trace, other: Trace) -> bool:
    """Return whether two traces hold the same, down to types and missing values; their files' digests differ."""
    facts, others = (replace(one.facts, inputs={}) for one in (trace, other))
    if facts != others or set(trace.facts.inputs or ()) != set(other.facts.inputs or ()):
        return False
    return all(
        list(one.columns) == list(two.columns)
        and all(one[c].dtype == two[c].dtype and one[c].tolist() == two[c].tolist() for c in one)
        for one, two in ((trace.operators, other.operators), (trace.tensors, other.tensors))
    )


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=1e-12)
    return bool(old == new)


def run_source(source: Source, seeds: range, folder: Path) -> list[Outcome]:
    """Run some mutations of one source in a new folder, which is removed."""
    folder.mkdir(parents=True)
    try:
        bench = Bench(source, folder)
        return [bench.run(seed) for seed in seeds]
    finally:
        shutil.rmtree(folder)
