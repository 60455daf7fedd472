"""Import torchvision beside a torch that lacks its compiled operators.

With a CPU-only torch the compiled part of torchvision cannot load, and
importing it fails because the schemas of two operators are missing. The models
need neither operator, so their schemas alone are defined, and only then.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

_KEEP: list[Any] = []
"""Torch drops a library's definitions when the object that made them is freed."""


def import_torchvision_models() -> ModuleType:
    """Return ``torchvision.models``, with the missing schemas defined where needed.

    Raises
    ------
    ImportError
        When torch or torchvision is not installed.
    """
    import torch

    try:
        return importlib.import_module("torchvision.models")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEEP.append(library)
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import sys

    for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    return importlib.import_module("torchvision.models")
