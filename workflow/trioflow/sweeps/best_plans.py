"""The whole question at once: the best plans of a model on some GPUs, what they take and cost, and what limits them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from trioflow.base.ahead import count_jobs
from trioflow.base.arguments import check_names
from trioflow.base.errors import InputError
from trioflow.base.plan_row import Plan
from trioflow.costmodel.choices import read_gpus
from trioflow.network.inter_node import INTER_NODE, open_platform
from trioflow.parallel.splits.routing import BALANCED
from trioflow.prediction.answer import Prediction
from trioflow.prediction.assembly import find_model, predict
from trioflow.prediction.options import STEP_WORDS, Options
from trioflow.sweeps.search import SearchResult, Watch, search
from trioflow.trace.language.read import find_configuration
from trioflow.trace.language.sizes import Configuration

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

    ``found``: the answer of ``search``. ``shown``: the best rows of its ranking, each with other degrees or sharding.
    ``prediction``: of the first. ``run``: tokens, price [1/h] and memory margin that were given. ``assumed``: what was
    taken where nothing was given.
    """

    found: SearchResult
    shown: list[dict[str, Any]]
    prediction: Prediction
    run: dict[str, Any]
    assumed: dict[str, Any]

    @property
    def best(self) -> Plan:
        """The first plan."""
        return self.prediction.task_graph.metadata.plan

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
        }


def plan(
    model: str,
    gpus: str,
    *,
    tokens: float | None = None,
    price: float | None = None,
    power_w: float | None = None,
    batch: int | None = None,
    memory_margin: float = 0.0,
    routing: str = BALANCED,
    top: int = 5,
    watch: Watch | None = None,
    jobs: int | None = None,
    **step: Any,
) -> BestPlans:
    """Return the best plans of a model on some GPUs: what ``trioflow plan`` answers.

    ``model``: a language model by name or configuration, or a trace. ``gpus``: number and name, as ``256xH100``: a GPU,
    a platform or its file. ``tokens``: of the run (10^12 where not given), ``price``: of a GPU-hour, ``power_w``: of a
    GPU [W], by default its limit. ``batch``: samples of a step, by default what models of this size train with.
    ``memory_margin``: share of each GPU's memory to leave free. ``top``: plans to simulate at least. ``watch``, ``jobs``,
    ``routing``: as for ``search``; ``step``: ``STEP_WORDS`` and ``INTER_NODE``. Raises InputError when nothing fits, or
    as ``search``.
    """
    check_names(step, (*STEP_WORDS, *INTER_NODE), "option")
    if not 0 <= memory_margin < 1:
        raise InputError(f"--memory-margin {memory_margin:g} is not a share from 0 to below 1")
    ranks, name = read_gpus(gpus)
    inter_node = {key: step.get(key) for key in INTER_NODE}
    machine = open_platform(name, ranks, **inter_node)
    machine = replace(machine, device=machine.device.keep_free(memory_margin))
    configuration = find_configuration(model) if find_model(model) else None
    assumed: dict[str, Any] = {} if name == machine.name else {"platform": machine.name}
    if configuration is not None:
        sequence = step.get("sequence") or configuration.step.get("sequence")
        if sequence is None:
            sequence = assumed["sequence"] = configuration.usual_sequence
        if batch is None:
            batch = assumed["batch"] = configuration.global_batch or choose_batch(configuration, sequence, ranks)
    sheet = machine.device.sheet
    if power_w is None and sheet is not None and math.isfinite(sheet.power_limit_w):
        power_w = assumed["power_w"] = sheet.power_limit_w
    if tokens is None and configuration is not None:
        tokens = assumed["tokens"] = RUN_TOKENS
    found = search(
        [model],
        ranks,
        machine,
        batch=batch,
        top=top,
        price_per_gpu_hour=price,
        tokens=tokens,
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
    for row in shown:
        if "run" in row and power_w is not None:
            row["run"] |= {"energy_j": row["run"]["gpu_hours"] * 3600.0 * power_w, "power_w": power_w}
    options = Options(routing=routing, **{key: value for key, value in step.items() if key in STEP_WORDS})
    prediction = predict([model], found.plans[0], machine, batch=found["batch"], options=options)
    run = {"gpus": gpus, "tokens": tokens, "price_per_gpu_hour": price, "memory_margin": memory_margin}
    return BestPlans(found, shown, prediction, run, assumed)


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
