// Ranks by steps: who took longer than its peers, when, and for how long.

import { get } from "/page/api.js";
import { count, duration } from "/page/format.js";
import { heatColor, heatOf, LEAST, MOST } from "/page/heat.js";
import { paint, pictureOf } from "/page/heatpicture.js";
import { usePlane, within } from "/page/plane.js";
import { Empty, Failure, html, Link, Loading, useEffect, useMemo, usePolled, useState } from "/page/ui.js";

const MEASURES = {
  work: "Own work", waiting: "Waiting for others", step: "Whole step", forward: "Forward passes", backward: "Backward passes",
  data: "Waiting for data", optimizer: "Optimizer", checkpoint: "Checkpoint",
  garbage_collection: "Garbage collection",
};
const ORDERS = { rank: "Rank", node: "Node", position: "Position (dp, pp, tp)" };
const HEIGHT_PX = 460;
const LEFT_PX = { rank: 60, node: 96, position: 96 };
const BOTTOM_PX = 20;
const MOST_ROWS = 1024;
const STEPS = 1000;
// What is asked of every rank is not asked often.
const [PERIOD_S, RANKS_PER_S] = [15, 100];
// Rows that are named as slow: one of their ranks is so much above its peers on the mean.
const SLOW = 1.15;

const PEERS = {
  "": "all ranks of the job, which have equal work",
  stage: "the ranks of its pipeline stage",
  experts: "the ranks that hold the same experts",
  "stage,experts": "the ranks of its pipeline stage that hold the same experts",
};

/** 0–3, 8, 10–11 and so on. */
function listed(ranks) {
  const runs = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const words = runs.slice(0, 3).map(([first, last]) => (first === last ? first : `${first}–${last}`));
  return `${words.join(", ")}${runs.length > 3 ? ", …" : ""}`;
}

const nameOf = (row) => `${row.ranks.length === 1 ? "rank" : "ranks"} ${listed(row.ranks)}`;

/** The cell after `chosen`, row by row, in which a run of outliers begins; the first one behind the last. */
function nextOutlier(rows, chosen) {
  const all = rows.flatMap((row, y) => row.outliers.map(([x]) => ({ x, y })));
  const isBehind = (cell) => !chosen || cell.y > chosen.y || (cell.y === chosen.y && cell.x > chosen.x);
  return all.find(isBehind) ?? all[0] ?? null;
}

const ARROWS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const [IN, OUT] = [0.8, 1.25];

function Map2d({ data, chosen, choose }) {
  const picture = useMemo(() => pictureOf(data.rows, data.steps.length), [data]);
  const whole = { w: data.steps.length, h: data.rows.length };
  const leftPx = LEFT_PX[data.order];
  const { canvas, seen, zoom, move, reveal, showAll, handlers } = usePlane({
    whole,
    frame: { left: leftPx, bottom: BOTTOM_PX, height: HEIGHT_PX },
    paint: (ctx, view, size) => paint(ctx, picture, { data, view, chosen, size: { ...size, leftPx }, slow: SLOW }),
    picked: ({ x, y }) => choose({ x: Math.floor(x), y: Math.floor(y) }),
  });
  // Wherever it was chosen, it is shown.
  useEffect(() => { if (chosen) reveal(chosen); }, [chosen?.x, chosen?.y]);
  const zoomed = (factor) => zoom(factor, chosen ? { x: chosen.x + 0.5, y: chosen.y + 0.5 } : { x: seen.x + seen.w / 2, y: seen.y + seen.h / 2 });
  const outlier = nextOutlier(data.rows, chosen);
  const keyed = (event) => {
    const keys = { "+": () => zoomed(IN), "-": () => zoomed(OUT), 0: showAll, o: () => outlier && choose(outlier) };
    if (event.key in ARROWS) {
      event.preventDefault();
      const [right, down] = ARROWS[event.key];
      if (event.shiftKey) {
        move((right * seen.w) / 8, (down * seen.h) / 8);
        return;
      }
      const at = chosen ?? { x: whole.w - 1, y: 0 };
      choose({ x: within(at.x + right, 0, whole.w - 1), y: within(at.y + down, 0, whole.h - 1) });
    } else if (!event.ctrlKey && !event.metaKey && event.key in keys) keys[event.key]();
  };
  return html`<canvas ref=${canvas} class="heat" tabindex="0" role="application"
      aria-label="Heat map of ranks by steps; arrow keys choose a cell, with shift they move the map, plus and minus zoom, 0 shows all, o goes to the next outlier"
      ...${handlers} onKeyDown=${keyed}></canvas>
    <div class="actions">
      <button onClick=${() => zoomed(IN)}>Zoom in</button>
      <button onClick=${() => zoomed(OUT)}>Zoom out</button>
      <button onClick=${showAll}>Show all</button>
      <button disabled=${!outlier} onClick=${() => choose(outlier)}>Next outlier</button>
    </div>`;
}

function Chosen({ name, data, chosen }) {
  if (!chosen) return html`<p class="quiet">Choose a cell to see its numbers.</p>`;
  const row = data.rows[chosen.y];
  const percent = row.percents[chosen.x];
  const isOutlier = row.outliers.some(([first, number]) => chosen.x >= first && chosen.x < first + number);
  return html`<p role="status">
    <strong>${nameOf(row)}</strong> on ${row.node}, step ${count(data.steps[chosen.x])}:
    ${" "}${duration(row.seconds[chosen.x])}${percent !== null && `, ${(percent / 100).toFixed(2)} of the median of its peers`}${isOutlier && ", an outlier"}.
    ${" "}${row.ranks.length > 1 && `Of these, the rank furthest above its peers in each step is shown; on the mean that is rank ${row.slowest}. `}
    <${Link} to="/jobs/${name}/timeline/${data.steps[chosen.x]}">The step over ranks<//>
  </p>`;
}

/** Besides the colours, what the marks are, and whom a cell is measured against. */
function Legend({ data }) {
  const shades = [LEAST, 1, 1.5, MOST];
  const outliers = data.rows.reduce((sum, row) => sum + row.outliers.length, 0);
  return html`<ul class="legend" aria-label="What the map shows">
    ${shades.map((ratio) => html`<li><span class="dot" aria-hidden="true" style=${{ background: heatColor(heatOf(ratio, 1)) }}></span>
      ${ratio === LEAST ? "half or less" : ratio === 1 ? "as long" : ratio === MOST ? "twice or more" : "1.5 times"}</li>`)}
    <li><span class="dot part-line" aria-hidden="true"></span> not known</li>
    <li><b aria-hidden="true">▢ ━</b> outlier: 1.15 times its peers or more, and more than noise (${count(outliers)} here)</li>
    <li><b aria-hidden="true">▶</b> a row with a rank that is so far above on the mean</li>
    <li>Peers of a rank: ${PEERS[data.alike.join()]}</li>
  </ul>`;
}

/** In words, for those who do not see the picture, and for all. */
function Slowest({ data, choose }) {
  const rows = data.rows.map((row, y) => ({ row, y })).filter(({ row }) => row.mean_ratio >= SLOW);
  const slow = rows.sort((a, b) => b.row.mean_ratio - a.row.mean_ratio).slice(0, 8);
  if (slow.length === 0) return html`<p>No rank is ${Math.round(100 * (SLOW - 1))} % or more above its peers on the mean.</p>`;
  return html`<ol class="highest">${slow.map(({ row, y }) => html`<li>
    <button class="link" onClick=${() => choose({ x: data.steps.length - 1, y })}>rank ${row.slowest}</button>${" "}
    ${row.mean_ratio.toFixed(2)} times its peers ${" "}<span class="quiet">${row.ranks.length === 1 ? row.node : `in the row of ${nameOf(row)}`}</span>
  </li>`)}</ol>`;
}

function Choice({ label, value, set, options }) {
  return html`<label>${label} <select value=${value} onChange=${(event) => set(event.target.value)}>
    ${Object.entries(options).map(([each, words]) => html`<option value=${each}>${words}</option>`)}
  </select></label>`;
}

export function HeatMapView({ name }) {
  const [measure, setMeasure] = useState("work");
  const [order, setOrder] = useState("rank");
  // By step and rank, which stay the same when rows are ordered anew or steps are added.
  const [place, setPlace] = useState(null);
  const asked = () => get(["jobs", name, "heat-map"], { measure, order, rows: MOST_ROWS, steps: STEPS });
  const { value: data, error } = usePolled(asked, [name, measure, order], (last) => Math.max(PERIOD_S, (last?.num_ranks ?? 0) / RANKS_PER_S));
  const chosen = useMemo(() => {
    if (!data || !place) return null;
    const [x, y] = [data.steps.indexOf(place.step), data.rows.findIndex((row) => row.ranks.includes(place.rank))];
    return x < 0 || y < 0 ? null : { x, y };
  }, [data, place]);
  const choose = ({ x, y }) => setPlace({ step: data.steps[x], rank: data.rows[y].first });
  const title = html`<h1><${Link} to="/jobs/${name}">${name}<//> heat map</h1>
    <div class="head">
      <${Choice} label="Shown" value=${measure} set=${setMeasure} options=${MEASURES} />
      <${Choice} label="Rows by" value=${order} set=${setOrder} options=${ORDERS} />
      <span class="quiet">${data && (data.measure !== measure || data.order !== order) ? "Loading…"
        : "Wheel zooms, dragging moves, a double click shows all."}</span>
    </div>`;
  if (!data) return html`${title}${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const isEmpty = data.rows.length === 0 || data.steps.length === 0;
  return html`${title}<${Failure} error=${error} />
    ${data.missing.length > 0 && html`<p class="banner warn">Missing: ${data.missing.slice(0, 4).map((each) => `${each.node}: ${each.reason}`).join("; ")}</p>`}
    ${isEmpty
      ? html`<${Empty} title="Nothing noted yet">Ranks note how long their steps took; there is none that is known.<//>`
      : html`<section>
          <${Map2d} data=${data} chosen=${chosen} choose=${choose} />
          <${Chosen} name=${name} data=${data} chosen=${chosen} />
          <${Legend} data=${data} />
        </section>
        <section aria-labelledby="slowest"><h2 id="slowest">Slower than their peers</h2>
          <${Slowest} data=${data} choose=${choose} />
        </section>`}`;
}
