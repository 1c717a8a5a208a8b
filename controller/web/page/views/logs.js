// Output of a job's ranks, followed: the newest lines, or those of whole logs that match a pattern,
// which each node looks for in its own. Lines that were read can be searched here, too.

import { follow } from "/page/api.js";
import { moment } from "/page/format.js";
import { Entry, Failure, html, useEffect, useLayoutEffect, useRef, useState } from "/page/ui.js";
import { attemptsUpTo } from "/page/views/attempts.js";

// Lines that are kept; older ones are at `outlast logs`.
const MOST_LINES = 5000;
const TAIL_BYTES = 65536;
// A line that does not end is cut here, as `outlast logs` does.
const MOST_CHARACTERS = 65536;
// About two lines: who has scrolled up by less than that is still at the bottom.
const BOTTOM_PX = 40;
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
  const take = (chunk) => {
    const key = `${chunk.attempt}/${chunk.rank}`;
    const before = begun.get(key);
    const found = ((before?.text ?? "") + chunk.text).split("\n");
    const whole = found.map((line, index) => labelled(index === 0 && before ? before : chunk, line));
    const rest = found.at(-1);
    if (rest.length > MOST_CHARACTERS || rest === "") begun.delete(key);
    else begun.set(key, { ...(found.length === 1 && before ? before : chunk), text: rest });
    return rest.length > MOST_CHARACTERS ? whole : whole.slice(0, -1);
  };
  return { take, open: () => [...begun.values()].map((each) => labelled(each, each.text)) };
}

const NO_LINES = { whole: [], open: [] };

/** Whether the end of a box is seen; it is, too, before there is a box. */
function isAtBottom(box) {
  return box === null || box.scrollHeight - box.scrollTop - box.clientHeight < BOTTOM_PX;
}

function OpenLogs({ job }) {
  const [rank, setRank] = useState("");
  const [attempt, setAttempt] = useState("");
  const [since, setSince] = useState("");
  const [pattern, setPattern] = useState("");
  const [search, setSearch] = useState("");
  const [{ whole, open }, setLines] = useState(NO_LINES);
  const [error, setError] = useState(null);
  const box = useRef(null);
  useEffect(() => {
    setLines(NO_LINES);
    setError(null);
    let lines = lineMaker(attempt === "all");
    const add = (more) => setLines((before) => ({ whole: [...before.whole, ...more].slice(-MOST_LINES), open: lines.open() }));
    const chunk = (each) => {
      if (!each.missing) add(lines.take(each));
      else if (each.missing.reason) add([`[${each.node}] ${each.missing.reason}`]);
    };
    const reopened = () => {
      lines = lineMaker(attempt === "all");
      setLines(NO_LINES);
      setError(null);
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
  }, [job.job_id, job.attempt, rank, attempt, since, pattern]);
  const needle = search.toLowerCase();
  const shown = [...whole, ...open].filter((line) => line.toLowerCase().includes(needle));
  const text = shown.join("\n");
  // Before the new lines are in: who has scrolled up reads there.
  const wasAtBottom = isAtBottom(box.current);
  useLayoutEffect(() => {
    if (wasAtBottom) box.current.scrollTop = box.current.scrollHeight;
  }, [text]);
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
      <span class="quiet">${shown.length} lines</span>
    </div>
    <${Failure} error=${error} />
    <pre class="logs" ref=${box} tabindex="0" aria-label="Output of ranks">${text || none}</pre>`;
}
