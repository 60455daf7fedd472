"""What a prediction assumes beside trace, plan, platform and batch: one object for all who ask.

What would a step take if operators, ranks or the network were faster or slower than predicted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trioflow.base.errors import InputError
from trioflow.costmodel.spread import Spread, check_draws
from trioflow.costmodel.steps import NONE, RATIO, TIMER, Anchoring
from trioflow.engine.simulate import SimulationOptions
from trioflow.network.collectives import CollectiveCost
from trioflow.network.inter_node import INTER_NODE, Bandwidth
from trioflow.parallel.plan import Stages
from trioflow.parallel.schedules.table import TRAIN, Schedule
from trioflow.parallel.splits.routing import BALANCED
from trioflow.parallel.task_graph import TaskGraph

_NAMED = 8


def scale_operators(graph: TaskGraph, scales: Sequence[tuple[str, float]]) -> TaskGraph:
    """Return a task graph whose operators take a factor as long where a pattern fits (``aten::mm``, ``mm``, ``*``, ``?``).

    One that several fit takes their product. Raises InputError when none fits, or a factor is not positive.
    """
    for pattern, factor in scales:
        check_factor(factor, f"--scale-operator {pattern}")
        names = graph.compute_names
        meant = [name for name in names if _fits(name, pattern)]
        if not meant:
            some = ", ".join(names[:_NAMED])
            raise InputError(
                f"--scale-operator {pattern}: no operator of the step has such a name",
                fix=f"{_guess(pattern, names)}the step has {some}{' and others' if len(names) > _NAMED else ''}",
            )
        graph = graph.scale_compute(meant, factor)
    return graph


def _guess(word: str, names: Sequence[str]) -> str:
    """Return the pattern that was meant by a word out of the middle of a name; empty where there is none."""
    near = next((name for name in names if word.lower() in name.lower()), None)
    if near is None or not word:
        return ""
    first = near.lower().index(word.lower())
    return f"did you mean '*{near[first : first + len(word)]}*', which {near} fits? "


def list_rank_scales(slow_ranks: Sequence[tuple[int, float]], ranks: int) -> list[float]:
    """Return each rank's factor on compute [ranks], 1 by default; InputError for no such rank or a bad factor."""
    scales = [1.0] * ranks
    for rank, factor in slow_ranks:
        check_factor(factor, f"--slow-rank {rank}")
        if not 0 <= rank < ranks:
            raise InputError(f"--slow-rank {rank}: the plan has ranks 0 to {ranks - 1}")
        scales[rank] *= factor
    return scales


def check_factor(factor: float, flag: str) -> None:
    """Refuse a factor that no time can be multiplied by. Raises InputError when it is not positive and finite."""
    if not 0 < factor < math.inf:
        raise InputError(f"{flag}: the factor {factor:g} is not positive")


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition("::")[2], pattern)


SESSION = "session"
ANCHORS = (TIMER, RATIO, NONE, SESSION)
"""Ways to bring a trace's operators to measured steps: see ``Options.anchor``."""
CLOSED_FORM = "closed-form"
"""Collectives by the ring's closed form over the platform's links, whatever was measured."""


_TUNING = ("freeze", "lora", "lora_targets", "lora_dropout")
SORTS = ("time", "cost")
"""What `search` ranks plans by: the time of a step, or its GPU time, which is cost, and throughput per GPU."""
STEP_WORDS = (
    "sequence",
    "precision",
    "attention",
    "fusion",
    "cuda_graphs",
    "deterministic",
    "loss",
    "optimizer",
    *_TUNING,
)
"""What may be asked of a language model's step."""


@dataclass(frozen=True)
class Options(SimulationOptions):
    """Assumptions of a prediction; the fields of ``SimulationOptions`` are its first ones.

    Attributes
    ----------
    cost_model : str or path, optional
        A file, a shipped model's name, or one of ``methods.UNFITTED``; chosen for the platform's
        device by default.
    override : str or path, optional
        CSV file of operator times from elsewhere.
    collectives : str, path or CollectiveCost, optional
        A model of collectives, its file or a shipped folder's name, or ``CLOSED_FORM``; the
        platform's measured ones by default.
    anchor : {"timer", "ratio", "none", "session"}
        How the trace's operators are brought to a measured step: the first three as in
        ``steps.anchor_step``. session: as timer, and then to the single-rank steps of the
        session that measured the workload on this machine; see ``step.SessionAnchor``.
    anchor_band : tuple of float, optional
        80 % interval of a whole step predicted from its operators, relative to the step; the
        shipped one by default.
    session : str or path, optional
        ``session.json`` of the session; by default the workload's in this folder.
    stages : sequence of sequence of str or str, optional
        Units of each pipeline stage, or how to balance them.
    schedule : Schedule, optional
        Actions of the pipeline's ranks; the plan's own schedule by default.
    mode : str
        One of ``schedules.table.MODES``: what of the step runs.
    last_batch : bool
        Whether the batch is what is left of a data set.
    interval : bool
        Whether the ends of the 80 % interval are simulated too, which takes three times as long.
    as_traced : bool
        Whether traces are programs of ranks of a parallel run, and run as they are: no plan is made.
    memory : bool
        Whether the peaks of memory are worked out too; 0 without.
    sequence : int, optional
        Tokens of a sample, where a language model's name or configuration stands for a trace.
    precision, attention, fusion, cuda_graphs, deterministic, loss, optimizer, freeze, lora, lora_targets, lora_dropout : optional
        Of such a model's step: see ``trace.language.sizes.LanguageStep``.
    routing : str
        How a router spreads tokens over experts: balanced, consecutive, ``power:EXPONENT`` (drawn by the seed), or a file of
        shares; see ``parallel.splits.routing``.
    inter_node_bandwidth, inter_node_latency_s, inter_node_bytes : optional
        What was measured between nodes, instead of the platform's own: see ``network.inter_node.open_platform``.
    operator_scales : sequence of (str, float)
        What if operators whose name fits a pattern took a factor as long.
    slow_ranks : sequence of (int, float)
        What if a rank's compute took a factor as long.
    draws, seed : int
        How often the step is drawn from the spread of its times, and by which numbers: the same
        seed gives the same ranks and micro-batches, whatever the plan.
    spread : Spread, optional
        That spread; by default the shipped one of the platform's kind of device.
    """

    cost_model: str | Path | None = None
    override: str | Path | None = None
    collectives: str | Path | CollectiveCost | None = None
    anchor: str = TIMER
    anchor_band: tuple[float, float] | None = None
    session: str | Path | None = None
    stages: Stages = None
    schedule: Schedule | None = None
    mode: str = TRAIN
    last_batch: bool = False
    interval: bool = True
    as_traced: bool = False
    memory: bool = True
    sequence: int | None = None
    precision: str | None = None
    attention: str | None = None
    fusion: str | None = None
    cuda_graphs: bool | None = None
    deterministic: bool | None = None
    freeze: str | None = None
    lora: int | None = None
    lora_targets: str | None = None
    lora_dropout: float | None = None
    loss: str | None = None
    optimizer: str | None = None
    routing: str = BALANCED
    inter_node_bandwidth: Bandwidth | None = None
    inter_node_latency_s: float | None = None
    inter_node_bytes: float | None = None
    operator_scales: Sequence[tuple[str, float]] = ()
    slow_ranks: Sequence[tuple[int, float]] = ()
    draws: int = 0
    seed: int = 0
    spread: Spread | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor not in ANCHORS:
            raise InputError(f"unknown anchor {self.anchor!r}", fix=f"use {', '.join(ANCHORS)}")
        if self.session is not None and self.anchor != SESSION:
            raise InputError(f"a session was given with the anchor {self.anchor!r}", fix=f"use anchor {SESSION}")
        check_draws(self.draws, self.seed)

    @property
    def what_if(self) -> list[str]:
        """What is supposed to be faster or slower than predicted, in words."""
        supposed = [f"operators {p} take {f:g} times as long" for p, f in self.operator_scales]
        supposed += [f"rank {r} computes {f:g} times as long" for r, f in self.slow_ranks]
        if self.communication_scale != 1:
            supposed.append(f"messages take {self.communication_scale:.4g} times as long")
        return [f"what if: {one}" for one in supposed]

    @property
    def inter_node(self) -> dict[str, Any]:
        """What was measured between nodes, for ``network.inter_node.open_platform``."""
        return {name: getattr(self, name) for name in INTER_NODE}

    @property
    def language_step(self) -> dict[str, Any]:
        """What is asked of a language model's step, for ``trace.store.load_trace``."""
        return {name: getattr(self, name) for name in STEP_WORDS}

    @property
    def anchoring(self) -> Anchoring:
        """How operators that were timed one by one are brought to their measured step."""
        return Anchoring(TIMER if self.anchor == SESSION else self.anchor, self.anchor_band)


DEFAULTS = Options()
