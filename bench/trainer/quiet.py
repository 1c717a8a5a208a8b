"""A black box that notes nothing, for groups that a benchmark makes by itself."""

from __future__ import annotations

from outlast.blackbox import Group, Op


class NoBox:
    """A black box costs a store an operation; the baselines have none."""

    def enter(self, op: Op, group: Group, micro_batch: int = -1) -> int:
        return 0

    def leave(self) -> None:
        pass
