"""Measured curves of collectives.

Collectives measured over whole nodes: the public figure, what ships of it, and the times it gives.

Forms of operator cost and the classes that share them.
"""

import json
import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from mirror import find_public
from msgspec import structs
from trioflow import tables
from trioflow.base.errors import InputError, TableError
from trioflow.costmodel.collectives.model import (
    NODES_FILE,
    CollectiveCostModel,
    NodeCurve,
    count_steps,
    find_between_nodes,
    load_collective_model,
    wire_factor,
)
from trioflow.costmodel.collectives.platform import load_platform_collectives
from trioflow.costmodel.features import SHIPPED_MODELS
from trioflow.costmodel.fits.collectives import fit_collective_model
from trioflow.costmodel.fits.curves import fit_class_curves, fit_curve
from trioflow.costmodel.fits.operators import LEFT_OUT_OPERATORS, fit_bands, fit_step_band
from trioflow.costmodel.operators.curves import ANY, find_class
from trioflow.costmodel.uncertainty import ASSUMED_FACTOR, NEAREST_DISTANCE, WIDEST_FACTOR, Band, find_band
from trioflow.datasets.catalogue import NODE_BANDWIDTHS, load_catalogue
from trioflow.hardware.platform import load_platform
from trioflow.network.across_nodes import NodeGroups
from trioflow.network.routing import Router
from trioflow_evaluation.fits.collectives import (
    NODE_RATES,
    NODES_PLATFORM,
    SLOW_NODES,
    build_between_nodes,
    name_network,
    read_node_bandwidths,
)

# Medians of a gloo all_reduce over two ranks, with the knee that one line misses (FACTS 13).
GLOO_NS = {1024: 340_000, 1 << 20: 1_600_000, 25 << 20: 29_000_000, 100 << 20: 115_000_000}


def make_samples(
    times_ns: dict[int, int], collective: str = "all_reduce", ranks: int = 2, spread: float = 0.1
) -> pd.DataFrame:
    rows = [
        {
            "platform": "here",
            "library": "gloo 2.13.0",
            "collective": collective,
            "ranks": ranks,
            "message_bytes": size,
            "round": repeat,
            "time_ns": round(time_ns * factor),
        }
        for size, time_ns in times_ns.items()
        for repeat, factor in enumerate((1.0, 1.0 - spread, 1.0 + spread))
    ]
    return pd.DataFrame(rows, columns=tables.COLLECTIVE_SAMPLES.names)


@pytest.fixture
def model() -> CollectiveCostModel:
    return fit_collective_model(make_samples(GLOO_NS))


def test_measured_sizes_return_their_medians(model: CollectiveCostModel) -> None:
    for size, time_ns in GLOO_NS.items():
        found = model.time_s("all_reduce", 2, size)
        assert found.time_s == pytest.approx(time_ns * 1e-9, rel=1e-12)
        assert found.confidence == "measured"
        # 10 and 90 % of {0.9, 1, 1.1}
        assert found.low_s == pytest.approx(found.time_s * 0.92, rel=1e-3)
        assert found.high_s == pytest.approx(found.time_s * 1.08, rel=1e-3)


def test_confidence_follows_the_measured_range(model: CollectiveCostModel) -> None:
    inside = model.time_s("all_reduce", 2, 4 << 20)
    assert inside.confidence == "interpolated"
    assert GLOO_NS[1 << 20] * 1e-9 < inside.time_s < GLOO_NS[25 << 20] * 1e-9
    assert inside.low_s < inside.time_s < inside.high_s
    below = model.time_s("all_reduce", 2, 8)
    assert (below.time_s, below.confidence) == (GLOO_NS[1024] * 1e-9, "extrapolated")
    above = model.time_s("all_reduce", 2, 200 << 20)
    slope = (115e-3 - 29e-3) / (75 << 20)
    assert above.time_s == pytest.approx(115e-3 + slope * (100 << 20))
    assert above.confidence == "extrapolated"


def test_interpolation_with_the_smaller_left_out_error_wins() -> None:
    line = {2**k: 50_000 + 2**k for k in range(8, 28, 3)}
    assert fit_collective_model(make_samples(line)).interpolation == "linear"
    power = {4**k: round(1000 * 4 ** (0.6 * k)) for k in range(4, 13)}
    assert fit_collective_model(make_samples(power)).interpolation == "log"


def test_sizes_that_were_lost_in_noise_are_not_measured() -> None:
    lost = make_samples({1000: 1, 64_000: 400_000, 10**6: 10**6}, spread=0.0)
    model = fit_collective_model(lost)
    assert list(model.curves["all_reduce", 2].message_bytes) == [64_000, 10**6]
    found = model.time_s("all_reduce", 2, 1000)
    assert (found.time_s, found.confidence) == (pytest.approx(4e-4), "extrapolated")
    once = lost.assign(time_ns=lost["time_ns"].where(lost["round"] == 0, 300_000))
    assert 1000 in fit_collective_model(once).curves["all_reduce", 2].message_bytes


def test_flat_end_extends_with_the_last_rising_slope() -> None:
    model = fit_collective_model(make_samples({1000: 100_000, 2000: 300_000, 3000: 200_000}))
    at_end = model.time_s("all_reduce", 2, 3000).time_s
    assert model.time_s("all_reduce", 2, 6000).time_s > at_end


def test_unmeasured_group_is_derived_by_wire_bytes(model: CollectiveCostModel) -> None:
    # Four ranks: 2*3/4 against 2*1/2 of the message on the wire, six steps against two.
    size = 10 << 20
    base = model.time_s("all_reduce", 2, 1.5 * size)
    latency_s = GLOO_NS[1024] * 1e-9
    found = model.time_s("all_reduce", 4, size)
    assert found.time_s == pytest.approx(base.time_s + 2 * latency_s)
    assert found.confidence == "uncalibrated"
    assert found.low_s <= found.time_s / 2
    assert found.high_s >= found.time_s * 2


def test_one_rank_moves_nothing(model: CollectiveCostModel) -> None:
    assert model.time_s("all_reduce", 1, 1 << 30).time_s == 0.0


@pytest.mark.parametrize(
    ("collective", "ranks", "size", "text"),
    [
        ("all_fuse", 2, 10, "unknown collective 'all_fuse'"),
        ("all_reduce", 0, 10, "0 ranks"),
        ("all_reduce", 2, -1, "-1 bytes"),
        ("all_reduce", 2, math.nan, "nan bytes"),
    ],
)
def test_impossible_questions_are_refused(
    model: CollectiveCostModel, collective: str, ranks: int, size: float, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        model.time_s(collective, ranks, size)


def test_nothing_to_derive_from_is_an_error() -> None:
    with pytest.raises(InputError, match="no collective was measured"):
        CollectiveCostModel("here", "gloo", "log", {}).time_s("all_reduce", 2, 10)


def test_wire_factors_and_steps() -> None:
    assert wire_factor("all_reduce", 8) == pytest.approx(1.75)
    assert wire_factor("reduce_scatter", 4) == wire_factor("all_gather", 4) == 0.75
    assert wire_factor("send", 2) == wire_factor("broadcast", 5) == 1.0
    assert [count_steps(c, 5) for c in ("all_reduce", "all_gather", "broadcast", "send")] == [8, 4, 3, 1]
    assert (count_steps("broadcast", 8), count_steps("broadcast", 8, chain=True)) == (3, 7)
    assert count_steps("send", 1) == count_steps("reduce", 1) == 0


@pytest.mark.parametrize(
    ("column", "value", "error", "text"),
    [
        ("collective", "all_fuse", TableError, "row 2, column collective"),
        ("ranks", 1, TableError, "row 2, column ranks: 1 is below 2"),
        ("message_bytes", -5, TableError, "row 2, column message_bytes"),
        ("time_ns", 0, TableError, "row 2, column time_ns"),
        ("platform", "elsewhere", InputError, "platform in one fit: elsewhere, here"),
        ("library", "nccl 2", InputError, "several values of library"),
    ],
)
def test_bad_samples_are_named(column: str, value: object, error: type[InputError], text: str) -> None:
    samples = make_samples(GLOO_NS)
    samples.loc[2, column] = value
    with pytest.raises(error, match=text):
        fit_collective_model(samples)


def test_empty_and_incomplete_samples_are_refused() -> None:
    with pytest.raises(InputError, match="no collective sample"):
        fit_collective_model(tables.empty("collective_samples"))
    with pytest.raises(TableError, match="no column ranks"):
        fit_collective_model(make_samples(GLOO_NS).drop(columns="ranks"))


def test_save_and_load_give_the_same_model_and_bytes(model: CollectiveCostModel, tmp_path: Path) -> None:
    samples = tmp_path / "samples.csv"
    samples.write_text("one input\n")
    model.save(tmp_path / "a.json", inputs=[samples])
    again = load_collective_model(tmp_path / "a.json")
    again.save(tmp_path / "b.json", inputs=[samples])
    shuffled = make_samples(GLOO_NS).sample(frac=1.0, random_state=3)
    fit_collective_model(shuffled).save(tmp_path / "c.json", inputs=[samples])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "c.json").read_bytes()
    for size in (8, 1024, 5000, 3 << 20, 500 << 20):
        assert again.time_s("all_reduce", 2, size) == model.time_s("all_reduce", 2, size)
        assert again.time_s("send", 2, size) == model.time_s("send", 2, size)
    provenance = json.loads((tmp_path / "a.json").read_text())["provenance"]
    assert list(provenance["inputs"]) == [f"{tmp_path.name}/samples.csv"]


def test_damaged_files_are_named(model: CollectiveCostModel, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with pytest.raises(InputError, match="no such file"):
        load_collective_model(path)
    path.write_text('{"kind": "other"}')
    with pytest.raises(InputError, match=r"model\.json: not a collective cost model"):
        load_collective_model(path)
    model.save(path)
    content = json.loads(path.read_text())
    content["curves"][0]["time_s"][0] = 9.0
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="not ascending"):
        load_collective_model(path)
    path.write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(InputError, match="format 99"):
        load_collective_model(path)
    del content["curves"]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match="curves"):
        load_collective_model(path)


SIZE = 256_000_000


@pytest.mark.parametrize("name", [NODES_PLATFORM, SLOW_NODES])
def test_what_ships_is_what_the_jobs_measured(name, mirror, tmp_path):
    find_public(NODE_BANDWIDTHS)
    built = build_between_nodes(mirror, tmp_path / NODES_FILE, name)
    assert built.read_bytes() == (SHIPPED_MODELS / name / NODES_FILE).read_bytes()


def test_jobs_are_told_apart_by_what_a_step_of_their_rings_takes(tmp_path):
    """Two jobs on the fast network, one on the slow one, one without NVLink, one on a node."""
    file = tmp_path / load_catalogue().select_files(NODE_BANDWIDTHS)[0].key
    file.parent.mkdir(parents=True)
    with pytest.raises(InputError, match="no runs of nanotron"):
        read_node_bandwidths(tmp_path, NODES_PLATFORM)
    jobs = [(1, 250.0), (16, 120.0), (16, 130.0), (16, 27.0), (16, 20.0)]
    table = pd.DataFrame(jobs, columns=["nodes", "AllGather (GB/s)"])
    for names in NODE_RATES.values():
        table[names[1]] = table["AllGather (GB/s)"]
        table[names[0]] = [250.0, 250.0, 250.0, 250.0, 42.0]
    table.to_csv(file, index=False)
    wire_bytes = 256e6 * 127 / 128
    for name, rate in ((NODES_PLATFORM, 125e9), (SLOW_NODES, 27e9)):
        found = read_node_bandwidths(tmp_path, name)
        assert found.curves["all_gather"].nodes == (1, 16)
        assert found.curves["all_gather"].time_s[1] == pytest.approx(wire_bytes / rate, rel=1e-5)
        assert found.curves["all_reduce"].time_s[1] == pytest.approx(2 * wire_bytes / rate, rel=1e-5)
    assert [name_network(nodes, 42.0 if rate == 20 else 250.0, rate) for nodes, rate in jobs] == [
        "one node",
        "fast",
        "fast",
        "slow",
        "no NVLink",
    ]
    table.drop(columns="AllReduce (GB/s)").to_csv(file, index=False)
    with pytest.raises(InputError, match="no column 'AllReduce"):
        read_node_bandwidths(tmp_path, NODES_PLATFORM)


@cache
def load_cluster(name=SLOW_NODES):
    platform = load_platform(name, 512)
    path = SHIPPED_MODELS / str(platform.node_collectives) / "collectives.json"
    return platform, load_platform_collectives(path), Router(platform.links)


def plan(collective, size, nodes, per_node=8, measured=None):
    groups = NodeGroups(*load_cluster())
    if measured is not None:
        groups._measured = measured
    group = tuple(8 * node + place for node in range(nodes) for place in range(per_node))
    assert groups.holds(group)
    return groups.plan(collective, size, group).time


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_measured_node_counts_are_met_and_left_out_ones_held_by_the_band(collective):
    measured = find_between_nodes(SLOW_NODES)
    curve = measured.curves[collective]
    errors = []
    for place, nodes in enumerate(curve.nodes[1:], start=1):
        found = plan(collective, SIZE, nodes)
        assert found.time_s == pytest.approx(curve.time_s[place], rel=1e-6)
        assert found.low_s <= 1.01 * curve.low_s[place] or collective == "all_reduce"
        assert found.high_s >= 0.99 * curve.high_s[place]
        assert found.confidence == "interpolated"
        if 1 < place < len(curve.nodes) - 1:
            kept = [
                tuple(v for n, v in enumerate(values) if n != place)
                for values in (curve.nodes, curve.time_s, curve.low_s, curve.high_s)
            ]
            cut = structs.replace(measured, curves={**measured.curves, collective: NodeCurve(*kept)})
            left_out = plan(collective, SIZE, nodes, measured=cut)
            errors.append(abs(left_out.time_s / curve.time_s[place] - 1))
            assert left_out.low_s <= curve.time_s[place] <= left_out.high_s
    assert sum(errors) / len(errors) < 0.2


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
def test_times_grow_with_size_nodes_and_ranks_sharing_a_card(collective):
    for nodes, per_node in ((2, 1), (4, 8), (64, 2)):
        times = [plan(collective, size, nodes, per_node) for size in (1000, 10**6, SIZE, 10**9)]
        assert all(a.time_s < b.time_s for a, b in pairwise(times))
        assert all(one.low_s <= one.time_s <= one.high_s for one in times)
        more = plan(collective, SIZE, min(2 * nodes, 64), per_node)
        assert more.time_s >= times[2].time_s
    assert plan(collective, SIZE, 8, 4).confidence == "extrapolated"


def test_what_was_measured_with_one_size_is_a_network_for_all() -> None:
    """A gather's hops cost as much whatever they carry; a tree's all-reduce grows with its bytes."""
    assert 0.4 < plan("all_gather", 17 * 10**6, 2).time_s / plan("all_gather", SIZE, 2).time_s < 0.7
    assert plan("all_gather", 5 * 10**6, 64).time_s > 0.8 * plan("all_gather", SIZE, 64).time_s
    measured = find_between_nodes(NODES_PLATFORM)
    for time_s, least, most in ((3e-3, 0.0, 0.25), (10e-3, 0.85, 1.0)):  # a tree's, a ring's
        curve = NodeCurve((1, 16), *((1e-3, time_s) for _ in range(3)))
        cut = structs.replace(measured, curves={**measured.curves, "all_reduce": curve})
        whole, part = (plan("all_reduce", size, 16, measured=cut) for size in (SIZE, SIZE // 16))
        assert whole.time_s == pytest.approx(time_s) and least < part.time_s / time_s < most
    small = plan("all_gather", SIZE // 16, 8)
    assert small.high_s / small.low_s > plan("all_gather", SIZE, 8).high_s / plan("all_gather", SIZE, 8).low_s


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_the_fast_network_is_met_but_for_what_its_nodes_gather_faster_than_a_measured_one(collective):
    """In a loop of collectives, as they were measured, while nobody trains."""
    platform, *others = load_cluster(NODES_PLATFORM)
    groups = NodeGroups(replace(platform, corrections={}), *others)
    curve = find_between_nodes(NODES_PLATFORM).curves[collective]
    for nodes, time_s in zip(curve.nodes[1:], curve.time_s[1:], strict=True):
        group = tuple(range(8 * nodes))
        assert groups.holds(group)
        assert groups.plan(collective, SIZE, group).time.time_s == pytest.approx(time_s, rel=0.16)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
def test_more_nodes_than_were_measured_are_extrapolated_and_wider_than_held_out_ones(collective):
    """Each measured count is told from half as many nodes; the worst miss of those is what a doubling may cost."""
    measured = find_between_nodes(SLOW_NODES)
    curve, missed = measured.curves[collective], []
    for last in range(2, len(curve.nodes)):
        kept = NodeCurve(*(v[:last] for v in (curve.nodes, curve.time_s, curve.low_s, curve.high_s)))
        cut = structs.replace(measured, curves={**measured.curves, collective: kept})
        found = plan(collective, SIZE, curve.nodes[last], measured=cut)
        assert found.confidence == "extrapolated"
        missed.append(abs(math.log(curve.time_s[last] / found.time_s)))
    most = curve.nodes[-1]
    inside = plan(collective, SIZE, most)
    assert inside.confidence == "interpolated" and max(missed) > 0.05
    for nodes in (most + 1, 2 * most, 4 * most):
        group = tuple(range(8 * nodes))
        platform = load_platform(SLOW_NODES, 8 * nodes)
        beyond = NodeGroups(platform, load_cluster()[1], Router(platform.links)).plan(collective, SIZE, group)
        assert beyond.time.confidence == "extrapolated" and f"over up to {most} nodes" in beyond.warning
        doublings = max(math.log2(nodes / most), 1)
        assert math.log(beyond.time.high_s / beyond.time.time_s) >= 0.99 * doublings * max(missed)
        assert beyond.time.high_s / beyond.time.time_s > inside.high_s / inside.time_s


def test_clusters_that_nobody_measured_stay_with_their_links():
    assert find_between_nodes("dgx-h100") is None and find_between_nodes("") is None


RANDOM = np.random.default_rng(5)
SIZES = np.exp(RANDOM.uniform(5, 20, size=(60, 3)))


def make_rows(entries: list[tuple[str, str, float, float]]) -> pd.DataFrame:
    """Rows of (class, phase, bytes, seconds)."""
    frame = pd.DataFrame(entries, columns=["operator_class", "phase", "read_bytes", "time_s"])
    return frame.assign(flop=0.0, write_bytes=0.0)


def test_linear_recovers_slopes_and_never_goes_negative() -> None:
    times = 3e-6 + SIZES @ np.array([1e-12, 2e-10, 5e-10])
    curve = fit_curve("linear", SIZES, times)
    assert curve.coefficients == pytest.approx([3e-6, 1e-12, 2e-10, 5e-10], rel=1e-6)
    falling = fit_curve("linear", SIZES, 1e-3 / SIZES[:, 0])
    assert min(falling.coefficients) >= 0


def test_roofline_takes_the_larger_of_compute_and_memory() -> None:
    data = SIZES[:, 1] + SIZES[:, 2]
    times = 5e-6 + np.maximum(SIZES[:, 0] * 2e-11, data * 1e-10)
    curve = fit_curve("roofline", SIZES, times)
    assert curve.predict(SIZES) == pytest.approx(times, rel=1e-6)
    summed = fit_curve("linear", SIZES, times)
    assert np.abs(summed.predict(SIZES) / times - 1).max() > 0.05


def test_rare_class_borrows_the_shape_and_keeps_its_level() -> None:
    common = [("gemm", "forward", size, 1e-5 + 1e-9 * size) for size in (1e3, 1e4, 1e5, 1e6)]
    curves = fit_class_curves(make_rows([*common, ("norm", "forward", 1e5, 1e-3)]), "linear")
    rare = curves["norm", "forward"]
    assert (rare.shape_of, rare.rows) == ("* forward", 1)
    sizes = np.array([[0.0, 1e5, 0.0], [0.0, 2e5, 0.0]])
    at_size, at_double = rare.predict(sizes)
    assert at_size == pytest.approx(1e-3)
    assert 1e-3 < at_double < 2e-3


def test_a_class_without_a_curve_takes_the_one_most_alike() -> None:
    sizes = (1e3, 1e4, 1e5, 1e6)
    rows = [
        (name, phase, size, 1e-9 * size)
        for size in sizes
        for name, phase in (("memory", "forward"), ("gemm", "forward"), ("gemm", "backward"))
    ]
    curves = fit_class_curves(make_rows(rows), "linear")
    for asked, taken in (
        (("memory", "backward"), ("memory", "forward")),
        (("reshape", "backward"), ("memory", "forward")),
        (("convolution_backward/dense", "backward"), ("gemm", "backward")),
        (("norm", "backward"), (ANY, "backward")),
        (("memory", "optimizer"), (ANY, ANY)),
    ):
        assert find_class(curves, *asked)[0] == taken


def held(residuals: list[float], operator_class: str = "gemm") -> pd.DataFrame:
    return pd.DataFrame(
        {
            "workload": "w",
            "trace": 0,
            "operator_class": operator_class,
            "phase": "forward",
            "time_s": np.exp(residuals) * 1e-3,
            "held_out_s": 1e-3,
        }
    )


def test_bands_are_quantiles_around_zero_and_fall_back() -> None:
    residuals = list(np.linspace(-0.5, 0.3, 81))
    bands = fit_bands(held(residuals), "whole workloads left out")
    band = find_band(bands, "gemm", "forward")
    assert (band.low_log, band.high_log) == pytest.approx((-0.42, 0.22))
    assert find_band(bands, "unheard/of", "forward") == bands[ANY, "forward"]
    doubled = find_band(fit_bands(held(residuals), LEFT_OUT_OPERATORS), "gemm", "forward")
    assert (doubled.low_log, doubled.high_log) == pytest.approx((-0.84, 0.44))
    always_late = fit_bands(held([0.2] * 20), "whole workloads left out")
    assert find_band(always_late, "gemm", "forward").low_log == 0.0


def test_few_residuals_take_the_wider_band_and_none_an_assumed_one() -> None:
    few = pd.concat([held([1.0, -1.0], "norm"), held([0.0] * 40)])
    bands = fit_bands(few, "whole workloads left out")
    assert ("norm", "forward") not in bands
    assert find_band(bands, "norm", "forward") == bands[ANY, "forward"]
    assumed = find_band({}, "gemm", "forward")
    assert np.exp(assumed.high_log) == pytest.approx(ASSUMED_FACTOR)
    assert assumed.residuals == 0


def test_step_band_weighs_workloads_and_not_their_captures() -> None:
    frames = []
    for workload, trace, error in (("a", 0, 0.1), ("a", 1, 0.1), ("a", 2, 0.1), ("b", 3, 0.3)):
        frames.append(held([error]).assign(workload=workload, trace=trace))
    band = fit_step_band(pd.concat(frames), ["trace"], "whole workloads left out")
    # Student's 90 % quantile with two degrees of freedom is 1.8856.
    assert band.half_log == pytest.approx(1.8856 * np.sqrt((0.1**2 + 0.3**2) / 2), rel=1e-4)
    assert (band.workloads, band.steps) == (2, 4)
    nothing = fit_step_band(held([]), ["trace"], "whole workloads left out")
    assert (nothing.workloads, nothing.mean_absolute_error) == (0, None)
    assert nothing.basis.startswith("assumed")


def test_band_grows_with_the_distance_and_ends_somewhere() -> None:
    band = Band(-0.1, 0.2, 10, distance=np.log(4))
    low, high = band.factors(np.log([1.0, 2.0, 4.0, 16.0]))
    assert np.log(low) == pytest.approx([0.0, -0.05, -0.1, -0.2])
    assert np.log(high) == pytest.approx([0.0, 0.1, 0.2, 0.4])
    near = Band(-0.1, 0.2, 10, distance=0.001)
    assert near.factors(np.array([NEAREST_DISTANCE]))[1] == pytest.approx(np.exp(0.2))
    assert near.factors(np.array([1e6]))[1] == pytest.approx(WIDEST_FACTOR)
