// One node: what it is, how it came to be in its state, what checks found and what went wrong on it.

import { get } from "/page/api.js";
import { bytes, count, duration, moment, short, words } from "/page/format.js";
import { Pages, usePages } from "/page/paging.js";
import { Actions, Failure, html, Link, Loading, State, Table, Tile, useEffect, usePolled, useState } from "/page/ui.js";
import { Diagnosis, Findings, linkOf, NotOperator, useDiagnosis, useOperator, Verdict } from "/page/views/diagnosis.js";
import { actionsOf, devicesOf, heardOf } from "/page/views/nodes.js";
import { NODE_COLUMNS } from "/page/views/trends.js";

const RUNS = 20;
const INCIDENTS = 20;
// Runs and incidents are rarer than heartbeats.
const HISTORY_S = 10;
const PEERS_S = 60;

function Tiles({ node }) {
  const { capacity } = node;
  return html`<dl class="tiles">
    <${Tile} label="Job" value=${node.job_id ? html`<${Link} to="/jobs/${node.job_id}">${node.job_id}<//>` : "none"} detail="worker places: ${count(node.workers)}" />
    <${Tile} label="Heard" value=${heardOf(node)} detail=${node.address} />
    <${Tile} label="Devices" value=${devicesOf(node)} detail=${capacity?.gpus ? `${bytes(capacity.gpu_memory_bytes)} each` : ""} />
    <${Tile} label="CPUs" value=${count(capacity?.cpus)} />
    <${Tile} label="Memory" value=${bytes(capacity?.memory_bytes)} />
    <${Tile} label="For checkpoints" value=${bytes(capacity?.host_memory_bytes)} detail="${bytes(capacity?.host_memory_free_bytes)} free when it joined" />
    ${capacity?.topology && html`<${Tile} label="Stands in" value=${capacity.topology} />`}
    ${capacity?.image && html`<${Tile} label="Image" value=${capacity.image} />`}
  </dl>`;
}

function StateChanges({ changes }) {
  return html`<section aria-labelledby="changes">
    <h2 id="changes">Changes of its state</h2>
    <ol class="facts changes">
      ${[...changes].reverse().map((each) => html`<li>
        <time>${moment(each.at_s)}</time>
        <div><${State} state=${each.state} kind="node" />${each.cordoned && html` <span class="quiet">cordoned</span>`} ${each.reason}</div>
      </li>`)}
    </ol>
    <p class="quiet">Since the controller started, the last 50.</p>
  </section>`;
}

const reportOf = (run, name) => run.node_reports.find((each) => each.node === name);

function verdictOf(run, name) {
  if (run.state === "running") return "running";
  return reportOf(run, name)?.verdict ?? run.state;
}

/** The findings of a run about one node, which the list of runs leaves out. */
function RunFindings({ runId, name }) {
  const [state, setState] = useState({ run: null, error: null });
  useEffect(() => {
    let isOver = false;
    setState({ run: null, error: null });
    get(["diagnostics", runId], { node: name })
      .then(({ run }) => !isOver && setState({ run, error: null }))
      .catch((error) => !isOver && setState({ run: null, error }));
    return () => {
      isOver = true;
    };
  }, [runId, name]);
  if (state.error) return html`<${Failure} error=${state.error} />`;
  if (state.run === null) return html`<${Loading} />`;
  return html`${state.run.notes.map((note) => html`<p class="quiet">${note}</p>`)}
    <${Findings} findings=${state.run.findings} caption="Findings of run ${runId}" />`;
}

function Diagnostics({ name, runs, pages, next, error }) {
  const [open, setOpen] = useState("");
  const columns = [
    { name: "Run", cell: (run) => run.run_id },
    { name: "Started", cell: (run) => moment(run.started_s) },
    { name: "Suite", cell: (run) => run.suite },
    { name: "Begun by", cell: (run) => (run.origin === "manual" ? "a person" : html`<${Link} to="/incidents/${run.origin}">${run.origin}<//>`) },
    { name: "Verdict", cell: (run) => html`<${Verdict} verdict=${verdictOf(run, name)} />` },
    { name: "Why", cell: (run) => html`<span class="why">${reportOf(run, name)?.reason}</span>` },
    {
      name: "Findings",
      cell: (run) => html`<button aria-expanded=${open === run.run_id} onClick=${() => setOpen(open === run.run_id ? "" : run.run_id)}>${open === run.run_id ? "Hide" : "Show"}</button>`,
    },
  ];
  return html`<section aria-labelledby="runs">
    <h2 id="runs">Diagnostics</h2>
    <${Failure} error=${error} />
    ${runs.length === 0 && !error && html`<p class="quiet">No run that is kept has checked it.</p>`}
    ${open && html`<${RunFindings} runId=${open} name=${name} />`}
    ${runs.length > 0 && html`<${Table} caption="Runs of diagnostics" columns=${columns} rows=${runs} rowKey=${(run) => run.run_id} />`}
    <${Pages} pages=${pages} next=${next} label="runs" />
  </section>`;
}

const LINKS = [
  { name: "Link", cell: linkOf },
  { name: "Verdict", cell: (found) => html`<${Verdict} verdict=${found.verdict} />` },
  { name: "Value", isNumber: true, cell: (found) => (found.metric ? `${found.value.toPrecision(3)} ${found.unit}` : "–") },
  { name: "What was found", cell: (found) => html`<span class="why">${found.detail}</span>` },
];

const rates = ({ least, mean, most }) => [least, mean, most].map((each) => short(each)).join(" / ");

const TRAFFIC = [
  { name: "Link", cell: (each) => html`${each.link} <span class="quiet">${each.is_rdma ? "RDMA port" : "network device"}</span>` },
  { name: "In, B/s", isNumber: true, cell: (each) => rates(each.received) },
  { name: "Out, B/s", isNumber: true, cell: (each) => rates(each.sent) },
  { name: "Longest silence", isNumber: true, cell: (each) => duration(each.longest_silence_s) },
  { name: "Period", isNumber: true, cell: (each) => duration(each.period_s) },
  { name: "What was found", cell: (each) => (each.finding ? html`<span class="late">${each.finding}</span>` : "nothing") },
];

/** What its links carry, as its last heartbeat says. */
function Traffic({ links }) {
  return html`<section aria-labelledby="traffic">
    <h2 id="traffic">Traffic</h2>
    ${links.length === 0
      ? html`<p class="quiet">Nothing is known: links are sampled while ranks run, and not of an agent that is reached through loopback.</p>`
      : html`<p class="quiet">Of two seconds, sampled every 1 to 50 ms: least / mean / most of a sample.</p>
        <${Table} caption="What its links carry" columns=${TRAFFIC} rows=${links} rowKey=${(each) => each.link} />`}
  </section>`;
}

/** What the newest run that has tried its links says of them. */
function Links({ name, runs }) {
  const isOwn = (found) => [found.node, found.peer].includes(name);
  const run = runs.find((each) => each.links.some(isOwn));
  return html`<section aria-labelledby="links">
    <h2 id="links">Links</h2>
    ${run
      ? html`<p class="quiet">As run ${run.run_id} found them, ${moment(run.started_s)}.</p>
        <${Table} caption="Links" columns=${LINKS} rows=${run.links.filter(isOwn)} rowKey=${linkOf} />`
      : html`<p class="quiet">No run in this list has tried its links: that takes two nodes at least, as Diagnose all does.</p>`}
  </section>`;
}

/** How its ranks compared with those of its jobs' other nodes. */
function Peers({ name }) {
  const { value } = usePolled(() => get(["node-statistics"], { node: name }), [name], PEERS_S);
  const own = value?.nodes ?? [];
  return html`<section aria-labelledby="peers">
    <h2 id="peers">Among its peers</h2>
    ${own.some((each) => each.num_windows > 0)
      ? html`<p class="quiet">Over seven days, in windows of ten minutes. ${own[0].is_slow && html`<b>It is slower than they are, more often than chance.</b>`}</p>
        <${Table} caption="Among its peers" columns=${NODE_COLUMNS.slice(1)} rows=${own} rowKey=${(each) => each.node_id} />`
      : html`<p class="quiet">Its ranks have not been compared with those of other nodes in the last seven days: that takes ten minutes of a job on two nodes.</p>`}
  </section>`;
}

const roleOf = (incident, name) => (incident.culprit_nodes.includes(name) ? "culprit" : "evidence");

function Faults({ name }) {
  const pages = usePages();
  const { after } = pages;
  const { value, error } = usePolled(
    () => get(["incidents"], { node: name, newest: INCIDENTS, after, brief: true }), [name, after], HISTORY_S,
  );
  const incidents = [...(value?.incidents ?? [])].reverse();
  const columns = [
    { name: "Incident", cell: (each) => html`<${Link} to="/incidents/${each.incident_id}">${each.incident_id}<//>` },
    { name: "State", cell: (each) => html`<${State} state=${each.state} kind="incident" />` },
    { name: "This node", cell: (each) => roleOf(each, name) },
    { name: "Opened", cell: (each) => moment(each.opened_s) },
    { name: "Cause", cell: (each) => words(each.cause) },
    { name: "Action", cell: (each) => (each.is_note ? "logged only" : words(each.action)) },
    { name: "Why", cell: (each) => html`<span class="why" title=${each.reason}>${each.reason}</span>` },
  ];
  return html`<section aria-labelledby="faults">
    <h2 id="faults">Faults</h2>
    <${Failure} error=${error} />
    ${value !== null && incidents.length === 0 && html`<p class="quiet">No incident that is kept names it.</p>`}
    ${incidents.length > 0 && html`<${Table} caption="Incidents of this node" columns=${columns} rows=${incidents} rowKey=${(each) => each.incident_id} />`}
    <${Pages} pages=${pages} next=${value?.next} label="incidents" />
  </section>`;
}

export function NodeView({ name }) {
  const { value, error } = usePolled(() => get(["nodes", name]), [name]);
  const pages = usePages();
  const diagnosis = useDiagnosis();
  const operator = useOperator();
  const { after } = pages;
  const listed = usePolled(
    () => get(["diagnostics"], { node: name, newest: RUNS, after }), [name, after, diagnosis.started], HISTORY_S,
  );
  if (value === null) return html`<h1>${name}</h1>${error ? html`<${Failure} error=${error} />` : html`<${Loading} />`}`;
  const { node, changes, links } = value;
  const diagnose = (suite) => diagnosis.begin([name], suite);
  const thorough = node.connected && {
    name: "Diagnose thoroughly",
    run: () => diagnose("on-failure"),
    ask: `Run the checks that follow a fault on ${name}? They take minutes.`,
  };
  const actions = [...actionsOf(node, diagnose), thorough].filter(Boolean);
  const runs = listed.value?.runs ?? [];
  return html`<div class="head">
      <h1>${node.node_id}</h1>
      <${State} state=${node.state} kind="node" />
      ${node.cordoned && html`<span class="quiet">cordoned</span>`}
      ${operator?.may && html`<${Actions} actions=${actions} />`}
    </div>
    <p class="reason">${node.reason || "Nothing is wrong with it."}</p>
    <${NotOperator} operator=${operator} />
    <${Failure} error=${error} />
    <${Tiles} node=${node} />
    ${diagnosis.started && html`<${Diagnosis} started=${diagnosis.started} onClose=${diagnosis.close} />`}
    <${Diagnostics} name=${name} runs=${runs} pages=${pages} next=${listed.value?.next} error=${listed.error} />
    <${Traffic} links=${links} />
    <${Links} name=${name} runs=${runs} />
    <${Peers} name=${name} />
    <${Faults} name=${name} />
    <${StateChanges} changes=${changes} />`;
}
