"""How many nodes to hold ready: computed from how often nodes fail.

ByteRobust (SOSP '25): the smallest number that suffices on 99 of 100 days when each node
fails by itself. 0.12 % a day gives their 2, 2, 3 and 4 for 128, 256, 512 and 1,024 machines.
"""

from __future__ import annotations

import math

# Until a used standby has been made up for, be it by repair or by purchase.
REPLENISH_DAYS = 1.0
QUANTILE = 0.99


def standbys_for(
    nodes: int,
    faults_per_node_day: float,
    *,
    replenish_days: float = REPLENISH_DAYS,
    quantile: float = QUANTILE,
) -> int:
    """The smallest k with P[Binomial(nodes, p) <= k] >= quantile.

    p is the probability that one node fails before a used standby is made up for.

    Raises:
        ValueError: a number is out of its bounds.
    """
    if nodes < 1:
        raise ValueError(f"nodes={nodes}: a job has at least one")
    if faults_per_node_day < 0.0 or replenish_days <= 0.0:
        raise ValueError(
            f"{faults_per_node_day:g} faults a day, {replenish_days:g} days to replenish: the "
            "rate must not be negative, and the time must be above zero"
        )
    if not 0.0 < quantile < 1.0:
        raise ValueError(f"quantile={quantile:g} is not between 0 and 1")
    fails = -math.expm1(-faults_per_node_day * replenish_days)
    below, number = 0.0, -1
    while below < quantile and number < nodes:
        number += 1
        below += _probability(nodes, number, fails)
    return number


def _probability(nodes: int, number: int, fails: float) -> float:
    """P[Binomial(nodes, fails) = number], by logarithms."""
    if fails in (0.0, 1.0):
        return float(number == (0 if fails == 0.0 else nodes))
    ways = math.lgamma(nodes + 1) - math.lgamma(number + 1) - math.lgamma(nodes - number + 1)
    return math.exp(ways + number * math.log(fails) + (nodes - number) * math.log1p(-fails))
