"""Every system call of the agent's tasks fails, one place and error at a time.

    python -m tests.agent.faults                 the whole matrix
    python -m tests.agent.faults --sample SEED   every place once, the rest drawn by the seed
    python -m tests.agent.faults --only TEXT     cases whose description has the text

A call that fails must not end the agent, unless it says why; every command is answered; and
afterwards the node does a round of the same work without a fault, with all tasks of the agent
alive and no descriptor, thread or process more than before.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from controller.agent.workers.processes import become_subreaper, child_pids, stat_of
from tests.agent.faults.layer import ERRNOS, Fault, Layer, Place
from tests.agent.faults.node import DEADLINE_S, PARTS, PATIENCE_S, ROUNDS, Answered, Node, hurry
from tests.agent.harness import REPOSITORY, wait_for

# Of an agent, from its start to its end.
LIFE = "life"
# So many calls fail in one round: after a call that fails once the work goes on, and meets most
# of the others; one that fails for a while keeps it from more of them.
_AT_ONCE = {True: 12, False: 4}
# A connection of gRPC may close a moment later.
_SPARE_SOCKETS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call that fails, in the shortest work in which it is made."""

    work: str
    place: Place
    number: int
    is_once: bool

    def __str__(self) -> str:
        how = "once" if self.is_once else "for a while"
        return f"{self.work}: {self.place}: {errno.errorcode[self.number]} {how}"


Faults = dict[Place, Fault]


class Sweep:
    """The cases, and the nodes on which they are tried."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layer = Layer()
        self._num_nodes = 0
        self._node: Node | None = None
        # Of a process without a node, and what a node adds.
        self._without = Counter[str]()
        self._of_node = Counter[str]()
        self.num_not_reached = 0

    def discover(self) -> dict[Place, str]:
        """Every place, with the work that leads to it soonest."""
        self._layer.wrap()
        node = self._new_node()
        node.start()
        assert node.wait_up(), node.error
        by_work: dict[str, set[Place]] = {LIFE: set(self._layer.seen)}
        for name, work in ROUNDS.items():
            self._layer.seen.clear()
            num_seen = -1
            # Parts that look now and then may not have looked during the first round.
            while num_seen < len(self._layer.seen):
                num_seen = len(self._layer.seen)
                for _ in range(2):
                    answered = Answered()
                    work(node, answered)
                    assert answered.is_whole, (name, answered, node.said.lines)
            by_work[name] = set(self._layer.seen)
            self._of_node |= at_rest() - self._without
        self._layer.seen.clear()
        node.stop()
        assert node.error is None, node.error
        by_work[LIFE] |= set(self._layer.seen)
        node.close()
        found: dict[Place, str] = {}
        for name in (*ROUNDS, LIFE):
            found = {**dict.fromkeys(sorted(by_work[name]), name), **found}
        return found

    def run(self, cases: Sequence[Case]) -> dict[Case, str]:
        """Try cases of one work, each at a place of its own; what is wrong with which of them.

        All of these calls fail in a single round. Those that the others kept from being made are
        tried again without them, and each alone when something is wrong.
        """
        faults = {case.place: Fault(number=case.number, is_once=case.is_once) for case in cases}
        problem = self._try(cases[0].work, faults)
        left = [case for case in cases if not faults[case.place].num_failed]
        if len(cases) == 1:
            self.num_not_reached += len(left)
            return {cases[0]: problem} if problem else {}
        found: dict[Case, str] = {}
        if problem or len(left) == len(cases):
            for case in cases:
                found |= self.run([case])
        elif left:
            found = self.run(left)
        if problem and not found:
            found[cases[0]] = f"only with {[str(case) for case in cases[1:]]}: {problem}"
        return found

    def _try(self, work: str, faults: Faults) -> str:
        """What is wrong after work in which the armed calls fail; "" when nothing is."""
        try:
            problem = self._life(faults) if work == LIFE else self._round(work, faults)
        except Exception as error:  # noqa: BLE001  # whatever broke, it is this case's
            problem = f"{type(error).__name__}: {error}"
        if problem:
            said = self._node.said.lines[-25:] if self._node is not None else []
            problem = "\n        ".join([problem, *said])
            self._drop_node()
        return problem

    def close(self) -> None:
        self._drop_node()

    def _round(self, name: str, faults: Faults) -> str:
        """The work in a node that runs."""
        node = self._node
        if node is None or not node.is_alive:
            node = self._node = self._new_node()
            node.start()
            assert node.wait_up(), node.error
        work = ROUNDS[name]
        node.said.lines.clear()
        faulty = Answered()
        with self._failing(faults, node):
            work(node, faulty)
        if faulty.mute:
            return f"commands failed without a reason: {faulty.mute}"
        if not node.is_alive:
            return node.why_ended() or f"the agent ended: {node.error}"
        return self._check(node, work)

    def _check(self, node: Node, work: Callable[[Node, Answered], None]) -> str:
        """What does not work any more."""
        answered = Answered()
        node.forget_again(answered)
        work(node, answered)
        if not answered.is_whole:
            return f"the node does not work any more: {answered}"
        if dead := PARTS - node.tasks():
            return f"tasks have ended: {dead}"
        beats = len(node.controller.heartbeats())
        wait_for(lambda: len(node.controller.heartbeats()) > beats, "a heartbeat", DEADLINE_S)
        left: Counter[str] = Counter()

        def is_quiet() -> bool:
            # A process whose start failed after its fork is reaped at the start of the next one.
            subprocess._cleanup()
            left.clear()
            left.update(at_rest() - self._without - self._of_node)
            if left["socket"] <= _SPARE_SOCKETS:
                del left["socket"]
            return not left

        with contextlib.suppress(AssertionError):
            wait_for(is_quiet, "nothing is left", 4.0)
        return f"left behind: {dict(left)}" if left else ""

    def _life(self, faults: Faults) -> str:
        """An agent from its start to its end, and the next one on the same folders."""
        if self._node is None:
            self._node = self._new_node()
        node = self._node
        node.stop()
        node.said.lines.clear()
        faulty = Answered()
        with self._failing(faults, node):
            node.start()
            if node.wait_up():
                node.job(faulty)
            node.stop()
        if faulty.mute:
            return f"commands failed without a reason: {faulty.mute}"
        if why := node.why_ended():
            return why
        node.start()
        if not node.wait_up():
            return f"the next agent does not start: {node.error!r}"
        if problem := self._check(node, Node.job):
            return problem
        node.stop()
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not child_pids(), "an end of all children", DEADLINE_S)
        if left := child_pids():
            return f"processes are left: {[(pid, stat_of(pid)) for pid in left]}"
        return "" if node.error is None else f"the next agent ended: {node.error!r}"

    @contextlib.contextmanager
    def _failing(self, faults: Faults, node: Node) -> Iterator[None]:
        self._layer.arm(faults)
        node.patience_s, node.relent = PATIENCE_S, self._layer.disarm
        try:
            yield
        finally:
            self._layer.disarm()
            node.patience_s = DEADLINE_S

    def _new_node(self) -> Node:
        self._num_nodes += 1
        self._without = at_rest()
        folder = self._folder / f"node-{self._num_nodes}"
        (folder / "data").mkdir(parents=True)
        return Node(folder)

    def _drop_node(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            with contextlib.suppress(Exception):
                node.close()
        # What a failed case left behind is none of the next one's.
        for pid in child_pids():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def at_rest() -> Counter[str]:
    """What a process holds that could leak: descriptors, threads and children by kind."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            found[Path(target).name if target[0] == "/" else target.partition(":")[0]] += 1
    for thread in threading.enumerate():
        # gRPC's own, the controller's and those of the metrics page have no names.
        if not thread.name.startswith(("Thread", "MainThread", "Dummy", "waitpid")):
            found[f"thread {thread.name}"] += 1
    found["children"] = len(child_pids())
    return found


def cases_of(found: dict[Place, str], seed: int | None) -> list[Case]:
    """The whole matrix; with a seed, one error a place, once or for a while in turn."""
    if seed is None:
        return [
            Case(work=work, place=place, number=number, is_once=is_once)
            for place, work in found.items()
            for number in ERRNOS
            for is_once in (True, False)
        ]
    random = Random(seed)
    return [
        Case(
            work=work,
            place=place,
            number=random.choice(ERRNOS),
            is_once=random.random() < 0.5,
        )
        for place, work in found.items()
    ]


def groups_of(cases: list[Case]) -> Iterator[list[Case]]:
    """Cases that are tried together: of one work, each at another place; lives last and alone."""
    kinds: dict[tuple[bool, str, bool, int], list[Case]] = {}
    rank = {place: index for index, place in enumerate(dict.fromkeys(c.place for c in cases))}
    seen = Counter[Place]()
    for case in sorted(cases, key=lambda case: rank[case.place]):
        kind = (case.work == LIFE, case.work, case.is_once, seen[case.place])
        kinds.setdefault(kind, []).append(case)
        seen[case.place] += 1
    for (is_life, _, is_once, _), alike in sorted(kinds.items(), key=lambda item: item[0]):
        size = 1 if is_life else _AT_ONCE[is_once]
        # Neighbours share their fate: calls of one function, which the first that fails ends.
        count = -(-len(alike) // size)
        for first in range(count):
            yield alike[first::count]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.agent.faults", description=__doc__)
    parser.add_argument("--sample", type=int, metavar="SEED")
    parser.add_argument("--only", default="")
    parser.add_argument("--running", action="store_true", help="not the start and end of an agent")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="every N-th case from the I-th"
    )
    parser.add_argument("--verbose", action="store_true", help="also print the cases that passed")
    given = parser.parse_args(arguments)
    # The standby process and the runner of checks are to find the tests, too.
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    become_subreaper()
    hurry()
    began_s = time.monotonic()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        sweep = Sweep(Path(folder))
        found = sweep.discover()
        cases = [case for case in cases_of(found, given.sample) if given.only in str(case)]
        cases = [case for case in cases if case.work != LIFE or not given.running]
        number, count = map(int, given.part.split("/"))
        cases = cases[number - 1 :: count]
        by_work = Counter(found.values())
        print(f"{len(found)} places {dict(by_work)}, {len(cases)} cases", flush=True)
        for group in groups_of(cases):
            group_began_s = time.monotonic()
            found = sweep.run(group)
            failed += len(found)
            for case in group if given.verbose else found:
                word = f"FAILED {case}\n    {found[case]}" if case in found else f"passed {case}"
                print(f"{time.monotonic() - group_began_s:.2f} s {word}", flush=True)
        sweep.close()
    print(
        f"{len(cases)} cases, {failed} failed, {sweep.num_not_reached} not reached, "
        f"{time.monotonic() - began_s:.0f} s, {_cpu_s():.0f} s of CPU",
        flush=True,
    )
    return 1 if failed else 0


def _cpu_s() -> float:
    """Of this process and of those that have ended below it."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


if __name__ == "__main__":
    code = main()
    # A thread that hangs in a failed case must not keep this from ending.
    os._exit(code)
