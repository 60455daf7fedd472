"""What a page looks like and does: one style sheet and one script, for every page alike."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --soft: #555; --line: #ddd; --strong: #888;
  --stripe: #f6f6f6; --side: #f4f5f6; --link: #0b4f8a; --mark: #0b4f8a; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171b; --ink: #e3e5e7; --soft: #a9b0b7; --line: #343a41; --strong: #737b84;
    --stripe: #1b1f24; --side: #1a1e23; --link: #86bff2; --mark: #86bff2; }
  figure :is(img, object) { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font-family: system-ui, "Segoe UI", "Liberation Sans", "DejaVu Sans", sans-serif; }
.skip { position: absolute; left: -99rem; }
.skip:focus { left: .5rem; top: .5rem; background: var(--paper); padding: .3rem .6rem; z-index: 9; }
:focus-visible { outline: 3px solid var(--mark); outline-offset: 2px; }
main, header, footer { max-width: 1240px; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 1.5rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .75rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--strong); }
h3 { font-size: 1.02rem; margin: 1.75rem 0 .25rem; }
p, li, dd { max-width: 46rem; }
p, li, dd, summary, h1, h2, h3 { overflow-wrap: break-word; }
p { margin: .5rem 0; }
.headline { font-size: 1.05rem; }
.verdict { font-size: 1.2rem; font-weight: 600; line-height: 1.4; border-left: 4px solid var(--mark); padding-left: .8rem; }
a { color: var(--link); }
code { font-size: .92em; overflow-wrap: anywhere; }
nav ol, nav ul { margin: .5rem 0; padding-left: 1.4rem; }
.side { background: var(--side); font-size: .9rem; line-height: 1.35; }
.side ul, .side ol { list-style: none; padding: 0; margin: 0; }
.side li { padding: .16rem 0; overflow-wrap: break-word; }
.side a { display: block; text-decoration: none; }
.side a:hover { text-decoration: underline; }
.side [aria-current] { font-weight: 700; color: var(--ink); border-left: 4px solid var(--mark); padding-left: .5rem; }
.side nav { border-left: 1px solid var(--strong); margin: .2rem 0 .4rem .1rem; padding-left: .7rem; }
.side .unmade { color: var(--soft); }
.side .unmade code { display: block; font-size: .84em; }
.side li:not(.unmade) > code { display: none; }
@media (min-width: 1100px) {
  .side { position: fixed; inset: 0 auto 0 0; width: 15.5rem; overflow-y: auto; padding: 1.2rem .9rem;
    border-right: 1px solid var(--line); }
  .scripted .side summary { display: none; }
  .body { margin-left: 15.5rem; }
}
@media (max-width: 1099px) {
  .side { position: sticky; top: 0; z-index: 5; padding: .1rem 1.25rem; border-bottom: 1px solid var(--strong); }
  .side details { margin: .35rem 0; }
  .side details[open] { max-height: 75vh; overflow-y: auto; }
  [id] { scroll-margin-top: 3.2rem; }
}
.wide { overflow-x: auto; margin: .75rem 0; }
.wide.scrolls::before { content: "more to the right: scroll \\2192"; position: sticky; left: 0; display: block;
  width: max-content; font-size: .8rem; color: var(--soft); }
.wide.more { mask-image: linear-gradient(to right, #000 calc(100% - 2rem), rgb(0 0 0 / .25)); }
table { border-collapse: separate; border-spacing: 0; font-size: .86rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .28rem .42rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { border-bottom: 2px solid var(--strong); vertical-align: bottom; font-weight: 600; line-height: 1.25; }
tbody th { font-weight: 500; white-space: nowrap; }
td { white-space: nowrap; }
td.medium { white-space: normal; min-width: 9rem; }
tbody th.long, td.long { white-space: normal; min-width: 15rem; max-width: 30rem; }
th.number, td.number { text-align: right; white-space: nowrap; }
td small { display: block; color: var(--soft); font-size: .92em; }
th small { font-weight: 400; color: var(--soft); display: block; }
thead th:first-child, tbody th:first-child { position: sticky; left: 0; background: var(--paper); }
tbody tr:nth-child(even), tbody tr:nth-child(even) > :first-child { background: var(--stripe); }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
  text-align: inherit; }
th button span::after { content: "\\2195"; color: var(--soft); padding-left: .2em; }
th[aria-sort=ascending] button span::after { content: "\\2191"; color: var(--ink); }
th[aria-sort=descending] button span::after { content: "\\2193"; color: var(--ink); }
figure { margin: .75rem 0 1.5rem; }
figure .wide { background: var(--paper); }
figure :is(img, object) { display: block; max-width: 100%; height: auto; }
figcaption { font-size: .92rem; max-width: 46rem; margin-top: .3rem; }
dl.facts { display: grid; grid-template-columns: minmax(10rem, max-content) minmax(12rem, 1fr); gap: .15rem 1.2rem;
  font-size: .92rem; max-width: 60rem; }
dl.facts dt { font-weight: 600; overflow-wrap: anywhere; }
dl.facts dd { margin: 0; }
details { margin: .75rem 0; }
summary { cursor: pointer; font-weight: 600; font-size: .92rem; color: var(--link); }
summary h2 { display: inline; border: 0; margin: 0; color: var(--ink); }
summary h3 { display: inline; }
.fold { border-top: 1px solid var(--strong); margin-top: 1.2rem; }
.notes { font-size: .92rem; padding-left: 1.6rem; }
footer { margin: 3rem auto 2rem; color: var(--soft); font-size: .9rem; }
@media (max-width: 700px) {
  h1 { font-size: 1.3rem; }
  .verdict { font-size: 1.05rem; }
  .headline { font-size: 1rem; }
  main, header, footer, .side { padding-left: .9rem; padding-right: .9rem; }
  figure :is(img, object) { max-width: none; width: 680px; }
  dl.facts { display: block; }
  dl.facts dt { margin-top: .5rem; }
  dl.facts dd { margin-left: 1rem; }
  tbody th { white-space: normal; min-width: 6.5rem; overflow-wrap: anywhere; }
  tbody th.long { min-width: 10rem; }
}
@media print {
  @page { size: A4; margin: 12mm; }
  body { font-size: 10pt; }
  .side, .skip { display: none; }
  .body { margin: 0; }
  main, header, footer { max-width: none; padding: 0; }
  table { font-size: 6.6pt; }
  .wide { overflow: visible; mask-image: none !important; }
  .wide::before { content: none !important; }
  th, td { padding: .12rem .25rem; }
  th.number, td.number, tbody th { white-space: normal; }
  th button span::after { content: none !important; }
  tr, figure, h2, h3 { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  a { color: inherit; text-decoration: none; }
}
"""

SCRIPT = """
document.documentElement.classList.add("scripted");
(function () {
  var menu = document.querySelector(".side details"), wide = matchMedia("(min-width: 1100px)");
  function fit() { if (menu) menu.open = wide.matches; }
  wide.addEventListener("change", fit);
  fit();
  function unfold() {
    var at = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!at) return;
    if (menu && !wide.matches) menu.open = false;
    for (var up = at; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
    var own = at.querySelector(":scope > details");
    if (own) own.open = true;
    at.scrollIntoView();
  }
  addEventListener("hashchange", unfold);
  document.addEventListener("click", function (event) {
    var link = event.target.closest && event.target.closest('a[href^="#"]');
    if (link && link.hash === location.hash) unfold();
  });
  unfold();
  addEventListener("beforeprint", function () {
    document.querySelectorAll("main details").forEach(function (part) { part.open = true; });
  });
  // Which pages exist is known when a page is read, not when it is written.
  document.querySelectorAll(".side [data-page]").forEach(function (item) {
    var made = window.trioflowPages, name = item.dataset.page, first = item.firstElementChild;
    if (!made || first.hasAttribute("aria-current")) return;
    var there = made.indexOf(name) >= 0, next = document.createElement(there ? "a" : "span");
    next.textContent = first.textContent;
    if (there) next.href = name;
    first.replaceWith(next);
    item.classList.toggle("unmade", !there);
  });
  var watch = new ResizeObserver(function (entries) {
    entries.forEach(function (entry) { cue(entry.target); });
  });
  function cue(part) {
    var rest = part.scrollWidth - part.clientWidth;
    part.classList.toggle("scrolls", rest > 1);
    part.classList.toggle("more", rest - part.scrollLeft > 2);
    if (rest > 1) part.tabIndex = 0; else part.removeAttribute("tabindex");
  }
  document.querySelectorAll(".wide").forEach(function (part) {
    var name = part.querySelector("caption"), image = part.querySelector("img, object");
    part.setAttribute("role", "group");
    part.setAttribute("aria-label", name ? name.textContent : image ? image.alt || image.ariaLabel : "table");
    part.addEventListener("scroll", function () { cue(part); });
    watch.observe(part);
  });
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
})();
"""
