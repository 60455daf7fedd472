"""What a command line asks for: plan (or a framework's own configuration), platform, and a prediction's assumptions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from trioflow.base.errors import InputError, PlanError
from trioflow.base.experiments import Plan
from trioflow.cli.network import change_platform, set_algorithms, spell_network
from trioflow.costmodel.choices import load_named_platform
from trioflow.costmodel.steps import TIMER
from trioflow.hardware.machine import Platform
from trioflow.network.networks import DEFAULT_NETWORK
from trioflow.parallel.plan import make_plan, named_plan, read_plan, vary_plan
from trioflow.parallel.programs.as_traced import AS_TRACED
from trioflow.parallel.schedules.build import Schedule, is_schedule
from trioflow.parallel.schedules.table import TRAIN
from trioflow.parallel.splits.routing import BALANCED
from trioflow.prediction.options import STEP_WORDS, Options, check_factor
from trioflow.trace.language.read import find_configuration
from trioflow.trace.language.sizes import Configuration
from trioflow.trace.store import load_trace

Number = TypeVar("Number", int, float)

FURTHER = (
    "expert", "expert_tensor", "expert_domain", "tensor_style", "sequence_parallel", "vocabulary_parallel", "recompute", "offload",
    "context_method", "tensor_overlap", "no_sync", "expert_overlap",
)  # fmt: skip
"""Arguments that are columns of a plan."""
_VARIED = ("recompute", "offload")
"""Columns that go with named plans too."""
_BESIDE_DEGREES = (
    "schedule", "schedule_file", "sharding", "shard", "accumulate",
    *(name for name in FURTHER if name not in _VARIED),
)  # fmt: skip
"""Arguments that a named plan settles."""


def _choose_plan(options: argparse.Namespace) -> Plan:
    """Return the plan by name or by its degrees; PlanError where both are given, or they do not make the ranks."""
    degrees = {
        "data": options.data_parallel,
        "tensor": options.tensor_parallel,
        "context": options.context_parallel,
        "pipeline": options.pipeline_parallel,
    }
    given = {name: degree for name, degree in degrees.items() if degree is not None}
    micro_batches, stages = options.micro_batches, options.stages_per_rank
    if options.plan:
        if given or any(_is_given(vars(options)[name]) for name in _BESIDE_DEGREES):
            raise PlanError("--plan and degrees were both given", fix="give one of them")
        ranks = int(options.plan == "single") if options.ranks is None else options.ranks
        if ranks < 2 and options.plan != "single":
            raise PlanError(f"--plan {options.plan} needs --ranks of 2 or more")
        for flag, value in (("--micro-batches", micro_batches), ("--stages-per-rank", stages)):
            if value is not None and not is_schedule(options.plan):
                raise PlanError(f"{flag} does not apply to plan {options.plan}")
        varied = {name: vars(options)[name] for name in _VARIED if vars(options)[name]}
        return vary_plan(named_plan(options.plan, ranks, micro_batches, stages), **varied)
    plan = make_plan(
        **given,
        schedule=options.schedule or "",
        micro_batches=micro_batches,
        stages_per_rank=stages,
        sharding=options.sharding or "none",
        shard=1 if options.shard is None else options.shard,
        accumulate=1 if options.accumulate is None else options.accumulate,
        **{name: vars(options)[name] for name in FURTHER if vars(options)[name]},
    )
    if options.ranks is not None and options.ranks != plan.ranks:
        if not given:
            raise PlanError(f"--ranks {options.ranks} without a plan", fix="give --plan or degrees")
        factors = " x ".join(f"{degree} {name}" for name, degree in given.items())
        raise PlanError(f"--ranks {options.ranks} is not the product {factors} = {plan.ranks}")
    return plan


def _is_given(value: object) -> bool:
    """Return whether an argument was given: a flag that is set, or any value, 0 included."""
    return value is not None and value is not False


def _choose_scheduled_plan(options: argparse.Namespace) -> tuple[Plan, Schedule | None]:
    """Return the plan, and the schedule where a file gives it; PlanError where that and other arguments clash."""
    if not options.schedule_file or options.plan:
        return _choose_plan(options), None
    if options.schedule:
        raise PlanError("--schedule and --schedule-file were both given", fix="give one of them")
    plan, schedule = read_plan(
        options.schedule_file,
        *(1 if n is None else n for n in (options.data_parallel, options.tensor_parallel)),
        context=1 if options.context_parallel is None else options.context_parallel,
        **{name: vars(options)[name] for name in FURTHER if vars(options)[name]},
    )  # fmt: skip
    for flag, asked, found in (
        ("--pipeline-parallel", options.pipeline_parallel, plan.pipeline),
        ("--micro-batches", options.micro_batches, plan.micro_batches),
        ("--stages-per-rank", options.stages_per_rank, plan.stages_per_rank),
        ("--ranks", options.ranks, plan.ranks),
    ):
        if asked is not None and asked != found:
            raise PlanError(
                f"{flag} {asked}, but the schedule makes it {found}", file=options.schedule_file,
                fix=f"leave {flag} out",
            )  # fmt: skip
    return plan, schedule


_FIXED = (
    "batch", "plan", "micro_batches", "stages_per_rank", "stages", "last_batch", *STEP_WORDS,
    "megatron", "session", *_BESIDE_DEGREES, *_VARIED,
)  # fmt: skip
"""Arguments that would change what a traced program does."""


def _choose_traced_ranks(options: argparse.Namespace) -> Plan:
    """Return a plan of as many ranks as traced programs run on; InputError where an argument would change them."""
    degrees = [name for name in vars(options) if name.endswith("_parallel")]
    refused = [
        name for name in dict.fromkeys([*_FIXED, *degrees]) if _is_given(vars(options)[name])
    ]
    refused += ["mode"] * (options.mode != TRAIN) + ["anchor"] * (options.anchor != TIMER)
    if refused:
        raise InputError(
            f"--{refused[0].replace('_', '-')} with --as-traced: what a traced rank computes and sends stays as it "
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


def read_options(options: argparse.Namespace) -> tuple[Plan, Platform, Options]:
    """Return the plan, the platform and the assumptions of a command line; TrioflowError where anything does not fit."""
    as_traced = getattr(options, "as_traced", False)
    if as_traced:
        chosen, schedule = _choose_traced_ranks(options), None
    else:
        chosen, schedule = _choose_scheduled_plan(options)
    plan = set_algorithms(chosen, options)
    platform = change_platform(load_named_platform(options.platform, plan.ranks), options)
    assumed = Options(
        network=spell_network(getattr(options, "network", DEFAULT_NETWORK)),
        fold=False if getattr(options, "no_fold", False) else "auto",
        cost_model=options.cost_model,
        override=options.override,
        collectives=getattr(options, "collectives", None),
        anchor=options.anchor,
        session=options.session,
        stages=options.stages,
        schedule=schedule,
        mode=options.mode,
        last_batch=options.last_batch,
        as_traced=as_traced,
        **{name: getattr(options, name) for name in STEP_WORDS},
        routing=getattr(options, "routing", BALANCED),
        **_read_what_if(options),
        draws=getattr(options, "draws", 0),
        seed=getattr(options, "seed", 0),
    )
    return plan, platform, assumed


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
            (_read_number(r, "--slow-rank", int), _read_number(f, "--slow-rank", float))
            for r, f in options.slow_rank
        ],
    }  # fmt: skip


def _read_number(word: str, flag: str, kind: Callable[[str], Number]) -> Number:
    try:
        return kind(word)
    except ValueError:
        raise InputError(
            f"{flag}: {word!r} is not a number", fix=f"see trioflow simulate --help, {flag}"
        ) from None


NODE = 8
"""GPUs of the node that is taken where no number of ranks is given."""


def add_configuration_argument(parser: argparse.ArgumentParser) -> None:
    """Add the file that gives the model, its step and its plan at once."""
    parser.add_argument(
        "--megatron", metavar="FILE",
        help="Megatron-LM's model_config.yaml or command line (or a nanotron YAML), instead of TRACE: the model and the "
        f"plan; --ranks GPUs share it (default: {NODE}); other arguments win over the file's",
    )  # fmt: skip


def apply_configuration(options: argparse.Namespace) -> None:
    """Write what a framework's configuration says into a command line, where that says nothing.

    Raises InputError when there is no TRACE, or both; the file is not a configuration, or its batch
    does not divide. Raises PlanError when the ranks do not make the file's degrees.
    """
    if options.megatron is None:
        if not options.trace:
            raise InputError(
                "no TRACE was given", fix="name one, such as llama-3.1-8b --sequence 8192"
            )
        return
    if options.trace or options.plan:
        raise InputError(
            "--megatron gives the model and the plan", fix="leave TRACE and --plan out"
        )
    found = find_configuration(options.megatron)
    if found is None:
        raise InputError("there is no such configuration", file=options.megatron)
    options.trace = [options.megatron]
    degrees = dict(found.degrees)
    for column, value in degrees.items():
        argument = column if column in vars(options) else f"{column}_parallel"
        if argument != "data_parallel" and vars(options)[argument] in (None, False):
            setattr(options, argument, value if value not in ("none", 0) else None)
    stages = (options.pipeline_parallel or 1) * (options.stages_per_rank or 1)
    if options.stages is None and stages == len(found.stages):
        options.stages = found.name_stages()
    _share_ranks(options, found)


def _share_ranks(options: argparse.Namespace, found: Configuration) -> None:
    """Settle the data degree, the batch and the micro-batches."""
    tensor, pipeline = options.tensor_parallel or 1, options.pipeline_parallel or 1
    context = options.context_parallel or 1
    rest_of = tensor * context * pipeline
    data = options.data_parallel or found.degrees.get("data")
    if options.ranks is None:
        options.ranks = rest_of * (data or max(NODE // rest_of, 1))
        if data is None:
            print(
                f"{options.megatron} does not say how many GPUs run it: {options.ranks} (--ranks)",
                file=sys.stderr,
            )
    data, rest = divmod(options.ranks, rest_of)
    if rest:
        raise PlanError(
            f"--ranks {options.ranks} is not a multiple of {tensor} tensor x"
            f"{f' {context} context x' if context > 1 else ''} {pipeline} pipeline",
            file=options.megatron,
        )
    options.data_parallel = data
    if data * context == 1:
        options.sharding = None
    micro = int(found.step.get("batch", 1))
    if options.batch is None:
        options.batch = found.global_batch or data * micro * (found.accumulate or pipeline)
    pieces, rest = divmod(options.batch, data * micro)
    if rest or not pieces:
        raise InputError(
            f"{options.batch} samples a step do not divide into micro-batches of {micro} on {data} replicas",
            file=options.megatron, fix="give --batch or --ranks",
        )  # fmt: skip
    if pipeline > 1 and options.micro_batches is None:
        options.micro_batches = pieces
    elif pipeline == 1 and options.accumulate is None:
        options.accumulate = pieces
