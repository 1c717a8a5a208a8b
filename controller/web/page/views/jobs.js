// All jobs, newest first.

import { get } from "/page/api.js";
import { ago, count, mfu, number, percent, short } from "/page/format.js";
import { Pages, usePages } from "/page/paging.js";
import { Empty, Failure, html, Link, Loading, Progress, State, Table, usePolled } from "/page/ui.js";

const COLUMNS = [
  { name: "Job", cell: (job) => html`<${Link} to="/jobs/${job.job_id}">${job.job_id}<//>` },
  {
    name: "State",
    cell: (job) => html`<${State} state=${job.state} />${job.queue_position > 0 && html` <small>#${job.queue_position} in the queue</small>`}`,
  },
  {
    name: "Progress",
    cell: (job) => html`<span class="progress">
      <${Progress} done=${job.step} total=${job.total_steps} label="steps of ${job.job_id}" />
      <span>${count(job.step)} / ${count(job.total_steps)}</span>
    </span>`,
  },
  { name: "Loss", isNumber: true, cell: (job) => number(job.loss) },
  { name: "Tokens/s", isNumber: true, cell: (job) => short(job.tokens_per_s || null) },
  { name: "MFU", isNumber: true, cell: (job) => percent(mfu(job)) },
  { name: "ETTR", isNumber: true, cell: (job) => percent(job.ettr) },
  { name: "Attempt", isNumber: true, cell: (job) => count(job.attempt) },
  { name: "Submitted", isNumber: true, cell: (job) => ago(job.submitted_s) },
  { name: "Why", cell: (job) => html`<span class="why" title=${job.reason}>${job.reason}</span>` },
];

const OWNER = { name: "Owner", cell: (job) => job.owner };

export function JobsView() {
  const pages = usePages();
  const after = pages.after || undefined;
  const { value, error } = usePolled(() => get(["jobs"], { after }), [after]);
  const jobs = value?.jobs ?? [];
  // Where nobody logs in there are no owners.
  const columns = jobs.some((job) => job.owner) ? [COLUMNS[0], OWNER, ...COLUMNS.slice(1)] : COLUMNS;
  const running = jobs.filter((job) => job.state === "RUNNING");
  return html`<h1>Jobs</h1>
    <${Failure} error=${error} />
    ${value === null && !error && html`<${Loading} />`}
    ${value !== null && jobs.length === 0 && html`<${Empty} title="No jobs yet">
      <${Link} to="/submit">Submit one here<//>, or with <code>outlast submit job.yaml</code>.
    <//>`}
    ${jobs.length > 0 && html`<p class="quiet">
        ${running.length} running of ${jobs.length}${value.next || after ? " on this page" : ""}
      </p>
      <${Table} caption="Jobs" columns=${columns} rows=${jobs} rowKey=${(job) => job.job_id} />`}
    <${Pages} pages=${pages} next=${value?.next} label="jobs" />`;
}
