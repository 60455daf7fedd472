"""Language models, and how they are trained, by Megatron-LM's arguments.

What each argument is to a prediction stands in a table that ships, and so does what Megatron-LM refuses of them.
"""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from trioflow.base.errors import InputError
from trioflow.base.precision_recipes import choose_recipe
from trioflow.base.provenance import read_own_table
from trioflow.formats.fields import Fields, name_likely
from trioflow.trace.language.read import TEXT
from trioflow.trace.language.sizes import (
    CUDNN,
    FLASH,
    FUSED,
    LAYERS,
    Configuration,
    ConfigurationFile,
    LanguageModel,
    LanguageStep,
)

_GPT2_WORDS = 50257
"""Words of the tokenizer that Megatron-LM reads from ``--vocab-file`` and ``--merge-file``."""
_NORMS = {"LayerNorm": "layer", "RMSNorm": "rms"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary", "none": "none", "alibi": "none"}
_CONTEXT = {"p2p": "ring", "all_gather": "all-gather", "a2a": "all-to-all", "a2a+p2p": "ring"}
"""Of ``--cp-comm-type``; a2a+p2p shares heads within groups, and is taken for a ring of all."""
_UNFUSED = ("unfused", "local")
_FP8 = {"delayed": "fp8-delayed", "tensorwise": "fp8", "blockwise": "fp8-block"}
_OPTIMIZERS = {"adam": "adamw-fused", "sgd": "sgd-foreach"}
_LAYOUT = "pipeline-model-parallel-layout"
_LONGEST = 1 << 16
"""Letters of a pattern of layers, written out."""
_UNSET = "false|none|0|"
FOLLOWED, REFUSED, ASSUMED, CONTRADICTED = "followed", "refused", "assumed", "contradicted"
"""Classes of an argument, beside none, and of several together."""
_SECTION = "MODEL_ARGS"
"""Section of Megatron-LM's ``model_config.yaml``."""
_LAYERS = {
    f"{dashes}{name}"
    for dashes in ("--", "")
    for name in ("num-layers", "num_layers", "encoder-num-layers", "encoder_num_layers")
}
"""Arguments of which Megatron-LM needs one."""
_TERM = re.compile(r"(!?)([\w-]+)(?:(!=|[=<>%])(2\*)?([\w.-]+))?")
"""Of what Megatron-LM refuses: an argument that is set, or its value beside a number, a word or another argument."""


@cache
def known_arguments() -> dict[str, dict[str, str]]:
    """Return what each argument is to a prediction, by its name or a pattern, names first: rows of ``arguments.tsv``."""
    return {row["argument"]: row for row in read_own_table("formats/megatron/arguments")}


def find_argument(name: str) -> dict[str, str] | None:
    """Return what an argument is; None where nobody knows it."""
    known = known_arguments()
    return known.get(name) or next((a for p, a in known.items() if fnmatchcase(name, p)), None)


def parse_arguments(text: str, file: str) -> dict[str, Any]:
    """Return the arguments of a command line, as in a shell script, by name without the dashes.

    Another program than ``pretrain_gpt.py`` stands as ``model-provider``. Raises InputError when the shell could not
    read it either.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"not a command line ({error})", file=file) from None
    arguments: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            arguments[name] = value or True
        elif program := re.search(r"(?:^|/|_)(?:pre)?train_(?!gpt)(\w+)\.py$", word):
            arguments["model-provider"] = program[1]
        elif name and arguments[name] is True:
            arguments[name] = (word if "(" in word else word.rstrip(")")) or True
        elif name and re.fullmatch(r"[\w.:+-]+", word) and not word.endswith(".py"):
            arguments[name] = f"{arguments[name]} {word}"
        else:
            name = ""
    return arguments


def read_file(file: ConfigurationFile) -> Configuration | None:
    """Return the run of a command line, or of a YAML of arguments; None for another file.

    Raises InputError as `read_megatron`, or where a text is no such command line.
    """
    is_text = file.file.endswith(TEXT)
    arguments = parse_arguments(file.text, file.file) if is_text else file.content.get(_SECTION, file.content)
    if isinstance(arguments, Mapping) and _LAYERS & set(arguments):
        return read_megatron(arguments, file.file, file.name)
    if is_text:
        raise InputError("no command line of Megatron-LM: --num-layers is missing", file=file.file)
    return None


def read_megatron(arguments: Mapping[str, Any], file: str, name: str) -> Configuration:
    """Return what Megatron-LM's arguments (dashes or not) say; what they leave out has Megatron-LM's defaults.

    Raises InputError when a size is missing or depends on a variable, an argument makes it a network, a run or a plan
    that is not built, or arguments contradict each other.
    """
    plain = {
        str(key).lstrip("-").replace("_", "-"): False if value == "false" else value for key, value in arguments.items()
    }
    fields = Fields(plain, file)
    notes = _sort_arguments(fields)
    model = _read_model(fields, name)
    sequence = fields.size("seq-length", model.longest or None)
    backend = str(fields.take("attention-backend", "auto"))
    precision = _find_precision(fields)
    recipe = choose_recipe(precision)
    unfused = (
        not recipe.casts_model  # no fused kernel takes fp32
        or backend in _UNFUSED
        or (fields.take("transformer-impl") == "local" and not fields.flag("use-flash-attn"))
    )
    separate = fields.flag("no-masked-softmax-fusion") or not recipe.casts_model
    softmax = "eager" if separate else "fused-softmax"
    kernel = FLASH if backend == FLASH or fields.take("transformer-impl") == "local" else CUDNN
    adds = recipe.adds_gradients and not fields.flag("no-gradient-accumulation-fusion")
    step = {
        "sequence": sequence,
        "batch": fields.size("micro-batch-size", 1),
        "precision": precision,
        "attention": softmax if unfused else kernel,
        "fusion": "" if adds else LAYERS,
    }
    graphs = fields.flag("enable-cuda-graph") or fields.flag("external-cuda-graph")
    if graphs or str(fields.take("cuda-graph-impl", "none")) != "none":
        step["cuda_graphs"] = True
    if (optimizer := fields.word("optimizer", _OPTIMIZERS, "adam")) != LanguageStep.optimizer:
        step["optimizer"] = optimizer
    if fields.flag("deterministic-mode"):
        step["deterministic"] = True
    if fields.flag("cross-entropy-loss-fusion") and fields.take("cross-entropy-fusion-impl") == "te":
        step["loss"] = FUSED
    degrees = _read_degrees(fields, model)
    total = "global-batch-size"
    if schedule := fields.take("step-batch-size-schedule"):  # such as 0:96 10B:192
        total = "step-batch-size-schedule"
        fields.content[total] = str(schedule).partition(":")[2].split(" ")[0]
    return Configuration(
        model.check(file),
        step,
        degrees,
        global_batch=None if fields.take(total) is None else fields.size(total),
        stages=_cut_stages(fields, model.layers, degrees),
        notes=tuple(notes),
        optimizer_instances=fields.size("num-distributed-optimizer-instances", 1),
    )


def _sort_arguments(fields: Fields) -> list[str]:
    """Return a sentence for each thing that is assumed where arguments say otherwise, and one for those unknown.

    Raises InputError for arguments that are refused, alone or together.
    """
    values: dict[str, Any] = {name: row["default"] for name, row in known_arguments().items() if row["default"]}
    values |= {name: value for name, value in fields.content.items() if value is not None}
    assumed: dict[str, list[str]] = {}
    for name, value in values.items():
        row = find_argument(name) or {"says": "nobody here knows them, and they may change the work"}
        shown = str(value) if name in fields.content else "left out"
        if not row["says"] or _spell(value) in (row.get("built") or _UNSET).split("|"):
            continue
        if row.get("class") == REFUSED:
            raise InputError(f"--{name} {shown:.40}: {row['says']}", file=fields.file, place=name)
        argument = f"--{name}" if value is True else f"--{name} {shown:.40}"
        if "class" not in row:
            argument = name_likely(argument, known_arguments())
        assumed.setdefault(row["says"], []).append(argument)
    notes = [f"not followed: {', '.join(names)} ({says})" for says, names in assumed.items()]
    for row in read_own_table("formats/megatron/together"):
        if all(_holds(term, values) for term in row["when"].split()):
            if row["class"] != ASSUMED:
                why = ": Megatron-LM refuses it" if row["class"] == CONTRADICTED else ""
                raise InputError(row["says"] + why, file=fields.file)
            notes.append(row["says"])
    return notes


def _spell(value: Any) -> str:
    """Return a value as the tables write it: yes and no in small letters, numbers without a point that says nothing."""
    text = (" ".join(map(str, value)) if isinstance(value, list) else str(value)).strip("[] ")
    try:
        return f"{float(text):g}"
    except ValueError:
        return text.lower() if isinstance(value, bool) else text


def _holds(term: str, values: Mapping[str, Any]) -> bool:
    """Return whether a term of several arguments' rows holds for their values, defaults included."""
    inverted, name, sign, twice, other = _TERM.findall(term)[0]
    value, against = values.get(name, "none"), values.get(other, other)
    if not sign:
        return (_spell(value) in _UNSET.split("|")) == bool(inverted)
    if "=" in sign:
        return (_spell(value) == _spell(against)) is not (sign[0] == "!")
    with suppress(ValueError, TypeError):
        left, right = float(value), float(against) * (2 if twice else 1)
        return bool({"<": left < right, ">": left > right, "%": left % (right or 1)}[sign])
    return False


def _read_model(fields: Fields, name: str) -> LanguageModel:
    hidden, heads = fields.size("hidden-size"), fields.size("num-attention-heads")
    gated, biased = fields.flag("swiglu"), not fields.flag("disable-bias-linear")
    usual = hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden
    gated = fields.flag("quick-geglu") or gated
    groups = fields.size("num-query-groups", heads)
    positions = "rope" if fields.flag("use-rotary-position-embeddings") else "learned_absolute"
    positions = fields.word("position-embedding-type", _POSITIONS, positions)
    longest = fields.size("max-position-embeddings", fields.size("seq-length", 1))
    norm = fields.word("normalization", _NORMS, "LayerNorm")
    activation = "silu" if gated else "squared_relu" if fields.flag("squared-relu") else "gelu_tanh"
    layers, width = fields.size("num-layers"), fields.size("ffn-hidden-size", usual)
    more = _read_experts(fields, layers, width)
    if fields.flag("multi-latent-attention"):
        sizes = ("qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim", "kv-lora-rank", "q-lora-rank")
        more |= fields.read_latent(*sizes)
        fields.taken.add("kv-channels")
        biased_query = False
    else:
        more["head_size"] = fields.size("kv-channels", max(hidden // heads, 1))
        biased_query = biased or fields.flag("add-qkv-bias")
    return LanguageModel(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=groups if fields.flag("group-query-attention") else heads,
        vocabulary=_find_vocabulary(fields),
        positions=positions,
        longest=longest if positions == "learned" else 0,
        norm=norm,
        activation=activation,
        gated=gated,
        query_bias=biased_query,
        output_bias=biased,
        feed_forward_bias=biased,
        query_norm=fields.flag("qk-layernorm"),
        tied=not fields.flag("untie-embeddings-and-output-weights"),
        dropout=fields.share("hidden-dropout", 0.1),
        attention_dropout=fields.share("attention-dropout", 0.1),
        **more,
    )


def _read_experts(fields: Fields, layers: int, width: int) -> dict[str, Any]:
    """Return the sizes of feed-forward layers: of all blocks, or of experts and of the first blocks without them."""
    if fields.take("num-experts") is None:
        return {"feed_forward": width}
    dense = _count_dense(fields, layers)
    shared = fields.take("moe-shared-expert-intermediate-size")
    return {
        "feed_forward": fields.size("moe-ffn-hidden-size", width),
        "experts": fields.size("num-experts"),
        "experts_per_token": fields.size("moe-router-topk", 2),
        "shared_feed_forward": fields.size("moe-shared-expert-intermediate-size") if shared else 0,
        "dense_layers": dense,
        "dense_feed_forward": width if dense else 0,
    }


def _count_dense(fields: Fields, layers: int) -> int:
    """Return how many first blocks have no experts, by a frequency or by a pattern such as ([0]*3+[1]*12).

    Raises InputError when they are not the first ones, or the pattern has another length.
    """
    pattern = str(fields.take("moe-layer-freq", 1)).replace(" ", "")
    if pattern.isdecimal():
        kinds = "".join("d" if i % max(int(pattern), 1) else "e" for i in range(layers))
    else:
        letters = pattern.translate(str.maketrans("[]", "()"))
        letters = re.sub(r"(?<=[(,])[01](?=[,)])", lambda m: "de"[int(m[0])], letters)
        kinds = _repeat(re.sub("[,+]", "", letters))
    dense = kinds.count("d")
    if not re.fullmatch("d*e*", kinds) or len(kinds) != layers:
        raise InputError(
            f"{pattern!r:.60}: blocks without experts are built as the first ones alone, of {layers}",
            file=fields.file,
            place="moe-layer-freq",
        )
    return dense


def _repeat(text: str) -> str:
    """Return a pattern of layers in which what stands before ``*N``, a letter or parentheses, is written N times."""

    def write(match: re.Match[str]) -> str:
        return match[1] * min(int(match[2] or 1), _LONGEST // max(len(match[1]), 1))

    before = ""
    while text != before:
        before = text
        text = re.sub(r"([A-Za-z|])\*(\d{1,6})", write, text)
        text = re.sub(r"\(([^()*]*)\)(?:\*(\d{1,6}))?", write, text)
    return text


def _find_vocabulary(fields: Fields) -> int:
    """Return the rows of the embedding, padded as Megatron-LM pads them."""
    padding = fields.size("make-vocab-size-divisible-by", 128)
    padding *= fields.size("tensor-model-parallel-size", 1)
    words = fields.size("vocab-size", _GPT2_WORDS)
    return fields.size("padded-vocab-size", -(-words // padding) * padding)


def _find_precision(fields: Fields) -> str:
    """Return the precision recipe; InputError where FP8 is computed in another way than is built."""
    if fields.flag("fp16"):
        return "megatron-fp16-fp32-reduce" if fields.flag("accumulate-allreduce-grads-in-fp32") else "megatron-fp16"
    in_half = "-reduce" * fields.flag("grad-reduce-in-bf16")
    if fields.take("fp8-format") is not None:
        kept = "-params" * fields.flag("fp8-param-gather") + (in_half and f"-bf16{in_half}")
        return fields.word("fp8-recipe", _FP8, "delayed") + kept
    return f"megatron-bf16{in_half}" if fields.flag("bf16") else "megatron-fp32"


def _read_degrees(fields: Fields, model: LanguageModel) -> dict[str, Any]:
    """Return the columns of a plan that the arguments settle; the data degree is what is left of the ranks."""
    tensor, pipeline, context = (
        fields.size(f"{kind}-parallel-size", 1) for kind in ("tensor-model", "pipeline-model", "context")
    )
    expert = fields.size("expert-model-parallel-size", 1)
    cut = fields.size("expert-tensor-parallel-size", tensor)
    overlap = "products" if fields.flag("tp-comm-overlap") else "backward"
    method = fields.word("cp-comm-type", _CONTEXT, "p2p")
    several = _count_stages(fields, model.layers, pipeline) if pipeline > 1 else 1
    degrees = {
        "tensor": tensor,
        "pipeline": pipeline,
        "sequence_parallel": fields.flag("sequence-parallel") and tensor > 1,
        "vocabulary_parallel": tensor > 1,
        "tensor_overlap": overlap if tensor > 1 else None,
        "expert": expert if model.experts and expert > 1 else None,
        "expert_tensor": cut if model.experts and cut != tensor else None,
        "expert_overlap": (fields.flag("overlap-moe-expert-parallel-comm") and expert > 1) or None,
        "context": context if context > 1 else None,
        "context_method": method if context > 1 else None,
        "schedule": ("interleaved" if several > 1 else "1f1b") if pipeline > 1 else None,
        "stages_per_rank": several if pipeline > 1 else None,
        "sharding": "distributed" if fields.flag("use-distributed-optimizer") else None,
        "gather_overlap": fields.flag("overlap-param-gather") or None,
        "recompute": _read_recompute(fields),
    }
    return {name: value for name, value in degrees.items() if value is not None}


def _count_stages(fields: Fields, layers: int, pipeline: int) -> int:
    """Return the stages of each rank of a pipeline; InputError where the layers do not divide into them."""
    if layout := _read_layout(fields):
        return len(layout) // pipeline
    if fields.take("num-layers-per-virtual-pipeline-stage") is None:
        return fields.size("num-virtual-stages-per-pipeline-rank", 1)
    each = fields.size("num-layers-per-virtual-pipeline-stage")
    if layers % (pipeline * each):
        raise InputError(
            f"{layers} layers do not divide into stages of {each} on {pipeline} ranks",
            file=fields.file,
            place="num-layers-per-virtual-pipeline-stage",
        )
    return layers // (pipeline * each)


def _read_recompute(fields: Fields) -> str | None:
    """Return what backward computes again; None where nothing is said."""
    words = {word: word for word in ("full", "selective", "uniform", "block")}
    if fields.flag("recompute-activations"):  # which Megatron-LM reads as the other argument
        return "selective"
    if fields.take("recompute-granularity") is None:
        return None
    kind = fields.word("recompute-granularity", words, "")
    method = fields.take("recompute-method")
    modules = str(fields.take("recompute-modules") or "core_attn").strip("[]").split()
    if kind == "selective" and modules != ["core_attn"]:
        if unknown := [name for name in modules if name not in ("core_attn", "mlp", "moe", "shared_experts")]:
            raise InputError(
                f"{' '.join(unknown)}: recomputing these from their output alone is not built",
                file=fields.file,
                place="recompute-modules",
                fix="leave them out: the step then holds more memory and is a little faster",
            )
        return f"modules:{','.join(modules)}"
    if kind != "full" or method is None or (method, str(fields.take("recompute-num-layers"))) == ("block", "0"):
        return "none" if (kind, method) == ("full", "block") else kind
    return f"{fields.word('recompute-method', words, '')}:{fields.size('recompute-num-layers', 1)}"


def _cut_stages(fields: Fields, layers: int, degrees: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the blocks of each stage: equally many, embedding and loss counted where the arguments say so.

    Stages of one rank are chunks of its blocks. Raises InputError when the blocks cannot be cut so.
    """
    pipeline, several = degrees["pipeline"], degrees.get("stages_per_rank", 1)
    if pipeline > 1 and (layout := _read_layout(fields)):
        blocks = tuple(stage.count("t") for stage in layout)
        if len(layout) != pipeline * several or sum(blocks) != layers:
            raise InputError(
                f"{sum(blocks)} layers on {len(layout)} stages, not {layers} on {pipeline} ranks with as many each",
                file=fields.file,
                place=_LAYOUT,
            )
        return blocks
    embedding = fields.flag("account-for-embedding-in-pipeline-split")
    loss = fields.flag("account-for-loss-in-pipeline-split")
    if pipeline == 1:
        return ()
    given_ends = {
        rank: fields.size(f"decoder-{side}-pipeline-num-layers")
        for rank, side in ((0, "first"), (pipeline - 1, "last"))
        if fields.take(f"decoder-{side}-pipeline-num-layers") is not None
    }
    others = pipeline - len(given_ends)
    each, rest = divmod(layers + embedding + loss - sum(given_ends.values()), others * (1 if given_ends else several))
    if rest or each < 1 or (given_ends and several > 1 and any(n % several for n in (each, *given_ends.values()))):
        raise InputError(
            f"{layers} layers cannot be cut into {pipeline} x {several} stages as the arguments say",
            file=fields.file,
            place="pipeline-model-parallel-size",
        )
    whole = each * (1 if given_ends else several)
    stages = [given_ends.get(rank, whole) // several for rank in range(pipeline)] * several
    stages[0] -= embedding
    stages[-1] -= loss
    return tuple(stages)


def _read_layout(fields: Fields) -> list[str]:
    """Return what each stage of a layout such as ``Et*3|(tt|)*29,m|L`` holds, a letter a layer; nothing without one.

    ``E`` embedding, ``t`` a block, ``m`` a layer of multi-token prediction, ``L`` loss with head.
    Raises InputError when it is written otherwise, or embedding and loss are not at its ends.
    """
    layout = fields.take(_LAYOUT)
    if layout is None:
        return []
    text = _repeat(re.sub(r"[\s,]", "", str(layout)))
    if not re.fullmatch(r"E[tm|]*L", text):
        raise InputError(
            f"{layout!r:.60} is no layout from embedding (E) over blocks (t) to loss (L)",
            file=fields.file,
            place=_LAYOUT,
            fix="write it as Et*3|(tt|)*29,m|L",
        )
    return text.split("|")
