const dark = matchMedia("(prefers-color-scheme: dark)");
function paintCharts() {
  const look = getComputedStyle(document.documentElement);
  const [ink, line, soft] = ["--ink", "--line", "--strong"].map(name => look.getPropertyValue(name).trim());
  for (const drawn of Bokeh.documents) for (const model of drawn._all_models.values()) {
    const change = {};
    for (const name of Object.keys(model.attributes)) {
      if (/label_text_color$/.test(name)) change[name] = ink;
      else if (/^(axis|major_tick)_line_color$/.test(name)) change[name] = soft;
      else if (name === "grid_line_color" && model.attributes[name] !== null) change[name] = line;
    }
    if (model.tags?.includes("ink")) change["text" in model.attributes ? "text_color" : "line_color"] = model.type === "Span" ? ink : { value: ink };
    if (Object.keys(change).length) model.setv(change);
  }
}
async function drawCharts(items) {
  for (const item of items) await Bokeh.embed.embed_item(item);
  paintCharts();
  document.documentElement.dataset.drawn = items.length;
}
dark.addEventListener("change", paintCharts);
