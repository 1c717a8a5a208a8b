"""This process as a rank of a job: what its agent gave it, and its black box.

Under plain Python or torchrun there is no agent, and no session.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from outlast.blackbox import Phase, StepRecord, Writer, open_black_box
from outlast.clock import node_time_ns
from outlast.worker_contract import SESSION_FILE, WorkerContract

# How long ranks wait for each other in what the session makes them do together.
TIMEOUT_S = 300.0


class Saves(Protocol):
    """The checkpoints of a session, in which ranks agree on a stop."""

    @property
    def should_stop(self) -> bool: ...


@dataclass(slots=True)
class Session:
    """One rank's."""

    contract: WorkerContract
    box: Writer
    settings: dict[str, Any]
    """Of the job's spec, as far as a session goes by it: its section `checkpoint`."""
    stop_signal: signal.Signals
    is_asked_to_stop: bool = False
    """The stop signal came, and this process listens to it."""
    checkpoints: Saves | None = None
    """Those that the script made last."""
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

    def listen(self) -> None:
        """Have the stop signal ask only, from now on, in place of ending the process."""
        if not self._listens:
            self._listens = True
            signal.signal(self.stop_signal, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.is_asked_to_stop = True

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
    )
