"""Language models, and how they are trained, by Megatron-LM's arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.precision_recipes import choose_recipe
from trioflow.trace.language.configuration import Configuration, Fields, note_unknown
from trioflow.trace.language.sizes import CUDNN, FLASH, LAYERS, LanguageModel

_GPT2_WORDS = 50257
"""Words of the tokenizer that Megatron-LM reads from ``--vocab-file`` and ``--merge-file``."""
_NORMS = {"LayerNorm": "layer", "RMSNorm": "rms"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
_CONTEXT = {"p2p": "ring", "all_gather": "all-gather", "a2a": "all-to-all", "a2a+p2p": "ring"}
"""Of ``--cp-comm-type``; a2a+p2p shares heads within groups, and is taken for a ring of all."""
_UNFUSED = ("unfused", "local")
_REFUSED = {
    "moe-expert-capacity-factor": "experts that drop tokens are not built",
    "moe-use-upcycling": "experts made of a dense model are not built",
    "moe-latent-size": "experts of another width than the model's are not built",
    "encoder-num-layers": "encoders are not built from a configuration",
    "is-hybrid-model": "hybrid models are not built from a configuration",
    "hybrid-override-pattern": "hybrid models are not built from a configuration",
    "experimental-attention-variant": "it is another attention, which is not built",
    "use-megatron-fsdp": "Megatron-FSDP is not read from a configuration: give --plan fsdp",
}
_LAYOUT = "pipeline-model-parallel-layout"
_FOLLOWED = (
    "fp8", "recompute", "overlap", "cuda-graph", "enable-cuda-graph", "tp-comm", "fine-grained",
    "use-megatron-fsdp", "use-torch-fsdp2", "data-parallel-sharding", "attention-output-gate",
    "moe-shared-expert-overlap", "window",
    "moe-layer-recompute", "num-distributed-optimizer-instances",
    "optimizer", "cpu-offload", "offload", "linear", "cross-entropy", "rotary-percent", "apply-query",
)  # fmt: skip
"""Arguments that begin so may change work; the others that nobody reads are about data, checkpoints and logs."""


def parse_arguments(text: str, file: str) -> dict[str, Any]:
    """Return the arguments of a command line, as in a shell script, by name without the dashes.

    Raises InputError when the shell could not read it either.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"not a command line ({error})", file=file) from None
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found[name] = value or True
        elif name and found[name] is True:
            found[name] = word.rstrip(")") if word != ")" else True
    return found


def read_megatron(arguments: Mapping[str, Any], file: str, name: str) -> Configuration:
    """Return what Megatron-LM's arguments (dashes or not) say; what they leave out has Megatron-LM's defaults.

    Raises InputError when a size is missing or depends on a variable, or an argument makes it a
    network or a plan that is not built.
    """
    plain = {
        str(key).lstrip("-").replace("_", "-"): False if value == "false" else value
        for key, value in arguments.items()
    }
    found = Fields(plain, file)
    for argument, why in _REFUSED.items():
        found.refuse((argument,), why)
    notes: list[str] = []
    model = _read_model(found, name, notes)
    sequence = found.size("seq-length", model.longest or None)
    backend = str(found.take("attention-backend", "auto"))
    unfused = backend in _UNFUSED or (
        found.take("transformer-impl") == "local" and not found.flag("use-flash-attn")
    )
    softmax = "eager" if found.flag("no-masked-softmax-fusion") else "fused-softmax"
    kernel = FLASH if backend == FLASH or found.take("transformer-impl") == "local" else CUDNN
    precision = _find_precision(found)
    adds = choose_recipe(precision).adds_gradients and not found.flag(
        "no-gradient-accumulation-fusion"
    )
    step = {
        "sequence": sequence, "batch": found.size("micro-batch-size", 1), "precision": precision,
        "attention": softmax if unfused else kernel, "fusion": "" if adds else LAYERS,
    }  # fmt: skip
    if found.flag("enable-cuda-graph") or str(found.take("cuda-graph-impl", "none")) != "none":
        step["cuda_graphs"] = True
    degrees = _read_degrees(found, model, file)
    if found.take("cp-comm-type") == "a2a+p2p" and "context" in degrees:
        notes.append("--cp-comm-type a2a+p2p is taken for a ring of all ranks of a sequence")
    if str(found.take("mtp-num-layers", 0)) not in ("0", "False"):
        notes.append("multi-token prediction (--mtp-num-layers) is not built, and left out")
    total = found.take("global-batch-size")
    unread = [n for n in found.list_unknown(frozenset()) if n.startswith(_FOLLOWED)]
    return Configuration(
        model.check(file), step, degrees,
        global_batch=None if total is None else found.size("global-batch-size"),
        stages=_cut_stages(found, model.layers, degrees),
        notes=tuple(notes + note_unknown(unread)),
    )  # fmt: skip


def _read_model(found: Fields, name: str, notes: list[str]) -> LanguageModel:
    hidden, heads = found.size("hidden-size"), found.size("num-attention-heads")
    gated, biased = found.flag("swiglu"), not found.flag("disable-bias-linear")
    groups = found.size("num-query-groups", heads)
    positions = found.word("position-embedding-type", _POSITIONS, "learned_absolute")
    longest = found.size("max-position-embeddings", found.size("seq-length", 1))
    norm = found.word("normalization", _NORMS, "LayerNorm")
    usual = hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden
    activation = "silu" if gated else "squared_relu" if found.flag("squared-relu") else "gelu_tanh"
    layers, width = found.size("num-layers"), found.size("ffn-hidden-size", usual)
    more = _read_experts(found, layers, width, notes)
    if found.flag("multi-latent-attention"):
        more |= _read_latent(found)
        biased_query = False
    else:
        more["head_size"] = found.size("kv-channels", max(hidden // heads, 1))
        biased_query = biased or found.flag("add-qkv-bias")
    return LanguageModel(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=groups if found.flag("group-query-attention") else heads,
        vocabulary=_find_vocabulary(found, notes),
        positions=positions,
        longest=longest if positions == "learned" else 0,
        norm=norm,
        activation=activation,
        gated=gated,
        query_bias=biased_query,
        output_bias=biased,
        feed_forward_bias=biased,
        query_norm=found.flag("qk-layernorm"),
        tied=not found.flag("untie-embeddings-and-output-weights"),
        dropout=found.share("hidden-dropout", 0.1),
        attention_dropout=found.share("attention-dropout", 0.1),
        **more,
    )


def _read_experts(found: Fields, layers: int, width: int, notes: list[str]) -> dict[str, Any]:
    """Return the sizes of feed-forward layers: of all blocks, or of experts and of the first blocks without them."""
    if found.take("num-experts") is None:
        return {"feed_forward": width}
    dense = _count_dense(found, layers)
    shared = found.take("moe-shared-expert-intermediate-size")
    kind = str(found.take("moe-token-dispatcher-type", "allgather"))
    if kind == "allgather" and found.size("expert-model-parallel-size", 1) > 1:
        notes.append(
            "experts' tokens travel in all-to-alls, not in --moe-token-dispatcher-type allgather"
        )
    return {
        "feed_forward": found.size("moe-ffn-hidden-size", width), "experts": found.size("num-experts"),
        "experts_per_token": found.size("moe-router-topk", 2),
        "shared_feed_forward": found.size("moe-shared-expert-intermediate-size") if shared else 0,
        "dense_layers": dense, "dense_feed_forward": width if dense else 0,
    }  # fmt: skip


def _count_dense(found: Fields, layers: int) -> int:
    """Return how many first blocks have no experts, by a frequency or by a list such as ([0]*3+[1]*12).

    Raises InputError when they are not the first ones, or the list has another length.
    """
    said = str(found.take("moe-layer-freq", 1)).replace(" ", "")
    pieces = re.findall(r"\[([01](?:,[01])*)\](?:\*(\d+))?", said)
    kinds = [int(k) for one, times in pieces for k in one.split(",") * int(times or 1)]
    dense = kinds.count(0)
    plain = "+".join(f"[{one}]" + (f"*{times}" if times else "") for one, times in pieces)
    listed = plain == said.strip("()") and len(kinds) == layers and not any(kinds[:dense])
    if said != "1" and not (listed and pieces):
        raise InputError(
            f"{said!r:.60}: blocks without experts are built as the first ones alone, of {layers}",
            file=found.file, place="moe-layer-freq",
        )  # fmt: skip
    return dense


def _read_latent(found: Fields) -> dict[str, Any]:
    """Return the sizes of multi-latent attention, which the arguments have to say."""
    rotated = found.size("qk-pos-emb-head-dim")
    found.taken.add("kv-channels")
    return {
        "head_size": found.size("qk-head-dim") + rotated, "rotary_size": rotated,
        "value_size": found.size("v-head-dim"), "latent": found.size("kv-lora-rank"),
        "query_latent": found.size("q-lora-rank") if found.take("q-lora-rank") else 0,
    }  # fmt: skip


def _find_vocabulary(found: Fields, notes: list[str]) -> int:
    """Return the rows of the embedding, padded as Megatron-LM pads them."""
    padding = found.size("make-vocab-size-divisible-by", 128)
    padding *= found.size("tensor-model-parallel-size", 1)
    if found.take("vocab-size") is None:
        kind = str(found.take("tokenizer-type", "GPT2BPETokenizer"))
        if kind != "GPT2BPETokenizer":
            notes.append(
                f"the words of a {kind} are not in the file: GPT-2's {_GPT2_WORDS} are taken"
            )
        words = _GPT2_WORDS
    else:
        words = found.size("vocab-size")
    return -(-words // padding) * padding


def _find_precision(found: Fields) -> str:
    if found.flag("fp16"):
        in_fp32 = found.flag("accumulate-allreduce-grads-in-fp32")
        return "megatron-fp16-fp32-reduce" if in_fp32 else "megatron-fp16"
    in_half = found.flag("grad-reduce-in-bf16")
    return "megatron-bf16" + "-reduce" * in_half if found.flag("bf16") else "fp32"


def _read_degrees(found: Fields, model: LanguageModel, file: str) -> dict[str, Any]:
    """Return the columns of a plan that the arguments settle; the data degree is what is left of the ranks."""
    pipeline = found.size("pipeline-model-parallel-size", 1)
    degrees: dict[str, Any] = {
        "tensor": found.size("tensor-model-parallel-size", 1), "pipeline": pipeline,
    }  # fmt: skip
    degrees["sequence_parallel"] = degrees["tensor"] > 1 and found.flag("sequence-parallel")
    degrees["vocabulary_parallel"] = degrees["tensor"] > 1
    if degrees["tensor"] > 1:
        overlaps = found.flag("tp-comm-overlap") and degrees["sequence_parallel"]
        degrees["tensor_overlap"] = "products" if overlaps else "backward"
    expert = found.size("expert-model-parallel-size", 1)
    cut = found.size("expert-tensor-parallel-size", degrees["tensor"])
    if model.experts:
        degrees |= {"expert": expert} if expert > 1 else {}
        degrees |= {"expert_tensor": cut} if cut != degrees["tensor"] else {}
        overlaps = expert > 1 and found.flag("overlap-moe-expert-parallel-comm")
        degrees |= {"expert_overlap": True} if overlaps else {}
    context, method = (
        found.size("context-parallel-size", 1),
        found.word("cp-comm-type", _CONTEXT, "p2p"),
    )
    if context > 1:
        degrees |= {"context": context, "context_method": method}
    if pipeline > 1:
        several = found.size("num-virtual-stages-per-pipeline-rank", 1)
        if found.take("num-layers-per-virtual-pipeline-stage") is not None:
            layers = found.size("num-layers-per-virtual-pipeline-stage")
            if model.layers % (pipeline * layers):
                raise InputError(
                    f"{model.layers} layers do not divide into stages of {layers} on {pipeline} ranks",
                    file=file, place="num-layers-per-virtual-pipeline-stage",
                )  # fmt: skip
            several = model.layers // (pipeline * layers)
        if layout := _read_layout(found):
            several = len(layout) // pipeline
        degrees["schedule"] = "interleaved" if several > 1 else "1f1b"
        degrees["stages_per_rank"] = several
    if found.flag("use-distributed-optimizer"):
        degrees["sharding"] = "distributed"
    recompute = found.take("recompute-granularity")
    if found.flag("recompute-activations"):  # which Megatron-LM reads as the other argument
        degrees["recompute"] = "selective"
    elif recompute is not None:
        degrees["recompute"] = found.word(
            "recompute-granularity", {"full": "full", "selective": "selective"}, ""
        )
        method, count = found.take("recompute-method"), found.take("recompute-num-layers")
        if degrees["recompute"] == "full" and method is not None:
            word = found.word("recompute-method", {"uniform": "uniform", "block": "block"}, "")
            blocks = found.size("recompute-num-layers") if count is not None else 1
            degrees["recompute"] = f"{word}:{blocks}"
    return degrees


def _cut_stages(found: Fields, layers: int, degrees: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the blocks of each stage: equally many, embedding and loss counted where the arguments say so.

    Stages of one rank are chunks of its blocks. Raises InputError when the blocks cannot be cut so.
    """
    pipeline, several = degrees["pipeline"], degrees.get("stages_per_rank", 1)
    if pipeline > 1 and (layout := _read_layout(found)):
        blocks = tuple(stage.count("t") for stage in layout)
        if len(layout) != pipeline * several or sum(blocks) != layers:
            raise InputError(
                f"{sum(blocks)} layers on {len(layout)} stages, not {layers} on {pipeline} ranks with as many each",
                file=found.file, place=_LAYOUT,
            )  # fmt: skip
        return blocks
    embedding = found.flag("account-for-embedding-in-pipeline-split")
    loss = found.flag("account-for-loss-in-pipeline-split")
    first, last = (
        None if found.take(f"decoder-{side}-pipeline-num-layers") is None
        else found.size(f"decoder-{side}-pipeline-num-layers")
        for side in ("first", "last")
    )  # fmt: skip
    if pipeline == 1:
        return ()
    ends = {0: first, pipeline - 1: last}
    given_ends = {rank: size for rank, size in ends.items() if size is not None}
    others = pipeline - len(given_ends)
    each, rest = divmod(
        layers + embedding + loss - sum(given_ends.values()),
        others * (1 if given_ends else several),
    )
    if (
        rest
        or each < 1
        or (given_ends and several > 1 and any(n % several for n in (each, *given_ends.values())))
    ):
        raise InputError(
            f"{layers} layers cannot be cut into {pipeline} x {several} stages as the arguments say",
            file=found.file, place="pipeline-model-parallel-size",
        )  # fmt: skip
    of_rank = [
        given_ends.get(rank, each * (1 if given_ends else several)) for rank in range(pipeline)
    ]
    stages = [of_rank[rank] // several for _ in range(several) for rank in range(pipeline)]
    stages[0] -= embedding
    stages[-1] -= loss
    return tuple(stages)


def _read_layout(found: Fields) -> list[str]:
    """Return what each stage of a layout such as ``Et*3|(tt|)*29,m|L`` holds, a letter a layer; nothing without one.

    ``E`` embedding, ``t`` a block, ``m`` a layer of multi-token prediction, ``L`` loss with head.
    Raises InputError when it is written otherwise, or embedding and loss are not at its ends.
    """
    said = found.take(_LAYOUT)
    if said is None:
        return []
    text = re.sub(r"[\s,]", "", str(said))
    text = re.sub(r"([EtmL|])\*(\d+)", lambda m: m[1] * int(m[2]), text)
    text = re.sub(r"\(([^()]*)\)(?:\*(\d+))?", lambda m: m[1] * int(m[2] or 1), text)
    if not re.fullmatch(r"E[tm|]*L", text):
        raise InputError(
            f"{said!r:.60} is no layout from embedding (E) over blocks (t) to loss (L)",
            file=found.file, place=_LAYOUT, fix="write it as Et*3|(tt|)*29,m|L",
        )  # fmt: skip
    return text.split("|")
