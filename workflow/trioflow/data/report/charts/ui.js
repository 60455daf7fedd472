const $ = name => document.getElementById(name);
let against = null, asking = false, again = false, numbers = "";
function valueOf(control) {
  return control.type === "range" ? JSON.parse(control.dataset.values)[control.value]
    : control.type === "number" ? control.value === "" ? "" : Number(control.value) : control.value;
}
function readForm() {
  return Object.fromEntries([...$("form").elements].filter(one => one.name).map(one => [one.name, valueOf(one)]));
}
function showValues() {
  for (const control of document.querySelectorAll("input[type=range]")) {
    const text = valueOf(control).toLocaleString("en");
    control.setAttribute("aria-valuetext", text);
    document.querySelector(`output[for=${control.id}]`).value = text;
  }
}
function send(place) {
  const content = JSON.stringify({ form: readForm(), against });
  return fetch(place, { method: "POST", headers: { "Content-Type": "application/json" }, body: content });
}
async function ask() {
  if (asking) { again = true; return; }
  asking = true;
  do {
    again = false;
    const begin = performance.now();
    $("status").textContent = "predicting ...";
    const found = await send("/answer").then(reply => reply.json()).catch(
      () => ({ problem: "trioflow ui does not answer: start it again." }));
    $("problem").textContent = found.problem ?? "";
    if (!found.problem) await show(found);
    $("status").textContent = `answered in ${((performance.now() - begin) / 1000).toFixed(1)} s`;
  } while (again);
  asking = false;
  document.documentElement.dataset.answers = Number(document.documentElement.dataset.answers ?? 0) + 1;
}
async function show(found) {
  const open = [...document.querySelectorAll("#answer details")].map(one => one.open);
  Bokeh.index.clear();
  Bokeh.documents.length = 0;
  $("answer").style.minHeight = `${$("answer").offsetHeight}px`;
  $("answer").innerHTML = found.html;
  document.querySelectorAll("#answer details").forEach((one, place) => { one.open = open[place] ?? false; });
  $("title").textContent = document.title = found.title;
  $("verdict").textContent = found.verdict;
  $("command").textContent = found.command;
  numbers = found.yaml;
  await drawCharts(found.items);
  $("answer").style.minHeight = "";
}
function keep(text, name, kind) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
let later = 0;
$("form").addEventListener("input", () => { showValues(); clearTimeout(later); later = setTimeout(ask, 120); });
$("form").addEventListener("submit", event => event.preventDefault());
$("keep").addEventListener("click", () => { against = readForm(); $("forget").hidden = false; ask(); });
$("forget").addEventListener("click", () => { against = null; $("forget").hidden = true; ask(); });
$("yaml").addEventListener("click", () => keep(numbers, "answer.yaml", "application/yaml"));
$("html").addEventListener("click", async () => keep(await (await send("/html")).text(), "answer.html", "text/html"));
showValues();
ask();
