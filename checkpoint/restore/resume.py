"""Where an attempt goes on from: all ranks agree on one step, then load it.

Host memory comes first: the newest step that every rank has sealed in the same
attempt, unless storage is known to be ahead. Then storage, newest commit first, of
whatever layout it is. A checkpoint that turns out corrupt on any rank is dropped by
all, loudly, for the next older. A job that has nothing of its own yet may begin with
another job's checkpoint.

Nobody can know what storage holds that does not answer, and to begin anew would give up what
may be there: all ranks wait for it together, for a while.

Where training went back past batches that are left out, states that were reached within
them do not count, wherever they are (`outlast.skipped`). Neither do those of a history that a
person gave up (`outlast.chosen`); the first attempt after that loads what they chose, or fails.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from checkpoint.core.manifest import Manifest
from checkpoint.core.pacing import backoff_s
from checkpoint.errors import LayoutMismatchError, NoCheckpointError, StorageUnavailableError
from checkpoint.restore.loaders import Loader, Ranks
from checkpoint.restore.peers import abandoned_on_failure, agree, outcome
from checkpoint.restore.restore import CorruptCheckpointError, Node, Peers, SealedStep
from checkpoint.restore.storage_prefetch import StoragePrefetch
from checkpoint.storage.leases import reading
from checkpoint.storage.storage import Storage
from checkpoint.upload.cleaning import committed_by
from outlast.chosen import ChosenStart, is_given_up
from outlast.crashpoints import CrashPoint, reach
from outlast.errors import FatalError, SettingError
from outlast.skipped import StepRange, is_undone

# Numbers that ranks compare: step and attempt of each host-memory slot, of which there
# are three or four.
_MAX_NUMBERS = 16
_NONE = -1

Load = Callable[[], dict[str, Any]]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A step that was loaded, and what came with it besides tensors.

    `skipped` are newer checkpoints in storage that could not be loaded: step and reason.
    """

    step: int
    source: str
    extra: dict[str, Any]
    skipped: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherJob:
    """The checkpoints of another job that this one begins with.

    `step` None: the newest. It must come before `last_step`, at which this job ends; or
    training begins at step 0 with its weights alone, which `weights` loads.
    `is_chosen` says that a person chose it later, and not the spec.
    """

    url: str
    step: int | None
    last_step: int
    weights: Loader | None = None
    is_chosen: bool = False

    def failure(self, what: str) -> FatalError:
        """The error of a checkpoint that cannot be begun with: a choice can be made anew."""
        if self.is_chosen:
            return NoCheckpointError(f"resume --checkpoint: {what}")
        return SettingError(f"checkpoint.load: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where a rank's state may come from.

    `committed_step` is the newest that the controller knows to be in the job's own
    storage. `join` makes the group of all ranks, which only storage needs; those of `node`
    pass on what they read through the memory that they share. `skipped` are steps that are
    left out, and `chosen` says what was given up. `only_step` is the step that must be loaded,
    where there is one; 0: none of its own. Storage that does not answer is asked again for
    `patience_s`.
    """

    memory_dir: Path
    own: StoragePrefetch
    committed_step: int
    other: OtherJob | None
    join: Callable[[], Peers]
    node: Node | None = None
    skipped: tuple[StepRange, ...] = ()
    chosen: tuple[ChosenStart, ...] = ()
    only_step: int | None = None
    patience_s: float = 0.0

    def counts(self, step: int) -> bool:
        """Whether a state after `step` is one of this job's history."""
        return not is_undone(self.skipped, step)

    def may_load(self, sealed: SealedStep) -> bool:
        """Whether a state in host memory is of this job's history, and new enough."""
        if self.only_step is not None or is_given_up(self.chosen, sealed.step, sealed.attempt):
            return False
        is_newest = sealed.step >= self.committed_step or not self.counts(self.committed_step)
        return is_newest and self.counts(sealed.step)

    @property
    def is_stored(self) -> bool:
        """Whether storage must have something to go on from."""
        return self.committed_step > 0 and self.counts(self.committed_step)


def restore(loader: Loader, ranks: Ranks, sources: Sources) -> Restored | None:
    """Load the newest common state; None when there is none at all.

    Raises:
        NoCheckpointError: the job's own were committed, and none of them can be loaded; or the
            one that a person chose.
        SettingError: the same of those that its spec tells it to begin with, or they are of
            another model.
        StorageUnavailableError: storage refuses, or still does not answer.
    """
    in_memory = _common(ranks, loader.sealed_steps(sources.memory_dir))
    loads = [
        (sealed.step, partial(loader.load_memory, sources.memory_dir, sealed))
        for sealed in in_memory
        if sources.may_load(sealed)
    ]
    restored, _ = _first_loadable(ranks, loads, "host memory")
    if restored is not None:
        return restored
    with abandoned_on_failure(sources.join()) as peers:
        load = partial(_from_storage, loader, ranks, peers, sources)
        return _patiently(peers, sources.patience_s, load)


def _from_storage(loader: Loader, ranks: Ranks, peers: Peers, sources: Sources) -> Restored | None:
    restored = _from_own(loader, ranks, peers, sources)
    if restored is None and sources.other is not None:
        restored = _from_other(loader, ranks, peers, sources.other, sources.node)
    if sources.chosen or sources.skipped:
        # Only now: where nothing can be loaded, a person may choose again.
        _set_aside(ranks, peers, sources)
    return restored


def _patiently(peers: Peers, patience_s: float, work: Callable[[], _Result]) -> _Result:
    """What `work` gives, again and again while storage does not answer, which it tells all alike.

    Rank 0 says how long: clocks differ.
    """
    until_s = time.monotonic() + patience_s
    for num_failures in itertools.count(1):
        try:
            return work()
        except StorageUnavailableError as error:
            left_s = until_s - time.monotonic()
            wait_s: float = json.loads(
                peers.from_rank_0(json.dumps(_pause_s(num_failures, left_s)).encode())
            )
            if error.lasting or wait_s <= 0:
                raise
            if peers.rank == 0:
                # `diagnostics.core.rules.worker_log` knows this line.
                print(
                    f"waiting for {error}; next try in {wait_s:.1f} s, for {left_s:.0f} s more",
                    file=sys.stderr,
                    flush=True,
                )
        time.sleep(wait_s)
    raise AssertionError("the loop returns or raises")


def _pause_s(num_failures: int, left_s: float) -> float:
    """How long to wait for the next try; not positive where there is no time left."""
    return min(backoff_s(num_failures, random.random()), left_s)


def _from_own(loader: Loader, ranks: Ranks, peers: Peers, sources: Sources) -> Restored | None:
    """The newest checkpoint of this job that can be loaded; None when it has none."""
    with _opened(peers, sources.own) as (storage, committed, manifest_of):
        over = _given_up(storage, committed, peers, sources)
        steps = [step for step in committed if step not in over and sources.counts(step)]
        if sources.only_step is not None:
            steps = [step for step in steps if step == sources.only_step]
        loads = _loads(storage, manifest_of, steps, loader, peers, sources.node)
        drop = partial(_quarantine, storage, ranks, peers)
        restored, skipped = _first_loadable(ranks, loads, "storage", drop=drop)
    if restored is not None:
        return replace(restored, skipped=skipped)
    if steps or sources.is_stored:
        newest = max((*steps, sources.committed_step))
        damage = _in_words(skipped) or f": step {newest} was committed there, and is gone"
        raise NoCheckpointError(
            f"{storage.url} has no checkpoint that can be loaded{damage.replace(';', ':', 1)}"
        )
    return None


def _set_aside(ranks: Ranks, peers: Peers, sources: Sources) -> None:
    """Make checkpoints of a history that is over not exist, before training goes on.

    Retention would keep them instead of those that can be gone back to.
    """
    with _opened(peers, sources.own) as (storage, committed, _):
        over = _given_up(storage, committed, peers, sources)
        for step in committed:
            if step in over or not sources.counts(step):
                _quarantine(storage, ranks, peers, step)


def _quarantine(storage: Storage, ranks: Ranks, peers: Peers, step: int) -> None:
    """Put a checkpoint out of the way, so that its step can be committed again."""
    problem = None
    if ranks.rank == 0:
        problem = outcome(partial(storage.quarantine_step, step))
        reach(CrashPoint.RESTORE_SET_ASIDE)
    agree(peers, step, problem)


def _given_up(
    storage: Storage, committed: Sequence[int], peers: Peers, sources: Sources
) -> frozenset[int]:
    """Steps that were committed in a history that is over, as rank 0 sees them."""
    if not sources.chosen:
        return frozenset()

    def look() -> list[int]:
        return [
            step
            for step in committed
            if is_given_up(sources.chosen, step, committed_by(storage, step))
        ]

    found = outcome(look) if peers.rank == 0 else []
    agree(peers, 0, found if isinstance(found, Exception) else None)
    return frozenset(json.loads(peers.from_rank_0(json.dumps(found).encode())))


def _from_other(
    loader: Loader, ranks: Ranks, peers: Peers, other: OtherJob, node: Node | None
) -> Restored:
    """The checkpoint this job was given to begin with; there must be such a checkpoint."""
    prefetch = StoragePrefetch(other.url, lists=peers.rank == 0)
    with _opened(peers, prefetch) as (storage, committed, manifest_of):
        steps = [step for step in committed if other.step in (None, step)]
        if steps and steps[0] >= other.last_step and other.weights is None:
            raise other.failure(
                f"step {steps[0]} below {other.url} is not before the end of this job, steps = "
                f"{other.last_step}; raise steps, or say an earlier load_step"
            )
        # It is not ours: a corrupt one is left as it is.
        loads = _loads(storage, manifest_of, steps, other.weights or loader, peers, node)
        try:
            restored, skipped = _first_loadable(ranks, loads, storage.url)
        except LayoutMismatchError as error:
            raise other.failure(f"{storage.url}: {error}") from error
    if restored is None:
        wanted = "no checkpoint" if other.step is None else f"no checkpoint of step {other.step}"
        raise other.failure(
            f"{wanted} below {other.url} can be loaded (committed: {committed}"
            f"{_in_words(skipped)}); a checkpoint root is checkpoint.url of the other job with "
            "its job id"
        )
    if other.weights is not None:
        extra = {"weights_of": f"step {restored.step} of {other.url}"}
        restored = replace(restored, step=0, extra=extra)
    return replace(restored, skipped=skipped)


def _in_words(skipped: Sequence[tuple[int, str]]) -> str:
    return "".join(f"; step {step}: {reason}" for step, reason in skipped)


@contextmanager
def _opened(
    peers: Peers, prefetch: StoragePrefetch
) -> Iterator[tuple[Storage, list[int], Callable[[int], Manifest]]]:
    """A storage, its committed steps as rank 0 sees them, as listings may differ, and manifests."""
    look = prefetch.take()
    storage, steps, _ = look
    problem = storage if isinstance(storage, Exception) else None
    if isinstance(steps, Exception):
        problem = problem or steps
    try:
        agree(peers, 0, problem)
        assert isinstance(storage, Storage), "or the ranks would have agreed on its failure"
        yield storage, json.loads(peers.from_rank_0(json.dumps(steps).encode())), look.manifest
    finally:
        if isinstance(storage, Storage):
            storage.close()


def _loads(
    storage: Storage,
    manifest_of: Callable[[int], Manifest],
    steps: Sequence[int],
    loader: Loader,
    peers: Peers,
    node: Node | None,
) -> list[tuple[int, Load]]:
    def load(step: int) -> dict[str, Any]:
        # One lease is enough to keep all of it from being deleted.
        lease = reading(storage, step) if peers.rank == 0 else nullcontext()
        with lease:
            return loader.load_storage(storage, step, peers, node=node, manifest_of=manifest_of)

    return [(step, partial(load, step)) for step in steps]


def _first_loadable(
    ranks: Ranks,
    loads: Sequence[tuple[int, Load]],
    source: str,
    *,
    drop: Callable[[int], None] | None = None,
) -> tuple[Restored | None, tuple[tuple[int, str], ...]]:
    """Load the first step that is whole on every rank; `drop` those before it, and say why."""
    skipped: list[tuple[int, str]] = []
    for index, (step, load) in enumerate(loads):
        problem = ""
        extra: dict[str, Any] = {}
        try:
            extra = load()
        except CorruptCheckpointError as error:
            problem = error.what
        if _all_ranks(ranks, problem == ""):
            # Where none can be loaded, people may repair one: so they stay until here.
            for damaged, _ in skipped if drop is not None else ():
                assert drop is not None
                drop(damaged)
            return Restored(step=step, source=source, extra=extra), tuple(skipped)
        rest = loads[index + 1 :]
        following = f"step {rest[0][0]}" if rest else "an older source"
        reason = problem or "corrupt on another rank"
        print(
            f"checkpoint step {step}: {reason} ({source}); falling back to {following}",
            file=sys.stderr,
            flush=True,
        )
        skipped.append((step, reason))
    return None, tuple(skipped)


def _common(ranks: Ranks, sealed: Sequence[SealedStep]) -> list[SealedStep]:
    """What every rank has, newest first."""

    def pack(steps: Sequence[SealedStep]) -> Tensor:
        return _pack([number for step in steps for number in step], ranks.device)

    def unpack(row: Tensor) -> list[SealedStep]:
        numbers = _unpack(row)
        return [SealedStep(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]

    def intersect(rows: Tensor) -> Tensor:
        first, *others = [unpack(row) for row in rows]
        return pack([step for step in first if all(step in other for other in others)])

    return unpack(ranks.fold(pack(sealed), intersect))


def _all_ranks(ranks: Ranks, ok: bool) -> bool:
    row = torch.tensor([int(ok)], dtype=torch.int64, device=ranks.device)
    return bool(ranks.fold(row, lambda rows: rows.amin(dim=0)).item())


def _pack(numbers: Sequence[int], device: torch.device) -> Tensor:
    padded = [*numbers[:_MAX_NUMBERS], *[_NONE] * (_MAX_NUMBERS - len(numbers))]
    return torch.tensor(padded, dtype=torch.int64, device=device)


def _unpack(row: Tensor) -> list[int]:
    return [number for number in row.tolist() if number != _NONE]
