// A job's curve as columns: what was read at first, and each step that has come since.

const PARTS = [
  "data_s", "forward_s", "backward_s", "optimizer_s", "tp_exposed_s", "pp_exposed_s", "dp_exposed_s",
  "other_exposed_s", "data_wait_s", "garbage_collection_s",
];
export const NAMES = [
  "step", "attempt", "loss", "grad_norm", "learning_rate", "tokens_per_s", "duration_s", "at_s",
  "eval_loss", ...PARTS,
];
// What parts come to, for two jobs on one chart.
export const GROUPS = {
  compute: ["forward_s", "backward_s"],
  communication: ["tp_exposed_s", "pp_exposed_s", "dp_exposed_s", "other_exposed_s"],
  optimizer: ["optimizer_s"],
  data: ["data_s"],
};
// More points than this on a chart cost time and show nothing.
const MOST = 6000;
// Of these in the older half, so that a job that evaluates often has no more.
const MOST_EVALUATED = MOST / 4;

export function emptyCurve() {
  return Object.fromEntries(NAMES.map((name) => [name, []]));
}

/** A new curve with reports added; a step that is done again takes the place of its first time. */
export function withReports(curve, reports) {
  if (reports.length === 0) return curve;
  const named = reports.flatMap((report) => Object.keys(setsOf(report)));
  const names = [...new Set([...NAMES, ...Object.keys(curve), ...named])];
  const columns = Object.fromEntries(names.map((name) => [name, [...(curve[name] ?? curve.step.map(() => null))]]));
  for (const report of reports) {
    const row = { ...report, ...report.split, ...setsOf(report), tokens_per_s: report.duration_s > 0 ? report.tokens / report.duration_s : null };
    // A batch that was left out has no loss.
    if (report.tokens === 0) row.loss = row.grad_norm = row.tokens_per_s = null;
    let at = columns.step.length;
    while (at > 0 && columns.step[at - 1] >= row.step) at -= 1;
    const isAgain = columns.step[at] === row.step;
    for (const name of names) columns[name].splice(at, isAgain ? 1 : 0, row[name] ?? null);
    if (report.split) fillBack(columns, at);
  }
  return thinned(withoutGivenUp(columns));
}

/**
 * The curve without the steps that a restart gave up and that are not redone yet: those behind the
 * newest step of the newest attempt, as `outlast curve` has it.
 */
export function withoutGivenUp(curve) {
  const newest = curve.attempt.reduce((most, attempt) => Math.max(most, attempt), 0);
  const end = curve.attempt.lastIndexOf(newest) + 1;
  if (end === curve.step.length) return curve;
  return Object.fromEntries(Object.entries(curve).map(([name, values]) => [name, values.slice(0, end)]));
}

/** Losses of held-out sets that have names, by the names of their columns. */
function setsOf(report) {
  return Object.fromEntries(Object.entries(report.eval_losses ?? {}).map(([name, loss]) => [`eval/${name}/loss`, loss]));
}

/** The columns of held-out sets that have names, by name. */
export function setColumns(curve) {
  const found = Object.keys(curve).map((column) => [/^eval\/(.+)\/loss$/.exec(column)?.[1], column]);
  return found.filter(([name]) => name !== undefined);
}

/** The parts of a step are also those of the steps before it that came without. */
function fillBack(columns, last) {
  const isLike = (at) => columns.attempt[at] === columns.attempt[last] && columns.forward_s[at] === null;
  for (let at = last - 1; at >= 0 && isLike(at); at -= 1) {
    for (const name of PARTS) columns[name][at] = columns[name][last];
  }
}

/** Every other row of the older half, while there are too many; of evaluated rows as `lessOften` has it. */
function thinned(columns) {
  const length = columns.step.length;
  if (length <= MOST) return columns;
  const evaluated = lessOften(columns.eval_loss, length / 2);
  const isKept = (_, index) => index > length / 2 || (columns.eval_loss[index] === null ? index % 2 === 0 : evaluated.has(index));
  return Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values.filter(isKept)]));
}

/** Rows up to `last` that were evaluated: all, or of each four that with the lowest and that with the highest loss. */
function lessOften(losses, last) {
  const rows = [...losses.keys()].filter((row) => row <= last && losses[row] !== null);
  if (rows.length <= MOST_EVALUATED) return new Set(rows);
  const kept = new Set();
  for (let first = 0; first < rows.length; first += 4) {
    const group = rows.slice(first, first + 4).sort((a, b) => losses[a] - losses[b]);
    kept.add(group[0]).add(group.at(-1));
  }
  return kept;
}

/** The sum of columns, null where none of them is known. */
export function summed(curve, names) {
  return curve.step.map((_, at) => {
    const known = names.map((name) => curve[name][at]).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) : null;
  });
}

/**
 * Series of several curves at the steps of all of them.
 *
 * @param {{steps: number[], values: (number|null)[]}[]} series
 */
export function joined(series) {
  const steps = [...new Set(series.flatMap((each) => each.steps))].sort((a, b) => a - b);
  const columns = series.map((each) => {
    const values = new Map(each.steps.map((step, index) => [step, each.values[index]]));
    return steps.map((step) => values.get(step) ?? null);
  });
  return [steps, ...columns];
}

/**
 * What happened at steps, by step.
 *
 * @returns {{step: number, last?: number, kind: string, text: string, incident?: string}[]}
 */
export function marksOf(job, curve, incidents) {
  const marks = [];
  for (let index = 1; index < curve.step.length; index += 1) {
    if (curve.attempt[index] !== curve.attempt[index - 1]) {
      marks.push({ step: curve.step[index], kind: "attempt", text: `attempt ${curve.attempt[index]} begins` });
    }
  }
  for (const each of incidents) {
    if (each.is_note || each.fault_step < 0) continue;
    const cause = each.cause.replaceAll("_", " ") || "a fault";
    marks.push({ step: each.fault_step, kind: "fault", text: cause, incident: each.incident_id });
    if (each.action === "roll_back" && each.resumed_step !== null) {
      const text = `rolled back from step ${each.fault_step} to step ${each.resumed_step}`;
      marks.push({ step: each.resumed_step, kind: "rollback", text, incident: each.incident_id });
    }
  }
  for (const { first, last } of job.skipped) {
    const which = first === last ? `batch of step ${first} is` : `batches of steps ${first} to ${last} are`;
    marks.push({ step: first, last, kind: "skipped", text: `the ${which} left out` });
  }
  for (const each of job.chosen_starts) {
    const from = each.step > 0 ? `after step ${each.step}` : "from the beginning";
    const where = each.url ? ` with a checkpoint of ${each.url}` : "";
    marks.push({ step: each.step, kind: "rollback", text: `a person let it go on ${from}${where}` });
  }
  return marks.sort((a, b) => a.step - b.step);
}
