import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.ideal_run import count_in_flight, run_ideally
from trioflow.base.errors import PlanError
from trioflow.base.plan_row import SCHEDULES, ScheduleTraits
from trioflow.parallel.schedules import build
from trioflow.parallel.schedules.build import (
    add_communication,
    build_schedule,
    check_schedule,
    lower_schedule,
    parse_action,
    read_schedule,
    write_schedule,
)
from trioflow.parallel.schedules.table import Action, Schedule, leaves

SHAPES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 8, 16)))
NO_SPLIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def schedule_of(*rows, micro_batches=1):
    """Return a schedule from lines of cells."""
    return Schedule(
        "", micro_batches, tuple(tuple(parse_action(c) for c in row.split()) for row in rows)
    )


@pytest.mark.parametrize(("p", "m"), SHAPES)
def test_the_bubble_of_gpipe_is_its_closed_form(p, m):
    run = run_ideally(build_schedule("gpipe", p, m))
    assert run.idle_share == pytest.approx((p - 1) / (m + p - 1))
    assert run.makespan == pytest.approx(3 * (m + p - 1))
    assert count_in_flight(build_schedule("gpipe", p, m)) == (m,) * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SHAPES if m >= p])
def test_1f1b_idles_as_gpipe_and_holds_less(p, m):
    schedule = build_schedule("1f1b", p, m)
    assert run_ideally(schedule).idle_share == pytest.approx((p - 1) / (m + p - 1))
    assert count_in_flight(schedule) == tuple(min(p - rank, m) for rank in range(p))


@pytest.mark.parametrize(
    ("p", "v", "rounds"), list(itertools.product((2, 3, 4, 8), (1, 2, 4), (1, 2, 3)))
)
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(p, v, rounds):
    m = rounds * p
    schedule = build_schedule("interleaved", p, m, v)
    # Over what a rank computes: (p - 1) / (v m), Narayanan et al., section 2.2.
    run = run_ideally(schedule)
    assert run.makespan / max(run.busy) - 1 == pytest.approx((p - 1) / (v * m))
    ahead = [min((v - 1) * p + 2 * (p - 1 - rank), m * v) for rank in range(p)]
    assert count_in_flight(schedule) == tuple(min(a + 1, m * v) for a in ahead)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16), (4, 16)])
def test_weight_gradients_fill_the_bubble(p, m):
    schedule = build_schedule("zero-bubble", p, m)
    # ZB-H1: a third of 1F1B's bubble, (p - 1)(F + B - 2 W) for F = I = W, in 1F1B's memory.
    assert run_ideally(schedule).makespan - 3 * m == pytest.approx(p - 1)
    assert run_ideally(build_schedule("1f1b", p, m)).makespan - 3 * m == pytest.approx(3 * (p - 1))
    assert count_in_flight(schedule) == (p,) * p
    # ZBV: the last rank never waits between its first and its last action, nor any other.
    fold = build_schedule("zbv", p, m, 2)
    run = run_ideally(fold)
    assert run.makespan - 6 * m == pytest.approx(p - 1)
    assert max(count_in_flight(fold)) <= 2 * p


def test_the_old_pipe_computes_all_but_one_forward_twice():
    p, m = 3, 4
    schedule = build_schedule("gpipe-recompute", p, m)
    assert [str(a) for a in schedule.rows[1]] == [
        "1F0",
        "1F1",
        "1F2",
        "1F3",
        "1B3",
        "1F2",
        "1B2",
        "1F1",
        "1B1",
        "1F0",
        "1B0",
    ]
    assert run_ideally(schedule).busy == (m + 2 * m + m - 1,) * p
    assert count_in_flight(schedule) == (1,) * p  # the last micro-batch, or the recomputed one
    assert build_schedule("gpipe-recompute", p, 1).rows == build_schedule("gpipe", p, 1).rows
    lowered = add_communication(schedule)
    sends = [str(a) for a in lowered.rows[0] if a.kind == "SEND_F"]
    assert sends == ["0SEND_F0", "0SEND_F1", "0SEND_F2", "0SEND_F3"]  # none for a second forward
    check_schedule(lowered)
    # A recomputation needs no gradient: it starts while the next stage is still in its backward.
    ends = run_ideally(schedule).ends
    assert ends[Action(0, "F", 0)] - 1 < ends[Action(1, "B", 0)]


@given(
    st.sampled_from(list(SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 4),
)
def test_every_schedule_that_is_built_is_complete_and_ends(name, p, m, v):
    try:
        schedule = build_schedule(name, p, m, v)
    except PlanError:
        assume(False)
    lowered = lower_schedule(schedule)
    for table in (schedule, add_communication(schedule), lowered):
        check_schedule(table)
        assert table.stages == p * v and table.ranks == p
    forwards = [str(a) for row in schedule.rows for a in leaves(row) if a.kind == "F"]
    assert len(set(forwards)) == p * v * m
    # With messages or without, what ranks compute and wait for is the same.
    assert run_ideally(lowered).makespan == run_ideally(schedule).makespan
    sends = [a for row in lowered.rows for a in row if a.kind in ("SEND_F", "SEND_B")]
    places = schedule.rank_of_stage
    crossings = sum(places[s] != places[s + 1] for s in range(p * v - 1))
    assert len(sends) == 2 * m * crossings


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_survives_its_file(name, tmp_path):
    schedule = build_schedule(name, 2, 4, SCHEDULES[name].stages)
    for table in (schedule, lower_schedule(schedule)):
        write_schedule(table, tmp_path / "a.csv")
        assert read_schedule(tmp_path / "a.csv", name) == table


def test_actions_that_overlap_are_read_and_run(tmp_path):
    path = tmp_path / "overlap.csv"
    path.write_text("0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,1B1,0B0,0B1\r\n")
    schedule = read_schedule(path)
    assert schedule.stages == 2 and schedule.micro_batches == 2
    assert str(schedule.rows[0][3]) == "(1F1;1B0)OVERLAP_F_B"
    assert run_ideally(schedule).makespan == 4 * 1 + 4 * 2
    write_schedule(schedule, path)
    assert path.read_text() == "0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,1B1,0B0,0B1\n"


def test_1f1b_of_fewer_micro_batches_than_stages_is_megatron_s():
    """As ``forward_backward_pipelining_without_interleaving``: min(p - rank - 1, m) warm-up forwards."""
    p, m = 4, 2
    for rank, row in enumerate(build_schedule("1f1b", p, m).rows):
        warm_up = min(p - rank - 1, m)
        kinds = ["F"] * warm_up + ["F", "B"] * (m - warm_up) + ["B"] * warm_up
        assert [action.kind for action in leaves(row)] == kinds
    assert count_in_flight(build_schedule("1f1b", p, m)) == (2, 2, 2, 1)
    check_schedule(lower_schedule(build_schedule("1f1b", p, 1)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("interleaved", 4, 9, 2), "9 micro-batches do not divide into 2 rounds on 4 ranks"),
        (("zero-bubble", 2, 5, 1), "5 micro-batches do not divide into 2 rounds on 2 ranks"),
        (("zbv", 4, 8, 3), "3 stages a rank, but this schedule has 2"),
        (("gpipe", 4, 8, 2), "2 stages a rank, but this schedule has 1"),
        (("gpipe", 0, 8, 1), "0 ranks are too few"),
        (("gpipe", 2, 0, 1), "0 micro-batches are too few"),
        (("fifo", 2, 2, 1), "no schedule is called 'fifo'"),
    ],
)
def test_shapes_that_a_schedule_does_not_allow_are_refused(call, words):
    with pytest.raises(PlanError, match=words):
        build_schedule(*call)


def test_a_schedule_that_leaves_out_stages_is_refused(monkeypatch):
    """One that never looks at its stages a rank, and is not declared as ``fixed``, runs half the model."""
    monkeypatch.setitem(SCHEDULES, "half", ScheduleTraits())
    monkeypatch.setitem(build.ORDERS, "half", build.ORDERS["gpipe"])
    assert build_schedule("half", 2, 4, 1).stages == 2
    words = "'half' made 2 ranks, 2 stages and 4 micro-batches where 2, 4 and 4 were asked for"
    with pytest.raises(PlanError, match=words):
        build_schedule("half", 2, 4, 2)
    monkeypatch.setitem(SCHEDULES, "half", ScheduleTraits(fixed=True))
    with pytest.raises(PlanError, match="this schedule has 1"):
        build_schedule("half", 2, 4, 2)


@pytest.mark.parametrize(
    ("rows", "micro_batches", "words"),
    [
        (["0F0 0B0", "1B0 1F0"], 1, "rank 1: 1B0 comes after nothing of its micro-batch"),
        (["0F0 0B0 0B0"], 1, "0B0 comes after F, B"),
        (["0F0 0W0 0I0"], 1, "0W0 comes after F"),
        (["0F0 0I0"], 1, "stage 0 runs only F, I of micro-batch 0"),
        (["0F0 0B0", "1F0 1B0"], 2, "stage 0 runs only nothing of micro-batch 1"),
        (["0F0 0B0", "0F0 0B0"], 1, "stage 0 is on rank 0 and on rank 1"),
        (["0F0 0B0", "2F0 2B0"], 1, "stage 1 is on no rank"),
        (["0F0 0F1 0B0"], 1, "0F1 names a micro-batch beyond the last, 0"),
        (["0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0"], 2, ""),
        (
            ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"],
            2,
            "cannot go on: rank 0 before 0B0, rank 1 before 1F1",
        ),
        (["0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"], 1, "deadlock"),
        (["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"], 1, "give every send its receive"),
        (["0F0 0RECV_F0 0B0"], 1, "0RECV_F0 has no other rank"),
        (
            [
                "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
                "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
            ],
            2,
            "message 0 from rank 0 to rank 1 leaves stage 0 with micro-batch 0, but 1",
        ),
        (["0F0 0B0", ""], 1, "rank 1 has no actions"),
    ],
)
def test_schedules_that_cannot_run_are_refused(rows, micro_batches, words):
    schedule = schedule_of(*rows, micro_batches=micro_batches)
    if not words:  # another order of backwards is legal
        check_schedule(schedule)
        return
    with pytest.raises(PlanError, match=words):
        check_schedule(schedule)


@pytest.mark.parametrize(
    "cell", ["F0", "0F", "0X1", "0F0 1", "0UNSHARD1", "(0F0)OVERLAP_F_B", "-1F0"]
)
def test_cells_that_name_no_action_are_refused(cell, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(f"0F0,0B0\n1F0,{cell}\n")
    with pytest.raises(
        PlanError, match=r"bad\.csv, line 2, cell 2: .* is not an action; write stage"
    ):
        read_schedule(path)


def test_files_that_hold_no_schedule_are_refused(tmp_path):
    with pytest.raises(PlanError, match="no such file"):
        read_schedule(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(PlanError, match=r"empty\.csv: the schedule has no actions"):
        read_schedule(tmp_path / "empty.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not UTF-8"):
        read_schedule(tmp_path / "bytes.csv")
    (tmp_path / "half.csv").write_text("0F0\n")
    with pytest.raises(PlanError, match=r"half\.csv: rank 0: stage 0 runs only F"):
        read_schedule(tmp_path / "half.csv")


def test_a_stage_that_is_used_soon_stays_unsharded():
    lowered = lower_schedule(build_schedule("interleaved", 2, 2, 4))
    row = [str(a) for a in lowered.rows[0]]
    assert row[:4] == ["0UNSHARD", "2UNSHARD", "4UNSHARD", "0F0"]
    assert row.index("6UNSHARD") > row.index("0RESHARD")
    held = set()
    for action in lowered.rows[0]:
        if action.kind == "UNSHARD":
            held.add(action.stage)
        elif action.kind == "RESHARD":
            held.remove(action.stage)
        elif action.kind in "FB":
            assert action.stage in held
        assert len(held) <= 3
    assert not held
    reduces = [a for a in lowered.rows[0] if a.kind == "REDUCE_GRAD"]
    assert [a.stage for a in reduces] == [6, 4, 2, 0]


def test_costs_of_the_actions_are_the_caller_s():
    schedule = build_schedule("1f1b", 2, 4)
    assert run_ideally(schedule, {**NO_SPLIT, "B": 1.0}).makespan == 2 * 5
    assert run_ideally(replace(schedule, rows=schedule.rows[:1])).makespan == 12
