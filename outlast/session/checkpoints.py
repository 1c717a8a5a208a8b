"""Checkpoints of a script's objects: into host memory at each save, from there to storage.

It is the trainer's own way: the same slots, uploads, copies on other nodes and restore.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from checkpoint.core.saving import Held, SavePlan
from checkpoint.restore.fetching import await_fetched
from checkpoint.restore.peers import Peers
from checkpoint.restore.restore import Node
from checkpoint.restore.resume import OtherJob, Sources, restore
from checkpoint.restore.storage_prefetch import StoragePrefetch
from checkpoint.stage.copy_stream import CopyStream, CudaCopyStream, HostCopyStream
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.stager import Stager
from outlast.blackbox import StartMark
from outlast.chosen import must_start_at
from outlast.session.agreement import RanksOf, Rounds, Unrecorded, interface_of, rounds_of
from outlast.session.loading import TEXT, ObjectsLoader, text_tensor
from outlast.session.objects import Objects
from outlast.session.process import TIMEOUT_S, Session
from outlast.session.shards import Naming, rank_path
from trainer.parallel.hosts import join_hosts


class Checkpoints:
    """Of one rank, in a session. Every method is called by all ranks at the same step."""

    def __init__(self, session: Session, objects: Objects) -> None:
        self._session = session
        self._objects = objects
        self._contract = session.contract
        self._store = None if session.contract.world_size == 1 else session.store()
        self._rounds: Rounds = rounds_of(session, self._store)
        self._plan = SavePlan(
            storage_interval_steps=session.settings["storage_interval_steps"],
            is_replicated=self._is_replicated,
        )
        self._stager: Stager | None = None
        self._resumed_step = 0
        self._last_step = -1
        self._text_bytes = 0
        contract = session.contract
        self._naming = Naming(contract.rank, contract.world_size)
        self._is_stopping = False
        # A process that ends would leave the copies of its last save half done.
        atexit.register(self._finish)

    def restore(self) -> int:
        """Load the newest state that all ranks can; the step after which it was saved, 0: none.

        Raises:
            NoCheckpointError: there were some, and none of them can be loaded.
            StorageUnavailableError: storage does not answer.
        """
        self._check_attempt()
        contract, memory_dir = self._contract, self._contract.memory_dir
        await_fetched(memory_dir, TIMEOUT_S)
        peers = self._peers()
        prefetch = StoragePrefetch(contract.checkpoint_url, lists=contract.rank == 0)
        sources = Sources(
            memory_dir=memory_dir,
            own=prefetch,
            committed_step=contract.committed_step,
            skipped=contract.skipped,
            chosen=contract.chosen,
            only_step=must_start_at(contract.chosen, contract.attempt),
            other=self._other_job(),
            join=lambda: peers,
            node=Node(folder=memory_dir.parent, ranks=frozenset(contract.node_ranks)),
            patience_s=TIMEOUT_S / 2,
        )
        loader = ObjectsLoader(self._objects, rank=contract.rank, world_size=contract.world_size)
        restored = restore(loader, RanksOf(peers), sources)
        step = 0 if restored is None else restored.step
        how = "begins" if restored is None else f"goes on after step {step}, from {restored.source}"
        print(f"outlast: rank {contract.rank} {how}", file=sys.stderr, flush=True)
        self._resumed_step = step
        self._plan.resumed(step)
        self._session.resumed(step)
        self._session.box.mark(StartMark.RESTORED)
        return step

    def save(self, step: int) -> None:
        """Save the state after `step`; on storage, too, as often as the job's spec says.

        Raises:
            TypeError: an object's state holds what cannot be saved; it is named.
            FatalError: it does not fit into host memory.
        """
        self._check_attempt()
        held = self._held()
        self._plan.agreed(held)
        order = self._plan.order(step, held, stopping=self._is_stopping)
        assert order is not None, "each step is saved"
        with _no_collection():
            stager = self._ready()
        if stager.save(step, {"step": step}, **asdict(order)):
            self._plan.saved(order)
            stager.order_behind()
        else:
            message = f"outlast: step {step}: not saved: uploads hold every spare slot"
            print(message, file=sys.stderr, flush=True)
        self._last_step = step
        self._tell()

    def leave(self) -> Stager | None:
        """Give the attempt up; the slots, for the checkpoints of the next one."""
        atexit.unregister(self._finish)
        if self._stager is not None:
            self._stager.leave()
        self._rounds.abandon()
        stager, self._stager = self._stager, None
        return stager

    @property
    def should_stop(self) -> bool:
        """Whether any rank was asked to stop, as all ranks knew at the last save.

        What is in host memory then goes to storage, too.
        """
        if not self._is_stopping:
            return False
        if self._stager is not None and self._last_step >= 0:
            self._stager.want_upload(self._last_step)
        return True

    def _check_attempt(self) -> None:
        self._session.check()
        if self._contract is not self._session.contract:
            raise ValueError(
                "these checkpoints are of an attempt that was left; call session.checkpoint in the "
                "function that session.healing calls"
            )

    def _finish(self) -> None:
        """Return once the last save is whole."""
        if self._stager is not None:
            self._stager.finish(TIMEOUT_S)

    # What ranks agree on

    def _held(self) -> Held:
        """What all ranks had when the last save had been made."""
        numbers = self._rounds.result()
        if numbers is None:
            step = self._resumed_step
            return Held(
                lowest_sealed=step,
                highest_sealed=step,
                upload_busy=False,
                newest_replicated=step,
                replica_busy=False,
            )
        lowest, minus_highest, not_uploading, replicated, not_copying, goes_on = numbers
        self._is_stopping = self._is_stopping or not goes_on
        return Held(
            lowest_sealed=lowest,
            highest_sealed=-minus_highest,
            upload_busy=not not_uploading,
            newest_replicated=replicated,
            replica_busy=not not_copying,
        )

    def _tell(self) -> None:
        stager = self._stager
        assert stager is not None
        sealed = stager.newest_sealed
        self._rounds.begin(
            (
                sealed,
                -sealed,
                int(not stager.upload_busy),
                stager.newest_replicated,
                int(not stager.replica_busy),
                int(not self._session.is_asked_to_stop),
            )
        )

    def _peers(self) -> Peers:
        return join_hosts(
            self._contract.rank,
            self._contract.world_size,
            store=self._store,
            recorder=Unrecorded(),
            gloo_interface=interface_of(self._session),
        )

    def _other_job(self) -> OtherJob | None:
        """Checkpoints elsewhere that a person chose to go on from."""
        for each in self._contract.chosen[-1:]:
            if each.url:
                step = None if each.url_step < 0 else each.url_step
                return OtherJob(url=each.url, step=step, last_step=sys.maxsize, is_chosen=True)
        return None

    @property
    def _is_replicated(self) -> bool:
        return bool(self._session.settings["replicas"]) and len(set(self._contract.rank_nodes)) > 1

    # Host memory

    def _ready(self) -> Stager:
        """The slots for the present state: those that are there, or new ones."""
        flat = self._objects.flatten()
        text = text_tensor(flat, self._text_bytes)
        is_known = text.nbytes == self._text_bytes
        sources = self._naming.same(flat.tensors, flat.own) if is_known else None
        if self._stager is not None and sources is not None:
            self._stager.move([text, *sources])
            return self._stager
        self._text_bytes = text.nbytes
        name = rank_path(self._contract.rank, TEXT)
        tensors = [
            NamedTensor(name, text, tuple(text.shape), (0,)),
            *self._naming.name(flat.tensors, flat.own),
        ]
        if self._stager is not None:
            if self._stager.rebind(tensors):
                return self._stager
            self._stager.close()
        self._stager = self._make_stager(tensors)
        return self._stager

    def _make_stager(self, tensors: Sequence[NamedTensor]) -> Stager:
        stager = self._kept_stager(tensors) or self._new_stager(tensors)
        stager.resumed(max(self._resumed_step, self._last_step))
        return stager

    def _kept_stager(self, tensors: Sequence[NamedTensor]) -> Stager | None:
        """That of the attempt before in this process, if its slots will do."""
        kept, self._session.kept_slots = self._session.kept_slots, None
        if kept is None:
            return None
        is_alike = kept.is_replicated == self._is_replicated
        if is_alike and kept.rejoin(self._contract.attempt, tensors):
            return kept
        kept.close()
        return None

    def _new_stager(self, tensors: Sequence[NamedTensor]) -> Stager:
        contract = self._contract
        return Stager(
            contract.memory_dir,
            rank=contract.rank,
            attempt=contract.attempt,
            world_size=contract.world_size,
            tensors=tensors,
            is_replicated=self._is_replicated,
            copy_stream=_copy_stream(tensors),
            is_void=lambda: self._session.is_void,
        )


@contextmanager
def _no_collection() -> Iterator[None]:
    """No pass of the garbage collector meanwhile.

    Taking a state apart makes thousands of small objects, which go by themselves: passes over them
    cost a fifth of its time and find nothing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _copy_stream(tensors: Sequence[NamedTensor]) -> CopyStream:
    """On a GPU copies wait for what was computed, and only the device waits for them."""
    device = next((named.tensor.device for named in tensors if named.tensor.is_cuda), None)
    return HostCopyStream() if device is None else CudaCopyStream(device)
