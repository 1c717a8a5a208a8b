// Which ranks work together, by their coordinates: tp fastest, then dp, then pp.

/** The group of a rank along one axis, in order of their coordinates. */
export function groupOf(ranks, layout, rank, group) {
  const { tp, pp, dp } = ranks[rank];
  const at = (t, p, d) => (p * layout.dp + d) * layout.tp + t;
  const range = (length) => [...Array(length).keys()];
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

/**
 * Those of whom a rank waits: peers of its operation's group that have not entered it. Only ranks
 * that stand still say what they have entered. Null where that is not known: the rank moves, is in
 * no operation of all its group, or the group cannot be told from coordinates.
 */
export function awaited(ranks, layout, rank) {
  const operation = ranks[rank].last_operation;
  if (!operation?.is_inside || ["send", "recv"].includes(operation.op)) return null;
  const peers = groupOf(ranks, layout, rank, operation.group);
  const stands = (peer) => Object.keys(ranks[peer].entered).length > 0;
  if (peers.length === 0 || !stands(rank)) return null;
  const hasEntered = (peer) => (ranks[peer].entered[operation.group] ?? -1) >= operation.sequence;
  return peers.filter((peer) => peer !== rank && stands(peer) && !hasEntered(peer));
}

/** Ranks that others wait for, with how many wait, most first. */
export function heldUpBy(ranks, layout) {
  const waiting = new Map();
  for (const { rank } of ranks) {
    for (const other of awaited(ranks, layout, rank) ?? []) {
      waiting.set(other, (waiting.get(other) ?? 0) + 1);
    }
  }
  // Who waits itself is held up by those that it waits for.
  const isFree = ([rank]) => !(awaited(ranks, layout, rank)?.length > 0);
  return [...waiting].filter(isFree).sort((a, b) => b[1] - a[1]);
}

export function operationInWords(operation) {
  if (!operation) return "none yet";
  const where = operation.detail >= 0 ? ` of micro-batch ${operation.detail}` : "";
  const inside = operation.is_inside ? "in" : "after";
  return `${inside} ${operation.group} ${operation.op} #${operation.sequence}${where}`;
}
