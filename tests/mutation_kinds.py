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
            from trioflow.trace.chakra_messages import _split  # its framing only

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


def mutate(chance: random.Random, sheets: dict[str, Sheet], weights: dict[str, float]) -> Mutation:
    """Change one thing in one of some files."""
    from mutation_chakra import CHAKRA
    from mutation_tables import TABLE

    kinds: dict[str, dict[str, Maker]] = {
        "profile": PROFILE, "graph": GRAPH, "facts": FACTS, "table": TABLE, "chakra": CHAKRA,
    }  # fmt: skip
    names = list(sheets)
    for _ in range(1000):
        name = chance.choices(names, [weights.get(n, 1.0) for n in names])[0]
        sheet = sheets[name]
        known = BYTES if chance.random() < 0.12 else kinds[sheet.form]
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


def _is_number(value: Any) -> bool:
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
        slots = [s for s in slots if _is_number(s[0][s[1]])]
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


def _one(
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
        words = sorted({_sort_of(sheet.entries[i]) for i in timed})
        if not words:
            return None
        word = chance.choice(words)
        places = [i for i in timed if _sort_of(sheet.entries[i]) == word]
    return chance.choice(places) if places else None


def _sort_of(event: dict[str, Any]) -> str:
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

    return _one(change)


_CALLS = ("cpu_op", "user_annotation")


def _against(
    sheet: Sheet, before: dict[str, Any], path: tuple[Any, ...], after: dict[str, Any]
) -> str:
    """Return what speaks against a change at some place of an event or a node."""
    words = [str(part) for part in path]
    if sheet.form == "profile":
        if words[-1] == "correlation":
            return "a launch without its kernel"
        called = sheet.paired and before.get("cat") in _CALLS
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
    elif entry.get("cat") in _CALLS and entry["name"] != "trioflow: step":
        evidence = "the execution trace" if sheet.paired else ""
    elif "correlation" in entry.get("args", {}) and _starts_work(entry):
        evidence = "a launch without its kernel"
    return sheet.render({place: []}), f"entry {place} {entry['name']!r} removed", evidence


def _starts_work(event: dict[str, Any]) -> bool:
    runtime = event.get("cat") in ("cuda_runtime", "cuda_driver")
    return not runtime or any(w in event["name"] for w in ("Launch", "Memcpy", "Memset"))


def _swap(chance: random.Random, sheet: Sheet) -> Made | None:
    if len(sheet.entries) < 2:
        return None
    one, other = chance.sample(range(len(sheet.entries)), 2)
    places = {one: [sheet.entries[other]], other: [sheet.entries[one]]}
    return sheet.render(places), f"entries {one} and {other} exchanged", ""


def _head(chance: random.Random, sheet: Sheet) -> Made | None:
    head = copy.deepcopy(sheet.head)
    done = _spoil(chance, head, chance.choice(["drop", "type", "number"]))
    if done is None:
        return None
    if sheet.form == "facts":
        return json.dumps(head).encode(), done[1], _against_facts(done[0])
    return sheet.render({}, head), done[1], ""


def _against_facts(path: tuple[Any, ...]) -> str:
    return "the median of step_times_s" if path[0] in ("step_time_s", "step_times_s") else ""


# Profiles


def _borrow(where: str, keys: tuple[str, ...], evidence: str) -> Maker:
    """Make a kind that gives an entry an id of another one."""

    def change(
        chance: random.Random, sheet: Sheet, entry: dict[str, Any]
    ) -> tuple[str, str] | None:
        own = [key for key in keys if key in entry.get(where, {})]
        if not own:
            return None
        key = chance.choice(own)
        others = [
            e[where][key] for e in sheet.entries
            if key in e.get(where, {}) and e[where][key] != entry[where][key]
        ]  # fmt: skip
        if not others:
            return None
        before, entry[where][key] = entry[where][key], chance.choice(others)
        known = evidence
        if key == "Sequence number":
            known = ""
        elif key == "Record function id":
            known = "an id that stands twice"
        elif key == "correlation":
            known = "a launch without its kernel" if _starts_work(entry) else ""
        elif entry.get("cat") not in ("cpu_op", None):
            known = ""  # a kernel's: read only where its launch is missing
        return f"{key}: {before} -> {entry[where][key]}", known

    return _one(change)


def _move(chance: random.Random, sheet: Sheet, event: dict[str, Any]) -> tuple[str, str] | None:
    """Shift a host call so that it ends after, or begins before, what encloses it."""
    same = [
        e for e in sheet.entries
        if e.get("ph") == "X" and e.get("tid") == event["tid"] and e["dur"] > 4
        and e["ts"] < event["ts"] and event["ts"] + event["dur"] < e["ts"] + e["dur"]
        and e.get("cat") != "Trace"
    ]  # fmt: skip
    if not same:
        return None
    above = min(same, key=lambda e: e["dur"])
    event["ts"] = above["ts"] + above["dur"] / 2
    event["dur"] = above["dur"]
    return f"begins inside {above['name']!r} and ends {above['dur'] / 2} us after it", "its end"


def _scale(chance: random.Random, sheet: Sheet, event: dict[str, Any]) -> tuple[str, str]:
    factor = chance.choice([0, 0.1, 0.5, 2, 10, 1000])
    event["dur"] = type(event["dur"])(event["dur"] * factor)
    return f"duration times {factor}", ""


def _shift(chance: random.Random, sheet: Sheet, event: dict[str, Any]) -> tuple[str, str]:
    by = chance.choice([-1e6, -100, -3, 3, 100, 1e6, 1e9])
    event["ts"] = type(event["ts"])(event["ts"] + by)
    called = sheet.paired and event.get("cat") in _CALLS and abs(by) >= 1e6
    return f"start moved by {by} us", "the execution trace" if called else ""


def _list_under(key: str, how: str) -> Maker:
    """Make a kind that changes an event's list of shapes or of types."""

    def change(
        chance: random.Random, sheet: Sheet, event: dict[str, Any]
    ) -> tuple[str, str] | None:
        cells = event["args"][key]
        full = [i for i, cell in enumerate(cells) if cell and event["args"]["Input Dims"][i]]
        if how == "missing":
            del event["args"][key]
            return f"{key} dropped", ""
        if not full:
            return None
        place = chance.choice(full)
        before = cells[place]
        cells[place] = {
            "negative": lambda: [-1, *before[1:]],
            "word": lambda: "floot",
            "other": lambda: chance.choice(["double", "c10::Half", "int", "bool"]),
            "larger": lambda: [before[0] * 2, *before[1:]] if _is_number(before[0]) else [before],
            "short": lambda: before[1:],
        }[how]()
        evidence = {"negative": "its sign", "word": "every known type"}.get(how, "")
        if sheet.paired and key == "Input Dims":
            evidence = "the execution trace"
        return f"{key}[{place}]: {before} -> {cells[place]}", evidence

    return _one(change, lambda e: bool(e.get("args", {}).get(key)))


def _set_device(
    chance: random.Random, sheet: Sheet, event: dict[str, Any]
) -> tuple[str, str] | None:
    if "device" not in event.get("args", {}):
        return None
    event["args"]["device"] = chance.choice([1, 5, "cuda:1", -1])
    return f"device -> {event['args']['device']!r}", "the other kernels' device"


def _set_category(chance: random.Random, sheet: Sheet, event: dict[str, Any]) -> tuple[str, str]:
    before = event.get("cat")
    words = [
        "cpu_op",
        "user_annotation",
        "kernel",
        "cuda_runtime",
        "gpu_memcpy",
        "cpu_operator",
        "",
    ]
    event["cat"] = chance.choice([word for word in words if word != before])
    evidence = ""
    if sheet.paired and before in _CALLS and event["name"] != "trioflow: step":
        evidence = "the execution trace"
    elif "correlation" in event.get("args", {}) and _starts_work(event):
        evidence = "a launch without its kernel"
    return f"{before!r} -> {event['cat']!r}", evidence


def _remove_annotation(chance: random.Random, sheet: Sheet) -> Made | None:
    places = [i for i, e in enumerate(sheet.entries) if _sort_of(e) == "annotation"]
    words = sorted({sheet.entries[i]["name"].partition("#")[0].partition(":")[0] for i in places})
    if not words:
        return None
    word = chance.choice(words)
    gone = [i for i in places if sheet.entries[i]["name"].startswith(word)]
    if chance.random() < 0.5:
        gone = [chance.choice(gone)]
    evidence = "the execution trace" if sheet.paired and word != "trioflow" else ""
    return sheet.render({i: [] for i in gone}), f"{len(gone)} of {word!r} removed", evidence


_ANY: dict[str, Maker] = {
    "key dropped": _generic("drop"),
    "type changed": _generic("type"),
    "number changed": _generic("number"),
    "entry twice": _duplicate,
    "entry removed": _remove,
    "entries exchanged": _swap,
    "header changed": _head,
}
_TIMED: Callable[[dict[str, Any]], bool] = lambda e: {"ts", "dur", "tid"} <= set(e)  # noqa: E731
PROFILE: dict[str, Maker] = {
    **_ANY,
    "another's id": _borrow(
        "args", ("Record function id", "External id", "Sequence number", "correlation"), "its owner"
    ),
    "correlation removed": _one(
        lambda c, s, e: (
            f"correlation {e['args'].pop('correlation')} removed",
            "a launch without its kernel" if _starts_work(e) else "",
        ),
        lambda e: "correlation" in e.get("args", {}),
    ),
    "calls cross": _one(_move, lambda e: _TIMED(e) and e.get("cat") == "cpu_op"),
    "duration scaled": _one(_scale, _TIMED),
    "start shifted": _one(_shift, _TIMED),
    "unknown dtype": _list_under("Input type", "word"),
    "other dtype": _list_under("Input type", "other"),
    "negative shape": _list_under("Input Dims", "negative"),
    "shape missing": _list_under("Input Dims", "missing"),
    "shape changed": _list_under("Input Dims", "larger"),
    "shape shortened": _list_under("Input Dims", "short"),
    "device changed": _one(_set_device, lambda e: "device" in e.get("args", {})),
    "category renamed": _one(_set_category),
    "annotation removed": _remove_annotation,
}


# Execution traces


def _side(
    chance: random.Random, node: dict[str, Any]
) -> tuple[list[Any], list[Any], list[str]] | None:
    """Return values, shapes and types of one side that has a tensor."""
    sides = []
    for side in ("inputs", "outputs"):
        if isinstance(node[side], dict):
            columns = [node[side][key] for key in ("values", "shapes", "types")]
        else:
            columns = [node[side], node[f"{side[:-1]}_shapes"], node[f"{side[:-1]}_types"]]
        if any(t.startswith("Tensor(") and "nullptr" not in t for t in columns[2]):
            sides.append(tuple(columns))
    return chance.choice(sides) if sides else None  # type: ignore[return-value]


def _tensor(how: str) -> Maker:
    """Make a kind that changes one tensor of a node."""

    def change(chance: random.Random, sheet: Sheet, node: dict[str, Any]) -> tuple[str, str] | None:
        side = _side(chance, node)
        if side is None:
            return None
        values, shapes, types = side
        place = chance.choice(
            [i for i, t in enumerate(types) if t.startswith("Tensor(") and "nullptr" not in t]
        )
        shape, value = shapes[place], values[place]
        evidence = "a tensor's shape, type and elements, of which each follows from the others"
        if how in ("negative", "larger", "short") and not shape:
            return None
        if how == "negative":
            shape[0] = -shape[0] or -1
        elif how == "larger":
            shape[chance.randrange(len(shape))] *= 2
        elif how == "short":
            shape.pop(chance.randrange(len(shape)))
        elif how == "elements":
            value[3] += chance.choice([-1, 1, 10**6])
        elif how == "size":
            value[4] = chance.choice([n for n in (0, 1, 2, 3, 8) if n != value[4]])
        elif how == "word":
            types[place] = "Tensor(floot)"
        elif how == "other":
            types[place] = chance.choice(
                [
                    w
                    for w in ("Tensor(double)", "Tensor(c10::Half)", "Tensor(bool)")
                    if w != types[place]
                ]
            )
        elif how == "device":
            value[5], evidence = "cuda:5", "the other tensors' device"
        elif how == "tensor":
            value[0], evidence = value[0] + chance.randrange(1, 50), ""
        else:
            value[1], evidence = value[1] + chance.randrange(1, 50), ""
        if how in ("larger", "short") and not value[3]:
            evidence = ""  # no elements before and after
        return f"{value} of shape {shape} is {types[place]}", evidence

    return _one(change, lambda node: _side(random.Random(0), node) is not None)


def _attribute(node: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((a for a in node.get("attrs", []) if a["name"] == name), None)


def _parent_key(node: dict[str, Any]) -> str:
    return "ctrl_deps" if "ctrl_deps" in node else "parent"


def _borrow_node(what: str) -> Maker:
    def change(chance: random.Random, sheet: Sheet, node: dict[str, Any]) -> tuple[str, str] | None:
        other = chance.choice(sheet.entries)
        if what == "id":
            node["id"] = other["id"]
            return f"id -> {node['id']}", "an id that stands twice"
        if what == "parent":
            key = _parent_key(node)
            node[key] = other["id"]
            return f"{key} -> {node[key]}", "the profile"
        for holder, key in ((node, "rf_id"), (_attribute(node, "rf_id"), "value")):
            source = other if key == "rf_id" else _attribute(other, "rf_id")
            if holder and source and key in holder and holder[key] and source[key]:
                if holder[key] == source[key]:
                    return None
                holder[key] = source[key]
                return f"rf_id -> {holder[key]}", "an id that stands twice"
        return None

    return _one(change)


def _circle(chance: random.Random, sheet: Sheet) -> Made | None:
    """Point a node's parent at a node below it."""
    place = chance.randrange(len(sheet.entries))
    below = next(
        (n for n in sheet.entries if n[_parent_key(n)] == sheet.entries[place]["id"] != n["id"]),
        None,
    )
    if below is None:
        return None
    node = copy.deepcopy(sheet.entries[place])
    node[_parent_key(node)] = below["id"]
    return sheet.render({place: [node]}), f"parent of {node['id']} -> {below['id']}", "itself"


def _schema(chance: random.Random, sheet: Sheet) -> Made:
    word = chance.choice(["2.0", "", "1.0.1", "1.0.2", "1.1.1", "x", None])
    return sheet.render({}, {**sheet.head, "schema": word}), f"schema -> {word!r}", ""


GRAPH: dict[str, Maker] = {
    **_ANY,
    "another's id": _borrow_node("id"),
    "another's rf_id": _borrow_node("rf_id"),
    "another parent": _borrow_node("parent"),
    "parent below": _circle,
    "unknown dtype": _tensor("word"),
    "other dtype": _tensor("other"),
    "negative shape": _tensor("negative"),
    "shape changed": _tensor("larger"),
    "shape shortened": _tensor("short"),
    "element count changed": _tensor("elements"),
    "element size changed": _tensor("size"),
    "device changed": _tensor("device"),
    "tensor id changed": _tensor("tensor"),
    "storage id changed": _tensor("storage"),
    "schema changed": _schema,
}
FACTS: dict[str, Maker] = {"header changed": _head}


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
