// The fleet, and a person's word on it.

import { get, post } from "/page/api.js";
import { ago, bytes, count, toneOf } from "/page/format.js";
import { Actions, Empty, Failure, html, Link, Loading, State, Table, usePolled } from "/page/ui.js";

const GONE = ["RETIRED", "RELEASED"];
// Rows at once; of a larger fleet, those that need attention.
const MOST = 500;

function actionsOf(node) {
  const does = (verb) => () => post(["nodes", node.node_id, verb]);
  if (GONE.includes(node.state)) return [{ name: "Forget", run: does("forget") }];
  const isOut = node.cordoned || ["QUARANTINED", "REPAIRING", "DRAINED", "DRAINING"].includes(node.state);
  return [
    isOut
      ? { name: "Uncordon", run: does("uncordon") }
      : { name: "Cordon", run: does("cordon") },
    node.state !== "DRAINED" && node.state !== "DRAINING" && {
      name: "Drain", run: does("drain"), ask: `Drain ${node.node_id}? Its job moves to another node.`,
    },
  ].filter(Boolean);
}

const COLUMNS = [
  { name: "Node", cell: (node) => html`<b>${node.node_id}</b>` },
  {
    name: "State",
    cell: (node) => html`<${State} state=${node.state} kind="node" />${node.cordoned && html` <span class="quiet">cordoned</span>`}`,
  },
  { name: "Job", cell: (node) => node.job_id && html`<${Link} to="/jobs/${node.job_id}">${node.job_id}<//>` },
  { name: "Workers", isNumber: true, cell: (node) => count(node.workers) },
  { name: "Devices", cell: (node) => (node.capacity?.gpus ? `${node.capacity.gpus} × ${node.capacity.gpu_model}` : `${node.capacity?.cpus ?? "–"} CPUs`) },
  { name: "Memory", isNumber: true, cell: (node) => bytes(node.capacity?.memory_bytes) },
  {
    name: "Heard",
    isNumber: true,
    cell: (node) => (node.connected ? html`<span class=${node.late && "late"}>${ago(node.last_heartbeat_s)}</span>` : "not connected"),
  },
  { name: "Why", cell: (node) => html`<span class="why" title=${node.reason}>${node.reason}</span>` },
  { name: "", cell: (node) => html`<${Actions} actions=${actionsOf(node)} />` },
];

export function NodesView() {
  const { value, error } = usePolled(() => get(["nodes"], { most: MOST }), []);
  const nodes = value?.nodes ?? [];
  const states = new Map();
  for (const node of nodes) states.set(node.state, (states.get(node.state) ?? 0) + 1);
  return html`<h1>Nodes</h1>
    <${Failure} error=${error} />
    ${value === null && !error && html`<${Loading} />`}
    ${value !== null && nodes.length === 0 && html`<${Empty} title="No nodes yet">
      A node joins when its agent starts: <code>outlast agent</code>.
    <//>`}
    ${nodes.length > 0 && html`<p class="summary">
        ${[...states].map(([state, number]) => html`<span class="state ${toneOf(state, "node")}">${number} ${state}</span>`)}
        ${value.num_nodes > nodes.length && html`<span class="quiet">${nodes.length} of ${count(value.num_nodes)}, those that need attention first</span>`}
      </p>
      <${Table} caption="Nodes" columns=${COLUMNS} rows=${nodes} rowKey=${(node) => node.node_id} />`}`;
}
