// What all views are made of.

import {
  html, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState,
} from "/page/vendor/preact-htm.js";
import { toneOf, words } from "/page/format.js";

export { html, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };

/** A link inside the page, which the router answers without loading anything. */
export function Link({ to, children, ...rest }) {
  const go = (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
    event.preventDefault();
    navigate(to);
  };
  return html`<a href=${to} onClick=${go} ...${rest}>${children}</a>`;
}

export function navigate(to) {
  history.pushState(null, "", to);
  dispatchEvent(new Event("outlast-navigated"));
}

// A form besides the colour, for those who do not see it.
export const SIGNS = { good: "●", busy: "◐", warn: "▲", bad: "■", idle: "○" };

export function State({ state, kind = "job" }) {
  const tone = toneOf(state, kind);
  return html`<span class="state ${tone}">
    <span aria-hidden="true">${SIGNS[tone]}</span> ${state}
  </span>`;
}

export function Failure({ error, retry }) {
  if (!error) return null;
  return html`<div class="failure" role="alert">
    <p>${error.message}</p>
    ${error.fields?.length > 0 &&
    html`<ul>
      ${error.fields.map(
        (each) => html`<li><code>${each.field}</code> ${each.description}</li>`,
      )}
    </ul>`}
    ${retry && html`<button onClick=${retry}>Try again</button>`}
  </div>`;
}

/** A field whose text is taken once it is entered; what is being typed outlasts the page's changes. */
export function Entry({ value, onEnter, ...rest }) {
  const [typed, setTyped] = useState(null);
  const entered = (event) => {
    setTyped(null);
    onEnter(event.target.value);
  };
  return html`<input ...${rest} value=${typed ?? value} onInput=${(event) => setTyped(event.target.value)} onChange=${entered} />`;
}

export const Loading = () => html`<p class="quiet" role="status">Loading…</p>`;

export const Empty = ({ title, children }) => html`<div class="empty">
  <h2>${title}</h2>
  <p>${children}</p>
</div>`;

export const Tile = ({ label, value, detail, title }) => html`<div class="tile" title=${title}>
  <dt>${label}</dt>
  <dd>${value}${detail && html`<small>${detail}</small>`}</dd>
</div>`;

export function Progress({ done, total, label }) {
  return html`<progress max=${total || 1} value=${done} aria-label=${label}></progress>`;
}

/** Parts of a whole as one bar with its legend; parts of nothing are left out. */
export function Split({ parts, format, label }) {
  const present = parts.filter((part) => part.value > 0);
  const whole = present.reduce((sum, part) => sum + part.value, 0);
  if (whole === 0) return html`<p class="quiet">Nothing yet.</p>`;
  return html`<div class="split" role="group" aria-label=${label}>
    <div class="bar" aria-hidden="true">
      ${present.map(
        (part) => html`<span
          class="part-${part.color}"
          style=${{ flexGrow: part.value / whole }}
          title="${part.name} ${format(part.value)}"
        ></span>`,
      )}
    </div>
    <ul>
      ${present.map(
        (part) => html`<li>
          <span class="dot part-${part.color}" aria-hidden="true"></span>
          ${words(part.name)} <b>${format(part.value)}</b>
          <span class="quiet">${((100 * part.value) / whole).toFixed(1)} %</span>
        </li>`,
      )}
    </ul>
  </div>`;
}

/** Rows under headings. A column is {name, cell(row), isNumber}. */
export function Table({ columns, rows, rowKey, caption }) {
  return html`<div class="table" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <thead>
        <tr>
          ${columns.map(
            (each) => html`<th scope="col" class=${each.isNumber && "number"}>${each.name}</th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr key=${rowKey(row)}>
            ${columns.map(
              (each) => html`<td class=${each.isNumber && "number"}>${each.cell(row)}</td>`,
            )}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/**
 * What `load` gives, again after so many seconds, or as many as are said of what it gave last, while
 * the page is looked at.
 */
export function usePolled(load, dependencies, everyS = 2) {
  const [state, setState] = useState({ value: null, error: null });
  const again = useCallback(load, dependencies);
  useEffect(() => {
    let isOver = false;
    let timer = 0;
    let value = null;
    const look = async () => {
      if (!document.hidden) {
        try {
          value = await again();
          if (!isOver) setState({ value, error: null });
        } catch (error) {
          if (!isOver) setState((before) => ({ value: before.value, error }));
        }
      }
      if (!isOver) timer = setTimeout(look, 1000 * (typeof everyS === "function" ? everyS(value) : everyS));
    };
    look();
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [again]);
  return state;
}

/** Has what uses it painted anew when the theme is another one; gives how often that was. */
export function useThemed() {
  const [times, setTimes] = useState(0);
  useEffect(() => {
    const themed = () => setTimes((before) => before + 1);
    addEventListener("outlast-themed", themed);
    return () => removeEventListener("outlast-themed", themed);
  }, []);
  return times;
}

/** Buttons that change something: disabled while they do, and what failed is said. */
export function Actions({ actions }) {
  const [busy, setBusy] = useState("");
  const [error, setError] = useState(null);
  const act = async (action) => {
    if (action.ask && !confirm(action.ask)) return;
    setBusy(action.name);
    setError(null);
    try {
      await action.run();
    } catch (failure) {
      setError(failure);
    }
    setBusy("");
  };
  return html`<div class="actions">
    ${actions.map(
      (action) => html`<button
        class=${action.isGrave && "grave"}
        disabled=${busy !== ""}
        onClick=${() => act(action)}
      >
        ${busy === action.name ? `${action.name}…` : action.name}
      </button>`,
    )}
    <${Failure} error=${error} />
  </div>`;
}
