// What a job went through, on one axis of time: its attempts, incidents and checkpoints.

import { get } from "/page/api.js";
import { bytes, count, duration, moment, toneOf, words } from "/page/format.js";
import { Pages, usePages } from "/page/paging.js";
import { Failure, html, Link, Table, usePolled, useRef, useState } from "/page/ui.js";
import { pathOf } from "/page/views/attempts.js";

// Of each kind; more cannot be told apart on a screen.
const MOST = 200;
const PAGE = 20;
const CHECKPOINTS_S = 60;
const AT_WORK = ["STARTING", "RUNNING", "SUSPENDING"];
const ROWS = ["Attempts", "Incidents", "Checkpoints"];

/** Each attempt from its start until its workers have ended, with what came then. */
function attemptsOf(states, nowS) {
  const attempts = [];
  for (const [at, span] of states.entries()) {
    if (span.attempt < 1 || !AT_WORK.includes(span.state)) continue;
    const last = attempts.at(-1);
    const piece = { state: span.state, fromS: span.from_s, untilS: span.until_s ?? nowS };
    const next = span.until_s === null ? null : states[at + 1];
    if (last?.number === span.attempt) {
      last.pieces.push(piece);
      last.untilS = piece.untilS;
      // Why it was stopped says more than what came of it.
      if (span.state !== "SUSPENDING") last.next = next;
    } else {
      attempts.push({ number: span.attempt, fromS: piece.fromS, untilS: piece.untilS, pieces: [piece], next });
    }
  }
  return attempts;
}

function itemsOf(history, incidents, nowS) {
  const attempts = attemptsOf(history.states, nowS).slice(-MOST).map((each) => {
    const end = each.next ? `then ${each.next.state}: ${each.next.reason}` : `is ${each.pieces.at(-1).state}`;
    return {
      key: `attempt ${each.number}`, row: 0, attempt: each.number, fromS: each.fromS, untilS: each.untilS, pieces: each.pieces, label: String(each.number),
      text: `Attempt ${each.number}, ${moment(each.fromS)}, for ${duration(each.untilS - each.fromS)}; ${end}`,
    };
  });
  const faults = incidents.slice(-MOST).map((each) => ({
    key: each.incident_id, row: 1, fromS: each.opened_s, untilS: each.closed_s ?? nowS, tone: each.closed_s ? "idle" : "bad", incident: each.incident_id,
    text: `Incident ${each.incident_id}, ${moment(each.opened_s)}: ${words(each.cause)}, ${each.state}`
      + (each.closed_s ? ` after ${duration(each.closed_s - each.opened_s)}` : ""),
  }));
  const ticks = history.checkpoints.filter((each) => each.committed_s > 0).slice(-MOST).map((each) => ({
    key: `checkpoint ${each.step} ${each.committed_s}`, row: 2, fromS: each.committed_s, untilS: each.committed_s, tone: each.is_given_up ? "idle" : "good",
    text: `Checkpoint of step ${count(each.step)}, committed ${moment(each.committed_s)}, ${bytes(each.size_bytes)}`,
  }));
  return [...attempts, ...faults, ...ticks].sort((a, b) => a.fromS - b.fromS || a.row - b.row);
}

/** One item has the focus at a time; the arrow keys go to the one before and the next. */
export function Strip({ job, history, incidents }) {
  // By its name: others may come before it.
  const [chosen, choose] = useState(null);
  const box = useRef(null);
  const nowS = job.finished_s ?? Date.now() / 1000;
  const items = itemsOf(history, incidents, nowS);
  const found = items.findIndex((each) => each.key === chosen);
  const shown = found < 0 ? null : found;
  if (items.length === 0) return html`<p class="quiet">Nothing yet.</p>`;
  const fromS = job.submitted_s;
  const share = (atS) => Math.min(100, Math.max(0, (100 * (atS - fromS)) / (nowS - fromS || 1)));
  const place = (each) => ({ left: `${share(each.fromS)}%`, width: `${share(each.untilS) - share(each.fromS)}%` });
  const pressed = (event) => {
    // What has the focus: a second key may come before the first one is shown.
    const now = Number(event.target.closest("button").dataset.at);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: items.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const there = Math.min(items.length - 1, Math.max(0, next));
    box.current.querySelector(`[data-at="${there}"]`).focus();
  };
  const Item = (index) => {
    const each = items[index];
    return html`<button type="button" key=${each.key} class="item ${each.tone ?? "attempt"} ${index === shown ? "chosen" : ""}" style=${place(each)}
      data-at=${index} tabindex=${index === (shown ?? 0) ? 0 : -1} aria-label=${each.text} title=${each.text}
      onFocus=${() => choose(each.key)} onClick=${() => choose(each.key)}>
      ${each.pieces?.map((piece) => html`<span class=${toneOf(piece.state)} style=${{ flexGrow: piece.untilS - piece.fromS }}></span>`)}
      ${each.label && html`<b aria-hidden="true">${each.label}</b>`}
    </button>`;
  };
  return html`<div class="strip" ref=${box} role="group" onKeyDown=${pressed}
      aria-label="Attempts, incidents and checkpoints over time; the arrow keys go from one to the next">
      ${ROWS.map((name, row) => html`<span class="quiet" aria-hidden="true">${name}</span>
        <div class="line">${items.map((each, index) => each.row === row && Item(index))}</div>`)}
    </div>
    <p class="ends quiet"><span>${moment(fromS)}</span><span>${job.finished_s ? moment(nowS) : "now"}</span></p>
    <p class="chosen" aria-live="polite">
      ${shown === null ? html`<span class="quiet">Choose one to see what it was.</span>` : items[shown].text}
      ${shown !== null && items[shown].incident && html` <${Link} to="/incidents/${items[shown].incident}">Its page<//>`}
      ${shown !== null && items[shown].attempt && html`. <${Link} to=${pathOf(job.job_id, items[shown].attempt, "timeline")}>What its ranks did last<//>,${" "}
        <${Link} to=${pathOf(job.job_id, items[shown].attempt, "heat-map")}>its heat map<//>`}
    </p>`;
}

/** Checkpoints that were committed, as the controller has heard of them; newest first, in pages. */
export function Checkpoints({ job }) {
  const pages = usePages();
  const { after } = pages;
  const { value, error } = usePolled(() => get(["jobs", job.job_id, "history"], { only: "checkpoints", most: PAGE, after }),
    // Nothing else changes them.
    [job.job_id, job.committed_step, job.attempt, after], CHECKPOINTS_S);
  const columns = [
    { name: "Step", isNumber: true, cell: (each) => count(each.step) },
    { name: "Committed", cell: (each) => moment(each.committed_s) },
    { name: "Size", isNumber: true, cell: (each) => bytes(each.size_bytes) },
    { name: "Saved by", cell: (each) => (each.attempt > 0 ? `attempt ${each.attempt}` : "–") },
    { name: "Which", cell: (each) => (each.is_newest ? html`<b>newest</b>` : each.is_given_up ? "given up" : "") },
  ];
  const newest = [...(value?.checkpoints ?? [])].reverse();
  return html`<section aria-labelledby="checkpoints">
    <h2 id="checkpoints">Checkpoints</h2>
    <p class="quiet">Committed to <code>${job.checkpoint_url}</code>. Older ones are deleted by the spec's rules;${" "}
      <code>outlast ckpt ls ${job.job_id}</code> reads which are there now, and which are pinned.</p>
    <${Failure} error=${error} />
    ${newest.length === 0
      ? html`<p class="quiet">None yet.</p>`
      : html`<${Table} caption="Checkpoints" columns=${columns} rows=${newest} rowKey=${(each) => each.step} />`}
    <${Pages} pages=${pages} next=${value?.next} label="checkpoints" />
  </section>`;
}
