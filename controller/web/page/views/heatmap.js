// Ranks by steps: who took longer than its peers, when, and for how long.

import { get } from "/page/api.js";
import { count, duration } from "/page/format.js";
import { colorOf, heatOf, heatParts, median } from "/page/heat.js";
import {
  Empty, Failure, html, Link, Loading, useEffect, useMemo, usePolled, useRef, useState,
} from "/page/ui.js";

const MEASURES = { work: "Own work", waiting: "Waiting for others", step: "Whole step" };
const HEIGHT_PX = 460;
const LEFT_PX = 56;
const BOTTOM_PX = 18;
const MOST_ROWS = 1024;
const STEPS = 400;
// What is asked of every rank is not asked often.
const [PERIOD_S, RANKS_PER_S] = [15, 100];
// Rows that are named as slow: on the mean so much above their peers.
const SLOW = 1.15;

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
        ratios[index][step] = value === null || !middle ? null : value / middle;
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

function draw(canvas, picture, data, view, chosen) {
  const ratio = devicePixelRatio;
  const width = canvas.clientWidth;
  canvas.width = width * ratio;
  canvas.height = HEIGHT_PX * ratio;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.imageSmoothingEnabled = false;
  const [across, down] = [width - LEFT_PX, HEIGHT_PX - BOTTOM_PX];
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
const within = (value, least, most) => Math.min(Math.max(value, least), Math.max(least, most));

/** The part of the whole that is seen, after zooming by `factor` about a point of it. */
function zoomed(view, whole, factor, x, y) {
  const w = within(view.w * factor, Math.min(4, whole.w), whole.w);
  const h = within(view.h * factor, Math.min(4, whole.h), whole.h);
  return {
    w, h,
    x: within(x - ((x - view.x) * w) / view.w, 0, whole.w - w),
    y: within(y - ((y - view.y) * h) / view.h, 0, whole.h - h),
  };
}

function Map2d({ data, ratios, chosen, choose }) {
  const canvas = useRef(null);
  const drag = useRef(null);
  const [width, setWidth] = useState(0);
  const whole = { x: 0, y: 0, w: data.steps.length, h: data.rows.length };
  const [view, setView] = useState(null);
  const seen = view && view.x + view.w <= whole.w && view.y + view.h <= whole.h ? view : whole;
  const picture = useMemo(() => pictureOf(ratios, data.steps.length), [ratios]);
  useEffect(() => {
    const resized = new ResizeObserver(() => setWidth(canvas.current.clientWidth));
    resized.observe(canvas.current);
    const themed = () => setWidth((before) => before + 1e-9);
    addEventListener("outlast-themed", themed);
    return () => {
      resized.disconnect();
      removeEventListener("outlast-themed", themed);
    };
  }, []);
  useEffect(() => {
    if (width > 0) draw(canvas.current, picture, data, seen, chosen);
  }, [picture, data, seen, chosen, width]);
  const placeOf = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const right = (event.clientX - box.left - LEFT_PX) / (box.width - LEFT_PX);
    const down = (event.clientY - box.top) / (HEIGHT_PX - BOTTOM_PX);
    return [seen.x + right * seen.w, seen.y + down * seen.h];
  };
  const rolled = (event) => {
    event.preventDefault();
    setView(zoomed(seen, whole, event.deltaY > 0 ? 1.25 : 0.8, ...placeOf(event)));
  };
  useEffect(() => {
    // Only a listener that says so may keep the page from scrolling.
    const element = canvas.current;
    element.addEventListener("wheel", rolled, { passive: false });
    return () => element.removeEventListener("wheel", rolled);
  });
  const pressed = (event) => {
    drag.current = { from: placeOf(event), view: seen, hasMoved: false };
    canvas.current.setPointerCapture(event.pointerId);
  };
  const moved = (event) => {
    if (!drag.current) return;
    const box = canvas.current.getBoundingClientRect();
    const [x, y] = placeOf(event);
    const by = [drag.current.from[0] - x, drag.current.from[1] - y];
    if (Math.abs(by[0] / seen.w) * box.width + Math.abs(by[1] / seen.h) * HEIGHT_PX < 4) return;
    drag.current.hasMoved = true;
    setView({ ...seen, x: within(seen.x + by[0], 0, whole.w - seen.w), y: within(seen.y + by[1], 0, whole.h - seen.h) });
  };
  const released = (event) => {
    const [x, y] = placeOf(event).map(Math.floor);
    if (drag.current && !drag.current.hasMoved && x >= 0 && x < whole.w && y >= 0 && y < whole.h) choose({ x, y });
    drag.current = null;
  };
  const keyed = (event) => {
    if (event.key in ARROWS) {
      event.preventDefault();
      const [right, down] = ARROWS[event.key];
      const at = chosen ?? { x: whole.w - 1, y: 0 };
      choose({ x: within(at.x + right, 0, whole.w - 1), y: within(at.y + down, 0, whole.h - 1) });
    } else if (event.key === "+" || event.key === "-") {
      const at = chosen ?? { x: seen.x + seen.w / 2, y: seen.y + seen.h / 2 };
      setView(zoomed(seen, whole, event.key === "+" ? 0.8 : 1.25, at.x, at.y));
    }
  };
  return html`<canvas ref=${canvas} class="heat" tabindex="0" role="application"
    aria-label="Heat map of ranks by steps; arrow keys choose a cell, plus and minus zoom"
    onPointerDown=${pressed} onPointerMove=${moved} onPointerUp=${released} onDblClick=${() => setView(null)}
    onKeyDown=${keyed}></canvas>`;
}

function Chosen({ data, ratios, chosen }) {
  if (!chosen || !data.rows[chosen.y]) return html`<p class="quiet">Choose a cell to see its numbers.</p>`;
  const row = data.rows[chosen.y];
  const ratio = ratios[chosen.y][chosen.x];
  return html`<p role="status">
    <strong>${nameOf(row)}</strong> on ${row.node}, step ${count(data.steps[chosen.x])}:
    ${" "}${duration(row.seconds[chosen.x])}${ratio !== null && `, ${ratio.toFixed(2)} of the median of its peers`}
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
          <${Chosen} data=${data} ratios=${ratios} chosen=${chosen} />
        </section>
        <section aria-labelledby="slowest"><h2 id="slowest">Slower than their peers</h2>
          <${Slowest} data=${data} ratios=${ratios} choose=${setChosen} />
        </section>`}`;
}
