"""Rank <-> (pp, dp, tp) coordinates of a 3D-parallel job.

Ranks run tp fastest, then dp, then pp: a tensor-parallel group lies inside a
node and a data-parallel group lies close (MegaScale, NSDI '24, section 3).
Experts are divided among `ep` consecutive ranks of a data-parallel group.

A replica may be several ranks of that group: `cp` consecutive ones divide each of its
sequences. They hold the same parameters as the other ranks of the group, so whatever sums
gradients, shares state or saves it takes them for replicas, and does not ask.
Groups are computed from the layout, never negotiated between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """Where a rank stands in the layout."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of tensor, pipeline and data parallelism, and of experts among replicas.

    `dp` counts the ranks that hold the same parameters: replicas, times the `cp` ranks that
    divide the sequences of each. `ep` and `cp` divide it.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} is {getattr(self, name)}; it must be 1 or more")

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def of_world(self, num_ranks: int) -> Layout:
        """As many replicas as so many ranks make; the same where they make none.

        An attempt with fewer nodes has fewer.
        """
        dp, left = divmod(num_ranks, self.tp * self.pp)
        is_whole = dp > 0 and not (left or dp % self.cp or dp % self.ep)
        return replace(self, dp=dp) if is_whole else self

    @property
    def num_replicas(self) -> int:
        """How many read samples of their own."""
        return self.dp // self.cp

    def replica(self, rank: int) -> int:
        """The replica that `rank` is of; raises ValueError when it is not in the layout."""
        return self.coordinate(rank).dp // self.cp

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of `rank`; raises ValueError when it is not in the layout."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in 0..{self.world_size - 1}")
        return Coordinate(
            tp=rank % self.tp,
            dp=rank // self.tp % self.dp,
            pp=rank // (self.tp * self.dp),
        )

    def rank(self, coordinate: Coordinate) -> int:
        """The rank that stands at `coordinate`."""
        return (coordinate.pp * self.dp + coordinate.dp) * self.tp + coordinate.tp

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every tensor-parallel group, in rank order."""
        return tuple(
            tuple(range(first, first + self.tp)) for first in range(0, self.world_size, self.tp)
        )

    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every data-parallel group: same stage and tensor shard, all replicas."""
        stage = self.tp * self.dp
        return tuple(
            tuple(range(first + tp, first + stage, self.tp))
            for first in range(0, self.world_size, stage)
            for tp in range(self.tp)
        )

    def pp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every pipeline: same replica and tensor shard, all stages in order."""
        stage = self.tp * self.dp
        return tuple(tuple(range(first, self.world_size, stage)) for first in range(stage))

    def ep_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that divide experts among them."""
        return tuple(
            group[first : first + self.ep]
            for group in self.dp_groups()
            for first in range(0, self.dp, self.ep)
        )

    def cp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that divide sequences among them."""
        return tuple(
            group[first : first + self.cp]
            for group in self.dp_groups()
            for first in range(0, self.dp, self.cp)
        )

    def group_of(self, kind: str, rank: int) -> tuple[int, ...]:
        """The `tp`, `dp` or `pp` group that `rank` belongs to.

        `cp` are those of `dp` that divide sequences among them. `ep` are the replicas that divide
        experts among them, `expert_dp` those that hold the same ones.
        """
        at = self.coordinate(rank)
        stage = self.tp * self.dp
        match kind:
            case "tp":
                return tuple(range(rank - at.tp, rank - at.tp + self.tp))
            case "dp":
                first = at.pp * stage + at.tp
                return tuple(range(first, first + stage, self.tp))
            case "pp":
                return tuple(range(rank % stage, self.world_size, stage))
            case "cp":
                first = at.dp - at.dp % self.cp
                return self.group_of("dp", rank)[first : first + self.cp]
            case "ep":
                first = at.dp - at.dp % self.ep
                return self.group_of("dp", rank)[first : first + self.ep]
            case "expert_dp":
                return self.group_of("dp", rank)[at.dp % self.ep :: self.ep]
            case _:
                known = "tp, dp, pp, cp, ep, expert_dp"
                raise ValueError(f"group kind {kind!r} is not one of {known}")


def folds(schedule: str) -> bool:
    """Whether a pipeline of this schedule comes back to the stage where it begins.

    Every second chunk of the model then goes through the stages from the last to the first.
    """
    return schedule == "zb-v"
