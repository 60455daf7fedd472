"""The documents as a site: built strictly, whole, and readable in a real browser without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from browser import Browser, list_faults, list_requests, read_axe, run_driver
from project_copy import ROOT
from trioflow import tables
from trioflow.cli.main import COMMANDS

PAGES = (
    "index",
    "healthy",
    "accuracy",
    "command_reference",
    "table_reference",
    "which_plan",
    "notebooks/first_prediction",
    "notebooks/compare_plans",
    "notebooks/add_a_gpu",
    "clusters",
)
"""Those that are opened: of each kind."""
OPEN = """
document.querySelectorAll("details").forEach(part => { part.open = true; });
requestAnimationFrame(() => requestAnimationFrame(arguments[arguments.length - 1]));
"""
TALLEST = 6500
"""A page as it opens, at any width [pixels]: who looks through it reaches its end."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make site` does, into a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "tools"]
    found = subprocess.run([*pip, "--requirement", ROOT / "envs/site.lock"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"mkdocs cannot be installed: {found.stderr.strip()[-200:]}")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder / "site"]
    built = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(folder / "tools")}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    return folder / "site"


@pytest.mark.slow
def test_the_reference_is_that_of_the_code(site: Path) -> None:
    commands = (site / "command_reference.html").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f'<h2 id="{name}">' in commands and f"usage: trioflow {name}" in commands
    described = (site / "table_reference.html").read_text(encoding="utf-8")
    for schema in tables.SCHEMAS.values():
        for column in schema.names:
            assert f"<code>{column}</code>" in described
    assert not list(site.rglob("*.py")) and not list(site.rglob("*.tsv"))
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r">[\w/]+\.md</a>", text), f"{page.name} names a file, not its page"
        assert not re.search(r' id="\d', text), f"{page.name}: the theme reads it as a selector"


@pytest.mark.slow
def test_notebooks_are_pages_with_their_tables_and_figures(site: Path) -> None:
    texts = {path.stem: path.read_text(encoding="utf-8") for path in site.glob("notebooks/*.html")}
    assert texts.keys() == {path.stem for path in ROOT.glob("docs/notebooks/*.ipynb")}
    for name, text in texts.items():
        assert 'class="dataframe"' in text and f'href="{name}.ipynb"' in text, name
    warned = texts["add_a_gpu"]
    assert 0 < warned.count("warnings</summary>") < warned.count(">warning</th>"), "all of one answer are one"
    assert not (site / "404.html").exists(), "whose links hold at the root of a server alone"
    assert '<img alt="Step time' in texts["compare_plans"]
    assert 'href="notebooks/add_a_gpu.html"' in (site / "index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_pages_can_be_read_at_any_width_and_in_any_light(site: Path, tmp_path: Path) -> None:
    axe = read_axe(tmp_path / "axe")
    with run_driver(tmp_path / "log.txt") as driver:
        browser = Browser(driver, tmp_path / "profile", 1280, 900)
        try:
            for width, scheme in ((1280, "light"), (420, "dark"), (420, "light")):
                browser.resize(width, 900)
                browser.prefer(scheme)
                for name in PAGES:
                    browser.log("performance"), browser.log("browser")
                    browser.open((site / f"{name}.html").as_uri())
                    browser.wait_for("document.readyState === 'complete'")
                    height = browser.evaluate("document.documentElement.scrollHeight")
                    assert height <= TALLEST, (name, width)
                    browser.run(OPEN)
                    cued = "Array.from(document.querySelectorAll('table')).every(one =>"
                    cued += " one.scrollWidth <= one.clientWidth || one.matches('.scrolls[tabindex]'))"
                    assert browser.evaluate(cued), (name, width, "a table scrolls and does not say so")
                    wide = "document.documentElement.scrollWidth - window.innerWidth"
                    assert browser.evaluate(wide) <= 0, (name, width)
                    asked = [one for one in list_requests(browser) if not one.startswith(("file:", "data:"))]
                    assert asked == [], name
                    told = [one["message"] for one in browser.log("browser")]
                    # Search has no index without a server, and is not shown then.
                    thrown = [one for one in told if "Uncaught" in one]
                    assert [one for one in thrown if "search/worker.js" not in one] == [], name
                    assert list_faults(browser, axe) == [], (name, width, scheme)
            browser.open((site / "command_reference.html").as_uri() + "#simulate")
            opened = "Array.from(document.querySelectorAll('details[open] h2')).map(e => e.id)"
            assert browser.evaluate(opened) == ["simulate"], "what the address names, no more"
            assert not browser.evaluate("document.querySelector('[data-bs-target$=search_modal]')")
            browser.evaluate("document.querySelector('[data-bs-theme-value=dark]').click()")
            assert browser.evaluate("document.documentElement.dataset.bsTheme") == "dark"
        finally:
            browser.close()


def test_the_tour_is_eight_short_pages_with_a_command_that_is_run() -> None:
    nav = {
        name: pages for part in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"] for name, pages in part.items()
    }
    tour = [page for entry in nav["Tour"] for page in entry.values()]
    assert len(tour) == 8
    starts = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md")]
    for name in tour:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert len(text.split()) <= 800, f"{name} is long for a page of the tour"
        assert "```sh\n" in text or name == "cite.md", f"{name} has no command that a test runs"
        assert "![" in text, f"{name} has no picture"
        assert all(f"{name})" in start for start in starts), f"{name} is not linked where users start"
