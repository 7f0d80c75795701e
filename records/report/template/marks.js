// Events drawn into the curves: restarts, losses, joins, rollbacks, skipped steps, spikes, checkpoints.

const MARKS = {
  restart: { name: "restarts", everywhere: true },
  lost: { name: "lost replicas", everywhere: true },
  joined: { name: "joined nodes", everywhere: true },
  rollback: { name: "rollbacks", everywhere: true },
  skipped: { name: "skipped steps" },
  spike: { name: "spikes" },
  checkpoint: { name: "checkpoints" },
};

function marksShown() {
  return runs.flatMap((run, index) =>
    state.hidden.has(index) || !run.x[state.axis]
      ? []
      : run.marks
          .filter((mark) => !state.hiddenMarks.has(mark.kind))
          .map((mark) => ({
            ...mark,
            x: run.x[state.axis][mark.at],
            color: several ? color(index) : null,
            text: several ? `${run.name}: ${mark.text}` : mark.text,
          })),
  );
}

/** At most five visible marks near `left`. */
function marksNear(plot, left) {
  return marksShown()
    .filter((mark) => Math.abs(plot.valToPos(mark.x, "x") - left) < 6)
    .slice(0, 5);
}

function drawMarks(plot, id) {
  const { ctx, bbox } = plot;
  const pixel = uPlot.pxRatio;
  const style = getComputedStyle(document.documentElement);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - 5 * pixel, bbox.top, bbox.width + 10 * pixel, bbox.height + 8 * pixel);
  ctx.clip();
  ctx.lineWidth = 1.5 * pixel;
  for (const mark of marksShown()) {
    const isClose = id === "loss" || id === "grad_norm";
    if (!isClose && !MARKS[mark.kind].everywhere) continue;
    const x = plot.valToPos(mark.x, "x", true);
    if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
    ctx.strokeStyle = ctx.fillStyle = mark.color ?? style.getPropertyValue(`--${mark.kind}`);
    ctx.setLineDash([]);
    ctx.beginPath();
    MARK_SHAPES[mark.kind](ctx, x, bbox, pixel);
  }
  ctx.restore();
}

function drawUpright(ctx, x, bbox) {
  ctx.moveTo(x, bbox.top);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
}

const MARK_SHAPES = {
  restart(ctx, x, bbox, pixel) {
    ctx.setLineDash([5 * pixel, 4 * pixel]);
    drawUpright(ctx, x, bbox);
  },
  lost(ctx, x, bbox, pixel) {
    ctx.setLineDash([2 * pixel, 3 * pixel]);
    drawUpright(ctx, x, bbox);
  },
  joined(ctx, x, bbox, pixel) {
    ctx.setLineDash([8 * pixel, 3 * pixel, 2 * pixel, 3 * pixel]);
    drawUpright(ctx, x, bbox);
  },
  rollback: drawUpright,
  skipped(ctx, x, bbox, pixel) {
    const [y, arm] = [bbox.top + 8 * pixel, 4 * pixel];
    for (const side of [-1, 1]) {
      ctx.moveTo(x - arm, y - side * arm);
      ctx.lineTo(x + arm, y + side * arm);
    }
    ctx.stroke();
  },
  spike(ctx, x, bbox, pixel) {
    const [y, arm] = [bbox.top + 14 * pixel, 5 * pixel];
    ctx.moveTo(x, y);
    ctx.lineTo(x + arm, y + 1.6 * arm);
    ctx.lineTo(x - arm, y + 1.6 * arm);
    ctx.fill();
  },
  checkpoint(ctx, x, bbox, pixel) {
    const [y, arm] = [bbox.top + bbox.height, 4 * pixel];
    ctx.moveTo(x, y - arm);
    ctx.lineTo(x + arm, y);
    ctx.lineTo(x, y + arm);
    ctx.lineTo(x - arm, y);
    ctx.fill();
  },
};
