"""Two runners exchange data over real sockets, as two nodes would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diagnostics.core.finding import CheckVerdict, Finding
from diagnostics.core.links import BANDWIDTH, BROKEN, WRONG
from diagnostics.core.orders import Order, OrderKind

DEADLINE_S = 90.0
HOST = Order(
    kind=OrderKind.HOST, suite="preflight", deadline_s=60.0, address="127.0.0.2", peer="n1"
)
GUEST = Order(
    kind=OrderKind.GUEST,
    suite="preflight",
    deadline_s=60.0,
    address="127.0.0.3",
    peer="n0",
    peer_address="127.0.0.2",
)


class Node:
    """A node's runner."""

    def __init__(self, name: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "diagnostics.runner", "--orders", "--node", name),
                *("--workers", "1", "--device", "cpu"),
                *("--baseline-file", str(folder / f"{name}.json")),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def order(self, order: Order) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order.to_json() + "\n")
        self.process.stdin.flush()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        document: dict[str, Any] = json.loads(self.process.stdout.readline())
        return document

    def findings(self) -> list[Finding]:
        """Everything up to the end of the order."""
        found = []
        while "done" not in (document := self.line()):
            found.append(Finding.from_json(json.dumps(document)))
        return found

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    pair = Node("n0", tmp_path), Node("n1", tmp_path)
    yield pair
    for node in pair:
        node.end()


def test_two_nodes_exchange_checked_data_again_and_again(nodes: tuple[Node, Node]) -> None:
    host, guest = nodes
    for _ in range(2):
        host.order(HOST)
        guest.order(replace(GUEST, peer_port=host.line()["listening"]))
        found = {finding.metric: finding for finding in host.findings()}
        assert set(found) == {WRONG, BANDWIDTH}
        assert found[WRONG].value == 0
        assert found[BANDWIDTH].value > 0
        assert (found[BANDWIDTH].node, found[BANDWIDTH].peer) == ("n0", "n1")
        assert found[BANDWIDTH].baseline_key.startswith("pair/gloo/cpu/")
        assert guest.findings() == []


def test_a_guest_that_never_comes_is_noticed_in_time(nodes: tuple[Node, Node]) -> None:
    host, _ = nodes
    host.order(replace(HOST, deadline_s=4.0))
    assert "listening" in host.line()
    (trouble,) = host.findings()
    assert (trouble.metric, trouble.verdict) == (BROKEN, CheckVerdict.FAIL)
    assert trouble.peer == "n1"


def test_a_guest_that_dies_is_noticed_and_the_runner_goes_on(nodes: tuple[Node, Node]) -> None:
    host, guest = nodes
    host.order(replace(HOST, deadline_s=8.0))
    guest.order(replace(GUEST, peer_port=host.line()["listening"], deadline_s=8.0))
    _kill_child(guest.process.pid)
    trouble = host.findings()
    seen = [finding.metric for finding in trouble]
    # It may die after the exchange, just before it takes its leave.
    assert seen in ([BROKEN], [WRONG, BANDWIDTH, BROKEN], [WRONG, BANDWIDTH])
    (own,) = guest.findings()
    assert own.verdict is CheckVerdict.ERROR
    assert "SIGKILL" in own.detail
    # Both are ready for the next one.
    host.order(HOST)
    guest.order(replace(GUEST, peer_port=host.line()["listening"]))
    assert len(host.findings()) == 2


def test_an_address_of_another_machine_cannot_be_listened_on(nodes: tuple[Node, Node]) -> None:
    host, _ = nodes
    host.order(replace(HOST, address="192.0.2.1"))
    (trouble,) = host.findings()
    assert trouble.verdict is CheckVerdict.ERROR
    assert "cannot listen on 192.0.2.1" in trouble.detail


def _kill_child(pid: int) -> None:
    """Kill the check that a runner has forked, as soon as there is one."""
    ends_at = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends_at:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children:
            os.kill(int(children[0]), signal.SIGKILL)
            return
    raise AssertionError("the runner never forked a check")
