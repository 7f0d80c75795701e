// Numbers as text, and elements of the page. Strings of a run reach the page as text only, never as markup.

/** An element: `make("p.note", {title: "why"}, "text", child)`, with the class `note`. Attributes may be left out; those
    that are functions are event handlers. */
function make(kind, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== false));
  return element;
}

function card(title, ...content) {
  return make("section.card", make("div.head", make("h2", title)), ...content);
}

function wideCard(...parts) {
  const made = card(...parts);
  made.classList.add("wide");
  return made;
}

function tableRow(cells, kind = "td") {
  return make(
    "tr",
    cells.map((cell) => make(kind, cell)),
  );
}

function table(headings, rows, name = "") {
  const head = headings && make("thead", tableRow(headings, "th"));
  const body = rows.map((row) => tableRow(row));
  return make("div.scroll", make("table", { class: name }, head, make("tbody", body)));
}

const UNITS = { T: 1e12, B: 1e9, M: 1e6, k: 1e3 };

/** 1234567 -> 1.23M: for axes and tiles. */
function compact(number) {
  if (number == null) return "–";
  const size = Math.abs(number);
  const unit = Object.keys(UNITS).find((name) => size >= UNITS[name]);
  if (size >= 1e4) return trimmed(number / UNITS[unit], 3) + unit;
  if (size >= 1e-3 || size === 0) return trimmed(number, 4);
  return number.toExponential(1).replace(".0e", "e").replace("e-", "e−");
}

/** At most `digits` significant digits, none of them a trailing zero, and never an exponent. */
function trimmed(number, digits) {
  return Number(number.toPrecision(digits)).toLocaleString("en", {
    maximumSignificantDigits: digits,
    useGrouping: false,
  });
}

/** All recorded digits, for hovered values. */
function exact(number) {
  if (number == null) return "not finite";
  return Number.isInteger(number) ? number.toLocaleString("en") : String(number);
}

function loss(number) {
  return number == null
    ? "–"
    : number >= 1e4 || (number !== 0 && Math.abs(number) < 1e-3)
      ? compact(number)
      : number.toFixed(4);
}

/** 0.4321 -> 43.2%. */
function percent(share) {
  return share == null ? "–" : `${Number((100 * share).toFixed(share < 0.1 ? 2 : 1))}%`;
}

/** Bytes -> 1.5 GiB. */
function bytes(number) {
  if (number == null) return "–";
  let unit = 0;
  for (; number >= 1024 && unit < 5; unit++) number /= 1024;
  return `${trimmed(number, number >= 1000 ? 4 : 3)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

/** Seconds -> 45s, 3m20s, 5h12m, 1d03h. */
function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 10 && seconds % 1) return `${trimmed(seconds, 2)}s`;
  const whole = Math.round(seconds);
  for (const [size, unit, part, name] of [
    [86400, "d", 3600, "h"],
    [3600, "h", 60, "m"],
    [60, "m", 1, "s"],
  ]) {
    if (whole < size) continue;
    const rest = Math.floor((whole % size) / part);
    return `${Math.floor(whole / size)}${unit}${rest ? String(rest).padStart(2, "0") + name : ""}`;
  }
  return `${whole}s`;
}

/** Seconds of one step -> 12.3 ms. */
function stepTime(seconds) {
  return seconds < 1 ? `${trimmed(1000 * seconds, 3)} ms` : `${trimmed(seconds, 3)} s`;
}

function moment(unixSeconds) {
  return unixSeconds == null
    ? "–"
    : new Date(1000 * unixSeconds).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

function count(number, singular, plural = `${singular}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? singular : plural}`;
}

/** Restore increasing numbers that are stored as differences. */
function summed(differences) {
  let sum = 0;
  return differences && differences.map((difference) => (sum += difference));
}
