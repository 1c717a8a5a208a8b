"""Which sequences of a file are held out for evaluation: arithmetic, no list.

Blocks of sequences are held out at even distances over the whole file, so that both splits hold
the same kind of text. Of `fraction` = p/q, block i is held out where i x p/q passes a whole
number; in exact fractions the j-th block of either kind has a closed form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

# Long enough that few documents are in both splits, short enough that 2 % of them are some.
BLOCK_SEQUENCES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """The split of so many sequences."""

    num_sequences: int
    fraction: float

    @property
    def block(self) -> int:
        """Sequences of a block; few sequences get small ones, so that some are held out."""
        return max(1, min(BLOCK_SEQUENCES, int(self.num_sequences * self.fraction)))

    @property
    def num_held_out(self) -> int:
        blocks = -(-self.num_sequences // self.block)
        held = math.floor(blocks * self._share)
        missing = 0
        if held > math.floor((blocks - 1) * self._share):
            # The last block is one of them, and may not be full.
            missing = blocks * self.block - self.num_sequences
        return held * self.block - missing

    @property
    def num_trained_on(self) -> int:
        return self.num_sequences - self.num_held_out

    def held_out(self, index: int) -> int:
        """The sequence that is number `index` of those held out."""
        block, inside = divmod(index, self.block)
        return (math.ceil((block + 1) / self._share) - 1) * self.block + inside

    def trained_on(self, index: int) -> int:
        """The sequence that is number `index` of those trained on."""
        block, inside = divmod(index, self.block)
        return math.floor(block / (1 - self._share)) * self.block + inside

    @property
    def _share(self) -> Fraction:
        # What was written, such as 0.1, and not the double that is next to it.
        return Fraction(str(self.fraction))
