"""The ways to save that are compared: ours, and torch's, each with what it needs."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.baselines.dcp import AsyncSaver, Mode
from bench.baselines.plain import WarmCopy, torch_save
from bench.checkpoint.agent import Agent
from checkpoint.core.names import memory_folder
from checkpoint.stage import slotfile
from checkpoint.stage.copy_stream import CopyStream
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.slot_sums import has_sums, made_at_ns
from checkpoint.stage.stager import Stager

# A state of 4 GB takes a second, on a machine that does nothing else.
_SUMMED_WITHIN_S = 120.0


class Saver(Protocol):
    """One way to save. `save` gives the seconds for which the rank could not go on."""

    def save(self) -> float: ...

    @property
    def is_durable(self) -> bool: ...

    def settle(self) -> None:
        """Wait until it is durable, and leave the disk quiet."""


class Ours:
    """The stager in this process, the agent's uploader in another; slots on tmpfs."""

    def __init__(
        self, tensors: Sequence[NamedTensor], extra: dict[str, Any], copy_stream: CopyStream
    ) -> None:
        self._memory = Path("/dev/shm") / f"outlast-bench-{uuid.uuid4().hex[:8]}"
        self.folder = self._memory / memory_folder(0)
        self._extra = extra
        self.step = 0
        self.attempt = 1
        self.stager = Stager(
            self.folder,
            rank=0,
            attempt=self.attempt,
            world_size=1,
            tensors=tensors,
            copy_stream=copy_stream,
        )
        self._stack = ExitStack()
        self._agent: Agent | None = None
        self._is_uploading = False

    def guard(self, url: str) -> None:
        """From now on an agent gives what is saved its checksums, and uploads nothing."""
        self.upload_to(url)
        self._is_uploading = False

    def upload_to(self, url: str, *, bytes_per_s: float | None = None) -> None:
        """From now on an agent uploads what is saved, within this budget."""
        self._stack.close()
        agent = Agent(url, self._memory, bytes_per_s=bytes_per_s)
        self._agent = self._stack.enter_context(agent)
        self._is_uploading = True

    def save(self) -> float:
        self.step += 1
        begin_s = time.perf_counter()
        saved = self.stager.save(
            self.step,
            self._extra,
            upload=self._is_uploading,
            common_step=self.step - 1,
        )
        took_s = time.perf_counter() - begin_s
        assert saved, "there is always a slot when one upload is waited for at a time"
        return took_s

    @property
    def is_durable(self) -> bool:
        return self._agent is None or not self._is_uploading or self._has_committed()

    def _has_committed(self) -> bool:
        assert self._agent is not None
        return self._agent.has_committed(self.step)

    def durable_at_s(self) -> float:
        """When the agent knew that what was saved last is a checkpoint; waits for it."""
        assert self._agent is not None
        return self._agent.committed_at_s(self.step)

    @contextmanager
    def saved(self) -> Iterator[memoryview]:
        """What was saved last, where it lies in host memory, all of it mapped."""
        slots = slotfile.open_existing(self.folder)
        (slot,) = (slot for slot in slots if slot.read().step == self.step)
        with slot.owned as view:
            torch.frombuffer(view, dtype=torch.uint8)[:: mmap.PAGESIZE].sum()
            yield view
        for each in slots:
            each.close()

    def settle(self) -> None:
        self.stager.finish()
        if self._agent is not None and self._is_uploading:
            self._agent.committed_at_s(self.step)
        elif self._agent is not None:
            self.checksum_delay_s()

    def checksum_delay_s(self) -> float:
        """From the seal of what was saved last until it had its checksums; waits for them."""
        deadline_s = time.monotonic() + _SUMMED_WITHIN_S
        slots = slotfile.open_existing(self.folder)
        try:
            (slot,) = (slot for slot in slots if slot.read().step == self.step)
            while not has_sums(slot):
                assert time.monotonic() < deadline_s, f"no checksums of step {self.step}"
                time.sleep(0.001)
            return (made_at_ns(slot) - slot.sealed_at_ns) / 1e9
        finally:
            for each in slots:
                each.close()

    def close(self) -> None:
        """Stop the agent and give all memory back."""
        self._stack.close()
        self.stager.close()
        shutil.rmtree(self._memory, ignore_errors=True)


class Plain:
    """The copy alone: what no save to memory can beat."""

    is_durable = True

    def __init__(self, tensors: Sequence[NamedTensor]) -> None:
        self._copy = WarmCopy([named.tensor for named in tensors])

    def save(self) -> float:
        return self._copy.copy()

    def settle(self) -> None:
        """Nothing is under way."""


class TorchSave:
    """`torch.save` to local disk, flushed: training waits for all of it."""

    is_durable = True

    def __init__(self, state: dict[str, Any], folder: Path) -> None:
        self._state = state
        self._path = folder / "state.pt"

    def save(self) -> float:
        return torch_save(self._state, self._path)

    def settle(self) -> None:
        self._path.unlink()
        os.sync()


class Dcp:
    """torch's asynchronous checkpoint, staging buffers kept."""

    def __init__(self, state: dict[str, Any], folder: Path, mode: Mode) -> None:
        self._saver = AsyncSaver(state, folder, mode)

    def save(self) -> float:
        return self._saver.save()

    @property
    def is_durable(self) -> bool:
        return self._saver.is_durable

    def settle(self) -> None:
        self._saver.settle()
        os.sync()

    def close(self) -> None:
        self._saver.close()


def in_random_turns(
    savers: dict[str, Saver], rounds: int, measure: Callable[[Saver], float], *, warm: int
) -> dict[str, list[float]]:
    """What `measure` says of each, each once a round in an order that chance gives.

    Of savers that always come in the same order, one is always measured in what another left.
    `warm` rounds go before: whatever is written for the first time is no part of it.
    """
    order = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in savers}
    for number in range(-warm, rounds):
        for name in order.sample(sorted(savers), len(savers)):
            value = measure(savers[name])
            savers[name].settle()
            if number >= 0:
                found[name].append(value)
    return found


def in_turns(
    savers: dict[str, Saver], rounds: int, measure: Callable[[Saver], float]
) -> dict[str, list[float]]:
    """What `measure` says of each, one of each in turn; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in savers}
    for number in range(rounds + 1):
        for name, saver in savers.items():
            value = measure(saver)
            saver.settle()
            if number > 0:
                found[name].append(value)
    return found


def state_dict(tensors: Sequence[NamedTensor]) -> dict[str, Any]:
    """The same tensors as torch's tools take them."""
    return {named.name: named.tensor for named in tensors}
