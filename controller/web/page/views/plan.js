// What a job will need: its plan, as `outlast plan` prints it.

import { post } from "/page/api.js";
import { bytes, count, duration, percent, short } from "/page/format.js";
import { Failure, html, Split, Table, Tile, useEffect, useState } from "/page/ui.js";

// A deep pipeline's stages are alike but for the first and the last ones.
const MOST_STAGES = 16;
const KEPT = "outlast-device";

const MEMORY = [
  { name: "Stage", cell: (stage) => stage.stage },
  { name: "Parameters", isNumber: true, cell: (stage) => count(stage.parameters) },
  { name: "Weights", isNumber: true, cell: (stage) => bytes(stage.weights_bytes) },
  { name: "Gradients", isNumber: true, cell: (stage) => bytes(stage.gradients_bytes) },
  { name: "Optimizer", isNumber: true, cell: (stage) => bytes(stage.optimizer_bytes) },
  { name: "Activations", isNumber: true, cell: (stage) => bytes(stage.activations_bytes) },
  { name: "Buffers", isNumber: true, cell: (stage) => bytes(stage.buffers_bytes) },
  { name: "Working", isNumber: true, cell: (stage) => bytes(stage.working_bytes) },
  { name: "Device total", isNumber: true, cell: (stage) => html`<b>${bytes(stage.device_bytes)}</b>` },
  { name: "Host checkpoints", isNumber: true, cell: (stage) => bytes(stage.host_slots_bytes) },
];

function Step({ projection }) {
  const { compute_s, bubble_s, tp_exposed_s, pp_exposed_s, dp_exposed_s } = projection;
  const parts = [
    ["compute", compute_s, "green"], ["bubble", bubble_s, "grey"], ["tp exposed", tp_exposed_s, "blue"],
    ["pp exposed", pp_exposed_s, "orange"], ["dp exposed", dp_exposed_s, "purple"],
  ].map(([name, value, color]) => ({ name, value, color }));
  return html`<h3>A step on ${projection.device}</h3>
    <p>${duration(projection.step_s)}, ${short(projection.tokens_per_s)} tokens/s, MFU ${percent(projection.mfu_windowed)}
      <span class="quiet"> by ${short(projection.peak_flops_per_s)}FLOP/s (${projection.source}), of which products
      reach ${percent(projection.kernel_share, 0)}, and ${short(projection.link_bytes_per_s)}B/s of network
      for each rank, ${Number((1e6 * projection.latency_s).toPrecision(3))} us a message</span></p>
    <${Split} parts=${parts} format=${duration} label="Where a step would go" />`;
}

function Traffic({ communication }) {
  const parts = [
    ["tp", communication.tp_bytes, "blue"], ["pp", communication.pp_bytes, "orange"], ["dp", communication.dp_bytes, "purple"],
    ["cp", communication.cp_bytes, "orange"], ["experts", communication.ep_bytes, "green"], ["tied embedding", communication.embedding_bytes, "grey"],
  ].map(([name, value, color]) => ({ name, value, color }));
  return html`<h3>Traffic of a step</h3>
    ${communication.total_bytes > 0
      ? html`<p>${bytes(communication.total_bytes)} sent by the busiest rank</p><${Split} parts=${parts} format=${bytes} label="Bytes sent in a step" />`
      : html`<p class="quiet">A single rank sends nothing.</p>`}`;
}

function Found({ plan }) {
  const { layout, stages } = plan;
  const shown = stages.length > MOST_STAGES ? [...stages.slice(0, MOST_STAGES - 1), stages.at(-1)] : stages;
  const degrees = ["tp", ...(layout.cp > 1 ? ["cp"] : []), "pp", "dp", ...(layout.ep > 1 ? ["ep"] : [])];
  return html`${plan.warnings.map((warning) => html`<p class="late">${warning}</p>`)}
    <dl class="tiles">
      <${Tile} label="Ranks" value=${count(plan.num_ranks)} detail=${degrees.map((name) => `${name} ${layout[name]}`).join(" × ")} />
      <${Tile} label="Nodes" value=${count(plan.nodes)} detail="ranks on each: ${count(plan.workers_per_node)}; recommended spares: ${count(plan.standbys)}" />
      <${Tile} label="Parameters" value=${short(plan.parameters)} />
      <${Tile} label="Tokens a step" value=${count(plan.tokens_per_step)} detail="${count(plan.num_micro_batches)} micro-batches; ${short(plan.total_tokens)} in all" />
      <${Tile} label="Compute" value="${short(plan.total_flops)}FLOP" detail="${short(plan.flops_per_token)}FLOP a token" />
      <${Tile} label="Bubble" value=${percent(plan.bubble)} detail="of a step" />
      <${Tile} label="Host memory" value=${bytes(plan.node_host_memory_bytes)} detail="of each node, for checkpoints" />
    </dl>
    <h3>Memory of one rank</h3>
    <${Table} caption="Memory of one rank" columns=${MEMORY} rows=${shown} rowKey=${(stage) => stage.stage} />
    ${shown.length < stages.length && html`<p class="quiet">The first ${MOST_STAGES - 1} and the last of ${stages.length} stages.</p>`}
    <div class="columns"><div><${Traffic} communication=${plan.communication} /></div>
      ${plan.projection && html`<div><${Step} projection=${plan.projection} /></div>`}</div>`;
}

/** @param {{text: string}} text of a spec that was found right; "" while there is none */
export function Plan({ text }) {
  const [device, setDevice] = useState(sessionStorage.getItem(KEPT) ?? "");
  const [state, setState] = useState({ answer: null, error: null });
  useEffect(() => {
    if (text === "") return undefined;
    sessionStorage.setItem(KEPT, device);
    let isOver = false;
    post(["jobs", "plan"], { text, device })
      .then((answer) => !isOver && setState({ answer, error: null }))
      .catch((error) => !isOver && setState((before) => ({ answer: before.answer && { ...before.answer, plan: null }, error })));
    return () => {
      isOver = true;
    };
  }, [text, device]);
  const { answer, error } = state;
  return html`<section aria-labelledby="plan">
    <div class="head"><h2 id="plan">Plan</h2>
      <label>Projected on <select value=${device} onChange=${(event) => setDevice(event.target.value)}>
        <option value="">no device</option>
        ${(answer?.devices ?? (device ? [device] : [])).map((each) => html`<option value=${each} selected=${each === device}>${each}</option>`)}
      </select></label>
    </div>
    <${Failure} error=${error} />
    ${text === "" && html`<p class="quiet">Shown when the spec is right.</p>`}
    ${answer?.reason && html`<p class="quiet">No plan: ${answer.reason}.</p>`}
    ${text !== "" && answer?.plan && html`<${Found} plan=${answer.plan} />`}
    ${text !== "" && !answer && !error && html`<p class="quiet" role="status">Planning…</p>`}
  </section>`;
}
