// One step over ranks: what each did when, and whom it waited for.

import { get } from "/page/api.js";
import { count, duration, moment } from "/page/format.js";
import { colorOf } from "/page/heat.js";
import { keyOf } from "/page/layout.js";
import { Plane, within } from "/page/plane.js";
import {
  Empty, Failure, html, Link, Loading, navigate, Table, useEffect, useMemo, useState,
} from "/page/ui.js";
import { AttemptChoice, pathOf } from "/page/views/attempts.js";

// Ranks on one picture.
const MOST = 64;
const LEFT_PX = 56;
const BOTTOM_PX = 18;
// As wide as the longest time on the axis, and a gap.
const TICK_PX = 84;
const [ROW_PX, LEAST_PX, MOST_PX] = [26, 180, 720];
// Of what is hidden beneath a rank's work, and of a row that has room for it.
const [HIDDEN_PX, LEAST_ROW_PX] = [5, 10];
const WORK = "own work";
// Phases within which a rank does no more than that: ours, and that of a script.
const UNNAMED = ["forward_backward", "step"];
// Each has its own: all of them may be in one picture.
const COLORS = {
  forward: "--green", backward: "--blue", [WORK]: "--slate", data: "--grey", "gradient sync": "--brown", optimizer: "--lime",
  checkpoint: "--sky", evaluation: "--olive", "garbage collection": "--indigo",
  tp: "--orange", pp: "--yellow", dp: "--red", cp: "--plum", ep: "--purple", expert_dp: "--pink", embedding: "--teal", world: "--rose",
};
const colorName = (kind) => COLORS[kind] ?? "--quiet";
/** What a bar is counted as: a group, a pass, a phase, or work that is none of them. */
const kindOf = (bar) => bar.group || (UNNAMED.includes(bar.name) ? WORK : bar.name.replaceAll("_", " "));
const FIRST = ["forward", "backward"];
const placeOf = (kind) => (FIRST.includes(kind) ? FIRST.indexOf(kind) : FIRST.length);
/** Kinds of what the tracks have, work first, each with whether it is that. */
function kindsOf(data) {
  const found = new Map(data.tracks.flatMap((track) => track.bars.map((bar) => [kindOf(bar), !bar.group])));
  return [...found].sort(([one, first], [other, second]) => second - first || placeOf(one) - placeOf(other) || one.localeCompare(other));
}

/** The rank's coordinates, of which tp turns fastest, then dp. */
function coordinates(rank, { tp, dp }) {
  return { tp: rank % tp, dp: Math.floor(rank / tp) % dp, pp: Math.floor(rank / (tp * dp)) };
}

const isMessage = ({ name }) => name === "send" || name === "recv";

/** Whether two bars are two ranks' parts of one collective, or both ends of one message. */
function isSame(one, other, layout) {
  if (one.bar.group !== other.bar.group) return false;
  if (isMessage(one.bar)) {
    if (one.rank === other.rank) return one.bar === other.bar;
    const isOpposite = isMessage(other.bar) && one.bar.name !== other.bar.name;
    const areEnds = one.bar.peer === other.rank && other.bar.peer === one.rank;
    return isOpposite && areEnds && one.bar.message !== null && one.bar.message === other.bar.message;
  }
  if (one.bar.last === null) return false;
  if (one.bar.sequence !== other.bar.sequence || one.bar.name !== other.bar.name) return false;
  const [first, second] = [one, other].map((each) => keyOf(coordinates(each.rank, layout), each.bar.group, layout));
  return first === second;
}

/** The parts that the ranks shown have in what a bar is of, its own among them. */
function partsOf(data, chosen) {
  if (!chosen || !chosen.bar.group) return [];
  return data.tracks.flatMap((track) => track.bars
    .map((bar) => ({ rank: track.rank, bar }))
    .filter((each) => isSame(chosen, each, data.layout)));
}

/** Diagonal lines, for time in which nothing could be done. */
function hatching(ctx) {
  const tile = new OffscreenCanvas(6, 6);
  const lines = tile.getContext("2d");
  lines.fillStyle = colorOf("--card");
  lines.fillRect(0, 0, 6, 6);
  lines.strokeStyle = colorOf("--quiet");
  lines.beginPath();
  for (const at of [-6, 0, 6]) {
    lines.moveTo(at, 6);
    lines.lineTo(at + 6, 0);
  }
  lines.stroke();
  return ctx.createPattern(tile, "repeat");
}

/** A bar's parts in order, each with its end in seconds: bubble, waiting for a late rank, the rest. */
function partsOfWait(bar) {
  const bubble = bar.begun_s + bar.bubble_s;
  const waited = Math.min(bar.ended_s, Math.max(bubble, bar.begun_s + bar.waited_s));
  return [["bubble", bubble], ["waited", waited], ["", bar.ended_s]];
}

function paintBar(ctx, bar, color, hatched, box) {
  let from = bar.begun_s;
  for (const [kind, until] of partsOfWait(bar)) {
    if (until <= from && !(kind === "" && from === bar.begun_s)) continue;
    ctx.globalAlpha = kind === "waited" ? 0.55 : 1;
    ctx.fillStyle = kind === "bubble" ? hatched : color;
    ctx.fillRect(...box(from, until));
    from = until;
  }
  ctx.globalAlpha = 1;
}

function paint(ctx, data, kinds, seen, chosen, parts, { across, down }) {
  const rowPx = down / seen.h;
  const perS = across / seen.w;
  const at = (seconds) => LEFT_PX + (seconds - seen.x) * perS;
  const rows = new Map(data.tracks.map((track, index) => [track.rank, index]));
  const top = (row) => (row - seen.y) * rowPx + 2;
  const span = (from, until, row) => [at(from), top(row), Math.max(1, (until - from) * perS), rowPx - 4];
  const box = (bar, row) => span(bar.begun_s, bar.ended_s, row);
  const hatched = hatching(ctx);
  const colors = Object.fromEntries(kinds.map(([kind]) => [kind, colorOf(colorName(kind))]));
  ctx.save();
  ctx.beginPath();
  ctx.rect(LEFT_PX, 0, across, down);
  ctx.clip();
  ctx.fillStyle = colorOf("--line");
  ctx.fillRect(LEFT_PX, 0, across, down);
  data.tracks.forEach((track, row) => track.bars.forEach((bar) => {
    if (bar.ended_s < seen.x || bar.begun_s > seen.x + seen.w) return;
    paintBar(ctx, bar, colors[kindOf(bar)], hatched, (from, until) => span(from, until, row));
  }));
  if (rowPx >= LEAST_ROW_PX) {
    data.tracks.forEach((track, row) => track.bars.forEach((bar) => {
      if (bar.departed_s === null || bar.begun_s < seen.x || bar.departed_s > seen.x + seen.w) return;
      ctx.fillStyle = colors[kindOf(bar)];
      ctx.fillRect(at(bar.departed_s), top(row) + rowPx - 4 - HIDDEN_PX, Math.max(1, bar.hidden_s * perS), HIDDEN_PX);
    }));
  }
  ctx.strokeStyle = colorOf("--ink");
  for (const part of parts) {
    ctx.lineWidth = part.rank === chosen.bar.last ? 3 : 1.5;
    ctx.strokeRect(...box(part.bar, rows.get(part.rank)));
  }
  if (chosen) {
    ctx.lineWidth = 3;
    ctx.strokeRect(...box(chosen.bar, rows.get(chosen.rank)));
  }
  ctx.restore();
  ctx.font = "12px system-ui, sans-serif";
  ctx.fillStyle = colorOf("--quiet");
  ctx.textBaseline = "middle";
  const every = Math.max(1, Math.ceil(16 / rowPx));
  data.tracks.forEach((track, row) => {
    if (row % every === 0) ctx.fillText(track.rank, 4, (row + 0.5 - seen.y) * rowPx);
  });
  ctx.textAlign = "center";
  const ticks = within(Math.floor(across / TICK_PX), 1, 5);
  for (let tick = 0; tick < ticks; tick += 1) {
    const seconds = seen.x + (seen.w * (tick + 0.5)) / ticks;
    ctx.fillText(`${(1000 * seconds).toPrecision(4)} ms`, at(seconds), down + 10);
  }
}

/** The bar at a place, or the nearest one within so many seconds of it. */
function barAt(data, { x, y }, reachS) {
  const track = data.tracks[Math.floor(y)];
  const away = (bar) => Math.max(0, bar.begun_s - x, x - bar.ended_s);
  const nearestS = Math.min(reachS, ...(track?.bars.map(away) ?? []));
  // Of several the one that began last lies on top.
  const bar = track?.bars.findLast((each) => away(each) <= nearestS);
  return bar ? { rank: track.rank, bar } : null;
}

/** The bar that an arrow key leads to; from none, the first one that is seen. */
function nextBar(data, from, key, seen) {
  const row = data.tracks.findIndex((track) => track.rank === from?.rank);
  const bars = data.tracks[row]?.bars ?? [];
  if (from && (key === "ArrowLeft" || key === "ArrowRight")) {
    const bar = bars[within(bars.indexOf(from.bar) + (key === "ArrowRight" ? 1 : -1), 0, bars.length - 1)];
    return bar ? { rank: from.rank, bar } : from;
  }
  const onwards = key === "ArrowUp" && from ? data.tracks.slice(0, row).reverse() : data.tracks.slice(row + 1);
  const track = onwards.find((each) => each.bars.length > 0);
  const fromS = from?.bar.begun_s ?? seen.x;
  const bar = track?.bars.find((each) => each.ended_s >= fromS) ?? track?.bars.at(-1);
  return bar ? { rank: track.rank, bar } : from;
}

/** What a bar is, without its rank. */
function nameOf(bar) {
  const isOfBatch = bar.detail >= 0 && (bar.group === "pp" || !bar.group);
  const batch = isOfBatch ? ` of micro-batch ${bar.detail}${bar.chunk > 0 ? ` in chunk ${bar.chunk}` : ""}` : "";
  return `${bar.group ? `${bar.group} ${bar.name} #${bar.sequence}` : kindOf(bar)}${batch}, ${duration(bar.ended_s - bar.begun_s)} from ${duration(bar.begun_s)} on`;
}

function Tracks({ data, chosen, choose }) {
  const [cursor, point] = useState(null);
  const parts = useMemo(() => partsOf(data, chosen), [data, chosen]);
  const kinds = useMemo(() => kindsOf(data), [data]);
  const height = within(ROW_PX * data.tracks.length, LEAST_PX, MOST_PX) + BOTTOM_PX;
  const pick = (item) => (point(null), choose(item));
  useEffect(() => point(null), [data]);
  const ms = (seconds) => (1000 * seconds).toPrecision(4);
  const items = {
    name: "operation",
    at: (place, reachS) => barAt(data, place, reachS),
    next: (from, key, seen) => nextBar(data, from, key, seen),
    boxOf: ({ rank, bar }) => ({
      x: bar.begun_s, y: data.tracks.findIndex((track) => track.rank === rank), w: bar.ended_s - bar.begun_s, h: 1,
    }),
    nameOf: ({ rank, bar }) => `rank ${rank}: ${nameOf(bar)}`,
  };
  const along = (key) => () => pick(nextBar(data, cursor ?? chosen, key, { x: 0 }));
  return html`<${Plane}
    whole=${{ w: data.length_s, h: data.tracks.length }} frame=${{ left: LEFT_PX, bottom: BOTTOM_PX, height }}
    axes="x" least=${data.length_s / 10_000}
    paint=${(ctx, view, size) => paint(ctx, data, kinds, view, chosen, parts, size)}
    label=${({ x, w }) => `What ranks did in the step, from ${ms(x)} to ${ms(x + w)} ms`}
    items=${items} cursor=${cursor} point=${point} chosen=${chosen} choose=${pick}>
    <button onClick=${along("ArrowLeft")}>Operation before</button>
    <button onClick=${along("ArrowRight")}>Operation after</button>
  <//>`;
}

/** What a wait for a collective was for. */
function ofCollective(rank, bar) {
  if (bar.last === null) return "";
  if (bar.last === rank) return " It began last: the others waited for it.";
  return ` Waited ${duration(bar.waited_s)} for rank ${bar.last}, which began last.`;
}

/** Whom a message was for or from, and what a wait for it was for. */
function ofMessage(bar, other) {
  if (bar.peer === null) return " Its other end is not known.";
  const transfer = duration(bar.ended_s - bar.begun_s - bar.waited_s);
  const ahead = bar.departed_s === null ? "" : duration(bar.begun_s - bar.departed_s);
  if (bar.name === "recv") {
    const from = ` From rank ${bar.peer}`;
    if (bar.last === null) return `${from}, whose part is not known.`;
    if (bar.waited_s > 0) return `${from}: waited ${duration(bar.waited_s)} until that had sent it, and ${transfer} for the transfer.`;
    return `${from}, which had sent it ${ahead || "just"} before: waited ${transfer} for what was left of the transfer.`;
  }
  const left = ahead && ` It had left ${ahead} before.`;
  return ` To rank ${bar.peer}: waited ${transfer} for the end of the transfer.${left}${other ? ` Rank ${bar.peer} had it ${duration(other.ended_s)} into the step.` : ""}`;
}

function Chosen({ data, chosen }) {
  if (!chosen) return html`<p class="quiet">Choose an operation to see its peers, and whom it waited for.</p>`;
  const { rank, bar } = chosen;
  const others = partsOf(data, chosen).filter((each) => each.rank !== rank);
  const peers = isMessage(bar) ? [] : others.map((each) => each.rank);
  return html`<p role="status">
    <strong>Rank ${rank}</strong>: ${nameOf(bar)}${bar.is_over ? "" : ", not left"}.
    ${isMessage(bar) ? ofMessage(bar, others[0]?.bar) : ofCollective(rank, bar)}
    ${bar.bubble_s > 0 && ` Bubble: ${duration(bar.bubble_s)} of it another stage had its turn.`}
    ${bar.hidden_s > 0 && !isMessage(bar) && ` Before it waited, it was under way for ${duration(bar.hidden_s)}, hidden.`}
    ${peers.length > 0 && ` Peers: ${peers.slice(0, 16).join(", ")}${peers.length > 16 ? " …" : ""}.`}
  </p>`;
}

const share = (part, whole) => `${(whole > 0 ? (100 * part) / whole : 0).toFixed(1)} %`;
const withShare = (seconds, track) => html`${duration(seconds)} <span class="quiet">${share(seconds, track.step_s)}</span>`;

/** What all ranks together spent on each other. */
function Shares({ data }) {
  const sum = (name) => data.tracks.reduce((total, track) => total + track[name], 0);
  const of = (name) => share(sum(name), sum("step_s"));
  return html`<p>Of the time of these ranks: <strong>bubble ${of("bubble_s")}</strong> (another stage of the pipeline had its turn),${" "}
    <strong>exposed communication ${of("exposed_s")}</strong> (for late ranks, and transfers); <strong>hidden ${of("hidden_s")}</strong> ran
    behind their work, at most.</p>`;
}

/** Seconds of each kind by rank, in words and numbers for all. */
function Sums({ data }) {
  const kinds = kindsOf(data);
  const rows = data.tracks.map((track) => {
    const sums = Object.fromEntries(kinds.map(([kind]) => [kind, 0]));
    let waited = 0;
    for (const bar of track.bars) {
      sums[kindOf(bar)] += bar.ended_s - bar.begun_s;
      waited += bar.waited_s;
    }
    return { track, sums, waited, heldUp: 0 };
  });
  const byRank = new Map(rows.map((row) => [row.track.rank, row]));
  for (const { bars } of data.tracks) {
    for (const bar of bars) if (byRank.has(bar.last)) byRank.get(bar.last).heldUp += bar.waited_s;
  }
  const columns = [
    { name: "Rank", isNumber: true, cell: ({ track }) => track.rank },
    { name: "Node", cell: ({ track }) => track.node },
    { name: "Bubble", isNumber: true, cell: ({ track }) => withShare(track.bubble_s, track) },
    { name: "Exposed", isNumber: true, cell: ({ track }) => withShare(track.exposed_s, track) },
    { name: "Hidden", isNumber: true, cell: ({ track }) => withShare(track.hidden_s, track) },
    { name: "Waited for others", isNumber: true, cell: ({ waited }) => duration(waited) },
    { name: "Others waited for it", isNumber: true, cell: ({ heldUp }) => duration(heldUp) },
    ...kinds.map(([kind, isWork]) => ({ name: isWork ? kind[0].toUpperCase() + kind.slice(1) : `In ${kind}`, isNumber: true, cell: ({ sums }) => duration(sums[kind]) })),
  ];
  return html`<${Table} caption="Where the step went" columns=${columns} rows=${rows} rowKey=${({ track }) => track.rank} />`;
}

const Legend = ({ data }) => {
  return html`<p class="quiet legend">${kindsOf(data).map(([kind]) => html`<span><span style=${{ color: `var(${colorName(kind)})` }} aria-hidden="true">■</span> ${kind}</span> `)}</p>
    <p class="quiet">Communication in full: the rank stood still for it; paler: it waited there for a rank that began later; hatched: for another
    stage of the pipeline, a bubble; narrow: under way while the rank computed, hidden. Grey: nothing known.</p>`;
};

export function TimelineView({ name, attempt, step }) {
  const [first, setFirst] = useState(0);
  const [data, setData] = useState(null);
  const [error, setError] = useState(null);
  const [chosen, setChosen] = useState(null);
  useEffect(() => {
    let isOver = false;
    setChosen(null);
    get(["jobs", name, "timeline"], { attempt, step, first, most: MOST }).then(
      (found) => !isOver && (setData(found), setError(null)),
      (failure) => !isOver && setError(failure),
    );
    return () => {
      isOver = true;
    };
  }, [name, attempt, step, first]);
  const go = (to) => navigate(pathOf(name, attempt, `timeline/${to}`));
  const title = html`<h1><${Link} to="/jobs/${name}">${name}<//> step ${data ? count(data.step) : step ?? ""}</h1>`;
  if (error) return html`${title}<${Failure} error=${error} /><p><${Link} to=${pathOf(name, attempt, "timeline")}>The newest step<//></p>`;
  if (!data) return html`${title}<${Loading} />`;
  const at = data.steps.indexOf(data.step);
  const [before, after] = [data.steps[at - 1], data.steps[at + 1]];
  const lastRank = Math.min(first + MOST, data.num_ranks) - 1;
  return html`${title}
    <div class="head">
      <button disabled=${before === undefined} onClick=${() => go(before)}>Step before</button>
      <button disabled=${after === undefined} onClick=${() => go(after)}>Step after</button>
      <${AttemptChoice} name=${name} attempt=${attempt} newest=${data.newest_attempt} picture="timeline" />
      ${data.num_ranks > MOST && html`<label>Ranks from <select value=${first} onChange=${(event) => setFirst(Number(event.target.value))}>
        ${Array.from({ length: Math.ceil(data.num_ranks / MOST) }, (_, index) => html`<option value=${index * MOST}>${index * MOST}</option>`)}
      </select></label>`}
      <span class="quiet">Ranks ${first} to ${lastRank} at ${moment(data.begun_at_s)}, ${duration(data.length_s)} in all${data.clocks_apart_s > 0 ? `; clocks were ${duration(data.clocks_apart_s)} apart` : ""}.</span>
    </div>
    ${data.missing.length > 0 && html`<p class="banner warn">Missing: ${data.missing.slice(0, 4).map((each) => (each.node ? `${each.node}: ${each.reason}` : each.reason)).join("; ")}</p>`}
    ${data.tracks.length === 0
      ? html`<${Empty} title="Nothing noted">No rank has anything of a whole step.<//>`
      : html`<section>
          <${Tracks} data=${data} chosen=${chosen} choose=${setChosen} />
          <${Legend} data=${data} />
          <${Chosen} data=${data} chosen=${chosen} />
        </section>
        <section aria-labelledby="sums"><h2 id="sums">Where the step went</h2><${Shares} data=${data} /><${Sums} data=${data} /></section>`}`;
}
