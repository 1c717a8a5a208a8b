"""A step with a non-finite loss, done again by two replicas: what differs between them is hardware.

The same samples on the same weights give the same bits, on any node of one kind. So when such
a step is done again, each replica first computes another one's part of it, then its own; before
the gradients of replicas meet, every bit of them, and of the losses, has gone into a number by
which the two are compared. The weights are not touched in between, and nothing moves: it costs
one more pass, once.

What does not belong here: who is accused (`trainer.core.suspects`), and what is done about it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from outlast.blackbox import Phase, Writer
from outlast.errors import FatalError
from trainer.core.suspects import accused, best_shift, comparable
from trainer.recovery.non_finite import CULPRIT_FIRST_S
from trainer.worker.state import TrainState, environment

# Elements that are widened to 64 bits at a time.
_BLOCK: Final = 2**20
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# The golden ratio's odd neighbour in 64 bits, as a signed number: its multiples spread well.
_SPREAD = 0x9E3779B97F4A7C15 - 2**64


class SilentCorruptionError(FatalError):
    """Replicas computed other bits from the same samples; the weights were not touched."""


class BitSum:
    """A number that changes with any bit of what is added to it.

    Integer sums have the same bits in any order, so that a GPU gives what a CPU gives.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, values: Tensor) -> None:
        """Add a tensor of 16, 32 or 64 bits per element; the order of calls counts."""
        self.value = self.value * 3 + 1
        flat = values.detach().reshape(-1).view(_INTEGERS[values.element_size()])
        for first in range(0, flat.numel(), _BLOCK):
            block = flat[first : first + _BLOCK].long()
            places = torch.arange(first, first + block.numel(), device=block.device)
            # Odd weights: no single bit is lost to the overflow.
            self.value += (block * (places * _SPREAD | 1)).sum()


class Replay:
    """The comparison of one step between replicas; `step` is when it is due."""

    def __init__(
        self,
        state: TrainState,
        box: Writer,
        *,
        step: int,
        rank_nodes: Sequence[str],
        suspects: frozenset[str],
    ) -> None:
        """`suspects` are nodes that had a part in the step when its loss was non-finite."""
        self.step = step
        self._state = state
        self._box = box
        layout = state.mesh.layout
        nodes: list[set[str]] = [set() for _ in range(layout.num_replicas)]
        for rank, node in enumerate(rank_nodes):
            nodes[layout.replica(rank)].add(node)
        self._nodes = [frozenset(each) for each in nodes]
        self._shift = best_shift(self._nodes)
        # One that shares a node with a suspect is no less suspect.
        self._suspects = frozenset(
            replica for replica, own in enumerate(self._nodes) if own & suspects
        )
        self._own = BitSum(state.mesh.device)
        self._others = BitSum(state.mesh.device)

    def compute_other(self, loss_scale: float | Tensor) -> None:
        """Compute the part of another replica; from now on this rank's own is taken note of.

        Nothing of it remains: random states are put back, and the step clears the gradients.
        """
        state, box = self._state, self._box
        replica = (state.mesh.replica + self._shift) % state.mesh.layout.num_replicas
        devices = [state.mesh.device] if state.mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            box.phase(Phase.DATA)
            state.data_parallel.prefetch()
            micro_batches = state.data.train.micro_batches(self.step, replica=replica)
            box.phase(Phase.FORWARD_BACKWARD)
            state.data_parallel.observe(self._others.add)
            state.data_parallel.begin_step(len(micro_batches))
            loss = state.train_engine.run(
                micro_batches, loss_scale, step=self.step, replica=replica
            )
            box.phase(Phase.GRADIENT_SYNC)
            state.data_parallel.finish_gradients()
        self._others.add(loss)
        state.data_parallel.observe(self._own.add)

    def compare(self, loss: Tensor) -> None:
        """Compare what this replica computed with what another one did; `loss` is its own.

        Raises:
            SilentCorruptionError: on every rank alike; its words say whether this rank's replica
                is accused.
        """
        state = self._state
        state.data_parallel.observe(None)
        self._own.add(loss)
        is_compared = comparable(self._kinds(), state.mesh.layout, shift=self._shift)
        differs = [
            is_other and counts
            for is_other, counts in zip(self._differences(), is_compared, strict=True)
        ]
        found = accused(differs, shift=self._shift, suspects=self._suspects)
        if not found:
            if state.mesh.rank == 0:
                print(self._all_agree(is_compared), file=sys.stderr, flush=True)
            return
        if state.mesh.replica not in found:
            # The first word stops all ranks: it must come from one that is accused.
            time.sleep(CULPRIT_FIRST_S)
        raise SilentCorruptionError(self._in_words(found))

    def _differences(self) -> list[bool]:
        """By replica, whether its bits of another one's part differ from that one's own."""
        mesh = self._state.mesh
        row = torch.stack((self._own.value, self._others.value))
        own, others = mesh.dp.all_gather(row.unsqueeze(0)).unbind(dim=1)
        # Ranks that divide sequences compute the same part of each replica's.
        differs = others != own.roll(-self._shift * mesh.cp.size)
        differs = differs.view(-1, mesh.cp.size).any(dim=1).long()
        return mesh.fold(differs, _largest).bool().tolist()

    def _kinds(self) -> list[int]:
        """By rank, a number for what decides the bits of its arithmetic."""
        mesh = self._state.mesh
        text = json.dumps(environment(mesh.device), sort_keys=True)
        row = torch.zeros(mesh.layout.world_size, dtype=torch.int64, device=mesh.device)
        row[mesh.rank] = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        kinds: list[int] = mesh.fold(row, _largest).tolist()
        return kinds

    def _all_agree(self, is_compared: Sequence[bool]) -> str:
        if all(is_compared):
            return f"step {self.step}: every replica's bits are those of another one"
        return (
            f"step {self.step}: {sum(is_compared)} of {len(is_compared)} replicas were compared "
            "with another one, and agree; the others' processors or libraries differ"
        )

    def _in_words(self, found: frozenset[int]) -> str:
        """Whether one node must be wrong, or one of several may be; see `rules.exits_numbers`."""
        own = self._state.mesh.replica
        places = {self._nodes[replica] for replica in found}
        names = ", ".join(
            f"{replica} ({', '.join(sorted(self._nodes[replica]))})" for replica in sorted(found)
        )
        what = "computed other bits than another replica from the same samples and weights"
        if own not in found:
            return f"step {self.step}: not this replica: one of {names} {what}"
        if len(places) == 1:
            return f"step {self.step}: this replica, {names}, {what}"
        return f"step {self.step}: one of the replicas {names} {what}"


def _largest(rows: Tensor) -> Tensor:
    return rows.amax(dim=0)
