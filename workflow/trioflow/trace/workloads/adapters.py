"""Frozen parameters, and low-rank adapters (LoRA) beside frozen linear layers.

Adapters have PEFT's names and arithmetic: what ``lora_A.default`` and ``lora_B.default`` make is scaled and added to
the result of ``base_layer``. Those of a model in half precision without main weights are in fp32.

References
----------
E. J. Hu et al., LoRA, arXiv 2106.09685. PEFT 0.17: ``tuners/lora/layer.py`` (``Linear.forward``),
``tuners/tuners_utils.py`` (``cast_adapter_dtype``), ``utils/constants.py`` (default targets).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import filter as filter_names
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from trioflow.base.errors import InputError
from trioflow.trace.language.sizes import split_adapters
from trioflow.trace.workloads.recipe import Recipe, read_size

_TARGETS = (
    "q_proj,v_proj",
    "q_proj,kv_b_proj",
    "q_b_proj,kv_b_proj",
    "qkv",
    "c_attn",
    "query,value",
    "query_key_value",
)
"""Targets where none are named, the first that a model has: PEFT's, and alike for latent attention."""
_FUSED = {"qkv_proj": ("q", "k", "v"), "gate_up_proj": ("gate", "up")}
"""Layers that are one product where a recipe fuses them, and the targets that they stand for."""


class LoraLinear(nn.Module):  # type: ignore[misc]  # mypy does not read torch
    """A frozen linear layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer, self.dropout, self.scaling = base, dropout, 1.0
        place: dict[str, Any] = {"bias": False, "dtype": dtype, "device": base.weight.device}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, **place)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, **place)})

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., inputs] to [..., outputs]."""
        result, down = self.base_layer(x), self.lora_A["default"]
        x = x.to(down.weight.dtype)
        if self.dropout:
            x = torch.native_dropout(x, self.dropout, True)[0]
        out: Tensor = result + self.lora_B["default"](down(x)) * self.scaling
        return out.to(result.dtype)


def adapt_model(recipe: Recipe, row: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """Give a model the adapters that its row asks for, and freeze what trains nothing.

    ``lora``: rank of the adapters; ``lora_targets``: names of linear layers, with commas, or ``all-linear`` (all but
    the head); ``lora_dropout``; ``freeze``: patterns of parameters or modules, with commas. ``dtype``: of adapters; by
    default that of the layer. Raises InputError when a word fits nothing.
    """
    model, name = recipe.model, f"workload {row['workload']}"
    if rank := read_size(row, "lora"):
        model.requires_grad_(False)
        dropout = float(row.get("lora_dropout") or 0.0)
        for path, layer in _find_targets(model, str(row.get("lora_targets") or ""), name).items():
            parent, _, child = path.rpartition(".")
            wrapped = LoraLinear(layer, rank, dropout, dtype or layer.weight.dtype)
            setattr(model.get_submodule(parent), child, wrapped)
        rules = recipe.tensor_split | split_adapters(recipe.tensor_split)
        layers = [path for path, m in model.named_modules() if m._parameters]
        recipe.tensor_split.clear()
        recipe.tensor_split |= {p: k for p, k in rules.items() if filter_names(layers, p)}
    for pattern in filter(None, str(row.get("freeze") or "").replace(" ", "").split(",")):
        frozen = [
            parameter
            for path, parameter in model.named_parameters()
            if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")
        ]
        if not frozen:
            paths = list(dict(model.named_parameters()))
            raise InputError(
                f"{name}: freeze {pattern!r} fits no parameter",
                fix=f"use a pattern of a parameter or module, such as {paths[0]} or {paths[-1].rpartition('.')[0]}",
            )
        for parameter in frozen:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(f"{name}: every parameter is frozen", fix="leave one that trains")


def _find_targets(model: nn.Module, words: str, name: str) -> dict[str, nn.Linear]:
    """Return the linear layers, by their paths, that get an adapter; a head that is not named gets none."""
    linear = {path: m for path, m in model.named_modules() if type(m) is nn.Linear}
    everything = words == "all-linear"
    for asked in [words] if words else _TARGETS:
        targets = set(filter(None, asked.replace(" ", "").split(",")))
        found = {
            path: layer
            for path, layer in linear.items()
            if (everything and "." in path) or targets & _names_of(path)
        }
        missing = targets - set[str]().union(*map(_names_of, linear)) if not everything else set()
        if found and not missing:
            return found
    known = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in linear))
    raise InputError(
        f"{name}: no linear layer is called {' or '.join(sorted(missing)) if words else 'as PEFT expects'}",
        fix=f"give lora_targets of {known}, or all-linear",
    )


def _names_of(path: str) -> set[str]:
    """Return the words that name a layer: its own, without ``_proj``, and those of the layers that it is made of."""
    last = path.rpartition(".")[2]
    parts = _FUSED.get(last, ())
    return {last, last.removesuffix("_proj"), *parts, *(f"{part}_proj" for part in parts)}
