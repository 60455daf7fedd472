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
