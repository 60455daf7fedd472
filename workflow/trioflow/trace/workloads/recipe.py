"""What every kind of workload hands to `build_workload`, a recipe of model, data and loss: torchvision's and a user's own.

Convolutional networks of torchvision (`build_torchvision`) say where a pipeline can cut them.
With a CPU-only torch the compiled part of torchvision cannot load, and
importing it fails because the schemas of two operators are missing. Models that
detect nothing need neither operator, so their schemas alone are defined, and only then.

A user's own model (`build_user_model`) is named ``module:function``.
The function takes nothing, or one argument: the workload's row as a mapping
(``sequence``, ``layers``, ... where they were given). It returns either

* an object with ``model`` (a ``torch.nn.Module``), ``make_batch(batch, seed,
  device)`` that returns (inputs, targets), and ``loss(outputs, targets)`` that
  returns one number. The model is called with the inputs; a tuple becomes
  several arguments, a dict named ones. The object may also have ``units``
  (name of a pipeline unit to the paths of the modules that it runs, in order)
  and ``tensor_split`` (module pattern to ``"column"`` or ``"row"``);
* or the model alone. Then the row describes its input, ``input`` (such as
  3x224x224) for any tensor [batch, 3, 224, 224], ``image_size`` for images
  [batch, 3, size, size], or ``sequence`` and ``vocabulary`` for tokens
  [batch, sequence], and the loss is the mean square of the tensor it returns.

The module is looked for where Python looks and in the current folder.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trioflow.base.errors import InputError, suggest
from trioflow.base.settings import INPUT, NOTHING

Inputs: TypeAlias = "Tensor | tuple[Any, ...] | dict[str, Any]"
"""What a model is called with: one argument, several, or several by name."""

_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass
class WorkloadRecipe:
    """A model with its data, its loss and the places where it can be cut."""

    model: nn.Module  # whole model, in training mode; on the CPU unless it was built elsewhere
    # (samples, seed, device, by default cpu) to synthetic (inputs, targets), on ``meta`` shapes only. Inputs that are a tuple are the
    # model's arguments, those that are a dict its named ones: see ``capture.workload.call_model``.
    make_batch: Callable[..., tuple[Inputs, Any]]
    loss: Callable[[Any, Any], Tensor]  # (outputs, targets) to one number
    # Pipeline units in order, each with the modules that it runs (``"<flatten>"`` is a function between modules); empty
    # where the model cannot be cut into a chain.
    units: dict[str, list[str]] = field(default_factory=dict)
    # Module pattern to ``"column"`` or ``"row"``: the Megatron split.
    tensor_split: dict[str, str] = field(default_factory=dict)
    # Unit's name to a module that maps the unit before to the unit after; without it a unit runs
    # its modules one after the other.
    make_unit: Callable[[str], nn.Module] | None = None
    notes: tuple[str, ...] = ()  # what of the model does not run
    # Paths of blocks that stand for others, with how many each is of the whole model, which has so many parameters.
    repeats: dict[str, int] = field(default_factory=dict)
    parameters: int = 0


_MOST_DIGITS = 15


def read_size(row: Mapping[str, Any], column: str) -> int | None:
    """Return a size of a row (table, JSON or a trace's text); None where it says nothing, InputError where it is none."""
    cell = row.get(column)
    if cell is None or str(cell) in (*NOTHING, "None"):
        return None
    if not str(cell).isdecimal() or len(str(cell)) > _MOST_DIGITS or int(cell) < 1:
        raise InputError(f"workload {row['workload']}: {column} {cell!r:.40} is not a whole number from 1 on")
    return int(cell)


def need_size(row: Mapping[str, Any], column: str) -> int:
    """Return a size that the family cannot do without; InputError where the row does not give it."""
    size = read_size(row, column)
    if size is None:
        raise InputError(
            f"workload {row['workload']}: the family {row['family']} needs {column}", fix=f"give the row a {column}"
        )
    return size


def need_flag(row: Mapping[str, Any], column: str) -> bool:
    """Return a yes or no that the family cannot do without; InputError where the row gives neither."""
    cell = str(row.get(column)).lower()
    if cell not in _WORDS:
        raise InputError(f"workload {row['workload']}: {column} {row.get(column)!r} is neither true nor false")
    return _WORDS[cell]


def make_images(
    shape: Sequence[int], classes: int, batch: int, seed: int, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return synthetic inputs [batch, *shape], such as images of the shape 3, 224, 224, and their classes [batch]."""
    if torch.device(device).type == "meta":
        images = torch.empty(batch, *shape, device=device)
        return images, torch.empty(batch, dtype=torch.long, device=device)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, *shape, generator=generator, device="cpu")
    return images.to(device), _make_labels((batch,), classes, generator, device)


def make_tokens(sequence: int, vocabulary: int, batch: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return synthetic tokens and the tokens to predict, both [batch, sequence]."""
    generator = torch.Generator().manual_seed(seed)
    inputs = _make_labels((batch, sequence), vocabulary, generator, device)
    return inputs, _make_labels((batch, sequence), vocabulary, generator, device)


def _make_labels(shape: tuple[int, ...], choices: int, generator: torch.Generator, device: str) -> Tensor:
    """Return random whole numbers below ``choices``; on the meta device only their shape."""
    if torch.device(device).type == "meta":
        return torch.empty(shape, dtype=torch.long, device=device)
    return torch.randint(choices, shape, generator=generator, device="cpu").to(device)


def mean_cross_entropy(outputs: Any, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of scores [..., classes], transformers' wrapping taken off, against targets [...]."""
    scores = outputs if isinstance(outputs, Tensor) else outputs.logits
    return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


CLASSES = 1000
"""Classes of an image classifier, as in ImageNet."""

FUNCTIONS: dict[str, Callable[[], nn.Module]] = {
    "<flatten>": partial(nn.Flatten, 1),
    "<relu>": partial(nn.ReLU, inplace=True),
    "<average>": partial(nn.AdaptiveAvgPool2d, 1),
}
"""Steps between modules that a network takes by calling a function."""


def build_torchvision(row: Mapping[str, Any]) -> WorkloadRecipe:
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
    return WorkloadRecipe(model, make_batch, mean_cross_entropy, _UNITS[_kind_of(chosen)](model))


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


SIZES = (INPUT, "image_size", "sequence", "hidden", "layers", "heads", "vocabulary")
PARTS = ("model", "make_batch", "loss")


def build_user_model(row: Mapping[str, Any]) -> WorkloadRecipe:
    """Import and call the user's function and check what it returns.

    ``row``: ``model`` is ``module:function``. Raises InputError when it does not import, is not
    callable, fails, returns something else, or a size is given that nothing reads.
    """
    label = _label(row)
    made, takes_row = _make(label, row)
    if isinstance(made, nn.Module) and not hasattr(made, "make_batch"):
        return _describe_plain(label, made, row, takes_row)
    _refuse_unread(label, row, () if not takes_row else SIZES)
    return _describe_object(label, made)


def call_user_function(row: Mapping[str, Any]) -> Any:
    """Import and call the function that ``model`` names, with the row if it takes an argument.

    Raises InputError when it does not import, is not callable, fails, or a size is given that it
    does not read.
    """
    label = _label(row)
    made, takes_row = _make(label, row)
    _refuse_unread(label, row, SIZES if takes_row else ())
    return made


def _label(row: Mapping[str, Any]) -> str:
    return f"workload {row['workload']}: {str(row['model'])!r}"


def _make(label: str, row: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return what the user's function returns, and whether it read the row."""
    define_missing_operators()
    with _current_folder_importable():
        function = _find(label, str(row["model"]))
        takes_row = bool(_parameters(label, function))
        return _call(label, function, (row,) if takes_row else ()), takes_row


def _find(label: str, target: str) -> Callable[..., Any]:
    module, _, path = target.partition(":")
    if not module or not path or "/" in module or module.endswith(".py"):
        raise InputError(f"{label} is not module:function", fix="write for example my_models:make_model")
    try:
        value: Any = importlib.import_module(module)
    except Exception as error:
        raise InputError(
            f"{label}: the module {module} does not import{_reason(error)}",
            fix="run the command in the folder that holds it, or set PYTHONPATH",
        ) from error
    for part in path.split("."):
        if not hasattr(value, part):
            raise InputError(
                f"{label}: {module} has no {path!r}",
                file=getattr(sys.modules[module], "__file__", None),
                fix="check the function's name",
            )
        value = getattr(value, part)
    if not callable(value) or isinstance(value, nn.Module):
        raise InputError(
            f"{label} is a {type(value).__name__}, not a function", fix="name a function that returns the model"
        )
    return value  # type: ignore[no-any-return]


def _parameters(label: str, function: Callable[..., Any]) -> list[str]:
    """Return the arguments that the function cannot do without: none, or the row."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions written in C do not say
        return []
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if len(needed) > 1 or any(p.kind is p.KEYWORD_ONLY and p.name in needed for p in parameters):
        raise InputError(
            f"{label} needs the arguments {', '.join(needed)}",
            fix="give it none, or one that receives the workload's row",
        )
    return needed


def _call(label: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        raise InputError(f"{label} failed{_reason(error)}", fix="make the function run on its own first") from error


def _reason(error: Exception) -> str:
    """Say in a few words what went wrong and in which line of which file."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split()) or "no message"
    place = "" if last.filename.startswith("<frozen") else f" at {last.filename}:{last.lineno}"
    return f" ({type(error).__name__}{place}: {words})"


def _describe_plain(label: str, model: nn.Module, row: Mapping[str, Any], takes_row: bool) -> WorkloadRecipe:
    shape, sequence = _read_shape(row), read_size(row, "sequence")
    vocabulary = read_size(row, "vocabulary")
    if (shape is None) == (sequence is None or vocabulary is None):
        raise InputError(
            f"{label} returned a bare nn.Module, so "
            + ("the shape of its input is unknown" if shape is None else "its input is a tensor or tokens, not both"),
            fix="add --input 3x224x224 (or --sequence N --vocab N; in a table image_size, or sequence and vocabulary), or "
            "return an object with .model, .make_batch() and .loss()",
        )
    read = (INPUT, "image_size") if shape else ("sequence", "vocabulary")
    _refuse_unread(label, row, SIZES if takes_row else read)

    tokens = partial(make_tokens, sequence or 0, vocabulary or 0)

    def loss(outputs: Any, targets: Any) -> Tensor:
        outputs = getattr(outputs, "logits", outputs)  # transformers wraps what its models return
        if not isinstance(outputs, Tensor):
            raise InputError(
                f"{label}: the model returns a {type(outputs).__name__}, not a tensor",
                fix="return an object with model, make_batch and loss",
            )
        return outputs.float().square().mean()

    return WorkloadRecipe(model.train(), partial(make_images, shape, 1) if shape else tokens, loss)


def _read_shape(row: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of one sample that is a tensor; None where the row gives none, InputError where it is no shape."""
    text, size = row.get(INPUT), read_size(row, "image_size")
    if text is None or str(text) == "None":
        return None if size is None else (3, size, size)
    parts = str(text).split("x")
    if not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise InputError(
            f"workload {row['workload']}: --input {text:.40} is not a shape",
            fix="write the sizes of one sample, such as 3x224x224",
        )
    return tuple(map(int, parts))


def _describe_object(label: str, made: Any) -> WorkloadRecipe:
    missing = [part for part in PARTS if not hasattr(made, part)]
    if missing:
        raise InputError(
            f"{label} returns a {type(made).__name__} without {', '.join(missing)}",
            fix="return a torch.nn.Module, or an object with model, make_batch and loss",
        )
    if not isinstance(made.model, nn.Module) or not callable(made.make_batch) or not callable(made.loss):
        kinds = ", ".join(f"{part} a {type(getattr(made, part)).__name__}" for part in PARTS)
        raise InputError(
            f"{label} returns {kinds}", fix="make model a torch.nn.Module and make_batch and loss functions"
        )
    units = {str(k): list(v) for k, v in (getattr(made, "units", None) or {}).items()}
    split = {str(k): str(v) for k, v in (getattr(made, "tensor_split", None) or {}).items()}
    _check_structure(label, made.model, units, split)

    def make_batch(batch: int, seed: int, device: str = "cpu") -> tuple[Inputs, Any]:
        pair = made.make_batch(batch, seed, device)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InputError(f"{label}: make_batch returns a {type(pair).__name__}, not the pair (inputs, targets)")
        return pair

    def loss(outputs: Any, targets: Any) -> Tensor:
        value = made.loss(outputs, targets)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError(f"{label}: loss does not return one number as a tensor")
        return value

    return WorkloadRecipe(made.model.train(), make_batch, loss, units, split)


def _check_structure(label: str, model: nn.Module, units: Mapping[str, list[str]], split: Mapping[str, str]) -> None:
    """Refuse units of modules that do not exist and splits of another kind."""
    known = dict(model.named_modules())
    for unit, paths in units.items():
        for path in paths:
            if path not in known:
                raise InputError(f"{label}: the unit {unit} names the module {path!r}, which the model has not")
    for pattern, kind in split.items():
        if kind not in ("column", "row"):
            raise InputError(f"{label}: tensor_split of {pattern} is {kind!r}", fix="use column or row")


def _refuse_unread(label: str, row: Mapping[str, Any], read: tuple[str, ...]) -> None:
    """Refuse sizes that would change nothing."""
    for column in SIZES:
        if column not in read and str(row.get(column)) not in (*NOTHING, "None"):
            raise InputError(
                f"{label} takes no row, so {column} {row[column]} would change nothing",
                fix=f"let the function take the row and read {column}, or do not give it",
            )


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Let modules beside the user be imported, as ``python -m`` does."""
    folder = os.getcwd()  # noqa: PTH109
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
