// The heat map on its canvas: cells by colour, outliers by marks, and what rows and steps are called.

import { colorOf, heatOf, heatScale, MOST } from "/page/heat.js";

// Below this a mark would be no larger than what it frames.
const FRAMED_PX = 7;
const DASH_PX = 6;
const LABEL_PX = 18;

/** One pixel for each row and step, to be drawn at any size. */
export function pictureOf(rows, numSteps) {
  const [width, height] = [Math.max(1, numSteps), Math.max(1, rows.length)];
  const canvas = new OffscreenCanvas(width, height);
  const ctx = canvas.getContext("2d");
  const image = ctx.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const scale = heatScale();
  // A million cells have some hundred colours.
  const colors = Uint32Array.from({ length: 100 * MOST + 1 }, (_, percent) => (
    new Uint32Array(Uint8Array.of(...scale.parts(heatOf(percent / 100, 1)), 255).buffer)[0]
  ));
  rows.forEach(({ percents }, y) => {
    for (let x = 0; x < numSteps; x += 1) {
      const percent = percents[x];
      if (percent !== null) pixels[y * width + x] = colors[Math.min(percent, 100 * MOST)];
    }
  });
  ctx.putImageData(image, 0, 0);
  return canvas;
}

/** What a row is called at the left of it. */
function labelOf(row, { order, layout }) {
  if (order === "node") return row.node;
  if (order === "rank") return `${row.first}`;
  const { tp, dp } = layout;
  const at = row.first;
  return `d${Math.floor(at / tp) % dp} p${Math.floor(at / (tp * dp))} t${at % tp}`;
}

/** Frames around outliers, or dashes where cells are too small for that; the shape says it, not the colour. */
function markOutliers(ctx, rows, view, { leftPx, stepPx, rowPx, across }) {
  const drawn = new Set();
  const [ink, card] = [colorOf("--ink"), colorOf("--card")];
  const isFramed = rowPx >= FRAMED_PX && stepPx >= FRAMED_PX;
  const dashes = [];
  ctx.lineWidth = 2;
  for (let y = Math.floor(view.y); y < Math.min(view.y + view.h, rows.length); y += 1) {
    for (const [first, number] of rows[y].outliers) {
      const [from, to] = [Math.max(first, view.x), Math.min(first + number, view.x + view.w)];
      if (from >= to) continue;
      const [x, top] = [leftPx + (from - view.x) * stepPx, (y - view.y) * rowPx];
      const width = (to - from) * stepPx;
      if (isFramed) {
        // In both, that it is seen on each colour of the scale.
        for (const [color, by] of [[card, 3], [ink, 1]]) {
          ctx.strokeStyle = color;
          ctx.strokeRect(x + by, top + by, width - 2 * by, rowPx - 2 * by);
        }
        continue;
      }
      const middle = Math.round(top + rowPx / 2);
      const wide = Math.max(DASH_PX, width);
      const begun = Math.min(x + width / 2 - wide / 2, leftPx + across - wide);
      // Of those that would cover each other one is enough.
      const place = `${Math.round(middle / 4)} ${Math.round(begun / DASH_PX)} ${Math.round(wide / DASH_PX)}`;
      if (!drawn.has(place)) dashes.push([Math.max(leftPx, begun), middle, wide]);
      drawn.add(place);
    }
  }
  for (const [color, by] of [[card, 1], [ink, 0]]) {
    ctx.fillStyle = color;
    for (const [x, y, wide] of dashes) ctx.fillRect(x - by, y - 1 - by, wide + 2 * by, 2 + 2 * by);
  }
}

/** A triangle at rows that are above their peers on the mean. */
function markRows(ctx, rows, view, { leftPx, rowPx, slow }) {
  ctx.fillStyle = colorOf("--ink");
  let below = -Infinity;
  for (let y = Math.floor(view.y); y < Math.min(view.y + view.h, rows.length); y += 1) {
    const middle = (y + 0.5 - view.y) * rowPx;
    if (rows[y].mean_ratio < slow || middle < below) continue;
    below = middle + 6;
    ctx.beginPath();
    ctx.moveTo(leftPx - 9, middle - 5);
    ctx.lineTo(leftPx - 1, middle);
    ctx.lineTo(leftPx - 9, middle + 5);
    ctx.fill();
  }
}

function writeLabels(ctx, data, view, { leftPx, stepPx, rowPx, down }) {
  ctx.font = "12px system-ui, sans-serif";
  ctx.fillStyle = colorOf("--quiet");
  ctx.textBaseline = "middle";
  const every = Math.max(1, Math.ceil(LABEL_PX / rowPx));
  for (let y = Math.ceil(view.y); y < Math.min(view.y + view.h, data.rows.length); y += 1) {
    // Also of a row at the edge, which may be thinner than its label.
    const middle = Math.max(LABEL_PX / 2, (y + 0.5 - view.y) * rowPx);
    if (y % every === 0) ctx.fillText(labelOf(data.rows[y], data), 4, middle, leftPx - 16);
  }
  const apart = Math.max(1, Math.ceil(60 / stepPx));
  ctx.textAlign = "center";
  for (let x = Math.ceil(view.x); x < Math.min(view.x + view.w, data.steps.length); x += 1) {
    if (x % apart === 0) ctx.fillText(data.steps[x], leftPx + (x + 0.5 - view.x) * stepPx, down + 10);
  }
}

/**
 * @param data the API's answer
 * @param view the part that is seen, in rows and steps
 * @param chosen the cell that is chosen, or null
 * @param size pixels that the map is wide and high (`across`, `down`), and where it begins (`leftPx`)
 * @param slow from which mean ratio on a row has its triangle
 */
export function paint(ctx, picture, { data, view, chosen, size, slow }) {
  const { leftPx, across, down } = size;
  const scale = { ...size, stepPx: across / view.w, rowPx: down / view.h, slow };
  ctx.imageSmoothingEnabled = false;
  ctx.fillStyle = colorOf("--line");
  ctx.fillRect(leftPx, 0, across, down);
  ctx.drawImage(picture, view.x, view.y, view.w, view.h, leftPx, 0, across, down);
  markOutliers(ctx, data.rows, view, scale);
  markRows(ctx, data.rows, view, scale);
  writeLabels(ctx, data, view, scale);
  if (!chosen) return;
  ctx.strokeStyle = colorOf("--focus");
  ctx.lineWidth = 3;
  ctx.strokeRect(
    leftPx + (chosen.x - view.x) * scale.stepPx, (chosen.y - view.y) * scale.rowPx,
    Math.max(4, scale.stepPx), Math.max(4, scale.rowPx),
  );
}
