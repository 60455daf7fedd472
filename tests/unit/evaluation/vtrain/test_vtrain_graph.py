from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from trioflow.costmodel.collectives.model import CollectiveTime
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform, name_rank_node
from trioflow.parallel.schedules.build import build_schedule
from trioflow.parallel.schedules.table import BACKWARD, FORWARD
from trioflow_evaluation.vtrain.data import HALF_BYTES, PARTS
from trioflow_evaluation.vtrain.model import (
    _UPDATE_BYTES,
    FORMS,
    MESSAGE,
    NAMES,
    Form,
    StageTimes,
    StepModel,
    build_step,
    formula_of,
    list_parameters,
    name_values,
)
from vtrain_rows import REDUCES, make_rows

STEPS = [(p, m) for p in (1, 2, 4) for m in (1, 2, 4, 8)]


def test_fewer_micro_batches_than_stages_are_each_run_once() -> None:
    for rank, row in enumerate(build_schedule("1f1b", 4, 2).rows):
        kinds = Counter((action.kind, action.micro_batch) for action in row if action)
        assert kinds == Counter((kind, i) for kind in (FORWARD, BACKWARD) for i in range(2))
        assert row[0].stage == rank


@pytest.mark.parametrize(("pipeline", "micro_batches"), STEPS)
def test_equal_stages_without_messages_take_the_closed_form(
    pipeline: int, micro_batches: int
) -> None:
    formula = formula_of(pipeline, micro_batches)
    each = {"forward": 1.0, "backward": 2.0, "update": 0.25, MESSAGE: 0.0}
    times = np.array([[each[name.rstrip("0123456789")]] for name in formula.columns])
    assert formula.evaluate(times) == pytest.approx([(micro_batches + pipeline - 1) * 3 + 0.25])


def connect(ranks: int) -> Platform:
    nodes = [name_rank_node(rank) for rank in range(ranks)]
    links = tuple(Link(a, b, 1e12, 0.0) for a in nodes for b in nodes if a != b)
    return Platform("test", Device("test", "gpu", 1, {}), ranks, links)


class Cost:
    """All-reduces from the curves, messages at one rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def time_s(self, collective: str, ranks: int, message_bytes: int) -> CollectiveTime:
        time_s = message_bytes / self.rate
        if collective == "all_reduce":
            time_s = float(REDUCES.predict(ranks, np.array([message_bytes]))[0])
        return CollectiveTime(time_s, time_s, time_s, "measured")


def stage_times(model: StepModel, row: int, values: Mapping[str, float], form: Form) -> StageTimes:
    """Return the times of one row's stages, part by part: the twin of ``StepModel.predict``."""
    vector = np.array([[values[name] for name in NAMES]])
    shape = model.shape_of[row]
    parts = dict(zip(PARTS, model.time_parts(vector, form)[0, shape], strict=True))
    pipeline = int(model.rows["pipeline"].iloc[row])
    blocks = int(model.rows["layers"].iloc[row]) // pipeline
    times: dict[str, list[list[float]]] = {"forward": [], "backward": []}
    for direction, found in times.items():
        for stage in range(pipeline):
            operators = [parts[f"block_{direction}"]] * blocks
            ends = [parts[f"embedding_{direction}"]] * (stage == 0)
            head = [parts[f"head_{direction}"]] * (stage == pipeline - 1)
            found.append([*ends, *operators, *head][:: 1 if direction == "forward" else -1])
    held = model.parameters[row, :pipeline]
    return StageTimes(
        times["forward"],
        times["backward"],
        [_UPDATE_BYTES * count / values["update_rate"] for count in held],
        [int(HALF_BYTES * count) for count in held],
        int(model.work.shapes[shape].activation_bytes),
    )


def test_the_formula_is_the_engine_to_a_billionth() -> None:
    plans = ((1, 1, 1), (1, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4), (2, 2, 2), (1, 2, 4))
    rows = make_rows(hidden=(512,), layers=(4, 8), plans=plans, micro_batch=(1, 4))
    model = StepModel.build(rows, REDUCES)
    start = np.array([parameter.start for parameter in list_parameters()])
    assert len(rows) >= 50
    for form in FORMS[:1]:
        told = model.predict(start, form)
        for row, sizes in enumerate(rows.itertuples(index=False)):
            values = name_values(start)
            graph = build_step(
                stage_times(model, row, values, form), sizes.micro_batches, sizes.data, sizes.tensor
            )
            platform, cost = connect(sizes.gpus), Cost(values["message_rate"])
            result = simulate(graph, platform, cost, network="contention_free", engine="reference")
            assert result.summary.step_time_s == pytest.approx(told[row], rel=1e-9), sizes
