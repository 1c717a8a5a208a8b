"""Which samples a micro-batch reads: pure arithmetic, no state to lose.

A sample's place in training follows from the step number alone, so resuming
needs nothing but the step. Samples are visited in a pseudo-random order that
changes with every pass over the data. The order is a permutation computed
point by point (a Feistel network with cycle walking), so that no shuffled
index is ever built or stored and any position costs the same.

The global batch of a step holds the same samples on every layout: replicas
take consecutive parts of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.core.blend import Blend

_MASK_64 = 2**64 - 1
# Four rounds make a Feistel network with good round functions a pseudo-random
# permutation (Luby and Rackoff, 1988).
_ROUNDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How a step's global batch is cut into replicas and micro-batches."""

    global_batch: int
    micro_batch: int
    num_replicas: int
    seed: int

    def __post_init__(self) -> None:
        if self.global_batch % (self.num_replicas * self.micro_batch):
            raise ValueError(
                f"global batch {self.global_batch} is not a multiple of "
                f"{self.num_replicas} replicas x micro-batch {self.micro_batch}"
            )

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one replica runs per step."""
        return self.global_batch // (self.num_replicas * self.micro_batch)

    def positions(self, step: int, replica: int, micro_batch: int) -> range:
        """Places in all of training that a replica's micro-batch has at `step`, from 1."""
        first = (step - 1) * self.global_batch
        first += (replica * self.num_micro_batches + micro_batch) * self.micro_batch
        return range(first, first + self.micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan(Batches):
    """The samples of a single data set."""

    num_samples: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("the data holds no whole sample")
        Batches.__post_init__(self)

    def samples(self, step: int, replica: int, micro_batch: int) -> tuple[int, ...]:
        """Sample numbers that a replica's micro-batch reads at `step` (counted from 1)."""
        return tuple(map(self._sample_at, self.positions(step, replica, micro_batch)))

    def _sample_at(self, position: int) -> int:
        pass_number, index = divmod(position, self.num_samples)
        return permuted(index, self.num_samples, _mix(self.seed ^ _mix(pass_number)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendPlan(Batches):
    """The samples of several sources with weights; each is passed over at its own pace."""

    blend: Blend
    num_samples: tuple[int, ...]
    """Of each source."""

    def samples(self, step: int, replica: int, micro_batch: int) -> tuple[tuple[int, int], ...]:
        """Source and sample of it that a replica's micro-batch reads at `step`, from 1."""
        return tuple(map(self._sample_at, self.positions(step, replica, micro_batch)))

    def _sample_at(self, position: int) -> tuple[int, int]:
        source, earlier = self.blend.at(position)
        size = self.num_samples[source]
        pass_number, index = divmod(earlier, size)
        # Sources of one size are visited in different orders.
        key = _mix(self.seed ^ _mix(_mix(source + 1) ^ pass_number))
        return source, permuted(index, size, key)


def permuted(index: int, size: int, key: int) -> int:
    """Where `index` goes under the permutation of `range(size)` chosen by `key`."""
    if not 0 <= index < size:
        raise ValueError(f"index {index} is not in 0..{size - 1}")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = index
    while True:
        value = _feistel(value, half_bits, key)
        # Cycle walking: step on until the value falls inside. The domain is at
        # most 4 x size, so it takes a few rounds on average.
        if value < size:
            return value


def _feistel(value: int, half_bits: int, key: int) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(_ROUNDS):
        left, right = right, left ^ (_mix(right ^ _mix(key + round_number)) & mask)
    return left << half_bits | right


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK_64
    return value ^ value >> 31
