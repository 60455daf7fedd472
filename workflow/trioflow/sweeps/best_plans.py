"""The whole question at once: the best plans of a model on some GPUs, what they take and cost, and what limits them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import pandas as pd

from trioflow.base.ahead import count_jobs
from trioflow.base.arguments import check_names, show_fields
from trioflow.base.errors import InputError
from trioflow.costmodel.choices import read_gpus
from trioflow.formats.launch import FRAMEWORKS, express
from trioflow.network.across_nodes import INTER_NODE, open_platform
from trioflow.parallel.splits.routing import BALANCED
from trioflow.prediction.answer import Prediction
from trioflow.prediction.assembly import predict
from trioflow.prediction.question import STEP_WORDS, Options, find_model
from trioflow.sweeps.search import SearchResult, Watch, search
from trioflow.trace.language.sizes import BLOCKS, Configuration

if TYPE_CHECKING:
    from trioflow.prediction.keywords import StepKeywords

RUN_TOKENS = 1e12
"""Of the run that is reported where nobody says how long it is."""
MOST_SHOWN = 3
_TYPICAL_TOKENS = ((0.0, 2**19), (1e9, 2**20), (6e9, 2**22))
"""Parameters of a model from which on a step has so many tokens: GPT-3's of up to 2.7 B parameters (arXiv 2005.14165, table
2.1: 0.5 and 1 million), and Llama 2's of 7 B and more (arXiv 2307.09288: 4 million)."""
_KINDS = ("ranks", "data", "tensor", "context", "pipeline", "expert", "sharding", "precision", "fusion")
"""Columns in which plans that are shown beside one another differ."""


@dataclass(frozen=True)
class BestPlans:
    """The best plans of a model on some GPUs.

    ``found``: the answer of ``search``. ``shown``: the best rows of its ranking that differ in degrees or sharding.
    ``prediction``: that of the best plan. ``run``: tokens, price [per GPU-hour] and memory margin, as passed.
    ``assumed``: the values of arguments that were not passed. ``launch``: per framework, the best ``plan`` that it can
    express with its configuration (``file``, ``text``), or ``why`` there is none.
    """

    found: SearchResult
    shown: list[dict[str, Any]]
    prediction: Prediction
    run: dict[str, Any]
    assumed: dict[str, Any]
    launch: dict[str, dict[str, str]]

    def to_frame(self) -> pd.DataFrame:
        """Return the whole ranking, a row a plan."""
        return self.found.to_frame()

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as ``trioflow plan --json`` prints it: that of ``search`` with the first plan's prediction."""
        best = self.prediction.to_dict()
        return {
            **self.found,
            **self.run,
            "shown": self.shown,
            "best": best,
            "parts_s": self.prediction.parts_s,
            "assumed": self.assumed,
            "launch": self.launch,
        }


@show_fields(Options, only=(*STEP_WORDS, *INTER_NODE))
def plan(
    model: str,
    gpus: str,
    *,
    tokens: float | None = None,
    budget: float | None = None,
    price: float | None = None,
    power_w: float | None = None,
    batch: int | None = None,
    memory_margin: float = 0.0,
    routing: str = BALANCED,
    frameworks: Sequence[str] = (),
    top: int = 3,
    watch: Watch | None = None,
    jobs: int | None = None,
    **step: "Unpack[StepKeywords]",
) -> BestPlans:
    """Return the best plans of a model on some GPUs: what ``trioflow plan`` answers.

    ``model``: a language model by name or configuration, or a trace. ``gpus``: number and name, such as ``256xH100``;
    the name is a GPU, a platform or a platform's file. ``tokens``: length of the training run, 10^12 by default, or
    what ``budget`` pays for. ``price``: per GPU-hour. ``power_w``: power per GPU [W], by default the data sheet's limit. ``batch``: global batch
    [samples], by default what models of this size are usually trained with. ``memory_margin``: share of each GPU's
    memory to leave free. ``frameworks``: those of ``FRAMEWORKS`` to write launch configurations for; without a
    ``precision`` each uses its own recipe. ``top``: how many plans to simulate in full at least. ``watch``, ``jobs``,
    ``routing``: as for ``search``. ``step``: ``STEP_WORDS`` and ``INTER_NODE``. Raises InputError when nothing fits, or
    as ``search``.
    """
    if not 0 <= memory_margin < 1:
        raise InputError(f"--memory-margin {memory_margin:g} must be at least 0 and below 1")
    check_names(frameworks, FRAMEWORKS, "framework")
    ranks, name = read_gpus(gpus)
    inter_node: dict[str, Any] = {key: step.get(key) for key in INTER_NODE}
    machine = open_platform(name, ranks, **inter_node)
    machine = replace(machine, device=machine.device.keep_free(memory_margin))
    found_model = find_model(model)
    configuration = found_model if isinstance(found_model, Configuration) else None
    assumed: dict[str, Any] = {} if name == machine.name else {"platform": machine.name}
    if configuration is not None:
        sequence = step.get("sequence") or configuration.step.get("sequence")
        if sequence is None:
            sequence = assumed["sequence"] = configuration.usual_sequence
        batch = configuration.global_batch if batch is None else batch
        if batch is None:
            batch = assumed["batch"] = choose_batch(configuration, sequence, ranks)
    sheet = machine.device.sheet
    if power_w is None and sheet is not None and math.isfinite(sheet.power_limit_w):
        power_w = assumed["power_w"] = sheet.power_limit_w
    if tokens is None and budget is None and configuration is not None:
        tokens = assumed["tokens"] = RUN_TOKENS
    if frameworks and configuration is None:
        raise InputError(f"{model}: launch configurations exist only for language models by name or configuration")
    if frameworks and step.get("precision") is None:
        step["precision"] = ",".join(dict.fromkeys(FRAMEWORKS[name].recipe for name in frameworks))
    found = search(
        [model],
        ranks,
        machine,
        data_parallel=[FRAMEWORKS[name].recipe for name in frameworks if FRAMEWORKS[name].data_parallel],
        batch=batch,
        top=top,
        price_per_gpu_hour=price,
        power_w=power_w,
        tokens=tokens,
        budget=budget,
        routing=routing,
        watch=watch,
        jobs=count_jobs() if jobs is None else jobs,
        **step,
    )
    if not found["ranking"]:
        nearest = min(found["out_of_memory"], key=lambda row: row["needed_bytes"], default=None)
        why = f"; the nearest, {nearest['plan_text']}, {nearest['reason']}" if nearest else ""
        raise InputError(f"no plan fits {gpus}{why}", fix="use more GPUs, a smaller batch or sequence")
    shown = choose_shown(found["ranking"])
    language: dict[str, Any] = {key: value for key, value in step.items() if key in STEP_WORDS}
    options = Options(routing=routing, **language)

    def simulate(place: int) -> Prediction:
        """Return the prediction of a plan, by its place in the ranking."""
        row = found["ranking"][place]
        recipe = {"precision": row["precision"], "fusion": row["fusion"]} if options.precision else {}
        return predict([model], found.plans[place], machine, batch=found["batch"], options=replace(options, **recipe))

    prediction = simulate(0)
    launch = {name: _write_launch(name, model, configuration, found, simulate) for name in frameworks if configuration}
    run = {
        "gpus": gpus,
        "tokens": tokens,
        "budget": budget,
        "price_per_gpu_hour": price,
        "memory_margin": memory_margin,
    }
    return BestPlans(found, shown, prediction, run, assumed, launch)


def _write_launch(
    framework: str, model: str, configuration: Configuration, found: SearchResult, simulate: Callable[[int], Prediction]
) -> dict[str, str]:
    """Return a framework's file for the best plan that it can express, or why there is none."""
    reasons = []
    for place, (row, each) in enumerate(zip(found["ranking"], found.plans, strict=True)):
        words = {name: row[name] for name in ("sequence", "precision", "fusion")}
        asked = replace(configuration, step=words, global_batch=found["batch"], stages=())
        text, why = express(framework, asked, each, configuration.model.name)
        if text and each.pipeline > 1:
            stages = simulate(place).task_graph.metadata.stages
            blocks = tuple(sum(unit.startswith(BLOCKS) for unit in stage) for stage in stages)
            text, why = express(framework, replace(asked, stages=blocks), each, configuration.model.name)
        if text:
            return {"file": FRAMEWORKS[framework].file, "plan": row["notation"], "text": text}
        reasons.append(why)
    return {"why": f"{FRAMEWORKS[framework].title} cannot express the best plan: {reasons[0]:.100}"}


def choose_batch(configuration: Configuration, sequence: int, ranks: int) -> int:
    """Return the samples of a step that a model is usually trained with, such that the GPUs can share them.

    A multiple of the GPUs where there are fewer of them, else of their odd factor.
    """
    parameters = configuration.model.parameters
    tokens = [tokens for least, tokens in _TYPICAL_TOKENS if parameters >= least][-1]
    samples = max(tokens // sequence, 1)
    unit = ranks if ranks <= samples else ranks // (ranks & -ranks)
    return -(-samples // unit) * unit


def choose_shown(ranking: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the best plans that differ in more than stages, micro-batches and recomputation, the first of each kind."""
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in ranking:
        kinds.setdefault(tuple(row.get(name) for name in _KINDS), row)
    return list(kinds.values())[:MOST_SHOWN]
