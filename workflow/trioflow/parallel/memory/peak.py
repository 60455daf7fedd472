"""Peak memory of each rank: when it is reached, what fills it, and how likely the step is to fit.

`estimate_memory` is the door: it adds what allocators keep and libraries' workspaces to the profile of
``memory.profile``. What lies outside the framework's allocator, context and communicators, is `count_outside`.

`Survival` says how likely a run is to fit, by how real runs ended that were predicted to need so much. What a rank needs
is its allocated peak and a share of what its allocator would keep beside it, since a full allocator gives its cache
back, but not what lies in pieces. The logarithm of the memory that a run really takes over that is logistic; a run
survives where it is no more than what context and communicators leave of its device, but for a few that fail whatever
they need. All four numbers come from runs that succeeded or ran out of memory (``data/memory_survival.tsv``).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trioflow.base.columns import ABSENT, Columns
from trioflow.base.plan_row import Plan
from trioflow.base.precision_recipes import MEGATRON, PrecisionRecipe
from trioflow.base.provenance import PACKAGE, read_table
from trioflow.costmodel.features import FEATURES
from trioflow.hardware.machine import Device
from trioflow.parallel.memory.profile import (
    TEMPORARY,
    Lifetimes,
    RankMemory,
    StorageTable,
    build_storage_table,
    profile_rank,
    read_runs,
)
from trioflow.parallel.model_graph import ModelGraph, of_model
from trioflow.parallel.programs.builder import ProgramBuilder
from trioflow.parallel.schedules.table import FORWARD_ONLY, TRAIN
from trioflow.parallel.splits.context import share_tokens
from trioflow.parallel.splits.pipeline import crossing_storages, find_scaled, list_parameters, loss_operators
from trioflow.parallel.splits.sharding import share_storages, weigh_parameters
from trioflow.parallel.splits.tensor_split import Shares, TensorSplit, scale_work
from trioflow.trace.store import Trace

SURVIVAL = PACKAGE / "data/memory_survival.tsv"
LIKELY = 0.5
"""Least probability with which a step counts as one that fits."""
DOUBTED = 0.9
"""Least probability with which nobody is warned."""


@dataclass(frozen=True)
class Survival:
    """How runs end by what they are predicted to need.

    ``location_log``, ``scale_log``: median and scale of the logarithm of taken over needed memory; ``kept_share``: of
    what an allocator keeps free, what it needs; ``lapse``: share of runs that fail whatever they need.
    """

    location_log: float
    scale_log: float
    kept_share: float
    lapse: float

    def count_needed(self, entry: Mapping[str, Any]) -> float:
        """Return what the ranks of an entry of ``estimate_memory`` need [bytes]."""
        peak_bytes = int(entry["peak_bytes"])
        return peak_bytes + self.kept_share * (count_wanted(entry) - peak_bytes)

    def find_probability(self, needed_bytes: float, room_bytes: float) -> float:
        """Return the probability that a rank that needs so much survives in the room it has [bytes]."""
        return float(self.find_probabilities(np.array([needed_bytes]), np.array([room_bytes]))[0])

    def find_probabilities(
        self, needed_bytes: NDArray[np.float64], room_bytes: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the same of many ranks."""
        beyond = np.log(np.maximum(needed_bytes, 1.0) / np.maximum(room_bytes, 1e-3))
        exponent = np.clip((beyond + self.location_log) / self.scale_log, -700.0, 700.0)
        return np.asarray((1 - self.lapse) / (1 + np.exp(exponent)))

    def find_limit(self, probability: float, room_bytes: float) -> float:
        """Return the most that a rank may need to survive with a probability, of those that do not lapse [bytes]."""
        odds = math.log(probability / (1 - probability))
        return room_bytes * math.exp(-self.location_log - self.scale_log * odds)


@cache
def load_survival(left_out: str = "") -> Survival:
    """Return the shipped numbers, or those that were fitted without a model's runs where any were fitted on."""
    rows = {row["left_out"]: row for row in read_table(SURVIVAL)}
    row = rows.get(left_out, rows[""])
    return Survival(*(float(row[field.name]) for field in fields(Survival)))


def count_wanted(entry: Mapping[str, Any]) -> int:
    """Return what the allocator of the ranks of an entry of ``estimate_memory`` would hold without a limit [bytes]."""
    wanted = entry.get("wanted_bytes", entry.get("reserved_bytes", 0))
    return max(int(wanted), int(entry["peak_bytes"]))


def count_needed(memory: Sequence[Mapping[str, Any]]) -> float:
    """Return what the rank that needs most needs [bytes]; 0 where no memory is known.

    Ranks run the same program and their errors are alike, so it is the first to fail.
    """
    return max(map(load_survival().count_needed, memory), default=0.0)


def describe_probability(probability: float) -> str:
    """Return a probability in words that promise nothing: ``97 % likely to fit``."""
    if probability > 0.995:
        return "over 99 % likely to fit"
    return "less than 1 % likely to fit" if probability < 0.005 else f"{probability * 100:.0f} % likely to fit"


HELD_BESIDE = {"passing_bytes": 0.18, "waiting_bytes": 0.9, "gathered_bytes": 0.34}
"""What a GPU's caching allocator holds beyond what it hands out at its peak, as shares of what comes and
goes in a step (`PASSING`), of what waits for the device and of what is gathered behind the peak."""
LEAD = 700
"""How many operators the host is ahead of the device where nothing keeps it. This and the shares have the
least mean error, to 1 %, over 90 runs of nanotron (1.34 B parameters on 1 and 2 nodes; ``trioflow_evaluation.clusters``),
from which a test rebuilds the shares; docs/memory.md judges them on the others. A stream of CUDA takes 1,024 launches."""
PASSING = ("activation", TEMPORARY, "input")
"""Categories that are handed out anew in every micro-batch; the others lie where they were laid once."""
CONTEXT_BYTES = 0.5 * 1024**3
"""What a process of PyTorch holds on a GPU beside its allocator: the CUDA context and libraries' kernels. Messages
"including non-PyTorch memory" of one-GPU programs leave 0.49 to 0.59 GiB of it (TianheWu/CoSeR issue 10 on an A100,
hahnyuan/PB-LLM issue 3 on an A800, and an H100 PCIe); before CUDA 11.7 it was more."""
_PAIR_BYTES, _GROUP_BYTES = 358_612_992, 411_041_792
"""What NCCL holds for a communicator of two ranks, and of more: the system files of ai-dynamo/aiconfigurator
(A100, H100, H200), which call it unofficial, by observation. NVIDIA/nccl issue 964 sees 544 and 688 MB on A100."""
_EXCHANGE_BYTES = 3.28e9
"""What its first all-to-all adds on 8 H100, a connection to every peer (NVIDIA/nccl issue 1685)."""
_BLAS_THREADS = 2
"""Threads with a handle of the matmul library, and so with a workspace: the one of forward and the one of backward."""
_BLAS_WORKSPACE_BYTES = {
    **dict.fromkeys(("Pascal", "Volta", "Turing", "Ampere", "Ada", "Blackwell"), 8_519_680),
    "Hopper": 33_554_432,
    "CDNA2": 33_554_432,
    "CDNA3": 134_217_728,
    "CDNA4": 134_217_728,
}
"""By architecture: PyTorch's default (``aten/src/ATen/cuda/CublasHandlePool.cpp``), handed out by its allocator. On
H100, 1,765 runs of nanotron show 62 to 70 MiB of them (docs/memory.md)."""


def count_outside(groups: Iterable[int], kind: str = "gpu", exchanges: bool = False) -> int:
    """Return what a rank's device holds that no framework's allocator hands out [bytes]; a CPU none.

    ``groups`` are sizes of its groups, each with a communicator; ``exchanges``: whether one does all-to-alls.
    """
    if kind != "gpu":
        return 0
    communicators = sum(_PAIR_BYTES if size == 2 else _GROUP_BYTES for size in groups if size > 1)
    return round(CONTEXT_BYTES + exchanges * _EXCHANGE_BYTES + communicators)


def count_plan_outside(plan: Plan, kind: str) -> int:
    """Return ``count_outside`` of a rank of a plan; experts' ranks have a group of their own."""
    groups = (plan.tensor, plan.context, plan.replicas, plan.pipeline, plan.expert)
    return count_outside(groups, kind, exchanges=plan.expert > 1)


def count_room(plan: Plan, device: Device | None) -> float:
    """Return what the allocator of a plan's rank may hold of its device [bytes]; without one there is no limit."""
    if device is None:
        return math.inf
    return device.memory_bytes - count_plan_outside(plan, device.kind)


def count_workspaces(device: Device | None) -> int:
    """Return what a rank's matmul library keeps, in PyTorch's allocator, for its workspaces [bytes]; 0 where unknown."""
    sheet = None if device is None else device.sheet
    return _BLAS_THREADS * _BLAS_WORKSPACE_BYTES.get(sheet.architecture if sheet else "", 0)


def estimate_memory(
    trace: ModelGraph,
    split: TensorSplit,
    program: ProgramBuilder,
    factors: Sequence[float],
    cut: Sequence[Sequence[str]],
    device: Device | None = None,
) -> list[dict[str, Any]]:
    """Return the peak of every rank, ranks that do the same together.

    ``categories`` is what fills the peak [bytes], ``when`` the task at which it is reached, in words, ``curve`` the
    ``places`` among a rank's tasks from which on it holds other ``bytes``; of a GPU ``reserved_bytes`` is what its
    allocator is expected to hold, ``beside`` by what of it (``HELD_BESIDE``): no more than the ``device`` has left, as
    it frees what it keeps before it fails; where it would hold more, ``wanted_bytes`` is that. Counted as
    ``torch.cuda.max_memory_allocated`` does: no fragmentation, no context, no buffers of the communication library, and
    of workspaces those of ``count_workspaces`` and what the trace shows as tensors.
    """
    (row_of_task, micro_batches, _), written = program.graph.lay_out(), program.graph.rows
    runs, rank_of_task = read_runs(written), written["rank"][row_of_task]
    modules = trace.operator_columns["module"].tolist()
    lifetimes = _lifetimes_of(trace, program, cut)
    classes = program.grid.classify()
    tables: dict[tuple[int, int], StorageTable] = {}
    copies, scores = _size_copies(trace, program), _find_scores(trace)
    room_bytes, on_gpu = count_room(program.plan, device), trace.facts.device != "cpu"
    workspace = count_workspaces(device) * on_gpu
    spans = any(stage.update_shares for stage in program.stages)
    entries = []
    for number, rank in enumerate(program.grid.find_representatives().tolist()):
        pipeline, rest = divmod(rank, program.plan.replicas * program.plan.tensor)
        parts = bool(program.partitions) and bool(program.partitions[pipeline].shared)
        replica = rest // program.plan.tensor % program.plan.shards
        place = (pipeline if spans or parts else -1, replica if parts else -1)
        if place not in tables:
            tables[place] = _table_of(trace, split, program, *place)
        first, end = np.searchsorted(rank_of_task, [rank, rank + 1]).tolist()
        rows, micro_batch = row_of_task[first:end], micro_batches[first:end]
        always = _held_always(program, rank, trace.facts.recipe, written.take(written["rank"] == rank))
        stages = program.schedule.stages_of_rank(pipeline)
        always["parameter"] = sum(size for size, at in copies if not at or not at.isdisjoint(stages))
        always["workspace"] = workspace + max(tables[place].bytes[tables[place].find(scores)], default=0.0)
        peak = profile_rank(
            runs.take(rows).assign(micro_batch=micro_batch),
            tables[place],
            program.kind.factors_of(program, rank) or factors,
            lifetimes(tables[place]),
            always,
            program.memory.get(rank),
            first,
        )
        ranks = np.flatnonzero(classes == number).tolist()
        peak_entry = {"ranks": ranks, "peak_bytes": peak.peak_bytes, "categories": peak.categories}
        if on_gpu:
            beside = _list_beside(trace, written, rows, program, rank, peak)
            more = sum(size * HELD_BESIDE[name] for name, size in beside.items())
            wanted = peak.peak_bytes + round(more)
            reserved = min(wanted, max(peak.peak_bytes, room_bytes))
            peak_entry |= {"reserved_bytes": int(reserved), "beside": beside}
            peak_entry |= {"wanted_bytes": wanted} if wanted > reserved else {}
        when = _describe_place(written, rows, micro_batch, peak, modules)
        entries.append({**peak_entry, "when": when, "curve": peak.list_changes()})
    return entries


def recall_memory(trace: Trace, plan: Plan, factors: Sequence[float]) -> list[dict[str, Any]]:
    """Return the traced step's own peak, as its allocator recorded it, in the form of :func:`estimate_memory`.

    Nothing where it was not recorded, or the plan changes what the only rank holds.
    """
    recorded, alike = trace.facts.recorded_memory, plan.ranks == plan.pieces == 1
    alike &= plan.recompute == plan.offload == "none" and set(factors) == {1.0}
    if not recorded or not alike:
        return []
    size = int(recorded["peak_bytes"])
    return [
        {
            "ranks": [0],
            "peak_bytes": size,
            "categories": {"recorded_by_the_allocator": size},
            "reserved_bytes": int(recorded["reserved_bytes"]),
            "beside": {},
            "when": "by the profiler's [memory] events",
            "curve": {"places": [0], "bytes": [size]},
        }
    ]


def _size_copies(trace: Trace, program: ProgramBuilder) -> list[tuple[float, frozenset[int]]]:
    """Return the weights that no operator shows: their bytes, and on which stages they lie.

    Those that the step never reads, and a second time those that are multiplied in FP8: such a copy and its transposed
    one are together as large as the weight in bf16, in whose place they lie under ``PrecisionRecipe.fp8_parameters``;
    none stays where weights are gathered anew for each unit.
    """
    plan, twice = program.plan, not (trace.facts.recipe.fp8_parameters or program.plan.shards_units)
    scaled = find_scaled(trace) if twice else frozenset()
    if not scaled and not any("frozen" in entry for entry in trace.facts.parameters or []):
        return []
    parameters = list_parameters(trace, plan.tensor, plan.expert_parts)
    placed = program.placed or [frozenset()] * len(parameters)
    return [
        (size if p.unread else float(p.size_bytes), at)
        for p, at, size in zip(parameters, placed, weigh_parameters(trace, plan), strict=True)
        if p.unread or p.storage_id in scaled
    ]


def _list_beside(
    trace: ModelGraph, written: Columns, rows: NDArray[np.int64], program: ProgramBuilder, rank: int, peak: RankMemory
) -> dict[str, int]:
    """Return what an allocator holds a share of beside its peak, by ``HELD_BESIDE`` [bytes].

    PyTorch keeps a collective's buffers until its stream has run it. The inputs of the last reduce-scatters (sequence
    parallelism), as many as lie within ``LEAD`` operators, are freed and not yet to be had: those of a micro-batch's
    forward, and of its backward where another follows. A slow host, which each exchange keeps for a while of its
    own (``Platform.host_of``), is not ahead. What replicas gather behind the update
    (``PrecisionRecipe.reduces_whole``) takes large blocks that nothing left free.
    """
    stages = program.schedule.stages_of_rank(rank // (program.plan.replicas * program.plan.tensor))
    works = [program.stages[stage] for stage in stages]
    gathered = sum(2 * sum(work.gathered_bytes) for work in works if any(work.gather_copies_s))
    beside = {
        "passing_bytes": sum(peak.categories.get(name, 0) for name in PASSING),
        "waiting_bytes": 0,
        "gathered_bytes": gathered,
    }
    if program.plan.tensor > 1 and not program.host.get("tensor_parallel_forward_s"):
        pieces = program.schedule.micro_batches
        phases = ("forward", "backward")[: min(pieces, 2)]
        group = _tensor_group(program, rank)
        scattered = written["name"].isin(["reduce_scatter"]) & written["phase"].isin(phases)
        sizes = written["message_bytes"] * (scattered & written["group"].isin([group]))
        waits = float(sizes[rows].sum())
        launched = _find_launched(trace)
        launches = sum(int(launched[getattr(work, phase)].sum()) for work in works for phase in phases)
        share = min(LEAD / max(launches, 1), 1.0)
        beside["waiting_bytes"] = round(waits / pieces * (1 - 1 / program.plan.tensor) * share)
    return beside


@of_model
def _find_launched(trace: ModelGraph) -> NDArray[np.bool_]:
    """Return which operators do any work on the device."""
    return np.asarray(np.any([trace.operator_columns[name] > 0 for name in FEATURES], axis=0))


def _tensor_group(program: ProgramBuilder, rank: int) -> str:
    """Return the ranks that share a rank's layers, as tasks name them."""
    tensor = program.plan.tensor
    return ",".join(str(rank - rank % tensor + place) for place in range(tensor))


def take_curves(memory: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take the curves out of what :func:`estimate_memory` found: ``ranks``, ``places``, ``bytes``."""
    return [{"ranks": entry["ranks"], **entry.pop("curve")} for entry in memory]


def _table_of(trace: ModelGraph, split: TensorSplit, program: ProgramBuilder, pipeline: int, data: int) -> StorageTable:
    """Return the allocations of some ranks: those of a stage, of a ZeRO-1 replica; -1 for all alike."""
    here: frozenset[int] | None = None
    placed_here: frozenset[int] | None = None
    parts: Shares = {}
    if pipeline >= 0:
        stages = program.schedule.stages_of_rank(pipeline)
        placed = enumerate(program.placed or [frozenset()] * len(list_parameters(trace)))
        here = placed_here = frozenset(i for i, at in placed if not at or at.intersection(stages))
        sums = Counter[int]()
        for stage in stages:
            sums.update(program.stages[stage].update_shares)
        parts = {op: min(float(share), 1.0) for op, share in sums.items()}
        if data >= 0:
            partition = program.partitions[pipeline]
            parts, owned = partition.shares[data], partition.owned_by(data)
            here = frozenset(i for i, p in enumerate(list_parameters(trace)) if p.name in owned)
    shares = share_storages(trace, program.plan, here, placed_here)
    shares = {**share_tokens(trace, program.plan.context, program.plan.pipeline), **shares}
    return _build_table(trace, split, parts, shares)


@of_model
def _build_table(trace: ModelGraph, split: TensorSplit, parts: Shares, shares: Shares) -> StorageTable:
    return build_storage_table(trace, scale_work(split.operators, parts), shares)


def _lifetimes_of(
    trace: ModelGraph, program: ProgramBuilder, cut: Sequence[Sequence[str]]
) -> Callable[[StorageTable], Lifetimes]:
    """Return what the framework keeps longer than operators do.

    ``torch.distributed.pipelining`` keeps what a stage sent until its backward, and an output of the last stage until
    that ends (2.13, ``stage.py``: ``fwd_cache``); that none is returned (``return_outputs=False``), as by torchtitan,
    keeps the peak from growing with micro-batches. Frameworks that keep main gradients
    (Megatron-LM, nanotron) drop both, receive into new buffers, and update with one kernel (``FusedAdam``,
    ``torch_adam_is_fused``). What ``fully_shard`` reduces in each micro-step it makes in the weights' format, and casts
    as it copies; what it keeps it has cast before. The distributed optimizer's buffers of gradients are always there,
    whatever the recipe.
    """
    recipe = trace.facts.recipe
    sent: set[int] = set()
    returned: set[int] = set()
    drops = program.schedule.traits.one_process or recipe.keeps_main_gradients
    if program.schedule.stages > 1 and not drops:
        for begin in accumulate(map(len, cut[:-1])):
            sent |= set(crossing_storages(trace, begin))
        returned = _outputs_of_model(trace)
    plan = program.plan
    main = recipe.keeps_main_gradients and program.mode == TRAIN and plan.offload == "none"
    stays = (main and not (plan.shards_units or plan.sums_shards)) or (
        plan.sharding == "distributed" and program.mode == TRAIN
    )
    made = recipe.made_bytes * main / recipe.gradient_bytes * (plan.sharding != "partitioned")
    stay = made if recipe.keeps_made else 0.0
    if plan.sums_shards:
        made = min(recipe.parameter_bytes / recipe.gradient_bytes, 1.0)
    elif plan.shards_units:
        made = recipe.reduce_bytes / recipe.gradient_bytes
    return lambda table: Lifetimes(
        table.find(sent),
        table.find(returned),
        buffered=not drops,
        adds_up=not plan.sums_shards,
        gradients_stay=stays,
        made_share=made - stay,
        made_stays=stay,
        of_update=table.find(_find_update_results(trace) if main else set()),
    )


@of_model
def _find_scores(trace: ModelGraph) -> set[int]:
    """Return the scores for which Megatron-LM's own attention has a buffer that stays, as large as a layer's.

    ``core/transformer/dot_product_attention.py`` multiplies into it (``get_global_memory_buffer``); a kernel without
    scores needs none.
    """
    if trace.facts.recipe.framework != MEGATRON:
        return set()
    softmaxes = ("aten::softmax", "aten::_softmax")
    return {row.reads[0] for row in trace.forward if row.name in softmaxes and row.reads}


@of_model
def _find_update_results(trace: ModelGraph) -> set[int]:
    """Return the storages that the optimizer makes in passing, beside casts: a fused kernel makes none of them."""
    kernels = [row is not None and row.phase == "optimizer" and row.name != "aten::to" for row in trace.makers]
    return {storage for storage, made in zip(trace.storage, kernels, strict=True) if made}


@of_model
def _outputs_of_model(trace: ModelGraph) -> set[int]:
    """Return the storages that the model hands to the loss."""
    loss = loss_operators(trace)
    read = {storage for op in loss for storage in trace.rows[op].reads}
    return read & {storage for row in trace.forward if row.op_id not in loss for storage in row.makes}


def _held_always(program: ProgramBuilder, rank: int, recipe: PrecisionRecipe, rows: Columns) -> dict[str, float]:
    """Return what a rank holds all the time beside what its operators use [bytes].

    DDP's buckets are a second copy of every gradient, as backward makes it; nanotron has them whatever its ZeRO stage.
    A stage of ``torch.distributed.pipelining`` has a buffer for every micro-batch's input and output gradient. What
    sequence parallelism gathers lies in buffers that are never given back (Megatron-LM's ``GlobalMemoryBuffer``,
    nanotron's ``MemoryBuffer``), each as large as the largest that was gathered.
    """
    main = recipe.keeps_main_gradients and not recipe.keeps_made
    copied = recipe.made_bytes / recipe.gradient_bytes if main else 1.0
    always = {"bucket": 0.0, "message": 0.0, "gathered": 0.0}
    if recipe.gather_buffers and program.plan.tensor > 1:
        group = _tensor_group(program, rank)
        gathers = rows["phase"].isin(("forward", "backward")) & rows["name"].isin(["all_gather"])
        sizes = rows["message_bytes"][gathers & rows["group"].isin([group])]
        always["gathered"] = recipe.gather_buffers * float(sizes.max(initial=0))
    place = program.schedule.rank_of_stage
    pipeline = rank // (program.plan.replicas * program.plan.tensor)
    for stage in program.schedule.stages_of_rank(pipeline):
        work = program.stages[stage]
        copies = main and not work.reduces_whole and not program.plan.sums_shards
        if program.plan.sums_shards:  # DeepSpeed's buffer is of one size; others copy each bucket
            fullest = max((bucket.size_bytes for bucket in work.buckets), default=0)
            rest_bytes = program.plan.bucket_bytes - fullest
            always["bucket"] += max(rest_bytes, 0) if recipe.waits_for_buckets else fullest
        if program.plan.replicas > 1 and (copies or not work.gathered_bytes):
            always["bucket"] += copied * sum(b.size_bytes for b in work.buckets)
        if program.schedule.traits.one_process or recipe.keeps_main_gradients:
            continue
        if stage and place[stage - 1] != pipeline:
            always["message"] += sum(program.stages[stage - 1].send_bytes)
        if place.get(stage + 1, pipeline) != pipeline and program.mode != FORWARD_ONLY:
            always["message"] += sum(work.send_bytes)
    return always


def _describe_place(
    written: Columns, rows: NDArray[np.int64], micro_batch: NDArray[np.int64], peak: RankMemory, modules: Sequence[str]
) -> str:
    """Name the task at which a rank is fullest, such as ``backward of blocks.0: aten::mm``; of a rank's tasks their rows."""
    if not len(rows):
        return "always"
    name, phase, op_id = (written[one][rows[peak.place]] for one in ("name", "phase", "op_id"))
    text = phase or "end"
    if op_id != ABSENT and modules[op_id]:
        text += f" of {modules[op_id]}"
    if micro_batch[peak.place] != ABSENT and micro_batch.max() > 0:
        text += f", micro-batch {micro_batch[peak.place]}"
    return f"{text}: {name}"


def find_fullest(memory: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of the fullest rank; the first of several."""
    return max(memory, key=lambda entry: int(entry["peak_bytes"]))
