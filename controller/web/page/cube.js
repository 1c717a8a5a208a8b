// A picture of a job's ranks in three dimensions: planes of cells, one above the other, turned and tilted.

import { colorOf, heatScale } from "/page/heat.js";

// Of a cell, from which its rank's number fits, across and in depth.
const [NUMBERED_PX, NUMBERED_DEPTH_PX] = [28, 14];
// Who waits for whom is drawn up to so many arrows: more would hide the ranks. The chosen rank's always are.
const MOST_ARROWS = 256;
const [HEAD_PX, FAULT_PX] = [7, 14];
// Of the groups of the chosen rank.
const AXES = { tp: "--teal", dp: "--rose", pp: "--ink" };
// `GAP_PX` is the least between planes.
const [LEFT_PX, TOP_PX, COMPASS_PX, GAP_PX] = [50, 14, 56, 26];
// Browsers have no canvas that is much higher than three times this.
const HEIGHT_PX = 10_000;
const [LEAST_CELL_PX, MOST_CELL_PX] = [3, 84];
// To the right for what lies one cell deeper, so that a cube that is seen from the front shows its side.
const SLANT = 0.5;
// From nearly flat, where cells can still be chosen, to straight from above.
const [LEAST_TILT, MOST_TILT] = [10, 90];
/** How the picture is turned at first, in degrees: replicas lie across, tensor shards into the depth. */
export const FRONT = { turn: 0, tilt: 37 };

/** The picture turned to the right and tilted towards the reader by so many degrees more. */
export function turned({ turn, tilt }, right, down) {
  return { turn: (((turn + right) % 360) + 360) % 360, tilt: Math.min(MOST_TILT, Math.max(LEAST_TILT, tilt + down)) };
}

export const hasOpenFault = (rank) => (rank.last_fault?.incident_state ?? "CLOSED") !== "CLOSED";

/** Where a step along a replica and along a tensor shard leads, in cells, right and down. */
function basisOf({ turn, tilt }) {
  const [across, deep] = [Math.cos((turn * Math.PI) / 180), Math.sin((turn * Math.PI) / 180)];
  const height = Math.sin((tilt * Math.PI) / 180);
  const seen = (x, z) => [x + SLANT * z, -height * z];
  return { dp: seen(across, deep), tp: seen(-deep, across) };
}

/**
 * Where each plane and cell lies, for a canvas of this width.
 *
 * Planes are so far apart that none hides another, however the picture is turned.
 *
 * @returns `dp` and `tp`, pixels right and down that one cell takes, and `corner` of a cell
 */
export function geometry(layout, width, view) {
  const basis = basisOf(view);
  const [across, down] = [0, 1].map((at) => layout.dp * Math.abs(basis.dp[at]) + layout.tp * Math.abs(basis.tp[at]));
  // Of a cell, where all planes are as high together as a canvas may be.
  const most = (HEIGHT_PX - TOP_PX - COMPASS_PX - GAP_PX * layout.pp) / (layout.pp * (down + 1));
  const cell = Math.max(Math.min(LEAST_CELL_PX, most), Math.min(MOST_CELL_PX, (width - LEFT_PX - 10) / across, most));
  const [dp, tp] = [basis.dp, basis.tp].map((step) => step.map((part) => part * cell));
  const gap = down * cell + Math.max(GAP_PX, cell);
  // Of the cell from which the others of its plane lie right and down.
  const first = [0, 1].map((at) => -Math.min(0, layout.dp * dp[at]) - Math.min(0, layout.tp * tp[at]));
  const corner = (p, d, t) => [
    LEFT_PX + first[0] + d * dp[0] + t * tp[0], TOP_PX + p * gap + first[1] + d * dp[1] + t * tp[1],
  ];
  const isNumbered = cell >= NUMBERED_PX && Math.abs(dp[1]) + Math.abs(tp[1]) >= NUMBERED_DEPTH_PX;
  return { cell, dp, tp, corner, isNumbered, labelY: (p) => TOP_PX + p * gap + (down * cell) / 2, height: TOP_PX + gap * layout.pp + COMPASS_PX };
}

const placeIn = ({ corner, dp, tp }, rank, across, deep) => {
  const [x, y] = corner(rank.pp, rank.dp, rank.tp);
  return [x + across * dp[0] + deep * tp[0], y + across * dp[1] + deep * tp[1]];
};

const centerOf = (shape, rank) => placeIn(shape, rank, 0.5, 0.5);

function cellPath(ctx, shape, rank, insetPx) {
  const [across, deep] = [shape.dp, shape.tp].map((step) => Math.min(0.4, insetPx / Math.hypot(...step)));
  ctx.beginPath();
  for (const [at, depth] of [[across, deep], [1 - across, deep], [1 - across, 1 - deep], [across, 1 - deep]]) {
    ctx.lineTo(...placeIn(shape, rank, at, depth));
  }
  ctx.closePath();
}

/** From each rank that waits to those that it waits for; of many only those of the chosen one. */
export function arrowsOf(awaited, chosen) {
  const all = [...awaited].flatMap(([rank, others]) => others.map((other) => [rank, other]));
  return all.length <= MOST_ARROWS ? all : all.filter((ends) => ends.includes(chosen));
}

function drawArrow(ctx, [fromX, fromY], [toX, toY]) {
  const length = Math.hypot(toX - fromX, toY - fromY);
  if (length === 0) return;
  const [alongX, alongY] = [(toX - fromX) / length, (toY - fromY) / length];
  // Beside the straight line, so that two that wait for each other have two arrows.
  const [bendX, bendY] = [(fromX + toX) / 2 - alongY * length * 0.1, (fromY + toY) / 2 + alongX * length * 0.1];
  const [headX, headY] = [toX - alongX * HEAD_PX, toY - alongY * HEAD_PX];
  ctx.beginPath();
  ctx.moveTo(fromX, fromY);
  ctx.quadraticCurveTo(bendX, bendY, headX, headY);
  ctx.stroke();
  ctx.beginPath();
  ctx.moveTo(toX, toY);
  ctx.lineTo(headX - (alongY * HEAD_PX) / 2, headY + (alongX * HEAD_PX) / 2);
  ctx.lineTo(headX + (alongY * HEAD_PX) / 2, headY - (alongX * HEAD_PX) / 2);
  ctx.fill();
}

/** A triangle in the corner of each rank that an open incident has a fault of. */
function drawFaults(ctx, shape, ranks) {
  ctx.fillStyle = colorOf("--bad");
  const [across, deep] = [shape.dp, shape.tp].map((step) => Math.min(0.4, FAULT_PX / Math.hypot(...step)));
  for (const rank of ranks) {
    if (!hasOpenFault(rank)) continue;
    ctx.beginPath();
    for (const [at, depth] of [[0.04, 0.04], [0.04 + across, 0.04], [0.04, 0.04 + deep]]) {
      ctx.lineTo(...placeIn(shape, rank, at, depth));
    }
    ctx.fill();
  }
}

function drawArrows(ctx, shape, data, arrows, chosen, culprits) {
  const center = (number) => centerOf(shape, data.ranks[number]);
  for (const [from, to] of arrows) {
    ctx.strokeStyle = ctx.fillStyle = colorOf(culprits.includes(to) ? "--bad" : "--ink");
    ctx.lineWidth = from === chosen || to === chosen ? 3 : 1.5;
    drawArrow(ctx, center(from), center(to));
  }
}

/** Which way replicas and tensor shards lie: the picture may be turned. */
function drawCompass(ctx, shape) {
  const [x, y] = [26, shape.height - COMPASS_PX / 2];
  ctx.strokeStyle = ctx.fillStyle = colorOf("--quiet");
  ctx.lineWidth = 1.5;
  for (const name of ["dp", "tp"]) {
    const [right, down] = shape[name].map((part) => (part / shape.cell) * 16);
    ctx.beginPath();
    ctx.moveTo(x, y);
    ctx.lineTo(x + right, y + down);
    ctx.stroke();
    ctx.fillText(name, x + right * 1.5 + Math.sign(right) * 4, y + down * 1.5 + Math.sign(down) * 2);
  }
}

/** The cells in their colours, with the numbers of their ranks. */
function drawCells(ctx, shape, ranks, heat) {
  const inset = shape.cell > 8 ? 1 : 0;
  const scale = heatScale();
  for (const rank of ranks) {
    cellPath(ctx, shape, rank, inset);
    ctx.fillStyle = scale.color(heat[rank.rank]);
    ctx.fill();
    if (!shape.isNumbered) continue;
    ctx.fillStyle = scale.ink(heat[rank.rank]);
    ctx.fillText(rank.rank, ...centerOf(shape, rank));
  }
}

/** Frames around the groups of the chosen rank, around ranks that hold up others, which glow, and around the chosen one. */
function drawFrames(ctx, shape, data, { chosen, culprits, groups }) {
  for (const [name, members] of Object.entries(groups)) {
    for (const member of members) {
      cellPath(ctx, shape, data.ranks[member], 1);
      // On a ground of its own: the cells have all colours of the scale.
      for (const [color, wide] of [["--card", 5], [AXES[name], 2]]) {
        ctx.strokeStyle = colorOf(color);
        ctx.lineWidth = wide;
        ctx.stroke();
      }
    }
  }
  for (const culprit of culprits) {
    ctx.save();
    ctx.shadowColor = ctx.strokeStyle = colorOf("--bad");
    ctx.shadowBlur = 14;
    ctx.lineWidth = 3;
    cellPath(ctx, shape, data.ranks[culprit], 0);
    ctx.stroke();
    ctx.restore();
  }
  if (chosen === null) return;
  ctx.strokeStyle = colorOf("--ink");
  ctx.lineWidth = 3;
  cellPath(ctx, shape, data.ranks[chosen], 0);
  ctx.stroke();
}

/** @param marks `chosen` rank or null, `culprits`, `groups` of the chosen one by axis, and `arrows` */
export function draw(canvas, shape, data, heat, marks) {
  const ratio = devicePixelRatio;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = shape.height * ratio;
  canvas.style.height = `${shape.height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.font = "12px system-ui, sans-serif";
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  drawCells(ctx, shape, data.ranks, heat);
  drawFrames(ctx, shape, data, marks);
  drawFaults(ctx, shape, data.ranks);
  drawArrows(ctx, shape, data, marks.arrows, marks.chosen, marks.culprits);
  drawCompass(ctx, shape);
  ctx.textAlign = "left";
  for (let pp = 0; pp < data.pp; pp += 1) ctx.fillText(`pp ${pp}`, 4, shape.labelY(pp));
}

/** The rank under a point, or null. */
export function rankAt(shape, data, x, y) {
  const ctx = new OffscreenCanvas(1, 1).getContext("2d");
  return data.ranks.find((rank) => {
    cellPath(ctx, shape, rank, 0);
    return ctx.isPointInPath(x, y);
  })?.rank ?? null;
}
