"""Habits of the command: forms for programs, empty columns, grouped warnings, a sign of work, completion."""

import io
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields

import pandas as pd
import pytest
from trioflow.base.errors import group_warnings
from trioflow.base.plan_row import Plan, name_flag
from trioflow.cli import main
from trioflow.cli.installation import write_completion
from trioflow.cli.main import COMMANDS, build_parser
from trioflow.cli.output import PlainStream, WaitSign, format_table
from trioflow.prediction.question import Options

SHOW = ["show", "gpt2-b8"]


def test_columns_without_a_value_are_left_out(capsys):
    assert main(SHOW) == 0
    head = capsys.readouterr().out.split("\n\n")[1].splitlines()[0]
    assert head.split() == ["phase", "class", "operators", "FLOP", "bytes"], "gpt2-b8 has no times"
    assert main(["show", "gpt2-tiny-b8"]) == 0
    assert "time  share" in capsys.readouterr().out
    rows = [("x", "-", "1"), ("y", "-", "-")]
    assert format_table(("a", "b", "c"), rows, drop_empty=True) == "a  c\n-  -\nx  1\ny  -"
    assert format_table(("a", "b"), [], drop_empty=True).splitlines()[0] == "a  b"


def test_the_same_rows_as_json_csv_and_parquet(capsysbinary):
    assert main([*SHOW, "--json"]) == 0
    wanted = json.loads(capsysbinary.readouterr().out)["classes"]
    assert main([*SHOW, "--output", "json"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["classes"] == wanted
    assert main([*SHOW, "--output", "csv"]) == 0
    csv = pd.read_csv(io.BytesIO(capsysbinary.readouterr().out))
    assert main([*SHOW, "--output", "parquet"]) == 0
    parquet = pd.read_parquet(io.BytesIO(capsysbinary.readouterr().out))
    for frame in (csv, parquet):
        assert frame.to_dict("records") == wanted


def test_a_step_says_its_precision(capsys):
    ask = ["--plan", "ddp", "--ranks", "2", "--platform", "cpu2-gloo"]
    assert main(["simulate", "gpt2-tiny-b8", *ask]) == 0
    assert re.search("precision +fp32, as traced\n", capsys.readouterr().out)


def test_a_step_is_one_row_and_its_breakdown_one_a_rank(capsys):
    ask = ["simulate", "gpt2-tiny-b8", "--plan", "ddp", "--ranks", "2", "--platform", "cpu2-gloo"]
    assert main([*ask, "--output", "csv"]) == 0
    step = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert len(step) == 1 and step["step_time_s"][0] > 0 and "memory" not in step
    assert main([*ask, "--by", "rank", "--output", "csv"]) == 0
    assert len(pd.read_csv(io.StringIO(capsys.readouterr().out))) == 2


@pytest.mark.parametrize(
    ("words", "column"),
    [("collective all_reduce --bytes 25e6 --ranks 4 --platform dgx-h100", "time_s"), ("doctor", "Python")],
)
def test_one_answer_is_one_row_of_every_form(capsysbinary, words, column):
    forms = {}
    for form in ("json", "csv", "parquet"):
        assert main([*words.split(), "--output", form]) == 0
        forms[form] = io.BytesIO(capsysbinary.readouterr().out)
    wanted = json.load(forms["json"])[column]
    for frame in (pd.read_csv(forms["csv"]), pd.read_parquet(forms["parquet"])):
        assert frame[column].tolist() == [wanted]


def test_parquet_is_refused_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main([*SHOW, "--output", "parquet"]) == 2
    assert "send it to a file" in capsys.readouterr().err


def test_warnings_that_say_the_same_are_one():
    found = group_warnings(
        [
            "nobody measured it",
            "all_gather on 16 ranks: uncalibrated (1.6% of the step)",
            "reduce_scatter on 16 ranks: uncalibrated (0.9% of the step)",
            "send on 2 ranks: over links",
            "broadcast on 2 ranks: over links",
            "12 operators lie outside",
            "13 operators lie outside",
            "nobody measured it",
        ]
    )
    assert found == [
        "nobody measured it",
        "all_gather and reduce_scatter on 16 ranks: uncalibrated (1.6% of the step) (numbers of all_gather)",
        "send and broadcast on 2 ranks: over links",
        "12 operators lie outside (and 1 more like it)",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_sign_of_work_stands_on_terminals_only_and_is_wiped_off_before_the_answer(monkeypatch):
    monkeypatch.setattr("trioflow.cli.output.QUIET_S", 0.0)
    for stream, drawn in ((Terminal(), True), (io.StringIO(), False)):
        sign = WaitSign(stream, "simulate")
        sign.text = ", 3 of 8 plans"
        while drawn and "plans" not in stream.getvalue():
            time.sleep(0.001)
        PlainStream(stream, sign.stop).write("answer\n")
        sign.stop()
        text = stream.getvalue()
        assert text.endswith("answer\n") and (" s, 3 of 8 plans\r" in text) == drawn
        if drawn:
            wiped = text.rpartition("\r")[0].rpartition("\r")[2]
            assert wiped and not wiped.strip(), "blank up to where the sign went"


def test_a_command_that_ends_soon_draws_no_sign():
    stream = Terminal()
    with WaitSign(stream, "show"):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("trioflow simul", {"simulate"}),
        ("trioflow simulate --platform dgx-h", {"dgx-h100", "dgx-h200"}),
        ("trioflow show gpt2-t", {"gpt2-tiny-b8"}),
        ("trioflow simulate x --slow", {"--slow-rank"}),
        ("trioflow show x --output p", {"parquet"}),
        ("trioflow completion z", {"zsh"}),
        ("trioflow plan llama-3.1", {"llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"}),
        ("trioflow platforms mi300", {"mi300x-node"}),
        ("trioflow simulate x --plan hs", set()),
        ("trioflow simulate x --schedule zb", {"zbv"}),
    ],
)
def test_shells_offer_commands_options_and_names(shell, typed, offered):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    words = typed.split()
    script = write_completion(build_parser()).replace("complete -o", ": -o") + (
        f"\nCOMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _trioflow; echo ${{COMPREPLY[@]}}"
    )
    if shell == "zsh":
        script = f"autoload -U +X bashcompinit && bashcompinit\nsetopt ksh_arrays\n{script}"
    run = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True)
    # zsh's compgen offers all, and zsh itself keeps those that begin with what was typed.
    assert {word for word in run.stdout.split() if word.startswith(words[-1])} == offered


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_fits_two_screens_and_help_all_shows_every_option(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    texts = []
    for words in ([command, "--help"], [command, "--help", "all"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 0
        texts.append(capsys.readouterr().out)
    usual, everything = texts
    assert len(usual.splitlines()) <= 82 and max(map(len, usual.splitlines())) <= 112
    root = next(action for action in build_parser([command])._actions if action.dest == "command")
    actions = [action for action in root.choices[command]._actions if action.option_strings]
    rare = [action.option_strings[-1] for action in actions if getattr(action, "rare", False)]
    assert all(action.option_strings[-1] in everything for action in actions)
    assert not any(f"  {flag} " in usual for flag in rare) and ("shows every option" in usual) == bool(rare)


def test_a_flag_has_the_name_type_and_meaning_of_its_field_in_python():
    root = next(action for action in build_parser(["simulate"])._actions if action.dest == "command")
    flags = {action.dest: action for action in root.choices["simulate"]._actions}
    declared = {one.name: one for record in (Options, Plan) for one in fields(record)}
    shared = flags.keys() & declared.keys() - {"plan", "chunks", "chunk_bytes"}
    assert len(shared) > 45
    for name in shared - {"operator_scales", "slow_ranks"}:
        assert flags[name].help.startswith(declared[name].metadata["description"].partition(". ")[0]), name
        assert flags[name].default is None
        assert name not in Plan.__dataclass_fields__ or [name_flag(name)] == flags[name].option_strings
