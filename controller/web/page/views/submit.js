// A job spec, checked while it is written.

import { post } from "/page/api.js";
import { Failure, html, navigate, useEffect, useState } from "/page/ui.js";

const EXAMPLE = `name: my-job
steps: 200
model: {layers: 4, hidden: 128, heads: 4, seq_len: 128}
parallel: {dp: 2}
data: {global_batch: 8}
resources: {workers_per_node: 2}
`;
// After the last key.
const CHECK_AFTER_MS = 400;
const KEPT = "outlast-spec";

export function SubmitView() {
  const [text, setText] = useState(sessionStorage.getItem(KEPT) ?? EXAMPLE);
  const [fit, setFit] = useState(null);
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => {
    sessionStorage.setItem(KEPT, text);
    let isOver = false;
    const timer = setTimeout(async () => {
      try {
        const found = await post(["jobs", "check"], { text });
        if (!isOver) [setFit, setError].forEach((set, index) => set([found, null][index]));
      } catch (failure) {
        if (!isOver) [setFit, setError].forEach((set, index) => set([null, failure][index]));
      }
    }, CHECK_AFTER_MS);
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [text]);
  const submit = async () => {
    setBusy(true);
    try {
      const { job } = await post(["jobs"], { text, wait_for_nodes: true });
      sessionStorage.removeItem(KEPT);
      navigate(`/jobs/${job.job_id}`);
    } catch (failure) {
      setError(failure);
    }
    setBusy(false);
  };
  const lines = Math.max(16, text.split("\n").length + 1);
  return html`<h1>Submit a job</h1>
    <label for="spec">Job spec (YAML)</label>
    <textarea id="spec" rows=${lines} spellcheck="false" value=${text} aria-describedby="verdict"
      onInput=${(event) => setText(event.target.value)}></textarea>
    <div id="verdict" aria-live="polite">
      <${Failure} error=${error} />
      ${fit && html`<div class=${fit.problems.length ? "failure" : "fine"}>
        <p>${fit.problems.length ? "No connected node has what it needs; it would wait for one." : "The spec is right."}
          ${" "}Each of its ${fit.needed} node(s) needs ${fit.need}; ${fit.fitting} of ${fit.connected} connected have that.</p>
        ${fit.problems.map((each) => html`<p><code>${each.field}</code> ${each.description}</p>`)}
      </div>`}
    </div>
    <div class="actions"><button class="first" disabled=${isBusy || fit === null} onClick=${submit}>
      ${isBusy ? "Submitting…" : "Submit"}
    </button></div>`;
}
