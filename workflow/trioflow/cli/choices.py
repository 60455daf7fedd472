"""What a command line asks for: plan (or a framework's own configuration), platform, network, and assumptions."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from trioflow.base.errors import InputError, PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import (
    CONTEXT_METHODS,
    GRADIENT_SYNCS,
    OFFLOADS,
    RECOMPUTATIONS,
    SCHEDULES,
    SEVERAL_STAGES,
    SHARDINGS,
    TENSOR_OVERLAPS,
    name_flag,
)
from trioflow.base.precision_recipes import DEFAULT_RECIPE, RECIPE_NAMES
from trioflow.base.settings import OPTIMIZERS
from trioflow.cli.output import Options, add_options
from trioflow.costmodel.choices import read_gpus
from trioflow.costmodel.operators.methods import UNFITTED
from trioflow.costmodel.steps import TIMER
from trioflow.hardware.machine import TIES, Link, Platform
from trioflow.network.algorithms.catalogue import list_algorithm_words, read_algorithms
from trioflow.network.inter_node import INTER_NODE, TCP_BYTES_PER_S, open_platform
from trioflow.network.message_planner import Chunks
from trioflow.network.networks import DEFAULT_NETWORK, NETWORKS
from trioflow.parallel.plan import NAMED, choose_plan, make_plan, read_plan
from trioflow.parallel.schedules.table import MODES, TRAIN, Schedule
from trioflow.parallel.splits.pipeline import BALANCES
from trioflow.parallel.splits.routing import BALANCED
from trioflow.prediction.assembly import cut_micro_batches
from trioflow.prediction.options import ANCHORS, CLOSED_FORM, SESSION, STEP_WORDS, check_factor
from trioflow.prediction.options import Options as Assumptions
from trioflow.sharded.as_traced import AS_TRACED
from trioflow.trace.language.read import find_configuration
from trioflow.trace.language.sizes import ATTENTIONS, FUSIONS, LOSSES, Configuration
from trioflow.trace.store import load_trace


def list_model_options(several: bool = False) -> Options:
    """Return the options of a language model given by name or configuration; ``several``: for a list of recipes."""
    recipe = "RECIPE[+FUSION][,RECIPE...]" if several else "RECIPE"
    ranked = "; plans of several are ranked together, each with the fusion behind its plus sign"
    return {
        "of a language model given by its name or configuration": (
            ("--sequence", (int, "N"), "tokens of a sample"),
            (
                "--precision",
                recipe,
                f"what is held and computed in which format: {', '.join(RECIPE_NAMES)} (default: {DEFAULT_RECIPE})"
                + ranked * several,
            ),
            (
                "--attention",
                ATTENTIONS,
                "attention's kernel: what PyTorch's operator runs (flash: FlashAttention 2, cuDNN's on Blackwell), a version of FlashAttention, cuDNN's, "
                "or one that keeps the scores (default: cudnn for Megatron's recipes, flash2 for nanotron's, else flash)",
            ),
            (
                "--fusion",
                FUSIONS,
                "what runs as one kernel: nothing that PyTorch runs alone (eager), what torch.compile, Liger or flash-attn "
                "fuse, Megatron Core's layers, besides products that add to main gradients (default: as the recipe's framework)",
            ),
            (
                "--loss",
                LOSSES,
                "cross-entropy: of scores cast to fp32 (eager), one kernel each way (fused), or with the head's product a piece at "
                "a time (chunked; default: as --fusion fuses it)",
            ),
            (
                "--optimizer",
                OPTIMIZERS,
                "one kernel for all parameters (-fused, default adamw-fused), a pass for each term over all of them "
                "(-foreach), or parameter by parameter",
            ),
            (
                "--cuda-graphs",
                True,
                "the host launches a block's forward, and its backward, as one CUDA graph each",
                {"default": None},
            ),
            (
                "--deterministic",
                True,
                "attention adds its gradients in a fixed order, which makes its backward slower",
                {"default": None},
            ),
            (
                "--freeze",
                "PATTERN[,PATTERN...]",
                "parameters or modules that do not train, such as 'model.embed_tokens' or '*.mlp'",
            ),
            ("--lora", (int, "R"), "freeze all and train adapters of rank R beside linear layers, as PEFT's LoRA"),
            (
                "--lora-targets",
                "NAME[,NAME...]",
                "these layers: q,k,v,o,gate,up,down or all-linear (default: PEFT's, q and v)",
            ),
            ("--lora-dropout", (float, "SHARE"), "what adapters drop of what they read (default: 0)"),
        )
    }


RUN: Options = {
    "": (
        ("--tokens", (float, "N"), "tokens of a whole run, to say its days, cost and energy"),
        ("--price-per-gpu-hour", (float, "P"), "price of a GPU, to say what it costs"),
        (
            "--power-w",
            (float, "W"),
            "power of a GPU while it trains, to say the energy [W] (default of a run: its sheet's limit)",
        ),
    )
}
"""Options of a run of many steps."""
FAULTS: Options = {
    "failures of a run of --tokens": (
        (
            "--gpu-hours-per-failure",
            (float, "H"),
            "GPU-hours between failures that stop the run, to say what is lost and how often to save",
        ),
        (
            "--checkpoint-s",
            (float, "S"),
            "time in which the run waits for its state to be saved [s] (default: 0)",
            {"default": 0.0},
        ),
        ("--restart-s", (float, "S"), "from a failure to the first step after it [s] (default: 0)", {"default": 0.0}),
    )
}
_ROUTING = (
    "--routing",
    "HOW",
    "how tokens are spread over experts: balanced (default), consecutive (gates of benchmarks), power:EXPONENT "
    "(a bound, drawn by --seed), or a file of each expert's share",
    {"default": BALANCED},
)
ROUTING: Options = {"": [_ROUTING]}
WHAT_IF: Options = {
    "what if (each factor but the network's is on a time)": (
        ("--scale-network", (float, "F"), "the network were F times as fast"),
        (
            "--scale-operator",
            None,
            "operators took F times as long: a name, or a pattern such as '*attention*'; may come several times",
            {"nargs": 2, "action": "append", "default": [], "metavar": ("NAME", "F")},
        ),
        (
            "--slow-rank",
            None,
            "a rank computed F times as long; may come several times",
            {"nargs": 2, "action": "append", "default": [], "metavar": ("RANK", "F")},
        ),
        _ROUTING,
    )
}
DRAWS: Options = {
    "spread of the step": (
        (
            "--draws",
            (int, "K"),
            "draw the step K times, each rank, micro-batch and exchange apart, as real ones differ",
            {"default": 0},
        ),
        (
            "--seed",
            (int, "N"),
            "numbers to draw by: with the same, plans are compared on the same ranks (default: 0)",
            {"default": 0},
        ),
    )
}
_DEGREES: Options = {
    "plan by its degrees, instead of --plan": (
        ("--data-parallel", (int, "D"), "replicas that share the batch", {"dest": "data"}),
        ("--tensor-parallel", (int, "T"), "ranks that share each layer", {"dest": "tensor"}),
        ("--context-parallel", (int, "C"), "ranks that share every sequence by its tokens", {"dest": "context"}),
        (
            "--context-method",
            CONTEXT_METHODS,
            "how they attend to the whole sequence (default: ring): keys and values in a ring, all of them gathered, "
            "or heads shared instead of tokens (all-to-all)",
        ),
        ("--pipeline-parallel", (int, "P"), "pipeline stages", {"dest": "pipeline"}),
        (
            "--expert-parallel",
            (int, "E"),
            "data-parallel ranks that share the experts of a model with several; they are D's, not further ones",
            {"dest": "expert"},
        ),
        (
            "--expert-tensor-parallel",
            (int, "N"),
            "ranks that cut each expert's matrices (default: T); below T, experts lie over tensor-parallel ranks too",
            {"dest": "expert_tensor"},
        ),
        (
            "--expert-domain",
            (int, "N"),
            "GPUs of an NVLink domain: experts' tokens cross nodes once a node and are handed on inside, as DeepEP and HybridEP do",
        ),
        (
            "--expert-overlap",
            True,
            "exchanges of experts' tokens beside another micro-batch's compute (--overlap-moe-expert-parallel-comm, DualPipe)",
        ),
        (
            "--sharding",
            SHARDINGS[1:],
            "what replicas share instead of each holding it: fsdp is FSDP2, hsdp groups of --shard ranks",
        ),
        (
            "--shard",
            (int, "N"),
            "ranks of a group: of hsdp, or of zero1 and distributed, whose groups are replicas of one another",
        ),
        ("--accumulate", (int, "N"), "micro-steps whose gradients are added up"),
        (
            "--gradient-sync",
            GRADIENT_SYNCS[1:],
            "how often replicas reduce them (default: as the framework does): once a step (no_sync, as Accelerate runs DDP, "
            "Megatron-LM, nanotron, ZeRO-1), or in each micro-batch (fsdp, ZeRO-2, DDP in a plain loop)",
        ),
        ("--no-sync", True, "with fsdp and --accumulate: --gradient-sync step"),
        (
            "--gather-overlap",
            True,
            "with distributed: gather the updated weights during the next step's first forward (--overlap-param-gather)",
        ),
        (
            "--tensor-style",
            "NAME",
            "how ranks share layers, instead of Megatron's way: gather splits every layer's outputs",
        ),
        ("--sequence-parallel", True, "tensor-parallel ranks share what lies between split layers too"),
        ("--vocabulary-parallel", True, "tensor-parallel ranks share embedding, head and loss by vocabulary"),
        (
            "--tensor-overlap",
            TENSOR_OVERLAPS[1:],
            "messages of tensor parallelism beside products: none, those of column-split layers' backward, as Megatron-LM "
            "does (default of its recipes), or all of a layer's, piece by piece (--tp-comm-overlap)",
        ),
        (
            "--recompute",
            "WHAT",
            f"activations that backward computes again: {', '.join(RECOMPUTATIONS[1:])}, uniform:N (all blocks, N at a "
            "time), block:N (the first N blocks of each stage), save:POLICY (torchtitan, MaxText's minimal, ...: docs/memory.md), or modules:mlp,core_attn (whole modules of each block); with "
            "+no-early-stop as PyTorch before 2.1",
        ),
        ("--offload", OFFLOADS[1:], "what lies in the host's memory"),
        (
            "--schedule",
            "NAME",
            f"pipeline schedule: {', '.join(SCHEDULES)}, or one that a package registers (default: gpipe)",
        ),
    )
}
GPUS = (
    "--gpus",
    "NxNAME",
    "number and kind of GPUs, as 256xH100: a GPU (on its usual platform), a shipped platform or a file; instead of "
    "--ranks and --platform",
)
NODE = 8
"""GPUs of the node that is taken where no number of ranks is given."""
_CONFIGURATION = (
    "--megatron",
    "FILE",
    "Megatron-LM's model_config.yaml or command line (or a nanotron YAML), instead of TRACE: the model and the "
    f"plan; --ranks GPUs share it (default: {NODE}); other arguments win over the file's",
)
COLLECTIVES: Options = {
    "": (
        (
            "--collectives",
            "MODEL",
            f"fitted collective model, a shipped one by name, or {CLOSED_FORM} (the ring's, over the links)",
        ),
    )
}
"""The model of collectives, for commands that simulate."""


def add_plan_arguments(parser: argparse.ArgumentParser, *, megatron: bool = False) -> None:
    """Add what a task graph is made from; with ``megatron`` a framework's configuration may stand for a trace."""
    add_options(
        parser,
        {
            "": (
                (
                    "trace",
                    "TRACE",
                    "folder or pack of a trace, a shipped one's name, or a language model by its name (llama-3.1-8b) or its "
                    "configuration's file; more of the same workload at other batches make other batches more certain",
                    {"nargs": "*" if megatron else "+"},
                ),
                ("--platform", "NAME|FILE", "shipped platform, this-machine (after `make reproduce`), or a YAML file"),
                GPUS,
                ("--batch", (int, "N"), "samples of the whole step, all ranks together"),
                (
                    "--micro-batch",
                    (int, "N"),
                    "samples of a micro-batch, the batch's others by gradient accumulation or in the pipeline "
                    "(default: 1 for a language model by name or configuration)",
                ),
                (
                    "--plan",
                    "NAME",
                    f"plan by name, on --ranks ranks: {', '.join(NAMED)}, or one that a package registers",
                ),
                ("--ranks", (int, "N"), "number of ranks"),
                ("--micro-batches", (int, "M"), "pieces of a pipelined batch"),
                ("--stages-per-rank", (int, "V"), f"pipeline stages of each rank, for {SEVERAL_STAGES}"),
                (
                    "--stages",
                    "HOW|FILE",
                    f"pipeline stages: balanced by {' or '.join(BALANCES)} of layers (default: {BALANCES[0]}), or a file "
                    "with a line of units a stage",
                ),
                (
                    "--schedule-file",
                    "CSV",
                    "the pipeline's actions as PyTorch writes them, instead of --schedule; see `trioflow export schedule`",
                ),
                ("--mode", MODES, f"what of the step runs (default: {MODES[0]})", {"default": MODES[0]}),
                (
                    "--last-batch",
                    True,
                    "the batch is what is left of a data set: replicas that cannot share it evenly repeat samples",
                ),
                (
                    "--cost-model",
                    "MODEL",
                    f"operator model of `trioflow fit`, a shipped one by name, or {' or '.join(UNFITTED)} (a baseline)",
                ),
                (
                    "--anchor",
                    ANCHORS,
                    "operators that were timed one by one, and a measured step: take the timer off each, use one factor "
                    f"(ratio), or leave them (none); {SESSION}: to the single-rank steps of the session that measured the "
                    f"workload here (default: {TIMER})",
                    {"default": TIMER},
                ),
                (
                    "--session",
                    "FILE",
                    "session.json of --anchor session (default: the workload's, measured by `make reproduce` in this folder)",
                ),
                (
                    "--override",
                    "CSV",
                    "operator times from elsewhere, at the trace's sizes: columns name, time_us and, where "
                    "needed, phase and input_shapes",
                ),
                *([_CONFIGURATION] if megatron else []),
            )
        },
        list_model_options(),
        _DEGREES,
    )


Number = TypeVar("Number", int, float)

_COLUMNS = [one.name for one in fields(Plan) if one.name not in ("plan", "chunks", "chunk_bytes")]
"""Arguments that are columns of a plan."""


def _list_given(options: argparse.Namespace, names: Iterable[str] = _COLUMNS) -> dict[str, Any]:
    """Return those arguments that were given: flags that are set, and any value, 0 included."""
    values = ((name, getattr(options, name, None)) for name in names)
    return {name: value for name, value in values if value is not None and value is not False}


def _choose_scheduled_plan(options: argparse.Namespace) -> tuple[Plan, Schedule | None]:
    """Return the plan, and the schedule where a file gives it; PlanError where that and other arguments clash."""
    given = _list_given(options)
    if not options.schedule_file:
        return choose_plan(options.plan, options.ranks, given), None
    if other := next((name for name in ("schedule", "plan") if getattr(options, name)), None):
        raise PlanError(f"--{other} and --schedule-file were both given", fix="give one of them")
    of_file = ("pipeline", "micro_batches", "stages_per_rank")
    asked = {name: given.pop(name) for name in of_file if name in given}
    plan, schedule = read_plan(options.schedule_file, **given)
    for name, value in {**asked, **_list_given(options, ["ranks"])}.items():
        if value != getattr(plan, name):
            flag = name_flag(name)
            raise PlanError(
                f"{flag} {value}, but the schedule makes it {getattr(plan, name)}",
                file=options.schedule_file,
                fix=f"leave {flag} out",
            )
    return plan, schedule


_FIXED = ("batch", "plan", "stages", "last_batch", *STEP_WORDS, "megatron", "session", "schedule_file", *_COLUMNS)
"""Arguments that would change what a traced program does."""


def _choose_traced_ranks(options: argparse.Namespace) -> Plan:
    """Return a plan of as many ranks as traced programs run on; InputError where an argument would change them."""
    refused = [*_list_given(options, _FIXED)]
    refused += ["mode"] * (options.mode != TRAIN) + ["anchor"] * (options.anchor != TIMER)
    if refused:
        raise InputError(
            f"{name_flag(refused[0])} with --as-traced: what a traced rank computes and sends stays as it "
            "was traced; platform, network and cost model can change",
            fix="leave it out, or simulate a plan from the trace of the whole model on one rank",
        )
    ranks = options.ranks
    if ranks is None:
        facts = load_trace(options.trace[0]).facts
        ranks = int((facts.program or {}).get("world_size", 1))
    if ranks < 1:
        raise InputError(f"--ranks {ranks} is not positive")
    return replace(make_plan(data=ranks), plan=AS_TRACED)


_ASSUMED = (
    "cost_model",
    "override",
    "collectives",
    "anchor",
    "session",
    "stages",
    "mode",
    "last_batch",
    "as_traced",
    "routing",
    "draws",
    "seed",
    *STEP_WORDS,
)
"""Arguments that are fields of ``Options``."""


def _cut_micro_batches(plan: Plan, options: argparse.Namespace) -> Plan:
    """Return a plan with micro-batches of ``--micro-batch`` samples, or as ``assembly.cut_micro_batches``; PlanError likewise."""
    settled = any(getattr(options, name, None) is not None for name in ("accumulate", "micro_batches", "megatron"))
    if options.micro_batch is not None and (settled or options.batch is None):
        raise PlanError(
            "--micro-batch with a number of micro-batches, or without --batch",
            fix="give --batch and --micro-batch alone",
        )
    return (
        plan
        if settled or options.last_batch
        else cut_micro_batches(options.trace, plan, options.batch, options.micro_batch)
    )


def apply_gpus(options: argparse.Namespace) -> None:
    """Write what ``--gpus`` says into ranks and platform; InputError where these are given too, or no platform is."""
    if options.gpus is not None:
        count, name = read_gpus(options.gpus)
        for flag, value, same in (("--ranks", options.ranks, count), ("--platform", options.platform, name)):
            if value not in (None, same):
                raise InputError(f"--gpus {options.gpus} with {flag} {value}", fix="give one of them")
        options.ranks, options.platform = count, name
    if options.platform is None:
        raise InputError("no GPUs were given", fix="give --gpus 256xH100, or --platform and the ranks of a plan")


def read_options(options: argparse.Namespace) -> tuple[Plan, Platform, Assumptions]:
    """Return the plan, the platform and the assumptions of a command line; TrioflowError where anything does not fit."""
    apply_gpus(options)
    assumed = {name: getattr(options, name) for name in _ASSUMED if name in options}
    if assumed.get("as_traced"):
        chosen, schedule = _choose_traced_ranks(options), None
    else:
        chosen, schedule = _choose_scheduled_plan(options)
        chosen = chosen if schedule else _cut_micro_batches(chosen, options)
    plan = set_algorithms(chosen, options)
    measured = list_inter_node(options)
    platform = change_platform(open_platform(options.platform, plan.ranks, **measured), options)
    network = spell_network(getattr(options, "network", DEFAULT_NETWORK))
    fold = not getattr(options, "no_fold", False)
    supposed = _read_what_if(options)
    return (plan, platform, Assumptions(network=network, fold=fold, schedule=schedule, **assumed, **supposed))


def _read_what_if(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is supposed, as fields of ``Options``; InputError where a factor or a rank is not a number."""
    if "scale_network" not in options:
        return {}
    network = options.scale_network
    if network is not None:
        check_factor(network, "--scale-network")
    return {
        "communication_scale": 1.0 if network is None else 1.0 / network,
        "operator_scales": [(n, _read_number(f, "--scale-operator", float)) for n, f in options.scale_operator],
        "slow_ranks": [
            (_read_number(r, "--slow-rank", int), _read_number(f, "--slow-rank", float)) for r, f in options.slow_rank
        ],
    }


def _read_number(word: str, flag: str, kind: Callable[[str], Number]) -> Number:
    try:
        return kind(word)
    except ValueError:
        raise InputError(f"{flag}: {word!r} is not a number", fix=f"see trioflow simulate --help, {flag}") from None


def apply_configuration(options: argparse.Namespace) -> None:
    """Write what a framework's configuration says into a command line, where that says nothing.

    Raises InputError when there is no TRACE, or both; the file is not a configuration, or its batch
    does not divide. Raises PlanError when the ranks do not make the file's degrees.
    """
    if options.megatron is None:
        if not options.trace:
            raise InputError("no TRACE was given", fix="name one, such as llama-3.1-8b")
        return
    if options.gpus is not None:
        apply_gpus(options)
    if options.trace or options.plan:
        raise InputError("--megatron gives the model and the plan", fix="leave TRACE and --plan out")
    found = find_configuration(options.megatron)
    if found is None:
        raise InputError("there is no such configuration", file=options.megatron)
    options.trace = [options.megatron]
    for column, value in found.degrees.items():
        if column != "data" and vars(options)[column] in (None, False):
            setattr(options, column, value if value not in ("none", 0) else None)
    stages = (options.pipeline or 1) * (options.stages_per_rank or 1)
    if options.stages is None and stages == len(found.stages):
        options.stages = found.name_stages()
    _share_ranks(options, found)


def _share_ranks(options: argparse.Namespace, found: Configuration) -> None:
    """Settle the data degree, the batch and the micro-batches."""
    tensor, pipeline, context = (getattr(options, n) or 1 for n in ("tensor", "pipeline", "context"))
    rest_of = tensor * context * pipeline
    data = options.data or found.degrees.get("data")
    if options.ranks is None:
        options.ranks = rest_of * (data or max(NODE // rest_of, 1))
        if data is None:
            print(f"{options.megatron} does not say how many GPUs run it: {options.ranks} (--ranks)", file=sys.stderr)
    data, rest = divmod(options.ranks, rest_of)
    if rest:
        raise PlanError(
            f"--ranks {options.ranks} is not a multiple of {tensor} tensor x"
            f"{f' {context} context x' if context > 1 else ''} {pipeline} pipeline",
            file=options.megatron,
        )
    options.data = data
    if data * context == 1:
        options.sharding = None
    if options.sharding != "distributed":
        options.gather_overlap = False
    elif options.shard is None:
        options.shard = found.count_shard(data * context)
    micro = int(found.step.get("batch", 1))
    if options.batch is None:
        options.batch = found.global_batch or data * micro * (found.accumulate or pipeline)
    pieces, rest = divmod(options.batch, data * micro)
    if rest or not pieces:
        raise InputError(
            f"{options.batch} samples a step do not divide into micro-batches of {micro} on {data} replicas",
            file=options.megatron,
            fix="give --batch or --ranks",
        )
    if pipeline > 1 and options.micro_batches is None:
        options.micro_batches = pieces
    elif pipeline == 1 and options.accumulate is None:
        options.accumulate = pieces


INTER_NODES: Options = {
    "the network between nodes, as you measured it": (
        (
            "--inter-node-bandwidth",
            "B",
            "bus bandwidth of large messages over your nodes, as nccl-tests prints it, all network cards of a node "
            "together, not per GPU [bytes/s], such as 12.5e9 (12.5 GB/s); all_gather=27e9,all_reduce=52e9 for each collective; or tcp: NCCL "
            f"fell back to TCP sockets, {TCP_BYTES_PER_S / 1e9:g} GB/s a network card as measured on a cluster (default: what is known of the platform)",
        ),
        (
            "--inter-node-latency",
            (float, "S"),
            "from a GPU to its counterpart in the next node [s]",
            {"dest": "inter_node_latency_s"},
        ),
        (
            "--inter-node-bytes",
            (float, "S"),
            "size of the messages whose bandwidth was measured over as many nodes as the job has [bytes], such as "
            "256e6: where links are faster, each step of a collective takes the rest, whatever its size",
        ),
    )
}
NETWORK: Options = {
    "": (
        (
            "--network",
            "NAME",
            f"{', '.join(NETWORKS)}, or one that a package registers, such as circuit (default: {DEFAULT_NETWORK})",
            {"default": DEFAULT_NETWORK},
        ),
    ),
    **INTER_NODES,
    "ways over the network": (
        (
            "--ties",
            TIES,
            "of equally good routes the first takes all, or pairs of ranks share them (default: "
            "what the platform says, else first)",
        ),
        ("--routing-seed", (int, "N"), "another one shares them in another way"),
        ("--fail-link", "FROM,TO", "a directed link that no route takes; may come several times", {"action": "append"}),
        (
            "--degrade-link",
            "FROM,TO,FACTOR",
            "a directed link of which so much of the bandwidth is left; may come several times",
            {"action": "append"},
        ),
    ),
}
"""The network, and what becomes of its links."""


def list_inter_node(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured between nodes, for ``network.inter_node.open_platform``."""
    return {name: getattr(options, name, None) for name in INTER_NODE}


def list_algorithm_options(more: str = "") -> Options:
    """Return the options for the algorithm of collectives and the chunks of its messages."""
    words = ", ".join(list_algorithm_words())
    return {
        "": (
            ("--algorithm", "NAME", f"message by message: {words}, hierarchical:INNER+OUTER{more}"),
            ("--chunks", (int, "N"), "pieces that each of its messages is cut into"),
            ("--chunk-bytes", (float, "B"), "or how large a piece is at most [bytes]"),
        )
    }


def spell_network(name: str) -> str:
    """Return a network's name; trioflow's own may be written with hyphens."""
    spelt = name.replace("-", "_")
    return spelt if spelt in NETWORKS else name


def change_platform(platform: Platform, options: argparse.Namespace) -> Platform:
    """Return a platform with the ways and links asked for; InputError where a link does not exist or a factor is wrong."""
    routing = platform.routing
    if getattr(options, "ties", None):
        routing = replace(routing, ties=options.ties)
    if getattr(options, "routing_seed", None) is not None:
        if routing.ties == TIES[0]:
            raise InputError(
                f"--routing-seed {options.routing_seed} changes nothing: the first route takes all",
                fix="say --ties ecmp as well",
            )
        routing = replace(routing, seed=options.routing_seed)
    known = {(link.source, link.target): place for place, link in enumerate(platform.links)}
    failed = set(routing.failed)
    for text in getattr(options, "fail_link", None) or ():
        failed.add(_read_ends(text, text.split(","), "--fail-link FROM,TO", known))
    links = list(platform.links)
    for text in getattr(options, "degrade_link", None) or ():
        *ends, factor = text.split(",")
        place = known[_read_ends(text, ends, "--degrade-link FROM,TO,FACTOR", known)]
        links[place] = _degrade(links[place], text, factor)
    routing = replace(routing, failed=frozenset(failed))
    return replace(platform, routing=routing, links=tuple(links))


def _read_ends(text: str, parts: list[str], form: str, known: dict[tuple[str, str], int]) -> tuple[str, str]:
    """Return a link's source and target."""
    if len(parts) != 2:
        raise InputError(f"{text!r} names no link", fix=f"write {form}")
    source, target = parts
    if (source, target) not in known:
        targets = sorted(end for start, end in known if start == source)
        raise InputError(
            f"no link leads from {source} to {target}",
            fix=f"from {source} links lead to {', '.join(targets[:8])}"
            if targets
            else f"nodes are {', '.join(dict.fromkeys(start for start, _ in known))}"[:200],
        )
    return source, target


def _degrade(link: Link, text: str, factor: str) -> Link:
    try:
        left = float(factor)
    except ValueError:
        left = math.nan
    if not 0 < left <= 1:
        raise InputError(
            f"--degrade-link {text}: {factor!r} is not a share of a bandwidth",
            fix="write a number above 0 and up to 1; --fail-link takes a link away",
        )
    return link._replace(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * left)


def read_chunks(options: argparse.Namespace) -> Chunks | None:
    """Return the chunks that the command line asks for, or None; InputError where both, without an algorithm, or senseless."""
    number, largest_bytes = options.chunks, options.chunk_bytes
    if number is None and largest_bytes is None:
        return None
    if number is not None and largest_bytes is not None:
        raise InputError("--chunks and --chunk-bytes were both given", fix="give one of them")
    if options.algorithm is None:
        raise InputError("chunks without an algorithm", fix="say --algorithm ring, for example")
    if number is not None and number < 1:
        raise InputError(f"--chunks {number} is not positive")
    if largest_bytes is not None and not 1 <= largest_bytes < math.inf:
        raise InputError(f"--chunk-bytes {largest_bytes:g} is less than a byte, or no number")
    return Chunks(number or 1, largest_bytes or math.inf)


def set_algorithms(plan: Plan, options: argparse.Namespace) -> Plan:
    """Return a plan with the algorithms and chunks asked for; InputError where a word is unknown or chunks make no sense."""
    chunks = read_chunks(options) if hasattr(options, "chunks") else None
    word = getattr(options, "algorithm", None)
    if word is not None:
        read_algorithms(word)
        plan = replace(plan, algorithms=word)
    if chunks is not None:
        largest_bytes = 0 if chunks.largest_bytes == math.inf else int(chunks.largest_bytes)
        plan = replace(plan, chunks=chunks.number, chunk_bytes=largest_bytes)
    return plan
