"""The process that reads data for all ranks of a node: begun, started again, given up, ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.agent.core.actions import (
    Action,
    ReportDataLoader,
    StartDataLoader,
    StopDataLoader,
)
from controller.agent.core.inputs import DataLoaderEnded, DataLoaderStarted
from controller.agent.core.ledger import CommandKind
from controller.agent.core.loaders import RESTART_DELAYS_S, SETTLED_S
from controller.agent.core.reports import AttemptKey
from controller.agent.core.steps import StartFacts, Step
from controller.agent.core.workers import WorkerKey
from controller.agent.workers import data_loaders
from controller.agent.workers.data_loaders import DataLoaders, LoaderEvents
from controller.agent.workers.forked_program import Program
from controller.agent.workers.launch import shares_data
from controller.agent.workers.standby_events import StandbyError
from outlast import local_socket
from outlast.spec.parse import parse_spec
from tests.agent.machine_node import BROKEN, Node, command
from tests.agent.standbys import inheriting

KEY = AttemptKey("job", 1)
KILLED = "killed by SIGKILL"
AGAIN = ReportDataLoader(key=KEY, problem=f"{KILLED}; it is started again")


def sharing() -> Node:
    node = Node()
    node.facts = StartFacts(has_strays=False, keeps_copies=False, shares_data=True)
    return node


def taken(node: Node) -> list[Action]:
    actions, node.of_loaders = node.of_loaders, []
    return actions


def test_a_loader_is_begun_behind_the_fork_and_ends_with_the_last_rank() -> None:
    node = sharing()
    node.receive(command(CommandKind.START))
    node.run_to("start-1", Step.FORK)
    assert taken(node) == []
    node = sharing()
    first, second = node.start()
    assert taken(node) == [StartDataLoader(key=KEY)]
    node.give(DataLoaderStarted(key=KEY))
    node.end(first)
    assert taken(node) == []
    node.end(second)
    assert taken(node) == [StopDataLoader(key=KEY)]
    # As it is killed for that, it is no news.
    node.give(DataLoaderEnded(key=KEY, reason=KILLED))
    assert (taken(node), node.machine.wake_at()) == ([], None)


def test_ranks_that_share_nothing_have_no_loader() -> None:
    node = Node()
    node.end(*node.start())
    assert taken(node) == []


def test_a_start_that_fails_has_no_loader() -> None:
    node = sharing()
    node.receive(command(CommandKind.START))
    node.run_to("start-1", Step.FORK)
    node.end_step("start-1", BROKEN)
    assert taken(node) == []


def test_ranks_that_have_ended_as_the_last_is_forked_need_no_loader() -> None:
    node = sharing()
    node.receive(command(CommandKind.START))
    node.run_to("start-1", Step.FORK)
    node.end(WorkerKey("job", 1, 0))
    node.end_step("start-1")
    assert taken(node) == []


def test_a_loader_that_ends_is_started_again_later_and_later() -> None:
    node = sharing()
    node.start()
    assert taken(node) == [StartDataLoader(key=KEY)]
    for delay_s in RESTART_DELAYS_S:
        node.give(DataLoaderStarted(key=KEY))
        node.give(DataLoaderEnded(key=KEY, reason=KILLED))
        assert taken(node) == [AGAIN]
        assert node.machine.wake_at() == node.now_s + delay_s
        node.pass_time(delay_s)
        assert taken(node) == [StartDataLoader(key=KEY)]
    # One that cannot even be started counts, too.
    node.give(DataLoaderEnded(key=KEY, reason="it cannot be started: no memory"))
    problem = (
        "it cannot be started: no memory; it has ended 5 times in a row and is not started again: "
        "each rank reads by itself"
    )
    assert taken(node) == [ReportDataLoader(key=KEY, problem=problem), StopDataLoader(key=KEY)]
    assert node.machine.wake_at() is None
    node.end(WorkerKey("job", 1, 0), WorkerKey("job", 1, 1))
    assert taken(node) == []


def test_a_loader_that_lives_on_is_well_again() -> None:
    node = sharing()
    node.start()
    for _ in range(2 * len(RESTART_DELAYS_S)):
        node.give(DataLoaderStarted(key=KEY))
        node.give(DataLoaderEnded(key=KEY, reason=KILLED))
        node.pass_time(RESTART_DELAYS_S[0])
        node.give(DataLoaderStarted(key=KEY))
        assert node.machine.wake_at() == node.now_s + SETTLED_S
        taken(node)
        node.pass_time(SETTLED_S)
        assert taken(node) == [ReportDataLoader(key=KEY, problem="")]
        assert node.machine.wake_at() is None


def test_the_next_attempt_has_a_loader_of_its_own() -> None:
    node = sharing()
    keys = node.start()
    node.give(DataLoaderStarted(key=KEY))
    node.end(*keys)
    node.start(attempt=2)
    second = AttemptKey("job", 2)
    assert taken(node) == [
        StartDataLoader(key=KEY),
        StopDataLoader(key=KEY),
        StartDataLoader(key=second),
    ]


@pytest.mark.parametrize(
    ("ranks", "changes", "shared"),
    [
        ((0, 1), {"tp": 2}, True),
        ((0,), {"tp": 2, "dp": 2}, False),
        # Rank order is tp, dp, pp: of four stages those in the middle read nothing.
        ((0, 1, 2, 3), {"pp": 4}, True),
        ((1, 2), {"pp": 4}, False),
        ((0, 1), {"pp": 4}, False),
        ((0, 1), {"dp": 2}, True),
    ],
)
def test_ranks_share_where_several_of_a_node_read(
    ranks: tuple[int, ...], changes: dict[str, int], shared: bool
) -> None:
    document: dict[str, Any] = {"name": "a", "parallel": changes, "model": {"layers": 4}}
    assert shares_data(parse_spec(document), ranks) is shared
    hidden = {"masked": {"fraction": 0.15, "mask_token": 256}}
    bert = {"layers": 4, "attention": "bidirectional", "vocab_size": 258}
    masked = parse_spec({**document, "model": bert, "data": hidden})
    assert shares_data(masked, ranks) is shared
    for apart in ({"document_mask": True}, {"packing": "whole"}):
        spec = parse_spec({**document, "data": {"tokens": "/t", **apart}})
        assert shares_data(spec, ranks) is (len(ranks) > 1)
    # RoPE turns in every layer; learned positions are the first stage's, which reads anyway.
    for positions, everywhere in (("rope", True), ("learned", False)):
        model = {**document["model"], "positions": positions}
        anew = {"tokens": "/t", "reset_positions": True}
        spec = parse_spec({**document, "model": model, "data": anew})
        assert shares_data(spec, ranks) is (len(ranks) > 1 if everywhere else shared)
    alone = {**document, "data": {"loader": "rank"}}
    assert not shares_data(parse_spec(alone), ranks)


class Sleeping:
    """A standby process whose programs do nothing."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.programs: list[Program] = []
        self.is_out_of_order = False

    async def run(self, program: Program) -> int:
        if self.is_out_of_order:
            raise StandbyError("the standby process died")
        self.programs.append(program)
        self.started.append(subprocess.Popen(["sleep", "600"], process_group=0))
        return self.started[-1].pid


class Heard:
    """What the agent hears of its loaders."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[str] = asyncio.Queue()

    def events(self) -> LoaderEvents:
        return LoaderEvents(
            started=lambda key: self.news.put_nowait("started"),
            ended=lambda key, reason: self.news.put_nowait(reason),
            changed=lambda: None,
        )

    async def next(self) -> str:
        async with asyncio.timeout(30):
            return await self.news.get()


@pytest.fixture(autouse=True)
def _inherits() -> Iterator[None]:
    with inheriting():
        yield


def test_a_killed_process_is_reported_and_its_socket_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        standby, heard = Sleeping(), Heard()
        loaders = DataLoaders(standby, tmp_path / "data", heard.events())
        path = loaders.prepare(KEY, tmp_path, json.dumps({"name": "a"}))
        # A rank may come before the loader.
        rank = local_socket.connect(path, 5.0)
        loaders.start(KEY)
        assert await heard.next() == "started"
        (first,) = standby.started
        assert list(loaders.pids()) == [first.pid]
        os.kill(first.pid, signal.SIGKILL)
        assert await heard.next() == f"{KILLED}, and its log says nothing"
        assert list(loaders.pids()) == []
        local_socket.connect(path, 5.0).close()
        loaders.start(KEY)
        assert await heard.next() == "started"
        assert [json.loads((tmp_path / "data-loader.spec.json").read_text())] == [{"name": "a"}]
        loaders.stop(KEY)
        # No stranger that is killed as an orphan.
        assert list(loaders.pids()) == [standby.started[1].pid]
        await loaders.close()
        assert list(loaders.pids()) == []
        assert standby.started[1].poll() is not None
        # Nobody hears of the end of one that was stopped, and nobody waits for it.
        assert heard.news.empty()
        with pytest.raises(FileNotFoundError):
            local_socket.connect(path, 5.0)
        rank.close()
        standby.started[0].poll()

    asyncio.run(scenario())


def test_nothing_is_left_of_a_start_that_had_no_ranks(tmp_path: Path) -> None:
    async def scenario() -> None:
        loaders = DataLoaders(Sleeping(), tmp_path / "data", Heard().events())
        paths = []
        for attempt in (1, 2):
            folder = tmp_path / f"a{attempt}"
            folder.mkdir()
            paths.append(loaders.prepare(AttemptKey("job", attempt), folder, "{}"))
        loaders.end_of("another")
        await asyncio.sleep(0)
        assert [path.exists() for path in paths] == [False, True]
        loaders.end_of("job")
        await loaders.close()
        assert not paths[1].exists()

    asyncio.run(scenario())


def test_a_process_that_cannot_be_started_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        standby, heard = Sleeping(), Heard()
        standby.is_out_of_order = True
        monkeypatch.setattr(data_loaders, "start_child", no_process)
        loaders = DataLoaders(standby, tmp_path / "data", heard.events())
        loaders.prepare(KEY, tmp_path, "{}")
        loaders.start(KEY)
        assert await heard.next() == "it cannot be started: no more processes"
        await loaders.close()

    async def no_process(*_: object) -> None:
        raise BlockingIOError("no more processes")

    asyncio.run(scenario())
