// Output of a job's ranks, followed; searched here, among the lines that were read.

import { follow } from "/page/api.js";
import { html, useEffect, useRef, useState } from "/page/ui.js";

// Lines that are kept; older ones are at `outlast logs`.
const MOST_LINES = 5000;
const TAIL_BYTES = 65536;

export function Logs({ job }) {
  const [isOpen, setOpen] = useState(false);
  return html`<section aria-labelledby="logs">
    <h2 id="logs">Logs</h2>
    ${isOpen ? html`<${OpenLogs} job=${job} />` : html`<button onClick=${() => setOpen(true)}>Show the logs</button>`}
  </section>`;
}

function OpenLogs({ job }) {
  const [rank, setRank] = useState("");
  const [search, setSearch] = useState("");
  const [lines, setLines] = useState([]);
  const box = useRef(null);
  useEffect(() => {
    setLines([]);
    // A rank's last line may not be whole yet.
    const rests = new Map();
    const chunk = (each) => {
      if (each.missing) {
        if (each.missing.reason) add([`[${each.node}] ${each.missing.reason}`]);
        return;
      }
      const text = (rests.get(each.rank) ?? "") + each.text;
      const found = text.split("\n");
      rests.set(each.rank, found.pop());
      add(found.map((line) => `[rank ${each.rank}] ${line}`));
    };
    const add = (more) => setLines((before) => [...before, ...more].slice(-MOST_LINES));
    const reopened = () => {
      rests.clear();
      setLines([]);
    };
    const query = () => ({ rank, tail_bytes: TAIL_BYTES });
    return follow(["jobs", job.job_id, "logs", "events"], query, { chunk }, { reopened });
  }, [job.job_id, job.attempt, rank]);
  const needle = search.toLowerCase();
  const shown = needle ? lines.filter((line) => line.toLowerCase().includes(needle)) : lines;
  useEffect(() => {
    const { current } = box;
    // Who has scrolled up reads there.
    if (current.scrollHeight - current.scrollTop - current.clientHeight < 200) current.scrollTop = current.scrollHeight;
  }, [shown.length]);
  return html`<div class="head">
      <label>Rank <input type="number" min="0" max=${job.ranks - 1} placeholder="all" value=${rank}
        onChange=${(event) => setRank(event.target.value)} /></label>
      <label>Search <input type="search" value=${search} onInput=${(event) => setSearch(event.target.value)} /></label>
      <span class="quiet">${shown.length} lines</span>
    </div>
    <pre class="logs" ref=${box} tabindex="0" aria-label="Output of ranks">${shown.join("\n") || "Nothing was written yet."}</pre>`;
}
