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
