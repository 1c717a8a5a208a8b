// The newest lines of logs in a box. Who reads further up, or selects, is not moved by those that come.

// Lines that are kept, and their characters; twice as many while the box is not at its end.
const MOST_LINES = 5000;
const MOST_CHARACTERS = 2 ** 22;
// About two lines: who has scrolled up by less than that is still at the bottom.
const BOTTOM_PX = 40;
const AGAIN = "[connected again: the newest lines from here on]";

/** Text of its own in the box: a browser lays out no other when it comes or goes. */
function blockOf(text) {
  const block = document.createElement("span");
  block.className = "lines";
  block.textContent = text;
  return block;
}

/**
 * Adds lines to an element within a box that scrolls, once a frame.
 *
 * `told` is called with how many lines are shown, and whether new ones are held back as some of the
 * text is selected.
 */
export class LogBox {
  // Lines that have come together, oldest first; those that are shown have a block.
  #batches = [];
  #lines = 0;
  #characters = 0;
  // Blocks of lines that are not kept any more.
  #dropped = [];
  #open = [];
  #openBlock = blockOf("");
  #needle = "";
  #isAgain = false;
  #wasHeld = false;
  #frame = 0;

  constructor(box, inside, told) {
    [this.box, this.inside, this.told] = [box, inside, told];
    inside.replaceChildren(this.#openBlock);
    this.selected = () => {
      if (this.#isHeld() !== this.#wasHeld) this.#soon();
    };
    document.addEventListener("selectionchange", this.selected);
    told({ shown: 0, isHeld: false });
  }

  /** More whole lines, and the last ones that have not ended. */
  add(lines, open) {
    if (this.#isAgain) this.#beginAgain();
    if (lines.length > 0) {
      const characters = lines.reduce((sum, line) => sum + line.length, 0);
      this.#batches.push({ lines, characters, block: null });
      this.#lines += lines.length;
      this.#characters += characters;
    }
    this.#open = open;
    this.#trim();
    this.#soon();
  }

  /** What comes next was sent before, in part: the newest lines. Until it is there, all stays. */
  again() {
    this.#isAgain = true;
  }

  /** Shows lines with this text only. */
  show(needle) {
    if (needle === this.#needle) return;
    this.#needle = needle;
    for (const batch of this.#batches) batch.block = null;
    this.#dropped = [];
    this.inside.replaceChildren(this.#openBlock);
    this.#paint();
  }

  end() {
    cancelAnimationFrame(this.#frame);
    document.removeEventListener("selectionchange", this.selected);
    this.inside.replaceChildren();
  }

  #isAtBottom() {
    const { scrollHeight, scrollTop, clientHeight } = this.box;
    return scrollHeight - scrollTop - clientHeight < BOTTOM_PX;
  }

  #isHeld() {
    const selection = getSelection();
    return !selection.isCollapsed && selection.containsNode(this.inside, true);
  }

  /** Who is at the end sees the newest lines alone; nobody else is moved. */
  #beginAgain() {
    this.#isAgain = false;
    if (this.#isAtBottom() && !this.#isHeld()) this.#drop(this.#batches.length);
    else this.add([...this.#open, AGAIN], []);
  }

  /** The oldest ones. */
  #drop(number) {
    for (const { lines, characters, block } of this.#batches.splice(0, number)) {
      this.#lines -= lines.length;
      this.#characters -= characters;
      if (block) this.#dropped.push(block);
    }
  }

  #trim() {
    const times = this.#isAtBottom() && !this.#isHeld() ? 1 : 2;
    const isMuch = ([first]) => this.#lines - first.lines.length >= times * MOST_LINES || this.#characters - first.characters >= times * MOST_CHARACTERS;
    while (this.#batches.length > 1 && isMuch(this.#batches)) this.#drop(1);
  }

  #soon() {
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#paint());
  }

  #matching(lines) {
    return lines.filter((line) => line.toLowerCase().includes(this.#needle));
  }

  #paint() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const isHeld = this.#isHeld();
    this.#wasHeld = isHeld;
    if (!isHeld) this.#write();
    const shown = this.#batches.reduce((sum, { block }) => sum + (block?.numLines ?? 0), this.#openBlock.numLines ?? 0);
    this.told({ shown, isHeld });
  }

  #write() {
    const [wasAtBottom, top, before] = [this.#isAtBottom(), this.box.scrollTop, this.inside.offsetHeight];
    for (const block of this.#dropped) block.remove();
    const gone = this.#dropped.length > 0 ? before - this.inside.offsetHeight : 0;
    this.#dropped = [];
    for (const batch of this.#batches.filter(({ block }) => block === null)) {
      const lines = this.#matching(batch.lines);
      batch.block = Object.assign(blockOf(lines.join("\n")), { numLines: lines.length });
      this.#openBlock.before(batch.block);
    }
    const open = this.#matching(this.#open);
    Object.assign(this.#openBlock, { textContent: open.join("\n"), numLines: open.length });
    if (wasAtBottom) this.box.scrollTop = this.box.scrollHeight;
    else if (gone > 0) this.box.scrollTop = top - gone;
  }
}
