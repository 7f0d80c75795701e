// The page of `serried plan search`: a dot for each layout that fits, time against memory, and a table of the best.

const page = JSON.parse(document.getElementById("data").textContent);
const isDark = matchMedia("(prefers-color-scheme: dark)");
const WIDTH = 1000;
const HEIGHT = 420;
const LEFT = 70;
const BOTTOM = 40;
const TABLES = {
  fastest: "Fastest",
  covered: "Fastest layouts that published runs cover",
  smaller: "Slower layouts that need less memory than any faster one",
};
const listed = Object.keys(TABLES).flatMap((name) => page[name]);

function draw(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function told({ seconds, bytes: size, doubts, words }) {
  return `${stepTime(seconds)}${doubts.length ? "?" : ""}, ${bytes(size)}: ${words}`;
}

/** Logarithmic in time, linear in memory. */
function scatter() {
  const dots = [...page.others, ...listed];
  const times = dots.map(({ seconds }) => seconds);
  const [fastest, slowest] = [Math.min(...times) / 1.05, Math.max(...times) * 1.05];
  const most = Math.max(page.limit, ...dots.map((dot) => dot.bytes)) * 1.05;
  const x = (seconds) => LEFT + (Math.log(seconds / fastest) / Math.log(slowest / fastest)) * (WIDTH - LEFT - 10);
  const y = (size) => (HEIGHT - BOTTOM) * (1 - size / most);
  const dot = (each, kind) =>
    draw(
      "circle",
      { class: kind, cx: x(each.seconds).toFixed(1), cy: y(each.bytes).toFixed(1), r: kind === "listed" ? 5 : 2.5 },
      draw("title", {}, told(each)),
    );
  const across = (size, kind) => draw("line", { class: kind, x1: LEFT, x2: WIDTH, y1: y(size), y2: y(size) });
  const text = (left, top, anchor, content) => draw("text", { x: left, y: top, "text-anchor": anchor }, content);
  return draw(
    "svg",
    { class: "layouts", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "time against memory" },
    ...binaryTicks(null, 0, 0, most).flatMap((size) => [
      across(size, "grid"),
      text(LEFT - 6, y(size) + 4, "end", bytes(size)),
    ]),
    ...logTicks(null, 0, fastest, slowest).map((time) => text(x(time), HEIGHT - BOTTOM + 18, "middle", stepTime(time))),
    across(page.limit, "limit"),
    ...page.others.map((each) => dot(each, "other")),
    ...listed.map((each) => dot(each, "listed")),
  );
}

function rows(layouts) {
  return layouts.map((each) => [
    `${stepTime(each.seconds)}${each.doubts.length ? "?" : ""}`,
    compact(each.tokens_per_second),
    bytes(each.bytes),
    make("code.command", each.words),
  ]);
}

function fill(id, ...content) {
  document.getElementById(id).append(...content);
}

const doubts = [...new Set(listed.flatMap((each) => each.doubts))].sort();
document.documentElement.dataset.theme = isDark.matches ? "dark" : "light";
document.getElementById("toolbar").hidden = true;
fill(
  "summary",
  make("h1", page.title),
  make(
    "p.subtitle",
    `${count(page.valid, "valid layout")}, ${exact(page.fitting)} of which fit ${bytes(page.limit)} on ${page.device}; ` +
      `rates of ${page.rates}`,
  ),
);
const note =
  "Large dots are the layouts listed below. Small dots are all other layouts that fit, estimated by a shorter formula. " +
  "Hover over a dot to see its overrides. The line is the usable memory.";
fill("charts", wideCard("Step time and memory per rank", scatter(), make("p.note", note)));
for (const [name, title] of Object.entries(TABLES))
  if (page[name].length)
    fill("sections", wideCard(title, table(["time", "tokens/s per device", "memory", "overrides"], rows(page[name]))));
fill(
  "footer",
  "Times are computed, not measured; differences below 5% are not significant.",
  doubts.length ? ` ?: a rough guess, as no published run has ${doubts.join(", nor ")}.` : "",
);
