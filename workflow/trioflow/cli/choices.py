"""What a command line asks for: plan (or a framework's own configuration), platform, network, and assumptions."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from trioflow.base.errors import InputError, PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import DEGREES, name_flag
from trioflow.cli.output import Options, add_options, list_flags, number
from trioflow.costmodel.choices import read_gpus
from trioflow.hardware.machine import TIES, Link, Platform
from trioflow.network.across_nodes import INTER_NODE, open_platform
from trioflow.network.algorithms.catalogue import list_algorithm_words, read_algorithms
from trioflow.network.message_planner import Chunks
from trioflow.network.networks import DEFAULT_NETWORK, NETWORKS
from trioflow.parallel.plan import AS_TRACED, NAMED, choose_plan, make_plan, read_plan
from trioflow.parallel.schedules.table import TRAIN, Schedule
from trioflow.prediction.question import STEP_WORDS, cut_micro_batches, find_model
from trioflow.prediction.question import Options as Assumptions
from trioflow.prediction.step import check_factor
from trioflow.trace.language.read import find_configuration
from trioflow.trace.language.sizes import Configuration
from trioflow.trace.store import load_trace

_MODEL = "language model by name or configuration"


def list_model_options(several: bool = False) -> Options:
    """Return the options of a language model given by name or configuration; ``several``: for a list of recipes."""
    rows = list_flags(Assumptions, *STEP_WORDS)
    if several:
        place = STEP_WORDS.index("precision")
        name, kind, text, more = rows[place]
        ranked = "; several, with commas between, are ranked together, each with its fusion behind a plus sign"
        rows[place] = (name, kind, text + ranked, {**more, "metavar": "RECIPE[+FUSION][,RECIPE...]"})
    return {_MODEL: rows}


_RUN = "run of many steps"
RUN: Options = {
    _RUN: (
        ("--tokens", (number, "N"), "tokens of the whole run, such as 500B or 1T, for its time, cost and energy"),
        ("--budget", (number, "M"), "money for the whole run: how many tokens it pays for"),
        ("--price-per-gpu-hour", (float, "P"), "price per GPU-hour, for the cost of the run"),
        (
            "--power-w",
            (float, "W"),
            "power per GPU while it trains [W], for the energy (default: the limit of its data sheet)",
            {"rare": True},
        ),
    )
}
"""Options of a run of many steps."""
FAULTS: Options = {
    _RUN: (
        (
            "--gpu-hours-per-failure",
            (float, "H"),
            "GPU-hours between failures that stop the run, for goodput and the best checkpoint interval",
            {"rare": True},
        ),
        (
            "--checkpoint-s",
            (float, "S"),
            "time in which the run waits for a checkpoint [s] (default: 0)",
            {"default": 0.0, "rare": True},
        ),
        (
            "--restart-s",
            (float, "S"),
            "time from a failure to the next step [s] (default: 0)",
            {"default": 0.0, "rare": True},
        ),
    )
}
ROUTING: Options = {_MODEL: list_flags(Assumptions, "routing")}
WHAT_IF: Options = {
    **ROUTING,
    "what if": (
        (
            "--scale-network",
            (float, "F"),
            "what if communication were F times as fast (communication_scale 1/F in Python)",
            {"rare": True},
        ),
        *(
            (
                name,
                None,
                text,
                {"nargs": 2, "action": "append", "default": [], "metavar": tuple(value.split()), "rare": True},
            )
            for name, _, text, value in (
                (*row[:3], row[3]["metavar"]) for row in list_flags(Assumptions, "operator_scales", "slow_ranks")
            )
        ),
    ),
}
DRAWS: Options = {"jitter": list_flags(Assumptions, "draws", "seed")}
_PLAN = "plan: by name on --ranks, by its degrees, or both"
_COLUMNS = [one.name for one in fields(Plan) if one.name not in ("plan", "chunks", "chunk_bytes")]
"""Arguments that are columns of a plan."""
_DEGREES = (
    *("data", "tensor", "pipeline", "context", "expert", "sharding", "micro_batches", "accumulate", "schedule"),
    *("recompute", "sequence_parallel", "vocabulary_parallel", "tensor_overlap", "tensor_style", "shard"),
    *("gather_overlap", "gradient_sync", "no_sync", "stages_per_rank", "context_method", "expert_tensor"),
    *("expert_domain", "expert_overlap", "offload"),
)
"""Those that have flags, the usual ones first."""
GPUS = (
    "--gpus",
    "NxNAME",
    "number and kind of GPUs, such as 256xH100, instead of --ranks and --platform. A GPU stands for its usual platform; a "
    "shipped platform or a file may be named too",
)
NODE = 8
"""GPUs of the node that is taken where no number of ranks is given."""
_CONFIGURATION = (
    "--megatron",
    "FILE",
    "Megatron-LM's model_config.yaml or command line (or a nanotron YAML), instead of TRACE: the model and the "
    f"plan; --ranks GPUs share it (default: {NODE}); other arguments win over the file's",
    {"rare": True},
)
_TIMES = "times of operators and collectives"
COLLECTIVES: Options = {_TIMES: list_flags(Assumptions, "collectives")}
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
                    "a language model by name (llama-3.1-8b) or configuration file, or a trace: folder, pack or a shipped "
                    "one's name. More traces of the same workload at other batches make other batches more certain",
                    {"nargs": "*" if megatron else "+"},
                ),
                GPUS,
                (
                    "--platform",
                    "NAME|FILE",
                    "a shipped platform (`trioflow platforms` lists them) or a YAML file. this-machine was measured by `make "
                    "reproduce` in this folder",
                ),
                ("--batch", (int, "N"), "samples of the whole step, all ranks together"),
                *([_CONFIGURATION] if megatron else []),
                *list_flags(Assumptions, "mode", "last_batch"),
            ),
            _PLAN: (
                (
                    "--micro-batch",
                    (int, "N"),
                    "samples per micro-batch (default: 1 for a language model by name or configuration). The rest of the "
                    "batch follows by gradient accumulation or in the pipeline",
                ),
                (
                    "--plan",
                    "NAME",
                    "by name, such as ddp, fsdp, distributed (ZeRO-1), tp or 1f1b. "
                    f"All names: {', '.join(NAMED)}, and those that packages register",
                ),
                ("--ranks", (int, "N"), "number of ranks (GPUs); those that no degree takes are data-parallel"),
                *list_flags(Plan, *_DEGREES),
                *list_flags(Assumptions, "stages"),
                (
                    "--schedule-file",
                    "CSV",
                    "the pipeline's actions as PyTorch writes them, instead of --schedule; see `trioflow export schedule`",
                    {"rare": True},
                ),
            ),
        },
        list_model_options(),
        {_TIMES: list_flags(Assumptions, "cost_model", "override", "anchor", "session")},
    )


Number = TypeVar("Number", int, float)


def list_given(options: argparse.Namespace, names: Iterable[str] = _COLUMNS) -> dict[str, Any]:
    """Return those arguments that were given: flags that are set, and any value, 0 included."""
    values = ((name, getattr(options, name, None)) for name in names)
    return {name: value for name, value in values if value is not None}


def _choose_scheduled_plan(options: argparse.Namespace) -> tuple[Plan, Schedule | None]:
    """Return the plan, and the schedule where a file gives it; PlanError where that and other arguments clash."""
    given = list_given(options)
    if not options.schedule_file:
        return choose_plan(options.plan, options.ranks, given), None
    if other := next((name for name in ("schedule", "plan") if getattr(options, name)), None):
        raise PlanError(f"--{other} and --schedule-file were both given", fix="give one of them")
    of_file = ("pipeline", "micro_batches", "stages_per_rank")
    chosen = {name: given.pop(name) for name in of_file if name in given}
    plan, schedule = read_plan(options.schedule_file, **given)
    for name, value in {**chosen, **list_given(options, ["ranks"])}.items():
        if value != getattr(plan, name):
            flag = name_flag(name)
            raise PlanError(
                f"{flag} {value}, but the schedule makes it {getattr(plan, name)}",
                file=options.schedule_file,
                fix=f"leave {flag} out",
            )
    return plan, schedule


_FIXED = (
    *("batch", "plan", "stages", "last_batch", *STEP_WORDS, "megatron", "session", "schedule_file", *_COLUMNS),
    *("mode", "anchor"),
)
"""Arguments that would change what a traced program does."""


def _choose_traced_ranks(options: argparse.Namespace) -> Plan:
    """Return a plan of as many ranks as traced programs run on; InputError where an argument would change them."""
    if refused := [*list_given(options, _FIXED)]:
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


_ASSUMED = [one.name for one in fields(Assumptions) if one.name not in (*INTER_NODE, *Plan.__dataclass_fields__)]
"""Arguments that are fields of ``Options``; the network between nodes goes into the platform."""


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
        else cut_micro_batches(
            find_model(options.trace), plan, options.batch, options.micro_batch, options.mode or TRAIN
        )
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
    assumed = list_given(options, _ASSUMED)
    if assumed.get("as_traced"):
        chosen, schedule = _choose_traced_ranks(options), None
    else:
        chosen, schedule = _choose_scheduled_plan(options)
        chosen = chosen if schedule else _cut_micro_batches(chosen, options)
    plan = set_algorithms(chosen, options)
    measured = list_inter_node(options)
    platform = change_platform(open_platform(options.platform, plan.ranks, **measured), options)
    assumed |= _read_what_if(options) | {"network": spell_network(assumed.get("network"))}
    return plan, platform, Assumptions(schedule=schedule, **assumed)


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
    settled = list_given(options, ("megatron", "as_traced", "plan", "schedule_file", *DEGREES))
    launch = find_model(options.trace) if options.trace and not settled else None
    if isinstance(launch, Configuration) and launch.degrees:
        options.megatron, options.trace = options.trace[0], []
    if options.megatron is None:
        if not options.trace:
            raise InputError("no TRACE was given", fix="name one, such as llama-3.1-8b")
        return
    if options.gpus is not None:
        apply_gpus(options)
    if options.trace or options.plan:
        raise InputError("--megatron gives the model and the plan", fix="leave TRACE and --plan out")
    configuration = launch or find_configuration(options.megatron)
    if not isinstance(configuration, Configuration):
        raise InputError(
            "no configuration of a decoder that trioflow builds, nor of its plan"
            if configuration
            else "there is no such configuration",
            file=options.megatron,
        )
    options.trace = [options.megatron]
    for column, value in configuration.degrees.items():
        if column != "data" and vars(options)[column] in (None, False):
            setattr(options, column, value if value not in ("none", 0) else None)
    stages = (options.pipeline or 1) * (options.stages_per_rank or 1)
    if options.stages is None and stages == len(configuration.stages):
        options.stages = configuration.name_stages()
    _share_ranks(options, configuration)


def _share_ranks(options: argparse.Namespace, configuration: Configuration) -> None:
    """Settle the data degree, the batch and the micro-batches."""
    tensor, pipeline, context = (getattr(options, n) or 1 for n in ("tensor", "pipeline", "context"))
    rest_of = tensor * context * pipeline
    data = options.data or configuration.degrees.get("data")
    if options.ranks is None:
        options.ranks = rest_of * (data or max(NODE // rest_of, 1))
        if data is None:
            print(f"{options.megatron} does not say how many GPUs run it: {options.ranks} (--ranks)", file=sys.stderr)
    data, rest = divmod(options.ranks, rest_of)
    if rest:
        raise PlanError(
            f"TP{tensor} x {f'CP{context} x ' * (context > 1)}PP{pipeline} does not divide {options.ranks} GPUs",
            file=options.megatron,
        )
    options.data = data
    if data * context == 1:
        options.sharding = None
    if options.sharding != "distributed":
        options.gather_overlap = False
    elif options.shard is None:
        options.shard = configuration.count_shard(data * context)
    micro = int(configuration.step.get("batch", 1))
    if options.batch is None:
        options.batch = configuration.global_batch or data * micro * (configuration.accumulate or pipeline)
    pieces, rest = divmod(options.batch, data * micro)
    if rest or not pieces:
        raise PlanError(
            f"{options.batch} samples a step do not divide into micro-batches of {micro} on {data} replicas",
            file=options.megatron,
            fix="give --batch or --ranks",
        )
    if pipeline > 1 and options.micro_batches is None:
        options.micro_batches = pieces
    elif pipeline == 1 and options.accumulate is None:
        options.accumulate = pieces


_NETWORK = "network"
INTER_NODES: Options = {_NETWORK: list_flags(Assumptions, *INTER_NODE)}
NETWORK: Options = {
    _NETWORK: (
        *list_flags(Assumptions, "network", *INTER_NODE),
        (
            "--ties",
            TIES,
            "equal-cost routes: the first carries everything, or pairs of ranks are spread over them (default: the platform's, "
            "else first)",
            {"rare": True},
        ),
        ("--routing-seed", (int, "N"), "seed of that spreading", {"rare": True}),
        (
            "--fail-link",
            "FROM,TO",
            "a directed link that is down; may be given several times",
            {"action": "append", "rare": True},
        ),
        (
            "--degrade-link",
            "FROM,TO,FACTOR",
            "a directed link with this share of its bandwidth left; may be given several times",
            {"action": "append", "rare": True},
        ),
    )
}
"""The network, and what becomes of its links."""


def list_inter_node(options: argparse.Namespace) -> dict[str, Any]:
    """Return what was measured between nodes, for ``network.across_nodes.open_platform``."""
    return {name: getattr(options, name, None) for name in INTER_NODE}


def list_algorithm_options(more: str = "") -> Options:
    """Return the options for the algorithm of collectives and the chunks of its messages."""
    words = ", ".join(list_algorithm_words())
    return {
        _NETWORK: (
            (
                "--algorithm",
                "NAME",
                f"algorithm of collectives, message by message: {words}, hierarchical:INNER+OUTER{more}",
                {"rare": True},
            ),
            ("--chunks", (int, "N"), "chunks per message of the algorithm", {"rare": True}),
            ("--chunk-bytes", (float, "B"), "largest chunk of a message [bytes], instead of --chunks", {"rare": True}),
        )
    }


def spell_network(name: str | None) -> str:
    """Return a network's name, the default unless given; trioflow's own may be written with hyphens."""
    spelt = (name or DEFAULT_NETWORK).replace("-", "_")
    return spelt if name is None or spelt in NETWORKS else name


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
    broken = getattr(options, "fail_link", None) or ()
    failed = {*routing.failed, *(_read_ends(text, text.split(","), "--fail-link FROM,TO", known) for text in broken)}
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
