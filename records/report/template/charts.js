// Curves: a `Chart` draws a spec of specs.js with uPlot, and redraws it after every change.

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.isLog = Boolean(spec.startsLog);
    this.isWhole = !spec.clips;
    this.off = new Set();
    this.of = runs.findIndex((run) => run.curves.some(this.has, this)); // the run of a stacked chart
    this.legend = make("div.legend");
    this.frame = make("div.plot");
    this.tip = make("div.tip", { hidden: true });
    this.note = make("p.note");
    const head = make("div.head", make("h2", spec.title), this.controls());
    const parts = [head, this.legend, this.frame, this.note];
    this.card = make(spec.wide ? "section.card.wide" : "section.card", { id: `chart-${spec.id}` }, parts);
  }

  has(curve) {
    return this.spec.has ? this.spec.has(curve) : curve.chart === this.spec.id;
  }

  controls() {
    const set = (name) => (value) => {
      this[name] = value;
      this.draw();
    };
    const whole = "show spikes at full height";
    this.spikes = this.spec.clips && toggle("spikes", false, set("isWhole"), whole);
    if (this.spikes) this.spikes.hidden = true;
    const log = this.spec.log && toggle("log", this.isLog, set("isLog"), "logarithmic scale");
    const having = runs.map((run, index) => index).filter((index) => runs[index].curves.some(this.has, this));
    const options = having.map((index) => make("option", { value: index }, runs[index].name));
    const change = (event) => set("of")(Number(event.target.value));
    const choosesRun = this.spec.stacked && having.length > 1;
    return make(
      "div.buttons",
      this.spikes,
      log,
      choosesRun && make("select", { "aria-label": "run", change }, options),
    );
  }

  /** Names of the curves shown for each run, in the order of the first run that has them. */
  parts() {
    const names = [...new Set(runs.flatMap((run) => run.curves.filter(this.has, this).map((curve) => curve.name)))];
    const order = this.spec.stacked ? SPLIT_PARTS : ["training", "validation"];
    const place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
    return names.sort((a, b) => place(a) - place(b));
  }

  /** Return the points, the style and the name of each drawn curve. */
  lines() {
    const parts = this.parts();
    const lines = [];
    runs.forEach((run, runIndex) => {
      if (state.hidden.has(runIndex) || !run.x[state.axis]) return;
      for (const curve of run.curves.filter(this.has, this)) {
        if (this.off.has(curve.name)) continue;
        const part = parts.indexOf(curve.name);
        const isEvaluation = isEvaluated(curve);
        const line = {
          run,
          curve,
          label:
            [several && run.name, (!several || parts.length > 1) && curve.name].filter(Boolean).join(" · ") ||
            this.spec.title,
          color: this.partColor(curve.name, several ? runIndex : part),
          dash: several ? DASHES[(part + Math.floor(runIndex / PALETTES.light.length)) % DASHES.length] : [],
          dots: curve.name === "undone" ? "only" : isEvaluation || curve.y.length <= 40,
          width: isEvaluation ? 2 : 1.25,
          ...this.points(run, curve.at, curve.y),
        };
        const smooth = !this.spec.rough && !isEvaluation && curve.name !== "undone" && state.smoothing > 0;
        lines.push(smooth ? { ...line, alpha: 0.45, width: 1 } : line);
        if (smooth) {
          const [at, y] = curve.mean_y.length ? [curve.mean_at, curve.mean_y] : [curve.at, curve.y];
          lines.push({
            ...line,
            ...this.points(run, at, smoothed(y, state.smoothing)),
            isMean: true,
            width: 2,
            dots: curve.y.length <= 1,
          });
        }
      }
    });
    return lines;
  }

  partColor(name, index) {
    return name === "undone" && !several ? "#808890" : color(index);
  }

  points(run, at, y) {
    return {
      rows: at,
      xs: at.map((row) => run.x[state.axis][row]),
      ys: this.isLog ? y.map((value) => (value > 0 ? value : null)) : y,
    };
  }

  /** Lines of a stacked chart, the highest first: each is filled down to zero and the next is drawn over it. */
  stack() {
    const run = runs[this.of];
    if (!run || !run.x[state.axis]) return [];
    let below = null;
    const lines = [];
    this.parts().forEach((name, part) => {
      const curve = run.curves.find((each) => this.has(each) && each.name === name);
      if (!curve || this.off.has(name)) return;
      const sums = curve.y.map((value, i) => value + (below ? below[i] : 0));
      below = sums;
      lines.unshift({
        run,
        curve,
        label: name,
        color: color(part),
        fill: faded(color(part)),
        own: curve.y,
        dash: [],
        width: 0.5,
        dots: curve.y.length < 2,
        ...this.points(run, curve.at, sums),
      });
    });
    return lines;
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    this.drawLegend();
    this.shown = this.spec.stacked ? this.stack() : this.lines();
    const isEmpty = !this.shown.some((line) => line.ys.some((y) => y != null));
    this.note.textContent = isEmpty ? "Nothing to draw: hidden, not finite, or not recorded." : "";
    this.frame.classList.toggle("empty", isEmpty);
    if (isEmpty) return;
    const data = uPlot.join(this.shown.map((line) => [line.xs, line.ys]));
    this.plot = new uPlot(this.options(), data, this.frame);
    this.plot.over.append(this.tip);
    followTouch(this.plot);
  }

  drawLegend() {
    const parts = this.parts();
    if (parts.length < 2) return this.legend.replaceChildren();
    const isByRun = several && !this.spec.stacked;
    const toggles = parts.map((name, part) => {
      const swatch = make(name === "undone" ? "span.swatch.dots" : "span.swatch");
      if (isByRun) swatch.style.borderTopStyle = ["solid", "dashed", "dotted", "dashed"][part % 4];
      else swatch.style.color = this.partColor(name, part);
      const label = name === "undone" ? "undone steps" : name || this.spec.title;
      return hider(this.off, name, [swatch, label], `show ${label}`, () => this.draw());
    });
    this.legend.replaceChildren(...toggles);
  }

  options() {
    const style = getComputedStyle(document.documentElement);
    const [text, grid] = ["--muted", "--grid"].map((name) => style.getPropertyValue(name));
    const font = "11px system-ui, sans-serif";
    const axis = AXES[state.axis];
    const common = { stroke: text, font, gap: 3, grid: { stroke: grid, width: 1 } };
    const lineOf = (line) => ({
      stroke: line.color,
      width: line.width,
      dash: line.dash,
      alpha: line.alpha ?? 1,
      fill: line.fill,
      ...(line.dots === "only" && { paths: () => null, alpha: 0.45 }),
      points: { show: Boolean(line.dots), size: line.dots === "only" ? 3 : 5, fill: line.color, width: 0 },
    });
    return {
      ...this.size(),
      legend: { show: false },
      padding: [10, 20, 0, 0],
      scales: {
        x: { time: false, range: () => state.zoom ?? extent() },
        y: { distr: this.isLog ? 3 : 1, range: (plot, low, high) => this.range(plot, low, high) },
      },
      axes: [
        {
          ...common,
          labelFont: font,
          label: axis.label,
          labelSize: 16,
          size: 28,
          space: 60,
          incrs: state.axis === "seconds" ? SECOND_TICKS : WHOLE_TICKS,
          ticks: { stroke: grid, size: 4 },
          values: (plot, ticks) => ticks.map((tick) => axis.tick(tick)),
        },
        {
          ...common,
          space: 34,
          ticks: { show: false },
          ...(this.isLog
            ? { splits: logTicks, filter: (plot, ticks) => ticks }
            : this.spec.binary && { splits: binaryTicks }),
          size: (plot, values) => 12 + 6.2 * Math.max(2, ...(values ?? []).map((value) => value.length)),
          values: (plot, ticks) => ticks.map((tick) => (this.spec.format === loss ? compact : this.spec.format)(tick)),
        },
      ],
      series: [{}, ...this.shown.map(lineOf)],
      cursor: {
        y: false,
        points: { size: 7 },
        drag: { x: true, y: false, setScale: false },
        sync: {
          key: "page",
          setSeries: false,
          scales: ["x", null],
          filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
        },
        bind: {
          dblclick: () => () => {
            zoomTo(null);
            return null;
          },
        },
      },
      hooks: {
        draw: [(plot) => drawMarks(plot, this.spec.id)],
        setSelect: [(plot) => this.select(plot)],
        setCursor: [(plot) => this.hover(plot)],
      },
    };
  }

  size() {
    const isNarrow = window.innerWidth < 640;
    return {
      width: Math.max(200, this.frame.clientWidth),
      height: this.spec.wide ? (isNarrow ? 270 : 340) : isNarrow ? 210 : 230,
    };
  }

  range(plot, low, high) {
    if (low == null) return this.isLog ? [0.1, 1] : [0, 1];
    const from = this.spec.zero && low >= 0 ? 0 : low;
    const lasting = this.spec.clips ? lastingHigh(plot) : null;
    const isClipped = this.isLog
      ? lasting && high / low > (lasting / low) ** 2.5
      : lasting && high - from > 2.5 * (lasting - from);
    if (this.spikes) this.spikes.hidden = !isClipped && !this.isWhole;
    if (isClipped && !this.isWhole)
      high = this.isLog ? lasting * (lasting / low) ** 0.1 : lasting + 0.1 * (lasting - from);
    if (this.isLog) {
      const room = low === high ? 1.2 : (high / low) ** 0.05;
      return [low / room, high * room];
    }
    if (this.spec.zero && low >= 0) return [0, high * 1.06 || 1];
    const room = low === high ? Math.abs(low) * 0.05 || 1 : (high - low) * 0.05;
    return [low - room, high + room];
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    const span = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    zoomTo(span);
  }

  /** Show the exact values of the points nearest to the cursor. */
  hover(plot) {
    const { left, top, idx, idxs } = plot.cursor;
    if (idx == null || left < 0 || hovered !== plot.over) {
      this.tip.hidden = true;
      return;
    }
    const at = plot.data[0][idx];
    const table = make("table");
    let title = null;
    this.shown.forEach((line, i) => {
      const index = idxs[i + 1];
      const value = index == null ? undefined : plot.data[i + 1][index];
      if (value === undefined || line.isMean) return;
      const x = plot.data[0][index];
      if (line.dots === "only" && Math.abs(plot.valToPos(x, "x") - left) > 6) return;
      const place = position(line.xs, x);
      if (x === at) title ??= titleOf(line.run, line.rows[place]);
      const swatch = make("span.swatch");
      swatch.style.color = line.color;
      const mean = this.shown[i + 1]?.isMean ? plot.data[i + 2][idxs[i + 2]] : null;
      const asides = [mean != null && `smoothed ${trimmed(mean, 5)}`, x !== at && `at ${AXES[state.axis].title(x)}`];
      const cells = [
        make("td", swatch, line.label),
        make("td.number", this.exactly(line.own ? line.own[place] : value)),
        make("td", asides.filter(Boolean).join(", ")),
      ];
      table.append(make(x === at ? "tr" : "tr.aside", cells));
    });
    const near = marksNear(plot, left).map((mark) => make("p", mark.text));
    this.tip.replaceChildren(make("p.title", title ?? AXES[state.axis].title(at)), table, ...near);
    this.tip.hidden = false;
    const [width, room] = [this.tip.offsetWidth, plot.over.clientWidth];
    this.tip.style.left = `${Math.max(0, Math.min(left + 14 + width > room ? left - 14 - width : left + 14, room - width))}px`;
    this.tip.style.top = `${Math.max(-20, Math.min(top + 12, plot.over.clientHeight - this.tip.offsetHeight))}px`;
  }

  exactly(value) {
    const { format, binary } = this.spec;
    return format === percent || format === stepTime || binary ? `${exact(value)} (${format(value)})` : exact(value);
  }
}

function titleOf(run, row) {
  const { step, tokens, seconds } = run.x;
  return [`step ${exact(step[row])}`, tokens && `${exact(tokens[row])} ${run.unit}`, seconds && duration(seconds[row])]
    .filter(Boolean)
    .join(" · ");
}

/** Highest visible value of the curves without spikes: the maximum of medians of five points. null: too few points. */
function lastingHigh(plot) {
  const [first, last] = plot.series[0].idxs ?? [0, plot.data[0].length - 1];
  if (last - first < 50) return null;
  let high = null;
  plot.data.slice(1).forEach((ys, series) => {
    if (!plot.series[series + 1].show) return;
    const window = [];
    for (let i = first; i <= last; i++) {
      if (ys[i] == null) continue;
      window.push(ys[i]);
      if (window.length > 5) window.shift();
      if (window.length < 5 && i < last) continue;
      high = Math.max(high ?? -Infinity, [...window].sort((a, b) => a - b)[window.length >> 1]);
    }
  });
  return high;
}

/** Index of `x` in the increasing array `xs`. */
function position(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Range of the axis over all visible runs. */
function extent() {
  const ends = runs
    .filter((run, index) => !state.hidden.has(index))
    .map((run) => run.x[state.axis] ?? [])
    .filter((xs) => xs.length);
  const low = Math.min(...ends.map((xs) => xs[0]));
  const high = Math.max(...ends.map((xs) => xs[xs.length - 1]));
  return low < high ? [low, high] : [low - 1, high + 1];
}

/** Touch: a horizontal move shifts the cursor, a vertical one scrolls the page. */
function followTouch(plot) {
  const follow = (event) => {
    if (event.pointerType === "mouse") return;
    const box = plot.over.getBoundingClientRect();
    hovered = plot.over;
    plot.setCursor({ left: event.clientX - box.left, top: event.clientY - box.top });
  };
  plot.over.addEventListener("pointerdown", follow);
  plot.over.addEventListener("pointermove", follow);
  plot.over.addEventListener("mouseenter", () => {
    hovered = plot.over;
  });
  plot.over.addEventListener("mouseleave", () => {
    hovered = null;
  });
}
