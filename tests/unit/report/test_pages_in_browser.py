"""Every page in a real chromium, wide and narrow, light and dark: nothing overflows or fails, no link is dead.

axe-core finds nothing serious in any of them, tables sort, what is wider than the page says so.

The pages are those of ``results/report`` (or ``TRIOFLOW_REPORT``) where a run has
left some, else small made-up ones. Pictures of them go into ``screenshots``
below it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pandas as pd
import pytest
from browser import Browser, list_faults, list_requests, read_axe, run_driver
from evaluation.published.published_cases import make_cases
from evaluation.published.test_published import ANCHOR_ROWS, CAUSE_ROWS
from evaluation.validation.validation_cases import write_files
from report_run import PLANS, WORKLOADS, experiments_of, write_run
from trioflow import tables
from trioflow.base.provenance import atomic_path
from trioflow.report.attribution import CAUSES
from trioflow.report.build import build_report
from trioflow.report.pages import (
    PAGES,
    Cell,
    Field,
    Page,
    Section,
    itself,
    list_pages,
    render_page,
    render_records,
    write_page,
)
from trioflow.report.trace_page import build_trace_page
from trioflow.trace.store import save_trace
from trioflow_evaluation.published.judge import ANCHORS
from trioflow_evaluation.published.page import build_published_page
from trioflow_evaluation.validation.page import build_validation_page

pytestmark = [pytest.mark.slow, pytest.mark.pages]

ROOT = Path(__file__).parents[3]
REPORT = Path(os.environ.get("TRIOFLOW_REPORT", ROOT / "results/report"))
NOT_OURS = ("snakemake.html",)
WIDTHS = (1280, 420)
SCHEMES = ("light", "dark")
HEIGHT = 900
TALLEST_PAGE = 6500
"""Of a page as it opens, at either width [pixels]."""
LARGEST_REPORT_BYTES = 5_000_000
"""Of Snakemake's own report; 2.9 MB of it are its scripts, timelines alone would be 6 more."""
TALLEST = 12_000
"""Of a picture [pixels]; what is below is cut off."""

CHECK = """
const found = {};
found.overflow = document.documentElement.scrollWidth - window.innerWidth;
found.images = Array.from(document.images).filter(
  image => !image.complete || !image.naturalWidth || !image.alt.trim()).map(image => image.src);
found.anchors = Array.from(document.querySelectorAll('a[href^="#"]')).map(
  link => link.getAttribute('href').slice(1)).filter(name => !document.getElementById(name));
found.contents = document.querySelectorAll('nav[aria-label=Contents] a[href^="#"]').length;
found.pages = document.querySelectorAll('#pages > li').length;
found.current = document.querySelectorAll('#pages [aria-current=page]').length;
found.links = Array.from(document.querySelectorAll('a[href], object')).map(one => one.href || one.data);
found.uncued = Array.from(document.querySelectorAll('main .wide')).filter(
  part => part.scrollWidth - part.clientWidth > 1 &&
    !(part.classList.contains('scrolls') && part.tabIndex === 0)).length;
found.height = document.documentElement.scrollHeight;
found.twice = Array.from(document.querySelectorAll('[id]')).map(one => one.id).filter(
  (name, at, all) => all.indexOf(name) !== at);
return found;
"""
SORT = """
const wrong = [];
let sorted = 0;
function values(table, column) {
  return Array.from(table.tBodies[0].rows).map(row => row.cells[column].dataset.sort);
}
function holds(keys, down) {
  const known = keys.filter(key => key !== '');
  if (keys.slice(known.length).some(key => key !== '')) return false;
  const numbers = known.every(key => !isNaN(key));
  return known.every((key, at) => {
    if (!at) return true;
    const order = numbers ? key - known[at - 1] : key.localeCompare(known[at - 1]);
    return down ? order <= 0 : order >= 0;
  });
}
document.querySelectorAll('details').forEach(part => { part.open = true; });
document.querySelectorAll('table.sortable').forEach((table, number) => {
  if (table.tBodies[0].rows.length < 2) return;
  const heads = Array.from(table.querySelectorAll('thead th'));
  heads.forEach((head, column) => {
    const mixed = new Set(values(table, column).filter(key => key !== '').map(key => isNaN(key)));
    if (mixed.size > 1) return;
    for (const way of ['ascending', 'descending']) {
      head.querySelector('button').click();
      const marked = heads.filter(one => one.hasAttribute('aria-sort'));
      if (marked.length !== 1 || head.getAttribute('aria-sort') !== way ||
          !holds(values(table, column), way === 'descending'))
        wrong.push([number, column, way]);
      sorted += 1;
    }
  });
});
return {wrong: wrong, sorted: sorted};
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_driver(tmp_path_factory.mktemp("driver") / "log.txt") as address:
        yield address


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, driver: str, trace_folder: Path) -> list[Path]:
    folder = REPORT
    if not (REPORT / "index.html").is_file():
        folder = make_pages(tmp_path_factory.mktemp("site"), trace_folder)
    found = [page for page in sorted(folder.glob("*.html")) if page.name not in NOT_OURS]
    assert found
    return found


@pytest.fixture(scope="module")
def trace_folder(tmp_path_factory: pytest.TempPathFactory, cnn_trace: Any) -> Path:
    folder = tmp_path_factory.mktemp("traces") / "made-up-b4"
    save_trace(cnn_trace, folder)
    return folder


def make_pages(folder: Path, trace: Path) -> Path:
    """Make one small page of every kind."""
    report = folder / "results/report"
    workloads = WORKLOADS[-1:]
    experiments = experiments_of(workloads)
    build_report(write_run(folder, workloads, scale=0.02), report, experiments, PLANS)
    build_trace_page([trace, trace], report / "traces.html", report / "traces.parquet")
    files, diagnoses = write_files(folder)
    build_validation_page(files, diagnoses, report / "cost_models.html", report / "validation.parquet")
    cases = folder / "published/cases.parquet"
    tables.write_table(make_cases(), "published_cases", cases)
    causes, anchors = folder / "published/causes.parquet", folder / "published/anchors.parquet"
    frame = pd.DataFrame(CAUSE_ROWS, columns=CAUSES.names)
    tables.write_table(frame, "causes", causes, schema=CAUSES)
    frame = pd.DataFrame(ANCHOR_ROWS, columns=ANCHORS.names)
    tables.write_table(frame, "anchors", anchors, schema=ANCHORS)
    build_published_page([cases], [causes], anchors, report / "published.html", report / "published.parquet")
    return report


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return read_axe(tmp_path_factory.mktemp("axe"))


def test_snakemakes_own_report_stays_small() -> None:
    report = REPORT / "snakemake.html"
    if not report.is_file():
        pytest.skip("no run has left Snakemake's report")
    assert report.stat().st_size < LARGEST_REPORT_BYTES


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_holds_in_a_real_browser(
    driver: str, pages: list[Path], axe: str, width: int, scheme: str, tmp_path: Path
) -> None:
    browser = Browser(driver, tmp_path / "profile", width, HEIGHT)
    try:
        browser.resize(width, HEIGHT)
        browser.prefer(scheme)
        for page in pages:
            browser.log("performance"), browser.log("browser")
            browser.open(page.as_uri())
            browser.wait_for("document.readyState === 'complete'")
            take_picture(browser, page, f"{width}-{scheme}")
            found = look(browser)
            assert found["height"] <= TALLEST_PAGE, page.name
            browser.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
            found = look(browser)
            assert found["overflow"] <= 0, page.name
            assert found["images"] == [], page.name
            assert found["anchors"] == [], page.name
            assert found["twice"] == [], page.name
            assert found["uncued"] == 0, page.name
            assert [one for one in found["links"] if is_dead(one)] == [], page.name
            assert found["contents"] > 0, page.name
            assert found["pages"] == len(PAGES) and found["current"] == 1, page.name
            told = browser.call("POST", "execute/sync", {"script": SORT, "args": []})
            assert told["wrong"] == [] and told["sorted"] > 0, page.name
            assert [one for one in browser.log("browser") if one["level"] == "SEVERE"] == []
            assert [one for one in list_requests(browser) if not is_local(one)] == []
            assert list_faults(browser, axe) == [], page.name
    finally:
        browser.close()


def look(browser: Browser) -> dict[str, Any]:
    """Return what CHECK finds, once the page was laid out and its observers were told."""
    browser.run("requestAnimationFrame(() => requestAnimationFrame(arguments[arguments.length - 1]))")
    found: dict[str, Any] = browser.call("POST", "execute/sync", {"script": CHECK, "args": []})
    return found


def is_dead(address: str) -> bool:
    """Whether a link leads to a file that is not there; links to the outside are not asked."""
    parts = urlsplit(address)
    return parts.scheme == "file" and not Path(unquote(parts.path)).exists()


def take_picture(browser: Browser, page: Path, kind: str) -> None:
    """Keep a picture of the page as it opens; what is an object is drawn where the window reaches it."""
    height = min(int(browser.evaluate("document.documentElement.scrollHeight")), TALLEST)
    width = int(browser.evaluate("window.innerWidth"))
    browser.resize(width, height)
    look(browser)
    picture = browser.picture(width, height)
    browser.resize(width, HEIGHT)
    target = REPORT / f"screenshots/{page.stem}-{kind}.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as temporary:
        temporary.write_bytes(picture)


def test_pages_are_linked_once_they_exist_and_no_longer(driver: str, tmp_path: Path) -> None:
    """The first page was written before the second, and the third is gone again."""
    page = Page("t", [Section("s", "S", ["<p>x</p>"], folded=True)])
    for name in ("drift.html", "index.html", "traces.html"):
        write_page(tmp_path / name, page)
    (tmp_path / "drift.html").unlink()
    list_pages(tmp_path)
    browser = Browser(driver, tmp_path / "profile", *WIDTHS)
    try:
        for name, other in (("index.html", "traces.html"), ("traces.html", "index.html")):
            browser.open((tmp_path / name).as_uri() + "#s")
            links = browser.evaluate(
                "Array.from(document.querySelectorAll('#pages a')).map(e => e.getAttribute('href'))"
            )
            assert sorted(set(links)) == sorted({"#content", "#s", other})
            shown = browser.evaluate("document.querySelector('[data-page=\"drift.html\"]').innerText.split('\\n')")
            assert shown == ["Jitter of recorded jobs", "snakemake published"]
            assert browser.evaluate("document.querySelector('main details').open"), "asked for by its address"
    finally:
        browser.close()


def test_what_axe_finds_is_seen(driver: str, axe: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = render_page(Page("t", [Section("s", "S", ["<p style='color: #eee'>too pale to read</p>"])]))
    page.write_text(text, encoding="utf-8")
    browser = Browser(driver, tmp_path / "profile", *WIDTHS)
    try:
        browser.open(page.as_uri())
        assert [one[1] for one in list_faults(browser, axe)] == ["color-contrast"]
    finally:
        browser.close()


def is_local(address: str) -> bool:
    return address.startswith(("file://", "data:"))


def test_the_keyboard_sorts_by_value_and_keeps_missing_ones_last(driver: str, tmp_path: Path) -> None:
    rows = [Cell("b", 10.0), Cell("a", 9.0), Cell("none", float("nan")), Cell("c", -1.0)]
    table = render_records(rows, [Field("a", "", "", itself)])
    page = tmp_path / "page.html"
    page.write_text(render_page(Page("t", [Section("s", "S", [table])])), encoding="utf-8")
    assert "<button" not in page.read_text().partition("<script>")[0], "it reads without a script"
    browser = Browser(driver, tmp_path / "profile", *WIDTHS)
    try:
        browser.open(page.as_uri())
        for expected in (["c", "a", "b", "none"], ["b", "a", "c", "none"]):
            browser.evaluate("document.querySelector('th button').focus()")
            for kind in ("keyDown", "keyUp"):
                browser.command(
                    "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13
                )
            order = browser.evaluate(
                "Array.from(document.querySelectorAll('tbody tr')).map(row => row.innerText.trim())"
            )
            assert order == expected
        assert browser.evaluate("document.querySelector('th').getAttribute('aria-sort')") == ("descending")
    finally:
        browser.close()


def test_a_request_to_the_outside_would_be_seen(driver: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<img src='http://127.0.0.1:9/x.png' alt='x'>", encoding="utf-8")
    browser = Browser(driver, tmp_path / "profile", *WIDTHS)
    try:
        browser.open(page.as_uri())
        assert any(not is_local(one) for one in list_requests(browser))
        assert any(one["level"] == "SEVERE" for one in browser.log("browser"))
        found = browser.call("POST", "execute/sync", {"script": CHECK, "args": []})
        assert found["images"]
    finally:
        browser.close()
