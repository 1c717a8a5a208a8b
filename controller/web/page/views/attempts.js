// Which attempt of a job is looked at: the newest, or one before, as long as its nodes keep it.

import { html, navigate } from "/page/ui.js";

const MOST_KEPT = 32;

/** The newest attempts, which may still be kept. */
export function attemptsUpTo(newest) {
  return Array.from({ length: Math.min(newest, MOST_KEPT) }, (_, before) => newest - before);
}

/** The path of a picture of a job: of its newest attempt where none is named. */
export function pathOf(name, attempt, picture) {
  return attempt ? `/jobs/${name}/attempts/${attempt}/${picture}` : `/jobs/${name}/${picture}`;
}

export function AttemptChoice({ name, attempt, newest, picture }) {
  if (!(newest >= 2)) return null;
  // Its own number names the newest, too.
  const value = Number(attempt) === newest ? "" : attempt ?? "";
  const kept = attemptsUpTo(newest).slice(1);
  const shown = value === "" || kept.includes(Number(value)) ? kept : [...kept, value];
  return html`<label>Attempt <select value=${value} onChange=${(event) => navigate(pathOf(name, event.target.value, picture))}>
    <option value="">newest (${newest})</option>
    ${shown.map((each) => html`<option key=${each} value=${each}>${each}</option>`)}
  </select></label>`;
}
