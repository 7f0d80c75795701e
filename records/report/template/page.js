// State of the page, its toolbar, and the start.

const page = JSON.parse(document.getElementById("data").textContent);
const runs = page.runs;
const several = runs.length > 1;
const isDark = matchMedia("(prefers-color-scheme: dark)");
const state = {
  axis: "step",
  smoothing: runs.some((run) => run.logged > 100) ? 0.6 : 0,
  zoom: null, // [low, high] of the axis; null: all
  hidden: new Set(), // runs, by index
  hiddenMarks: new Set(), // kinds of marks
  theme: isDark.matches ? "dark" : "light",
};
let hovered = null; // the plot under the pointer
let charts = [];

for (const run of runs) {
  run.x = {
    step: summed(run.x.step),
    tokens: summed(run.x.tokens),
    seconds: summed(run.x.milliseconds)?.map((each) => each / 1000),
  };
  for (const curve of run.curves) [curve.at, curve.mean_at] = [summed(curve.at), summed(curve.mean_at)];
}

/** A button that is on or off. */
function toggle(content, isOn, change, title) {
  const click = () => {
    isOn = !isOn;
    button.setAttribute("aria-pressed", String(isOn));
    change(isOn);
  };
  const button = make("button.toggle", { "aria-pressed": String(isOn), title, click }, content);
  return button;
}

/** A button that toggles `item` in the set `hidden`. */
function hider(hidden, item, content, title, change) {
  const move = (isShown) => {
    isShown ? hidden.delete(item) : hidden.add(item);
    change();
  };
  return toggle(content, !hidden.has(item), move, title);
}

/** A group of buttons of which exactly one is on. */
function choice(name, options, chosen, change) {
  const buttons = options.map(([value, label, isPossible]) => {
    const click = (event) => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      change(value);
    };
    const pressed = String(value === chosen);
    return make("button", { disabled: !isPossible, "data-value": value, "aria-pressed": pressed, click }, label);
  });
  return make("div.choice", { role: "group", "aria-label": name }, buttons);
}

function redraw() {
  for (const chart of charts) chart.draw();
}

let isWaiting = false;
function redrawSoon() {
  if (isWaiting) return;
  isWaiting = true;
  requestAnimationFrame(() => {
    isWaiting = false;
    redraw();
  });
}

/** Show `span` of the axis in all charts; null: the full axis. */
function zoomTo(span) {
  state.zoom = span;
  document.getElementById("reset").hidden = span == null;
  const [min, max] = span ?? extent();
  for (const { plot } of charts) plot?.setScale("x", { min, max });
}

function setTheme(theme) {
  state.theme = theme;
  document.documentElement.dataset.theme = theme;
  if (several) drawRunSwatches();
  redraw();
}

function toolbar() {
  const axes = [
    ["step", "steps", true],
    ["tokens", unit(), runs.some((run) => run.x.tokens)],
    ["seconds", "hours", runs.some((run) => run.x.seconds)],
  ];
  const setAxis = (axis) => {
    state.axis = axis;
    zoomTo(null);
    redraw();
  };
  const smoothing = make("output", state.smoothing.toFixed(2));
  const smooth = (event) => {
    state.smoothing = Number(event.target.value);
    smoothing.value = state.smoothing.toFixed(2);
    redrawSoon();
  };
  const range = {
    type: "range",
    id: "smoothing",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: state.smoothing,
    input: smooth,
  };
  const flip = () => setTheme(state.theme === "dark" ? "light" : "dark");
  return [
    choice("horizontal axis", axes, state.axis, setAxis),
    make("label.smoothing", "smoothing", make("input", range), smoothing),
    make("div.marks", Object.keys(MARKS).map(markToggle)),
    make(
      "button",
      { id: "reset", hidden: true, click: () => zoomTo(null), title: "or double-click a chart" },
      "reset zoom",
    ),
    make("button", { id: "theme", title: "light or dark", "aria-label": "light or dark", click: flip }, "◐"),
  ];
}

/** Null if no run has such a mark. */
function markToggle(kind) {
  const total = runs.reduce((sum, run) => sum + (run.counts[kind] ?? 0), 0);
  const { name } = MARKS[kind];
  const text = `${total} ${total === 1 ? name.replace(/s$/, "") : name}`;
  const content = [make("span", { class: `mark ${kind}` }), text];
  return total ? hider(state.hiddenMarks, kind, content, `mark ${name}`, redraw) : null;
}

function drawRunSwatches() {
  document.querySelectorAll("[data-run] > .swatch").forEach((swatch) => {
    swatch.style.color = color(Number(swatch.parentElement.dataset.run));
  });
}

function begin() {
  document.documentElement.dataset.theme = state.theme;
  document.getElementById("summary").append(...summary().filter(Boolean));
  document.getElementById("toolbar").append(...toolbar());
  const specs = SPECS.filter((spec) =>
    runs.some((run) => run.curves.some(spec.needs ?? spec.has ?? ((curve) => curve.chart === spec.id))),
  );
  const place = specs.findIndex((spec) => spec.id === "grad_norm");
  specs.splice(place < 0 ? specs.length : place, 0, ...metricSpecs());
  charts = specs.map((spec) => new Chart(spec));
  document.getElementById("charts").append(...charts.map((chart) => chart.card));
  document.getElementById("toolbar").hidden = charts.length === 0;
  document.getElementById("sections").append(...sections());
  document.getElementById("footer").append(footer());
  setTheme(state.theme);
  isDark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
  new ResizeObserver(() => {
    for (const chart of charts)
      if (chart.plot && chart.plot.width !== chart.size().width) chart.plot.setSize(chart.size());
  }).observe(document.getElementById("charts"));
}

begin();
