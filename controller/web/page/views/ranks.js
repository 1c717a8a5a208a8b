// The ranks of a job in three dimensions: planes are pipeline stages, on each data times tensor.

import { get } from "/page/api.js";
import { ago, bytes, count, duration, words } from "/page/format.js";
import { colorOf, heatOf, heatScale, median } from "/page/heat.js";
import { awaitedBy, groupOf, heldUpBy, operationInWords, waitsByOthers } from "/page/layout.js";
import { useWidth } from "/page/plane.js";
import { Look } from "/page/views/look.js";
import {
  Failure, html, Link, Loading, useEffect, useMemo, usePolled, useRef, useState,
} from "/page/ui.js";

// As many as an answer has.
const PAGE = 4096;
// How many are asked for in a second; what is known of one comes with each heartbeat at most.
const RANKS_PER_S = 1000;
// Of a cell, from which its rank's number fits.
const NUMBERED_PX = 28;
// Who waits for whom is drawn up to so many arrows: more would hide the ranks. The chosen rank's always are.
const MOST_ARROWS = 256;
const HEAD_PX = 7;
// Of the groups of the chosen rank.
const AXES = { tp: "--teal", dp: "--rose", pp: "--ink" };

const part = (name) => (rank) => rank.split?.[name] ?? null;
const MEASURES = {
  "Standing still": { of: (rank) => (rank.phase ? rank.stalled_s : null), format: duration, isAbsolute: true },
  "Steps behind": { of: (rank, newest) => (rank.phase ? newest - rank.completed_step : null), format: count, isAbsolute: true },
  Forward: { of: part("forward_s"), format: duration },
  Backward: { of: part("backward_s"), format: duration },
  Optimizer: { of: part("optimizer_s"), format: duration },
  "Waits for tp": { of: part("tp_exposed_s"), format: duration },
  "Waits for pp": { of: part("pp_exposed_s"), format: duration },
  "Waits for dp": { of: part("dp_exposed_s"), format: duration },
  "Garbage collection": { of: part("garbage_collection_s"), format: duration },
  "Waits for data": { of: part("data_wait_s"), format: duration },
  "Peak memory": { of: (rank) => rank.peak_memory_bytes || null, format: bytes },
};

async function allRanks(name) {
  const first = await get(["jobs", name, "ranks"]);
  const ranks = [...first.ranks];
  while (ranks.length < first.num_ranks) {
    ranks.push(...(await get(["jobs", name, "ranks"], { first: ranks.length, most: PAGE })).ranks);
  }
  return { ...first, ranks };
}

/** From 0 (as good as any) to 1 for each rank; null where nothing is known. */
function heats(ranks, measure) {
  const newest = ranks.reduce((most, rank) => Math.max(most, rank.completed_step), -1);
  const values = ranks.map((rank) => measure.of(rank, newest));
  if (measure.isAbsolute) {
    const limit = (rank) => (measure.format === duration ? rank.stall_limit_s || 10 : 2);
    return { values, heat: values.map((value, index) => (value === null ? null : Math.min(1, value / limit(ranks[index])))) };
  }
  const ofStage = new Map();
  for (const rank of ranks) {
    if (!ofStage.has(rank.pp)) ofStage.set(rank.pp, []);
    ofStage.get(rank.pp).push(values[rank.rank]);
  }
  for (const [pp, all] of ofStage) ofStage.set(pp, median(all));
  const heat = values.map((value, index) => heatOf(value, ofStage.get(ranks[index].pp)));
  return { values, heat };
}

/** Ranks that hold up others, with how many, while a job stands still; stopped ones, where there are any. */
function culpritsOf(data, awaited) {
  // Everybody waits for somebody at any time; a hang is where that lasts.
  const lasts = (rank) => rank.stall_limit_s > 0 && rank.stalled_s > rank.stall_limit_s / 2;
  if (!data.ranks.some(lasts)) return [];
  const held = heldUpBy(awaited);
  const waiting = new Map(held);
  const stopped = data.ranks.filter((rank) => rank.process_state === "T");
  // Who waits for one that has entered an operation and was stopped inside looks free.
  return stopped.length > 0 ? stopped.map(({ rank }) => [rank, waiting.get(rank) ?? 0]) : held;
}

const hasOpenFault = (rank) => (rank.last_fault?.incident_state ?? "CLOSED") !== "CLOSED";

/** Where each plane and cell lies, for a canvas of this width. */
function geometry(layout, width) {
  const slant = 0.5;
  const across = layout.dp + slant * layout.tp;
  const cell = Math.max(3, Math.min(84, (width - 60) / across));
  const depth = Math.max(3, cell * 0.6);
  const gap = depth * layout.tp + Math.max(26, cell);
  const corner = (pp, dp, tp) => [50 + dp * cell + tp * cell * slant, 14 + pp * gap + depth * (layout.tp - tp)];
  return { cell, depth, slant, corner, height: 14 + gap * layout.pp + 10 };
}

function cellPath(ctx, shape, rank, inset) {
  const { corner, cell, depth, slant } = shape;
  const [x, y] = corner(rank.pp, rank.dp, rank.tp);
  const lean = cell * slant;
  ctx.beginPath();
  ctx.moveTo(x + inset, y - inset);
  ctx.lineTo(x + cell - inset, y - inset);
  ctx.lineTo(x + cell + lean - inset, y - depth + inset);
  ctx.lineTo(x + lean + inset, y - depth + inset);
  ctx.closePath();
}

/** From each rank that waits to those that it waits for; of many only those of the chosen one. */
function arrowsOf(awaited, chosen) {
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
  const size = Math.max(3, Math.min(12, shape.depth / 2));
  for (const rank of ranks) {
    if (!hasOpenFault(rank)) continue;
    const [x, y] = shape.corner(rank.pp, rank.dp, rank.tp);
    ctx.beginPath();
    ctx.moveTo(x + 2, y - 2);
    ctx.lineTo(x + 2 + size, y - 2);
    ctx.lineTo(x + 2 + size * shape.slant, y - 2 - size);
    ctx.fill();
  }
}

function drawArrows(ctx, shape, data, arrows, chosen, culprits) {
  const center = (number) => {
    const { pp, dp, tp } = data.ranks[number];
    const [x, y] = shape.corner(pp, dp, tp);
    return [x + shape.cell * (0.5 + shape.slant / 2), y - shape.depth / 2];
  };
  for (const [from, to] of arrows) {
    ctx.strokeStyle = ctx.fillStyle = colorOf(culprits.includes(to) ? "--bad" : "--ink");
    ctx.lineWidth = from === chosen || to === chosen ? 3 : 1.5;
    drawArrow(ctx, center(from), center(to));
  }
}

function draw(canvas, shape, data, heat, chosen, culprits, groups, arrows) {
  const ratio = devicePixelRatio;
  const width = canvas.clientWidth;
  canvas.width = width * ratio;
  canvas.height = shape.height * ratio;
  canvas.style.height = `${shape.height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  const inset = shape.cell > 8 ? 1 : 0;
  ctx.font = "12px system-ui, sans-serif";
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  const scale = heatScale();
  for (const rank of data.ranks) {
    cellPath(ctx, shape, rank, inset);
    ctx.fillStyle = scale.color(heat[rank.rank]);
    ctx.fill();
    if (shape.cell >= NUMBERED_PX) {
      const [x, y] = shape.corner(rank.pp, rank.dp, rank.tp);
      ctx.fillStyle = scale.ink(heat[rank.rank]);
      ctx.fillText(rank.rank, x + shape.cell * (0.5 + shape.slant / 2), y - shape.depth / 2);
    }
  }
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
  if (chosen !== null) {
    ctx.strokeStyle = colorOf("--ink");
    ctx.lineWidth = 3;
    cellPath(ctx, shape, data.ranks[chosen], 0);
    ctx.stroke();
  }
  drawFaults(ctx, shape, data.ranks);
  drawArrows(ctx, shape, data, arrows, chosen, culprits);
  ctx.fillStyle = colorOf("--quiet");
  ctx.textAlign = "left";
  for (let pp = 0; pp < data.pp; pp += 1) {
    const [, y] = shape.corner(pp, 0, 0);
    ctx.fillText(`pp ${pp}`, 4, y - shape.depth / 2);
  }
}

/** The rank under a point, or null. */
function rankAt(shape, data, x, y) {
  const ctx = new OffscreenCanvas(1, 1).getContext("2d");
  return data.ranks.find((rank) => {
    cellPath(ctx, shape, rank, 0);
    return ctx.isPointInPath(x, y);
  })?.rank ?? null;
}

const STEPS = {
  ArrowRight: ["dp", 1], ArrowLeft: ["dp", -1], ArrowUp: ["tp", 1], ArrowDown: ["tp", -1],
  PageDown: ["pp", 1], PageUp: ["pp", -1],
};

function moved(data, chosen, key) {
  const [axis, by] = STEPS[key];
  const at = { ...data.ranks[chosen ?? 0] };
  at[axis] = (at[axis] + by + data[axis]) % data[axis];
  return (at.pp * data.dp + at.dp) * data.tp + at.tp;
}

function Cube({ data, heat, chosen, choose, culprits, awaited }) {
  const canvas = useRef(null);
  const width = useWidth(canvas);
  const shape = useMemo(() => geometry(data, width), [data.tp, data.pp, data.dp, width]);
  const groups = useMemo(() => {
    if (chosen === null) return {};
    return Object.fromEntries(["pp", "dp", "tp"].map((name) => [name, groupOf(data.ranks, data, chosen, name)]));
  }, [data, chosen]);
  useEffect(() => {
    if (width > 0) draw(canvas.current, shape, data, heat, chosen, culprits, groups, arrowsOf(awaited, chosen));
  }, [shape, data, heat, chosen, culprits, groups, awaited]);
  const picked = (event) => {
    const box = canvas.current.getBoundingClientRect();
    choose(rankAt(shape, data, event.clientX - box.left, event.clientY - box.top));
  };
  const pressed = (event) => {
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    choose(moved(data, chosen, event.key));
  };
  return html`<canvas ref=${canvas} class="cube" tabindex="0" role="application"
    aria-label="Ranks by pipeline stage, replica and tensor shard; arrow keys and page keys choose one"
    onClick=${picked} onKeyDown=${pressed}></canvas>`;
}

function Chosen({ data, rank, waits, values, measure, choose }) {
  const button = (each) => html`<button class="link" onClick=${() => choose(each)}>${each}</button> `;
  const some = (ranks) => html`${ranks.slice(0, 16).map(button)}${ranks.length > 16 ? `and ${ranks.length - 16} more` : ""}`;
  return html`<dl class="facts">
    <dt>Place</dt><dd>pp ${rank.pp}, dp ${rank.dp}, tp ${rank.tp}, on ${rank.node || "no node"}</dd>
    <dt>Now</dt><dd>${rank.phase ? words(rank.phase) : "nothing heard yet"}, step ${count(Math.max(0, rank.completed_step))} done</dd>
    <dt>Last operation</dt><dd>${operationInWords(rank.last_operation)}${rank.last_operation && ` for ${duration(rank.last_operation.age_s)}`}</dd>
    ${waits && html`<dt>Waits for</dt><dd>${waits.length ? some(waits) : "nobody: all have entered"}</dd>`}
    <dt>Nothing changed for</dt><dd>${duration(rank.stalled_s)}${rank.stall_limit_s > 0 ? `, limit ${duration(rank.stall_limit_s)}` : ""}</dd>
    ${rank.last_fault && html`<dt>Last fault</dt><dd><${Fault} fault=${rank.last_fault} /></dd>`}
    <dt>${measure}</dt><dd>${MEASURES[measure].format(values[rank.rank])}</dd>
    <dt>Peak memory</dt><dd>${bytes(rank.peak_memory_bytes)}</dd>
    ${["tp", "dp", "pp"].filter((axis) => data[axis] > 1).map((axis) => html`<dt><span class="axis-${axis}">■</span> ${axis} group</dt><dd>${some(groupOf(data.ranks, data, rank.rank, axis))}</dd>`)}
    ${["cp", "ep"].filter((axis) => data[axis] > 1).map((axis) => html`<dt>${axis} group</dt><dd>${some(groupOf(data.ranks, data, rank.rank, axis))}</dd>`)}
  </dl>`;
}

const Fault = ({ fault }) => html`${words(fault.kind)}: ${fault.detail}${" "}
  <span class="quiet">${ago(fault.at_s)}, attempt ${fault.attempt}, <${Link} to="/incidents/${fault.incident_id}">${fault.incident_id}<//> ${fault.incident_state}</span>`;

const MOST_LINES = 8;
const several = (ranks) => `${ranks.length === 1 ? "rank" : "ranks"} ${ranks.slice(0, 8).join(", ")}${ranks.length > 8 ? ` and ${ranks.length - 8} more` : ""}`;

/** The arrows of the picture in words. */
function Waits({ awaited }) {
  const lines = waitsByOthers(awaited);
  if (lines.length === 0) return null;
  return html`<h2>Who waits for whom</h2>
    <ul>${lines.slice(0, MOST_LINES).map(({ waiting, others }) => html`<li>${several(waiting)} ${waiting.length === 1 ? "waits" : "wait"} for ${several(others)}</li>`)}</ul>
    ${lines.length > MOST_LINES && html`<p class="quiet">and ${lines.length - MOST_LINES} more groups</p>`}`;
}

/** Ranks that incidents have faults of, those of open ones first, then the newest. */
function Faults({ data, choose }) {
  const faulty = data.ranks.filter((rank) => rank.last_fault)
    .sort((a, b) => hasOpenFault(b) - hasOpenFault(a) || b.last_fault.at_s - a.last_fault.at_s).slice(0, MOST_LINES);
  if (faulty.length === 0) return null;
  return html`<h2>Last faults</h2>
    <ul>${faulty.map((rank) => html`<li><button class="link" onClick=${() => choose(rank.rank)}>rank ${rank.rank}</button>${" "}<${Fault} fault=${rank.last_fault} /></li>`)}</ul>`;
}

/** In words, for those who do not see the picture, and for all. */
function Culprits({ data, culprits }) {
  if (culprits.length === 0) return null;
  return html`<p class="banner bad" role="status">
    ${culprits.slice(0, 4).map(([rank, waiting]) => html`<span>
      Rank ${rank} on ${data.ranks[rank].node} ${data.ranks[rank].process_state === "T" ? "is stopped" : "holds up others"}${waiting > 0 && `; directly waiting for it: ${waiting}`}. </span>`)}
  </p>`;
}

function Highest({ data, heat, values, measure, choose }) {
  const format = MEASURES[measure].format;
  const hottest = data.ranks.filter((rank) => heat[rank.rank] !== null)
    .sort((a, b) => heat[b.rank] - heat[a.rank] || a.rank - b.rank).slice(0, 8);
  return html`<h2>Highest</h2>
    <ol class="highest">${hottest.map((rank) => html`<li>
      <button class="link" onClick=${() => choose(rank.rank)}>rank ${rank.rank}</button>${" "}
      ${format(values[rank.rank])}${" "}<span class="quiet">${rank.node}</span>
    </li>`)}</ol>`;
}

export function RanksView({ name }) {
  const { value: data, error } = usePolled(() => allRanks(name), [name], (last) => Math.max(1, (last?.num_ranks ?? 0) / RANKS_PER_S));
  const [measure, setMeasure] = useState("Standing still");
  const [chosen, setChosen] = useState(null);
  const found = useMemo(() => data && heats(data.ranks, MEASURES[measure]), [data, measure]);
  const awaited = useMemo(() => (data ? awaitedBy(data.ranks, data) : new Map()), [data]);
  const culprits = useMemo(() => (data ? culpritsOf(data, awaited) : []), [data]);
  const title = html`<h1><${Link} to="/jobs/${name}">${name}<//> ranks</h1>`;
  if (!data) return html`${title}${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const shownChosen = chosen !== null && chosen < data.ranks.length ? chosen : null;
  return html`${title}<${Failure} error=${error} />
    <div class="head">
      <label>Colour <select value=${measure} onChange=${(event) => setMeasure(event.target.value)}>
        ${Object.keys(MEASURES).map((each) => html`<option value=${each}>${each}</option>`)}
      </select></label>
      <span class="quiet">${MEASURES[measure].isAbsolute ? "orange: at its limit" : "against the median of its stage: blue half, orange twice"}; grey: not known; arrows: who waits for whom; triangles: a fault of an open incident</span>
      <span class="quiet">attempt ${data.attempt}, ${count(data.num_ranks)} ranks: pp ${data.pp} × dp ${data.dp} × tp ${data.tp}</span>
    </div>
    <${Culprits} data=${data} culprits=${culprits} />
    <div class="columns ranks">
      <section><${Cube} data=${data} heat=${found.heat} chosen=${shownChosen} choose=${setChosen} culprits=${culprits.map(([rank]) => rank)} awaited=${awaited} /></section>
      <section>
        ${shownChosen !== null && html`<h2>Rank ${shownChosen}</h2>
          <${Chosen} data=${data} rank=${data.ranks[shownChosen]} waits=${awaited.get(shownChosen)} values=${found.values} measure=${measure} choose=${setChosen} />
          <${Look} key=${shownChosen} name=${name} rank=${shownChosen} />`}
        <${Waits} awaited=${awaited} />
        <${Faults} data=${data} choose=${setChosen} />
        <${Highest} data=${data} heat=${found.heat} values=${found.values} measure=${measure} choose=${setChosen} />
      </section>
    </div>`;
}
