// What scrolls by itself says so, and can be reached with the keyboard, at any width of the window.
(function () {
  var watch = new ResizeObserver(function (entries) {
    entries.forEach(function (entry) {
      var wide = entry.target.scrollWidth > entry.target.clientWidth;
      if (wide) entry.target.tabIndex = 0;
      entry.target.classList.toggle("scrolls", wide);
    });
  });
  document.querySelectorAll("pre, table").forEach(function (part) { watch.observe(part); });
})();

// An option is not broken behind its hyphens.
document.querySelectorAll("[role=main] code").forEach(function (code) {
  code.innerHTML = code.innerHTML.replace(/(^|[\s(|>])(--?[\w-]+)/g, '$1<span class="kept">$2</span>');
});

// Pages too long to be looked through open as their headings; the one that the address names is open.
// The theme's script, which runs before, makes tables taller.
document.addEventListener("DOMContentLoaded", function () {
  var page = document.querySelector("[role=main]"), heads = page.querySelectorAll(":scope > h2");
  if (document.documentElement.scrollHeight > 6400 && heads.length > 1) heads.forEach(function (head) {
    var section = document.createElement("details"), summary = document.createElement("summary"), next;
    section.className = "section";
    head.before(section);
    summary.append(head);
    head.querySelectorAll(".headerlink").forEach(function (link) { link.remove(); });
    section.append(summary);
    while ((next = section.nextSibling) && next.nodeName !== "H2") section.append(next);
  });
  function open() {
    var named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (var part = named; part; part = part.parentElement) if (part.nodeName === "DETAILS") part.open = true;
    if (named) named.scrollIntoView();
  }
  window.addEventListener("hashchange", open);
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details.section").forEach(function (section) { section.open = true; });
  });
  open();
});

// The search asks for its index, which a browser gives to pages of a server alone.
if (location.protocol === "file:") document.querySelectorAll("[data-bs-target='#mkdocs_search_modal']").forEach(
  function (link) { link.parentElement.remove(); });
