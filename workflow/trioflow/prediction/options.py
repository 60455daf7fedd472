"""What a prediction assumes beside trace, plan, platform and batch: one object for all who ask.

What would a step take if operators, ranks or the network were faster or slower than predicted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trioflow.base.arguments import Flag, declare, documented
from trioflow.base.errors import InputError
from trioflow.base.precision_recipes import DEFAULT_RECIPE, RECIPE_NAMES
from trioflow.base.settings import OPTIMIZERS
from trioflow.costmodel.operators.methods import UNFITTED
from trioflow.costmodel.spread import Spread, check_draws
from trioflow.costmodel.steps import NONE, RATIO, TIMER, Anchoring
from trioflow.engine.simulate import SimulationOptions
from trioflow.network.collectives import CollectiveCost
from trioflow.network.inter_node import INTER_NODE, TCP_BYTES_PER_S, Bandwidth
from trioflow.parallel.plan import Stages
from trioflow.parallel.schedules.table import MODES, TRAIN, Schedule
from trioflow.parallel.splits.pipeline import BALANCES
from trioflow.parallel.splits.routing import BALANCED
from trioflow.parallel.task_graph import TaskGraph
from trioflow.trace.language.sizes import ATTENTIONS, FUSIONS, LOSSES

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


@documented
@dataclass(frozen=True)
class Options(SimulationOptions):
    """Assumptions of a prediction; the fields of ``SimulationOptions`` are its first ones."""

    cost_model: str | Path | None = declare(
        f"operator cost model: a file of `trioflow fit`, a shipped one by name, or {' or '.join(UNFITTED)} (a baseline);"
        " by default that of the platform's device",
        None,
        Flag("MODEL"),
    )
    override: str | Path | None = declare(
        "operator times from elsewhere, at the trace's sizes: a CSV file with the columns name, time_us and, where needed,"
        " phase and input_shapes",
        None,
        Flag("CSV"),
    )
    collectives: str | Path | CollectiveCost | None = declare(
        f"collective cost model: a file of `trioflow fit-collectives`, a shipped one by name, or {CLOSED_FORM} (the ring's,"
        " over the links); by default what was measured on the platform",
        None,
        Flag("MODEL"),
    )
    anchor: str = declare(
        "how times of single operators are calibrated to the measured step: timer (the timer's own time is taken off), ratio (one"
        f" factor), none, or {SESSION} (calibrated to the single-rank steps of the session that measured the workload here)",
        TIMER,
        Flag("HOW"),
        enum=ANCHORS,
    )
    anchor_band: tuple[float, float] | None = declare(
        "80 % interval of a whole step predicted from its operators, relative to the step; by default the shipped one",
        None,
    )
    session: str | Path | None = declare(
        f"session.json of --anchor {SESSION}; by default the workload's, measured by `make reproduce` in this folder",
        None,
        Flag("FILE"),
    )
    stages: Stages = declare(
        f"pipeline stages: balanced by {' or '.join(BALANCES)} of layers, or a file with a line of units for each stage",
        None,
        Flag("HOW|FILE"),
    )
    schedule: Schedule | None = declare("actions of the pipeline's ranks; by default the plan's own schedule", None)
    mode: str = declare(f"what of the step runs: {', '.join(MODES)}", TRAIN, Flag("WHAT"), enum=MODES)
    last_batch: bool = declare(
        "the batch is the last of a data set: replicas that cannot share it evenly repeat samples", False
    )
    interval: bool = declare(
        "whether the ends of the 80 % interval are simulated too, which takes three times as long", True
    )
    as_traced: bool = declare(
        "run the programs of ranks that the traces hold, as they are: no plan; --ranks where they do not depend on it",
        False,
    )
    memory: bool = declare("whether the peaks of memory are estimated too; 0 without", True)
    sequence: int | None = declare("tokens per sample", None, Flag("N", usual=True), minimum=1)
    precision: str | None = declare(
        f"precision recipe of weights, gradients, optimizer and compute; {DEFAULT_RECIPE} by default. One of"
        f" {', '.join(RECIPE_NAMES)}",
        None,
        Flag("RECIPE", usual=True),
    )
    attention: str | None = declare(
        f"attention kernel: {', '.join(ATTENTIONS)}. flash is what PyTorch's operator runs (FlashAttention 2, cuDNN's on"
        " Blackwell), fused-softmax and eager keep the scores; by default cudnn for Megatron's recipes, flash2 for nanotron's, else flash",
        None,
        Flag("KERNEL"),
        enum=ATTENTIONS,
    )
    fusion: str | None = declare(
        f"fused kernels: {', '.join(FUSIONS)}. eager fuses nothing that PyTorch runs alone; compile, liger and flash-attn"
        " what these fuse; layers Megatron Core's layers; gradients these and GEMMs that add to main gradients; by"
        " default what the recipe's framework fuses",
        None,
        Flag("KIND"),
        enum=FUSIONS,
    )
    cuda_graphs: bool | None = declare(
        "the host launches a block's forward, and its backward, as one CUDA graph each", None
    )
    deterministic: bool | None = declare(
        "attention adds its gradients in a fixed order, which makes its backward slower", None
    )
    freeze: str | None = declare(
        "parameters or modules that do not train, such as 'model.embed_tokens' or '*.mlp', commas between",
        None,
        Flag("PATTERN"),
    )
    lora: int | None = declare(
        "LoRA: train adapters of rank R alone. They stand beside linear layers, as PEFT's; the model is frozen",
        None,
        Flag("R", usual=True),
    )
    lora_targets: str | None = declare(
        "layers with adapters: q,k,v,o,gate,up,down or all-linear; by default PEFT's, q and v", None, Flag("NAMES")
    )
    lora_dropout: float | None = declare("dropout of the adapters, a share (default: 0)", None, Flag("SHARE"))
    loss: str | None = declare(
        f"cross-entropy: {', '.join(LOSSES)}. eager computes it of logits cast to fp32, fused in one kernel each way,"
        " chunked with the LM head's GEMM a piece at a time; by default what the fusion implies",
        None,
        Flag("KIND"),
        enum=LOSSES,
    )
    optimizer: str | None = declare(
        "optimizer of a language model: one kernel for all parameters (-fused), a pass for each term over all of them"
        " (-foreach), or parameter by parameter; by default adamw-fused",
        None,
        Flag("NAME"),
        enum=OPTIMIZERS,
    )
    routing: str = declare(
        "how tokens are spread over experts: balanced, consecutive (gates of benchmarks), power:EXPONENT (a bound, drawn by"
        " seed), or a file of each expert's share",
        BALANCED,
        Flag("HOW"),
    )
    inter_node_bandwidth: Bandwidth | None = declare(
        "the network between nodes as measured: bus bandwidth of large messages as nccl-tests prints it, all network cards"
        " of a node together [bytes/s], such as 12.5e9."
        " all_gather=27e9,all_reduce=52e9 for each collective; or tcp: NCCL fell back to TCP sockets,"
        f" {TCP_BYTES_PER_S / 1e9:g} GB/s for each network card as measured on a cluster; by default what is known of the"
        " platform",
        None,
        Flag("B"),
    )
    inter_node_latency_s: float | None = declare(
        "the same network: from a GPU to its counterpart in the next node [s]", None, Flag("S", "--inter-node-latency")
    )
    inter_node_bytes: float | None = declare(
        "size of the messages whose bandwidth was measured over as many nodes as the job has [bytes], such as 256e6: where"
        " links are faster, each step of a collective takes the rest, whatever its size",
        None,
        Flag("S"),
    )
    operator_scales: Sequence[tuple[str, float]] = declare(
        "what if operators took F times as long: a name, or a pattern such as '*attention*'; may be given several times",
        (),
        Flag("NAME F", "--scale-operator"),
    )
    slow_ranks: Sequence[tuple[int, float]] = declare(
        "what if a rank computed F times as long; may be given several times", (), Flag("RANK F", "--slow-rank")
    )
    draws: int = declare(
        "simulate K steps with jitter: every rank, micro-batch and collective varies on its own, as real ones do",
        0,
        Flag("K"),
    )
    seed: int = declare(
        "seed of the jitter: with the same one, plans are compared on the same slow ranks and micro-batches",
        0,
        Flag("N"),
    )
    spread: Spread | None = declare("that jitter; by default the shipped one of the platform's kind of device", None)

    def __post_init__(self) -> None:
        super().__post_init__()
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
