// The curves of a job, beside those of another one, with what happened at their steps.

import { get } from "/page/api.js";
import { Chart, MARKS } from "/page/charts.js";
import { GROUPS, joined, marksOf, setColumns, summed, withoutGivenUp } from "/page/curve.js";
import { count, duration, number, short } from "/page/format.js";
import { Entry, html, Link, useMemo, usePolled, useState } from "/page/ui.js";

const OTHER_S = 10;
// Named as the bar of a step now, in its colours.
export const STEP_PARTS = {
  forward_s: ["forward", "blue"], backward_s: ["backward", "sky"], optimizer_s: ["optimizer", "green"],
  tp_exposed_s: ["tp communication", "orange"], pp_exposed_s: ["pp communication", "yellow"],
  dp_exposed_s: ["dp communication", "red"], other_exposed_s: ["other communication", "purple"],
  data_s: ["data", "grey"], garbage_collection_s: ["garbage collection", "indigo"],
};
const GROUP_COLORS = { compute: "blue", communication: "orange", optimizer: "green", data: "grey" };
// Marks in the list under the curves; all are on the curves.
const MOST_MARKS = 200;

/** A column of the job, and of the other one if there is one. */
function one(name, label, curves) {
  if (!curves.other) return { series: [{ label }], data: [curves.own.step, curves.own[name]] };
  const shown = [[curves.name, curves.own], [curves.otherName, curves.other]];
  return {
    series: shown.map(([each]) => ({ label: each, spansGaps: true })),
    data: joined(shown.map(([, curve]) => ({ steps: curve.step, values: curve[name] }))),
  };
}

function lossOf(curves) {
  const { own, other } = curves;
  if (!other) {
    const sets = setColumns(own);
    return {
      series: [
        { label: "loss" }, { label: "held out", isDots: true },
        ...sets.map(([name]) => ({ label: `held out: ${name}`, isDots: true })),
      ],
      data: [own.step, own.loss, own.eval_loss, ...sets.map(([, column]) => own[column])],
    };
  }
  const shown = [[curves.name, own], [curves.otherName, other]];
  return {
    series: [
      ...shown.map(([each]) => ({ label: each, spansGaps: true })),
      ...shown.map(([each]) => ({ label: `${each} held out`, isDots: true })),
    ],
    data: joined(["loss", "eval_loss"].flatMap((name) => shown.map(([, curve]) => ({ steps: curve.step, values: curve[name] })))),
  };
}

/** Where the time of a step goes; of two jobs what the parts come to, the other one's dashed. */
function partsOf(curves) {
  const { own, other } = curves;
  if (!other) {
    const present = Object.entries(STEP_PARTS).filter(([name]) => own[name].some((value) => value > 0));
    const waits = own.data_wait_s.some((value) => value > 0);
    return {
      series: [
        ...present.map(([, [label, color]]) => ({ label, color: `--${color}` })),
        ...(waits ? [{ label: "waiting for data", color: "--quiet", dash: [3, 3] }] : []),
      ],
      data: [own.step, ...present.map(([name]) => own[name]), ...(waits ? [own.data_wait_s] : [])],
    };
  }
  const shown = [[curves.name, own, undefined], [curves.otherName, other, [6, 4]]];
  const groups = Object.entries(GROUPS).flatMap(([group, names]) => shown.map(([each, curve, dash]) => ({
    series: { label: `${group} ${each}`, color: `--${GROUP_COLORS[group]}`, dash, spansGaps: true },
    values: { steps: curve.step, values: summed(curve, names) },
  })));
  return { series: groups.map((each) => each.series), data: joined(groups.map((each) => each.values)) };
}

/** The range as far as there are steps; null for all of them. */
function rangeWithin(steps, range) {
  if (range === null || steps.length === 0) return null;
  const [first, last] = range.map((step) => Math.min(steps.at(-1), Math.max(steps[0], step)));
  return first < last ? [first, last] : null;
}

/** The steps that are shown, and others to zoom to for those who have no mouse. */
function Zoom({ steps, range, zoomed }) {
  const entered = (at) => (text) => {
    const [first, last] = [steps[0] ?? 0, steps.at(-1) ?? 0];
    const next = [...(range ?? [first, last])];
    next[at] = Number.parseInt(text, 10) || (at === 0 ? first : last);
    zoomed(next);
  };
  return html`<span>
    <label>From step <${Entry} type="number" value=${range?.[0] ?? ""} onEnter=${entered(0)} /></label>
    ${" "}<label>to step <${Entry} type="number" value=${range?.[1] ?? ""} onEnter=${entered(1)} /></label>
    ${range && html` <button onClick=${() => zoomed(null)}>See all</button>`}
  </span>`;
}

function Marks({ marks }) {
  if (marks.length === 0) return null;
  const present = Object.keys(MARKS).filter((kind) => marks.some((mark) => mark.kind === kind));
  return html`<details>
    <summary>${count(marks.length)} marks: ${present.map((kind) => `${MARKS[kind].letter} ${MARKS[kind].name}`).join(", ")}</summary>
    <ul class="marks">
      ${marks.slice(-MOST_MARKS).map((mark) => html`<li>
        Step ${count(mark.step)}: ${mark.text}
        ${mark.incident && html` <${Link} to="/incidents/${mark.incident}">${mark.incident}<//>`}
      </li>`)}
    </ul>
    ${marks.length > MOST_MARKS && html`<p class="quiet">The newest ${MOST_MARKS}.</p>`}
  </details>`;
}

export function Curves({ job, curve, incidents, others }) {
  const [compared, setCompared] = useState("");
  const [isLog, setLog] = useState(false);
  const [range, setRange] = useState(null);
  const found = usePolled(async () => {
    if (compared === "") return null;
    const read = await get(["jobs", compared, "curve"]);
    return { name: compared, columns: withoutGivenUp(read.columns) };
  }, [compared], OTHER_S);
  // What was read last may be of the job that was chosen before.
  const other = found.value?.name === compared ? found.value.columns : null;
  const curves = { name: job.job_id, own: curve, otherName: compared, other };
  const marks = useMemo(() => marksOf(job, curve, incidents), [job, curve, incidents]);
  const charts = useMemo(() => ({
    loss: lossOf(curves), norm: one("grad_norm", "gradient norm", curves), speed: one("tokens_per_s", "tokens/s", curves),
    step: one("duration_s", "step time", curves), parts: partsOf(curves),
  }), [curve, other]);
  const steps = charts.step.data[0];
  const zoomed = (chosen) => setRange(rangeWithin(steps, chosen));
  const shared = { sync: job.job_id, marks, range, zoomed };
  const hasParts = charts.parts.data.slice(1).some((values) => values.some((value) => value !== null));
  return html`<section aria-labelledby="curves">
    <div class="head">
      <h2 id="curves">Curves</h2>
      <label>Compare with <select value=${compared} onChange=${(event) => setCompared(event.target.value)}>
        <option value="">no other</option>
        ${others.map((each) => html`<option value=${each}>${each}</option>`)}
      </select></label>
      <label><input type="checkbox" checked=${isLog} onChange=${(event) => setLog(event.target.checked)} /> logarithmic loss</label>
      <${Zoom} steps=${steps} range=${range} zoomed=${zoomed} />
      <span class="quiet">Drag to zoom, double click to see all.</span>
      ${compared !== "" && found.error && html`<span class="quiet" role="status">${compared} cannot be read: ${found.error.message}</span>`}
    </div>
    <div class="charts">
      <${Chart} ...${shared} ...${charts.loss} title="Loss" format=${number} isLog=${isLog} />
      <${Chart} ...${shared} ...${charts.norm} title="Gradient norm" format=${number} />
      <${Chart} ...${shared} ...${charts.speed} title="Tokens per second" format=${short} />
      <${Chart} ...${shared} ...${charts.step} title="Step time" format=${duration} />
      ${hasParts && html`<${Chart} ...${shared} ...${charts.parts} title="Parts of a step" format=${duration} />`}
    </div>
    <${Marks} marks=${marks} />
  </section>`;
}
