"""The plan of a run by its framework's own configuration: Megatron-LM's arguments, nanotron's YAML."""

from __future__ import annotations

import argparse
import sys

from trioflow.errors import InputError, PlanError
from trioflow.trace.language.configuration import Configuration
from trioflow.trace.language.read import find_configuration

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

    Raises
    ------
    InputError
        When there is no TRACE, or both; the file is none, or its batch does not divide.
    PlanError
        When the ranks do not make the file's degrees.
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
    _share_ranks(options, found)


def _share_ranks(options: argparse.Namespace, found: Configuration) -> None:
    """Settle the data degree, the batch and the micro-batches."""
    tensor, pipeline = options.tensor_parallel or 1, options.pipeline_parallel or 1
    data = options.data_parallel or found.degrees.get("data")
    if options.ranks is None:
        options.ranks = tensor * pipeline * (data or max(NODE // (tensor * pipeline), 1))
        if data is None:
            print(
                f"{options.megatron} does not say how many GPUs run it: {options.ranks} (--ranks)",
                file=sys.stderr,
            )
    data, rest = divmod(options.ranks, tensor * pipeline)
    if rest:
        raise PlanError(
            f"--ranks {options.ranks} is no multiple of {tensor} tensor x {pipeline} pipeline",
            file=options.megatron,
        )
    options.data_parallel = data
    if data == 1:
        options.sharding = None
    micro = int(found.step.get("batch", 1))
    if options.batch is None:
        options.batch = found.global_batch or data * micro * (found.accumulate or pipeline)
    pieces, rest = divmod(options.batch, data * micro)
    if rest or not pieces:
        raise InputError(
            f"{options.batch} samples a step are no micro-batches of {micro} on {data} replicas",
            file=options.megatron, fix="give --batch or --ranks",
        )  # fmt: skip
    if pipeline > 1 and options.micro_batches is None:
        options.micro_batches = pieces
    elif pipeline == 1 and options.accumulate is None:
        options.accumulate = pieces
