"""A rank that leaves an attempt in which its device waits for others."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outlast.blackbox import Group
from outlast.worker_line import Join, Leave
from tests.checkpoint.helpers import wait_for
from tests.contracts import contract_of
from tests.trainer.agent_lines import AgentLines
from trainer.parallel import nccl
from trainer.parallel.comm import Comm, PeerLostError
from trainer.parallel.nccl import NcclComm
from trainer.parallel.timeline import HostTimeline
from trainer.worker.line import AgentLine


@pytest.fixture
def lines() -> Iterator[AgentLines]:
    lines = AgentLines()
    yield lines
    lines.close()


@pytest.fixture
def line(lines: AgentLines) -> Iterator[AgentLine]:
    line = AgentLine(lines.address, attempt=1)
    wait_for(lambda: line.is_open, "the agent to be there")
    yield line
    line.left(completed=False)


def test_a_device_is_freed_before_the_connections_end(lines: AgentLines, line: AgentLine) -> None:
    """NCCL uses them while it aborts."""
    ours, theirs = _connected()
    seen: list[bytes] = []

    def abort() -> None:
        assert line.is_void
        theirs.sendall(b"still open")
        seen.append(ours.recv(64))

    line.holds(abort)
    line.check()
    lines.say(os.getpid(), Leave(1, after_step=False))
    wait_for(lambda: ours.recv(64) == b"", "the connection to end")
    assert seen == [b"still open"]
    with pytest.raises(PeerLostError, match="leaves its attempt"):
        line.check()
    # Once.
    line.abort()
    line.leave()
    assert len(seen) == 1
    ours.close()
    theirs.close()


def test_a_device_that_cannot_be_freed_is_told_of(line: AgentLine) -> None:
    def abort() -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    line.holds(abort)
    line.leave()
    # The process ends then: communicators that were not aborted could block its next attempt.
    for _ in range(2):
        with pytest.raises(RuntimeError, match="unhandled system error"):
            line.abort()


def test_numbers_count_again_in_the_next_attempt(
    lines: AgentLines, line: AgentLine, tmp_path: Any
) -> None:
    line.holds(lambda: None)
    line.abort()
    assert line.is_void
    line.left(completed=True)
    lines.wait_left([os.getpid()])
    lines.say(os.getpid(), Join(contract_of(tmp_path, 0, attempt=2)))
    following = line.next_contract(30.0)
    assert following is not None
    assert following.attempt == 2
    line.check()
    # What the attempt before has held is not this one's.
    line.abort()
    line.check()


def test_a_rank_that_is_asked_before_it_has_groups_frees_its_device_as_it_gets_them(
    line: AgentLine,
) -> None:
    line.leave()
    line.check()
    calls: list[str] = []
    line.holds(lambda: calls.append("aborted"))
    assert calls == ["aborted"]
    with pytest.raises(PeerLostError):
        line.check()


def test_on_a_cpu_nothing_is_void(line: AgentLine) -> None:
    line.leave()
    line.check()


class Backend:
    """torch's process group, whose kernels hold up the abort of every other communicator."""

    def __init__(self, all_begun: threading.Barrier, *, breaks: bool = False) -> None:
        self._all_begun, self._breaks = all_begun, breaks

    def abort(self) -> None:
        self._all_begun.wait(30.0)
        if self._breaks:
            raise RuntimeError("NCCL error")

    def send(self, *_: object) -> None:
        raise RuntimeError("NCCL communicator was aborted")

    recv = send

    def _start_coalescing(self) -> None:
        self.is_open = True

    def _end_coalescing(self) -> None:
        self.is_open = False


def test_all_communicators_are_aborted_at_once() -> None:
    alone = Comm(group=Group.TP, ranks=(0,), index=0)
    both = threading.Barrier(2)
    nccl.abort([_comm(Backend(both)), alone, _comm(Backend(both))])
    nccl.abort([alone])
    with pytest.raises(RuntimeError, match="NCCL error"):
        nccl.abort([_comm(Backend(both, breaks=True)), _comm(Backend(both))])


def test_a_group_of_calls_that_fails_is_closed() -> None:
    """Or all that this thread gives NCCL later would wait for its end."""
    backend = Backend(threading.Barrier(1))
    nothing = [torch.zeros(1)] * 2
    with pytest.raises(PeerLostError, match="was aborted"):
        _comm(backend).exchange_now(nothing, nothing)
    assert not backend.is_open


def _comm(backend: Any) -> NcclComm:
    nobody: Any = None
    return NcclComm(
        backend,
        group=Group.DP,
        ranks=(0, 1),
        index=0,
        recorder=nobody,
        timeline=HostTimeline(),
    )


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    for each in (ours, theirs):
        each.settimeout(30.0)
    return ours, theirs
