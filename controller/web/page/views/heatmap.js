// Ranks by steps: who took longer than its peers, when, and for how long.

import { get } from "/page/api.js";
import { count, duration } from "/page/format.js";
import { heatOf, heatScale, LEAST, MOST } from "/page/heat.js";
import { paint, pictureOf } from "/page/heatpicture.js";
import { Plane, within } from "/page/plane.js";
import { Empty, Failure, html, Link, Loading, useEffect, useMemo, usePolled, useState, useThemed } from "/page/ui.js";
import { AttemptChoice, pathOf } from "/page/views/attempts.js";

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
// Of thousands of ranks the whole takes seconds; a map of so many is there in a fraction of one.
const FIRST_RANKS = 512;
// What is asked of every rank is not asked often.
const [PERIOD_S, RANKS_PER_S] = [15, 100];
// An attempt that is over does not change; so long is a timer's longest, nearly.
const NEVER_S = 2_000_000;
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

/** The cell that an arrow key leads to; from none, that of the newest step in the first row that is seen. */
function nextCell(whole, from, key, seen) {
  if (!from) return { x: Math.ceil(seen.x + seen.w) - 1, y: Math.floor(seen.y) };
  const right = { ArrowRight: 1, ArrowLeft: -1 }[key] ?? 0;
  const down = { ArrowDown: 1, ArrowUp: -1 }[key] ?? 0;
  return { x: within(from.x + right, 0, whole.w - 1), y: within(from.y + down, 0, whole.h - 1) };
}

const toldOf = (data, { x, y }) => `${nameOf(data.rows[y])} on ${data.rows[y].node}, step ${count(data.steps[x])}: ${duration(data.rows[y].seconds[x])}`;

function Map2d({ data, cursor, point, chosen, choose }) {
  const picture = useMemo(() => pictureOf(data.rows, data.steps.length), [data, useThemed()]);
  // A row of a part is of other ranks than that of the whole.
  const whole = { w: data.steps.length, h: data.rows.length, of: data.node_stride };
  const leftPx = LEFT_PX[data.order];
  const outlier = nextOutlier(data.rows, cursor ?? chosen);
  const items = {
    name: "cell",
    at: ({ x, y }) => ({ x: Math.floor(x), y: Math.floor(y) }),
    next: (from, key, seen) => nextCell(whole, from, key, seen),
    boxOf: ({ x, y }) => ({ x, y, w: 1, h: 1 }),
    nameOf: (cell) => toldOf(data, cell),
  };
  const label = ({ x, y, w, h }) => {
    const [first, last] = [Math.floor(x), Math.ceil(x + w) - 1];
    return `Heat map of ranks by steps, steps ${data.steps[first]} to ${data.steps[last]}, rows ${Math.floor(y) + 1} to ${Math.ceil(y + h)}`;
  };
  return html`<${Plane}
    whole=${whole} frame=${{ left: leftPx, bottom: BOTTOM_PX, height: HEIGHT_PX }} label=${label}
    paint=${(ctx, view, size) => paint(ctx, picture, { data, view, chosen, size: { ...size, leftPx }, slow: SLOW })}
    items=${items} cursor=${cursor} point=${point} chosen=${chosen} choose=${choose}
    keys=${{ o: () => outlier && choose(outlier) }} help=", o goes to the next outlier">
    <button disabled=${!outlier} onClick=${() => choose(outlier)}>Next outlier</button>
  <//>`;
}

function Chosen({ name, attempt, data, chosen }) {
  if (!chosen) return html`<p class="quiet">Choose a cell to see its numbers.</p>`;
  const row = data.rows[chosen.y];
  const percent = row.percents[chosen.x];
  const isOutlier = row.outliers.some(([first, number]) => chosen.x >= first && chosen.x < first + number);
  return html`<p role="status">
    <strong>${nameOf(row)}</strong> on ${row.node}, step ${count(data.steps[chosen.x])}:
    ${" "}${duration(row.seconds[chosen.x])}${percent !== null && `, ${(percent / 100).toFixed(2)} of the median of its peers`}${isOutlier && ", an outlier"}.
    ${" "}${row.ranks.length > 1 && `Of these, the rank furthest above its peers in each step is shown; on the mean that is rank ${row.slowest}. `}
    <${Link} to=${pathOf(name, attempt, `timeline/${data.steps[chosen.x]}`)}>The step over ranks<//>
  </p>`;
}

/** Besides the colours, what the marks are, and whom a cell is measured against. */
function Legend({ data }) {
  useThemed();
  const scale = heatScale();
  const shades = [LEAST, 1, 1.5, MOST];
  const outliers = data.rows.reduce((sum, row) => sum + row.outliers.length, 0);
  return html`<ul class="legend" aria-label="What the map shows">
    ${shades.map((ratio) => html`<li><span class="dot" aria-hidden="true" style=${{ background: scale.color(heatOf(ratio, 1)) }}></span>
      ${ratio === LEAST ? "half or less" : ratio === 1 ? "as long" : ratio === MOST ? "twice or more" : "1.5 times"}</li>`)}
    <li><span class="dot part-line" aria-hidden="true"></span> not known</li>
    <li><b aria-hidden="true">▢ ━</b> outlier: 1.15 times its peers or more, and more than noise (${count(outliers)} here)</li>
    <li><b aria-hidden="true">▶</b> a row with a rank that is so far above on the mean</li>
    <li>Peers of a rank: ${PEERS[data.alike.join()]}${data.node_stride > 1 && ", as far as they are shown"}</li>
  </ul>`;
}

/** Of the steps whose times are known: a slow rank is the last to do one, and its row may end before the others. */
const newestOf = (row) => Math.max(0, row.percents.findLastIndex((percent) => percent !== null));

/** In words, for those who do not see the picture, and for all. */
function Slowest({ data, choose }) {
  const rows = data.rows.map((row, y) => ({ row, y })).filter(({ row }) => row.mean_ratio >= SLOW);
  const slow = rows.sort((a, b) => b.row.mean_ratio - a.row.mean_ratio).slice(0, 8);
  if (slow.length === 0) return html`<p>No rank is ${Math.round(100 * (SLOW - 1))} % or more above its peers on the mean.</p>`;
  return html`<ol class="highest">${slow.map(({ row, y }) => html`<li>
    <button class="link" onClick=${() => choose({ x: newestOf(row), y })}>rank ${row.slowest}</button>${" "}
    ${row.mean_ratio.toFixed(2)} times its peers ${" "}<span class="quiet">${row.ranks.length === 1 ? row.node : `in the row of ${nameOf(row)}`}</span>
  </li>`)}</ol>`;
}

function Choice({ label, value, set, options }) {
  return html`<label>${label} <select value=${value} onChange=${(event) => set(event.target.value)}>
    ${Object.entries(options).map(([each, words]) => html`<option value=${each}>${words}</option>`)}
  </select></label>`;
}

/** The map of all ranks; until it is there that of one node in several, where there are many ranks. */
function useMap({ name, attempt, measure, order }) {
  const chosen = [name, attempt, measure, order];
  const key = chosen.join(" ");
  const [first, setFirst] = useState(null);
  const ask = (ranks) => get(["jobs", name, "heat-map"], { attempt, measure, order, rows: MOST_ROWS, steps: STEPS, ranks });
  // Of each choice once: the function of its first render is kept until there is another choice.
  let isAsked = false;
  const load = async () => {
    if (!attempt && !isAsked) {
      isAsked = true;
      const part = await ask(FIRST_RANKS);
      if (part.node_stride === 1) return part;
      setFirst({ key, part });
    }
    return ask();
  };
  const period = (last) => (last && last.attempt < last.newest_attempt ? NEVER_S : Math.max(PERIOD_S, (last?.num_ranks ?? 0) / RANKS_PER_S));
  const { value, error } = usePolled(load, chosen, period);
  const isChosen = value && value.measure === measure && value.order === order && (!attempt || value.attempt === Number(attempt));
  return { data: !isChosen && first?.key === key ? first.part : value, error };
}

/** What of the map is still to come. */
function Coming({ data, measure, order }) {
  const isOther = data && (data.measure !== measure || data.order !== order);
  const isPart = data?.node_stride > 1;
  return html`<span class="quiet" aria-live="polite">${isOther ? "Loading…" : isPart ? `One node in ${data.node_stride} is shown, the others are being read…` : ""}</span>`;
}

export function HeatMapView({ name, attempt }) {
  const [measure, setMeasure] = useState("work");
  const [order, setOrder] = useState("rank");
  // By step and rank, which stay the same when rows are ordered anew or steps are added.
  const [place, setPlace] = useState(null);
  const [cursor, setCursor] = useState(null);
  const { data, error } = useMap({ name, attempt, measure, order });
  const cellOf = (of) => {
    if (!data || !of) return null;
    const [x, y] = [data.steps.indexOf(of.step), data.rows.findIndex((row) => row.ranks.includes(of.rank))];
    return x < 0 || y < 0 ? null : { x, y };
  };
  const chosen = useMemo(() => cellOf(place), [data, place]);
  const placeOf = ({ x, y }) => ({ step: data.steps[x], rank: data.rows[y].first });
  const choose = (cell) => (setPlace(placeOf(cell)), setCursor(null));
  const title = html`<h1><${Link} to="/jobs/${name}">${name}<//> heat map</h1>
    <div class="head">
      <${Choice} label="Shown" value=${measure} set=${setMeasure} options=${MEASURES} />
      <${Choice} label="Rows by" value=${order} set=${setOrder} options=${ORDERS} />
      <${AttemptChoice} name=${name} attempt=${attempt} newest=${data?.newest_attempt} picture="heat-map" />
      <${Coming} data=${data} measure=${measure} order=${order} />
    </div>`;
  if (!data) return html`${title}${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const isEmpty = data.rows.length === 0 || data.steps.length === 0;
  return html`${title}<${Failure} error=${error} />
    ${data.missing.length > 0 && html`<p class="banner warn">Missing: ${data.missing.slice(0, 4).map((each) => (each.node ? `${each.node}: ${each.reason}` : each.reason)).join("; ")}</p>`}
    ${isEmpty
      ? html`<${Empty} title="Nothing noted yet">Ranks note how long their steps took; there is none that is known.<//>`
      : html`<section>
          <${Map2d} data=${data} cursor=${cellOf(cursor)} point=${(cell) => setCursor(placeOf(cell))} chosen=${chosen} choose=${choose} />
          <${Chosen} name=${name} attempt=${attempt} data=${data} chosen=${chosen} />
          <${Legend} data=${data} />
        </section>
        ${data.node_stride === 1 && html`<section aria-labelledby="slowest"><h2 id="slowest">Slower than their peers</h2>
          <${Slowest} data=${data} choose=${choose} />
        </section>`}`}`;
}
