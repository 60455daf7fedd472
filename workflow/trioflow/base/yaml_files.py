"""YAML as people write it: numbers without a point, keys that stand once, and no bombs."""

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from trioflow.base.errors import InputError
from trioflow.base.input_files import DEEPEST, check_values, read_text, too_deep

LARGEST_BYTES = 1 << 21
"""A platform, a sheet or a sweep."""
_MOST_NODES = 500_000
"""Values of a file once every alias stands for what it names."""
_STEPS = {yaml.MappingStartEvent: 1, yaml.SequenceStartEvent: 1, yaml.MappingEndEvent: -1, yaml.SequenceEndEvent: -1}
"""How much deeper one is behind an event."""


class _StrictLoader(yaml.CSafeLoader):
    """Reads ``31.5e9`` and ``1e-6`` as numbers; refuses repeated keys and bombs; libyaml parses, ten times as fast as Python.

    PyYAML follows YAML 1.1, where an exponent needs a point and a sign: ``312e12`` is a text there,
    which would surface as a type error far from its cause. YAML 1.2 reads it as a number, and so
    does this reader.
    """

    def get_single_node(self) -> Any:
        """Return the document's node, refused where aliases multiply it or it lies within itself."""
        node = super().get_single_node()
        if node is not None:
            _count_nodes(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, refusing a repeated key, of which YAML would keep the last."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is written twice", key_node.start_mark
                )
            if isinstance(key, str):
                seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _count_nodes(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Return how many values a node holds, aliases counted as often as they stand."""
    total = known.get(node, 0)
    if total:
        return total
    problem = "an alias lies within what it names" if node in known else ""
    if not problem:
        known[node], total = 0, 1
        for one in node.value if isinstance(node, yaml.CollectionNode) else ():
            for inner in one if isinstance(one, tuple) else (one,):
                total += _count_nodes(inner, known)
        known[node] = total
        problem = "its aliases stand for too many values" if total > _MOST_NODES else ""
    if problem:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    return total


def read_yaml(path: str | Path, kind: type[InputError] = InputError) -> Any:
    """Return the content of a YAML file, as `_StrictLoader` reads it; InputError as `read_text`, or where it is refused."""
    return parse_yaml(read_text(path, kind, LARGEST_BYTES), path, kind)


def parse_yaml(text: str, file: str | Path, kind: type[InputError] = InputError, place: str = "") -> Any:
    """Return the value of a YAML text, as `_StrictLoader` reads it; InputError where it is refused."""
    try:
        # libyaml composes nodes by calling itself, without a bound.
        steps = (_STEPS.get(type(event), 0) for event in yaml.parse(text, yaml.CSafeLoader))
        if any(depth > DEEPEST for depth in accumulate(steps)):
            raise RecursionError
        value = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise kind(f"not readable as YAML: {' '.join(str(error).split())}", file=file, place=place) from None
    except RecursionError:
        raise too_deep(file, place, kind) from None
    check_values(value, file, kind, place)
    return value
