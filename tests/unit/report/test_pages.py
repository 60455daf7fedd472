"""One way to make a page: its module lists sections, `report.pages` does the rest."""

from __future__ import annotations

import re
from pathlib import Path

import trioflow
from trioflow.report.pages import Page, Section, render_page, write_page

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
    assert re.findall('href="#([^"]*)"', contents) == ["first", "last", "pages"]
    assert re.findall('<section id="([^"]*)"', text) == ["first", "last"]
    assert text.index("<p>1</p>") < text.index("<p>2</p>") < text.index("<p>3</p>")
    assert "<h1>A &amp; B</h1>" in text and '<p class="headline">9&nbsp;% &amp; more</p>' in text
    assert " from x &lt; y.</footer>" in text


def test_a_page_is_written_whole(tmp_path):
    page = Page("t", [Section("a", "A", ["<p>x</p>"])])
    write_page(tmp_path / "page.html", page)
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == render_page(page)
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
