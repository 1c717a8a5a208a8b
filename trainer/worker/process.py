"""One rank's process, from the fork to its exit code.

`run` is called by the standby process in a freshly forked child that has one
thread and has not touched torch's kernels. Time until the first step is what
a restart costs, so nothing here imports late, and initial values are only
made when there is no state to restore.

Its exit codes, its files and the signal that stops it are those of `outlast.worker_contract`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import FrameType

import torch
import torch.utils.deterministic
from torch.distributed import (  # type: ignore[attr-defined]  # re-exports
    PrefixStore,
    Store,
    TCPStore,
)

from checkpoint.memory_check import check_host_memory
from checkpoint.replicas.placing import placement_of
from checkpoint.restore.peers import Peers
from checkpoint.restore.storage_prefetch import StoragePrefetch
from checkpoint.stage.copy_stream import copy_stream_for
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.slotfile import TABLE_FILE, read_table
from checkpoint.stage.stager import Stager
from outlast.blackbox import Phase, StartMark, Writer, open_black_box
from outlast.clock import node_time_ns
from outlast.crashpoints import CrashPoint, reach
from outlast.spec import JobSpec
from outlast.worker_contract import (
    GLOO_INTERFACE,
    STOP_SIGNAL,
    WorkerContract,
    WorkerExitCode,
)
from trainer.data.node import NodeLoader
from trainer.parallel.aborting import settle
from trainer.parallel.comm import PeerLostError
from trainer.parallel.hosts import join_hosts
from trainer.parallel.mesh import Mesh, build_mesh, rejoin
from trainer.recovery.replay import Replay
from trainer.worker import evidence, warmup
from trainer.worker.assignment import Assignment, expected_by
from trainer.worker.body import build_body
from trainer.worker.device import set_up_device
from trainer.worker.kept import Kept
from trainer.worker.line import AgentLine
from trainer.worker.loop import TrainLoop
from trainer.worker.programs import log_to
from trainer.worker.reports import write_error
from trainer.worker.restoring import restore_state
from trainer.worker.state import TrainState, build_state


@dataclass(slots=True)
class _Stop:
    """Set by SIGTERM; read once per step."""

    requested: bool = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def run(contract: WorkerContract) -> int:
    """Train as `contract` says; returns the exit code. The caller exits with it.

    With a line to its agent, a rank that loses a peer, or is asked to, gives its attempt up and
    lives on: the next contract has it take part in another one.
    """
    # What the standby process imported lives as long as this process. Without this every
    # full collection visits it all and copies each page it shares: 0.1 s, several times.
    gc.freeze()
    line = _line_of(contract)
    kept = Kept()
    listening = contract.rendezvous_fd
    while True:
        code = _take_part(contract, line, kept)
        if code is not None:
            return code
        assert line is not None
        following = line.next_contract(_patience_s(contract))
        if following is None:
            return WorkerExitCode.STOPPED
        log_to(following.log_path)
        contract = replace(following, rendezvous_fd=listening, forked_at_ns=node_time_ns())


def _line_of(contract: WorkerContract) -> AgentLine | None:
    if not contract.agent_line:
        return None
    return AgentLine(contract.agent_line, attempt=contract.attempt)


def _take_part(contract: WorkerContract, line: AgentLine | None, kept: Kept) -> int | None:
    """One attempt; the exit code, or None when this rank has left it and may join another."""
    stop = _Stop()
    try:
        parsed = Assignment.of(contract)
        box = open_black_box(contract)
        box.mark(StartMark.FORKED, parsed.forked_at_ns)
        evidence.allow_stack_dumps()
        code = _train(parsed, box, stop, line, kept)
        # Of a stop that all ranks agreed on, those lived on that are not told to end.
        lives_on = code == WorkerExitCode.STOPPED and not stop.requested
        if line is None or not line.is_open or not lives_on:
            return code
        completed = True
    except Exception as error:  # noqa: BLE001  # the boundary: whatever it is, it is reported
        may_stay = line is not None and line.is_open
        is_asked = line is not None and line.is_leaving
        if not is_asked:
            _report(contract, error)
        if not (may_stay and (is_asked or isinstance(error, PeerLostError))):
            return WorkerExitCode.FAILED
        assert line is not None
        line.leave()
        completed = False
        if not isinstance(error, PeerLostError):
            kept.distrust()
    # Behind the handler, so that nothing of the attempt is left: its frames were the error's.
    signal.signal(STOP_SIGNAL, signal.SIG_DFL)
    try:
        line.abort()
        settle(contract.device)
        kept.leave(contract.attempt, is_void=line.is_void)
    except RuntimeError as error:
        _report(contract, error)
        return WorkerExitCode.FAILED
    line.left(completed=completed)
    return None


def _report(contract: WorkerContract, error: Exception) -> None:
    traceback.print_exception(error)
    sys.stderr.flush()
    write_error(contract.error_path, error)


def _patience_s(contract: WorkerContract) -> float:
    """For how long at most a rank that has left waits to join another attempt."""
    return _timeout_s(Assignment.of(contract).spec)


def _timeout_s(spec: JobSpec) -> float:
    # Hangs are found by the agent; this only bounds the life of an orphan.
    return max(spec.recovery.first_step_timeout_s, 2 * spec.recovery.hang_timeout_s)


def _train(
    assignment: Assignment, box: Writer, stop: _Stop, line: AgentLine | None, kept: Kept
) -> int:
    spec = assignment.spec
    kept.prepare(assignment)
    _check_host_memory(assignment)
    device = _set_up_torch(assignment)
    box.phase(Phase.GROUPS)
    prefetch = _begin_reading(assignment)
    timeout_s = _timeout_s(spec)
    store = _rendezvous(assignment, timeout_s)
    mesh = _join(assignment, kept, device, store, timeout_s, box)
    if line is not None and device.type == "cuda":
        line.holds(mesh.abort)
    box.mark(StartMark.GROUPS_READY)
    body = kept.body or build_body(spec, mesh)
    kept.keep(mesh, body)
    state = build_state(spec, mesh, assignment.data_dir, _node_loader(assignment), body)
    kept.note_listener(state.data_parallel)
    box.mark(StartMark.MODEL_READY)
    box.expect(expected_by(assignment.spec_json, mesh.at.pp, on_gpu=device.type == "cuda"))
    join = partial(
        join_hosts,
        assignment.rank,
        assignment.world_size,
        store=store,
        recorder=box,
        gloo_interface=_interface(),
    )
    saver, resumed_step = _resume(assignment, state, box, prefetch, join, line, kept)
    if warmup.is_needed(mesh):
        warmup.warm_up(state, resumed_step + 1)

    # Before this point SIGTERM simply ends the process: there is nothing to save.
    signal.signal(STOP_SIGNAL, stop.on_signal)
    if line is not None:
        line.trains()
    loop = TrainLoop(
        state,
        box,
        saver,
        skipped=assignment.skipped,
        replay=_replay(assignment, state, box),
        stop_requested=lambda: stop.requested or (line is not None and line.is_stopping),
        check=(lambda: None) if line is None else line.check,
    )
    kept.follow(loop)
    done = loop.run(resumed_step)
    box.phase(Phase.FINISHED)
    return WorkerExitCode.DONE if done else WorkerExitCode.STOPPED


def _check_host_memory(assignment: Assignment) -> None:
    """Before this rank's first attempt here: an earlier one has taken its slots, and what others
    need shows as theirs are made."""
    if not (assignment.memory_dir / TABLE_FILE).exists():
        check_host_memory(
            assignment.spec,
            assignment.node_ranks,
            assignment.memory_dir.parent,
            shift=assignment.replica_shift,
        )


def _node_loader(assignment: Assignment) -> NodeLoader | None:
    """The process that reads data for this node, where there is one."""
    path = assignment.data_socket
    return None if path is None else NodeLoader(path)


def _begin_reading(assignment: Assignment) -> StoragePrefetch:
    """What the restore will ask for is read while groups form."""
    prefetch = StoragePrefetch(assignment.checkpoint_url, lists=assignment.rank == 0)
    if (assignment.memory_dir / TABLE_FILE).exists():
        # `read_table` keeps what it has parsed.
        threading.Thread(target=read_table, args=(assignment.memory_dir,), daemon=True).start()
    else:
        # Nothing in host memory: storage will be asked.
        prefetch.begin()
    return prefetch


def _resume(
    assignment: Assignment,
    state: TrainState,
    box: Writer,
    prefetch: StoragePrefetch,
    join: Callable[[], Peers],
    line: AgentLine | None,
    kept: Kept,
) -> tuple[Stager, int]:
    """Load what the attempt begins with; returns what saves from now on, and the step loaded."""
    box.phase(Phase.RESTORE)
    reach(CrashPoint.RESTORE_BEGUN)
    tensors = state.named_tensors()
    check = (lambda: None) if line is None else line.check
    present = kept.take_present()
    if assignment.replayed_step > 0:
        # Some rank's numbers were wrong: those that went through checksums are loaded.
        present = None
    resumed_step = restore_state(assignment, state, tensors, prefetch, join, check, present)
    if resumed_step < state.spec.steps:
        # The first batch is read while host memory is mapped.
        state.data.train.prepare(resumed_step + 1)
    saver = _saver(assignment, state.mesh.device, tensors, line, kept)
    reach(CrashPoint.RESTORED)
    saver.resumed(resumed_step)
    box.resumed(resumed_step)
    box.mark(StartMark.RESTORED)
    return saver, resumed_step


def _saver(
    assignment: Assignment,
    device: torch.device,
    tensors: Sequence[NamedTensor],
    line: AgentLine | None,
    kept: Kept,
) -> Stager:
    """What saves this rank's state: that of the attempt before, where its slots will do."""
    is_replicated = _is_replicated(assignment)
    saver = kept.saver
    if saver is not None:
        if saver.is_replicated == is_replicated and saver.rejoin(assignment.attempt, tensors):
            return saver
        kept.saver = None
        saver.close()
    kept.saver = Stager(
        assignment.memory_dir,
        rank=assignment.rank,
        attempt=assignment.attempt,
        world_size=assignment.world_size,
        tensors=tensors,
        is_replicated=is_replicated,
        copy_stream=copy_stream_for(device, ranks_here=len(assignment.node_ranks)),
        is_void=lambda: line is not None and line.is_void,
    )
    return kept.saver


def _join(
    assignment: Assignment,
    kept: Kept,
    device: torch.device,
    store: Store | None,
    timeout_s: float,
    box: Writer,
) -> Mesh:
    """This rank's groups, connected for this attempt."""
    if kept.mesh is not None:
        rejoin(
            kept.mesh,
            store=store,
            timeout_s=timeout_s,
            recorder=box,
            gloo_interface=_interface(),
        )
        return kept.mesh
    return build_mesh(
        assignment.spec.layout,
        assignment.rank,
        store=store,
        device=device,
        timeout_s=timeout_s,
        recorder=box,
        tied_embeddings=assignment.spec.model.tied_embeddings,
        folds=assignment.spec.parallel.folds,
        gloo_interface=_interface(),
    )


def _interface() -> str:
    return os.environ.get(GLOO_INTERFACE, "").partition(",")[0]


def _replay(assignment: Assignment, state: TrainState, box: Writer) -> Replay | None:
    """The comparison of a step that is done again, where bits of replicas can be compared."""
    # Replicas that share experts add up each other's tokens, in an order that is theirs.
    is_comparable = assignment.spec.determinism == "bitwise" and state.mesh.ep.size == 1
    if assignment.replayed_step <= 0 or state.mesh.layout.num_replicas == 1 or not is_comparable:
        return None
    return Replay(
        state,
        box,
        step=assignment.replayed_step,
        rank_nodes=assignment.rank_nodes,
        suspects=frozenset(assignment.suspects),
    )


def _is_replicated(assignment: Assignment) -> bool:
    """Whether agents copy what is sealed to other nodes."""
    placement = placement_of(assignment.spec, assignment.rank_nodes)
    return placement is not None and placement.is_copying


def _set_up_torch(assignment: Assignment) -> torch.device:
    torch.set_num_threads(1)
    if assignment.spec.determinism == "bitwise":
        # The same switch as use_deterministic_algorithms(True), which would import
        # torch's compiler for its own settings: 2 s on every start.
        torch.set_deterministic_debug_mode("error")
        # Filling fresh memory with NaN finds bugs; it does not change results.
        # The attribute is a property of the module that torch's stubs do not show.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(assignment.spec.seed)
    device = set_up_device(assignment)
    if device.type == "cuda":
        evidence.arm_flight_recorder(assignment.blackbox_path.parent)
    return device


def _rendezvous(assignment: Assignment, timeout_s: float) -> Store | None:
    """The attempt's key-value store, served by rank 0 on its agent's listening socket."""
    if assignment.world_size == 1:
        return None
    is_master = assignment.rank == 0
    # The store closes its own; this process may serve another attempt's.
    listening = assignment.rendezvous_fd
    store = TCPStore(
        assignment.rendezvous_host,
        assignment.rendezvous_port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=os.dup(listening) if is_master and listening is not None else None,
    )
    return PrefixStore(f"a{assignment.attempt}/", store)
