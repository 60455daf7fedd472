"""The few pieces of HTML that the report is made of."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from trioflow.report.pages import PAGES

STYLE = """
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

SCRIPT = """
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
class Column:
    """Heading of a table's column.

    Attributes
    ----------
    title : str
        Plain text.
    detail : str
        Smaller second line: the unit, or what stands in brackets.
    meaning : str
        Shown when the pointer rests on the heading.
    number : bool
        Whether the cells are numbers, set flush right.
    """

    title: str
    detail: str = ""
    meaning: str = ""
    number: bool = True


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes
    ----------
    text : str
        Plain text.
    sort : float or str, optional
        What the column is sorted by; the text where left out. Cells with an
        empty string or a float that is not a number come last.
    detail : str
        Smaller second line.
    html : str
        Ready HTML that replaces the text.
    """

    text: str
    sort: float | str | None = None
    detail: str = ""
    html: str = ""


def render_table(
    columns: Sequence[Column], rows: Iterable[Sequence[Cell]], caption: str = ""
) -> str:
    """Return a table that sorts when a heading is pressed and scrolls by itself when too wide."""
    heads = "".join(
        f'<th scope="col"{_class(column)}{_title(column.meaning)}><span>{escape(column.title)}</span>'
        + (f"<small>{escape(column.detail)}</small>" if column.detail else "")
        + "</th>"
        for column in columns
    )
    lines = []
    for row in rows:
        cells = []
        for number, (column, cell) in enumerate(zip(columns, row, strict=True)):
            tag = 'th scope="row"' if number == 0 else "td"
            sort = cell.text if cell.sort is None else cell.sort
            content = cell.html or escape_text(cell.text)
            content += f"<small>{escape_text(cell.detail)}</small>" if cell.detail else ""
            cells.append(
                f'<{tag}{_class(column)} data-sort="{escape(_sort_key(sort))}">'
                f"{content}</{tag.split(maxsplit=1)[0]}>"
            )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = f"<caption>{escape_text(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide"><table class="sortable">{head}<thead><tr>{heads}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def render_figure(source: str, caption: str, alternative: str) -> str:
    """Return a figure: a relative picture file, its caption and its text alternative."""
    return (
        f'<figure><div class="wide"><a href="{escape(source)}">'
        f'<img src="{escape(source)}" alt="{escape(alternative)}"></a></div>'
        f"<figcaption>{escape_text(caption)}</figcaption></figure>"
    )


def render_paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    attribute = f' class="{escape(kind)}"' if kind else ""
    return f"<p{attribute}>{escape_text(text)}</p>"


def render_list(items: Iterable[str], *, ordered: bool = False, prefix: str = "") -> str:
    """Return a list of plain text; with a prefix, item n has the address ``prefix-n``."""
    lines = []
    for number, item in enumerate(items, 1):
        address = f' id="{escape(prefix)}-{number}"' if prefix else ""
        lines.append(f"<li{address}>{escape_text(item)}</li>")
    tag = "ol" if ordered else "ul"
    return f'<{tag} class="notes">' + "\n".join(lines) + f"</{tag}>"


def render_definitions(entries: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms and their meanings."""
    lines = [f"<dt>{escape(term)}</dt><dd>{escape_text(meaning)}</dd>" for term, meaning in entries]
    return '<dl class="facts">' + "\n".join(lines) + "</dl>"


def render_links(entries: Iterable[tuple[str, str]], label: str, *, small: bool = False) -> str:
    """Return a list of links (address in the page, text)."""
    lines = [f'<li><a href="#{escape(to)}">{escape(text)}</a></li>' for to, text in entries]
    kind = ' class="small"' if small else ""
    return f'<nav aria-label="{escape(label)}"{kind}><ol>' + "\n".join(lines) + "</ol></nav>"


def escape_text(text: str) -> str:
    """Escape plain text for HTML, and keep each number on one line with its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|[nm\u00b5]?s|[kMGT]?B)(?!\w))", "&nbsp;", escape(text))


def render_details(title: str, body: str) -> str:
    """Return ready HTML that stays folded until its title is pressed; nothing for no HTML."""
    return f"<details><summary>{escape_text(title)}</summary>{body}</details>" if body else ""


def render_page(title: str, body: str) -> str:
    """Return a whole page that needs nothing from outside."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n{_render_pages()}\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


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


def _class(column: Column) -> str:
    return ' class="number"' if column.number else ""


def _title(meaning: str) -> str:
    return f' title="{escape(meaning)}"' if meaning else ""


def _sort_key(value: float | str) -> str:
    """Return the text that the script sorts by: a number in full, or the words; nothing sorts last."""
    if isinstance(value, str):
        return value
    return "" if math.isnan(value) else repr(float(value))
