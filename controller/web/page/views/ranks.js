// The ranks of a job in three dimensions: planes are pipeline stages, on each data times tensor.

import { get } from "/page/api.js";
import { arrowsOf, draw, FRONT, geometry, hasOpenFault, rankAt, turned } from "/page/cube.js";
import { ago, bytes, count, duration, words } from "/page/format.js";
import { heatOf, median } from "/page/heat.js";
import { awaitedBy, groupOf, heldUpBy, operationInWords, waitsByOthers } from "/page/layout.js";
import { useGestures } from "/page/gestures.js";
import { useWidth } from "/page/plane.js";
import { Look } from "/page/views/look.js";
import {
  Failure, html, Link, Loading, useEffect, useMemo, usePolled, useRef, useState,
} from "/page/ui.js";

// As many as an answer has.
const PAGE = 4096;
// How many are asked for in a second; what is known of one comes with each heartbeat at most.
const RANKS_PER_S = 1000;

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

const STEPS = {
  ArrowRight: ["dp", 1], ArrowLeft: ["dp", -1], ArrowUp: ["tp", 1], ArrowDown: ["tp", -1],
  PageDown: ["pp", 1], PageUp: ["pp", -1],
};

// What one press of a key or of a button turns, and a pixel of a drag.
const [TURN_DEG, DEG_PER_PX] = [15, 0.5];
const TURNS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function moved(data, chosen, key) {
  const [axis, by] = STEPS[key];
  const at = { ...data.ranks[chosen ?? 0] };
  at[axis] = (at[axis] + by + data[axis]) % data[axis];
  return (at.pp * data.dp + at.dp) * data.tp + at.tp;
}

function Cube({ data, heat, chosen, choose, culprits, awaited }) {
  const canvas = useRef(null);
  const width = useWidth(canvas);
  const [view, setView] = useState(FRONT);
  const shape = useMemo(() => geometry(data, width, view), [data.tp, data.pp, data.dp, width, view]);
  const groups = useMemo(() => {
    if (chosen === null) return {};
    return Object.fromEntries(["pp", "dp", "tp"].map((name) => [name, groupOf(data.ranks, data, chosen, name)]));
  }, [data, chosen]);
  useEffect(() => {
    if (width > 0) draw(canvas.current, shape, data, heat, { chosen, culprits, groups, arrows: arrowsOf(awaited, chosen) });
  }, [shape, data, heat, chosen, culprits, groups, awaited]);
  const turn = (right, down) => setView((before) => turned(before, right * TURN_DEG, down * TURN_DEG));
  const gestures = useGestures({
    canvas,
    seen: view,
    moved: (before, from, to) => setView(turned(before, (to.x - from.x) * DEG_PER_PX, (to.y - from.y) * DEG_PER_PX)),
    tapped: (event) => {
      const box = canvas.current.getBoundingClientRect();
      choose(rankAt(shape, data, event.clientX - box.left, event.clientY - box.top));
    },
  });
  const pressed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.shiftKey && event.key in TURNS) turn(...TURNS[event.key]);
    else if (event.key in STEPS) choose(moved(data, chosen, event.key));
    else if (event.key === "Home" || event.key === "0") setView(FRONT);
    else return;
    event.preventDefault();
  };
  return html`<canvas ref=${canvas} class="cube" tabindex="0" role="application" aria-describedby="cube-help"
      aria-label="Ranks by pipeline stage, replica and tensor shard, turned by ${Math.round(view.turn)}°, tilted by ${Math.round(view.tilt)}°"
      ...${gestures} onKeyDown=${pressed}></canvas>
    <p id="cube-help" class="quiet">Drag to turn, tap or click to choose a rank. Keys: arrows and page keys choose the next rank,
      Shift with arrows turns, Home or 0 turns back.</p>
    <div class="actions">
      <button onClick=${() => turn(-1, 0)}>Turn left</button>
      <button onClick=${() => turn(1, 0)}>Turn right</button>
      <button onClick=${() => turn(0, -1)}>Tilt back</button>
      <button onClick=${() => turn(0, 1)}>Tilt forward</button>
      <button onClick=${() => setView(FRONT)}>Front view</button>
    </div>`;
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
