// Where one rank stands now, and where it is in the next seconds, for whoever asks.

import { get } from "/page/api.js";
import { Failure, html, Table, useState } from "/page/ui.js";

const SECONDS = 5;
const MOST_FUNCTIONS = 12;

const share = (value) => (value ? `${(100 * value).toFixed(1)} %` : "–");
const columnsOf = (rank, beside) => [
  { name: beside ? `Rank ${rank}` : "Share", cell: (row) => share(row.share), isNumber: true },
  beside && { name: `Rank ${beside.rank}`, cell: (row) => share(row.beside_share), isNumber: true },
  { name: "Function", cell: (row) => html`<code>${row.name}</code> <span class="quiet">${row.file.split("/").pop()}</span>` },
].filter(Boolean);

/** Have the browser save a document. */
function save(document_, as) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(document_)], { type: "application/json" }));
  link.download = as;
  link.click();
  // Some browsers read it only after the click.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function Stacks({ found }) {
  const one = found.ranks.find((each) => !each.missing);
  if (one) return html`<p>${one.location}</p><pre class="stacks" tabindex="0">${one.text}</pre>`;
  return html`<p class="quiet">Not to be had: ${found.ranks[0]?.missing.reason ?? "it does not run now"}.</p>`;
}

function Profile({ found, name, rank }) {
  const file = `${name}-rank-${rank}.speedscope.json`;
  const beside = found.beside?.problem ? null : found.beside;
  return html`${beside && html`<p>Rank ${beside.rank} on <b>${beside.node}</b> does the same in another replica. What differs is what this rank is slow or quick at; waiting counts as time.</p>`}
    ${found.beside?.problem && html`<p class="late">Rank ${found.beside.rank} has no profile: ${found.beside.problem}</p>`}
    <${Table} caption="Where its main thread was" columns=${columnsOf(rank, beside)} rowKey=${(row) => row.name + row.file}
      rows=${found.functions.slice(0, MOST_FUNCTIONS)} />
    <p><button class="link" onClick=${() => save(found.speedscope, file)}>Save for speedscope</button></p>`;
}

export function Look({ name, rank }) {
  const [state, setState] = useState({ busy: "", error: null, stacks: null, profile: null });
  const ask = async (what, query) => {
    setState({ busy: what, error: null, stacks: null, profile: null });
    try {
      const found = await get(["jobs", name, what], { rank, ...query });
      setState({ busy: "", error: null, stacks: null, profile: null, [what]: found });
    } catch (error) {
      setState({ busy: "", error, stacks: null, profile: null });
    }
  };
  const isBusy = state.busy !== "";
  return html`<p>
      <button disabled=${isBusy} onClick=${() => ask("stacks", {})}>Stacks</button>${" "}
      <button disabled=${isBusy} onClick=${() => ask("profile", { seconds: SECONDS })}>Profile for ${SECONDS} s</button>${" "}
      <button disabled=${isBusy} onClick=${() => ask("profile", { seconds: SECONDS, beside: "peer" })}>Profile beside a peer</button>
      ${isBusy && html`<span class="quiet" role="status"> ${state.busy === "stacks" ? "Reading…" : "Recording…"}</span>`}
    </p>
    <${Failure} error=${state.error} />
    ${state.stacks && html`<${Stacks} found=${state.stacks} />`}
    ${state.profile && html`<${Profile} found=${state.profile} name=${name} rank=${rank} />`}`;
}
