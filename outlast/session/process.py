"""This process as a rank of a job: what its agent gave it, and its black box.

Under plain Python or torchrun there is no agent, and no session.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from outlast.blackbox import Phase, StartMark, StepRecord, Writer, open_black_box
from outlast.clock import node_time_ns
from outlast.worker_contract import SESSION_FILE, WorkerContract

if TYPE_CHECKING:
    from checkpoint.stage.stager import Stager

# How long ranks wait for each other in what the session makes them do together.
TIMEOUT_S = 300.0


class Saves(Protocol):
    """The checkpoints of a session, in which ranks agree on a stop."""

    @property
    def should_stop(self) -> bool: ...

    def leave(self) -> Stager | None:
        """Give the attempt up; the slots, for the checkpoints of the next one."""


class Line(Protocol):
    """A rank's line to its agent, which may ask it to leave its attempt and live on."""

    @property
    def is_stopping(self) -> bool: ...

    @property
    def is_void(self) -> bool: ...

    def trains(self) -> None: ...

    def check(self) -> None: ...


@dataclass(slots=True)
class Session:
    """One rank's."""

    contract: WorkerContract
    box: Writer
    settings: dict[str, Any]
    """Of the job's spec, as far as a session goes by it: its section `checkpoint`."""
    stop_signal: signal.Signals
    patience_s: float = TIMEOUT_S
    """For how long at most a rank that has left its attempt waits to join another."""
    checkpoints: Saves | None = None
    """Those that the script made last."""
    line: Line | None = None
    """Where the script heals."""
    is_told_to_stop: bool = False
    """The script knows that it is to end in order."""
    kept_slots: Stager | None = None
    """Of the attempt before."""
    has_signal: bool = False
    """The stop signal came, and this process listens to it."""
    _started_ns: int = field(default_factory=node_time_ns)
    _has_begun: bool = False
    # What the script says that it is busy with.
    _phase: Phase = Phase.STEP
    _listens: bool = False

    def resumed(self, step: int) -> None:
        """The script goes on after this step."""
        self._has_begun = True
        self.box.resumed(step)
        self.box.phase(Phase.STEP)

    def step(self, record: StepRecord) -> None:
        """A step is complete."""
        self.check()
        if not self._has_begun:
            self.resumed(record.step - 1)
        # What it did not name ends here, and begins anew: how long that takes is learned. What
        # it did name goes on.
        self.box.phase(self._phase)
        self.box.completed(record)
        self._started_ns = record.end_ns

    def turn_to(self, phase: Phase) -> None:
        """The script is busy with that from now on."""
        self._phase = phase
        self.box.phase(phase)

    @property
    def step_began_ns(self) -> int:
        """When the step before ended."""
        return self._started_ns

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether this rank is to end in order, or to leave its attempt so."""
        return self.has_signal or (self.line is not None and self.line.is_stopping)

    def listen(self) -> None:
        """Have the stop signal ask only, from now on, in place of ending the process."""
        if not self._listens:
            self._listens = True
            signal.signal(self.stop_signal, self._on_signal)
            if self.line is not None:
                # Before, a script that is asked to end in order would not know of it.
                self.line.trains()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.has_signal = True

    @property
    def is_void(self) -> bool:
        """Whether what the device computed with others may be nothing, as that was aborted."""
        return self.line is not None and self.line.is_void

    def check(self) -> None:
        """Behind what other ranks have a part in.

        Raises:
            PeerLostError: it may have come to nothing.
        """
        if self.line is not None:
            self.line.check()

    def leave(self) -> None:
        """Give the attempt up: nothing of it is on its way any more."""
        if self._listens:
            signal.signal(self.stop_signal, signal.SIG_DFL)
        if self.checkpoints is not None:
            self.kept_slots = self.checkpoints.leave() or self.kept_slots
        self.checkpoints, self.is_told_to_stop, self._listens = None, False, False

    def join(self, contract: WorkerContract) -> None:
        """Be a rank of this attempt from now on."""
        self.contract, self.box = contract, open_black_box(contract)
        self._started_ns, self._has_begun, self._phase = node_time_ns(), False, Phase.STEP
        self.box.mark(StartMark.FORKED, self._started_ns)

    def store(self) -> Any:
        """The attempt's own keys in the store that the agent hosts."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        contract = self.contract
        store = TCPStore(
            contract.rendezvous_host,
            contract.rendezvous_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        return PrefixStore(f"outlast/a{contract.attempt}/", store)


@lru_cache(maxsize=1)
def current() -> Session | None:
    """This process's session; None where no agent has started it as a rank."""
    path = os.environ.get(SESSION_FILE)
    if not path:
        return None
    contract = WorkerContract.from_env(json.loads(Path(path).read_text()))
    spec = json.loads(contract.spec_json)
    return Session(
        contract=contract,
        box=open_black_box(contract),
        settings=spec["checkpoint"],
        stop_signal=signal.Signals[spec["workload"]["stop_signal"]],
        patience_s=_patience_s(spec["recovery"]),
    )


def _patience_s(recovery: Mapping[str, Any]) -> float:
    # Hangs are found by the agent; this only bounds the life of an orphan.
    return max(float(recovery["first_step_timeout_s"]), 2 * float(recovery["hang_timeout_s"]))
