// What days and weeks of a job show: trends, periodic stalls, and its nodes among their peers.

import { get } from "/page/api.js";
import { ago, count, duration, moment, percent, short } from "/page/format.js";
import { Failure, html, Loading, Table, usePolled } from "/page/ui.js";

// Trends are of hours.
const PERIOD_S = 60;
const WIDTH = 1000;
const HEIGHT = 120;
const HOUR_S = 3600;
const signed = (ratio, digits = 1) => `${ratio < 0 ? "−" : "+"}${Math.abs(100 * ratio).toFixed(digits)} %`;

/** Rows of the table: a trend with how its values are written. */
function trendRows(found) {
  const peak = found.peak_flops_per_s;
  const speed = (value) => (peak ? percent((value * found.model_flops_per_token) / peak) : `${short(value)} tokens/s`);
  const relative = (trend, name, level) => trend && {
    name, trend, level, change: signed(trend.ratio_per_week),
    between: [trend.low, trend.high].map((value) => signed(value / (trend.level || 1))),
    cost: trend.is_significant && trend.lost_ratio > 0 ? percent(trend.lost_ratio) : "",
  };
  const late = found.late_launches;
  return [
    relative(found.speed, "MFU", found.speed && speed(found.speed.level)),
    relative(found.speed_in_attempts, "MFU within attempts", ""),
    late && {
      name: "Late launches", trend: late, level: `${percent(late.level, 2)} of a step`, cost: "",
      change: signed(late.per_week, 2), between: [late.low, late.high].map((value) => signed(value, 2)),
    },
  ].filter(Boolean);
}

const TREND_COLUMNS = [
  { name: "Trend", cell: (row) => row.name },
  { name: "Level", isNumber: true, cell: (row) => row.level },
  { name: "A week", isNumber: true, cell: (row) => row.change },
  { name: "95 % interval", isNumber: true, cell: (row) => row.between.join(" to ") },
  { name: "Cost so far", isNumber: true, cell: (row) => row.cost },
  { name: "More than chance", cell: (row) => (row.trend.is_significant ? "yes" : "no") },
];

/** What a node was like among its peers; the node's own page has all but its name. */
export const NODE_COLUMNS = [
  { name: "Node", cell: (node) => (node.is_slow ? html`<b>${node.node_id}</b> slow` : node.node_id) },
  {
    name: "Slowest", isNumber: true,
    cell: (node) => (node.num_windows > 0 ? `${percent(node.slowest_ratio, 0)} (expected ${percent(node.expected_ratio, 0)})` : "–"),
  },
  { name: "Work of its slowest rank", isNumber: true, cell: (node) => (node.num_windows > 0 ? `${node.work_ratio.toFixed(2)} ×` : "–") },
  { name: "Last to enter", isNumber: true, cell: (node) => (node.num_windows > 0 ? percent(node.last_ratio, 0) : "–") },
  { name: "In service", isNumber: true, cell: (node) => duration(node.service_s) },
  { name: "Faults", isNumber: true, cell: (node) => count(node.num_faults) },
  {
    name: "Checks passed", isNumber: true,
    cell: (node) => (node.num_checks > 0 ? `${node.num_checks - node.num_checks_failed} of ${node.num_checks}` : "–"),
  },
];

/** Tokens per second by the hour, broken where the job did not train. */
function Hours({ hours }) {
  if (hours.length < 2) return null;
  const [first, last] = [hours[0].begun_s, hours.at(-1).begun_s];
  const speeds = hours.map((hour) => hour.tokens_per_s);
  const most = Math.max(...speeds) || 1;
  const least = Math.min(...speeds);
  const floor = Math.max(0, least - (most - least));
  const x = (hour) => (WIDTH * (hour.begun_s - first)) / (last - first || 1);
  const y = (hour) => HEIGHT - (HEIGHT * (hour.tokens_per_s - floor)) / (most - floor || 1);
  const path = hours.map((hour, index) => {
    const isApart = index === 0 || hour.begun_s - hours[index - 1].begun_s > 2 * HOUR_S;
    return `${isApart ? "M" : "L"}${x(hour).toFixed(1)} ${y(hour).toFixed(1)}`;
  });
  const spoken = `Tokens per second by the hour, ${short(least)} to ${short(most)}`;
  return html`<figure class="weeks">
    <figcaption>${spoken}</figcaption>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label=${spoken}>
      <path d=${path.join("")} vector-effect="non-scaling-stroke" />
    </svg>
    <p class="ends quiet"><span>${moment(first)}</span><span>${moment(last)}</span></p>
  </figure>`;
}

function Found({ found }) {
  const rows = trendRows(found);
  const nodes = found.nodes.filter((node) => node.num_windows > 0 || node.service_s > 0);
  return html`
    ${found.findings.map((line) => html`<p class="banner warn">${line}</p>`)}
    ${found.why_no_trend && html`<p class="quiet">No trend yet: ${found.why_no_trend}.</p>`}
    <${Hours} hours=${found.hours} />
    ${rows.length > 0 && html`<${Table} caption="Trends" columns=${TREND_COLUMNS} rows=${rows} rowKey=${(row) => row.name} />`}
    <h3>Periodic stalls</h3>
    ${found.stalls.length === 0
      ? html`<p class="quiet">None in the newest steps.</p>`
      : html`<ul>${found.stalls.map((stall) => html`<li>${stall.description} (${ago(stall.last_s)})</li>`)}</ul>`}
    ${nodes.length > 0 && html`<h3>Nodes, over the last week</h3>
      <${Table} caption="Nodes among their peers" columns=${NODE_COLUMNS} rows=${nodes} rowKey=${(node) => node.node_id} />`}`;
}

export function Trends({ job }) {
  const { value, error } = usePolled(() => get(["jobs", job.job_id, "trends"]), [job.job_id], PERIOD_S);
  return html`<section aria-labelledby="trends">
    <h2 id="trends">Over days and weeks</h2>
    ${value ? html`<${Found} found=${value} />` : error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}
  </section>`;
}
