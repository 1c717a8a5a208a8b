// Lists that come in pages: which one is looked at, and the buttons to the others.

import { html, useState } from "/page/ui.js";

/**
 * The place of the page that is looked at, for `after`, and what leads to others. `first` goes back
 * to the first page, as when something else is listed.
 */
export function usePages() {
  const [places, setPlaces] = useState([""]);
  return {
    after: places.at(-1),
    number: places.length,
    first: () => setPlaces([""]),
    back: () => setPlaces((before) => (before.length > 1 ? before.slice(0, -1) : before)),
    on: (next) => setPlaces((before) => [...before, next]),
  };
}

/** Nothing where there is one page only. */
export function Pages({ pages, next, label }) {
  if (pages.number === 1 && !next) return null;
  return html`<nav class="actions" aria-label="Pages of ${label}">
    <button disabled=${pages.number === 1} onClick=${pages.back}>Previous</button>
    <span class="quiet">Page ${pages.number}</span>
    <button disabled=${!next} onClick=${() => pages.on(next)}>Next</button>
  </nav>`;
}
