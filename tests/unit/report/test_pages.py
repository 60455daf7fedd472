"""One way to make a page: its module lists sections, `report.pages` does the rest."""

import re
from pathlib import Path

import trioflow
from trioflow.report.pages import (
    MADE,
    PAGES,
    Cell,
    Column,
    Page,
    Section,
    count_reached,
    read_look,
    render_page,
    render_table,
    write_page,
)

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
    words = ["x", "one of twenty-one signs", "a cell that is so long that it wraps anyhow"]
    table = render_table([Column("a", number=False)] * 3, [[Cell(word) for word in words]])
    kinds = re.findall(r'class="(long|medium)"', table)
    assert kinds == ["medium", "long"] and "td.medium { white-space: normal" in read_look("css")
