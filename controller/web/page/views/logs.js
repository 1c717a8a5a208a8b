// Output of a job's ranks, followed: the newest lines, or those of whole logs that match a pattern,
// which each node looks for in its own. Lines that were read can be searched here, too.

import { follow } from "/page/api.js";
import { moment } from "/page/format.js";
import { Entry, Failure, html, useEffect, useRef, useState } from "/page/ui.js";
import { attemptsUpTo } from "/page/views/attempts.js";

// Lines that are kept; older ones are at `outlast logs`.
const MOST_LINES = 5000;
const TAIL_BYTES = 65536;
const SINCE = [["", "any time"], [600, "the last 10 minutes"], [3600, "the last hour"], [86400, "the last day"]];

export function Logs({ job }) {
  const [isOpen, setOpen] = useState(false);
  return html`<section aria-labelledby="logs">
    <h2 id="logs">Logs</h2>
    ${isOpen ? html`<${OpenLogs} job=${job} />` : html`<button onClick=${() => setOpen(true)}>Show the logs</button>`}
  </section>`;
}

/** Puts chunks of many ranks together into whole lines, each with its time and whose it is. */
function lineMaker(isOfAll) {
  // A rank's last line may not be whole yet.
  const rests = new Map();
  return (chunk) => {
    const key = `${chunk.attempt}/${chunk.rank}`;
    const found = ((rests.get(key) ?? "") + chunk.text).split("\n");
    rests.set(key, found.pop());
    const when = chunk.at_s ? `${moment(chunk.at_s)} ` : "";
    const whose = isOfAll ? `attempt ${chunk.attempt} ${chunk.node} rank ${chunk.rank}` : `rank ${chunk.rank}`;
    return found.map((line) => `${when}[${whose}] ${line}`);
  };
}

function OpenLogs({ job }) {
  const [rank, setRank] = useState("");
  const [attempt, setAttempt] = useState("");
  const [since, setSince] = useState("");
  const [pattern, setPattern] = useState("");
  const [search, setSearch] = useState("");
  const [lines, setLines] = useState([]);
  const [error, setError] = useState(null);
  const box = useRef(null);
  useEffect(() => {
    setLines([]);
    setError(null);
    let linesOf = lineMaker(attempt === "all");
    const add = (more) => setLines((before) => [...before, ...more].slice(-MOST_LINES));
    const chunk = (each) => {
      if (!each.missing) add(linesOf(each));
      else if (each.missing.reason) add([`[${each.node}] ${each.missing.reason}`]);
    };
    const reopened = () => {
      linesOf = lineMaker(attempt === "all");
      setLines([]);
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
  const shown = needle ? lines.filter((line) => line.toLowerCase().includes(needle)) : lines;
  useEffect(() => {
    const { current } = box;
    // Who has scrolled up reads there.
    if (current.scrollHeight - current.scrollTop - current.clientHeight < 200) current.scrollTop = current.scrollHeight;
  }, [shown.length]);
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
    <pre class="logs" ref=${box} tabindex="0" aria-label="Output of ranks">${shown.join("\n") || none}</pre>`;
}
