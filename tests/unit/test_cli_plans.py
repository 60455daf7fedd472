"""Plans from the command line: modes, stages, schedules from files, memory told."""

import pytest
from test_cli import PLATFORM, TRACE, answer, refuse, run

DDP = ("--data-parallel", 2)
SIMULATE = ("simulate", TRACE, "--platform", PLATFORM)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_an_exported_schedule_is_simulated(capsys, tmp_path):
    words = ("export", "schedule", "1f1b", "--ranks", 2, "--micro-batches", 4, "-o", "mine.csv")
    status, out, _ = run(capsys, *words)
    assert status == 0 and out == "1f1b: 2 ranks, 2 stages, 4 micro-batches in mine.csv\n"
    assert (tmp_path / "mine.csv").read_text().split() == [
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3",
        "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3",
    ]
    given = answer(capsys, *SIMULATE, "--schedule-file", "mine.csv")
    assert given["plan"] == "mine" and given["ranks"] == 2
    run(capsys, *words[:-1], "lowered.csv", "--messages")
    assert "1RECV_F0" in (tmp_path / "lowered.csv").read_text()
    assert answer(capsys, *SIMULATE, "--schedule-file", "lowered.csv")["ranks"] == 2


def test_stages_are_cut_as_asked(capsys, tmp_path):
    plan = (*SIMULATE, "--plan", "gpipe", "--ranks", 2)
    (tmp_path / "stages").write_text("embedding\nblocks.0 blocks.1 blocks.2 blocks.3 head\n")
    told = [
        answer(capsys, *plan, *how)
        for how in (
            (),
            ("--stages", "time"),
            ("--stages", "count"),
            ("--stages", "stages"),
        )
    ]
    times = [one["step_time_s"] for one in told]
    assert times[0] == times[1] <= times[2] < times[3]
    assert [one["stages_by"] for one in told] == ["time", "time", "count", "given"]
    assert told[2]["stage_units"] == [3, 3] and told[3]["stage_units"] == [1, 5]
    assert "stage_units" not in answer(capsys, *SIMULATE, "--plan", "ddp", "--ranks", 2)


def test_a_schedule_that_nobody_chose_is_named(capsys):
    words = (*SIMULATE, "--pipeline-parallel", 2, "--micro-batches", 2)
    for chosen, said in (([], True), (["--schedule", "1f1b"], False)):
        _, text, _ = run(capsys, *words, *chosen)
        assert "units, cut by the trace's times" in text
        assert ("gpipe without --schedule, where Megatron-LM runs 1f1b" in text) == said


def test_memory_is_told_with_what_fills_it(capsys):
    told = answer(capsys, *SIMULATE, "--plan", "gpipe", "--ranks", 2)
    assert [entry["ranks"] for entry in told["memory"]] == [[0], [1]]
    assert max(entry["peak_bytes"] for entry in told["memory"]) == told["peak_memory_bytes"]
    _, out, _ = run(capsys, *SIMULATE)
    filled = next(line for line in out.splitlines() if line.startswith("filled by"))
    assert "activation" in filled and "optimizer state" in filled and "(backward" in filled


def test_no_table_of_all_ranks_is_made_for_the_figures(capsys, monkeypatch):
    monkeypatch.setattr("trioflow.parallel.folded.Fold.expand", None)
    words = ("simulate", TRACE, "--data-parallel", 2, "--tensor-parallel", 2)
    words += ("--platform", "h100x8-nvlink")
    assert answer(capsys, *words)["folded"]
    assert "(identical ranks simulated once)" in run(capsys, *words)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SIMULATE, "--schedule-file", "s.csv"), "s.csv: no such file"),
        ((*SIMULATE, "--schedule-file", "s.csv", "--plan", "ddp", "--ranks", 2), "both given"),
        ((*SIMULATE, "--schedule-file", "s.csv", "--schedule", "1f1b"), "both given"),
        (
            (*SIMULATE, "--schedule-file", "mine.csv", "--ranks", 4),
            "mine.csv: --ranks 4, but the schedule makes it 2; leave --ranks out",
        ),
        ((*SIMULATE, "--pipeline-parallel", 2, "--stages", "nowhere"), "or time or count"),
        *(
            ((*SIMULATE, *DDP, flag, value), f"{value} is below 1")
            for flag in ("--accumulate", "--micro-batches", "--stages-per-rank", "--shard")
            for value in (0, -1)
        ),
        *(
            ((*SIMULATE, flag, 0), " 0 is below 1")
            for flag in (
                "--data-parallel",
                "--tensor-parallel",
                "--pipeline-parallel",
            )
        ),
        ((*SIMULATE, "--plan", "gpipe", "--ranks", 2, "--micro-batches", 0), "0 is below 1"),
        ((*SIMULATE, "--plan", "ddp", "--ranks", 2, "--accumulate", 0), "both given"),
        ((*SIMULATE, "--plan", "ddp", "--ranks", 0), "needs --ranks of 2 or more"),
        ((*SIMULATE, *DDP, "--batch", 0), "batch 0 is not positive"),
        ((*SIMULATE, "--plan", "ddp", "--ranks", 2, "--batch", 9), "does not divide"),
        (
            ("simulate", TRACE, "--platform", "dgx-a100", "--tensor-parallel", 3),
            "use a tensor degree of 2, 4",
        ),
        (
            ("export", "schedule", "1f1b", "--ranks", 2, "--micro-batches", 0, "-o", "s.csv"),
            "0 is below 1",
        ),
        (("export", "schedule", "1f1b", "--ranks", 1, "-o", "s.csv"), "makes no pipeline"),
        (("export", "schedule", "2f2b", "--ranks", 2, "-o", "s.csv"), "unknown schedule '2f2b'"),
    ],
)
def test_bad_plans_are_refused_in_one_sentence(capsys, tmp_path, words, said):
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert said in refuse(capsys, *words)
    assert not (tmp_path / "s.csv").exists()
