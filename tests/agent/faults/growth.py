"""What an agent keeps, after some work and after as much again: nothing of it may have grown.

    python -m tests.agent.faults.growth

Walks everything that hangs below the agent and the modules of the product, so that what is
added later is looked at, too. Bounds are made small, for a bound that is reached to show.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from controller.agent.core import ledger
from controller.agent.observe import leftovers
from controller.agent.workers import preflight
from controller.agent.workers.processes import become_subreaper, child_pids
from tests.agent.faults.node import Answered, Node, hurry
from tests.agent.harness import REPOSITORY

ROUNDS = 8
# A round more or less may be under way at a look.
MOST_GROWTH = 3
_PRODUCT = ("controller", "checkpoint", "diagnostics", "outlast")
_CONTAINERS = (dict, list, set, deque)


def tighten() -> None:
    """Make what is bounded reach its bound within a few rounds."""
    ledger.CommandLedger.__init__.__kwdefaults__["max_results"] = 3
    ledger.MAX_FENCES = preflight._MAX_KNOWN = 3
    leftovers.KEPT_LOGS = leftovers.KEPT_ATTEMPTS = 2


def sizes(agent: object) -> Counter[str]:
    """How many things every container below the agent and our modules has, by its place."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    left: list[tuple[str, object]] = [("agent", agent)]
    for name, module in list(sys.modules.items()):
        if name.startswith(_PRODUCT) and not name.startswith("outlast.v1"):
            left += [(f"{name}.{key}", value) for key, value in list(vars(module).items())]
    while left:
        place, value = left.pop()
        if id(value) in seen or isinstance(value, type | ModuleType):
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            # Of what hangs below a key there may be one for each job: they count together.
            found[place] += len(value)
            left += [(f"{place}[]", each) for each in _contents(value)]
        elif type(value).__module__.startswith(_PRODUCT):
            left += [(f"{place}.{key}", each) for key, each in _attributes(value)]
        elif hasattr(value, "__wrapped__") and hasattr(value, "cache_info"):
            found[f"{place} (cache)"] = value.cache_info().currsize
    return found


def _contents(value: object) -> list[object]:
    return [each for each in gc.get_referents(value) if not isinstance(each, str | int | float)]


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    for key, each in getattr(value, "__dict__", {}).items():
        yield key, each
    for owner in type(value).__mro__:
        slots = getattr(owner, "__slots__", ())
        for key in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, key):
                yield key, getattr(value, key)


def held(node: Node) -> Counter[str]:
    """Besides containers: tasks, threads, descriptors, processes and files."""
    gc.collect()
    assert node.agent is not None
    found = sizes(node.agent)
    found["tasks"] = len(node.tasks())
    found["threads"] = sum(not t.name.startswith("ThreadPool") for t in threading.enumerate())
    found["descriptors"] = len(os.listdir("/proc/self/fd"))
    found["children"] = len(child_pids())
    for name in ("state", "data"):
        found[f"files of {name}"] = sum(1 for _ in (node.folder / name).rglob("*"))
    found["files of memory"] = sum(1 for _ in node.memory_dir.rglob("*"))
    return found


def work(node: Node, first: int) -> None:
    """New jobs, and new attempts and checkpoints of one that goes on."""
    for number in range(first, first + ROUNDS):
        answered = Answered()
        node.attempt(number, answered)
        node.job(answered)
        if number % 4 == 0:
            node.copies(answered)
            node.push(answered)
            node.standby(answered)
            node.look(answered)
        assert answered.is_whole, (answered, node.said.lines)


def main() -> int:
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    become_subreaper()
    hurry()
    tighten()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").mkdir()
        node = Node(Path(folder))
        node.start()
        assert node.wait_up(), node.error
        looks = []
        for first in (1, 1 + ROUNDS, 1 + 2 * ROUNDS):
            work(node, first)
            looks.append(held(node))
        _, middle, last = looks
        grown = {
            name: (look, last[name])
            for name, look in middle.items()
            if last[name] > look + MOST_GROWTH and look > looks[0][name] + MOST_GROWTH
        }
        print(f"{len(last)} collections; grown after {ROUNDS} more rounds: {grown}", flush=True)
        node.close()
    return 1 if grown else 0


if __name__ == "__main__":
    code = main()
    os._exit(code)
