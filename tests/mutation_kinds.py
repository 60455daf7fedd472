"""What can go wrong in a trace's file: each kind changes one thing in one file.

Every change says what in the files speaks against it (``evidence``); nothing for a possible
value in place of another.
"""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

WRONG_TYPES = ("text", "", 7, 1.5, None, True, [], {}, [[1, 2]], {"a": 1}, "0x1f", "12 ")
TIMES = ("ts", "dur")
CUT = "its own form"


@dataclass(frozen=True)
class Mutation:
    """A changed file; `evidence` says what in the files contradicts the change."""

    kind: str
    file: str
    content: bytes
    note: str
    evidence: str = ""


@dataclass
class Sheet:
    """A file taken apart.

    Attributes
    ----------
    form : str
        profile, graph (an execution trace), facts (another JSON file), table or chakra.
    entries : list
        Events, nodes, rows or messages.
    paired : bool
        Whether an execution trace stands beside a profile.
    """

    name: str
    form: str
    content: bytes
    packed: bool = False
    head: Any = None
    entries: list[Any] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    paired: bool = False

    @staticmethod
    def read(name: str, content: bytes, files: dict[str, bytes]) -> Sheet:
        """Take a file apart."""
        packed = content[:2] == b"\x1f\x8b"
        plain = gzip.decompress(content) if packed else content
        sheet = Sheet(name, "chakra", content, packed)
        if name.endswith(".csv"):
            sheet.form = "table"
            sheet.entries = list(csv.reader(io.StringIO(plain.decode(), newline="")))
        elif name.endswith(".et"):
            from trioflow.trace.importers.chakra_nodes import _split  # its framing only

            sheet.entries = [
                raw for _, raw in _split(io.BytesIO(plain), len(plain), None)  # type: ignore[arg-type]
            ]  # fmt: skip
        else:
            sheet.head = json.loads(plain)
            key = next((k for k in ("traceEvents", "nodes") if k in sheet.head), None)
            sheet.form = {"traceEvents": "profile", "nodes": "graph", None: "facts"}[key]
            if key:
                sheet.entries = sheet.head[key]
                sheet.head = {k: v for k, v in sheet.head.items() if k != key}
                sheet.texts = [json.dumps(entry) for entry in sheet.entries]
            beside = any("execution_trace" in one or "graph" in one for one in files)
            sheet.paired = beside and "kineto_steps" not in name  # that one gives times only
        return sheet

    def render(self, places: dict[int, list[Any]], head: Any = None) -> bytes:
        """Write the file with some entries replaced by none, one or several."""
        key = "traceEvents" if self.form == "profile" else "nodes"
        texts = list(self.texts)
        for place, entries in places.items():
            texts[place] = ",".join(json.dumps(entry) for entry in entries)
        body = ",\n".join(text for text in texts if text)
        start = json.dumps(self.head if head is None else head)[:-1]
        comma = ", " if len(start) > 1 else ""
        return f'{start}{comma}"{key}": [{body}]}}'.encode()


Made = tuple[bytes, str, str]
Maker = Callable[[random.Random, Sheet], "Made | None"]


def mutate(
    chance: random.Random, sheets: dict[str, Sheet], weights: dict[str, float], whole: bool = False
) -> Mutation:
    """Change one thing in one of some files; or, of a ``whole`` run, all its entries alike."""
    from mutation_chakra import CHAKRA
    from mutation_profiles import FACTS, GRAPH, PROFILE
    from mutation_runs import RUN
    from mutation_tables import TABLE

    kinds: dict[str, dict[str, Maker]] = {
        "profile": PROFILE, "graph": GRAPH, "facts": FACTS, "table": TABLE, "chakra": CHAKRA,
    }  # fmt: skip
    names = list(sheets)
    for _ in range(1000):
        name = chance.choices(names, [weights.get(n, 1.0) for n in names])[0]
        sheet = sheets[name]
        known = (RUN if whole else kinds)[sheet.form]
        if not whole and chance.random() < 0.12:
            known = BYTES
        kind = chance.choice(list(known))
        made = known[kind](chance, sheet)
        if made is not None and made[0] != sheet.content:
            return Mutation(kind, name, *made)
    raise AssertionError("no mutation of these files is possible")


# Any JSON


def _slots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, Any, tuple[Any, ...]]]:
    """Return container, key and path of every value inside a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in list(pairs):
        found.append((value, key, (*path, key)))
        if isinstance(inner, dict | list):
            found += _slots(inner, (*path, key))
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _worse(chance: random.Random, number: Any) -> Any:
    """Return a number that cannot be, or is unlikely to be, where this one stands."""
    return chance.choice([
        -number or -1, -1, 0, 10**18, 2**63, 2**64, -(2**63), 10**40, 1e308, float("inf"),
        float("nan"), number + 0.5, number * 1000, True,
    ])  # fmt: skip


def _spoil(chance: random.Random, value: Any, how: str) -> tuple[tuple[Any, ...], str] | None:
    """Change one place inside a JSON value; return the place and a note."""
    slots = _slots(value)
    if how == "number":
        slots = [s for s in slots if is_number(s[0][s[1]])]
    if not slots:
        return None
    # First a field of the entry, then a place below it: long lists would take all otherwise.
    first = chance.choice(sorted({str(s[2][0]) for s in slots}))
    container, key, path = chance.choice([s for s in slots if str(s[2][0]) == first])
    before = container[key]
    if how == "drop":
        del container[key]
        return path, f"{path} dropped"
    if how == "number":
        container[key] = _worse(chance, before)
    else:
        container[key] = chance.choice([w for w in WRONG_TYPES if type(w) is not type(before)])
    return path, f"{path}: {before!r:.40} -> {container[key]!r:.40}"


def change_one(
    change: Callable[[random.Random, Sheet, dict[str, Any]], tuple[str, str] | None],
    wanted: Callable[[dict[str, Any]], bool] = lambda entry: True,
) -> Maker:
    """Make a kind of mutation of one entry."""

    def make(chance: random.Random, sheet: Sheet) -> Made | None:
        place = _pick(chance, sheet, wanted)
        if place is None:
            return None
        entry = copy.deepcopy(sheet.entries[place])
        said = change(chance, sheet, entry)
        if said is None:
            return None
        note = f"entry {place} {sheet.entries[place].get('name')!r}: {said[0]}"
        return sheet.render({place: [entry]}), note, said[1]

    return make


def _pick(
    chance: random.Random, sheet: Sheet, wanted: Callable[[dict[str, Any]], bool]
) -> int | None:
    """Return the place of an entry; of a profile's each category has the same chance."""
    places = [i for i, entry in enumerate(sheet.entries) if wanted(entry)]
    if sheet.form == "profile":
        timed = [i for i in places if sheet.entries[i].get("ph") == "X"]
        words = sorted({sort_of(sheet.entries[i]) for i in timed})
        if not words:
            return None
        word = chance.choice(words)
        places = [i for i in timed if sort_of(sheet.entries[i]) == word]
    return chance.choice(places) if places else None


def sort_of(event: dict[str, Any]) -> str:
    name = event["name"]
    if name.startswith(("trioflow", "ProfilerStep", "Optimizer", "autograd::engine")):
        return "annotation"
    return str(event.get("cat"))


def _generic(how: str) -> Maker:
    def change(
        chance: random.Random, sheet: Sheet, entry: dict[str, Any]
    ) -> tuple[str, str] | None:
        before = copy.deepcopy(entry)
        done = _spoil(chance, entry, how)
        if done is None:
            return None
        return done[1], _against(sheet, before, done[0], entry)

    return change_one(change)


CALLS = ("cpu_op", "user_annotation")


def _against(
    sheet: Sheet, before: dict[str, Any], path: tuple[Any, ...], after: dict[str, Any]
) -> str:
    """Return what speaks against a change at some place of an event or a node."""
    words = [str(part) for part in path]
    if sheet.form == "profile":
        if words[-1] == "correlation":
            return "a launch without its kernel"
        called = sheet.paired and before.get("cat") in CALLS
        if called and words[0] in ("name", "cat", "ph", "tid", "pid"):
            return "the execution trace"
        return "the execution trace" if called and words[-1] == "Record function id" else ""
    if words[0] == "name" or "rf_id" in words:
        return "the profile"
    side = words[0].partition("_")[0].rstrip("s")
    if side in ("input", "output") and _describes_tensors(before, words, after):
        return "a tensor's shape, type and elements, of which each follows from the others"
    return ""


def _describes_tensors(before: dict[str, Any], words: list[str], after: dict[str, Any]) -> bool:
    """Tell whether a changed place among a node's values is one of a tensor's sizes or types."""
    place = next((int(w) for w in words if w.isdigit()), None)
    types = _types_of(before, words[0])
    if place is None or place >= len(types) or not types[place].startswith("Tensor("):
        return place is None and any(t.startswith("Tensor(") for t in types)
    values = "values" in words or (words[0] in ("inputs", "outputs") and "types" not in words and (
        "shapes" not in words
    ))  # fmt: skip
    defined = "nullptr" not in types[place]
    return defined and (not values or words[-1] in ("3", "4"))


def _types_of(node: dict[str, Any], side: str) -> list[str]:
    side = "inputs" if side.startswith("input") else "outputs"
    if isinstance(node.get(side), dict):
        return node[side]["types"]
    return node.get(f"{side[:-1]}_types", [])


def _duplicate(chance: random.Random, sheet: Sheet) -> Made | None:
    place = _pick(chance, sheet, lambda entry: True)
    if place is None:
        return None
    entry = sheet.entries[place]
    return sheet.render({place: [entry, entry]}), f"entry {place} {entry['name']!r} twice", "itself"


def _remove(chance: random.Random, sheet: Sheet) -> Made | None:
    place = _pick(chance, sheet, lambda entry: True)
    if place is None:
        return None
    entry = sheet.entries[place]
    evidence = ""
    if sheet.form == "graph":
        evidence = "the profile" if "[pytorch|profiler" not in entry["name"] else ""
    elif entry.get("cat") in CALLS and entry["name"] != "trioflow: step":
        evidence = "the execution trace" if sheet.paired else ""
    elif "correlation" in entry.get("args", {}) and starts_work(entry):
        evidence = "a launch without its kernel"
    return sheet.render({place: []}), f"entry {place} {entry['name']!r} removed", evidence


def starts_work(event: dict[str, Any]) -> bool:
    runtime = event.get("cat") in ("cuda_runtime", "cuda_driver")
    return not runtime or any(w in event["name"] for w in ("Launch", "Memcpy", "Memset"))


def _swap(chance: random.Random, sheet: Sheet) -> Made | None:
    if len(sheet.entries) < 2:
        return None
    one, other = chance.sample(range(len(sheet.entries)), 2)
    places = {one: [sheet.entries[other]], other: [sheet.entries[one]]}
    return sheet.render(places), f"entries {one} and {other} exchanged", ""


def change_head(chance: random.Random, sheet: Sheet) -> Made | None:
    head = copy.deepcopy(sheet.head)
    done = _spoil(chance, head, chance.choice(["drop", "type", "number"]))
    if done is None:
        return None
    if sheet.form == "facts":
        return json.dumps(head).encode(), done[1], _against_facts(done[0])
    return sheet.render({}, head), done[1], ""


def _against_facts(path: tuple[Any, ...]) -> str:
    return "the median of step_times_s" if path[0] in ("step_time_s", "step_times_s") else ""


ANY: dict[str, Maker] = {
    "key dropped": _generic("drop"),
    "type changed": _generic("type"),
    "number changed": _generic("number"),
    "entry twice": _duplicate,
    "entry removed": _remove,
    "entries exchanged": _swap,
    "header changed": change_head,
}


# Any file


def _bytes(how: str) -> Maker:
    def make(chance: random.Random, sheet: Sheet) -> Made | None:
        data = bytearray(sheet.content)
        place = chance.randrange(len(data))
        structured = sheet.form in ("profile", "graph", "facts")
        evidence = ""
        if how == "cut":
            del data[place:]
            evidence = CUT if structured else ""
        elif how == "bit":
            data[place] ^= 1 << chance.randrange(8)
            evidence = "gzip's checksum" if sheet.packed else ""
        elif how == "hole":
            del data[place : place + chance.randrange(1, 60)]
            evidence = "gzip's checksum" if sheet.packed else ""
        elif how == "garbage":
            data[place:place] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 40)))
        elif how == "packed":
            data = bytearray(gzip.compress(bytes(data), 1))
            if sheet.packed:
                return None
            chance.choice([lambda: data.__delitem__(slice(-9, None)), lambda: None])()
        elif how == "encoding":
            if sheet.form == "chakra" or sheet.packed:
                return None
            text = sheet.content.decode()
            data = bytearray(chance.choice([
                lambda: text.encode("utf-16"), lambda: b"\xef\xbb\xbf" + text.encode(),
                lambda: text.replace("\n", "\r\n").encode(), lambda: text.encode("utf-32"),
                lambda: text[:place].encode() + b"\xe9" + text[place:].encode(),
                lambda: text[:place].encode() + b"\x00" + text[place:].encode(),
            ])())  # fmt: skip
        else:
            data = bytearray(chance.choice([b"", b"{}", b"[]", b"\x00" * 64, b"null", data + data]))
        return bytes(data), f"{how} at byte {place} of {len(sheet.content)}", evidence

    return make


BYTES: dict[str, Maker] = {
    "file cut": _bytes("cut"), "bit flipped": _bytes("bit"), "bytes missing": _bytes("hole"),
    "bytes inserted": _bytes("garbage"), "packed": _bytes("packed"),
    "encoding": _bytes("encoding"), "replaced or doubled": _bytes("whole"),
}  # fmt: skip
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
