// Charts, with their colours and scales.

// Colours that differ from each other for every kind of colour vision, and from the background. After Okabe and Ito's
// blue and vermilion, they were chosen by search. A test measures the differences.
const PALETTES = {
  light: ["#0072b2", "#d55e00", "#0b5d2e", "#8700ff", "#d27896", "#5a0f4b", "#2d0f96"],
  dark: ["#56b4e9", "#ff8f4d", "#875aff", "#f0f000", "#e13c69", "#69ffc3", "#a5ff96"],
};
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const SPLIT_PARTS = ["data", "forward", "backward", "pipeline", "optimizer", "host"];
const AXES = {
  step: { label: "step", tick: compact, title: (x) => `step ${exact(x)}` },
  tokens: {
    get label() {
      return unit();
    },
    tick: compact,
    title: (x) => `${exact(x)} ${unit()}`,
  },
  seconds: { label: "training time", tick: duration, title: (x) => duration(x) },
};
const WHOLE_TICKS = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();
const SECOND_TICKS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30]
  .concat([1, 2, 5, 10, 15, 30].map((minutes) => 60 * minutes))
  .concat([1, 2, 3, 6, 12, 24, 48, 96, 240, 480, 960].map((hours) => 3600 * hours));

const ratio = (number) => `${trimmed(number, 4)}x`;
const isMetric = (curve) => curve.chart.startsWith("metric:");
const isEvaluated = (curve) =>
  curve.chart === "validation" || curve.chart === "source_loss" || (isMetric(curve) && !["training", "logged"].includes(curve.name));
const isMain = (curve) => curve.chart === "validation" && curve.name === "validation";

/** `has`: the curves to show. `log`: offer a logarithmic scale; `startsLog`: start with it. `zero`: the scale begins
    at 0. `clips`: the scale ignores single spikes, which leave the chart at the top. `rough`: do not smooth. */
const SPECS = [
  {
    id: "loss",
    title: "Loss",
    has: (curve) => curve.chart === "loss" || isMain(curve),
    wide: true,
    log: true,
    clips: true,
    format: loss,
  },
  {
    id: "validation",
    title: "Validation sets",
    has: (curve) => curve.chart === "validation",
    needs: (curve) => curve.chart === "validation" && !isMain(curve),
    log: true,
    format: loss,
  },
  { id: "source_loss", title: "Validation loss by source", log: true, format: loss },
  { id: "grad_norm", title: "Gradient norm", log: true, startsLog: true, clips: true, format: compact },
  { id: "lr", title: "Learning rate", log: true, rough: true, zero: true, format: compact },
  { id: "throughput", title: "Throughput, per second", zero: true, clips: true, format: compact },
  { id: "mfu", title: "Model FLOPs utilisation", zero: true, format: percent },
  { id: "memory", title: "Peak memory of any rank", rough: true, zero: true, format: bytes, binary: true },
  {
    id: "time_split",
    title: "Time per part of a step",
    stacked: true,
    rough: true,
    zero: true,
    format: stepTime,
  },
  { id: "data_share", title: "Waiting for data, share of step time", zero: true, clips: true, format: percent },
  { id: "source_tokens", title: "Tokens by source", rough: true, zero: true, format: compact },
  { id: "expert_load", title: "Most loaded expert, tokens relative to the mean", zero: true, format: ratio },
  { id: "scale", title: "Loss scale", log: true, startsLog: true, rough: true, format: compact },
  { id: "slowest", title: "Slowest rank, time relative to the median", rough: true, format: ratio },
];

/** One chart for each metric of the task, in training and on the validation sets. */
function metricSpecs() {
  const charts = runs.flatMap((run) => run.curves.map((curve) => curve.chart)).filter((chart) => isMetric({ chart }));
  return [...new Set(charts)].sort().map((chart, index) => ({
    id: `metric-${index}`,
    title: chart.slice("metric:".length),
    has: (curve) => curve.chart === chart,
    format: compact,
  }));
}

const color = (index) => PALETTES[state.theme][index % PALETTES[state.theme].length];

/** Mix of a colour and the background, for large areas. Opaque, since areas overlap. */
function faded(hex) {
  const ground = state.theme === "dark" ? 24 : 255;
  const parts = [1, 3, 5].map((i) => Math.round(0.68 * parseInt(hex.slice(i, i + 2), 16) + 0.32 * ground));
  return `rgb(${parts.join(" ")})`;
}

/** TensorBoard's smoothing: an exponential moving average with decay `weight` and bias correction. */
function smoothed(values, weight) {
  let mean = 0;
  let share = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + 1 - weight;
    return mean / share;
  });
}

/** Ticks of a logarithmic scale: 1, 2, 5 of each decade, or even steps if it spans less than one decade. */
function logTicks(plot, axis, low, high) {
  if (high / low < 8) {
    const rough = (high - low) / 5;
    const decade = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * decade >= rough) * decade;
    const first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) =>
      Number(((first + i) * step).toPrecision(12)),
    );
  }
  const decades = Math.log10(high / low);
  const factors = decades < 3 ? [1, 2, 5] : [1];
  const every = Math.ceil(decades / 7);
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every)
    ticks.push(...factors.map((factor) => Number(`${factor}e${power}`)).filter((tick) => tick >= low && tick <= high));
  return ticks;
}

function binaryTicks(plot, axis, low, high) {
  const rough = (high - low) / 4;
  const unit = 1024 ** Math.floor(Math.log(Math.max(rough, 1)) / Math.log(1024));
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1024].find((factor) => factor * unit >= rough) * unit;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}
