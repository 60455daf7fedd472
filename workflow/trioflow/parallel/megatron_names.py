"""How Megatron-LM cuts the layers of a published trace, read off the names of its modules.

References
----------
M. Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3: columns, then
rows, of attention and feed-forward layers; token embedding and head by
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

from trioflow.errors import PlanError
from trioflow.trace.store import Trace

LAYERS: Mapping[str, str] = {
    # GPT-2
    "*.attn.c_attn": "column", "*.attn.c_proj": "row",
    "*.mlp.c_fc": "column", "*.mlp.c_proj": "row",
    # BERT; ViT, whose attention is a module inside a module
    **{f"*.attention.self.{part}": "column" for part in ("query", "key", "value")},
    **{f"*.attention.attention.{part}": "column" for part in ("query", "key", "value")},
    "*.attention.output.dense": "row",
    "*.intermediate.dense": "column", "*.output.dense": "row",
    # Llama, Mistral, Qwen2; Whisper
    **{f"*.{attention}.{part}_proj": "column" for attention in ("self_attn", "encoder_attn", "attention") for part in "qkv"},
    "*.self_attn.o_proj": "row", "*.attention.o_proj": "row", "*.self_attn.out_proj": "row", "*.encoder_attn.out_proj": "row",
    "*.mlp.gate_proj": "column", "*.mlp.up_proj": "column", "*.mlp.down_proj": "row",
    "*.layers.*.fc1": "column", "*.layers.*.fc2": "row",
}  # fmt: skip
"""Modules of transformers' models, by the names that their families share, of any size."""
VOCABULARY: Mapping[str, str] = {
    "transformer.wte": "row", "*.embed_tokens": "row", "lm_head": "column", "proj_out": "column",
    "bert.embeddings.word_embeddings": "row", "cls.predictions.decoder": "column",
}  # fmt: skip
"""Each rank holds a part of the vocabulary: the embedding's results are summed, the head's stay apart."""

BY_NAME = "tensor_split_by_name"
"""Fact of a trace whose layers, and vocabulary, were found by their names."""


def split_like_megatron(trace: Trace, *, vocabulary: bool = True) -> Trace:
    """Return the trace with the layers that Megatron-LM cuts named in its facts.

    Parameters
    ----------
    trace : Trace
        A transformer.
    vocabulary : bool
        Whether embedding and head are cut too.

    Raises
    ------
    PlanError
        When no module of the trace is one of the known layers.
    """
    found = find_layers(trace)
    if not found:
        raise PlanError(
            f"no module of {trace.facts.workload} is a layer that Megatron-LM cuts",
            fix="use data or pipeline parallelism, or tensor_style gather",
        )
    if vocabulary:
        found |= find_vocabulary_layers(trace)
    return Trace(
        trace.operators,
        trace.tensors,
        replace(trace.facts, tensor_split=found, tensor_split_by_name=True),
    )


def find_layers(trace: Trace) -> dict[str, str]:
    """Return the layers of a trace that Megatron-LM cuts, and how: module pattern to column or row."""
    return _match(trace, LAYERS)


def find_vocabulary_layers(trace: Trace) -> dict[str, str]:
    """Return the embeddings and heads of a trace that Megatron-LM cuts by vocabulary, and how."""
    return _match(trace, VOCABULARY)


def _match(trace: Trace, rules: Mapping[str, str]) -> dict[str, str]:
    modules = set(trace.operators["module"])
    return {
        pattern: kind
        for pattern, kind in rules.items()
        if any(fnmatchcase(module, pattern) for module in modules)
    }
