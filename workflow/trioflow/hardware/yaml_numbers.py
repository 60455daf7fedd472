"""A YAML reader that takes numbers as people write them and refuses repeated keys."""

from __future__ import annotations

import re
from typing import Any

import yaml


class StrictLoader(yaml.SafeLoader):
    """Reads ``31.5e9`` and ``1e-6`` as numbers, and refuses a key written twice.

    Notes
    -----
    PyYAML follows YAML 1.1, where an exponent needs a point and a sign:
    ``312e12`` is a text there, which would surface as a type error far from
    its cause. YAML 1.2 reads it as a number, and so does this reader.
    """

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
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
