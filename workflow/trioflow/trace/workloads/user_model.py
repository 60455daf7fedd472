"""A user's own model, named ``module:function``.

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
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from trioflow.base.errors import InputError
from trioflow.base.settings import INPUT, NOTHING
from trioflow.trace.workloads.recipe import Inputs, Recipe, make_images, make_tokens, read_size
from trioflow.trace.workloads.torchvision_models import define_missing_operators

SIZES = (INPUT, "image_size", "sequence", "hidden", "layers", "heads", "vocabulary")
PARTS = ("model", "make_batch", "loss")


def build_user_model(row: Mapping[str, Any]) -> Recipe:
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
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise InputError(
            f"{label}: the module {module} does not import{_reason(error)}",
            fix="run the command in the folder that holds it, or set PYTHONPATH",
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise InputError(
                f"{label}: {module} has no {path!r}",
                file=getattr(sys.modules[module], "__file__", None),
                fix="check the function's name",
            )
        found = getattr(found, part)
    if not callable(found) or isinstance(found, nn.Module):
        raise InputError(
            f"{label} is a {type(found).__name__}, not a function", fix="name a function that returns the model"
        )
    return found  # type: ignore[no-any-return]


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


def _describe_plain(label: str, model: nn.Module, row: Mapping[str, Any], takes_row: bool) -> Recipe:
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

    return Recipe(model.train(), partial(make_images, shape, 1) if shape else tokens, loss)


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


def _describe_object(label: str, made: Any) -> Recipe:
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

    return Recipe(made.model.train(), make_batch, loss, units, split)


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
