"""What each pipeline stage has to do, from the trace: operators, messages, buckets, upkeep of gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field, structs
from numpy.typing import NDArray

from trioflow.base.errors import PlanError
from trioflow.base.experiments import Plan
from trioflow.base.plan_row import SLICED
from trioflow.parallel.backward import Recomputation, keep_sums_with_input, plan_recomputation, split_backward
from trioflow.parallel.model_graph import ModelGraph
from trioflow.parallel.programs.builder import StageWork, UnitWork, size_attention
from trioflow.parallel.programs.units import cost_units
from trioflow.parallel.reference import PricedModel
from trioflow.parallel.schedules.table import BACKWARD_WEIGHT, FORWARD_ONLY, TRAIN, Schedule, leaves, recomputed_pairs
from trioflow.parallel.splits.pipeline import (
    Bucket,
    TiedParameter,
    boundary_bytes,
    build_buckets,
    find_gradients,
    find_tied,
    list_added_gradients,
    list_buffers,
    list_parameters,
    loss_operators,
    size_weights,
    stages_of_operators,
)
from trioflow.parallel.splits.sharding import (
    build_stage_units,
    build_units,
    held_sizes,
    place_parameters,
    share_optimizer,
)
from trioflow.parallel.splits.tensor_split import Exchange, TensorSplit, find_expert_modules, is_sharded
from trioflow.tables import PHASES


class StageWorks(Struct):
    """Builds the stages' work and remembers how sure its predicted part is.

    ``factors``: samples of each micro-batch over the traced ones. ``tied``: parameters that stages on several ranks
    use. ``spread_s``: how far predicted upkeep may lie below and above [s]. ``placed``: stages that update each
    parameter; empty without a pipeline. ``extrapolated``: whether upkeep was predicted beyond what the model was fitted
    on.
    """

    trace: ModelGraph
    plan: Plan
    priced: PricedModel
    schedule: Schedule
    factors: Sequence[float]
    tied: list[TiedParameter] = field(default_factory=list)
    spread_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    predicted: bool = False
    mode: str = TRAIN
    extrapolated: bool = False
    placed: list[frozenset[int]] = field(default_factory=list)

    def build(self, split: TensorSplit, cut: list[list[str]]) -> list[StageWork]:
        """Return the work of each stage, whose units ``cut`` lists."""
        stage_of = stages_of_operators(self.trace, cut)
        self.tied = self._tied_over_ranks(stage_of)
        if len(cut) > 1:
            copies = {str(tied.gradient["name"]): tied.stages for tied in self.tied}
            self.placed = place_parameters(self.trace, stage_of, copies)
        splits = any(a.kind == BACKWARD_WEIGHT for row in self.schedule.rows for a in leaves(row))
        repeats = bool(recomputed_pairs(self.schedule))
        loss = loss_operators(self.trace) if repeats else set()
        regions = self._plan_regions(repeats, cut)
        stages: list[StageWork] = []
        for stage in range(len(cut)):
            in_stage = set(np.flatnonzero(stage_of == stage).tolist())
            work = self._operators_of(stage_of, stage)
            if self.placed:
                sizes = held_sizes(self.trace, self.plan)
                work.optimizer, work.update_shares = share_optimizer(
                    self.trace, work.optimizer, sizes, self.placed, stage
                )
            work.before = self._place_exchanges(split.before, in_stage)
            work.after = self._place_exchanges(split.after, in_stage)
            recipe, firsts = self.trace.facts.recipe, split.first_blocks
            work.attentions = {
                op: size_attention(one, self.factors, self.copies_s, recipe, firsts.get(op, 1.0))
                for op, one in split.attentions.items()
                if op in in_stage
            }
            for op, one in work.attentions.items():
                work.before[op] = [*work.before.get(op, ()), *one.before]
                work.after[op] = [*one.after, *work.after.get(op, ())]
            work.backward = [split.swapped.get(op, op) for op in work.backward]
            if splits:
                self._split_backward(work, stage_of, stage)
            if repeats:
                work.recomputed = [op for op in work.forward if op not in loss]
            work.regions = [r for r in regions if in_stage.issuperset(r.operators)]
            self._add_gradients(work, in_stage, stage_of, stage)
            if self.mode != FORWARD_ONLY:
                self._add_partial(work, in_stage, split.partial_gradients)
            if stage < len(cut) - 1:
                crossing = boundary_bytes(self.trace, sum(map(len, cut[: stage + 1])))
                shares = (self.plan.tensor if self.plan.sequence_parallel else 1) * self.plan.context
                work.send_bytes = [round(crossing / shares * factor) for factor in self.factors]
            stages.append(work)
        return stages

    def _plan_regions(self, repeats: bool, cut: list[list[str]]) -> list[Recomputation]:
        """Return what backward runs again, unless the schedule's own forwards do."""
        kind = self.plan.recompute
        if repeats and kind != "none":
            raise PlanError(
                f"plan {self.plan.plan}: the schedule repeats forwards, and recompute {kind} repeats them too",
                fix="use recompute none, or another schedule",
            )
        kind = kind if self.mode != FORWARD_ONLY else "none"
        return plan_recomputation(self.trace, kind, cut)

    def _tied_over_ranks(self, stage_of: NDArray[np.int64]) -> list[TiedParameter]:
        """Return the tied parameters whose stages lie on several ranks, sized for one shard."""
        place, rules = self.schedule.rank_of_stage, self.trace.facts.tensor_split or {}
        shards = self.plan.shards if self.plan.shards_units else 1
        return [
            structs.replace(
                tied,
                size_bytes=tied.size_bytes // ((self.plan.tensor if is_sharded(tied.gradient, rules) else 1) * shards),
            )
            for tied in find_tied(self.trace, stage_of)
            if len({place[stage] for stage in tied.stages}) > 1
        ]

    def _operators_of(self, stage_of: NDArray[np.int64], stage: int) -> StageWork:
        """Return a stage's operators; each stage updates its own copy of a tied parameter."""
        phases = self.trace.operator_columns["phase"]
        chosen = [stage_of == stage] * 3
        for tied in self.tied:
            chosen[1] = chosen[1] & ~np.isin(np.arange(len(phases)), list(tied.sums))
        forward, backward, optimizer = (
            np.flatnonzero(own & phases.isin([phase])).tolist() for own, phase in zip(chosen, PHASES, strict=True)
        )
        return StageWork(forward, backward, optimizer)

    def _split_backward(self, work: StageWork, stage_of: NDArray[np.int64], stage: int) -> None:
        if (overlap := self.plan.tensor_overlap) in ("backward", "products"):
            why = "a schedule that runs gradients of inputs and of weights apart is not simulated"
            raise PlanError(f"tensor_overlap {overlap} with {why}", fix="use none, or 1f1b")
        left_out = frozenset(op for tied in self.tied for op in tied.sums)
        parts = split_backward(self.trace, stage_of, stage, left_out)
        work.backward_input, work.backward_weight = parts.for_input, parts.for_weight
        work.input_share = parts.input_share
        forward_of = [row.forward_op_id for row in self.trace.rows]
        work.before = keep_sums_with_input(parts, work.before, forward_of, first=True)
        work.after = keep_sums_with_input(parts, work.after, forward_of)

    def _gradients_of(self, in_stage: set[int], stage: int) -> list[dict[str, Any]]:
        """Return a stage's gradients in the order in which they become ready, sized for one shard."""
        plan, rules = self.plan, self.trace.facts.tensor_split or {}
        of_experts = find_expert_modules(self.trace)
        width = self.trace.facts.reduced_width
        shared = {tied.gradient["name"] for tied in self.tied}
        gradients = [
            {
                **g,
                "size_bytes": round(
                    int(g["size_bytes"])
                    // (plan.tensor if is_sharded(g, rules) else 1)
                    // (plan.expert_parts if g["module"] in of_experts else 1)
                    * width
                ),
            }
            for g in self.trace.facts.gradients
            if int(g["ready_after_op_id"]) in in_stage and g["name"] not in shared
        ]
        for tied in self.tied:
            if stage in tied.stages:
                ready = tied.ready_after.get(stage, max(in_stage))
                size_bytes = round(tied.size_bytes * width)
                copy = {"size_bytes": size_bytes, "ready_after_op_id": ready}
                gradients.append({**tied.gradient, **copy})
        return sorted(gradients, key=lambda g: int(g["ready_after_op_id"])) if shared else gradients

    def _add_gradients(self, work: StageWork, in_stage: set[int], stage_of: NDArray[np.int64], stage: int) -> None:
        """Give a stage its buckets, and the upkeep of its gradients under micro-batches."""
        plan = self.plan
        if plan.shards_units:
            work.units = self._shard_units(stage_of, stage)
            if plan.pipeline > 1 and self.mode != FORWARD_ONLY:
                self._add_stage_upkeep(work)
            return
        replicated = plan.replicas > 1 and plan.replication == "ddp"
        if replicated:  # DDP sends its buffers in every forward.
            work.buffer_bytes = list_buffers(self.trace, sorted(in_stage))
        if self.mode == FORWARD_ONLY:
            return
        gradients = self._gradients_of(in_stage, stage)
        if replicated:
            recipe = self.trace.facts.recipe
            work.reduces_whole = plan.sharding == "distributed" and recipe.reduces_whole
            work.buckets = self._group_gradients(work, gradients)
            if plan.sharding in SLICED:
                work.gathered_bytes = size_weights(self.trace, work.buckets)
                work.first_readers = self._find_first_readers(work.buckets, in_stage)
            if plan.sharding == "partitioned":
                work.bucket_copy_s = self._of_buckets_s("aten::copy_", work.buckets)
            elif plan.sharding != "distributed" and not recipe.keeps_main_gradients:
                work.bucket_copy_s = self._of_buckets_s("aten::mul", work.buckets)
                work.bucket_return_s = self._of_buckets_s("aten::copy_", work.buckets)
            if work.reduces_whole and recipe.copies_gathered:
                # All weights are laid one behind another, filled by PyTorch's ``all_gather``, and copied back,
                # each replica's slice of each weight by itself (nanotron's ``all_gather_coalesced``).
                whole, n = sum(work.gathered_bytes), plan.replicas
                part = whole / max(sum(int(g["size_bytes"]) for g in gradients), 1) / n
                slices = [round(int(g["size_bytes"]) * part) for g in gradients]
                copy_s = self._elementwise_s("aten::copy_", [whole], 2, times=2)
                slices_s = n * self._elementwise_s("aten::copy_", slices, 2, times=n)
                work.gather_copies_s = (copy_s, copy_s + slices_s)
        elif plan.offload == "optimizer":
            work.buckets = self._group_gradients(work, gradients)
        added = list_added_gradients(self.trace)
        shards = plan.shards if plan.sums_shards else 1
        sizes = [int(g["size_bytes"]) // shards for g in gradients if g["name"] not in added]
        further = self.schedule.micro_batches - 1
        if further:
            # nanotron's ``_accumulate_grad`` is one operator: the trace's cast, and 4 bytes more of each gradient.
            reads = 0 if self.trace.facts.recipe.made_bytes else 2
            work.accumulate_s = self._elementwise_s("aten::add_", sizes, reads, further)
            # Accumulated micro-steps divide their losses instead.
            if not self.schedule.traits.one_process and plan.pipeline > 1:
                sizes = [int(g["size_bytes"]) for g in gradients]
                work.scale_s = self._elementwise_s("aten::div_", sizes, 1)

    def _group_gradients(self, work: StageWork, gradients: Sequence[Mapping[str, Any]]) -> list[Bucket]:
        """Return the buckets of a stage's gradients, and note where those lie that go to the host."""
        plan = self.plan
        if not self.trace.facts.gradients:
            raise PlanError(
                f"plan {plan.plan}: the trace does not say which gradients there are",
                fix="capture it again, or give trace.json the key gradients",
            )
        parts: list[list[Mapping[str, Any]]] = [list(gradients)]
        if plan.places_experts:  # summed by other ranks, in buckets of their own
            of_experts = find_expert_modules(self.trace)
            parts = [[g for g in gradients if (g["module"] in of_experts) == experts] for experts in (False, True)]
        recipe = self.trace.facts.recipe
        width = recipe.bucket_width
        limits = [round(limit * width) for limit in (plan.first_bucket_bytes, plan.bucket_bytes)]
        if work.reduces_whole:
            limits = [sum(int(g["size_bytes"]) for g in gradients)] * 2
        buckets = [
            structs.replace(bucket, experts=bool(experts))
            for experts, part in enumerate(parts)
            for bucket in build_buckets(part, limits[0], limits[1], not recipe.bucket_elements)
        ]
        buckets.sort(key=lambda bucket: bucket.ready_after_op_id)
        if plan.offload == "optimizer" or plan.sums_shards:
            made = find_gradients(self.trace)
            work.bucket_storages = [frozenset(made.get(name, -1) for name in bucket.names) for bucket in buckets]
        return buckets

    def _find_first_readers(self, buckets: list[Bucket], in_stage: set[int]) -> dict[int, list[int]]:
        """Return the buckets whose weights each forward operator of a stage is the first to read."""
        bucket_of = {name: index for index, bucket in enumerate(buckets) for name in bucket.names}
        parameters = (p for p in list_parameters(self.trace) if p.name in bucket_of)
        left = {p.storage_id: bucket_of[p.name] for p in parameters}
        readers: dict[int, list[int]] = {}
        for row in (row for row in self.trace.rows if row.op_id in in_stage):
            if read := {left[at] for at in row.reads if at in left}:
                readers[row.op_id] = sorted(read)
                left = {at: index for at, index in left.items() if index not in read}
        return readers

    def _place_exchanges(
        self, exchanges_of: Mapping[int, Sequence[Exchange]], in_stage: set[int]
    ) -> dict[int, list[Exchange]]:
        """Return a stage's collectives beside operators with sizes and copies of each micro-batch."""
        placed: dict[int, list[Exchange]] = {}
        for op, exchanges in exchanges_of.items():
            for exchange in exchanges if op in in_stage else ():
                sizes = tuple(exchange.scale(factor) for factor in self.factors)
                copied = [exchange.copy_bytes(f) for f in self.factors if exchange.copied]
                one = structs.replace(exchange, sizes_bytes=sizes, copies_s=tuple(self.copies_s(copied)))
                placed.setdefault(op, []).append(one)
        return placed

    def _add_partial(self, work: StageWork, in_stage: set[int], names: frozenset[str]) -> None:
        """Size the sum, over tensor-parallel ranks, of gradients that each has of its own tokens."""
        sizes = [
            int(g["size_bytes"])
            for g in self.trace.facts.gradients
            if g["name"] in names and int(g["ready_after_op_id"]) in in_stage
        ]
        if sizes:
            shards = self.plan.shards if self.plan.shards_units else 1
            work.partial_bytes = sum(sizes) // shards
            work.partial_copy_s = self._elementwise_s("aten::copy_", [size // shards for size in sizes], 2, times=2)

    def _shard_units(self, stage_of: NDArray[np.int64], stage: int) -> list[UnitWork]:
        """Return the units of ``fully_shard`` in a stage and what they cost."""
        plan, steps = self.plan, self.schedule.micro_batches
        if plan.pipeline == 1:
            units = build_units(self.trace, plan.tensor, plan.expert_parts, plan.places_experts)
        else:
            units = build_stage_units(self.trace, plan, self.placed, stage_of, stage)
        return cost_units(units, plan, steps, self._elementwise_s, self.trace)

    def _add_stage_upkeep(self, work: StageWork) -> None:
        """Let a stage add whole gradients up, and divide the shards once they are reduced."""
        work.accumulate_s = sum(unit.accumulate_s for unit in work.units)
        sizes = [unit.kept_bytes for unit in work.units if unit.kept_bytes]
        if self.schedule.micro_batches > 1:
            work.scale_s = self._elementwise_s("aten::div_", sizes, 1)

    def _predict(self, name: str, sizes: Sequence[int], reads: int, times: int = 1) -> NDArray[np.float64]:
        """Predict an operator over some buffers, one by one, and remember how sure that is."""
        predicted = self.priced.predict_elementwise(name, sizes, reads)
        time_s: NDArray[np.float64] = predicted["time_s"]
        self.spread_s[0] += times * float((time_s - predicted["low_s"]).sum())
        self.spread_s[1] += times * float((predicted["high_s"] - time_s).sum())
        self.predicted |= bool(sizes)
        self.extrapolated |= bool(predicted["extrapolated"].any())
        return time_s

    def _elementwise_s(self, name: str, sizes: Sequence[int], reads: int, times: int = 1) -> float:
        """Predict one upkeep of gradients, all buffers together; what is written counts as read: a cache fetches it first."""
        return float(self._predict(name, sizes, reads, times).sum())

    def _of_buckets_s(self, name: str, buckets: Sequence[Bucket]) -> list[float]:
        """Predict an operator that reads and writes each gradient of some buckets, bucket by bucket."""
        each_s = self._predict(name, [size for bucket in buckets for size in bucket.sizes_bytes], 2)
        ends = np.cumsum([len(bucket.sizes_bytes) for bucket in buckets])
        return [float(of_bucket_s.sum()) for of_bucket_s in np.split(each_s, ends)[:-1]]

    def copies_s(self, sizes: Sequence[int]) -> list[float]:
        """Predict the copies of some buffers, one by one."""
        return [float(value) for value in self._predict("aten::copy_", sizes, 2)]

    def interval(self, operators_s: float) -> tuple[float, float]:
        """Return what predicted upkeep adds to the interval of a rank's compute, ``operators_s`` a micro-batch."""
        step_s = operators_s * self.schedule.micro_batches / self.plan.pipeline
        below, above = (spread / self.plan.pipeline / step_s for spread in self.spread_s)
        return max(1 - below, 0.01), 1 + above
