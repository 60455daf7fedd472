"""Any network of transformers or diffusers, built from the dictionary of its ``config.json``; nothing is downloaded.

Its inputs have the sizes that the configuration states, its loss is its own. Of consecutive blocks that are built alike
two run, and the second stands for the others (`trioflow.trace.repeat`): any depth takes seconds.

Attention is PyTorch's ``scaled_dot_product_attention``, called without a mask: the sequences here are neither padded nor
packed, and the check for that in transformers reads values back from the device, which neither a step on a GPU nor a
model without values should wait for. A sliding window is a mask too, and is not followed.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import groupby
from math import prod
from operator import itemgetter
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from trioflow.base.errors import InputError, how_to_install, suggest
from trioflow.base.provenance import read_own_records
from trioflow.trace.language.sizes import USUAL_SEQUENCE
from trioflow.trace.workloads.recipe import (
    WorkloadRecipe,
    define_missing_operators,
    make_images,
    make_tokens,
    read_size,
)

ATTENTION = "trioflow_unmasked_sdpa"
"""Name under which the attention without masks is made known to transformers."""
_RUN = 3
"""Of blocks that are built alike so many run; the one in the middle stands for the others: the last one may begin sums
of gradients, such as of an encoder's output, to which others add."""
_IMAGE, _TOKENS, _SOUND = 224, 512, 160_000
"""Side of an image [pixels], tokens of a sample, and of sound 10 s at 16 kHz, where a configuration says nothing."""
_OFF = ("use_cache", "apply_spec_augment", "layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Traits of configurations that are for generation, or let random values decide what runs."""
_WINDOWED = "sliding_attention"
ROTARY = "rotary_emb"
"""Module of rotary positions: it runs before the blocks, wherever a model holds it."""
_CAPTURE = "capture the model: trioflow capture module:function --device meta"


def import_transformers(workload: str) -> ModuleType:
    """Import transformers, whose models import torchvision where installed: that has to be importable first."""
    try:
        define_missing_operators()
        return importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"workload {workload}: transformers is not installed ({error})", fix=how_to_install("capture")
        ) from None


@contextmanager
def quiet(library: ModuleType) -> Iterator[None]:
    """Silence remarks about text generation, which never happens here."""
    logging = library.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def instantiate(library: ModuleType, name: str, config: Any) -> nn.Module:
    """Build a model in single precision whose attention takes no mask."""
    kind = getattr(library, name)
    module = importlib.import_module("transformers.integrations.sdpa_attention")
    library.AttentionInterface.register(ATTENTION, module.sdpa_attention_forward)
    try:
        model: nn.Module = kind._from_config(config, attn_implementation=ATTENTION if kind._supports_sdpa else "eager")
    except KeyError:  # the model chooses among classes of attention of its own
        model = kind._from_config(config, attn_implementation="eager")
    return model.float().train()


def build_configured(row: Mapping[str, Any]) -> WorkloadRecipe:
    """Build the network of ``config`` (JSON text) with its own inputs and loss.

    ``sequence`` [tokens, or samples of sound] where the configuration does not settle it; with ``whole`` every block
    runs. Raises InputError when transformers is missing or does not know the network, or a size is missing.
    """
    content = json.loads(str(row["config"]))
    if "_class_name" in content:
        return _describe(row, *_build_diffusion(content), [])
    library = import_transformers(str(row["workload"]))
    with quiet(library):
        config = _read_config(library, content)
        kind = _choose_class(library, config)
        try:
            model = instantiate(library, kind, config)
        except Exception as error:
            raise InputError(f"transformers cannot build {kind} from this configuration ({error})") from error
    wanted = read_size(row, "sequence")
    sequence = wanted or _choose_sequence(model)
    inputs = _describe_inputs(model, kind, sequence) | _describe_labels(model, kind, sequence)
    return _describe(row, model, inputs, _list_notes(model, kind, content, inputs, sequence, wanted))


def _describe(row: Mapping[str, Any], model: nn.Module, inputs: Mapping[str, Any], notes: list[str]) -> WorkloadRecipe:
    """Return a network with what it reads and learns from, of which equal blocks are left out."""
    parameters = sum(p.numel() for p in model.parameters())
    stacks = _find_stacks(model)
    repeats = {} if row.get("whole") else _fold(model, stacks)
    return WorkloadRecipe(
        model.train(),
        partial(_make_batch, model, inputs),
        _own_loss,
        cut_units(model, stacks),
        split_by_name(model, stacks),
        notes=tuple(notes),
        repeats=repeats,
        parameters=parameters,
    )


def _build_diffusion(content: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a denoiser of diffusers, such as UNet2DConditionModel or DiTTransformer2DModel, and its inputs.

    Its prompt has the 77 tokens of CLIP. Raises InputError when diffusers is missing or does not build it.
    """
    kind = str(content["_class_name"])
    try:
        define_missing_operators()
        library = importlib.import_module("diffusers")
    except ImportError as error:
        raise InputError(
            f"{kind} is built by diffusers, which is not installed ({error})",
            fix=f"install it: {sys.executable} -m pip install diffusers",
        ) from None
    try:
        model = getattr(library, kind).from_config(dict(content))
    except Exception as error:
        raise InputError(f"diffusers cannot build {kind} from this configuration ({error})") from error
    config, taken = model.config, inspect.signature(model.forward).parameters
    noisy = next((name for name in ("sample", "hidden_states") if name in taken), "")
    if not noisy or "timestep" not in taken or not config.get("sample_size"):
        raise InputError(f"{kind} is not an image denoiser with a sample_size", fix=_CAPTURE)
    size = config.sample_size
    image = size if isinstance(size, list | tuple) else (size, size)
    inputs: dict[str, Any] = {noisy: ((config.in_channels, *image), 0), "timestep": ((), 1000)}
    if width := config.get("cross_attention_dim"):
        inputs["encoder_hidden_states"] = (77, width), 0
    if config.get("norm_type") == "ada_norm_zero":
        inputs["class_labels"] = (), config.num_embeds_ada_norm
    if config.get("addition_embed_type") == "text_time":  # of Stable Diffusion XL
        text = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {"text_embeds": ((text,), 0), "time_ids": ((6,), 0)}
    return model, inputs


def _read_config(library: ModuleType, content: Mapping[str, Any]) -> Any:
    """Return a configuration as transformers reads it; InputError where it knows no such network."""
    kind, known = str(content.get("model_type")), library.CONFIG_MAPPING
    if kind not in known:
        raise InputError(
            f"transformers {library.__version__} knows no model_type {kind!r}",
            fix=f"{suggest(kind, known.keys())}or {_CAPTURE}",
        )
    try:
        config = known[kind].from_dict(dict(content))
    except Exception as error:
        raise InputError(f"transformers does not read this configuration of {kind} ({error})") from error
    if config.get_text_config() is not config and {"image_token_id", "image_token_index"} & {*vars(config)}:
        config = config.get_text_config()
    for part in _list_parts(config):
        for trait in _OFF:
            if hasattr(part, trait):
                setattr(part, trait, type(getattr(part, trait))())
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def _list_parts(config: Any) -> list[Any]:
    """Return a configuration and those inside it, such as of its text and of its images."""
    return [config, *(getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None)]


def _choose_class(library: ModuleType, config: Any) -> str:
    """Return the class that the file names, else the first of transformers' own for this kind of network."""
    for one in config.architectures or ():
        if hasattr(library, one):
            return str(one)
    auto = library.models.auto.modeling_auto
    for head in known_names()["heads"]["order"]:
        listed = getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES" if head else "MODEL_MAPPING_NAMES", {})
        if config.model_type in listed:
            names = listed[config.model_type]
            return str(names if isinstance(names, str) else names[0])
    raise InputError(f"transformers has no model class for {config.model_type}", fix="name its class in architectures")


@cache
def known_names() -> dict[str, dict[str, Any]]:
    """Return what is known of networks by the names of their classes and layers."""
    return read_own_records("trace/workloads/configured")


def _choose_sequence(model: Any) -> int:
    """Return the length of a sample that nobody states: as many tokens as there are positions, up to `USUAL_SEQUENCE`."""
    if model.main_input_name == "input_values":
        return _SOUND
    text, names = model.config.get_text_config(), ("max_position_embeddings", "max_target_positions", "n_positions")
    return min(next((int(n) for word in names if (n := getattr(text, word, None))), _TOKENS), USUAL_SEQUENCE)


def _describe_inputs(model: Any, kind: str, sequence: int) -> dict[str, Any]:
    """Return each input of one sample: its shape, and from how many whole numbers it is chosen, 0 for other numbers.

    ``sequence``: tokens, or samples of sound. Raises InputError where a shape is not known.
    """
    config, first, taken = model.config, model.main_input_name, inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {}
    if first in ("input_ids", "pixel_values") and "input_ids" in taken:
        inputs["input_ids"] = (sequence,), config.get_text_config().vocab_size
    if first in ("input_ids", "pixel_values") and "pixel_values" in taken:
        inputs["pixel_values"] = _shape_images(config), 0
    if first == "input_features" and hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions  # two go into each position
        bands = getattr(config, "num_mel_bins", None)
        inputs[first] = ((bands, frames) if bands else (frames, config.input_feat_per_channel)), 0
    if first == "input_values":
        inputs[first] = (sequence,), 0
    if not inputs or (first == "input_ids" and "input_features" in taken):
        raise InputError(
            f"{kind} reads {first if not inputs else 'input_features'}, whose shape config.json does not give",
            fix=_CAPTURE,
        )
    return inputs


def _shape_images(config: Any) -> tuple[int, ...]:
    """Return the shape of an image, or of the frames of a film."""
    pictures = next((part for part in _list_parts(config) if hasattr(part, "image_size")), config)
    size = getattr(pictures, "image_size", _IMAGE)
    shape = (getattr(pictures, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size)))
    frames = getattr(config, "num_frames", None)
    return (frames, *shape) if frames else shape


def _describe_labels(model: Any, kind: str, sequence: int) -> dict[str, Any]:
    """Return what a network learns from, as `_describe_inputs`; nothing where labels alone do not decide its loss."""
    config, taken = model.config, inspect.signature(model.forward).parameters
    if "bool_masked_pos" in taken and taken["bool_masked_pos"].default is inspect.Parameter.empty:
        raise InputError(f"{kind} trains on masked patches, and the data decides which ones", fix=_CAPTURE)
    labels = next((shape for word, shape in known_names()["labels"].items() if kind.endswith(word)), "")
    if labels == "tokens" and "labels" in taken:
        return {"labels": ((sequence,), config.get_text_config().vocab_size)}
    if labels and "labels" in taken:
        return {"labels": (() if labels == "class" else _shape_images(config)[1:], config.num_labels)}
    return {"return_loss": True} if "return_loss" in taken else {}


def _list_notes(
    model: Any, kind: str, content: Mapping[str, Any], inputs: Mapping[str, Any], sequence: int, wanted: int | None
) -> list[str]:
    """Return what of the network's training is assumed or not followed."""
    notes, text = list[str](), model.config.get_text_config()
    if wanted is None and {"input_ids", "input_values"} & set(inputs):
        notes.append(
            f"samples of {sequence} {'tokens' if 'input_ids' in inputs else 'numbers'} (change it with --sequence)"
        )
    if model.config.model_type != content["model_type"]:
        notes.append(f"{content['model_type']} is trained on text only here, without its vision tower")
    if not {"labels", "return_loss"} & set(inputs) and not kind.endswith("ForPreTraining"):  # these have a loss anyway
        notes.append(f"the loss of {kind} is not known: the mean square of its output is used instead")
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None) or (_WINDOWED,)
    if window and sequence > window and _WINDOWED in kinds:
        notes.append(f"the sliding attention window of {window} tokens is ignored: attention reads all {sequence}")
    return notes


def _make_batch(
    model: nn.Module, inputs: Mapping[str, Any], batch: int, seed: int, device: str = "cpu"
) -> tuple[dict[str, Any], None]:
    """Return synthetic inputs by name; whatever is learnt from is among them."""
    made: dict[str, Any] = {}
    for name, entry in inputs.items():
        if not isinstance(entry, tuple):  # a flag, or inputs of inputs
            made[name] = _make_batch(model, entry, batch, seed, device)[0] if isinstance(entry, Mapping) else entry
            continue
        shape, choices = entry
        numbers, chosen = make_images(shape, choices or 1, batch, seed, device)
        if choices and shape:
            chosen = make_tokens(prod(shape), choices, batch, seed, device)[0].view(batch, *shape)
        made[name] = chosen if choices else numbers.to(next(model.parameters()).dtype)
    return made, None


def _own_loss(outputs: Any, targets: None) -> Tensor:
    """Return the network's own loss; the mean square of its first tensor where it has none."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    first = next(t for t in outputs.to_tuple() if isinstance(t, Tensor) and t.is_floating_point())
    return first.float().square().mean()


Stacks = dict[str, tuple[int, int]]
"""Of each list of blocks, by its path, the first of the longest run of those built alike, and how many they are."""


def _find_stacks(model: nn.Module) -> Stacks:
    """Return the lists of blocks that are inside no other one."""
    stacks: Stacks = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{outer}.") for outer in stacks):
            continue
        runs = [
            [place for place, _ in group] for _, group in groupby(enumerate(map(_signature, module)), itemgetter(1))
        ]
        longest = max(runs, key=len, default=[])
        if len(longest) > 1:
            stacks[path] = longest[0], len(longest)
    return stacks


def _signature(block: nn.Module) -> Any:
    """Return what a block is built of; its number and a mask of its attention (sliding window) are no part of it."""
    return [
        (
            path,
            type(part).__name__,
            [(name, tuple(p.shape)) for name, p in part.named_parameters(recurse=False)],
            sorted(
                (name, bool(value) if isinstance(value, float) else value)
                for name, value in vars(part).items()
                if isinstance(value, int | float | str | tuple) and not re.search("idx|index|layer_|sliding|type", name)
            ),
        )
        for path, part in block.named_modules()
    ]


def _fold(model: nn.Module, stacks: Stacks) -> dict[str, int]:
    """Leave the first blocks of each run of equal ones; return of which block of them are how many, by its path."""
    repeats: dict[str, int] = {}
    for path, (start, count) in stacks.items():
        if count > _RUN:
            blocks = list(model.get_submodule(path))
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, nn.ModuleList(blocks[: start + _RUN] + blocks[start + count :]))
            repeats[f"{path}.{start + _RUN // 2}"] = count - _RUN + 1
    return repeats


def cut_units(model: nn.Module, stacks: Collection[str]) -> dict[str, list[str]]:
    """Return the units of a network that is one chain of blocks between an embedding and a head; none of another one."""
    if len(stacks) != 1:
        return {}
    (path,) = stacks
    ends: dict[str, list[str]] = {"embedding": [], "head": []}
    blocks: list[str] = []

    def visit(module: nn.Module, place: str) -> None:
        for name, child in module.named_children():
            here = f"{place}{name}"
            if here == path:
                blocks.extend(f"{here}.{number}" for number, _ in child.named_children())
            elif path.startswith(f"{here}."):
                visit(child, f"{here}.")
            else:
                ends["head" if blocks and name != ROTARY else "embedding"].append(here)

    visit(model, "")
    units = {"embedding": ends["embedding"], **{block: [block] for block in blocks}, "head": ends["head"]}
    return {name: modules for name, modules in units.items() if modules}


def split_by_name(model: nn.Module, stacks: Iterable[str]) -> dict[str, str]:
    """Return how Megatron-LM would cut the linear layers of the blocks, by patterns of their paths."""
    kinds: dict[str, str] = {}
    for stack in stacks:
        for path, _ in model.get_submodule(stack)[0].named_modules():
            for kind, words in known_names()["split"].items():
                if any(f".{path}".endswith(f".{word}") for word in words):
                    kinds[f"{stack}.*.{path}"] = kind
    return kinds
