// What stands where in the text of a job spec: YAML in blocks and in braces, also while it is
// written and not whole. What is right is the controller's to say; this finds the lines.

const KEY = /^(\s*(?:- +)*)("[^"\n]*"|'[^'\n]*'|[^\s#:{}[\],"'\-][^:#{}[\],\n]*?)[ \t]*:(?=\s|$)/;
const DASH = /^(\s*)-(?:\s|$)/;
const SECTION = /[{[]/;

const unquoted = (name) => name.replace(/^["']|["']$/g, "");
const indentOf = (line) => line.match(/^ */)[0].length;
const isEmpty = (line) => /^\s*(?:#|$)/.test(line);

/** Where a comment begins that is not inside quotes, or the end of the line. */
function codeEnd(line) {
  let quote = "";
  for (let at = 0; at < line.length; at += 1) {
    const each = line[at];
    if (quote) quote = each === quote ? "" : quote;
    else if (each === '"' || each === "'") quote = each;
    else if (each === "#" && (at === 0 || /\s/.test(line[at - 1]))) return at;
  }
  return line.length;
}

class Reader {
  constructor(text, cursor) {
    this.text = text;
    this.cursor = cursor;
    this.fields = [];
    this.place = null;
    // The sections that a line may be in, the innermost last.
    this.blocks = [{ indent: -1, path: [] }];
  }

  read() {
    let at = 0;
    while (at <= this.text.length) at = this.line(at);
    return this;
  }

  lineEnd(at) {
    const end = this.text.indexOf("\n", at);
    return end < 0 ? this.text.length : end;
  }

  field(path, from) {
    this.fields.push({ path, from, line: this.text.slice(0, from).split("\n").length });
  }

  /** One line of a block, with the braces that begin in it; where the next one begins. */
  line(at) {
    const end = this.lineEnd(at);
    const line = this.text.slice(at, end);
    const hasCursor = this.cursor >= at && this.cursor <= end;
    if (isEmpty(line)) {
      if (hasCursor) this.noteBlock(at, line);
      return end + 1;
    }
    const dash = line.match(DASH);
    const key = line.match(KEY);
    // A list may stand as far left as the name that it belongs to.
    if (dash) this.leave((block) => block.indent > dash[1].length);
    else this.leave((block) => block.indent >= indentOf(line));
    if (!key) {
      const open = line.search(SECTION);
      if (open >= 0 && open < codeEnd(line)) return this.braces(at + open, this.blocks.at(-1));
      if (hasCursor) this.noteBlock(at, line);
      return end + 1;
    }
    const block = { indent: key[1].length, path: [...this.blocks.at(-1).path, unquoted(key[2])] };
    this.field(block.path, at + key[1].length);
    this.blocks.push(block);
    const rest = line.slice(key[0].length);
    const begun = at + key[0].length + (rest.length - rest.trimStart().length);
    if (/^[{[]/.test(rest.trimStart())) {
      if (hasCursor && this.cursor <= at + key[0].length) this.noteBlock(at, line);
      return this.braces(begun, block);
    }
    if (hasCursor) this.noteBlock(at, line, block, at + key[0].length);
    return /^\s*[|>][-+0-9]*\s*$/.test(rest.slice(0, codeEnd(rest))) ? this.pastText(end + 1, block.indent) : end + 1;
  }

  leave(isLeft) {
    while (this.blocks.length > 1 && isLeft(this.blocks.at(-1))) this.blocks.pop();
  }

  /** Text that is indented below its name has no fields. */
  pastText(at, indent) {
    let next = at;
    while (next < this.text.length) {
      const line = this.text.slice(next, this.lineEnd(next));
      if (line.trim() !== "" && indentOf(line) <= indent) break;
      next = this.lineEnd(next) + 1;
    }
    return next;
  }

  /** What the cursor is at in a line of a block: a name that is begun, or a value. */
  noteBlock(at, line, block = null, valueFrom = Infinity) {
    const column = this.cursor - at;
    if (column > codeEnd(line)) return;
    if (block && this.cursor > valueFrom) {
      const from = valueFrom + this.text.slice(valueFrom, this.cursor).search(/\S|$/);
      const to = Math.max(from, at + line.slice(0, codeEnd(line)).trimEnd().length);
      this.place = { path: block.path, isValue: true, from, to };
      return;
    }
    const before = line.slice(0, column);
    const from = before.match(/^\s*(?:- +)*/)[0].length;
    // An empty line belongs to the section that its indentation says.
    const outer = block ? this.blocks.slice(0, -1) : this.blocks;
    const isIn = (each) => (DASH.test(line) ? each.indent <= from : each.indent < from);
    const path = [...outer].reverse().find(isIn)?.path ?? [];
    const name = line.slice(from).match(/^[\w-]*/)[0];
    this.place = { path, isValue: false, from: at + from, to: at + from + name.length };
  }

  /** Fields inside braces, which may go over several lines; where the line behind them begins. */
  braces(open, { indent, path }) {
    const stack = [];
    let token = { from: open, isValue: false };
    let owner = path;
    let quote = "";
    let at = open;
    const begin = (from, isValue) => {
      token = { from, isValue };
    };
    const note = () => {
      if (this.cursor !== at || this.place || stack.length === 0) return;
      const from = token.from + this.text.slice(token.from, at).search(/\S|$/);
      const to = at + this.text.slice(at).search(/[^\w.-]|$/);
      const isValue = token.isValue || stack.at(-1).isList;
      this.place = { path: isValue ? owner : stack.at(-1).path, isValue, from, to };
    };
    for (; at < this.text.length; at += 1) {
      note();
      const each = this.text[at];
      if (quote) {
        if (each === quote) quote = "";
      } else if (each === '"' || each === "'") {
        quote = each;
      } else if (each === "#" && /\s/.test(this.text[at - 1] ?? " ")) {
        const end = this.lineEnd(at);
        // Only what is written behind it can be a name or a value.
        if (this.text.slice(token.from, at).trim() === "") begin(end, token.isValue);
        at = end - 1;
      } else if (each === "{" || each === "[") {
        stack.push({ path: owner, isList: each === "[" });
        begin(at + 1, false);
      } else if (each === ":" && !stack.at(-1).isList && !token.isValue && /[\s"'{[]|$/.test(this.text[at + 1] ?? " ")) {
        const written = this.text.slice(token.from, at);
        owner = [...stack.at(-1).path, unquoted(written.trim())];
        this.field(owner, token.from + written.search(/\S|$/));
        begin(at + 1, true);
      } else if (each === ",") {
        owner = stack.at(-1).path;
        begin(at + 1, false);
      } else if (each === "}" || each === "]") {
        owner = stack.pop().path;
        if (stack.length === 0) return this.lineEnd(at) + 1;
        begin(at + 1, true);
      } else if (each === "\n" && indent >= 0) {
        const line = this.text.slice(at + 1, this.lineEnd(at + 1));
        // Braces that are still open: what follows is no part of them.
        if (!isEmpty(line) && indentOf(line) <= indent) return at + 1;
      }
    }
    note();
    return this.text.length + 1;
  }
}

/** The fields of a spec: `{path, line}`, in order. */
export const fieldsOf = (text) => new Reader(text, -1).read().fields;

/**
 * Where the cursor is: the `path` of the section whose names may stand there, or with `isValue` that
 * of the field whose value does, and the part of the text that is being written. Null in comments.
 */
export const placeAt = (text, cursor) => new Reader(text, cursor).read().place;

const pathOf = (name) => name.replaceAll(/\[\d+\]/g, "").split(".").filter((part) => !/^\d*$/.test(part));

/** The line of a field as the controller names it, or of the section that it is missing in. */
export function lineOf(fields, name) {
  for (let path = pathOf(name); path.length > 0; path = path.slice(0, -1)) {
    const found = fields.find((each) => each.path.join("\n") === path.join("\n"));
    if (found) return found.line;
  }
  return null;
}
