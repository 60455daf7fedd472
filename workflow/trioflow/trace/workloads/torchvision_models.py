"""Convolutional networks of torchvision, and where a pipeline can cut them.

With a CPU-only torch the compiled part of torchvision cannot load, and
importing it fails because the schemas of two operators are missing. Models that
detect nothing need neither operator, so their schemas alone are defined, and only then.
"""

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from trioflow.base.errors import InputError, suggest
from trioflow.trace.workloads.recipe import Recipe, make_images, mean_cross_entropy, need_size

CLASSES = 1000
"""Classes of an image classifier, as in ImageNet."""

FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "<flatten>": partial(nn.Flatten, 1),
    "<relu>": partial(nn.ReLU, inplace=True),
    "<average>": partial(nn.AdaptiveAvgPool2d, 1),
}
"""Steps between modules that a network takes by calling a function."""


def build_torchvision(row: Mapping[str, Any]) -> Recipe:
    """Build a network of torchvision (``model``, ``image_size``) with random weights.

    Raises InputError when there is no such network, or its cuts are not known here.
    """
    models, chosen = import_torchvision_models(), str(row["model"])
    known = [m for m in models.list_models(module=models) if _kind_of(m)]
    if chosen not in known:
        raise InputError(
            f"workload {row['workload']}: unknown torchvision model {chosen!r}",
            fix=f"{suggest(chosen, known)}use one of {', '.join(known)}",
        )
    size = need_size(row, "image_size")
    model: nn.Module = models.get_model(chosen, weights=None, num_classes=CLASSES).train()
    make_batch = partial(make_images, (3, size, size), CLASSES)
    return Recipe(model, make_batch, mean_cross_entropy, _UNITS[_kind_of(chosen)](model))


def _kind_of(name: str) -> str:
    """Return the architecture of a torchvision model, or nothing."""
    families = dict.fromkeys(("resnet", "resnext", "wide_resnet"), "resnet")
    families |= {"vgg": "vgg", "densenet": "densenet"}
    return next((kind for start, kind in families.items() if name.startswith(start)), "")


def _resnet_units(model: nn.Module) -> dict[str, list[str]]:
    units = {"stem": ["conv1", "bn1", "relu", "maxpool"]}
    for layer in ("layer1", "layer2", "layer3", "layer4"):
        for name, _ in model.get_submodule(layer).named_children():
            units[f"{layer}.{name}"] = [f"{layer}.{name}"]
    units["head"] = ["avgpool", "<flatten>", "fc"]
    return units


def _vgg_units(model: nn.Module) -> dict[str, list[str]]:
    paths = [f"features.{i}" for i, _ in model.get_submodule("features").named_children()]
    paths += ["avgpool", "<flatten>"]
    paths += [f"classifier.{i}" for i, _ in model.get_submodule("classifier").named_children()]
    units: dict[str, list[str]] = {}
    # A unit ends where a convolution or a linear layer begins the next one.
    for path in paths:
        heavy = path not in FUNCTIONS and bool(list(model.get_submodule(path).parameters()))
        if heavy or not units:
            units[path] = []
        units[list(units)[-1]].append(path)
    return units


def _densenet_units(model: nn.Module) -> dict[str, list[str]]:
    """Cut between blocks only: inside one, every layer reads all layers before it."""
    units: dict[str, list[str]] = {"stem": []}
    for name, _ in model.get_submodule("features").named_children():
        if name.startswith(("denseblock", "transition")):
            units[name] = [f"features.{name}"]
        elif len(units) == 1:
            units["stem"].append(f"features.{name}")
        else:
            units["head"] = [f"features.{name}"]
    units["head"] += ["<relu>", "<average>", "<flatten>", "classifier"]
    return units


_UNITS = {"resnet": _resnet_units, "vgg": _vgg_units, "densenet": _densenet_units}


@cache
def define_missing_operators() -> torch.library.Library | None:
    """Make torchvision importable where its compiled operators do not load: define what importing it looks up.

    Call it before anything imports torchvision, as most models of transformers do. The library is kept: torch drops the
    definitions of one that is freed. None where nothing is missing.
    """
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None or hasattr(torch.ops.torchvision, "nms"):
        return None
    for compiled in Path(package.origin).parent.glob("_C.*"):
        try:
            torch.ops.load_library(compiled)
        except OSError:
            continue
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def import_torchvision_models() -> ModuleType:
    """Return ``torchvision.models``; ImportError where torchvision is not installed."""
    define_missing_operators()
    return importlib.import_module("torchvision.models")
