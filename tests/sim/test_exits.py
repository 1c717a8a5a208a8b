"""What simulated workers leave behind is taken for what ended them."""

from __future__ import annotations

import signal

import pytest

from controller.core.edge.reports import worker_exited
from controller.sim.exits import CLASSES, left_behind
from outlast.failures import FailureClass
from outlast.ids import NodeId
from outlast.worker_contract import KILLED, WorkerExitCode

_OTHERS = [
    (WorkerExitCode.FAILED, FailureClass.UNKNOWN),
    (KILLED, FailureClass.KILLED_BY_SIGNAL),
    (-signal.SIGSEGV, FailureClass.KILLED_BY_SIGNAL),
    (WorkerExitCode.DONE, FailureClass.CLEAN),
    (WorkerExitCode.STOPPED, FailureClass.CLEAN),
]


@pytest.mark.parametrize(
    ("code", "exit_class"),
    [
        *_OTHERS,
        *(
            (KILLED if each is FailureClass.OOM_HOST else WorkerExitCode.FAILED, each)
            for each in CLASSES
        ),
    ],
)
def test_the_words_of_an_exit_have_its_class(code: int, exit_class: FailureClass) -> None:
    exit_ = left_behind(code, exit_class, "c0ffee")
    event = worker_exited(NodeId("n1"), "job", 1, 0, exit_)
    assert event.fault_class is exit_class


def test_errors_of_users_are_told_apart() -> None:
    prints = {
        worker_exited(
            NodeId("n1"), "job", 1, 0, left_behind(1, FailureClass.USER_ERROR, which)
        ).fingerprint
        for which in ("00000001", "00000002", "00000002")
    }
    assert len(prints) == 2
