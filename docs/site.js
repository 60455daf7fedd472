// What scrolls by itself can be reached with the keyboard, at any width of the window.
(function () {
  var watch = new ResizeObserver(function (entries) {
    entries.forEach(function (entry) {
      if (entry.target.scrollWidth > entry.target.clientWidth) entry.target.tabIndex = 0;
    });
  });
  document.querySelectorAll("pre, table").forEach(function (part) { watch.observe(part); });
})();
