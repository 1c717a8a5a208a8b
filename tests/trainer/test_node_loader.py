"""One loader for all ranks of a node: what they get is what each would have read by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast import local_socket
from outlast.tokens.files import open_source
from tests.tokens.corpora import counted, write
from trainer.core.batch import BlendPlan
from trainer.core.blend import blend_of
from trainer.data.loader import Loader, Split
from trainer.data.node import GREETING, REQUEST, NodeLoader, NodeSource, SplitId
from trainer.data.serving import Server
from trainer.data.step_batch import Parts, StepBatch, Wanted
from trainer.data.tokens import BlendDataset, Sequences
from trainer.parallel.pipeline import MicroBatch

SEQ_LEN = 16
STEPS = 40
WITHIN_S = 30.0


@pytest.fixture
def split(tmp_path: Path) -> Split:
    """Two replicas of two micro-batches of two sequences, with documents apart."""
    name = write(tmp_path / "a", [counted(n, vocab_size=200) for n in (70, 9, 500, 31, 800)])
    file = open_source(str(name)).train
    number = file.num_sequences(SEQ_LEN)
    sources = [
        Sequences(file, seq_len=SEQ_LEN, number=number, place=None, documents=True),
    ]
    plan = BlendPlan(
        num_samples=(number,),
        blend=blend_of({"a": 1.0}, [], global_batch=8),
        global_batch=8,
        micro_batch=2,
        num_replicas=2,
        seed=3,
    )
    dataset = BlendDataset(sources, vocab_size=256)
    return Split(dataset, plan, starts=dataset.starts)


@dataclass
class Node:
    """The agent's part: the listening socket, and a server at it or none."""

    path: Path
    split: Split
    steps_ahead: int = 2
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listening = local_socket.listen(self.path)
        self.lines: list[NodeLoader] = []
        self.server: Server | None = None

    def start(self) -> Server:
        self.server = Server(
            self.listening,
            {SplitId.TRAIN: self.split, SplitId.EVALUATION: self.split},
            steps_ahead=self.steps_ahead,
            last_steps={SplitId.TRAIN: STEPS, SplitId.EVALUATION: 1},
        )
        self._thread = threading.Thread(target=self.server.serve, daemon=True)
        self._thread.start()
        return self.server

    def kill(self) -> None:
        """As SIGKILL does: connections and descriptors are closed, the agent's socket is not."""
        assert self.server is not None
        self.server.end()
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()
        self.server.close()
        self.server = None

    def rank(
        self, *, answer_s: float = WITHIN_S, retry_s: float = 0.0, start_s: float = WITHIN_S
    ) -> NodeSource:
        line = NodeLoader(
            self.path,
            answer_s=answer_s,
            retry_s=retry_s,
            start_s=start_s,
            say=self.said.append,
        )
        self.lines.append(line)
        return NodeSource(line, SplitId.TRAIN, self.split)

    def close(self) -> None:
        if self.server is not None:
            self.kill()
        for line in self.lines:
            line.close()
        self.listening.close()


@pytest.fixture
def node(tmp_path: Path, split: Split) -> Iterator[Node]:
    # Longer than the kernel lets the name of a socket be.
    folder = tmp_path / ("deep" * 30)
    folder.mkdir()
    made = Node(folder / "data.sock", split)
    yield made
    made.close()


def loader(source: NodeSource | Split, replica: int, wanted: Wanted | None = None) -> Loader:
    return Loader(source, replica=replica, device=torch.device("cpu"), wanted=wanted)


def same(one: Sequence[MicroBatch], other: Sequence[MicroBatch]) -> bool:
    def parts(batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        assert batch.starts is not None
        return batch.tokens, batch.targets, batch.starts

    return len(one) == len(other) and all(
        a.num_predicted == b.num_predicted
        and all(
            x.dtype == y.dtype and torch.equal(x, y)
            for x, y in zip(parts(a), parts(b), strict=True)
        )
        for a, b in zip(one, other, strict=True)
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_ranks_of_a_replica_share_what_is_read_once_and_ahead(node: Node, split: Split) -> None:
    node.steps_ahead = 3
    server = node.start()
    # Two replicas of two tensor-parallel ranks each.
    ranks = [loader(node.rank(), replica) for replica in (0, 0, 1, 1)]
    own = [loader(split, replica) for replica in (0, 1)]
    for step in range(1, 6):
        for number, each in enumerate(ranks):
            assert same(each.micro_batches(step), own[number // 2].micro_batches(step))
    # Three steps behind the fifth; no more, whoever asks for it.
    wait_for(lambda: server.num_reads == 2 * 8)
    for each in ranks:
        each.micro_batches(5)
    for each in ranks:
        each.micro_batches(6)
    wait_for(lambda: server.num_reads == 2 * 9)
    assert node.said == []


def test_steps_that_were_passed_are_not_read_ahead(
    node: Node, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of five steps wait before the loader begins: none leaves it time to read ahead."""
    reads: list[int] = []
    read = split.read

    def noted(step: int, *rest: Any, **named: Any) -> StepBatch:
        reads.append(step)
        return read(step, *rest, **named)

    monkeypatch.setattr(split, "read", noted)
    node.steps_ahead = 3
    rank = local_socket.connect(node.path, WITHIN_S)
    for step in range(1, 6):
        rank.send(REQUEST.pack(SplitId.TRAIN, step, 0, Parts.WHOLE))
    node.start()
    wait_for(lambda: 8 in reads)
    rank.close()
    assert reads == [1, 2, 3, 4, 5, 6, 7, 8]


def test_nothing_is_read_behind_the_last_step(node: Node) -> None:
    server, rank = node.start(), loader(node.rank(), 0)
    rank.micro_batches(STEPS - 1)
    rank.micro_batches(STEPS)
    assert server.num_reads == 2


def test_any_step_of_any_replica_may_be_asked_for(node: Node, split: Split) -> None:
    """After a rollback, and by a rank that does another replica's part again."""
    node.start()
    rank, own = loader(node.rank(), 1), loader(split, 1)
    for step in (7, 8, 2, 3, 30):
        assert same(rank.micro_batches(step), own.micro_batches(step))
    assert same(rank.micro_batches(30, replica=0), loader(split, 0).micro_batches(30))
    assert not same(rank.micro_batches(30, replica=0), own.micro_batches(30))


def test_ranks_ask_again_when_the_loader_has_died(node: Node, split: Split) -> None:
    node.start()
    rank, own = loader(node.rank(), 0), loader(split, 0)
    held = rank.micro_batches(1)
    node.kill()
    # What a rank has of it outlives it.
    assert same(held, own.micro_batches(1))
    rank.prepare(2)
    wait_for(lambda: any("it has died" in line for line in node.said))
    server = node.start()
    assert same(rank.micro_batches(2), own.micro_batches(2))
    assert server.num_reads >= 1
    assert [line.partition(":")[0] for line in node.said] == [
        "the node's data loader is missed",
        "the node's data loader answers again",
    ]
    rank.close()


def test_no_start_waits_for_the_loader(node: Node, split: Split) -> None:
    rank, own = loader(node.rank(start_s=0.0), 0), loader(split, 0)
    assert same(rank.micro_batches(1), own.micro_batches(1))
    server = node.start()

    def is_served() -> bool:
        assert same(rank.micro_batches(2), own.micro_batches(2))
        return server.num_reads > 0

    wait_for(is_served)
    assert node.said == []


def test_a_rank_reads_by_itself_while_nobody_answers(node: Node, split: Split) -> None:
    node.start()
    rank, own = loader(node.rank(answer_s=0.05, retry_s=3600.0), 0), loader(split, 0)
    rank.micro_batches(30)
    node.kill()
    assert same(rank.micro_batches(1), own.micro_batches(1))
    assert "it has not answered in 0.05 s; this rank reads by itself" in node.said[-1]
    # It does not wait again and again.
    server = node.start()
    assert same(rank.micro_batches(2), own.micro_batches(2))
    # What it asked for before may still be read, and nothing else.
    assert server.num_reads <= 1


def test_a_rank_reads_by_itself_when_the_agent_has_given_up(node: Node, split: Split) -> None:
    rank, own = loader(node.rank(), 0), loader(split, 0)
    node.listening.close()
    assert same(rank.micro_batches(1), own.micro_batches(1))
    node.path.unlink()
    assert same(rank.micro_batches(2), own.micro_batches(2))
    (line,) = node.said
    assert "the agent does not start it again; this rank reads by itself" in line


def test_what_the_loader_cannot_read_fails_in_the_rank(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: BlendDataset, samples: Sequence[object]) -> None:
        raise ValueError("the id 300 is beyond the vocabulary")

    server, rank = node.start(), loader(node.rank(), 0)
    monkeypatch.setattr(BlendDataset, "read", fail)
    with pytest.raises(ValueError, match="the id 300"):
        rank.micro_batches(1)
    monkeypatch.undo()
    assert rank.micro_batches(1)[0].num_predicted > 0
    assert server.num_reads >= 2


def test_a_request_that_makes_no_sense_harms_nobody_else(node: Node) -> None:
    node.start()
    stranger = local_socket.connect(node.path, WITHIN_S)
    stranger.send(b"GET")
    assert stranger.recv(10) == GREETING
    assert stranger.recv(10) == b""
    stranger.close()
    rank = loader(node.rank(), 0)
    assert len(rank.micro_batches(1)) == 2


def test_a_stage_takes_what_it_needs(node: Node, split: Split) -> None:
    server = node.start()
    whole = loader(split, 0).micro_batches(1)
    parts = {"tokens": False, "targets": False, "starts": False}
    for name in parts:
        stage = loader(node.rank(), 0, Wanted(**{**parts, name: True}))
        for batch, full in zip(stage.micro_batches(1), whole, strict=True):
            for other in ("tokens", "targets"):
                taken = getattr(batch, other)
                assert (
                    torch.equal(taken, getattr(full, other))
                    if other == name
                    else (not taken.numel())
                )
            assert (batch.starts is not None) == (name == "starts")
            is_end = name != "starts"
            assert batch.num_predicted == (full.num_predicted if is_end else 0)
    # Three steps whole and three of starts: two of each are read ahead, behind the answer.
    wait_for(lambda: server.num_reads == 6)
    reads = server.num_reads
    middle = loader(node.rank(), 1, Wanted(**parts))
    middle.prepare(1)
    assert [batch.tokens.numel() for batch in middle.micro_batches(1)] == [0, 0]
    assert (server.num_reads, middle.last_wait_ns) == (reads, 0)


def test_the_socket_is_its_owners(node: Node) -> None:
    assert node.path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileNotFoundError):
        local_socket.connect(node.path.with_name("none"), 1.0)
