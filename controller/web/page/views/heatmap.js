// Ranks by steps: who took longer than its peers, when, and for how long.

import { get } from "/page/api.js";
import { count, duration } from "/page/format.js";
import { colorOf, heatOf, heatParts, median, MOST } from "/page/heat.js";
import { usePlane, within } from "/page/plane.js";
import { Empty, Failure, html, Link, Loading, useMemo, usePolled, useState } from "/page/ui.js";

const MEASURES = {
  work: "Own work", waiting: "Waiting for others", step: "Whole step", forward: "Forward passes", backward: "Backward passes",
  data: "Waiting for data", optimizer: "Optimizer", checkpoint: "Checkpoint",
};
const HEIGHT_PX = 460;
const LEFT_PX = 56;
const BOTTOM_PX = 18;
const MOST_ROWS = 1024;
const STEPS = 400;
// What is asked of every rank is not asked often.
const [PERIOD_S, RANKS_PER_S] = [15, 100];
// Rows that are named as slow: on the mean so much above their peers.
const SLOW = 1.15;

/** Where most peers take no time at all, those that do are far above them. */
const ratioOf = (value, middle) => (middle ? value / middle : value ? MOST : 1);

/** Of each row and step the ratio to the median of the rows of its pipeline stage. */
function ratiosOf(rows, numSteps) {
  const stages = new Map();
  rows.forEach((row, index) => stages.set(row.pp, [...(stages.get(row.pp) ?? []), index]));
  const ratios = rows.map(() => new Array(numSteps).fill(null));
  for (const members of stages.values()) {
    for (let step = 0; step < numSteps; step += 1) {
      const middle = median(members.map((index) => rows[index].seconds[step]));
      for (const index of members) {
        const value = rows[index].seconds[step];
        ratios[index][step] = value === null ? null : ratioOf(value, middle);
      }
    }
  }
  return ratios;
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** One pixel for each row and step, to be drawn at any size. */
function pictureOf(ratios, numSteps) {
  const canvas = new OffscreenCanvas(Math.max(1, numSteps), Math.max(1, ratios.length));
  const ctx = canvas.getContext("2d");
  const image = ctx.createImageData(canvas.width, canvas.height);
  ratios.forEach((row, y) => row.forEach((ratio, x) => {
    if (ratio === null) return;
    const at = 4 * (y * canvas.width + x);
    image.data.set([...heatParts(heatOf(ratio, 1)), 255], at);
  }));
  ctx.putImageData(image, 0, 0);
  return canvas;
}

const nameOf = (row) => (row.first === row.last ? `rank ${row.first}` : `ranks ${row.first}–${row.last}`);

function paint(ctx, picture, data, view, chosen, { across, down }) {
  ctx.imageSmoothingEnabled = false;
  ctx.fillStyle = colorOf("--line");
  ctx.fillRect(LEFT_PX, 0, across, down);
  ctx.drawImage(picture, view.x, view.y, view.w, view.h, LEFT_PX, 0, across, down);
  ctx.font = "12px system-ui, sans-serif";
  ctx.fillStyle = colorOf("--quiet");
  ctx.textBaseline = "middle";
  const rowPx = down / view.h;
  const every = Math.max(1, Math.ceil(18 / rowPx));
  for (let y = Math.ceil(view.y); y < Math.min(view.y + view.h, data.rows.length); y += 1) {
    if (y % every === 0) ctx.fillText(data.rows[y].first, 4, (y + 0.5 - view.y) * rowPx);
  }
  const stepPx = across / view.w;
  const apart = Math.max(1, Math.ceil(60 / stepPx));
  ctx.textAlign = "center";
  for (let x = Math.ceil(view.x); x < Math.min(view.x + view.w, data.steps.length); x += 1) {
    if (x % apart === 0) ctx.fillText(data.steps[x], LEFT_PX + (x + 0.5 - view.x) * stepPx, HEIGHT_PX - 8);
  }
  if (chosen) {
    ctx.strokeStyle = colorOf("--ink");
    ctx.lineWidth = 2;
    ctx.strokeRect(
      LEFT_PX + (chosen.x - view.x) * stepPx, (chosen.y - view.y) * rowPx,
      Math.max(3, stepPx), Math.max(3, rowPx),
    );
  }
}

const ARROWS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
function Map2d({ data, ratios, chosen, choose }) {
  const picture = useMemo(() => pictureOf(ratios, data.steps.length), [ratios]);
  const whole = { w: data.steps.length, h: data.rows.length };
  const { canvas, seen, zoom, handlers } = usePlane({
    whole,
    frame: { left: LEFT_PX, bottom: BOTTOM_PX, height: HEIGHT_PX },
    paint: (ctx, view, size) => paint(ctx, picture, data, view, chosen, size),
    picked: ({ x, y }) => choose({ x: Math.floor(x), y: Math.floor(y) }),
  });
  const keyed = (event) => {
    if (event.key in ARROWS) {
      event.preventDefault();
      const [right, down] = ARROWS[event.key];
      const at = chosen ?? { x: whole.w - 1, y: 0 };
      choose({ x: within(at.x + right, 0, whole.w - 1), y: within(at.y + down, 0, whole.h - 1) });
    } else if (event.key === "+" || event.key === "-") {
      zoom(event.key === "+" ? 0.8 : 1.25, chosen ?? { x: seen.x + seen.w / 2, y: seen.y + seen.h / 2 });
    }
  };
  return html`<canvas ref=${canvas} class="heat" tabindex="0" role="application"
    aria-label="Heat map of ranks by steps; arrow keys choose a cell, plus and minus zoom"
    ...${handlers} onKeyDown=${keyed}></canvas>`;
}

function Chosen({ name, data, ratios, chosen }) {
  if (!chosen || !data.rows[chosen.y]) return html`<p class="quiet">Choose a cell to see its numbers.</p>`;
  const row = data.rows[chosen.y];
  const ratio = ratios[chosen.y][chosen.x];
  return html`<p role="status">
    <strong>${nameOf(row)}</strong> on ${row.node}, step ${count(data.steps[chosen.x])}:
    ${" "}${duration(row.seconds[chosen.x])}${ratio !== null && `, ${ratio.toFixed(2)} of the median of its peers`}.
    ${" "}<${Link} to="/jobs/${name}/timeline/${data.steps[chosen.x]}">The step over ranks<//>
  </p>`;
}

/** In words, for those who do not see the picture, and for all. */
function Slowest({ data, ratios, choose }) {
  const means = ratios.map((row, index) => ({ index, ratio: mean(row) })).filter((each) => each.ratio !== null);
  const slow = means.filter((each) => each.ratio >= SLOW).sort((a, b) => b.ratio - a.ratio).slice(0, 8);
  if (slow.length === 0) return html`<p>No row is ${Math.round(100 * (SLOW - 1))} % or more above its peers on the mean.</p>`;
  return html`<ol class="highest">${slow.map(({ index, ratio }) => html`<li>
    <button class="link" onClick=${() => choose({ x: data.steps.length - 1, y: index })}>${nameOf(data.rows[index])}</button>${" "}
    ${ratio.toFixed(2)} times its peers ${" "}<span class="quiet">${data.rows[index].node}</span>
  </li>`)}</ol>`;
}

export function HeatMapView({ name }) {
  const [measure, setMeasure] = useState("work");
  const [chosen, setChosen] = useState(null);
  const asked = () => get(["jobs", name, "heat-map"], { measure, rows: MOST_ROWS, steps: STEPS });
  const { value: data, error } = usePolled(asked, [name, measure], (last) => Math.max(PERIOD_S, (last?.num_ranks ?? 0) / RANKS_PER_S));
  const ratios = useMemo(() => (data ? ratiosOf(data.rows, data.steps.length) : []), [data]);
  const title = html`<h1><${Link} to="/jobs/${name}">${name}<//> heat map</h1>
    <div class="head">
      <label>Shown <select value=${measure} onChange=${(event) => setMeasure(event.target.value)}>
        ${Object.entries(MEASURES).map(([each, words]) => html`<option value=${each}>${words}</option>`)}
      </select></label>
      <span class="quiet">Against the median of its stage in the same step: blue half, orange twice; grey: not known.
        Wheel zooms, dragging moves, a double click shows all.</span>
    </div>`;
  if (!data) return html`${title}${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const isEmpty = data.rows.length === 0 || data.steps.length === 0;
  return html`${title}<${Failure} error=${error} />
    ${data.missing.length > 0 && html`<p class="banner warn">Missing: ${data.missing.slice(0, 4).map((each) => `${each.node}: ${each.reason}`).join("; ")}</p>`}
    ${isEmpty
      ? html`<${Empty} title="Nothing noted yet">Ranks note how long their steps took; there is none that is known.<//>`
      : html`<section>
          <${Map2d} data=${data} ratios=${ratios} chosen=${chosen} choose=${setChosen} />
          <${Chosen} name=${name} data=${data} ratios=${ratios} chosen=${chosen} />
        </section>
        <section aria-labelledby="slowest"><h2 id="slowest">Slower than their peers</h2>
          <${Slowest} data=${data} ratios=${ratios} choose=${setChosen} />
        </section>`}`;
}
