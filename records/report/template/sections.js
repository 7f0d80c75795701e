// Everything except curves: results of a run, its start and end, its machines, and its config values.

// ---- the first ten seconds

function summary() {
  return several ? comparison() : overview(runs[0]);
}

function overview(run) {
  return [
    make("div.title", make("h1", run.name), pill(run)),
    make("p.subtitle", [subtitle(run), run.folder].filter(Boolean).join(" · ")),
    make("div.tiles", tiles(run).map(tile)),
    ending(run),
  ];
}

function subtitle(run) {
  const start = run.starts.at(-1);
  return [
    run.parameters != null && `${compact(run.parameters)} parameters`,
    start?.world_size && count(start.world_size, "rank"),
    start?.device,
  ]
    .filter(Boolean)
    .join(" · ");
}

function tile([name, value, note]) {
  return make("div.tile", make("div.name", name), make("div.value", value), make("div.note", note || ""));
}

function tiles(run) {
  const ranks = run.starts.at(-1)?.world_size;
  const best = run.best_validation;
  const isBestLast = best && run.validation.step === best.step;
  const done = run.steps ? `of ${exact(run.steps)}` : "";
  return [
    [
      "training loss",
      loss(run.loss?.value),
      run.first_loss && run.first_loss.step !== run.loss.step && `from ${loss(run.first_loss.value)}`,
    ],
    best && [
      "best validation",
      loss(best.value),
      isBestLast
        ? `the last, at step ${exact(best.step)}`
        : `at step ${exact(best.step)}, last ${loss(run.validation.value)}`,
    ],
    ...run.metrics.slice(0, 4).map((metric) => [metric.name, compact(metric.value), metric.set]),
    ["step", exact(run.step), run.eta_seconds == null ? done : `${done}, ${duration(run.eta_seconds)} to go`],
    run.tokens != null && [run.unit, compact(run.tokens), run.samples != null && `${compact(run.samples)} sequences`],
    run.goodput.length > 0 && ["goodput", percent(productive(run)), "productive steps of the wall-clock time"],
    run.seconds > 0 && ["time", duration(run.seconds), run.starts.length > 1 && `in ${run.starts.length} starts`],
    run.tokens_per_second != null && [
      `${run.unit}/s, median`,
      compact(run.tokens_per_second),
      ranks > 1 && `${compact(run.tokens_per_second / ranks)} a rank`,
    ],
    run.mfu != null && ["FLOPs utilisation", percent(run.mfu), "median"],
    run.memory_bytes != null && ["peak memory", bytes(run.memory_bytes), ranks > 1 && "highest of all ranks"],
    run.data_share != null && ["waiting for data", percent(run.data_share), "of the time"],
  ].filter(Boolean);
}

function pill(run) {
  return make("span", { class: `pill ${run.state.replace(" ", "-")}` }, run.state);
}

/** Why the run ended, and the suggested next command. */
function ending(run) {
  const silent = run.last_time && page.written - run.last_time;
  const running =
    run.state === "running" && silent != null
      ? `The last line was written ${duration(silent)} before this page${silent > 900 ? ". If the run was killed, it could not record its end" : ""}.`
      : "";
  const reason =
    run.reason && run.state !== "finished"
      ? `${run.reason[0].toUpperCase()}${run.reason.slice(1)}${/[.!?]$/.test(run.reason) ? "" : "."}`
      : "";
  const command = run.next.command && make("code.command", run.next.command);
  return make(
    "div",
    { class: `ending ${run.state}` },
    reason && make("p.reason", reason),
    running && make("p", running),
    make("p", run.next.text, command ? ": " : ".", command),
  );
}

/** Unit in which all runs count their samples. */
function unit() {
  const units = new Set(runs.map((run) => run.unit));
  return units.size === 1 ? [...units][0] : "units";
}

function comparison() {
  const told = Object.keys(page.differences).filter((key) => !/^run\./.test(key) && key !== "recipe");
  const keys = told.length <= 4 ? told : [];
  const columns = [
    ["run", (run, index) => index],
    ["state", (run) => run.state],
    ["step", (run) => run.step, (run) => exact(run.step)],
    ["loss", (run) => run.loss?.value, (run) => loss(run.loss?.value), "low"],
    ["best validation", (run) => run.best_validation?.value, (run) => loss(run.best_validation?.value), "low"],
    [unit(), (run) => run.tokens, (run) => compact(run.tokens)],
    ["time", (run) => run.seconds, (run) => duration(run.seconds)],
    [`${unit()}/s`, (run) => run.tokens_per_second, (run) => compact(run.tokens_per_second), "high"],
    ...(runs.some((run) => run.mfu != null) ? [["MFU", (run) => run.mfu, (run) => percent(run.mfu), "high"]] : []),
    ...keys.map((key) => [
      key,
      (run, index) => numeric(page.differences[key][index]),
      (run, index) => page.differences[key][index],
    ]),
  ];
  return [
    make("div.title", make("h1", `${runs.length} runs compared`)),
    make("p.subtitle", "Click a run to hide or show it, a heading to sort."),
    page.left_out && make("p.subtitle", page.left_out),
    sortable(columns),
  ];
}

function numeric(text) {
  return text !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}

/** Runs as rows; the best of a column is bold. */
function sortable(columns) {
  const order = runs.map((run, index) => index);
  const bests = columns.map(([, value, show, best]) => best && bestText(best, runs.map(value), runs.map(show)));
  const cell = (run, index, [name, value, show], column) => {
    if (name === "run") return make("td", runToggle(run, index));
    if (name === "state") return make("td", pill(run));
    const text = show(run, index);
    const isBest = bests[column] != null && bests[column] === text;
    return make(isBest ? "td.number.best" : "td.number", { title: exactTitle(value(run, index)) }, text);
  };
  const rows = runs.map((run, index) => {
    const cells = columns.map((column, place) => cell(run, index, column, place));
    return make("tr", cells);
  });
  const body = make("tbody", rows);
  const sortBy = (value, heading) => {
    const isRising = heading.getAttribute("aria-sort") !== "ascending";
    for (const each of heading.parentElement.children) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", isRising ? "ascending" : "descending");
    const compare = (a, b) => {
      const [x, y] = [value(runs[a], a), value(runs[b], b)];
      if (x == null || y == null) return (x == null) - (y == null); // missing values come last in either order
      return (
        (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y))) *
        (isRising ? 1 : -1)
      );
    };
    body.append(...order.sort(compare).map((index) => rows[index]));
  };
  const headings = columns.map(([name, value]) => {
    const button = make("button", { click: () => sortBy(value, heading) }, name);
    const heading = make(name === "run" || name === "state" ? "th" : "th.number", button);
    return heading;
  });
  return make("div.scroll", make("table.results", make("thead", make("tr", headings)), body));
}

/** Formatted lowest or highest of several numbers; null if all are formatted alike. */
function bestText(best, values, texts) {
  const numbers = values.filter((value) => typeof value === "number");
  if (new Set(texts).size < 2 || numbers.length < 2) return null;
  return texts[values.indexOf(best === "low" ? Math.min(...numbers) : Math.max(...numbers))];
}

function exactTitle(value) {
  return typeof value === "number" ? String(value) : "";
}

function runToggle(run, index) {
  const button = hider(state.hidden, index, [make("span.swatch"), run.name], `show ${run.name}`, redraw);
  button.dataset.run = index;
  return button;
}

// ---- below the curves

function sections() {
  return [
    logged(),
    differences(),
    endings(),
    starts(),
    goodput(),
    sources(),
    meshes(),
    environments(),
    configuration(),
  ].filter(Boolean);
}

/** The last text and images of each name that callbacks logged. */
function logged() {
  const shown = runs.flatMap((run) => [
    ...run.texts.map(({ name, step, text }) => logItem(run, name, step, make("pre", text))),
    ...run.images.map(({ name, step, sources }) =>
      logItem(run, name, step, ...sources.map((src) => make("img", { src, alt: name }))),
    ),
  ]);
  return shown.length ? wideCard("Logged by callbacks", ...shown) : null;
}

function logItem(run, name, step, ...content) {
  const of = several ? ` of ${run.name}` : "";
  return make("figure.logged", make("figcaption", `${name}${of}, step ${exact(step)}`), ...content);
}

/** Folded if it is long. */
function folded(noun, rows, ...content) {
  return rows.length > 12 ? [make("details", make("summary", count(rows.length, noun)), ...content)] : content;
}

/** Headings, preceded by one for the run if there are several runs. */
function headings(...names) {
  return several ? ["run", ...names] : names;
}

/** Ends of several runs; the end of a single run is shown at the top. */
function endings() {
  if (!several) return null;
  const rows = runs.map((run) => [
    named(run),
    run.state,
    run.reason ?? "–",
    run.next.command ? make("code.command", run.next.command) : run.next.text,
  ]);
  return wideCard("How the runs ended", ...folded("run", rows, table(headings("state", "why", "next"), rows)));
}

function named(run) {
  const name = make("span.named", make("span.swatch"), run.name);
  name.dataset.run = runs.indexOf(run);
  return name;
}

function starts() {
  const rows = runs.flatMap((run) =>
    run.starts.map((start) => [
      ...(several ? [named(run)] : []),
      moment(start.time),
      `${exact(start.first_step)} → ${exact(start.last_step)}`,
      duration(start.seconds),
      start.world_size
        ? `${start.device ? `${start.world_size} × ${start.device}` : count(start.world_size, "rank")}, ${axesOf(start)}`
        : "–",
      start.state
        ? [start.state, start.reason].filter(Boolean).join(": ")
        : start === run.starts.at(-1) && run.state === "running"
          ? "running"
          : "killed without recording a reason",
    ]),
  );
  if (!rows.length) return null;
  const undone = runs.map(
    (run) =>
      run.counts.undone > 0 &&
      make(
        "p.note",
        `${several ? `${run.name}: ` : ""}${count(run.counts.undone, "logged step")} discarded by a crash or a rollback and trained again: the faint dots in the loss chart.`,
      ),
  );
  const told = table(headings("when", "steps", "time", "on", "end"), rows, "starts");
  return wideCard(rows.length > 1 ? "Starts" : "Start", ...folded("start", rows, told, ...undone));
}

const PARTS = [
  "productive",
  "compile",
  "start",
  "data",
  "save stall",
  "evaluation",
  "recovery",
  "lost steps",
  "gap",
  "other",
];

function productive(run) {
  const seconds = (part) => sum(run.goodput.map((parts) => (part ? (parts[part] ?? 0) : sum(Object.values(parts)))));
  return seconds("productive") / (seconds() || 1);
}

/** Wall-clock time of each start, and of the gap before it, as a stacked bar. */
function goodput() {
  const longest = Math.max(...runs.flatMap((run) => run.goodput.map((parts) => sum(Object.values(parts)))));
  if (!(longest > 0)) return null;
  const bar = (parts) => {
    const segments = PARTS.filter((part) => parts[part] > 0).map((part) => {
      const segment = make("span", { class: `part ${part.replace(" ", "-")}`, title: `${part} ${duration(parts[part])}` });
      segment.style.width = `${(parts[part] / longest) * 100}%`;
      return segment;
    });
    return make("div.stack", ...segments);
  };
  const rows = runs.flatMap((run) =>
    run.goodput.map((parts, index) => [
      ...(several ? [named(run)] : []),
      moment(run.starts.at(index - run.goodput.length)?.time),
      duration(sum(Object.values(parts))),
      percent((parts.productive ?? 0) / (sum(Object.values(parts)) || 1)),
      bar(parts),
    ]),
  );
  const seen = PARTS.filter((part) => runs.some((run) => run.goodput.some((parts) => parts[part] > 0)));
  const legend = seen.map((part) => {
    const seconds = sum(runs.flatMap((run) => run.goodput.map((parts) => parts[part] ?? 0)));
    return make("span.key", make("span", { class: `part ${part.replace(" ", "-")}` }), `${part} ${duration(seconds)}`);
  });
  const bars = table(headings("start", "time", "productive", "all of the time"), rows, "goodput");
  return wideCard("Goodput", make("p.note", ...legend), ...folded("start", rows, bars));
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

function axesOf(start) {
  const axes = Object.entries(start.mesh).filter(([, degree]) => degree > 1);
  return axes.length ? axes.map(([axis, degree]) => `${axis} ${degree}`).join(" × ") : "single process";
}

function sources() {
  const rows = runs.flatMap((run) => {
    const total = run.sources.reduce((sum, source) => sum + source.tokens, 0);
    return run.sources.map((source) => [
      ...(several ? [named(run)] : []),
      source.name,
      exact(source.tokens),
      share(source.tokens / total),
      loss(source.loss),
    ]);
  });
  if (!rows.length) return null;
  const told = table(headings("source", "tokens", "share", "validation loss"), rows);
  return card("Sources of the mixture", ...folded("source", rows, told));
}

/** A bar with its number. */
function share(part) {
  const bar = make("span.bar");
  bar.style.width = `${60 * part}px`;
  return make("span.share", bar, percent(part));
}

const MOST_RANKS = 8192; // more squares would be unreadable

/** Ranks as squares, one row per host. Ranks of one colour form a replica of the model. */
function meshes() {
  const drawn = runs
    .map((run) => [run, run.starts.at(-1)])
    .filter(([, start]) => start?.world_size > 1 && start.world_size <= MOST_RANKS);
  if (!drawn.length) return null;
  const layouts = drawn.map(([, start]) => JSON.stringify([start.mesh, start.hosts, start.world_size]));
  const areAlike = new Set(layouts).size === 1;
  const pictures = drawn
    .slice(0, areAlike ? 1 : 8)
    .map(([run, start]) =>
      make("div.mesh", several && !areAlike && make("h3", named(run)), make("p.note", meshText(start)), grid(start)),
    );
  return card("Mesh", ...pictures);
}

function meshText(start) {
  const { pipeline = 1, replicate = 1, shard = 1, context = 1, tensor = 1, expert = 1 } = start.mesh;
  const ranks = count(start.world_size, "rank");
  const block = shard * context * tensor;
  if (block === 1 && pipeline === 1) return `${ranks}, each with a full copy of the model.`;
  const stages = pipeline > 1 ? ` The model is split into ${pipeline} pipeline stages.` : "";
  const experts = expert > 1 ? ` Experts are sharded over ${expert} ranks.` : "";
  const holds = [
    shard > 1 && `parameters by ${shard} (FSDP)`,
    context > 1 && `sequences by ${context} (context)`,
    tensor > 1 && `matrices by ${tensor} (tensor)`,
  ].filter(Boolean);
  const divided = holds.length > 1 || context > 1 || tensor > 1 ? ` Sharded: ${holds.join(", ")}.` : "";
  const how =
    replicate === 1
      ? `${ranks} share one copy of the model; each holds 1/${pipeline * block}.`
      : `${ranks}: ${replicate} replicas of the model, one color per replica of ${count(pipeline * block, "rank")}.`;
  return `${how}${divided}${stages}${experts}`;
}

function grid(start) {
  const { expert = 1, ...mesh } = start.mesh; // expert ranks are other coordinates of the same ranks
  const axes = Object.entries(mesh);
  const isDivided = axes.some(([axis, degree]) => axis !== "replicate" && degree > 1);
  const hosts = start.hosts.length === start.world_size ? start.hosts : Array(start.world_size).fill(null);
  const rows = new Map();
  hosts.forEach((host, rank) => {
    const places = coordinates(rank, axes);
    if (expert > 1) places.push(["expert", rank % expert, expert]);
    const told = places.map(([axis, place]) => `${axis} ${place}`).join(", ");
    const title = `rank ${rank}${host ? ` on ${host}` : ""}${told ? `: ${told}` : ""}`;
    const short = places.filter(([, , degree]) => degree > 1).map(([axis, place]) => `${axis[0]}${place}`);
    const cell = make("div.rank", { title }, String(rank), make("small", short.join(" ")));
    const copy = places.find(([axis]) => axis === "replicate")?.[1] ?? 0;
    cell.style.setProperty("--hue", isDivided ? (205 + 137.5 * copy) % 360 : 205);
    if (!rows.has(host)) rows.set(host, []);
    rows.get(host).push(cell);
  });
  return make(
    start.world_size > 32 ? "div.hosts.small" : "div.hosts",
    [...rows].map(([host, ranks]) =>
      make("div.host", host && make("span.hostname", { title: host }, host), make("div.ranks", ranks)),
    ),
  );
}

/** Coordinates of a rank: [axis, index, degree] for each axis. The last axis varies fastest. */
function coordinates(rank, axes) {
  const places = [];
  for (const [axis, degree] of [...axes].reverse()) {
    places.unshift([axis, rank % degree, degree]);
    rank = Math.floor(rank / degree);
  }
  return places;
}

function differences() {
  if (!several) return null;
  const title = "Config differences";
  const keys = Object.keys(page.differences);
  if (!keys.length) return wideCard(title, make("p.note", "None."));
  const codes = keys.map((key) => make("code", key));
  if (runs.length > 6) {
    const byRun = runs.map((run, index) => [named(run), ...keys.map((key) => page.differences[key][index])]);
    return wideCard(title, ...folded("run", byRun, table(["run", ...codes], byRun)));
  }
  const byKey = keys.map((key, index) => [codes[index], ...page.differences[key]]);
  return wideCard(title, ...folded("key", byKey, table(["key", ...runs.map(named)], byKey, "differences")));
}

function configuration() {
  const keys = Object.keys(page.config);
  if (!keys.length) return null;
  const rows = keys.map((key) => [make("code", key), page.config[key]]);
  const told = make("details", make("summary", count(keys.length, "key")), table(null, rows, "pairs"));
  return wideCard(several ? "Shared config" : "Config", told);
}

function environments() {
  const title = (key) => make("span", key.replaceAll("_", " "));
  const alike = Object.entries(page.environment).map(([key, value]) => [title(key), value]);
  const unlike = [...new Set(runs.flatMap((run) => Object.keys(run.environment)))].map((key) => [
    title(key),
    ...runs.map((run) => run.environment[key] ?? "–"),
  ]);
  if (!alike.length && !unlike.length) return null;
  return card(
    "Environment",
    alike.length ? table(null, alike, "pairs") : "",
    unlike.length ? table(["", ...runs.map(named)], unlike) : "",
  );
}

function footer() {
  const thinned = runs.some((run) => run.curves.some((curve) => curve.mean_y.length));
  return make(
    "p",
    `Written ${moment(page.written)} by serried report. `,
    thinned
      ? "Long curves are thinned to the lowest and highest point of each interval, so spikes are kept; smoothing averages all points. "
      : "",
    `Every number is in ${several ? "the runs' " : ""}metrics.jsonl. Drag to zoom, double-click to reset.`,
  );
}
