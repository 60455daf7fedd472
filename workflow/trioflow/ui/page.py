"""``trioflow ui``: a page for this machine alone, whose form asks what ``simulate`` answers, and which draws the answer.

What the form sends is a name out of a list or a number within bounds, or it is refused. It becomes arguments of
``simulate``; nothing else of it reaches the library. How these are read and answered is handed in by the command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shlex
import webbrowser
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from trioflow.base.errors import InputError, TrioflowError, how_to_install
from trioflow.base.precision_recipes import RECIPE_NAMES
from trioflow.hardware.machine import Device
from trioflow.parallel.plan import NAMED
from trioflow.prediction.assembly import Prediction, predict_step
from trioflow.prediction.known import models, platforms
from trioflow.prediction.question import STEP_WORDS
from trioflow.report.charts import ChartPage, plot, render
from trioflow.trace.store import find_language_model

try:
    from tornado.httpserver import HTTPServer
    from tornado.netutil import bind_sockets
    from tornado.web import Application, RequestHandler
except ImportError:
    raise InputError("the page needs tornado", fix=how_to_install("ui")) from None

_MOST_BYTES, _MOST_ANSWERS = 10_000, 8
"""Of a request, and predictions that are kept."""
_PRICED = ("price_per_gpu_hour", "tokens", "budget")
_POWERS = [1 << power for power in range(24)]
_ASKED: tuple[tuple[str, str, Any, float, list[Any]], ...] = (
    ("ranks", "GPUs", 8, 1 << 14, []),
    ("plan", "plan", "fsdp", 0, list(NAMED)),
    ("batch", "global batch [samples]", 8, 1 << 20, _POWERS[:15]),
    ("sequence", "sequence [tokens]", 8192, 1 << 20, _POWERS[9:18]),
    ("scale_network", "network speed-up factor", 1, 1000, [round(2 ** (power / 4), 3) for power in range(-12, 13)]),
    ("price_per_gpu_hour", "price per GPU-hour", 2.5, 1e6, [quarter / 4 for quarter in range(1, 61)]),
    ("tokens", "tokens of the run", 10**12, 1e18, []),
    ("budget", "or budget of the run", None, 1e12, []),
    ("precision", "precision", None, 0, list(RECIPE_NAMES)),
    ("micro_batch", "micro-batch [samples]", None, 1 << 20, []),
    ("tensor", "tensor parallel", None, 1 << 10, []),
    ("pipeline", "pipeline parallel", None, 1 << 10, []),
    ("sharding", "sharding", None, 0, []),
    ("recompute", "recompute", "none", 0, ["none", "selective", "full"]),
)
"""Arguments of ``simulate`` on the form: label, value at first, the most, and what to choose from."""


@dataclass(frozen=True)
class FormControl:
    """A control of the form; ``values``: the names that it takes, or the places of its slider."""

    label: str
    flag: str
    value: Any
    kind: str  # choice, slider or number
    values: list[Any]
    most: float = 0.0
    whole: bool = True
    help: str = ""

    def spell(self, name: str, given: Any) -> list[str]:
        """Return the arguments for what the page sent; InputError where it is no name or number that the control takes."""
        if given in (None, ""):
            return []
        if self.kind == "choice":
            if not (isinstance(given, str) and given in self.values):
                raise InputError(f"{name}: no such choice", fix="choose one from the list")
        elif isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= self.most:
            raise InputError(f"{name}: expected a number above 0, at most {self.most:g}")
        elif self.whole and given != int(given):
            raise InputError(f"{name}: {given:g} is not a whole number")
        return [self.flag, str(int(given) if self.whole and self.kind != "choice" else given)]


def list_fields(parser: argparse.ArgumentParser, folder: Path | None = None) -> dict[str, FormControl]:
    """Return the controls by name, with the flags and help of the command's ``simulate``; further traces and platforms lie in ``folder``."""
    root = next(action for action in parser._actions if action.dest == "command")
    actions: dict[str, Any] = {one.dest: one for one in root.choices["simulate"]._actions}  # type: ignore[index]
    known = models()
    names = known.loc[known["use"] != "capture", "name"].tolist()
    own = sorted(folder.iterdir()) if folder else []
    traces = [str(path) for path in own if path.suffix == ".trace" or (path / "trace.json").is_file()]
    machines = [str(path) for path in own if path.suffix == ".yaml"]
    fields = {
        "model": FormControl("model", "", "llama-3.1-8b", "choice", [*traces, *names]),
        "platform": FormControl("platform", "--platform", "dgx-h100", "choice", [*machines, *platforms()["name"]]),
    }
    for name, label, value, most, offered in _ASKED:
        action = actions[name]
        values = offered or list(action.choices or ())
        kind = "number" if not values else "choice" if not most else "slider"
        text, flag = str(action.help).partition(". ")[0], action.option_strings[-1]
        fields[name] = FormControl(label, flag, value, kind, values, most, action.type is int, text)
    return fields


@dataclass(frozen=True)
class Command:
    """The ``trioflow`` command as the page uses it: its parser, the prediction for parsed arguments, and its run's cost."""

    parser: argparse.ArgumentParser
    predict: Callable[[argparse.Namespace], Prediction]
    add_run: Callable[[Mapping[str, Any], argparse.Namespace, Device], dict[str, Any]]

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments of ``simulate``."""
        return self.parser.parse_args(["simulate", *words])


class Studio:
    """Answers forms, and remembers graphs and predictions from one to the next."""

    def __init__(self, command: Command, folder: Path | None = None) -> None:
        self.fields = list_fields(command.parser, folder)
        self._command = command
        self._ask = lru_cache(_MOST_ANSWERS)(lambda *words: command.predict(command.parse(words)))

    def spell(self, form: Any) -> dict[str, list[str]]:
        """Return the arguments of ``simulate`` by control; InputError where a form asks for what no control offers."""
        if not isinstance(form, dict) or not form.keys() <= self.fields.keys():
            raise InputError("the form has fields that the page does not know", fix="reload the page")
        words = {name: field.spell(name, form.get(name)) for name, field in self.fields.items()}
        words["model"] = words["model"][1:]
        if not words["model"] or not words["platform"]:
            raise InputError("no model or no platform was chosen", fix="choose both")
        # The page keeps its controls where a recorded trace is chosen, whose step is what it is.
        recorded = not find_language_model(words["model"][0])
        unused = (*STEP_WORDS, "tokens", "budget") if recorded else ("tokens",) if words["budget"] else ()
        return {name: [] if name in unused else some for name, some in words.items()}

    def predict(self, words: Mapping[str, list[str]]) -> Prediction:
        """Return the prediction for arguments by control."""
        arguments = [word for name, some in words.items() if name not in (*_PRICED, "scale_network") for word in some]
        prediction = self._ask(*arguments)
        if words["scale_network"]:
            step, factor = prediction.step, float(words["scale_network"][1])
            slower = step.options.communication_scale / factor
            prediction = predict_step(step.replace_options(communication_scale=slower))
        return prediction

    def answer(self, form: Any, against: Any = None) -> tuple[ChartPage, dict[str, Any]]:
        """Return the page of a form, beside that of another where there is one, and its numbers; InputError as `spell`."""
        forms = [self.spell(form), *([self.spell(against)] if against is not None else [])]
        predictions = [self.predict(words) for words in forms]
        arguments = [word for some in forms[0].values() for word in some]
        first = predictions[0].to_dict()
        run = self._command.add_run(first, self._command.parse(arguments), predictions[0].step.platform.device)
        command = shlex.join(["trioflow", "simulate", *arguments])
        numbers = {key: value for key, value in (first | run).items() if key not in ("memory", "warnings")}
        page = plot(*predictions, command=command, run=run.get("run"))
        return page, {"command": command, "form": form, "answer": numbers, "from": predictions[0].provenance}


class _Handler(RequestHandler):
    """The page and its questions: of this machine, and of the page itself alone."""

    def initialize(self, studio: Studio, lock: asyncio.Lock, hosts: Collection[str]) -> None:
        """Take what all requests share."""
        self.studio, self.lock, self.hosts = studio, lock, hosts

    def set_default_headers(self) -> None:
        """Let no other page show or read what is answered."""
        for name, value in _HEADERS.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        """Refuse whoever asks under another name (DNS rebinding) or from another page."""
        asking, given = self.request.method == "POST", self.request.headers
        if self.request.host not in self.hosts or (asking and given.get("Origin") != f"http://{self.request.host}"):
            self._refuse(403, "only this page itself may send requests")
        elif asking and given.get("Content-Type") != "application/json":
            self._refuse(415, "the request body must be JSON")

    def _refuse(self, status: int, problem: str) -> None:
        self.set_status(status)
        self.finish({"problem": problem})

    def get(self, _: str) -> None:
        """Give the page."""
        nonce = secrets.token_urlsafe(16)
        self.set_header("Content-Security-Policy", f"{_POLICY} script-src 'nonce-{nonce}'")
        self.finish(render("ui.html", nonce=nonce, fields=self.studio.fields))

    async def post(self, form: str) -> None:
        """Answer a question: as figures, or as a page of its own."""
        try:
            question = _read_question(self.request.body)
            async with self.lock:
                page, numbers = await asyncio.to_thread(
                    self.studio.answer, question.get("form"), question.get("against")
                )
        except (TrioflowError, SystemExit) as error:
            self._refuse(400, str(error))
            return
        if form == "html":
            self.finish(page.render())
            return
        text = yaml.safe_dump(numbers, sort_keys=False)
        known = {"title": page.title, "verdict": page.verdict, "command": page.command, "yaml": text}
        self.finish(known | {"html": page.render("charts.html"), "items": page.list_items()})


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; connect-src 'self';"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def _read_question(body: bytes) -> dict[str, Any]:
    """Return the form, and one to compare with, that a request holds; InputError where it is anything else."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        question = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError):
        raise InputError("the request is not valid JSON") from None
    if not isinstance(question, dict) or not question.keys() <= {"form", "against"}:
        raise InputError("the request must be an object with form and, to compare, against")
    return question


async def serve(studio: Studio, port: int, ready: Callable[[str], Any]) -> None:
    """Serve the page on 127.0.0.1 until cancelled; ``ready`` is called with its address."""
    try:
        sockets = bind_sockets(port, "127.0.0.1")
    except OSError as error:
        raise InputError(f"--port {port}: {error.strerror}", fix="choose another port, or none") from None
    number = sockets[0].getsockname()[1]
    hosts = {f"127.0.0.1:{number}", f"localhost:{number}"}
    shared = {"studio": studio, "lock": asyncio.Lock(), "hosts": hosts}
    server = HTTPServer(Application([(r"/(|answer|html)", _Handler, shared)]), max_body_size=_MOST_BYTES)
    server.add_sockets(sockets)
    ready(f"http://127.0.0.1:{number}/")
    await asyncio.Event().wait()


def run(options: argparse.Namespace, command: Command) -> None:
    """Serve the page until Ctrl+C; ``options``: of ``ui``."""
    if not 0 <= options.port < 1 << 16 or (options.folder and not options.folder.is_dir()):
        raise InputError("--port is not a port number, or --folder is not a folder")
    options.sign.stop()

    def show(address: str) -> None:
        print(f"trioflow ui is running at {address} (stop it with Ctrl+C)", flush=True)
        if not options.no_browser:
            webbrowser.open(address)

    with suppress(KeyboardInterrupt):
        asyncio.run(serve(Studio(command, options.folder), options.port, show))
