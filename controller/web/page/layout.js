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
    case "cp":
      return replicas().filter((_, d) => Math.floor(d / layout.cp) === Math.floor(dp / layout.cp));
    case "ep":
      return replicas().filter((_, d) => Math.floor(d / layout.ep) === Math.floor(dp / layout.ep));
    case "expert_dp":
      return replicas().filter((_, d) => d % layout.ep === dp % layout.ep);
    case "pp":
      return range(layout.pp).map((p) => at(tp, p, dp));
    case "embedding":
      // The first and the last stage share its gradient.
      return [...new Set([0, layout.pp - 1])].map((p) => at(tp, p, dp));
    case "world":
      return range(ranks.length);
    default:
      return [];
  }
}

/** What tells a rank's group from all others of its kind. */
export function keyOf({ tp, pp, dp }, group, layout) {
  const parts = {
    tp: [pp, dp], dp: [pp, tp], pp: [dp, tp], embedding: [dp, tp], world: [],
    cp: [pp, tp, Math.floor(dp / layout.cp)], ep: [pp, tp, Math.floor(dp / layout.ep)], expert_dp: [pp, tp, dp % layout.ep],
  };
  return parts[group]?.join();
}

const stands = (rank) => Object.keys(rank.entered).length > 0;

const OPPOSITE = { send: "recv", recv: "send" };

/** The other end of a send or receive: as recorded, or else the neighbours in its pipeline. */
function endsOf(ranks, layout, rank) {
  const operation = rank.last_operation;
  if ((operation.peer ?? null) !== null) return [operation.peer];
  if (operation.group !== "pp") return [];
  return groupOf(ranks, layout, rank.rank, "pp").filter((other) => Math.abs(ranks[other].pp - rank.pp) === 1);
}

/** Whether a rank is inside the other half of what the waiter is in. */
function meets(ranks, layout, waiter, other) {
  const { op, is_inside: isInside } = other.last_operation ?? {};
  return isInside && op === OPPOSITE[waiter.last_operation.op] && endsOf(ranks, layout, other).includes(waiter.rank);
}

/**
 * For each rank, those that it waits for: peers of its operation's group that have not entered it,
 * or the other end of its send or receive that is not in that. Only ranks that stand still say
 * what they have entered. None where that is not known: the rank moves, is in no operation, or the
 * group cannot be told from coordinates.
 *
 * @returns {Map<number, number[]>}
 */
export function awaitedBy(ranks, layout) {
  // All ranks of a group that are in the same operation wait for the same ones.
  const late = new Map();
  const found = new Map();
  for (const rank of ranks) {
    const operation = rank.last_operation;
    if (!operation?.is_inside || !stands(rank)) continue;
    if (operation.op in OPPOSITE) {
      const isAwaited = (end) => ranks[end] && stands(ranks[end]) && !meets(ranks, layout, rank, ranks[end]);
      found.set(rank.rank, endsOf(ranks, layout, rank).filter(isAwaited));
      continue;
    }
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

/** Waiting ranks by those that they wait for, the most waiting first: {waiting, others}. */
export function waitsByOthers(awaited) {
  const found = new Map();
  for (const [rank, others] of awaited) {
    if (others.length === 0) continue;
    const key = others.join();
    if (!found.has(key)) found.set(key, { waiting: [], others });
    found.get(key).waiting.push(rank);
  }
  return [...found.values()].sort((a, b) => b.waiting.length - a.waiting.length);
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
  const way = operation.op === "send" ? "to" : "from";
  const end = (operation.peer ?? null) === null ? "" : ` ${way} rank ${operation.peer}`;
  return `${inside} ${operation.group} ${operation.op} #${operation.sequence}${where}${end}`;
}
