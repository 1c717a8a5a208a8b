// The text of a job spec: numbered lines, what is wrong at its line, and what may stand at the cursor.

import { completions, described } from "/page/specschema.js";
import { fieldsOf, lineOf, placeAt } from "/page/spectext.js";
import { html, useLayoutEffect, useMemo, useRef, useState } from "/page/ui.js";

const FEWEST_LINES = 16;
const MOST_OPTIONS = 12;

/** What is wrong, each with its line: where its field is, or where the text is no YAML. */
export function placed(error, problems, text) {
  const fields = fieldsOf(text);
  const all = [...(error?.fields ?? []), ...problems].map((each) => ({ ...each, line: lineOf(fields, each.field) }));
  const at = error?.message.match(/\bline (\d+)/);
  if (at && all.length === 0) all.push({ field: "", description: error.message, line: Number(at[1]) });
  return all;
}

function Gutter({ count, wrong }) {
  const lines = [...Array(count).keys()].map((index) => index + 1);
  return html`<div class="gutter" aria-hidden="true">
    ${lines.map((line) => html`<span class=${wrong.has(line) && "bad"} title=${wrong.get(line)}>${wrong.has(line) ? "■ " : ""}${line}</span>`)}
  </div>`;
}

function Hint({ hint }) {
  if (!hint) return html`<p class="quiet">The cursor is at no field. Ctrl+Space lists those that may stand there.</p>`;
  return html`<p><code>${hint.name}</code> ${hint.kind}${hint.byDefault && html`, by default <code>${hint.byDefault}</code>`}</p>
    ${hint.values.length > 0 && html`<p>Allowed: ${hint.values.map((value) => html`<code>${value}</code> `)}</p>`}
    <p class="quiet">${hint.what}</p>`;
}

/** What may be written at the cursor; one is chosen with Ctrl+Space and the arrow keys, or by a click. */
function Options({ options, chosen, onTake }) {
  if (options.length === 0) return null;
  return html`<ul id="options" class="options" role="listbox" aria-label="May be written here">
    ${options.map((each, index) => html`<li
      id="option-${index}" role="option" aria-selected=${index === chosen}
      onMouseDown=${(event) => event.preventDefault()} onClick=${() => onTake(each)}
    ><code>${each.label}</code> <span class="quiet">${each.hint}</span></li>`)}
  </ul>`;
}

/** @param {{schema: object|null, wrong: {line: number|null, description: string}[]}} schema null: no hints */
export function Editor({ text, onText, schema, problems, isRead }) {
  const area = useRef(null);
  const [cursor, setCursor] = useState(text.length);
  const [chosen, setChosen] = useState(-1);
  const [isClosed, setClosed] = useState(false);
  const fields = useMemo(() => fieldsOf(text), [text]);
  const place = useMemo(() => placeAt(text, cursor), [text, cursor]);
  const written = place ? text.slice(place.from, Math.min(cursor, place.to)) : "";
  const options = schema && place && !isClosed ? completions(schema, place, written, fields).slice(0, MOST_OPTIONS) : [];
  const named = place && (place.isValue ? place.path : [...place.path, text.slice(place.from, place.to)]);
  const hint = schema && named ? (described(schema, named) ?? described(schema, place.path)) : null;
  const wrong = new Map(problems.filter((each) => each.line).map((each) => [each.line, each.description]));
  const lines = Math.max(FEWEST_LINES, text.split("\n").length + 1);
  // Where the cursor is to be after what was taken has been written: before the next key comes.
  const next = useRef(null);
  useLayoutEffect(() => {
    if (next.current === null) return;
    area.current.setSelectionRange(next.current, next.current);
    setCursor(next.current);
    next.current = null;
  }, [text]);
  const moved = () => {
    setCursor(area.current.selectionStart);
    setChosen(-1);
    setClosed(false);
  };
  const take = (option) => {
    const isWhole = text[place.to] === ":" && !place.isValue;
    const added = isWhole ? option.label : option.text;
    next.current = place.from + added.length;
    setChosen(-1);
    onText(text.slice(0, place.from) + added + text.slice(place.to));
    area.current.focus();
  };
  const onKeyDown = (event) => {
    if (event.ctrlKey && event.code === "Space") {
      event.preventDefault();
      setClosed(false);
      setChosen(0);
    } else if (chosen < 0 || options.length === 0) {
      if (event.key === "Escape") setClosed(true);
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const by = event.key === "ArrowDown" ? 1 : -1;
      setChosen((chosen + by + options.length) % options.length);
    } else if (event.key === "Enter") {
      event.preventDefault();
      take(options[Math.min(chosen, options.length - 1)]);
    } else if (event.key === "Escape") {
      setChosen(-1);
    }
  };
  const onKeyUp = (event) => {
    if (["ArrowLeft", "ArrowRight", "Home", "End", "PageUp", "PageDown"].includes(event.key)) moved();
    if (["ArrowUp", "ArrowDown"].includes(event.key) && chosen < 0) moved();
  };
  const goTo = (line) => {
    const from = text.split("\n").slice(0, line - 1).reduce((sum, each) => sum + each.length + 1, 0);
    area.current.focus();
    area.current.setSelectionRange(from, from + text.slice(from).split("\n")[0].length);
    moved();
  };
  return html`<label for="spec">Job spec (YAML)</label>
    <div class="editor">
      <${Gutter} count=${lines} wrong=${wrong} />
      <textarea id="spec" ref=${area} rows=${lines} wrap="off" spellcheck="false" autocomplete="off" value=${text}
        aria-describedby="hint verdict" aria-autocomplete="list" aria-controls=${options.length ? "options" : undefined}
        aria-invalid=${problems.length > 0} aria-activedescendant=${chosen >= 0 && options.length ? `option-${Math.min(chosen, options.length - 1)}` : undefined}
        onInput=${(event) => {
          onText(event.target.value);
          moved();
        }}
        onClick=${moved} onKeyDown=${onKeyDown} onKeyUp=${onKeyUp}></textarea>
    </div>
    <div class="hint">
      <div id="hint">${schema ? html`<${Hint} hint=${hint} />` : isRead && html`<p class="quiet">No hints: the schema of specs did not load. The spec is checked all the same.</p>`}</div>
      <${Options} options=${options} chosen=${chosen} onTake=${take} />
    </div>
    ${problems.some((each) => each.line) && html`<ul class="places" aria-label="Lines with problems">
      ${problems.filter((each) => each.line).map((each) => html`<li>
        <button class="link" onClick=${() => goTo(each.line)}>line ${each.line}</button> <code>${each.field}</code>
      </li>`)}
    </ul>`}`;
}
