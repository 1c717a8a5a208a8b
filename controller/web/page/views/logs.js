// Output of a job's ranks, followed: the newest lines, or those of whole logs that match a pattern,
// which each node looks for in its own. Lines that were read can be searched here, too.

import { follow } from "/page/api.js";
import { moment } from "/page/format.js";
import { LogBox } from "/page/logbox.js";
import { Entry, Failure, html, useEffect, useRef, useState } from "/page/ui.js";
import { attemptsUpTo } from "/page/views/attempts.js";

const TAIL_BYTES = 65536;
// A line that does not end is cut here, as `outlast logs` does.
const MOST_CHARACTERS = 65536;
// Lines that have not ended, of all ranks together: the oldest of more is taken as one that has.
const [MOST_OPEN, MOST_OPEN_CHARACTERS] = [256, 2 ** 20];
const SINCE = [["", "any time"], [600, "the last 10 minutes"], [3600, "the last hour"], [86400, "the last day"]];

export function Logs({ job }) {
  const [isOpen, setOpen] = useState(false);
  return html`<section aria-labelledby="logs">
    <h2 id="logs">Logs</h2>
    ${isOpen ? html`<${OpenLogs} job=${job} />` : html`<button onClick=${() => setOpen(true)}>Show the logs</button>`}
  </section>`;
}

/**
 * Puts chunks of many ranks together into lines, each with the time when it was begun and whose it is.
 *
 * `take` gives the lines that a chunk completes; `open` the last lines of ranks that have not ended: a
 * rank that is killed, or that shows its progress, leaves one.
 */
export function lineMaker(isOfAll) {
  const begun = new Map();
  const labelled = ({ attempt, node, rank, at_s: atS }, line) => {
    const whose = isOfAll ? `attempt ${attempt} ${node} rank ${rank}` : `rank ${rank}`;
    return `${atS ? `${moment(atS)} ` : ""}[${whose}] ${line}`;
  };
  const cut = () => {
    const lines = [];
    let characters = [...begun.values()].reduce((sum, each) => sum + each.text.length, 0);
    for (const [key, each] of begun) {
      if (begun.size <= MOST_OPEN && characters <= MOST_OPEN_CHARACTERS) break;
      lines.push(labelled(each, each.text));
      characters -= each.text.length;
      begun.delete(key);
    }
    return lines;
  };
  const take = (chunk) => {
    const key = `${chunk.attempt}/${chunk.rank}`;
    const before = begun.get(key);
    const found = ((before?.text ?? "") + chunk.text).split("\n");
    const whole = found.map((line, index) => labelled(index === 0 && before ? before : chunk, line));
    const rest = found.at(-1);
    if (rest.length > MOST_CHARACTERS || rest === "") begun.delete(key);
    else begun.set(key, { ...(found.length === 1 && before ? before : chunk), text: rest });
    return [...(rest.length > MOST_CHARACTERS ? whole : whole.slice(0, -1)), ...cut()];
  };
  return { take, open: () => [...begun.values()].map((each) => labelled(each, each.text)) };
}

function OpenLogs({ job }) {
  const [rank, setRank] = useState("");
  const [attempt, setAttempt] = useState("");
  const [since, setSince] = useState("");
  const [pattern, setPattern] = useState("");
  const [search, setSearch] = useState("");
  const [{ shown, isHeld }, setTold] = useState({ shown: 0, isHeld: false });
  const [error, setError] = useState(null);
  const [box, inside, logBox] = [useRef(null), useRef(null), useRef(null)];
  const chosen = [job.job_id, rank, attempt, since, pattern];
  useEffect(() => {
    logBox.current = new LogBox(box.current, inside.current, setTold);
    return () => logBox.current.end();
  }, chosen);
  useEffect(() => logBox.current.show(search.toLowerCase()), [...chosen, search]);
  useEffect(() => {
    setError(null);
    let lines;
    const reopened = () => {
      lines = lineMaker(attempt === "all");
      logBox.current.again();
      setError(null);
    };
    // Of a new attempt as of a new connection: who reads what the last one has left goes on with that.
    reopened();
    const chunk = (each) => {
      if (!each.missing) logBox.current.add(lines.take(each), lines.open());
      else if (each.missing.reason) logBox.current.add([`[${each.node}] ${each.missing.reason}`], lines.open());
    };
    const failed = (answer) => {
      setError(answer.error);
      // What is wrong with a pattern stays wrong; anything else is tried again.
      if (answer.error.fields?.length > 0) end();
    };
    const query = () => ({
      rank,
      attempt,
      grep: pattern,
      since_s: since && Date.now() / 1000 - since,
      tail_bytes: pattern || since ? "" : TAIL_BYTES,
    });
    const end = follow(["jobs", job.job_id, "logs", "events"], query, { chunk, failed }, { reopened });
    return end;
  }, [...chosen, job.attempt]);
  const none = pattern || since || search ? "No line that was read is of this kind." : "Nothing was written yet.";
  return html`<div class="head">
      <label>Rank <${Entry} type="number" min="0" max=${job.ranks - 1} placeholder="all" value=${rank} onEnter=${setRank} /></label>
      <label>Attempt <select value=${attempt} onChange=${(event) => setAttempt(event.target.value)}>
        <option value="">newest</option>
        <option value="all">all that are kept</option>
        ${attemptsUpTo(job.attempt).map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
      </select></label>
      <label>Written in <select value=${since} onChange=${(event) => setSince(event.target.value)}>
        ${SINCE.map(([seconds, name]) => html`<option key=${name} value=${seconds}>${name}</option>`)}
      </select></label>
      <label>Search whole logs <${Entry} type="search" placeholder="regular expression" value=${pattern} onEnter=${setPattern} /></label>
      <label>Show only <input type="search" placeholder="text" value=${search}
        onInput=${(event) => setSearch(event.target.value)} /></label>
      <span class="quiet">${shown} lines${isHeld && ", new ones wait while text is selected"}</span>
    </div>
    <${Failure} error=${error} />
    <pre class="logs" ref=${box} tabindex="0" role="log" aria-live="off" aria-label="Output of ranks"><span class="lines" ref=${inside}></span>${shown === 0 && none}</pre>`;
}
