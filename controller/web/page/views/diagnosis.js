// Runs of diagnostics: begun here, followed while they check, and what they have found.

import { follow, get, post } from "/page/api.js";
import { number } from "/page/format.js";
import { Failure, html, Link, SIGNS, Table, useEffect, usePolled, useState } from "/page/ui.js";

const TONES = { pass: "good", fail: "bad", skip: "idle", running: "busy", interrupted: "idle" };
const QUIET = ["pass", "skip"];
const OPERATORS = ["operator", "admin"];

/** Whether the caller may change nodes and check them; null while that is not known. */
export function useOperator() {
  const me = usePolled(() => get(["whoami"]), [], 60);
  return me.value && { may: OPERATORS.includes(me.value.role), role: me.value.role };
}

export function NotOperator({ operator }) {
  if (!operator || operator.may) return null;
  return html`<p class="quiet">You are ${operator.role}: to cordon, drain or check nodes takes an operator.</p>`;
}

export function Verdict({ verdict }) {
  const tone = TONES[verdict] ?? "warn";
  return html`<span class="state ${tone}"><span aria-hidden="true">${SIGNS[tone]}</span> ${verdict}</span>`;
}

export const linkOf = (found) => `${found.node} – ${found.peer}`;

const figure = (found) => found.metric && `${found.metric.replaceAll("_", " ")} ${number(found.value)} ${found.unit}`;
const limit = (found) => found.threshold !== null && `${number(found.threshold)} (${found.threshold_source.replaceAll("_", " ")})`;

const FINDINGS = [
  { name: "Node", cell: (found) => (found.peer ? linkOf(found) : found.node) },
  { name: "Test", cell: (found) => found.test },
  { name: "Verdict", cell: (found) => html`<${Verdict} verdict=${found.verdict} />` },
  { name: "Value", cell: (found) => figure(found) || "–" },
  { name: "Limit", cell: (found) => limit(found) || "–" },
  { name: "What it measured", cell: (found) => found.detail },
];

const keyOf = (found) => `${found.node} ${found.peer} ${found.test} ${found.metric} ${found.detail}`;

/** Findings as a table, those that matter first. */
export function Findings({ findings, caption }) {
  if (findings.length === 0) return html`<p class="quiet">No findings.</p>`;
  const sorted = [...findings].sort((a, b) => QUIET.includes(a.verdict) - QUIET.includes(b.verdict));
  return html`<${Table} caption=${caption} columns=${FINDINGS} rows=${sorted} rowKey=${keyOf} />`;
}

const REPORTS = [
  { name: "Node", cell: (report) => html`<${Link} to="/nodes/${encodeURIComponent(report.node)}">${report.node}<//>` },
  { name: "Verdict", cell: (report) => html`<${Verdict} verdict=${report.verdict} />` },
  { name: "Why", cell: (report) => html`<span class="why">${report.reason}</span>` },
];

/** Begins runs, one after the other: `begin(nodes, suite)` and the one that is shown. */
export function useDiagnosis() {
  const [started, setStarted] = useState(null);
  return {
    started,
    begin: async (nodes, suite) => setStarted({ suite, ...(await post(["diagnostics"], { nodes, suite })) }),
    close: () => setStarted(null),
  };
}

const NOTHING = { findings: [], phase: "starting", pending: [], run: null, error: null };

/** A run that was begun here: its progress, then its verdict. */
export function Diagnosis({ started, onClose }) {
  const [state, setState] = useState(NOTHING);
  useEffect(() => {
    setState(NOTHING);
    const progress = (news) => setState((before) => ({
      findings: [...before.findings, ...news.findings],
      phase: news.phase,
      pending: news.pending_nodes,
      run: news.run,
      error: null,
    }));
    const failed = ({ error }) => setState((before) => ({ ...before, error }));
    return follow(["diagnostics", started.run_id, "events"], () => ({}), { progress, failed }, {
      reopened: () => setState(NOTHING),
    });
  }, [started.run_id]);
  const { findings, phase, pending, run, error } = state;
  const noticed = findings.filter((found) => !QUIET.includes(found.verdict));
  return html`<section aria-labelledby="diagnosis">
    <div class="head">
      <h2 id="diagnosis">Checks of ${started.nodes.length === 1 ? started.nodes[0] : `${started.nodes.length} nodes`}</h2>
      <span class="quiet">${started.suite}, run ${started.run_id}</span>
      <div class="actions"><button onClick=${onClose}>Close</button></div>
    </div>
    ${started.warnings.map((warning) => html`<p class="late">${warning}</p>`)}
    <p role="status">${run
      ? `Checked: ${run.state}, ${findings.length} findings.`
      : `Checking: ${phase || "starting"}${pending.length ? `, ${pending.length} still at work` : ""}; ${findings.length} findings so far.`}</p>
    <${Failure} error=${error} />
    ${run && html`<${Table} caption="Verdicts" columns=${REPORTS} rows=${run.node_reports} rowKey=${(each) => each.node} />`}
    ${run?.notes.filter((note) => !started.warnings.includes(note)).map((note) => html`<p class="quiet">${note}</p>`)}
    ${noticed.length > 0 && html`<${Findings} findings=${noticed} caption="What did not pass" />`}
  </section>`;
}
