// Which ranks work together, by their coordinates: tp fastest, then dp, then pp.

const range = (length) => [...Array(length).keys()];

/** The group of a rank along one axis, in order of their coordinates. */
export function groupOf(ranks, layout, rank, group) {
  const { tp, pp, dp } = ranks[rank];
  const at = (t, p, d) => (p * layout.dp + d) * layout.tp + t;
  const replicas = () => range(layout.dp).map((d) => at(tp, pp, d));
  switch (group) {
    case "tp":
      return range(layout.tp).map((t) => at(t, pp, dp));
    case "dp":
      return replicas();
    case "ep":
      return replicas().filter((_, d) => Math.floor(d / layout.ep) === Math.floor(dp / layout.ep));
    case "expert_dp":
      return replicas().filter((_, d) => d % layout.ep === dp % layout.ep);
    case "pp":
      return range(layout.pp).map((p) => at(tp, p, dp));
    case "world":
      return range(ranks.length);
    default:
      return [];
  }
}

/** What tells a rank's group from all others of its kind. */
export function keyOf({ tp, pp, dp }, group, layout) {
  const parts = {
    tp: [pp, dp], dp: [pp, tp], pp: [dp, tp], world: [],
    ep: [pp, tp, Math.floor(dp / layout.ep)], expert_dp: [pp, tp, dp % layout.ep],
  };
  return parts[group]?.join();
}

const stands = (rank) => Object.keys(rank.entered).length > 0;

/**
 * For each rank, those that it waits for: peers of its operation's group that have not entered it.
 * Only ranks that stand still say what they have entered. None where that is not known: the rank
 * moves, is in no operation of all its group, or the group cannot be told from coordinates.
 *
 * @returns {Map<number, number[]>}
 */
export function awaitedBy(ranks, layout) {
  // All ranks of a group that are in the same operation wait for the same ones.
  const late = new Map();
  const found = new Map();
  for (const rank of ranks) {
    const operation = rank.last_operation;
    if (!operation?.is_inside || ["send", "recv"].includes(operation.op) || !stands(rank)) continue;
    const key = keyOf(rank, operation.group, layout);
    if (key === undefined) continue;
    const whole = `${operation.group} ${key} ${operation.sequence}`;
    if (!late.has(whole)) {
      const hasNotEntered = (peer) => stands(ranks[peer]) && (ranks[peer].entered[operation.group] ?? -1) < operation.sequence;
      late.set(whole, groupOf(ranks, layout, rank.rank, operation.group).filter(hasNotEntered));
    }
    found.set(rank.rank, late.get(whole));
  }
  return found;
}

/** Ranks that others wait for and that wait for nobody, with how many wait, most first. */
export function heldUpBy(awaited) {
  const waiting = new Map();
  for (const others of awaited.values()) {
    for (const other of others) waiting.set(other, (waiting.get(other) ?? 0) + 1);
  }
  // Who waits itself is held up by those that it waits for.
  const isFree = ([rank]) => !(awaited.get(rank)?.length > 0);
  return [...waiting].filter(isFree).sort((a, b) => b[1] - a[1]);
}

export function operationInWords(operation) {
  if (!operation) return "none yet";
  const where = operation.detail >= 0 ? ` of micro-batch ${operation.detail}` : "";
  const inside = operation.is_inside ? "in" : "after";
  return `${inside} ${operation.group} ${operation.op} #${operation.sequence}${where}`;
}
