"""A plan as frameworks' own launch configurations: written and read by one table of keys, `launch.tsv`.

What is written is read back and compared: a framework that cannot express a plan says what is lost.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import yaml

from trioflow.base.errors import InputError
from trioflow.base.plan_row import SHARDINGS, Plan
from trioflow.base.precision_recipes import MEGATRON
from trioflow.base.provenance import read_own_table
from trioflow.formats import megatron
from trioflow.formats.fields import note_unknown
from trioflow.trace.language.read import open_configuration, published_models
from trioflow.trace.language.sizes import COMPILE, EAGER, Configuration, ConfigurationFile, LanguageModel

NEMO, TORCHTITAN, DEEPSPEED, ACCELERATE = "nemo", "torchtitan", "deepspeed", "accelerate"
_NODE = 8
"""GPUs of a machine, as Accelerate counts machines."""


@dataclass(frozen=True)
class Framework:
    """How a framework is called, its file, what the file cannot do without, and the precision recipe of its runs."""

    title: str
    file: str
    marks: tuple[str, ...]
    recipe: str
    data_parallel: bool = False  # whether it says no other degree


_FILLED_IN = "auto"
"""What stands in a file where the training script fills the value in: it says nothing."""
_NOTHING: tuple[Any, ...] = (None, False, [], "", "none", _FILLED_IN)
"""Values of a key that ask for nothing."""


FRAMEWORKS = {
    MEGATRON: Framework("Megatron-LM", "megatron.args", (), "megatron-bf16"),
    NEMO: Framework("NeMo Megatron Bridge", "megatron_bridge.yaml", ("model", "train"), "megatron-bf16"),
    TORCHTITAN: Framework("torchtitan", "torchtitan.toml", ("training", "parallelism"), f"fsdp2-mixed+{COMPILE}"),
    DEEPSPEED: Framework("DeepSpeed", "deepspeed.json", ("zero_optimization",), "deepspeed-bf16", True),
    ACCELERATE: Framework("Hugging Face Accelerate", "accelerate.yaml", ("fsdp_config",), "fsdp2-bf16-reduce", True),
}
_SCRIPT = re.compile(r"^# ([a-z_]+): (.+)$", re.MULTILINE)
"""A comment of a file about what the training script decides."""
_WHOLE = re.compile("-?[0-9]{1,12}", re.ASCII)
_UNSTATED_RECOMPUTATION = (
    "activation_checkpoint.mode is not in the file: nothing is recomputed here, while torchtitan's own default is"
    " selective (what it recomputes depends on its version)"
)
_TEXTS = ("name", "parts")
"""Fields without words of their own that are no whole numbers."""


@dataclass(frozen=True)
class Key:
    """A key of a framework's file: the field that it says, and the file's words for values of it."""

    key: str
    field: str
    words: tuple[tuple[str, str], ...]

    def write(self, value: Any) -> Any:
        """Return what the file says of a value; None where it has no word for it, or nothing needs saying."""
        if not self.words:
            return value
        word = next((word for word, ours in self.words if ours == str(value)), "")
        return {"+": True, "True": True, "False": False, "": None}.get(word, int(word) if word.isdigit() else word)

    def read(self, value: Any, file: str) -> Any:
        """Return the value that the file's word stands for; InputError for a word that is not known here."""
        if not self.words:
            return value
        known = {word.replace("+", "True"): ours for word, ours in reversed(self.words)}
        if str(value) not in known:
            fix = f"use one of {', '.join(known)}"
            raise InputError(f"{value!r:.40} is not known here", file=file, place=self.key, fix=fix)
        return {"True": True, "False": False}.get(known[str(value)], known[str(value)])


@cache
def list_keys(framework: str) -> tuple[Key, ...]:
    """Return the keys of a framework's file."""
    rows = [row for row in read_own_table("formats/launch") if row["framework"] == framework]
    pairs = [[pair.partition("=") for pair in (row["words"] or "").split("|") if pair] for row in rows]
    return tuple(
        Key(row["key"], row["field"], tuple((word, ours) for word, _, ours in setting))
        for row, setting in zip(rows, pairs, strict=True)
    )


def describe_launch(configuration: Configuration, plan: Plan, model: str) -> dict[str, Any]:
    """Return a run as fields of the table: sizes of the model, the step, the plan's columns, and what follows from them.

    Sizes and degrees that a run does without are None, and no file says them.
    """
    sizes, step, batch = configuration.model, configuration.step, configuration.global_batch or 1
    shards = {"none": 1, "hsdp": plan.shard}.get(plan.sharding, plan.data)
    kind, _, layers = ("uniform:1" if plan.recompute == "full" else plan.recompute).partition(":")
    experts, micro = bool(sizes.experts), batch // plan.data // plan.pieces
    derived = {
        "widest_feed_forward": sizes.dense_feed_forward or sizes.feed_forward,
        "grouped": sizes.kv_heads != sizes.heads,
        "groups": sizes.kv_heads if sizes.kv_heads != sizes.heads else None,
        "channels": None if sizes.latent else sizes.head_size,
        "held_positions": sizes.longest or step["sequence"],
        "gate": sizes.activation if sizes.gated else None,
        "extra_query_bias": sizes.query_bias and not sizes.feed_forward_bias,
        "number_of_experts": sizes.experts,
        "expert_feed_forward": sizes.feed_forward if experts else None,
        "expert_layers": f"([0]*{sizes.dense_layers}+[1]*{sizes.layers - sizes.dense_layers})"
        * bool(sizes.dense_layers),
        "latent_attention": bool(sizes.latent),
        "plain_size": sizes.head_size - sizes.rotary_size if sizes.latent else None,
        "expert_tensor": plan.expert_tensor if experts and plan.expert_tensor else None,
        "context_method": plan.context_method if plan.context > 1 else None,
        "optimizer_instances": plan.replicas // plan.shard if plan.shard > 1 else None,
        "recompute_kind": "full" if layers else kind,
        "recompute_method": kind if layers else None,
        "recompute_layers": int(layers) if layers.isdigit() else None,
        "layout": _write_layout(configuration.stages) or None,
        "parts": _write_parts(configuration.stages) or None,
        "name": model,
        "ranks": plan.ranks,
        "machines": -(-plan.ranks // _NODE),
        "version": 2,
        "arithmetic": "bf16",
        "micro_batch": micro,
        "local_batch": batch // plan.data if plan.pipeline > 1 else micro,
        "global_batch": batch,
        "replicate": plan.data // shards,
        "sharded": shards,
        "fusion": step.get("fusion") or EAGER,
    }
    known = asdict(sizes) | dict(step) | {cell.name: getattr(plan, cell.name) for cell in fields(plan)} | derived
    left_out = {name for name, value in known.items() if value in (None, "") or (type(value) is int and not value)}
    return {name: value for name, value in known.items() if name not in left_out}


def _write_layout(stages: tuple[int, ...]) -> str:
    """Return blocks of stages as Megatron-LM's layout: E embedding, t a block, L the loss with the head."""
    cells = "|".join(f"t*{count}" if count > 1 else "t" * count for count in stages)
    return f"E{cells}L" if stages else ""


def _write_parts(stages: tuple[int, ...]) -> list[list[str]]:
    """Return the modules of each stage as torchtitan names them."""
    ends = [sum(stages[: place + 1]) for place in range(len(stages))]
    parts = [[f"layers.{i}" for i in range(end - size, end)] for size, end in zip(stages, ends, strict=True)]
    if parts:
        parts[0].insert(0, "tok_embeddings")
        parts[-1] += ["norm", "output"]
    return parts


def write_launch(framework: str, known: Mapping[str, Any]) -> str:
    """Return a framework's file for a run of ``describe_launch``."""
    known, content = {**known, "framework": framework}, dict[str, Any]()
    for one in list_keys(MEGATRON if framework == NEMO else framework):
        value = one.write(known[one.field]) if one.field in known else None
        if value is not None and (value is not False or one.words):
            content[one.key] = value
    return _FORMS[framework](_to_bridge(content) if framework == NEMO else content)


def _to_bridge(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron-LM's arguments under the keys of Megatron Bridge."""
    named = {one.field: one for one in list_keys(NEMO)}
    return {
        named[name].key if name in named else f"model.{name.replace('-', '_')}": named[name].write(value)
        if name in named
        else value
        for name, value in arguments.items()
    }


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as sections; a key of two takes the words of its value one each."""
    content: dict[str, Any] = {}
    for key, value in flat.items():
        names = key.split(" ")
        for name, part in zip(names, str(value).split(" ") if len(names) > 1 else [value], strict=True):
            section, _, last = name.rpartition(".")
            place = content
            for word in filter(None, section.split(".")):
                place = place.setdefault(word, {})
            place[last] = part
    return content


def _split_script(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the file's sections, and what the training script decides."""
    script = {key[1:]: value for key, value in settings.items() if key.startswith("#")}
    return _nest({key: value for key, value in settings.items() if not key.startswith("#")}), script


def _write_arguments(settings: Mapping[str, Any]) -> str:
    return "".join(
        f"--{key}\n" if value is True else f"--{key} {shlex.quote(str(value))}\n" for key, value in settings.items()
    )


def _write_yaml(settings: Mapping[str, Any]) -> str:
    content, script = _split_script(settings)
    comments = "# Set by the training script, not by this file; trioflow reads it.\n" * bool(script)
    return (
        comments
        + "".join(f"# {key}: {value}\n" for key, value in script.items())
        + yaml.safe_dump(content, sort_keys=False)
    )


def _write_json(settings: Mapping[str, Any]) -> str:
    content, script = _split_script(settings)
    return json.dumps({**content, "trioflow": script}, indent=2) + "\n"


def _write_toml(settings: Mapping[str, Any]) -> str:
    sections = (
        [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items()), ""]
        for name, section in _nest(settings).items()
    )
    return "\n".join(line for section in sections for line in section)


_FORMS = {
    MEGATRON: _write_arguments,
    NEMO: _write_yaml,
    TORCHTITAN: _write_toml,
    DEEPSPEED: _write_json,
    ACCELERATE: _write_yaml,
}


def read_file(given: ConfigurationFile) -> Configuration | None:
    """Return the run that a framework's file configures, its comments among it; None for another file.

    Raises InputError where a key has an unknown word, or the model is not known.
    """
    content, file = given.content, given.file
    marked = {name: one.marks for name, one in FRAMEWORKS.items() if one.marks}
    framework = next((name for name, marks in marked.items() if all(mark in content for mark in marks)), None)
    if framework is None:
        return None
    flat = dict(_flatten(content)) | {f"#{key}": value for key, value in _SCRIPT.findall(given.text)}
    flat |= {key.replace("trioflow.", "#", 1): value for key, value in flat.items() if key.startswith("trioflow.")}
    if framework == NEMO:
        return megatron.read_megatron(_from_bridge(flat, file), file, "model")
    known: dict[str, Any] = {}
    for one in list_keys(framework):
        names = one.key.split(" ")
        if all(flat.get(name, _FILLED_IN) != _FILLED_IN for name in names):
            value = flat[one.key] if len(names) == 1 else " ".join(str(flat[name]) for name in names)
            known[one.field] = one.read(value, file)
            if not one.words and one.field not in _TEXTS:
                if not _WHOLE.fullmatch(str(value)):
                    raise InputError(f"{value!r:.40} is no whole number", file=file, place=one.key)
                known[one.field] = int(value)
    model = published_models().get(str(known.get("name")))
    if model is None:
        raise InputError(
            f"the file names no known model: {known.get('name', 'none')}",
            file=file,
            fix='add a line "# model: llama-3.1-8b", or in JSON "trioflow": {"model": "llama-3.1-8b"}',
        )
    keys = [name for one in list_keys(framework) for name in one.key.split(" ")]
    unknown = [
        key
        for key, value in flat.items()
        if key not in keys and value not in _NOTHING and not any(fnmatchcase(f"{key}={value}", one) for one in keys)
    ]
    settled = _settle(known, model)
    # What casts to half precision: in torchtitan fully_shard, in DeepSpeed where the file asks for it.
    casts = {TORCHTITAN: settled.degrees["sharding"] != "none", DEEPSPEED: "arithmetic" in known}.get(framework, False)
    usual = {"precision": FRAMEWORKS[framework].recipe.partition("+")[0]} if casts else {}
    unstated = [_UNSTATED_RECOMPUTATION] if framework == TORCHTITAN and "recompute" not in known else []
    return replace(settled, step={**usual, **settled.step}, notes=(*note_unknown(unknown, keys), *unstated))


def _from_bridge(flat: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Return the keys of Megatron Bridge as Megatron-LM's arguments; what is set to false is left out."""
    named = {one.key: one for one in list_keys(NEMO)}
    arguments = {
        named[key].field if key in named else key.rpartition(".")[2].replace("_", "-"): named[key].read(value, file)
        if key in named
        else value
        for key, value in flat.items()
    }
    return {key: value for key, value in arguments.items() if value is not False}


def _flatten(content: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a file under dotted keys."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


def _settle(known: Mapping[str, Any], model: LanguageModel) -> Configuration:
    """Return the configuration that a file's fields come to."""
    degrees: dict[str, Any] = {
        name: known[name] for name in ("tensor", "context", "pipeline", "expert") if name in known
    }
    pipeline, parts = degrees.get("pipeline", 1), known.get("parts") or []
    sharding, shared = str(known.get("sharding", "default")), known.get("sharded", 0)
    if sharding == "default":  # torchtitan keeps weights gathered in a pipeline; others say what they shard
        sharding = "none" if not shared else "zero2" if pipeline > 1 else "fsdp"
    if shared:
        replicas = known.get("replicate", 1)
        sharding = "none" if shared == 1 else "hsdp" if replicas > 1 else sharding
        if shared > 0:
            degrees |= {"data": replicas * shared} | ({"shard": shared} if sharding == "hsdp" else {})
    if "ranks" in known:
        degrees["data"] = known["ranks"]
    if pipeline > 1:
        stages = len(parts) // pipeline if parts else None
        degrees |= {"schedule": known.get("schedule", "1f1b")} | ({"stages_per_rank": stages} if stages else {})
    degrees |= {"sharding": sharding if sharding in SHARDINGS else "none", "recompute": known.get("recompute", "none")}
    tensor = degrees.get("tensor", 1) > 1
    degrees |= {"sequence_parallel": tensor, "vocabulary_parallel": tensor}
    micro = known.get("micro_batch", 1) if pipeline > 1 or "local_batch" not in known else known["local_batch"]
    step = {"batch": micro} | {name: known[name] for name in ("sequence", "precision", "fusion") if name in known}
    whole = known.get("global_batch", -1)
    blocks = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
    return Configuration(
        model,
        step,
        degrees,
        global_batch=whole if whole > 0 else None,
        accumulate=None if whole > 0 else known.get("accumulate"),
        stages=blocks,
    )


def list_lost(wanted: Configuration, plan: Plan, read: Configuration) -> list[str]:
    """Return what a file does not say of a run, by the names of columns and sizes."""
    quiet: tuple[str, ...] = (
        "plan",
        "data",
        "micro_batches",
        "accumulate",
        "first_bucket_bytes",
        "bucket_bytes",
        "shard",
    )
    quiet += ("schedule", "context_method", "tensor_overlap") * (plan.tensor * plan.pipeline * plan.context == 1)
    quiet += ("tensor_overlap",) * (plan.tensor_overlap != "products")
    lost = []
    for cell in fields(Plan):
        name, default = cell.name, cell.default if isinstance(cell.default, int | str) else 1
        ours, theirs = getattr(plan, name), read.degrees.get(name, default)
        same = {str(ours), str(theirs)} <= {"full", "uniform:1"} or ours == theirs
        if name not in quiet and not same and not (name == "schedule" and plan.pipeline == 1):
            lost.append(f"{name} {ours}")
    lost += [
        name for name, value in asdict(wanted.model).items() if name != "name" and value != asdict(read.model)[name]
    ]
    steps = {**wanted.step, "global_batch": wanted.global_batch}, {**read.step, "global_batch": read.global_batch}
    return lost + [
        f"{key} {steps[0][key]}"
        for key in ("sequence", "precision", "global_batch")
        if steps[0].get(key) != steps[1].get(key)
    ]


def express(framework: str, wanted: Configuration, plan: Plan, model: str) -> tuple[str, str]:
    """Return a framework's file for a run, and why there is none (one of both is empty)."""
    if any(one.field == "name" and one.words and one.write(model) is None for one in list_keys(framework)):
        return "", f"it has no {model}"
    text = write_launch(framework, describe_launch(wanted, plan, model))
    read = megatron.read_file if framework == MEGATRON else read_file
    try:
        written = read(open_configuration(text, FRAMEWORKS[framework].file))
        lost = list_lost(wanted, plan, written) if written else ["everything"]
    except InputError as error:
        return "", error.problem
    return ("", ", ".join(lost)) if lost else (text, "")
