"""Whatever a user names, the command answers in one sentence, with status 2, in bounded time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from trioflow.base.errors import InputError
from trioflow.base.provenance import PACKAGE
from trioflow.base.settings import check_settings
from trioflow.cli import answer
from trioflow.cli.main import TRACEBACK, main
from trioflow.cli.output import escape_control, format_facts, format_table
from trioflow.hardware.platform import load_platform
from trioflow.hardware.topologies.grids import MOST_PARTS
from trioflow.hardware.topologies.nodes import build_dragonfly, build_fat_tree
from trioflow.sweeps.description import load_sweep
from trioflow.trace.store import load_trace, save_trace


def refuse(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the one line of a refusal."""
    assert main(words) == 2
    printed = capsys.readouterr()
    assert not printed.out and printed.err.count("\n") == 1
    return printed.err


def test_a_million_ranks_are_refused_before_they_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ("simulate", "gpt2-tiny-b8", "--plan", "ddp"),
        ("search", "gpt2-tiny-b8"),
        ("collective", "all_reduce", "--bytes", "1e6"),
    ):
        said = refuse(capsys, *words, "--ranks", "1000000", "--platform", "dgx-h100")
        assert f"1000000 ranks, {MOST_PARTS} are the most" in said


def test_networks_without_end_are_refused_before_they_are_built() -> None:
    with pytest.raises(InputError, match=f"1000000000 is out of range.*to {MOST_PARTS}"):
        build_fat_tree(8, 1e9, 1e-6, arity=10**9)
    with pytest.raises(InputError, match="makes 216000000000 links"):
        build_fat_tree(8, 1e9, 1e-6, arity=6000)
    with pytest.raises(InputError, match="links"):
        build_dragonfly(
            8,
            1e9,
            1e-6,
            groups=9000,
            routers_per_group=9000,
            local_bandwidth_bytes_per_s=1e9,
            local_latency_s=1e-6,
            global_bandwidth_bytes_per_s=1e9,
            global_latency_s=1e-6,
        )


def test_a_link_on_which_nothing_arrives_is_refused(tmp_path: Path) -> None:
    source = PACKAGE / "data/platforms/cpu2-gloo.yaml"
    text = source.read_text()
    value = text.split("bandwidth_bytes_per_s", 1)[1].split("value: ", 1)[1].split(",")[0].split()[0]
    path = tmp_path / "slow.yaml"
    path.write_text(text.replace(f"value: {value}", "value: 1.0e-300"))
    with pytest.raises(InputError, match=r"1e-300"):
        load_platform(path)


def test_numbers_that_are_none_are_refused_when_a_sweep_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("description: x\nlist: [{trace: gpt2-tiny-b8, platform: cpu2-gloo, compute_scale: .nan}]\n")
    with pytest.raises(InputError, match=r"list\.0\.compute_scale: nan is not finite"):
        load_sweep(path)
    with pytest.raises(InputError, match=r"a: inf is not finite"):
        check_settings({"a": float("inf")}, {"properties": {"a": {"type": "number"}}}, "c.yaml")


def test_control_characters_are_spelled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = load_trace("gpt2-tiny-b8")
    trace.facts = replace(trace.facts, workload="mine\x1b[2J\x9b31m\u202egnp.exe\nok")
    save_trace(trace, tmp_path / "trace")
    assert not main(["show", str(tmp_path / "trace")])
    printed = capsys.readouterr().out
    assert "mine\\x1b[2J\\x9b31m\\u202egnp.exe" in printed
    assert printed == escape_control(printed)
    assert not main(["show", str(tmp_path / "trace"), "--json"])
    assert json.loads(capsys.readouterr().out)["workload"] == trace.facts.workload
    assert "\\x1b" in refuse(capsys, "show", "no\x1bwhere\nat all")
    assert "a\\nb" in format_facts([("a\nb", "c")]) and "a\\rb" in format_table(["x"], [["a\rb"]])
    assert escape_control("a\tb\r\nc\n") == "a\tb\r\nc\n"


def test_an_unforeseen_error_names_the_users_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object) -> None:
        raise TypeError("unsupported operand\ntype(s)")

    monkeypatch.setattr(answer, "run_show", fail)
    said = refuse(capsys, "show", str(tmp_path))
    assert str(tmp_path) in said and "TypeError: unsupported operand\\ntype(s)" in said
    with pytest.raises(TypeError):  # nothing of the user's: the mistake is ours
        main(["show", "gpt2-tiny-b8"])
    monkeypatch.setenv(TRACEBACK, "1")
    with pytest.raises(TypeError):
        main(["show", str(tmp_path)])


def test_memory_that_does_not_suffice_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(options: object) -> None:
        raise MemoryError

    monkeypatch.setattr(answer, "run_show", fail)
    assert "memory does not suffice" in refuse(capsys, "show", "gpt2-tiny-b8")
