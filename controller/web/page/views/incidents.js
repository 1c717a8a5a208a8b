// What went wrong, and what was done about it.

import { get } from "/page/api.js";
import { count, duration, moment, words } from "/page/format.js";
import { Pages, usePages } from "/page/paging.js";
import { Empty, Failure, html, Link, Loading, Split, State, Table, Tile, usePolled } from "/page/ui.js";
import { pathOf } from "/page/views/attempts.js";

const NEWEST = 100;
const COLORS = {
  detect: "red", diagnose: "purple", provision: "yellow", restore: "blue", redo: "orange",
  checkpoint: "sky", productive: "green", paused: "grey",
};
const COLUMNS = [
  { name: "Incident", cell: (each) => html`<${Link} to="/incidents/${each.incident_id}">${each.incident_id}<//>` },
  { name: "State", cell: (each) => html`<${State} state=${each.state} kind="incident" />` },
  { name: "Job", cell: (each) => html`<${Link} to="/jobs/${each.job_id}">${each.job_id}<//>` },
  { name: "Opened", cell: (each) => moment(each.opened_s) },
  { name: "Cause", cell: (each) => words(each.cause) },
  { name: "Action", cell: (each) => (each.is_note ? "logged only" : words(each.action)) },
  { name: "Found in", isNumber: true, cell: (each) => duration(each.detection_s) },
  { name: "Back after", isNumber: true, cell: (each) => duration(each.recovery_s) },
  { name: "Why", cell: (each) => html`<span class="why" title=${each.reason}>${each.reason}</span>` },
];

export function IncidentsView() {
  const pages = usePages();
  const { after } = pages;
  const { value, error } = usePolled(() => get(["incidents"], { newest: NEWEST, after, brief: true }), [after]);
  const incidents = value?.incidents ?? [];
  return html`<h1>Incidents</h1>
    <${Failure} error=${error} />
    ${value === null && !error && html`<${Loading} />`}
    ${value !== null && incidents.length === 0 && html`<${Empty} title="No incidents">
      Nothing has gone wrong so far.
    <//>`}
    ${incidents.length > 0 && html`<${Table} caption="Incidents" columns=${COLUMNS}
      rows=${[...incidents].reverse()} rowKey=${(each) => each.incident_id} />`}
    <${Pages} pages=${pages} next=${value?.next} label="incidents" />`;
}

const EVIDENCE = [
  { name: "When", cell: (each) => moment(each.at_s) },
  { name: "Sign", cell: (each) => words(each.kind) },
  { name: "Node", cell: (each) => each.node },
  { name: "Rank", isNumber: true, cell: (each) => each.rank ?? "" },
  {
    name: "What",
    cell: (each) => html`${each.detail}
      ${each.traceback && html`<details><summary>Traceback</summary><pre tabindex="0">${each.traceback}</pre></details>`}`,
  },
];

export function IncidentView({ name }) {
  const { value, error } = usePolled(() => get(["incidents", name]), [name]);
  if (value === null) return html`<h1>${name}</h1>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const { incident } = value;
  const seconds = Object.entries(incident.seconds).map(([part, spent]) => ({ name: part, value: spent, color: COLORS[part] ?? "grey" }));
  return html`<div class="head">
      <h1>${incident.incident_id}</h1>
      <${State} state=${incident.state} kind="incident" />
    </div>
    <p class="reason">${incident.reason || "Signs are still being gathered."}</p>
    <dl class="tiles">
      <${Tile} label="Job" value=${html`<${Link} to="/jobs/${incident.job_id}">${incident.job_id}<//>`}
        detail=${html`<${Link} to=${pathOf(incident.job_id, incident.attempt, "timeline")}>attempt ${incident.attempt}<//>`} />
      <${Tile} label="Cause" value=${words(incident.cause)} detail=${incident.culprit_nodes.map((node) => html`<${Link} to="/nodes/${encodeURIComponent(node)}">${node}<//> `)} />
      <${Tile} label="Action" value=${incident.is_note ? "logged only" : words(incident.action)} />
      <${Tile} label="Found in" value=${duration(incident.detection_s)} detail=${moment(incident.opened_s)} />
      <${Tile} label="Back after" value=${duration(incident.recovery_s)} detail="${count(incident.steps_redone)} steps redone" />
    </dl>
    <div class="columns">
      <section aria-labelledby="line">
        <h2 id="line">What happened</h2>
        <ol class="timeline">
          ${incident.timeline.map((entry) => html`<li>
            <time>+${duration(Math.max(0, entry.at_s - incident.timeline[0].at_s))}</time>
            <div><b>${words(entry.phase)}</b> ${entry.detail}</div>
          </li>`)}
        </ol>
      </section>
      <section aria-labelledby="cost">
        <h2 id="cost">What it cost</h2>
        <${Split} parts=${seconds} format=${duration} label="Seconds until training was past it" />
        ${incident.node_checks.length > 0 && html`<h2>Checks</h2><ul class="checks">
          ${incident.node_checks.map((check) => html`<li>${check.node}: <b>${check.verdict}</b></li>`)}
          ${incident.bad_links.map((link) => html`<li>link ${link.node} – ${link.peer}: <b>bad</b></li>`)}
        </ul>`}
      </section>
    </div>
    <section aria-labelledby="evidence">
      <h2 id="evidence">Evidence</h2>
      <${Table} caption="Evidence" columns=${EVIDENCE} rows=${incident.evidence} rowKey=${(each) => `${each.at_s} ${each.node} ${each.rank} ${each.kind}`} />
    </section>`;
}
