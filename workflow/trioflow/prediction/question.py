"""What is asked: every look-up behind a question, done once, and what a prediction assumes beside trace, plan and platform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trioflow.base.arguments import Flag, check_argument, check_instance, check_names, declare, documented
from trioflow.base.errors import InputError, PlanError
from trioflow.base.experiments import Plan
from trioflow.base.precision_recipes import DEFAULT_RECIPE, RECIPE_NAMES
from trioflow.base.settings import OPTIMIZERS
from trioflow.costmodel.choices import DeviceTimes, choose_times, find_own_model
from trioflow.costmodel.uncertainty import RATIO, TIMER, UNANCHORED, Anchoring, Spread, check_draws
from trioflow.engine.simulate import SimulationOptions
from trioflow.hardware.machine import DeviceSheet, Platform
from trioflow.network.across_nodes import INTER_NODE, TCP_BYTES_PER_S, Bandwidth, open_platform
from trioflow.network.collectives import CollectiveCost
from trioflow.parallel.model_graph import ModelGraph
from trioflow.parallel.plan import Stages, choose_plan, cut_batch
from trioflow.parallel.reference import silence_messages
from trioflow.parallel.schedules.table import MODES, TRAIN, Schedule
from trioflow.parallel.splits.pipeline import BALANCES
from trioflow.parallel.splits.tensor_split import BALANCED
from trioflow.trace import store
from trioflow.trace.language.sizes import ATTENTIONS, FUSIONS, LOSSES, Configuration, ConfiguredModel
from trioflow.trace.store import Trace, language_models, load_trace, refuse_step

SESSION = "session"
ANCHORS = (TIMER, RATIO, UNANCHORED, SESSION)
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
        "operator cost model: a file of `trioflow fit`, or a shipped one by name; by default that of the platform's device",
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
        "how times of single operators are calibrated to the measured step: timer (the timer's overhead is subtracted), ratio (one"
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
    mode: str = declare(f"part of the step to run: {', '.join(MODES)}", TRAIN, Flag("WHAT"), enum=MODES)
    last_batch: bool = declare(
        "the batch is the last of a data set: replicas that cannot share it evenly repeat samples", False
    )
    interval: bool = declare(
        "whether the ends of the 80 % interval are simulated too, which takes three times as long", True
    )
    as_traced: bool = declare(
        "run the rank programs recorded in the traces as they are, without a plan; --ranks where they do not depend on it",
        False,
    )
    memory: bool = declare("whether peak memory is estimated too; 0 if not", True)
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
        "attention sums gradients in a fixed order, which makes its backward slower", None
    )
    freeze: str | None = declare(
        "parameters or modules that do not train, such as 'model.embed_tokens' or '*.mlp', comma-separated",
        None,
        Flag("PATTERN"),
    )
    lora: int | None = declare(
        "LoRA: train only adapters of rank R. They are added to linear layers as in PEFT; the model is frozen",
        None,
        Flag("R", usual=True),
    )
    lora_targets: str | None = declare(
        "layers with adapters: q,k,v,o,gate,up,down or all-linear; by default PEFT's, q and v", None, Flag("NAMES")
    )
    lora_dropout: float | None = declare("dropout rate of the adapters (default: 0)", None, Flag("SHARE"))
    loss: str | None = declare(
        f"cross-entropy: {', '.join(LOSSES)}. eager computes it of logits cast to fp32, fused in one kernel each way,"
        " chunked together with the LM head's GEMM; by default what the fusion implies",
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
        "how tokens are spread over experts: balanced, consecutive (gates of benchmarks), power:EXPONENT (a bound, sampled"
        " by seed), or a file of each expert's share",
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
        "size of the messages whose bandwidth was measured over as many nodes as the job has [bytes], such as 256e6: if"
        " the links are faster, the remaining time becomes a constant per step of a collective",
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
        "simulate K steps with jitter: every rank, micro-batch and collective varies independently", 0, Flag("K")
    )
    seed: int = declare(
        "seed of the jitter: with the same one, plans are compared on the same slow ranks and micro-batches",
        0,
        Flag("N"),
    )
    spread: Spread | None = declare(
        "size of that jitter; by default the one shipped for the platform's kind of device", None
    )

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
            supposed.append(f"network {1 / self.communication_scale:.4g} times as fast")
        return [f"assumed: {one}" for one in supposed]

    @property
    def inter_node(self) -> dict[str, Any]:
        """What was measured between nodes, for ``network.across_nodes.open_platform``."""
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


Model = Configuration | ConfiguredModel
"""What traces are made of: a language model, or another library's network."""
Traces = str | Path | Trace | Model | DeviceTimes | Sequence[str | Path | Trace]
"""What a prediction starts from: a trace or its name, several of one workload at other batches, a model, or
traces that have the device's times already, with their cost model."""


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked, with every name looked up: nothing behind it reads a folder.

    ``times``: the traces of the micro-batch that the plan runs, with the device's times and what they rest on;
    ``batch``: samples of the whole step.
    """

    times: DeviceTimes
    plan: Plan
    batch: int
    platform: Platform
    options: Options

    @property
    def host(self) -> Mapping[str, float]:
        """The platform's costs of the host where the step's framework runs, by name [s]."""
        return self.platform.host_of(self.plan, self.times.traces[0].facts.recipe.framework)


def resolve(
    traces: Traces,
    plan: Plan,
    platform: Platform | str | Path,
    *,
    batch: int | None = None,
    options: Options = DEFAULTS,
) -> Question:
    """Look up all that a question names, with `predict`'s arguments; TrioflowError when anything of it does not fit."""
    check_instance("plan", plan, Plan, "make one by trioflow.named_plan or trioflow.make_plan")
    batch = batch if batch is None else check_argument("batch", batch, "int")
    platform = open_platform(platform, plan.ranks, **options.inter_node)
    options = replace(options, cost_model=options.cost_model or find_own_model(platform))
    if options.as_traced:
        traces = [silence_messages(trace) for trace in load_traces(traces)]
    elif not isinstance(traces, DeviceTimes):
        traces, batch = _open_models(traces, plan, batch, options)
    times = time_operators(traces, platform.device.described, options)
    batch = times.traces[0].facts.batch * plan.data if batch is None else batch
    return Question(times, plan, batch, platform, options)


def cut_micro_batches(
    model: Model | None, plan: Plan, batch: int | None, samples: int | None = None, mode: str = TRAIN
) -> Plan:
    """Return a plan with micro-batches of so many samples; by default of one for a decoder that trains under a plan that takes that.

    ``model``: what `find_model` returns.
    Raises PlanError where the batch does not divide into those that were asked for.
    """
    if batch is None or (samples is None and (mode != TRAIN or not isinstance(model, Configuration))):
        return plan
    try:
        return cut_batch(plan, batch, samples or 1)
    except PlanError:
        if samples is None:
            return plan
        raise


def read_keywords(
    plan: Plan | str | None, ranks: int | None, options: Options, changes: Mapping[str, Any]
) -> tuple[Plan, Options]:
    """Return the plan and the options of a question from Python; TrioflowError where they are unknown or do not go together.

    What both have (schedule, algorithms, chunks) is the plan's where it is a word or a number, else the options'.
    """
    check_instance("options", options, Options)
    of_plan, of_options = Plan.__dataclass_fields__, Options.__dataclass_fields__
    check_names(changes, of_plan.keys() | of_options, "option")
    columns = {
        name: value
        for name, value in changes.items()
        if name in of_plan and (name not in of_options or isinstance(value, str | int))
    }
    rest = {name: value for name, value in changes.items() if name not in columns}
    return choose_plan(plan, ranks, columns), replace(options, **rest)


def time_operators(traces: Traces, device: DeviceSheet | str, options: Options = DEFAULTS) -> DeviceTimes:
    """Return traces with a device's times, and the operator model for it; errors as ``costmodel.choices.choose_times``."""
    if isinstance(traces, DeviceTimes):
        return traces
    loaded = load_traces(traces, **options.language_step)
    times = choose_times(loaded, device, options.cost_model, options.override)
    return replace(times, traces=[ModelGraph.of(trace) for trace in times.traces])


def _open_models(traces: Traces, plan: Plan, batch: int | None, options: Options) -> tuple[Traces, int | None]:
    """Return traces, those of language models made for the micro-batch that a plan runs, and the step's samples.

    Without ``batch`` every micro-batch of a language model has one sample.
    """
    model = find_model(traces)
    if model is None:
        return load_traces(traces, **options.language_step, fixed=True), batch
    samples = 1 if batch is None else count_samples(plan, batch)
    step = {"batch": samples, **options.language_step}
    trace: Trace = language_models().trace_of(model, step)
    return trace, samples * plan.data * plan.pieces if batch is None else batch


def find_model(traces: Traces) -> Model | None:
    """Return the model that traces are to be made of, by name or configuration; None for traces that are there."""
    if isinstance(traces, Sequence) and not isinstance(traces, str) and len(traces) == 1:
        traces = traces[0]
    if isinstance(traces, str | Path):
        return store.find_language_model(traces)
    return traces if isinstance(traces, Model) else None


def count_samples(plan: Plan, batch: int) -> int:
    """Return for how many samples a language model's trace is made: a micro-batch's, 1 where they are not of one size."""
    parts = plan.data * plan.pieces
    return 1 if batch % parts else batch // parts


def load_traces(traces: Traces, *, fixed: bool = False, **step: Any) -> list[Trace]:
    """Return traces, loaded by name or, with ``step``, of a language model.

    ``fixed``: whether a step may not be asked for of traces that are loaded already. Raises TraceError as
    ``trace.store.load_trace``; InputError when there is no trace.
    """
    if isinstance(traces, DeviceTimes):
        return traces.traces
    if isinstance(traces, Model):
        return [language_models().trace_of(traces, step)]
    several = [traces] if isinstance(traces, str | Path | Trace) else traces
    if not several:
        raise InputError("no traces", fix="give one trace or more")
    for one in several if fixed else ():
        if isinstance(one, Trace):
            refuse_step(step, one.facts.workload)
    return [one if isinstance(one, Trace) else load_trace(one, **step) for one in several]
