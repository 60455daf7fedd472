"""Traced programs become task graphs: groups of all ranks, order, waits, and what is refused."""

import pytest
from few_facts import few_facts
from trioflow.base.errors import PlanError, TraceError
from trioflow.cli.main import main
from trioflow.engine.simulate import simulate
from trioflow.hardware.platform import load_platform
from trioflow.sharded.as_traced import build_traced_graph, read_program, resize_group, tile_ranks
from trioflow.trace.assemble import ObservedOperator, assemble_trace
from trioflow.trace.store import save_trace

WORLD = 8


def trace_of(rank=0, messages=(), waits=(), streams=None, phases=None, world=WORLD):
    """Return a program of six operators of 1 ms each; those that send are given by their place."""
    phases = phases or ["forward"] * 2 + ["backward"] * 3 + ["optimizer"]
    sends = {m["op_id"] for m in messages}
    operators = [
        ObservedOperator(
            "c10d::x" if i in sends else "aten::add",
            phase,
            device_ns=0 if i in sends else 1_000_000,
            kind="collective" if i in sends else "compute",
        )
        for i, phase in enumerate(phases)
    ]
    facts = {
        "workload": "program",
        "batch": 2,
        "device": "cpu",
        "device_name": "d",
        "step_time_s": 6e-3,
        "precision": "fp32",
        "optimizer": "sgd",
        "program": {"rank": rank, "world_size": world, "streams": streams or {}, "waits": list(waits)},
        "communication": [{"asynchronous": True, "group": "0", **m} for m in messages],
    }
    return assemble_trace(operators, facts, ready=[])


def sums(op_id=3, ranks=tuple(range(WORLD)), **more):
    return {"op_id": op_id, "name": "all_reduce", "message_bytes": 4096, "ranks": list(ranks), **more}


@pytest.mark.parametrize(
    ("group", "groups"),
    [
        ((2, 3), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ((1, 5), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ((0, 1, 4, 5), [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_groups_of_all_ranks_have_one_shape(group, groups):
    found = tile_ranks(group, WORLD, group)
    assert found.groups.tolist() == groups
    assert [found.groups[found.group_of[r], found.place_of[r]] for r in range(WORLD)] == list(range(WORLD))


def test_ranks_that_lie_in_no_such_groups_are_refused():
    with pytest.raises(PlanError, match="do not lie in groups as 1,2"):
        tile_ranks((1, 2), WORLD, (1, 2))


def test_only_groups_over_all_ranks_are_resized():
    assert resize_group((1, 3, 5, 7), 8, 16) == (1, 3, 5, 7, 9, 11, 13, 15)
    assert resize_group((2, 3), 8, 16) == (2, 3)
    assert resize_group((0, 1, 4, 5), 8, 16) == (0, 1, 4, 5)


def test_a_message_runs_beside_compute_until_somebody_waits():
    """Six operators of which one sends: the optimizer alone waits for what was sent after backward's first."""
    traces = [trace_of(messages=[sums()], waits=waits) for waits in ([[5, 3]], [[4, 3]])]
    machine = load_platform("dgx1-v100")
    late, early = (simulate(build_traced_graph([t]), machine).summary.step_time_s for t in traces)
    in_time = simulate(build_traced_graph([trace_of(messages=[sums(asynchronous=False)])]), machine)
    assert late == pytest.approx(5e-3, abs=1e-9)  # the message is shorter than operator 4
    assert early > 5.01e-3
    assert in_time.summary.step_time_s == pytest.approx(early)
    assert in_time.summary.folded


def test_streams_run_beside_each_other():
    trace = trace_of(streams={"1": [1, 2]}, waits=[[5, 2]])
    graph = build_traced_graph([trace], ranks=WORLD)
    assert simulate(graph, load_platform("dgx1-v100")).summary.step_time_s == pytest.approx(4e-3)


def test_every_rank_runs_the_program_in_its_own_group():
    graph = build_traced_graph([trace_of(2, [sums(ranks=(2, 6)), sums(4, ranks=(6, 2), group="1")])])
    asked = graph.tasks[graph.tasks["kind"] == "collective"]
    first = asked.drop_duplicates("rank")
    assert first["group"].tolist() == ["0,4", "1,5", "2,6", "3,7"] * 2
    assert asked[asked["rank"] == 7]["group"].tolist() == ["3,7", "7,3"]  # the root first
    assert asked.groupby("match_id").size().eq(2).all()


def test_stages_need_a_trace_each():
    sent = {"op_id": 3, "name": "send", "message_bytes": 64, "ranks": [1, 5], "peer": 5}
    taken = {"op_id": 2, "name": "recv", "message_bytes": 64, "ranks": [1, 5], "peer": 1}
    first, last = trace_of(1, [sent]), trace_of(5, [taken])
    graph = build_traced_graph([first, last])
    moved = graph.tasks[graph.tasks["kind"].isin(["send", "recv"])]
    assert moved.groupby("match_id")["kind"].apply(sorted).tolist() == [["recv", "send"]] * 4
    peers = dict(zip(moved["rank"], moved["peer"], strict=True))
    assert peers == {rank: (rank + 4) % 8 for rank in range(8)}
    assert simulate(graph, load_platform("dgx1-v100")).summary.ranks == WORLD
    with pytest.raises(PlanError, match=r"rank 1 exchanges messages with the ranks 1, 5.*ranks 4 as well"):
        build_traced_graph([first])


def test_another_number_of_ranks_where_only_whole_gradients_are_summed():
    assert build_traced_graph([trace_of(messages=[sums()])], ranks=64).metadata.ranks == 64
    gathers = {**sums(), "name": "all_gather"}
    with pytest.raises(PlanError, match="whose all_gather depends on its size"):
        build_traced_graph([trace_of(messages=[gathers])], ranks=64)
    with pytest.raises(PlanError, match="whose all_reduce in forward depends on its size"):
        build_traced_graph([trace_of(messages=[sums(1)])], ranks=64)


def test_programs_that_do_not_fit_together_are_refused():
    with pytest.raises(PlanError, match="one trace a rank, all of one run"):
        build_traced_graph([trace_of(1), trace_of(1)])
    with pytest.raises(PlanError, match="do not fit together"):
        build_traced_graph([trace_of(0, [sums()]), trace_of(1)])


@pytest.mark.parametrize(
    ("messages", "waits", "words"),
    [
        ([sums(ranks=(0, 9))], (), "among the ranks"),
        ([{**sums(), "name": "send"}], (), "to or from None"),
        ((), [[2, 3]], "operator 2 waits for 3"),
    ],
)
def test_a_damaged_program_is_refused(messages, waits, words):
    with pytest.raises(TraceError, match=words):
        build_traced_graph([trace_of(0, messages, waits)])


def test_a_trace_without_a_program_is_refused_by_name():
    with pytest.raises(TraceError, match="does not hold the messages of a rank"):
        read_program(few_facts(), 1)


@pytest.mark.parametrize(
    "flag", ["--batch 8", "--plan ddp", "--tensor-parallel 2", "--recompute full", "--mode forward"]
)
def test_what_cannot_change_is_refused_by_name(flag, tmp_path, capsys):
    save_trace(trace_of(messages=[sums()]), tmp_path / "t")
    words = ["simulate", str(tmp_path / "t"), "--as-traced", "--platform", "dgx1-v100"]
    assert main([*words, *flag.split()]) == 2
    assert f"{flag.split()[0]} with --as-traced" in capsys.readouterr().err
