// A job spec, checked while it is written.

import { get, post } from "/page/api.js";
import { Failure, html, navigate, useEffect, useState } from "/page/ui.js";
import { Editor, placed } from "/page/views/editor.js";
import { Plan } from "/page/views/plan.js";

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

/** The JSON schema of specs; null while it is not there, which the editor works without. */
function useSchema() {
  const [state, setState] = useState({ schema: null, isRead: false });
  useEffect(() => {
    get(["spec-schema"])
      .then((schema) => setState({ schema, isRead: true }))
      .catch(() => setState({ schema: null, isRead: true }));
  }, []);
  return state;
}

export function SubmitView() {
  const [text, setText] = useState(sessionStorage.getItem(KEPT) ?? EXAMPLE);
  const { schema, isRead } = useSchema();
  const [fit, setFit] = useState(null);
  // The text that `fit` is of.
  const [rightText, setRightText] = useState("");
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const show = (found, failure) => {
    setFit(found);
    setError(failure);
    setRightText(found ? text : "");
  };
  useEffect(() => {
    sessionStorage.setItem(KEPT, text);
    let isOver = false;
    const timer = setTimeout(async () => {
      try {
        const found = await post(["jobs", "check"], { text });
        if (!isOver) show(found, null);
      } catch (failure) {
        if (!isOver) show(null, failure);
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
  return html`<h1>Submit a job</h1>
    <${Editor} text=${text} onText=${setText} schema=${schema} isRead=${isRead}
      problems=${placed(error, fit?.problems ?? [], text)} />
    <div id="verdict" aria-live="polite">
      <${Failure} error=${error} />
      ${fit && html`<div class=${fit.problems.length ? "failure" : "fine"}>
        <p>${fit.problems.length ? "No connected node has what it needs; it would wait for one." : "The spec is right."}
          ${" "}Each of its ${fit.needed} node(s) needs ${fit.need}; ${fit.fitting} of ${fit.connected} connected have that.</p>
        ${fit.problems.map((each) => html`<p><code>${each.field}</code> ${each.description}</p>`)}
      </div>`}
    </div>
    <${Plan} text=${rightText} />
    <div class="actions"><button class="first" disabled=${isBusy || fit === null} onClick=${submit}>
      ${isBusy ? "Submitting…" : "Submit"}
    </button></div>`;
}
