"""What every page is made of: a title, a headline and an ordered list of sections.

A page module lists its sections. Contents, glossary, files read, links to the
other pages and the writing are the same for all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trioflow import __version__
from trioflow.base.errors import TrioflowError
from trioflow.base.provenance import atomic_path, digest_file, read_json
from trioflow.report.html import (
    Cell,
    Column,
    render_definitions,
    render_details,
    render_links,
    render_paragraph,
    render_table,
)
from trioflow.report.wording import NOTHING, count_words

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #1c1c1c; line-height: 1.5;
  font-family: system-ui, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif; }
main, header { max-width: 1240px; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 1.5rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .75rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid #bbb; }
h3 { font-size: 1.02rem; margin: 1.75rem 0 .25rem; }
p, li, dd { max-width: 46rem; }
p, li, dd, summary, h1, h2, h3 { overflow-wrap: break-word; }
p { margin: .5rem 0; }
.headline { font-size: 1.12rem; }
a { color: #0b4f8a; }
code { font-size: .92em; overflow-wrap: anywhere; }
nav ol { columns: 16rem; margin: .5rem 0; padding-left: 1.4rem; }
nav.small ol { font-size: .92rem; }
.wide { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: .86rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .28rem .5rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid #888; vertical-align: bottom; font-weight: 600; line-height: 1.25; }
tbody th { font-weight: 500; white-space: nowrap; }
th.number, td.number { text-align: right; white-space: nowrap; }
td small { display: block; color: #555; font-size: .92em; }
th small { font-weight: 400; color: #555; display: block; }
tbody tr:nth-child(even) { background: #f6f6f6; }
tbody tr:nth-child(even) > :first-child { background: #f6f6f6; }
thead th:first-child, tbody th:first-child { position: sticky; left: 0; background: #fff; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
  text-align: inherit; }
th button span::after { content: "\\2195"; color: #767676; padding-left: .2em; }
th[aria-sort=ascending] button span::after { content: "\\2191"; color: #000; }
th[aria-sort=descending] button span::after { content: "\\2193"; color: #000; }
figure { margin: .75rem 0 1.5rem; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { font-size: .92rem; color: #333; max-width: 46rem; margin-top: .3rem; }
dl.facts { display: grid; grid-template-columns: minmax(10rem, max-content) minmax(12rem, 1fr); gap: .15rem 1.2rem;
  font-size: .92rem; max-width: 60rem; }
dl.facts dt { font-weight: 600; overflow-wrap: anywhere; }
dl.facts dd { margin: 0; }
details { margin: .75rem 0; }
summary { cursor: pointer; font-weight: 600; font-size: .92rem; color: #0b4f8a; }
.notes { font-size: .92rem; padding-left: 1.6rem; }
footer { max-width: 1240px; margin: 3rem auto 2rem; padding: 0 1.25rem; color: #555; font-size: .9rem; }
nav.pages { max-width: 1240px; margin: 2rem auto; padding: 0 1.25rem; font-size: .92rem; }
nav.pages ul { padding-left: 1.4rem; }
@media (max-width: 700px) {
  h1 { font-size: 1.3rem; }
  .headline { font-size: 1.02rem; }
  main, header, footer, nav.pages { padding-left: .9rem; padding-right: .9rem; }
  figure img { max-width: none; width: 680px; }
  td:not(.number) { white-space: nowrap; }
  dl.facts { display: block; }
  dl.facts dt { margin-top: .5rem; }
  dl.facts dd { margin-left: 1rem; }
  tbody th { white-space: normal; min-width: 6.5rem; overflow-wrap: anywhere; }
}
@media print {
  @page { size: A4; margin: 12mm; }
  body { font-size: 10pt; }
  main, header, footer, nav.pages { max-width: none; padding: 0; }
  table { font-size: 6.6pt; }
  .wide { overflow: visible; }
  th, td { padding: .12rem .25rem; }
  th.number, td.number, tbody th { white-space: normal; }
  th button span::after { content: none !important; }
  tr, figure, h2, h3 { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  a { color: inherit; text-decoration: none; }
}
"""

_SCRIPT = """
document.querySelectorAll("table.sortable").forEach(function (table) {
  var body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach(function (head, column) {
    var button = document.createElement("button");
    while (head.firstChild) button.appendChild(head.firstChild);
    head.appendChild(button);
    button.addEventListener("click", function () {
      var down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("thead th").forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      var rows = Array.from(body.rows);
      rows.sort(function (a, b) {
        var x = a.cells[column].dataset.sort, y = b.cells[column].dataset.sort;
        if (x === "" || y === "") return (x === "") - (y === "");
        var order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -order : order;
      });
      rows.forEach(function (row) { body.appendChild(row); });
    });
  });
});
"""


@dataclass(frozen=True)
class Section:
    """One section of a page."""

    name: str  # its address in the page
    heading: str  # plain text
    # Paragraphs, tables and figures in order, as ``html`` renders them; a section without any is
    # left out of the page and of its contents.
    parts: Sequence[str]

    @property
    def body(self) -> str:
        """The parts as one piece of HTML; empty where there is nothing to show."""
        return "\n".join(part for part in self.parts if part)


@dataclass(frozen=True)
class Page:
    """A whole page."""

    title: str  # plain text
    sections: Sequence[Section]  # in the order of the page
    headline: str = ""  # a paragraph of plain text above the contents
    made_from: str = ""  # what stands behind the version in the footer, plain text


@dataclass(frozen=True)
class _SitePage:
    """One page below ``results/report``."""

    file: str  # its name; all pages lie in one folder
    # title, about: what it is called and what it holds.
    title: str
    command: str  # makes it, and what it needs
    about: str


PAGES = (
    _SitePage("index.html", "Report of the run", "make reproduce",
             "predicted and measured steps of this machine, what the errors are made of, timelines"),
    _SitePage("traces.html", "Traces", "make reproduce", "the captured steps: size, source, what could not be joined"),
    _SitePage("published_traces.html", "Public traces", "snakemake published_traces", "the same of imported public traces"),
    _SitePage("cost_models.html", "Cost models", "snakemake validation", "every cost model on public measurements that it never saw"),
    _SitePage("published.html", "Public measurements", "snakemake published", "plans on A40, A100 and H100 beside public measured steps"),
    _SitePage("published_vtrain.html", "vTrain's points", "snakemake published", "1,440 iteration times of GPT models under 18 combinations of degrees"),
    _SitePage("drift.html", "Ranks that drift", "snakemake published", "steps of recorded jobs predicted from others of their steps, and what made them slow"),
    _SitePage("clusters.html", "Runs on clusters", "snakemake clusters", "steps and memory of language models on 8 to 512 H100 beside predictions"),
    _SitePage("bridge.html", "Megatron-Bridge's rates", "snakemake bridge", "tokens a second of language models on 8 to 1,024 H100 beside predictions"),
    _SitePage("distsim.html", "DistSim's evaluation", "snakemake distsim", "the same questions asked of runs on this machine"),
    _SitePage("studies.html", "Case studies", "snakemake studies", "studies that are simulated only"),
    _SitePage("figures.html", "Figures of the paper", "snakemake figures", "counterparts of the paper's figures, on runs of this machine and simulated"),
    _SitePage("published_figures.html", "Figures of the paper, public data", "snakemake published_figures", "the same with public measurements and traces"),
)  # fmt: skip
"""In the order in which they are listed. Pages that were not made yet are listed too."""

UNITS: Mapping[str, str] = {
    "s": "second; every duration in a report's table",
    "ns": "nanosecond, 1e-9 s; measured times on disk, whole numbers",
    "bytes": "byte of 8 bits; kB, MB, GB are powers of 1000, GiB is written out where 1024 is meant",
    "bytes/s": "bytes in a second",
    "flop": "one floating-point operation; an addition and a multiplication are two",
    "1/s": "per second; samples or tokens, as the column says",
}
"""Units of the tables' columns; a column without one is a count, a share (1 is 100 %) or words."""

FILES: Mapping[str, str] = {
    "operators": "operator_tables/<trace>/operators.parquet",
    "tensors": "operator_tables/<trace>/tensors.parquet",
    "tasks": "task_graphs/<experiment>/tasks.parquet",
    "dependencies": "task_graphs/<experiment>/dependencies.parquet",
    "timeline": "timelines/<experiment>/timeline.parquet",
    "critical_path": "timelines/<experiment>/critical_path.parquet",
    "breakdown": "timelines/<experiment>/breakdown.parquet",
    "links": "timelines/<experiment>/links.parquet",
    "measurements": "measurements/<workload>/measurements.parquet",
    "rank_timelines": "measurements/<workload>/rank_timelines.parquet",
    "collective_samples": "measurements/<workload>/collective_samples.parquet",
    "operator_fit": "cost_models/this-machine/operator_fit.parquet",
    "errors": "report/error.parquet",
    "attribution": "report/attribution.parquet",
    "causes": "report/causes.parquet, published/<set>-causes.parquet",
    "anchors": "published/anchors.parquet",
    "traces": "report/traces.parquet, report/published_traces.parquet",
    "validation": "validation/<set>.parquet",
    "published_cases": "published/<set>.parquet, report/published.parquet",
    "sweep_results": "sweeps/<sweep>/results.parquet",
}
"""Where a table lies below the results' folder."""


_INPUTS = ("inputs", "files")
"""Keys of a record under which the files behind a table stand."""


def render_page(page: Page) -> str:
    """Return a page that needs nothing from outside."""
    shown = [section for section in page.sections if section.body]
    links = [*((section.name, section.heading) for section in shown), ("pages", "All pages")]
    headline = render_paragraph(page.headline, "headline") + "\n" if page.headline else ""
    body = "\n".join(
        f'<section id="{escape(section.name)}"><h2>{escape(section.heading)}</h2>\n'
        f"{section.body}</section>"
        for section in shown
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(page.title)}</h1>\n{headline}{render_links(links, 'Contents')}"
        f"</header>\n<main>\n{body}\n</main>\n"
        f"<footer>Made by trioflow {escape(__version__ + page.made_from)}.</footer>\n"
        f"{_render_pages()}\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def write_page(path: str | Path, page: Page) -> None:
    """Write a page, atomically."""
    text = render_page(page)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def glossary_section(
    words: Mapping[str, str], schemas: Mapping[str, pa.Schema] | None = None
) -> Section:
    """Return the section that explains a page's words and the columns of its tables."""
    parts = [render_definitions(words.items())] if words else []
    return Section("glossary", "Glossary", [*parts, render_tables(schemas) if schemas else ""])


def provenance_section(files: Iterable[str | Path], words: str = "", parts: int = 2) -> Section:
    """Return the section that lists the files behind a page, after a paragraph about them."""
    listed = render_files_read(files, parts)
    text = render_paragraph(words) if words else ""
    return Section("provenance", "Where the numbers come from", [text, listed])


def _render_pages() -> str:
    """Return the links to all pages, made or not, each with the command that makes it."""
    lines = [
        f'<li><a href="{escape(page.file)}">{escape(page.title)}</a>: {escape(page.about)} '
        f"(<code>{escape(page.command)}</code>)</li>"
        for page in PAGES
    ]
    return (
        '<nav id="pages" class="pages" aria-label="Pages"><h2>All pages</h2>\n'
        "<p>A link opens once its command has run in this project.</p>\n<ul>\n"
        + "\n".join(lines)
        + "\n</ul></nav>"
    )


def render_tables(schemas: Mapping[str, pa.Schema]) -> str:
    """Return what the columns of some tables mean, a folded list each, and the units in them.

    ``schemas``: tables by name, such as those of ``tables.SCHEMAS``; each column's unit and meaning
    are in its metadata.
    """
    used = {_text(field, b"unit") for schema in schemas.values() for field in schema} - {""}
    words = render_paragraph(
        "Columns of the tables behind this page, from the schemas that every table is checked against when it is "
        "written and read. A column without a unit is a count, a share (1 is 100 %) or words."
    )
    units = render_definitions((unit, UNITS.get(unit, unit)) for unit in sorted(used))
    return words + units + "".join(_render_table(name, schemas[name]) for name in schemas)


def _render_table(name: str, schema: pa.Schema) -> str:
    columns = [
        (field.name + (f" [{unit}]" if (unit := _text(field, b"unit")) else ""), _text(field, b"meaning"))
        for field in schema
    ]  # fmt: skip
    place = f": {FILES[name]}" if name in FILES else ""
    return render_details(f"{name.replace('_', ' ')}{place}", render_definitions(columns))


def _text(field: pa.Field, key: bytes) -> str:
    return str((field.metadata or {}).get(key, b"").decode())


def render_files_read(files: Iterable[str | Path], parts: int = 2) -> str:
    """Return the files that a page's numbers come from, folded.

    ``files``: what was read; those that are no longer there are left out. ``parts``: last parts of
    the path that name a file.
    """
    columns = [
        Column("file", "", "folder and name", number=False),
        Column("SHA-256", "first 16 digits", "digest of the content", number=False),
        Column("version", "of trioflow", "that wrote the file, where the file says so", number=False),
        Column("made from", "", "files that it names as its own inputs, with their digests", number=False),
    ]  # fmt: skip
    rows = []
    for file in sorted({Path(file) for file in files if Path(file).is_file()}):
        record = read_record(file)
        behind: dict[str, Any] = next(
            (record[key] for key in _INPUTS if isinstance(record.get(key), dict)), {}
        )
        listed = ", ".join(
            f"{name} {str(digest)[:16]}" for name, digest in sorted(behind.items())[:3]
        )
        more = f" and {len(behind) - 3} more" if len(behind) > 3 else ""
        rows.append([
            Cell("/".join(file.parts[-parts:])), Cell(digest_file(file)[:16]),
            Cell(str(record.get("trioflow_version") or NOTHING)), Cell((listed + more) or NOTHING),
        ])  # fmt: skip
    return render_details(
        f"{count_words(len(rows), 'file')} read", render_table(columns, rows, "Files read")
    )


def read_record(file: Path) -> dict[str, Any]:
    """Return what a file says of its own making; nothing where it says nothing."""
    try:
        if file.suffix == ".parquet":
            raw = (pq.read_schema(file).metadata or {}).get(b"trioflow", b"{}")
            found = json.loads(raw)
        elif file.suffix == ".json":
            found = read_json(file)
        else:
            return {}
    except (OSError, ValueError, TrioflowError, pa.ArrowException):
        return {}
    return found if isinstance(found, dict) else {}
