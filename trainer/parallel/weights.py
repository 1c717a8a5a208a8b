"""Whole weights of buckets that replicas own in shards: gathered, used, dropped.

At ZeRO 1 and 2 the whole weights always have memory, and are gathered as soon as
the optimizer has new ones. At ZeRO 3 a bucket has memory only from the launch of
its gather until it is released.

What does not belong here: which bucket is needed when (`zero.py`).
"""

from __future__ import annotations

from trainer.model.parameters import (
    FlatParameters,
    Part,
    drop_memory,
    has_memory,
    restore_memory,
)
from trainer.parallel.comm import Comm, Pending


class WeightGatherer:
    """Knows of every bucket whether its whole weights are there, and brings them.

    `most_gathered` is the largest number of elements that had memory at once at ZeRO 3,
    whole buckets counted.
    """

    def __init__(self, flat: FlatParameters, dp: Comm, expert_dp: Comm) -> None:
        self._flat = flat
        self._dp = dp
        self._expert_dp = expert_dp
        self._under_way: dict[Part, Pending] = {}
        self._present: set[Part] = set()
        self._num_gathered = 0
        self.most_gathered = 0

    def updated(self, part: Part) -> None:
        """The own part has new weights: what was gathered before is void."""
        if self._flat.level == 0:
            self._flat.publish(part)
            return
        self.release(part)
        self._present.discard(part)
        if self._flat.level < 3:
            self.start(part)

    def start(self, part: Part) -> None:
        """Launch the gather of a bucket, unless it is there or on its way."""
        if self._flat.level == 0 or part in self._present or part in self._under_way:
            return
        if not has_memory(part.all_values):
            restore_memory(part.all_values)
            self._num_gathered += part.all_values.numel()
            self.most_gathered = max(self.most_gathered, self._num_gathered)
        self._flat.publish(part)
        own = part.all_values[part.owned]
        dp = self._expert_dp if part.bucket.divided else self._dp
        self._under_way[part] = dp.start_all_gather(own, part.all_values)

    def ensure(self, part: Part) -> None:
        """Return once the whole weights of a bucket are there."""
        self.start(part)
        pending = self._under_way.pop(part, None)
        if pending is not None:
            pending.wait()
            self._present.add(part)

    def release(self, part: Part) -> None:
        """Drop the whole weights of a bucket where the level says that they come and go."""
        if self._flat.level < 3 or not has_memory(part.all_values):
            return
        self.ensure(part)
        drop_memory(part.all_values)
        self._num_gathered -= part.all_values.numel()
        self._present.discard(part)
