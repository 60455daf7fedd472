"""One way to make a page: its module lists sections, `report.pages` does the rest.

The glossary, the pages and the files read: taken from what they tell of, so that they cannot drift.
"""

import re
from dataclasses import replace
from html import escape
from operator import itemgetter
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
import trioflow
from trioflow import __version__, tables
from trioflow.base.errors import TraceError
from trioflow.base.provenance import digest_file, stamp, write_json
from trioflow.report.build import read_conformance, render_conformance, sum_up_comparisons, write_conformance
from trioflow.report.inputs import OWN_TABLES
from trioflow.report.pages import (
    FILES,
    MADE,
    PAGES,
    UNITS,
    Page,
    Section,
    count_reached,
    escape_text,
    read_look,
    read_record,
    render_files_read,
    render_page,
    render_records,
    render_tables,
    words,
    write_page,
)
from trioflow.report.sections import describe_path, render_traces, sum_up_modules, sum_up_path
from trioflow.report.trace_page import build_trace_page
from trioflow.tables import read_table, records
from trioflow.trace.facts import UNTIMED
from trioflow.trace.store import Trace, coverage_of_trace, describe_step, save_trace, summarise_trace

LIBRARY = Path(trioflow.__file__).parent


def test_the_shell_of_a_page_is_written_in_one_module():
    shell = re.compile(r"<(?:section|header|main|footer|h1|h2|body)\b")
    found = {
        path.relative_to(LIBRARY).as_posix()
        for path in LIBRARY.rglob("*.py")
        if shell.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"report/pages.py"}


def test_contents_list_the_sections_in_order_and_no_empty_one():
    page = Page(
        "A & B",
        [
            Section("first", "First", ["<p>1</p>", "", "<p>2</p>"]),
            Section("nothing", "Nothing", ["", ""]),
            Section("last", "Last", ["<p>3</p>"]),
        ],
        "9 % & more",
        made_from=" from x < y",
    )
    text = render_page(page)
    contents = text[text.index('<nav aria-label="Contents"') : text.index("</nav>")]
    assert re.findall('href="#([^"]*)"', contents) == ["first", "last"]
    assert re.findall('<section id="([^"]*)"', text) == ["first", "last"]
    assert text.index("<p>1</p>") < text.index("<p>2</p>") < text.index("<p>3</p>")
    assert "<h1>A &amp; B</h1>" in text and '<p class="headline">9&nbsp;% &amp; more</p>' in text
    assert " from x &lt; y.</footer>" in text


def test_a_page_is_written_whole(tmp_path):
    page = Page("t", [Section("a", "A", ["<p>x</p>"])])
    write_page(tmp_path / "page.html", page)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text == render_page(page, "page.html")
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_navigation_links_what_exists_and_says_how_to_make_the_rest(tmp_path):
    page = Page("t", [Section("a", "A", ["<p>x</p>"])], verdict="2 % off")
    write_page(tmp_path / "index.html", page)
    write_page(tmp_path / "traces.html", page)
    text = (tmp_path / "traces.html").read_text(encoding="utf-8")
    side = text[text.index('<nav class="side"') : text.index('<div class="body">')]
    assert re.findall('<a href="([^"#]*)"', side) == ["index.html"]
    assert side.count('aria-current="page"') == 1
    assert side.count('class="unmade"') == len(PAGES) - 2
    assert "<span>Case studies</span><code>snakemake studies</code>" in side
    assert '<p class="verdict">2&nbsp;% off</p>' in text
    listed = (tmp_path / MADE).read_text(encoding="utf-8")
    assert listed == 'window.trioflowPages = ["index.html", "traces.html"];\n'


def test_a_page_for_a_folder_that_it_does_not_lie_in_yet_tells_nobody(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    page = Page("t", [Section("a", "A", ["<p>x</p>"])])
    write_page(site / "traces.html", page)
    before = (site / MADE).read_text(encoding="utf-8")
    write_page(tmp_path / "index.html", page, site=site)
    assert '<a href="traces.html">' in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (site / MADE).read_text(encoding="utf-8") == before
    assert not (tmp_path / MADE).exists()


def test_aims_are_counted_where_there_are_any():
    assert count_reached([True, None, False]) == "1 of 2 aims reached."
    assert count_reached([None]) == ""


def test_cells_of_words_wrap_by_their_length() -> None:
    cells = ["x", "one of twenty-one signs", "a cell that is so long that it wraps anyhow"]
    table = render_records([cells], [words("a", "", "", itemgetter(at)) for at in range(3)])
    kinds = re.findall(r'class="(long|medium)"', table)
    assert kinds == ["medium", "long"] and "td.medium { white-space: normal" in read_look("css")


ROOT = Path(__file__).parents[3]


def test_every_column_of_every_table_is_told_with_its_unit():
    text = render_tables(tables.SCHEMAS)
    for schema in tables.SCHEMAS.values():
        for field in schema:
            unit = field.metadata[b"unit"].decode()
            name = field.name + (f" [{unit}]" if unit else "")
            assert f"<dt>{name}</dt><dd>{escape_text(field.metadata[b'meaning'].decode())}</dd>" in text


def test_every_unit_has_a_meaning_and_only_units_that_are_used_are_told():
    used = {f.metadata[b"unit"].decode() for schema in tables.SCHEMAS.values() for f in schema}
    assert used - {""} <= set(UNITS)
    only = pa.schema([pa.field("a", pa.int64(), metadata={"unit": "flop", "meaning": "work"})])
    text = render_tables({"one": only})
    assert "<dt>flop</dt>" in text and "<dt>ns</dt>" not in text and "<dt>a [flop]</dt>" in text


def test_places_are_those_of_tables_that_rules_write():
    known = {*tables.SCHEMAS, *OWN_TABLES, "anchors"}
    assert set(FILES) <= known
    rules = "\n".join(path.read_text() for path in sorted((ROOT / "rules").rglob("*.smk")))
    for places in FILES.values():
        for place in places.split(", "):
            name = Path(place).name
            pattern = re.sub("<[a-z]+>", '[^"/]+', re.escape(name))
            stem = re.escape(name.removesuffix(".parquet"))
            assert re.search(rf'{pattern}|"{stem}"', rules) or "traces" in name, place


def test_every_page_names_all_pages_with_the_command_that_makes_them():
    text = render_page(Page("t", [Section("one", "One", ["<p>1</p>"])]))
    for page in PAGES:
        assert f"<span>{escape(page.title)}</span>" in text
        assert f"<code>{page.command}</code>" in text
    assert len({page.file for page in PAGES}) == len(PAGES)
    rules = "\n".join(path.read_text() for path in sorted((ROOT / "rules").rglob("*.smk")))
    for page in PAGES:
        target = page.command.rpartition(" ")[2]
        assert target == "reproduce" or f"\nrule {target}:\n" in rules, page.command


def test_files_are_told_with_digest_version_and_what_they_were_made_from(tmp_path):
    source = tmp_path / "in/source.json"
    write_json(source, {"trioflow_version": "0.0.1"})
    table = tmp_path / "out/cases.parquet"
    schema = pa.schema([pa.field("a", pa.int64(), metadata={"unit": "", "meaning": "x"})])
    tables.write_table(pd.DataFrame({"a": [1]}), "cases", table, stamp([source]), schema)
    plain = tmp_path / "out/notes.txt"
    plain.write_text("x")
    text = render_files_read([table, source, plain, tmp_path / "gone.parquet"])
    assert "3 files read" in text
    for file in (source, table, plain):
        assert f"{file.parent.name}/{file.name}" in text and digest_file(file)[:16] in text
    assert __version__ in text and "0.0.1" in text
    assert f"in/source.json {digest_file(source)[:16]}" in text
    assert "gone" not in text


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_a_file_that_says_nothing_of_itself_is_no_error(tmp_path, content):
    for name in ("a.json", "a.parquet", "a.bin"):
        (tmp_path / name).write_text(content)
        assert read_record(tmp_path / name) == {}


def test_the_page_says_where_each_trace_comes_from_and_what_could_not_be_joined(tmp_path, cnn_trace, transformer_trace):
    facts = replace(cnn_trace.facts, unjoined=["3 device events (4 us) <lost>"], warnings=["old"])
    save_trace(Trace(cnn_trace.operators, cnn_trace.tensors, facts), tmp_path / "first")
    save_trace(transformer_trace, tmp_path / "second")
    folders = [tmp_path / "first", tmp_path / "second"]
    build_trace_page(folders, tmp_path / "traces.html", tmp_path / "traces.parquet")
    page = (tmp_path / "traces.html").read_text()
    cells = re.findall(r"<(?:td|th scope=\"row\")[^>]*>(.*?)</t", page)
    assert "3 device events (4 us) &lt;lost&gt;" in cells
    assert cells.count("nothing") == 1
    assert "first: old" in page
    rows = records(read_table(tmp_path / "traces.parquet", "traces"))
    assert [row["trace"] for row in rows] == ["first", "second"]
    for row, trace in zip(rows, (cnn_trace, transformer_trace), strict=True):
        assert row["flop"] == trace.operators["flop"].sum()
        assert row["device_s"] == pytest.approx(trace.operators["device_ns"].sum() / 1e9)
        counts = [row[f"{p}_operators"] for p in ("forward", "backward", "optimizer")]
        assert sum(counts) == len(trace.operators)
        assert min(counts) > 0


def test_a_missing_trace_leaves_no_page(tmp_path):
    with pytest.raises(TraceError, match="no trace here"):
        build_trace_page([tmp_path / "none"], tmp_path / "p.html", tmp_path / "p.parquet")
    assert not list(tmp_path.iterdir())


def test_coverage_is_of_what_was_measured(cnn_trace):
    step = coverage_of_trace(cnn_trace)
    assert 0.5 < step < 1.0  # on a CPU the interpreter's time is covered by no operator
    operators, tensors, facts = cnn_trace.operators, cnn_trace.tensors, cnn_trace.facts
    gpu = Trace(operators, tensors, replace(facts, device="cuda", joined_share=0.75))
    assert coverage_of_trace(gpu) == 0.75
    untimed = Trace(operators, tensors, replace(facts, step_time_source=UNTIMED, step_time_s=0.0))
    assert coverage_of_trace(untimed) is None
    assert "no timings" in describe_step(summarise_trace(untimed, "x"))


ABOUT = {"compared": "messages", "plan": "2 data", "model": "gpt2", "against": "ranks over gloo"}


def found(count: int, equal: bool = True, ranks: str = "2") -> dict[str, object]:
    return {**ABOUT, "ranks": ranks, "count": count, "equal": equal}


def test_ranks_of_one_comparison_are_one_row_and_one_difference_spoils_it() -> None:
    rows = sum_up_comparisons([found(3), found(4), found(5, ranks="4"), found(1, False, "4")])
    assert [(row["ranks"], row["count"], row["equal"]) for row in rows] == [("2", 7, True), ("4", 6, False)]


def test_what_is_written_is_read_and_shown(tmp_path) -> None:
    path = tmp_path / "table.tsv"
    write_conformance([found(3), found(2, False, "4")], "2.13.0", "2026-11-22", path)
    frame = read_conformance(path)
    assert frame["count"].tolist() == [3, 2] and frame["equal"].tolist() == ["yes", "no"]
    text = render_conformance(frame)
    assert "1 of 2 comparisons with the real PyTorch (2.13.0, 2026-11-22)" in text
    assert "over 5 messages" in text and text.count("<tr>") == 3


def test_the_shipped_table_is_green() -> None:
    frame = read_conformance()
    assert set(frame["equal"]) == {"yes"}
    kinds = {"gpipe", "1f1b", "interleaved"}
    assert kinds <= set(frame["plan"]), "the schedules that are compared cell by cell"
    assert {"gpt2", "resnet18"} <= set(frame["model"])


def make_path(*rows: tuple[int, str, str, str, str, float]) -> pd.DataFrame:
    """Rank, kind, name, phase, module and length [s] of tasks, one after the other."""
    found, begin_s = [], 0.0
    total_s = sum(row[-1] for row in rows)
    for number, (rank, kind, name, phase, module, lasts_s) in enumerate(rows):
        found.append(
            {
                "task_id": number,
                "rank": rank,
                "stream": "compute",
                "kind": kind,
                "name": name,
                "phase": phase,
                "module": module,
                "start_s": begin_s,
                "end_s": begin_s + lasts_s,
                "reason": "stream",
                "share": lasts_s / total_s,
            }
        )
        begin_s += lasts_s
    return pd.DataFrame(found, columns=tables.CRITICAL_PATH.names)


PATH = make_path(
    (0, "compute", "mm", "forward", "h.0.a", 1.0),
    (0, "host", "launch", "", "", 0.05),
    (0, "collective", "all_reduce of bucket 0", "backward", "", 3.0),
    (1, "collective", "all_reduce of bucket 1", "backward", "", 0.9),
    (1, "compute", "mm", "backward", "h.0.b", 4.0),
    (1, "recv", "recv", "forward", "", 0.5),
    (1, "memcpy", "copy", "backward", "h.1", 0.45),
)


def test_work_is_summed_by_kind_and_rank_and_communication_without_a_rank() -> None:
    found = tables.records(sum_up_path(PATH))
    assert [(row["work"], row["rank"], row["tasks"]) for row in found] == [
        ("backward compute", 1, 1),
        ("all_reduce", None, 2),
        ("forward compute", 0, 1),
        ("messages", None, 1),
        ("backward copies", 1, 1),
        ("host time", 0, 1),
    ]
    assert found[1]["time_s"] == pytest.approx(3.9) and found[1]["share"] == pytest.approx(3.9 / 9.9)
    assert sum(row["share"] for row in found) == pytest.approx(1.0)


def test_modules_are_told_apart_to_a_depth() -> None:
    found = sum_up_modules(PATH)
    assert found["module"].tolist() == ["h.0", "h.1"]
    assert found["time_s"].tolist() == pytest.approx([5.0, 0.45])
    assert sum_up_modules(PATH, depth=3)["module"].tolist() == ["h.0.b", "h.0.a", "h.1"]


def test_the_sentence_tells_the_large_parts_and_the_rest_together() -> None:
    assert describe_path(PATH) == (
        "What the step waits for, from its start to its end: 40 % backward compute of rank 1, "
        "39 % all_reduce, 10 % forward compute of rank 0, 5 % messages and 5 % backward copies of "
        "rank 1. This critical path passes from one rank to another once."
    )
    alone = make_path(*[(0, "compute", "mm", "forward", f"m{n}", 1.0) for n in range(3)])
    assert describe_path(alone).endswith("end: 100 % forward compute of rank 0.")


def test_the_table_of_traces_shows_facts_that_nothing_computes_with():
    facts = trioflow.load_trace("gpt2-tiny-b8").facts
    assert "profiled_step_s" in facts.other
    assert f'data-sort="{facts.other["profiled_step_s"]}"' in render_traces({"gpt2-tiny-b8": facts})
