"""Task graphs made for measuring speed: no model, but as many tasks and bytes as one."""

from __future__ import annotations

import random
from dataclasses import dataclass

from trioflow.hardware.machine import Device, Platform
from trioflow.hardware.platform import BUILDERS
from trioflow.parallel.task_graph import TaskGraph, TaskGraphBuilder


@dataclass(frozen=True)
class Model:
    """As much of a model as decides how large its DDP step is.

    Attributes
    ----------
    name : str
        What it is called.
    operators : int
        Forward operators; each has one in backward.
    parameters : int
        Parameter tensors, each with an optimizer task.
    gradient_bytes : int
        All parameters at four bytes [bytes].
    buckets : int
        Of DDP: one of 1 MiB, others of 25 MiB or one larger gradient.
    """

    name: str
    operators: int
    parameters: int
    gradient_bytes: int
    buckets: int


RESNET50 = Model("ResNet-50", 175, 161, 4 * 25_557_032, 5)
"""torchvision's: 53 convolutions and as many batch norms, 49 ReLUs, 16 additions, two poolings,
flatten and the classifier."""
VGG13 = Model("VGG-13", 34, 26, 4 * 133_047_848, 5)
"""torchvision's: 10 convolutions, 12 ReLUs, 6 poolings, flatten, 3 linear layers, 2 dropouts."""


def make_model_graph(model: Model, ranks: int) -> TaskGraph:
    """Make a step of data-parallel training as large as a model's."""
    return make_data_parallel_graph(ranks, model.operators, model.buckets, model.gradient_bytes, model.parameters)


def make_data_parallel_graph(
    ranks: int, operators: int, buckets: int, gradient_bytes: int, optimizer_tasks: int
) -> TaskGraph:
    """Make a step of data-parallel training whose all-reduces overlap backward.

    Parameters
    ----------
    ranks : int
        Ranks, all alike.
    operators : int
        Forward tasks of a rank, and backward ones; of some 0.1 ms, from a fixed seed.
    buckets : int
        All-reduces, evenly spread over backward.
    gradient_bytes : int
        What they reduce together [bytes].
    optimizer_tasks : int
        Tasks after the last all-reduce.
    """
    generator = random.Random(0)
    durations_s = [generator.uniform(0.5e-4, 1.5e-4) for _ in range(operators)]
    builder = TaskGraphBuilder()
    group = ",".join(map(str, range(ranks)))
    for rank in range(ranks):
        for duration_s in durations_s:
            builder.add(rank, "compute", "compute", "op", phase="forward", duration_s=duration_s)
        reduced = []
        for number, duration_s in enumerate(reversed(durations_s)):
            done = builder.add(rank, "compute", "compute", "op", phase="backward", duration_s=2 * duration_s)
            bucket = len(reduced)
            if (number + 1) * buckets >= (bucket + 1) * operators:
                reduced.append(
                    builder.add(
                        rank,
                        "communication",
                        "collective",
                        "all_reduce",
                        phase="backward",
                        message_bytes=gradient_bytes // buckets,
                        match_id=bucket,
                        group=group,
                        after=[done],
                    )
                )
        for _ in range(optimizer_tasks):
            builder.add(rank, "compute", "compute", "op", phase="optimizer", duration_s=1e-5, after=reduced)
    return builder.build()


def make_random_messages(ranks: int) -> TaskGraph:
    """Make every rank send every other one a message of random size at once: all share links."""
    generator = random.Random(0)
    builder = TaskGraphBuilder()
    for source in range(ranks):
        for target in range(ranks):
            if source != target:
                fields = {"message_bytes": generator.randrange(10**6), "match_id": builder.new_match()}
                builder.add(source, f"send {target}", "send", "send", peer=target, **fields)
                builder.add(target, f"receive {source}", "recv", "recv", peer=source, **fields)
    return builder.build()


def make_switch(ranks: int) -> Platform:
    """Join ranks by one switch at 100 GB/s and 1 us a link."""
    links = BUILDERS["switch"](ranks, 1e11, 1e-6)
    return Platform("switch", Device("chip", "gpu", 10**9, {}), ranks, tuple(links))
