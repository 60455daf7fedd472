from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from trioflow import tables
from trioflow.base.errors import TableError
from trioflow.costmodel.collectives.model import CollectiveTime
from trioflow.costmodel.operators.precision import load_tensor_tables
from trioflow.engine.simulate import simulate
from trioflow.hardware.machine import Device, Link, Platform, name_rank_node
from trioflow.parallel.schedules.build import build_schedule
from trioflow.parallel.schedules.table import BACKWARD, FORWARD
from trioflow_evaluation.tables import CHECKS, PARAMETERS
from trioflow_evaluation.vtrain import judge as vtrain_fit
from trioflow_evaluation.vtrain.judge import (
    LEFT_OUT,
    calibrate,
    judge_rows,
    leave_out,
    predict_analytically,
    predict_ridge,
    predict_uncalibrated,
    sample_collectives,
)
from trioflow_evaluation.vtrain.model import (
    _UPDATE_BYTES,
    COLUMNS,
    DEVICE,
    FILE,
    GROUPS,
    HALF_BYTES,
    MESSAGE,
    NAMES,
    PARTS,
    PLANS,
    UNCALIBRATED,
    VOCABULARY,
    WAITS,
    AllReduceCurves,
    PartTimes,
    Shape,
    StepModel,
    build_step,
    check_composition,
    count_parameters,
    count_part,
    formula_of,
    index_shapes,
    list_fitted_parameters,
    predict_products,
    read_all_reduces,
    read_iteration_times,
    tabulate_work,
)
from vtrain_rows import REDUCES, make_rows, time_rows

START = list_fitted_parameters()["start"].to_numpy()


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    plans = ((1, 2, 1), (2, 1, 1), (1, 1, 2))
    return time_rows(make_rows(plans=plans, micro_batches=(2,)), 1.3 * START, WAITS[0])


@pytest.fixture(scope="module")
def judged(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vtrain_fit, "MOST_ROUNDS", 6)
        return judge_rows(rows, REDUCES, check_composition(rows, REDUCES))


def test_every_row_is_in_every_set_and_fits_the_schema(rows: pd.DataFrame, judged: dict[str, pd.DataFrame]) -> None:
    table = tables.to_arrow(judged["cases"], "published_cases")
    tables.validate(table, "published_cases")
    for name in (GROUPS, PLANS, UNCALIBRATED):
        mine = judged["cases"][judged["cases"]["set"] == name]
        assert len(mine) == len(rows) == mine["case"].nunique()
        assert mine["measured_s"].to_numpy() == pytest.approx(rows["measured_s"].to_numpy())


def test_what_was_left_out_stands_in_the_row(rows: pd.DataFrame, judged: dict[str, pd.DataFrame]) -> None:
    for name, columns in LEFT_OUT.items():
        mine = judged["cases"][judged["cases"]["set"] == name].reset_index(drop=True)
        for column in columns:
            named = mine["learned_from"].str.extract(rf"{column} (\d+)")[0].astype(int)
            assert (named == rows[column]).all()


def test_parameters_of_every_fold_are_listed(judged: dict[str, pd.DataFrame]) -> None:
    tables.validate(
        tables.to_arrow(judged["parameters"], "parameters", schema=PARAMETERS), "parameters", schema=PARAMETERS
    )
    folds = judged["parameters"].groupby(["set", "fold"]).size()
    assert (folds == len(START)).all()
    assert len(folds) == 1 + 4 + 3  # a fit on all rows, four models, three plans
    assert (judged["parameters"]["value"] >= judged["parameters"]["low"] * (1 - 1e-9)).all()
    assert (judged["parameters"]["value"] <= judged["parameters"]["high"] * (1 + 1e-9)).all()


def make_composed() -> tuple[pd.DataFrame, AllReduceCurves]:
    plans = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1))
    rows = make_rows(hidden=(512,), layers=(4,), plans=plans, micro_batches=(2, 4, 8))
    rows = time_rows(rows, START, WAITS[0])
    alone = rows[rows["data"] == 1].reset_index(drop=True)
    both = rows[rows["data"] == 2].reset_index(drop=True)
    added = both["measured_s"] - alone["measured_s"]
    table = AllReduceCurves({2: np.arange(1.0, len(added) + 1)}, {2: np.sort(added.to_numpy())})
    return rows, table


def test_a_sum_of_parts_is_told() -> None:
    rows, table = make_composed()
    checks = check_composition(rows, table)
    assert list(checks.columns) == CHECKS.names
    assert (checks["compared"] > 0).all()
    assert (checks["exact"] == checks["compared"]).all()


def test_noise_of_a_ten_thousandth_is_told_too() -> None:
    rows, table = make_composed()
    noise = np.random.default_rng(2).normal(1.0, 1e-4, len(rows))
    checks = check_composition(rows.assign(measured_s=rows["measured_s"] * noise), table)
    assert (checks["exact"] < checks["compared"]).all()
    assert (checks["worst_s"] > 1e-9).all()


def test_rows_without_pairs_are_nothing_to_compare() -> None:
    rows = make_rows(hidden=(512,), layers=(4,), plans=((1, 4, 1),))
    assert (check_composition(rows, REDUCES)["compared"] == 0).all()


ROW = "8,32,4,1024,16,24,1024,2,2,2,219.732754"
CURVES = AllReduceCurves({2: np.array([1e6, 2e6])}, {2: np.array([1e-3, 3e-3])})


def write_rows(folder: Path, *rows: str, header: str = ",".join(COLUMNS)) -> Path:
    path = folder / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([header, *rows]).encode())
    return folder


def test_rows_are_read_in_seconds_behind_the_byte_order_mark(tmp_path: Path) -> None:
    rows = read_iteration_times(write_rows(tmp_path, ROW))
    assert rows.loc[0, "measured_s"] == pytest.approx(0.219732754, rel=1e-12)
    assert rows.loc[0, "gpus"] == 8 and rows.loc[0, "micro_batches"] == 4


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (ROW.replace("8,32", "4,32"), "number of GPUs"),
        (ROW.replace("8,32", "8,33"), "whole number of micro-batches"),
        (ROW.replace("16,24,1024", "16,23,1024"), "fill the stages"),
        (ROW.replace("219.732754", "0"), "not positive"),
    ],
)
def test_an_impossible_row_is_refused_with_its_number(tmp_path: Path, row: str, problem: str) -> None:
    with pytest.raises(TableError, match=problem) as caught:
        read_iteration_times(write_rows(tmp_path, ROW, row))
    assert "row 1" in str(caught.value)


def test_a_missing_file_or_column_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="retrieve vtrain"):
        read_iteration_times(tmp_path)
    with pytest.raises(TableError, match="no column # layers"):
        read_iteration_times(write_rows(tmp_path, ROW, header=",".join(COLUMNS).replace("# layers", "depth")))
    with pytest.raises(TableError, match="no such file"):
        read_all_reduces(tmp_path)


def test_all_reduces_lie_on_a_line_and_keep_the_last_bandwidth() -> None:
    times = CURVES.predict(2, np.array([0.5e6, 1.5e6, 8e6]))
    assert times == pytest.approx([1e-3, 2e-3, 12e-3])
    assert CURVES.predict(1, np.array([1e6])) == pytest.approx([0.0])


def test_more_ranks_than_measured_are_extrapolated_and_less_certain() -> None:
    most = max(CURVES.sizes_bytes)
    size = np.array([1e6])
    times = [float(CURVES.predict(ranks, size)[0]) for ranks in (most, 2 * most, 8 * most)]
    assert times[0] < times[1] < times[2]
    assert CURVES.widen(most) == CURVES.widen(2) == 1.0 < CURVES.widen(2 * most)


FITTED = list(list_fitted_parameters().itertuples())
TRUTH = np.array([1.2, 1.1e12, 1.5e-5, 4e-5, 6e-6, 1.2e-5, 2.5e-4, 2.5, 1.5e10, 1.4e12])
FORM = WAITS[0]


@pytest.fixture(scope="module")
def model() -> StepModel:
    rows = make_rows(hidden=(512, 2048), layers=(4, 8), micro_batch=(1, 8))
    return StepModel.build(time_rows(rows, TRUTH, FORM), REDUCES)


def test_there_are_ten_parameters_inside_their_limits() -> None:
    assert len(NAMES) == len(set(NAMES)) == 10 == len(TRUTH)
    assert all(p.low <= p.start <= p.high for p in FITTED)


def test_calibration_recovers_what_made_the_times(model: StepModel) -> None:
    found = calibrate(model, np.arange(len(model.rows)), [FORM])
    assert found.training_error < 1e-4
    assert found.values == pytest.approx(TRUTH, rel=0.02)


def test_the_wait_that_made_the_times_is_chosen_and_recomputation_never_is(model: StepModel) -> None:
    assert calibrate(model, np.arange(len(model.rows))).wait == FORM


def test_more_ranks_than_measured_have_wider_intervals(model: StepModel) -> None:
    groups = np.asarray(model.rows.groupby("layers").ngroup())
    wide, _ = leave_out(replace(model, widen=2.0 * model.widen), groups, [FORM])
    told, _ = leave_out(model, groups, [FORM])
    assert wide.predicted_s.to_numpy() == pytest.approx(told.predicted_s.to_numpy())
    widths = [np.log(one.high_s / one.predicted_s).to_numpy() for one in (wide, told)]
    assert widths[0] == pytest.approx(2 * widths[1])


def test_only_known_rows_are_looked_at(model: StepModel) -> None:
    known = np.flatnonzero(model.rows["layers"] == 4)
    spoilt = replace(model, rows=model.rows.copy())
    spoilt.rows.loc[spoilt.rows["layers"] == 8, "measured_s"] = 77.0
    clean, dirty = (calibrate(one, known, [FORM]) for one in (model, spoilt))
    assert (clean.values == dirty.values).all()


def test_what_no_known_row_depends_on_stays_where_it_starts(model: StepModel) -> None:
    known = np.flatnonzero(model.rows["tensor"] <= 2)
    found = dict(zip(NAMES, calibrate(model, known, [FORM]).values, strict=True))
    start = {p.name: p.start for p in FITTED}
    assert found["host_sockets_s"] == pytest.approx(start["host_sockets_s"], rel=1e-12)
    assert found["host_tensor_s"] == pytest.approx(6e-6, rel=0.02)


def test_left_out_groups_are_predicted_with_intervals(model: StepModel) -> None:
    groups = np.asarray(model.rows.groupby("layers").ngroup())
    judged, calibrations = leave_out(model, groups, [FORM])
    measured = model.rows["measured_s"].to_numpy()
    assert judged.predicted_s.to_numpy() == pytest.approx(measured, rel=1e-3)
    assert (judged.low_s <= judged.predicted_s).all() and (judged.high_s >= judged.predicted_s).all()
    assert set(calibrations) == {0, 1}
    assert np.isfinite(judged.oracle_s).all()


def test_an_anchor_takes_a_shapes_own_error_away(model: StepModel) -> None:
    odd = (model.rows["hidden"] == 512) & (model.rows["tensor"] == 2)
    times = model.rows["measured_s"] * np.where(odd, 1.3, 1.0)
    bent = replace(model, rows=model.rows.assign(measured_s=times))
    judged, _ = leave_out(bent, np.asarray(bent.rows.groupby("layers").ngroup()), [FORM])
    error = np.abs(judged.predicted_s / times - 1)[odd].mean()
    anchored = np.abs(judged.oracle_s / times - 1)[odd].mean()
    assert anchored < 0.5 * error


def test_a_shape_that_nobody_knows_has_no_anchor(model: StepModel) -> None:
    groups = np.asarray(model.rows["tensor"] == 8, dtype=np.int64)
    judged, _ = leave_out(model, groups, [FORM])
    eight = groups == 1
    assert np.isnan(judged.oracle_s[eight]).all()
    assert (judged.high_s[eight] >= judged.low_s[eight]).all()


def test_widths_come_from_rows_that_an_inner_loop_left_out(model: StepModel, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(1).normal(0, 0.1, len(model.rows))
    noisy = replace(model, rows=model.rows.assign(measured_s=model.rows["measured_s"] * np.exp(noise)))
    groups = np.random.default_rng(3).permutation(len(model.rows)) % 4
    monkeypatch.setattr(vtrain_fit, "FEWEST", 10**6)
    monkeypatch.setattr(vtrain_fit, "MOST_ROUNDS", 15)
    judged, _ = leave_out(noisy, groups, [FORM])
    measured = noisy.rows["measured_s"].to_numpy()
    inside = ((judged.low_s <= measured) & (measured <= judged.high_s)).mean()
    assert 0.65 < inside < 0.97
    widths = np.log(judged.high_s / judged.low_s)
    assert 0.2 < np.median(widths) < 0.5  # of the noise alone: 2 x 1.28 x 0.1


STEPS = [(p, m) for p in (1, 2, 4) for m in (1, 2, 4, 8)]


def test_fewer_micro_batches_than_stages_are_each_run_once() -> None:
    for rank, row in enumerate(build_schedule("1f1b", 4, 2).rows):
        kinds = Counter((action.kind, action.micro_batch) for action in row if action)
        assert kinds == Counter((kind, i) for kind in (FORWARD, BACKWARD) for i in range(2))
        assert row[0].stage == rank


@pytest.mark.parametrize(("pipeline", "micro_batches"), STEPS)
def test_equal_stages_without_messages_take_the_closed_form(pipeline: int, micro_batches: int) -> None:
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


def stage_times(model: StepModel, row: int, values: Mapping[str, float], form: str) -> PartTimes:
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
    return PartTimes(
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
    start = START
    assert len(rows) >= 50
    for form in WAITS[:1]:
        told = model.predict(start, form)
        for row, sizes in enumerate(rows.itertuples(index=False)):
            values = dict(zip(NAMES, start, strict=True))
            graph = build_step(stage_times(model, row, values, form), sizes.micro_batches, sizes.data, sizes.tensor)
            platform, cost = connect(sizes.gpus), Cost(values["message_rate"])
            result = simulate(graph, platform, cost, network="contention_free", engine="reference")
            assert result.summary.step_time_s == pytest.approx(told[row], rel=1e-9), sizes


SHAPE = Shape(hidden=1024, heads=16, sequence=512, tensor=1, micro_batch=2)


def count_flop(shape: Shape, part: str) -> int:
    return sum(2 * b * m * n * k for b, m, n, k in count_part(shape, part).products)


def test_a_block_has_the_flops_of_its_closed_form() -> None:
    tokens, hidden = SHAPE.tokens, SHAPE.hidden
    expected = 24 * tokens * hidden**2 + 4 * tokens * SHAPE.sequence * hidden
    assert count_flop(SHAPE, "block_forward") == expected
    assert count_flop(SHAPE, "block_backward") == 2 * expected


@pytest.mark.parametrize("part", PARTS)
def test_tensor_ranks_share_the_products_and_not_the_normalisations(part: str) -> None:
    whole, shard = count_part(SHAPE, part), count_part(replace(SHAPE, tensor=4), part)
    flop = count_flop(replace(SHAPE, tensor=4), part)  # padding of the vocabulary apart
    assert flop == pytest.approx(count_flop(SHAPE, part) / 4, rel=0.01)
    assert shard.moved_bytes <= whole.moved_bytes
    if part.startswith("block"):
        assert shard.moved_bytes > whole.moved_bytes / 4
    assert whole.all_reduces == 0 and shard.launches == whole.launches


def test_a_block_adds_up_activations_twice_in_either_direction() -> None:
    shape = replace(SHAPE, tensor=2)
    assert [count_part(shape, part).all_reduces for part in PARTS] == [2, 2, 1, 0, 0, 1]
    assert shape.activation_bytes == 2 * 1024 * 1024


def test_the_vocabulary_is_filled_up_on_every_rank() -> None:
    for tensor in (1, 2, 4, 8):
        shard = replace(SHAPE, tensor=tensor).vocabulary
        assert shard % 128 == 0
        assert 0 <= shard * tensor - VOCABULARY < 128 * tensor


def test_products_take_longer_with_more_samples() -> None:
    table = load_tensor_tables().tables[DEVICE]
    shapes = [SHAPE, replace(SHAPE, micro_batch=4)]
    work = tabulate_work(shapes, table)
    block = PARTS.index("block_forward")
    assert work.product_s[0, block] < work.product_s[1, block] < 2.2 * work.product_s[0, block]
    assert predict_products([], table) == 0.0
    one = predict_products([(1, 1024, 1024, 1024)], table)
    assert predict_products([(1, 1024, 1024, 1024)] * 3, table) == pytest.approx(3 * one)


def test_stages_hold_every_block_once_and_the_ends_their_tables() -> None:
    rows = make_rows(hidden=(1024,), layers=(8,), plans=((1, 1, 1), (1, 1, 2), (2, 1, 2)))
    held = count_parameters(rows)
    table = replace(SHAPE, tensor=1).vocabulary * 1024
    blocks = 8 * (12 * 1024**2 + 13 * 1024)
    of = rows["tensor"] * 10 + rows["pipeline"]
    assert held[of == 11] == pytest.approx(blocks + 2 * table) or held.shape[1] == 2
    assert held[of == 11, 0] == pytest.approx(blocks + 2 * table)
    assert (held[of == 11, 1] == 0).all()
    assert held[of == 12] == pytest.approx(blocks / 2 + table)
    shard = replace(SHAPE, tensor=2).vocabulary * 1024
    assert held[of == 22] == pytest.approx(blocks / 4 + shard)


def test_rows_are_sorted_into_their_shapes() -> None:
    rows = make_rows()
    shapes, place = index_shapes(rows)
    assert len(shapes) == len(set(shapes)) == 2 * 3 * 2
    for number in (0, 7, len(rows) - 1):
        shape = shapes[place[number]]
        assert (shape.hidden, shape.tensor, shape.micro_batch) == tuple(
            rows.loc[number, ["hidden", "tensor", "micro_batch"]]
        )


def test_a_ridge_follows_a_power_law_and_sees_known_rows_alone() -> None:
    rows = make_rows(hidden=(512, 1024, 2048), layers=(4, 8, 16))
    law = 1e-6 * rows["hidden"] ** 1.5 * rows["layers"] * rows["micro_batches"]
    rows = rows.assign(measured_s=law)
    groups, left_out = np.asarray(rows.groupby("layers").ngroup()), rows["layers"] == 8
    predicted_s = predict_ridge(rows, groups)
    assert predicted_s[left_out] == pytest.approx(law[left_out].to_numpy(), rel=0.1)
    spoilt = rows.assign(measured_s=np.where(left_out, 77.0, law))
    assert (predict_ridge(spoilt, groups)[left_out] == predicted_s[left_out]).all()


def test_unfitted_models_grow_with_the_work() -> None:
    rows = make_rows()
    for predict in (predict_uncalibrated, predict_analytically):
        deep = predict(rows.assign(layers=rows["layers"] * 2), WAITS[0])
        assert (deep > predict(rows, WAITS[0])).all()


def test_peak_rates_are_faster_than_measured_products() -> None:
    rows = make_rows(plans=((1, 1, 2),), micro_batch=(4,))
    assert (predict_analytically(rows, WAITS[0]) < predict_uncalibrated(rows, WAITS[0])).all()


def test_shipped_collectives_become_rising_curves() -> None:
    class Line:
        def time_s(self, collective: str, ranks: int, size: float) -> object:
            assert collective == "all_reduce"
            return type("Told", (), {"time_s": 1e-5 + ranks * size / 1e11})()

    curves = sample_collectives(Line(), [1, 2, 8])  # type: ignore[arg-type]
    assert set(curves.sizes_bytes) == {2, 8}
    assert curves.predict(8, np.array([1e8]))[0] == pytest.approx(1e-5 + 8e-3, rel=1e-3)
