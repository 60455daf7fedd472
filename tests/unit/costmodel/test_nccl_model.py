"""NCCL's formulas by hand, their calibration, and a platform's collectives in every way.

Public tables and users' logs of NCCL, from small files in each format.
"""

import argparse
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from trioflow.base.errors import InputError, TableError, TrioflowError
from trioflow.cli.fit import add_fit_collectives
from trioflow.costmodel.collectives.model import COLLECTIVES, SAMPLE_COLUMNS, wire_factor
from trioflow.costmodel.collectives.platform import (
    METHODS,
    NcclMachine,
    PlatformCollectives,
    choose,
    load_constants,
    load_platform_collectives,
    parse_version,
    recognise_device,
)
from trioflow.costmodel.fits.collectives import (
    MAX_POINTS,
    calibrate,
    choose_rows,
    conformal_band,
    fit_platform_collectives,
    median_points,
    thin,
)
from trioflow.formats.nccl_tests import import_nccl_tests
from trioflow_evaluation.fits.collectives import PUBLIC_TABLES, PublicTable

A100 = NcclMachine("ampere", "nvlink", 240e9)
NEWEST = load_constants("NCCL 2.30.7")


def test_ring_and_tree_by_hand() -> None:
    sizes = np.array([1024.0, 4.0 * 2**20, 512.0 * 2**20])
    found = choose("all_reduce", 4, 1, sizes, A100, NEWEST)
    total = found.base_s + found.hop_s + found.wire_s
    # Tree LL: 6.8 + 2 x 3 x 0.6 us, at 0.85 / 2 of min(240 x 0.92 / 3.8, 87.7) GB/s of 1 KiB.
    tree = 10.4e-6 + 1024 * 2 / (240e9 * 0.92 / 3.8 * 0.85)
    # Ring LL: 6.6 + 6 x 0.6 us, at 4 / 6 of min(240 / 2, 87.7) GB/s.
    ring = 10.2e-6 + 1024 * 6 / 4 / 87.7e9
    assert ring < tree
    assert total[0] == pytest.approx(ring)
    # Ring LL128: 14 + 6 x 1.9 us at 0.92 of the bus; Simple: 8.4 + 6 x 3.4 us at all of it.
    ll128 = 25.4e-6 + 4 * 2**20 * 1.5 / (240e9 * 0.92)
    simple = 28.8e-6 + 4 * 2**20 * 1.5 / 240e9
    assert total[1] == pytest.approx(min(ll128, simple))
    assert found.protocol.tolist() == [0, 1, 2]
    assert set(found.algorithm) == {"ring"}
    assert found.wire_s[2] == pytest.approx(512 * 2**20 * 1.5 / 240e9)


def test_hops_between_nodes_take_the_network() -> None:
    machine = NcclMachine("ampere", "nvlink", 240e9, network_bytes_per_s=10e9)
    found = choose("all_gather", 16, 2, np.array([1e9]), machine, NEWEST)
    # Simple: 14 hops inside of 3.4 us, one between of 14 + 3 us; eight ranks' share of the network.
    assert found.hop_s[0] == pytest.approx((14 * 3.4 + 17) * 1e-6)
    assert found.wire_s[0] == pytest.approx(1e9 * 15 / 16 / 80e9)
    with pytest.raises(InputError, match="no measurement between nodes"):
        choose("all_gather", 16, 2, np.array([1e9]), A100, NEWEST)


def test_constants_follow_the_version() -> None:
    hop = [
        load_constants(v)["hop_latency_us"]["nvlink"]["tree"][2]
        for v in ("NCCL 2.18.1", "NCCL 2.18.6", "NCCL 2.20.5", "NCCL 2.21.5", "NCCL 2.29.2", "of unknown version")
    ]
    assert hop == [28, 4, 4, 28, 4, 4]
    assert load_constants("NCCL 2.18.1")["ll_max_gb_per_s"]["hopper"][0] == 87.7
    assert NEWEST["ll_max_gb_per_s"]["hopper"][0] == 141
    assert parse_version("NCCL 2.21.5+cuda12.4") == (2, 21, 5)
    assert recognise_device("NVIDIA H100 80GB HBM3").links == 18
    assert recognise_device("something").links == 0


def test_calibration_finds_the_factors_that_made_the_times() -> None:
    rows = pd.DataFrame(
        [(n, 1, float(2**k)) for n in (2, 4, 8) for k in range(9, 30)], columns=["ranks", "nodes", "message_bytes"]
    )
    choices = choose_rows("all_gather", rows, A100, NEWEST)
    made = choices.base_s * 1.5 + choices.hop_s * 0.8 + choices.wire_s / 0.9
    found = calibrate("all_gather", rows.assign(time_s=made), A100, NEWEST)
    assert found.apply(choices) == pytest.approx(made, rel=0.02)
    assert math.exp(found.scales[8]) == pytest.approx(0.9, rel=0.02)


def make_samples(rank_numbers: tuple[int, ...] = (2, 4, 8), noise: float = 0.01) -> pd.DataFrame:
    """Three repeats of rings with a step between 256 KiB and 1 MiB."""
    rows = []
    for collective in ("all_reduce", "all_gather"):
        for ranks in rank_numbers:
            for exponent in range(10, 29):
                size = 2**exponent
                steps = (ranks - 1) * (2 if collective == "all_reduce" else 1)
                wire = wire_factor(collective, ranks) * size
                fast = 8e-6 + steps * 0.7e-6 + wire / 80e9
                time_s = min(fast, 12e-6 + steps * 3e-6 + wire / 220e9)
                for repeat, factor in enumerate((1.0, 1.0 - noise, 1.0 + noise)):
                    rows.append(
                        ("box", "NCCL 2.27.3", collective, ranks, size, repeat, round(time_s * factor * 1e9), 1, "made")
                    )
    names = ["platform", "library", "collective", "ranks", "message_bytes", "round", "time_ns", "nodes", "dataset"]
    return pd.DataFrame(rows, columns=names)


@pytest.fixture(scope="module")
def model() -> PlatformCollectives:
    return fit_platform_collectives(make_samples(), "box", "NCCL 2.27.3", A100)


def test_measured_messages_come_back(model: PlatformCollectives) -> None:
    points = median_points(make_samples())
    for row in points.itertuples():
        answer = model.time_s(row.collective, row.ranks, row.message_bytes)
        assert answer.time_s == pytest.approx(row.time_s, rel=1e-12)
        assert answer.confidence == "measured"
        assert answer.low_s == pytest.approx(row.time_s * 0.99, rel=0.01)
        assert answer.low_s <= answer.time_s <= answer.high_s


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_times_grow_with_the_message(model: PlatformCollectives, method: str, collective: str, ranks: int) -> None:
    sizes = [1, 700, 2**12, 3 * 2**15, 2**20, 5 * 2**20, 2**27, 2**33, 2**40]
    answers = [model.using(method).time_s(collective, ranks, s, nodes=1) for s in sizes]
    assert all(a.time_s <= b.time_s * (1 + 1e-12) for a, b in itertools.pairwise(answers))
    assert all(0 < a.low_s <= a.time_s <= a.high_s < math.inf for a in answers)


def test_left_out_ranks_are_found_again() -> None:
    truth = median_points(make_samples())
    for asked, given in ((4, (2, 8)), (8, (2, 4))):
        fitted = fit_platform_collectives(make_samples(given), "box", "NCCL 2.27.3", A100)
        rows = truth[(truth["ranks"] == asked) & (truth["message_bytes"] >= 2**16)]
        errors = [
            abs(fitted.time_s(r.collective, asked, r.message_bytes).time_s / r.time_s - 1) for r in rows.itertuples()
        ]
        assert np.mean(errors) < 0.1


def test_saved_models_answer_alike(model: PlatformCollectives, tmp_path) -> None:
    for name in ("a", "b"):
        model.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = load_platform_collectives(tmp_path / "a")
    for method, collective in itertools.product(METHODS, COLLECTIVES):
        question = (collective, 3, 5_000_000)
        assert again.using(method).time_s(*question) == model.using(method).time_s(*question)
    (tmp_path / "a").write_text((tmp_path / "a").read_text().replace('"curves"', '"curls"'))
    with pytest.raises(InputError, match="incomplete or damaged"):
        load_platform_collectives(tmp_path / "a")


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (("all_fuse", 2, 10), "unknown collective 'all_fuse'"),
        (("all_reduce", 0, 10), "impossible"),
        (("all_reduce", 2, -1), "impossible"),
        (("all_reduce", 2, 10, 3), "of 3 nodes is impossible"),
        (("all_reduce", 16, 10, 2), "no collective was measured between nodes"),
    ],
)
def test_impossible_questions_are_refused(model: PlatformCollectives, question, words: str) -> None:
    with pytest.raises(InputError, match=words):
        model.time_s(*question)
    with pytest.raises(InputError, match="no collective model is called"):
        model.using("magic")


def test_one_message_measured_by_two_sources_is_refused() -> None:
    samples = pd.concat([make_samples(), make_samples().assign(dataset="other")])
    with pytest.raises(InputError, match="measured more than once"):
        fit_platform_collectives(samples, "box", "NCCL 2.27.3", A100)


def test_thinning_keeps_the_curve() -> None:
    sizes = np.arange(1, 1025) * 2**20
    rows = pd.DataFrame(
        {
            "collective": "all_reduce",
            "ranks": 2,
            "nodes": 1,
            "library": "x",
            "dataset": "y",
            "message_bytes": sizes,
            "time_ns": np.round(20_000 + sizes / 200).astype(int),
        }
    )
    rows.loc[::50, "time_ns"] *= 3  # outliers that a median would not follow either
    points = thin(median_points(rows))
    assert len(points) <= MAX_POINTS
    expected = 20e-6 + points["message_bytes"] / 200e9
    assert points["time_s"].to_numpy()[1:-1] == pytest.approx(expected.to_numpy()[1:-1], rel=0.01)


def test_conformal_band_holds_four_fifths() -> None:
    band = conformal_band(np.linspace(-1, 1, 199))
    assert band.high_log == pytest.approx(0.8, abs=0.011)
    assert band.low_log == pytest.approx(-0.8, abs=0.011)
    assert conformal_band(np.array([0.1, 0.2])).low_log == 0.0


LOG = """\
# nThread 1 nGpus 4 minBytes 1024 maxBytes 4194304 step: 16(factor) warmup iters: 5 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid   4711 on     box-1 device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid   4711 on     box-1 device  1 [0x0b] NVIDIA A100-SXM4-80GB
#  Rank  2 Group  0 Pid   4711 on     box-1 device  2 [0x48] NVIDIA A100-SXM4-80GB
#  Rank  3 Group  0 Pid   4711 on     box-1 device  3 [0x4c] NVIDIA A100-SXM4-80GB
NCCL version 2.21.5+cuda12.4
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float     sum      -1     5.00    0.00    0.00      0     5.00    0.00    0.00      0
        1024           256     float     sum      -1    14.10    0.07    0.11      0    13.90    0.07    0.11      0
       16384          4096     float     sum      -1    16.30    1.01    1.51      0    16.10    1.02    1.53      0
      262144         65536     float     sum      -1    18.20   14.40   21.61      0    18.00   14.56   21.85      0
     4194304       1048576     float     sum      -1    68.80   60.96   91.45      0    68.20   61.50   92.25      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 38.0
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "all_reduce_perf.log"
    path.write_text(LOG)
    return path


def test_log_gives_both_times_of_every_message(log: Path) -> None:
    frame = import_nccl_tests([log], "box")
    assert tuple(frame.columns) == SAMPLE_COLUMNS
    assert frame.attrs["device"] == "NVIDIA A100-SXM4-80GB"
    assert len(frame) == 8  # nothing of the message without bytes
    assert set(frame["library"]) == {"NCCL 2.21.5"}
    assert set(frame["ranks"]) == {4}
    assert set(frame["nodes"]) == {1}
    large = frame[frame["message_bytes"] == 4194304]
    assert large["time_ns"].tolist() == [68_800, 68_200]
    assert large["round"].tolist() == [0, 1]


def test_rounds_go_on_over_logs_and_hosts_are_nodes(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "again.log"
    text = LOG.replace("Rank  3 Group  0 Pid   4711 on     box-1", "Rank  3 Group  0 Pid   9 on  box-2")
    prefixed = "\n".join(f"[1,0]<stdout>:{line}" for line in text.splitlines())
    other.write_text("# Collective test starting: all_gather_perf\n" + prefixed)
    both = import_nccl_tests([log, log, other], "box")
    reduced = both[(both["collective"] == "all_reduce") & (both["message_bytes"] == 1024)]
    assert reduced["round"].tolist() == [0, 1, 2, 3]
    assert set(both.loc[both["collective"] == "all_gather", "nodes"]) == {2}


def test_newer_logs_tell_program_and_version_in_comments(tmp_path: Path) -> None:
    path = tmp_path / "run.txt"
    head = "# nccl-tests version 2.17.1 nccl-headers=22907 nccl-library=22907\n"
    path.write_text(head + "# Collective test starting: sendrecv_perf\n" + LOG.replace("NCCL version", "#"))
    frame = import_nccl_tests([path], "box")
    assert set(frame["collective"]) == {"send"}
    assert set(frame["library"]) == {"NCCL 2.29.7"}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("   18.20", "   oops!", "line 16, column out-of-place time: 'oops!'"),
        ("   68.20   61.50", "     nan   61.50", "line 17, column in-place time"),
        ("68.80   60.96   91.45      0", "68.80   60.96   91.45      7", "line 17, column out-of-place #wrong: 7"),
        ("92.25      0", "", "line 17: 11 values where the header names 13"),
        ("#  Rank ", "#  rang ", "line 13: the log does not give the number of ranks"),
        ("#       size", "#       bulk", "no measurement"),
    ],
)
def test_what_is_wrong_with_a_log_is_named(log: Path, old: str, new: str, words: str) -> None:
    log.write_text(LOG.replace(old, new))
    with pytest.raises(InputError) as caught:
        import_nccl_tests([log], "box")
    assert str(log) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("all_gather_perf_2.log", "all_gather"),
        ("node7_reduce_scatter_perf-8gpus.txt", "reduce_scatter"),
        ("2024_all_reduce_perf_mpi.out", "all_reduce"),
        ("reduce_perf2.log", "reduce"),
    ],
)
def test_a_file_is_named_after_its_program_whatever_stands_around_it(
    tmp_path: Path, name: str, collective: str
) -> None:
    path = tmp_path / name
    path.write_text(LOG)
    assert set(import_nccl_tests([path], "box")["collective"]) == {collective}


def test_an_unnamed_operation_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text(LOG)
    with pytest.raises(InputError, match="does not name the operation"):
        import_nccl_tests([path], "box")
    assert set(import_nccl_tests([path], "box", collective="reduce")["collective"]) == {"reduce"}


def run(*arguments: str) -> None:
    parser = argparse.ArgumentParser()
    add_fit_collectives(parser)
    options = parser.parse_args([*arguments])
    options.run(options)


def test_one_command_makes_a_log_a_model(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "collectives.json"
    run(str(log), "--platform", "box", "-o", str(target))
    assert "all_reduce on 4 ranks: 4 sizes" in capsys.readouterr().out
    model = load_platform_collectives(target)
    assert model.library == "NCCL 2.21.5"
    assert model.machine.bus_bytes_per_s == pytest.approx(240e9)  # 12 links of 20 GB/s
    answer = model.time_s("all_reduce", 4, 4194304)
    assert answer.time_s == pytest.approx(68.5e-6)
    assert answer.confidence == "measured"
    assert model.time_s("all_reduce", 8, 4194304).confidence == "extrapolated"
    content = json.loads(target.read_text())
    assert list(content["provenance"]["inputs"]) == ["all_reduce_perf.log"]
    before = target.read_bytes()
    log.write_text(LOG.replace("   18.20", "   oops!"))
    with pytest.raises(TrioflowError):
        run(str(log), "--platform", "box", "-o", str(target))
    assert target.read_bytes() == before


def read_public(form: str, path: Path, ranks: str = "2", nodes: str = "1") -> pd.DataFrame:
    return PublicTable(path.name, "some", "box", form, ranks, nodes).read(path)


def write_aiconfigurator(path: Path, **changes: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(
        {
            "nccl_dtype": ["half", "half", "int8", "half"],
            "num_gpus": [8, 8, 8, 2],
            "message_size": [512, 512, 1024, 4096],
            "op_name": ["all_reduce", "all_reduce", "all_reduce", "alltoall"],
            "latency": [0.015, 0.017, 9.0, 0.006],
            "version": ["2.29.2"] * 4,
        }
    )
    frame.assign(**changes).to_parquet(path)
    return path


def test_aiconfigurator_counts_elements_and_repeats_keys(tmp_path: Path) -> None:
    path = write_aiconfigurator(tmp_path / "2.27.3" / "nccl_perf.parquet")
    frame = read_public("aiconfigurator", path)
    assert frame["message_bytes"].tolist() == [1024, 1024, 8192]  # elements of two bytes
    assert frame["round"].tolist() == [0, 1, 0]
    assert frame["time_ns"].tolist() == [15_000, 17_000, 6_000]
    assert frame["collective"].tolist() == ["all_reduce", "all_reduce", "all_to_all"]
    assert set(frame["library"]) == {"NCCL 2.29.2"}  # the rows', not the folder's


def test_aiconfigurator_without_a_version_takes_the_folders(tmp_path: Path) -> None:
    path = write_aiconfigurator(tmp_path / "2.23" / "nccl_perf.parquet")
    pd.read_parquet(path).drop(columns="version").to_parquet(path)
    assert set(read_public("aiconfigurator", path)["library"]) == {"NCCL 2.23"}
    with pytest.raises(TableError, match="row 0: all_fuse"):
        read_public("aiconfigurator", write_aiconfigurator(path, op_name="all_fuse"))


def test_vtrain_holds_two_times_under_one_name(tmp_path: Path) -> None:
    path = tmp_path / "AR_GPU3_1M_1024M_LUT"
    path.write_text(
        "size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)\n1048576,262144,float,63910,21.88,63500,22.02\n"
    )
    frame = read_public("vtrain", path, ranks="3")
    assert frame[["ranks", "round", "time_ns"]].values.tolist() == [[3, 0, 63910], [3, 1, 63500]]
    path.write_text("size(B),time(ns)\n1048576,63910\n")
    with pytest.raises(TableError, match="no column"):
        read_public("vtrain", path, ranks="3")


def test_vidur_divides_sends_by_the_workers_and_drops_empty_ones(tmp_path: Path) -> None:
    path = tmp_path / "p2p_inter_node.csv"
    path.write_text(
        "time_stats.send_recv.median,n_embd,num_tokens,rank,num_tensor_parallel_workers\n"
        "0.08,4096,0,0,1\n0.10,4096,4,0,1\n0.09,4096,8,0,2\n"
    )
    frame = read_public("vidur send", path, nodes="2")
    assert frame["message_bytes"].tolist() == [32768, 32768]
    assert frame["round"].tolist() == [0, 1]
    assert set(frame["nodes"]) == {2}
    reduce = tmp_path / "all_reduce.csv"
    reduce.write_text("time_stats.all_reduce.median,rank,num_workers,n_embd,num_tokens\n0.1,0,8,4096,1\n")
    assert read_public("vidur all_reduce", reduce)["message_bytes"].tolist() == [8192]


def test_vidur_networks_tell_nodes_by_devices(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.csv"
    path.write_text("time_stats.all_reduce.median,num_workers,size,devices_per_node\n0.065,16,2048,8\n")
    row = read_public("vidur network all_reduce", path).iloc[0]
    assert (row["ranks"], row["nodes"], row["message_bytes"], row["time_ns"]) == (16, 2, 2048, 65_000)


def test_unexplained_files_are_not_read() -> None:
    names = [table.key for table in PUBLIC_TABLES]
    assert not any(name.endswith("all_gather.csv") for name in names)
    assert not any("pairwise" in n and "send_recv" in n and "a40" not in n for n in names)


def write_report(path: Path, **changes: Any) -> Path:
    """The same measurements as LOG's two largest messages, as ``-J`` writes them."""
    devices = [
        {
            "rank": rank,
            "group": 0,
            "pid": 4711,
            "hostname": "box-1",
            "device": rank,
            "device_hex": "07",
            "device_info": "NVIDIA A100-SXM4-80GB",
        }
        for rank in range(4)
    ]
    side = {"alg_bw": 1.0, "bus_bw": 1.5, "nwrong": 0.0}
    results = [
        {"size": 0, "out_of_place": {"time": 1.0, **side}, "in_place": {"time": 1.0, **side}},
        {"size": 1024, "out_of_place": {"time": 18.2, **side}, "in_place": None},
        {"size": 4194304, "out_of_place": {"time": 68.8, **side}, "in_place": {"time": 68.2, **side}},
    ]
    content = {
        "version": 2,
        "args": ["./build/all_reduce_perf", "-g", "4"],
        "nccl_version": 22105,
        "config": {"ngpus": 4, "devices": devices},
        "results": results,
        **changes,
    }
    path.write_text(json.dumps(content))
    return path


def test_a_json_report_is_read_as_its_text_is(log: Path, tmp_path: Path) -> None:
    report = import_nccl_tests([write_report(tmp_path / "run.json")], "box")
    text = import_nccl_tests([log], "box")
    assert report.attrs["device"] == "NVIDIA A100-SXM4-80GB"
    large = [frame[frame["message_bytes"] == 4194304].reset_index(drop=True) for frame in (report, text)]
    pd.testing.assert_frame_equal(*large)
    assert len(report) == 3, "nothing of the message without bytes, one of that without a second side"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {}}, "results[0]: the log does not give the number of ranks"),
        ({"args": ["perf"]}, "results[0]: the log does not name the operation"),
        ({"results": [{"size": 8, "in_place": {"time": 1.0, "nwrong": 3.0}}]}, "results[0], column in-place #wrong: 3"),
        ({"results": [{"size": 8, "in_place": {"time": "nan"}}]}, "results[0], column in-place time: 'nan'"),
        ({"results": [{"in_place": {"time": 1.0}}]}, "no report of nccl-tests: 'size'"),
        ({"results": []}, "no measurement"),
        ({"results": None}, "no measurement"),
    ],
)
def test_what_is_wrong_with_a_report_is_named(tmp_path: Path, changes: Any, words: str) -> None:
    path = write_report(tmp_path / "run.json", **changes)
    with pytest.raises(InputError) as caught:
        import_nccl_tests([path], "box")
    assert str(path) in str(caught.value) and words in str(caught.value)
