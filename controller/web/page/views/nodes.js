// The fleet, its spare pool, and a person's word on it.

import { get, post } from "/page/api.js";
import { ago, bytes, count, toneOf } from "/page/format.js";
import { Pages, usePages } from "/page/paging.js";
import { Actions, Empty, Failure, html, Link, Loading, State, Table, usePolled, useState } from "/page/ui.js";
import { Diagnosis, NotOperator, useDiagnosis, useOperator } from "/page/views/diagnosis.js";

const GONE = ["RETIRED", "RELEASED"];
const PAGE = 100;
const SPARES = 20;
const SPARE = "STANDBY";

/** What a person can do with a node; `diagnose(suite)` begins a run of checks. */
export function actionsOf(node, diagnose) {
  const does = (verb) => () => post(["nodes", node.node_id, verb]);
  if (GONE.includes(node.state)) return [{ name: "Forget", run: does("forget") }];
  const isOut = node.cordoned || ["QUARANTINED", "REPAIRING", "DRAINED", "DRAINING"].includes(node.state);
  return [
    node.connected && {
      name: "Diagnose",
      run: () => diagnose("preflight"),
      ask: node.job_id && `Check ${node.node_id} while it trains ${node.job_id}? The checks slow it down, and slow values prove nothing.`,
    },
    isOut
      ? { name: "Uncordon", run: does("uncordon") }
      : { name: "Cordon", run: does("cordon") },
    node.state !== "DRAINED" && node.state !== "DRAINING" && {
      name: "Drain", run: does("drain"), ask: `Drain ${node.node_id}? Its job moves to another node.`,
    },
  ].filter(Boolean);
}

export const nodeLink = (id) => html`<${Link} to="/nodes/${encodeURIComponent(id)}">${id}<//>`;

export function devicesOf({ capacity }) {
  return capacity?.gpus ? `${capacity.gpus} × ${capacity.gpu_model}` : `${capacity?.cpus ?? "–"} CPUs`;
}

export function heardOf(node) {
  return node.connected ? html`<span class=${node.late && "late"}>${ago(node.last_heartbeat_s)}</span>` : "not connected";
}

const NODE = { name: "Node", cell: (node) => html`<b>${nodeLink(node.node_id)}</b>` };
const STATE = {
  name: "State",
  cell: (node) => html`<${State} state=${node.state} kind="node" />${node.cordoned && html` <span class="quiet">cordoned</span>`}`,
};
const DEVICES = { name: "Devices", cell: devicesOf };
const HEARD = { name: "Heard", isNumber: true, cell: heardOf };
const WHY = { name: "Why", cell: (node) => html`<span class="why" title=${node.reason}>${node.reason}</span>` };

const COLUMNS = [
  NODE,
  STATE,
  { name: "Job", cell: (node) => node.job_id && html`<${Link} to="/jobs/${node.job_id}">${node.job_id}<//>` },
  { name: "Workers", isNumber: true, cell: (node) => count(node.workers) },
  DEVICES,
  { name: "Memory", isNumber: true, cell: (node) => bytes(node.capacity?.memory_bytes) },
  HEARD,
  WHY,
];
const SPARE_COLUMNS = [
  NODE,
  STATE,
  { name: "Ready since", isNumber: true, cell: (node) => ago(node.state_since_s) },
  DEVICES,
  HEARD,
  WHY,
];

/** How many nodes are in which state; each shows only those. */
function Summary({ states, shown, onShow }) {
  return html`<div class="summary" role="group" aria-label="Show nodes in a state">
    <button aria-pressed=${shown === ""} onClick=${() => onShow("")}>All</button>
    ${Object.entries(states).map(([state, number]) => html`<button
      class="state ${toneOf(state, "node")}" aria-pressed=${shown === state} onClick=${() => onShow(state)}
    >${count(number)} ${state}</button>`)}
  </div>`;
}

/** Nodes that were checked ahead of time and wait to take the place of a lost one. */
function SparePool({ states }) {
  const spares = usePolled(() => get(["nodes"], { state: SPARE, most: SPARES }), []);
  const nodes = spares.value?.nodes ?? [];
  const free = states.READY ?? 0;
  return html`<section aria-labelledby="spares">
    <h2 id="spares">Spare pool</h2>
    <${Failure} error=${spares.error} />
    <p class="quiet">${nodes.length === 0
      ? "No warm spares: no job at work asks for one (resources.standby), or none is checked yet."
      : `${count(states[SPARE] ?? nodes.length)} checked and held ready for a job that loses a node.`}
      ${" "}Free besides: ${count(free)}.</p>
    ${nodes.length > 0 && html`<${Table} caption="Spare pool" columns=${SPARE_COLUMNS} rows=${nodes} rowKey=${(node) => node.node_id} />`}
  </section>`;
}

export function NodesView() {
  const pages = usePages();
  const [shown, setShown] = useState("");
  const diagnosis = useDiagnosis();
  const operator = useOperator();
  const { after } = pages;
  const { value, error } = usePolled(() => get(["nodes"], { most: PAGE, after, state: shown }), [after, shown]);
  const show = (state) => {
    pages.first();
    setShown(state);
  };
  const diagnose = (node) => (suite) => diagnosis.begin([node.node_id], suite);
  const columns = operator?.may
    ? [...COLUMNS, { name: "Actions", cell: (node) => html`<${Actions} actions=${actionsOf(node, diagnose(node))} />` }]
    : COLUMNS;
  const all = { name: "Diagnose all", run: () => diagnosis.begin([], "preflight"), ask: "Check every connected node? Nodes that train are slowed down." };
  return html`<div class="head"><h1>Nodes</h1>${operator?.may && value?.num_nodes > 0 && html`<${Actions} actions=${[all]} />`}</div>
    <${Failure} error=${error} />
    <${NotOperator} operator=${operator} />
    ${value === null && !error && html`<${Loading} />`}
    ${value?.num_nodes === 0 && html`<${Empty} title="No nodes yet">
      A node joins when its agent starts: <code>outlast agent</code>.
    <//>`}
    ${diagnosis.started && html`<${Diagnosis} started=${diagnosis.started} onClose=${diagnosis.close} />`}
    ${value?.num_nodes > 0 && html`<${Summary} states=${value.states} shown=${shown} onShow=${show} />
      <${Table} caption="Nodes" columns=${columns} rows=${value.nodes} rowKey=${(node) => node.node_id} />
      <${Pages} pages=${pages} next=${value.next} label="nodes" />
      <${SparePool} states=${value.states} />`}`;
}
