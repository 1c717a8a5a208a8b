// One job: what it does and why, its curves, faults, time, logs and spec.

import { follow, get, post, retryMs } from "/page/api.js";
import { emptyCurve, withoutGivenUp, withReports } from "/page/curve.js";
import {
  ago, bytes, count, duration, ENDED, hfu, mfu, moment, number, percent, short, words,
} from "/page/format.js";
import {
  Actions, Failure, html, Link, Loading, Progress, Split, State, Table, Tile, useEffect, usePolled, useState,
} from "/page/ui.js";
import { Curves, STEP_PARTS } from "/page/views/curves.js";
import { Checkpoints, Strip } from "/page/views/history.js";
import { Logs } from "/page/views/logs.js";
import { Trends } from "/page/views/trends.js";

const SECONDS = {
  productive: "green", checkpoint: "sky", redo: "orange", restore: "blue", detect: "red",
  diagnose: "purple", provision: "yellow", paused: "grey",
};
// Incidents that a page shows; older ones have a page of their own.
const NEWEST = 50;
const HISTORY_S = 60;

/** The job and its curve, followed live. */
function useJob(name) {
  const [job, setJob] = useState(null);
  const [curve, setCurve] = useState(emptyCurve());
  const [error, setError] = useState(null);
  const [isLive, setLive] = useState(true);
  useEffect(() => {
    let end = () => {};
    let isOver = false;
    let timer = 0;
    let last = 0;
    // While the curve is read, with the reports that have come since that began.
    let reading = { reports: [] };
    const again = (work, failure) => {
      const ms = retryMs(failure);
      if (ms !== null) timer = setTimeout(work, ms);
    };
    const handlers = {
      // A brief one lacks what has not changed.
      job: (next) => setJob((before) => ({ ...next, nodes: next.nodes ?? before.nodes, spec: next.spec ?? before.spec })),
      steps: (reports) => {
        last = Math.max(last, ...reports.map((report) => report.step));
        reading.reports.push(...reports);
        setCurve((before) => withReports(before, reports));
      },
    };
    // A stream begins behind the last step: steps before it may have been redone while there was none.
    const readAgain = async () => {
      clearTimeout(timer);
      const mine = (reading = { reports: [] });
      try {
        const { columns } = await get(["jobs", name, "curve"]);
        if (!isOver && mine === reading) setCurve(withReports(withoutGivenUp(columns), mine.reports));
      } catch (failure) {
        if (!isOver && mine === reading) again(readAgain, failure);
      }
    };
    const begin = async () => {
      try {
        const [found, { columns }] = await Promise.all([get(["jobs", name]), get(["jobs", name, "curve"])]);
        if (isOver) return;
        setError(null);
        setJob(found.job);
        setCurve(withoutGivenUp(columns));
        last = columns.step.at(-1) ?? 0;
        end = follow(["jobs", name, "events"], () => ({ after_step: last }), handlers, { connected: setLive, reopened: readAgain });
      } catch (failure) {
        if (isOver) return;
        setError(failure);
        again(begin, failure);
      }
    };
    begin();
    return () => {
      isOver = true;
      clearTimeout(timer);
      end();
    };
  }, [name]);
  return { job, curve, error, isLive };
}

function Head({ job, isLive }) {
  const can = (verb) => () => post(["jobs", job.job_id, verb]);
  const isEnded = ENDED.includes(job.state);
  const actions = [
    !isEnded && job.state !== "PAUSED" && { name: "Pause", run: can("pause") },
    job.state === "PAUSED" && { name: "Resume", run: can("resume") },
    !isEnded && { name: "Cancel", run: can("cancel"), isGrave: true, ask: `Cancel ${job.job_id}? It cannot go on after that.` },
  ].filter(Boolean);
  return html`<div class="head">
      <h1>${job.job_id}</h1>
      <span aria-live="polite"><${State} state=${job.state} /></span>
      ${!isLive && !isEnded && html`<span class="quiet">connection lost, trying again…</span>`}
      <${Link} to="/jobs/${job.job_id}/ranks">Its ranks<//>
      <${Link} to="/jobs/${job.job_id}/heat-map">Heat map<//>
      <${Link} to="/jobs/${job.job_id}/timeline">A step<//>
      <${Actions} actions=${actions} />
    </div>
    <p class="reason">${job.reason} <span class="quiet">since ${moment(job.state_since_s)}</span></p>
    ${job.open_incident && html`<p class="banner warn">
      Open incident: <${Link} to="/incidents/${job.open_incident}">${job.open_incident}<//>
    </p>`}
    ${job.error && html`<pre class="traceback" tabindex="0">${job.error}</pre>`}`;
}

function Tiles({ job, curve }) {
  const recent = curve.duration_s.slice(-20).filter((value) => value !== null);
  const stepS = recent.length ? recent.reduce((sum, value) => sum + value, 0) / recent.length : null;
  const evaluated = curve.eval_loss.findLast((value) => value !== null);
  return html`<dl class="tiles">
    <${Tile} label="Step" value="${count(job.step)} / ${count(job.total_steps)}"
      detail=${job.time_left_s !== null && html`<span>${duration(job.time_left_s)} left</span>`} />
    <${Tile} label="Loss" value=${number(job.loss)}
      detail=${evaluated !== undefined ? `held out ${number(evaluated)}` : ""} />
    ${job.perplexity !== null && html`<${Tile} label="Perplexity" value=${number(job.perplexity)}
      detail=${evaluated !== undefined ? `held out ${number(Math.exp(evaluated))}` : ""} title="exp(loss)" />`}
    ${job.epochs !== null && html`<${Tile} label="Epochs" value=${number(job.epochs, 3)} detail="of the training data" />`}
    <${Tile} label="Tokens/s" value=${short(job.tokens_per_s || null)} detail=${stepS ? `${duration(stepS)} a step` : ""} />
    <${Tile} label="MFU" value=${percent(mfu(job))} detail=${job.device || `${short(job.model_flops_per_s || null)}FLOP/s`} />
    <${Tile} label="HFU" value=${percent(hfu(job))} detail="${short(job.hardware_flops_per_s || null)}FLOP/s"
      title="Hardware FLOPs utilization: as the MFU, with what is computed a second time" />
    <${Tile} label="ETTR" value=${percent(job.ettr)} detail="last hour ${percent(job.ettr_last_hour)}"
      title="Productive share of the time since it was submitted" />
    <${Tile} label="Attempt" value=${count(job.attempt)} detail="${count(job.restarts)} restarts, ${count(job.retry_left)} retries left" />
    <${Tile} label="Committed step" value=${count(job.committed_step)} detail="in storage" />
    <${Tile} label="Ranks" value=${count(job.ranks)} detail="${job.nodes?.length ?? 0} nodes" />
  </dl>
  <${Progress} done=${job.step} total=${job.total_steps} label="Steps done" />`;
}

function Times({ job }) {
  const seconds = Object.entries(job.seconds).map(([name, value]) => ({ name, value, color: SECONDS[name] ?? "grey" }));
  const order = Object.keys(SECONDS);
  seconds.sort((a, b) => order.indexOf(a.name) - order.indexOf(b.name));
  const use = job.step_use;
  const parts = Object.entries(STEP_PARTS).map(([part, [name, color]]) => ({ name, value: use?.split?.[part] ?? 0, color }));
  return html`<div class="columns">
    <section aria-labelledby="times">
      <h2 id="times">Where its time went</h2>
      <${Split} parts=${seconds} format=${duration} label="Seconds since it was submitted" />
    </section>
    <section aria-labelledby="step">
      <h2 id="step">A step now</h2>
      <${Split} parts=${parts} format=${duration} label="Seconds of a step, mean over ranks" />
      ${use && html`<p class="quiet">
        ${use.expected_bubble > 0 && `Bubble ${percent(use.bubble)} (in theory ${percent(use.expected_bubble)}), `}
        peak memory ${bytes(use.peak_memory_bytes)} (planned ${bytes(use.expected_memory_bytes)})
      </p>`}
    </section>
  </div>`;
}

/** Attempts, incidents and checkpoints on one axis of time, above the table of incidents. */
function Course({ job, history, incidents }) {
  const columns = [
    { name: "Incident", cell: (each) => html`<${Link} to="/incidents/${each.incident_id}">${each.incident_id}<//>` },
    { name: "State", cell: (each) => html`<${State} state=${each.state} kind="incident" />` },
    { name: "Opened", cell: (each) => moment(each.opened_s) },
    { name: "Cause", cell: (each) => words(each.cause) },
    { name: "Action", cell: (each) => (each.is_note ? "logged only" : words(each.action)) },
    { name: "Nodes", cell: (each) => each.culprit_nodes.join(", ") },
    { name: "Found in", isNumber: true, cell: (each) => duration(each.detection_s) },
    { name: "Back after", isNumber: true, cell: (each) => duration(each.recovery_s) },
    { name: "Steps redone", isNumber: true, cell: (each) => count(each.steps_redone) },
  ];
  return html`<section aria-labelledby="course">
      <h2 id="course">What happened when</h2>
      <${Strip} job=${job} history=${history} incidents=${incidents} />
    </section>
    <section aria-labelledby="faults">
      <h2 id="faults">Incidents</h2>
      ${incidents.length === 0
        ? html`<p class="quiet">None.</p>`
        : html`<${Table} caption="Incidents" columns=${columns} rows=${[...incidents].reverse()} rowKey=${(each) => each.incident_id} />`}
    </section>`;
}

function Facts({ job }) {
  return html`<section aria-labelledby="facts">
    <h2 id="facts">Spec and places</h2>
    <dl class="facts">
      <dt>Submitted</dt><dd>${moment(job.submitted_s)} (${ago(job.submitted_s)})${job.owner && ` by ${job.owner}`}</dd>
      <dt>Priority</dt><dd>${job.priority}${job.yields > 0 && `; made room for other jobs ${job.yields} ${job.yields === 1 ? "time" : "times"}`}</dd>
      <dt>Nodes</dt><dd>${(job.nodes ?? []).slice(0, 64).join(", ") || "none"}${job.nodes?.length > 64 ? " …" : ""}</dd>
      <dt>Arithmetic</dt><dd>${job.environment || "not known yet"}</dd>
      ${job.data_left_out.length > 0 && html`<dt>Data left out</dt><dd>${job.data_left_out.join("; ")}</dd>`}
    </dl>
    <details><summary>Spec</summary><pre tabindex="0">${JSON.stringify(job.spec, null, 2)}</pre></details>
  </section>`;
}

export function JobView({ name }) {
  const { job, curve, error, isLive } = useJob(name);
  const incidents = usePolled(() => get(["incidents"], { job: name, newest: NEWEST, brief: true }), [name]);
  const history = usePolled(() => get(["jobs", name, "history"]), 
    // Nothing else changes it.
    [name, job?.state, job?.attempt, job?.committed_step], HISTORY_S);
  const jobs = usePolled(() => get(["jobs"]), [name], 30);
  if (error) return html`<h1>${name}</h1><${Failure} error=${error} />`;
  if (job === null) return html`<h1>${name}</h1><${Loading} />`;
  const found = incidents.value?.incidents ?? [];
  const passed = history.value ?? { states: [], checkpoints: [] };
  const others = (jobs.value?.jobs ?? []).map((each) => each.job_id).filter((each) => each !== name);
  return html`<${Head} job=${job} isLive=${isLive} />
    <${Tiles} job=${job} curve=${curve} />
    <${Curves} job=${job} curve=${curve} incidents=${found} others=${others} />
    <${Times} job=${job} />
    <${Course} job=${job} history=${passed} incidents=${found} />
    <${Checkpoints} job=${job} />
    <${Trends} job=${job} />
    <${Logs} job=${job} />
    <${Facts} job=${job} />`;
}
