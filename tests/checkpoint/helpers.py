"""What the tests of checkpoints share."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from checkpoint.core.manifest import CommitRecord
from checkpoint.core.names import memory_folder
from checkpoint.core.pacing import DEFAULT_LIMITS, TransferLimits
from checkpoint.core.retention import RetentionPolicy
from checkpoint.restore.restore import Alone, load_storage
from checkpoint.stage.copy_stream import CopyStream
from checkpoint.stage.payload import NamedTensor
from checkpoint.stage.stager import Stager
from checkpoint.storage.storage import Storage
from checkpoint.upload.commit import CommitRules, Committed
from checkpoint.upload.uploader import Uploader

DEADLINE_S = 20.0


def make_tensors(seed: int, *, rank: int = 0, ranks: int = 1, width: int = 8) -> list[NamedTensor]:
    """Tensors of several types and shapes; the first is cut by rows over `ranks`.

    The others are the same everywhere, and rank 0 owns them.
    """
    rows = torch.Generator().manual_seed(seed * 1000 + rank + 1)
    sharded = torch.randn(4, width, generator=rows)
    made = torch.Generator().manual_seed(seed * 1000)
    tensors = [
        NamedTensor("model.weight", sharded, (4 * ranks, width), (4 * rank, 0)),
        NamedTensor("model.bias", torch.randn(5, generator=made).double(), (5,), (0,)),
        NamedTensor("optim.scale", torch.tensor(float(seed)), (), ()),
        NamedTensor("optim.mask", torch.rand(3, generator=made) > 0.5, (3,), (0,)),
        NamedTensor("optim.empty", torch.zeros(0, 4), (0, 4), (0, 0)),
        NamedTensor("model.half", torch.randn(3, 2, generator=made).bfloat16(), (3, 2), (0, 0)),
        # Not in one piece: saved and restored in its logical order.
        NamedTensor("model.turned", torch.randn(2, 3, generator=made).t(), (3, 2), (0, 0)),
    ]
    own, *others = tensors
    return [own, *(other._replace(owned=rank == 0) for other in others)]


def same_bits(left: Sequence[NamedTensor], right: Sequence[NamedTensor]) -> bool:
    return all(
        one.name == other.name
        and one.tensor.dtype == other.tensor.dtype
        and torch.equal(one.tensor, other.tensor)
        for one, other in zip(left, right, strict=True)
    )


def make_stager(
    memory: Path,
    tensors: Sequence[NamedTensor],
    *,
    rank: int = 0,
    world_size: int = 1,
    attempt: int = 1,
    copy_stream: CopyStream | None = None,
    is_void: Callable[[], bool] = lambda: False,
) -> Stager:
    return Stager(
        memory / memory_folder(rank),
        rank=rank,
        attempt=attempt,
        world_size=world_size,
        tensors=tensors,
        copy_stream=copy_stream,
        is_void=is_void,
    )


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Poll until `condition` holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not in {timeout_s} s: {what}"
        time.sleep(0.005)


@dataclass
class News:
    """What an uploader said."""

    committed: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    trouble: list[tuple[int, str, str]] = field(default_factory=list)
    found: list[tuple[int, int]] = field(default_factory=list)

    def on_committed(self, committed: Committed) -> None:
        assert committed.upload_s >= 0
        assert committed.total_s >= 0
        self.committed.append(committed.step)
        self.sizes.append(committed.size_bytes)

    def on_found(self, found: CommitRecord) -> None:
        self.found.append((found.step, found.attempt))

    def on_trouble(self, step: int, stage: str, detail: str) -> None:
        self.trouble.append((step, stage, detail))


def commit_rules(
    *, keep: int = 2, timeout_s: float = 30.0, last_step: int | None = None
) -> CommitRules:
    return CommitRules(
        retention=RetentionPolicy(keep=keep),
        timeout_s=timeout_s,
        interval_steps=1,
        last_step=last_step,
        last_timeout_s=DEADLINE_S,
    )


@contextmanager
def uploading(
    url: str,
    memory: Path,
    *,
    local: Sequence[int] = (0,),
    savers: Sequence[int] = (0,),
    coordinator: bool = True,
    keep: int = 2,
    timeout_s: float = 30.0,
    limits: TransferLimits = DEFAULT_LIMITS,
    last_step: int | None = None,
) -> Iterator[tuple[Uploader, News]]:
    """An uploader at work, and what it says."""
    news = News()
    uploader = Uploader(
        url,
        "job-1",
        memory,
        local,
        savers,
        coordinator,
        commit_rules(keep=keep, timeout_s=timeout_s, last_step=last_step),
        news.on_committed,
        news.on_trouble,
        on_found=news.on_found,
        limits=limits,
    )
    uploader.start()
    try:
        yield uploader, news
    finally:
        uploader.stop()


def commit_steps(
    url: str,
    memory: Path,
    steps: Sequence[int],
    *,
    keep: int = 5,
    make: Callable[[int], list[NamedTensor]] = make_tensors,
) -> None:
    """Checkpoints of one rank whose tensors are seeded by the step."""
    tensors = make(0)
    stager = make_stager(memory, tensors)
    with uploading(url, memory, keep=keep) as (uploader, news):
        for step in steps:
            for mine, wanted in zip(tensors, make(step), strict=True):
                mine.tensor.copy_(wanted.tensor)
            stager.save(step, {"step": step}, upload=True, common_step=step - 1)
            assert uploader.drain(DEADLINE_S), news
        assert news.committed == list(steps)
        assert news.trouble == []
    stager.close()


def load_alone(storage: Storage, step: int, tensors: Sequence[NamedTensor]) -> dict[str, object]:
    """Load as the only rank there is."""
    return load_storage(storage, step, tensors, Alone())


class ThreadPeers:
    """One of several ranks that are threads of this process; make them with `of`."""

    def __init__(self, rank: int, size: int, shared: _Shared) -> None:
        self.rank = rank
        self.size = size
        self._shared = shared

    @classmethod
    def of(cls, size: int) -> list[ThreadPeers]:
        shared = _Shared(threading.Barrier(size, timeout=DEADLINE_S), [b""] * size)
        return [cls(rank, size, shared) for rank in range(size)]

    def largest(self, number: int) -> int:
        return max(int(raw) for raw in self.gather(str(number).encode()))

    def gather(self, own: bytes) -> list[bytes]:
        self._shared.given[self.rank] = own
        self._shared.barrier.wait()
        given = list(self._shared.given)
        self._shared.barrier.wait()
        return given

    def from_rank_0(self, own: bytes) -> bytes:
        return self.gather(own)[0]

    def send(self, message: Tensor, peer: int, tag: int) -> _Message:
        post = self._shared.post(self.rank, peer, tag)
        # Once it is sent its memory may be used for something else.
        post.contents.put(message.clone())
        return _Message(None, post)

    def receive(self, message: Tensor, peer: int, tag: int) -> _Message:
        post = self._shared.post(peer, self.rank, tag)
        post.is_awaited.set()
        return _Message(message, post)

    def abandon(self) -> None:
        """What is under way may stay so."""


@dataclass
class _Shared:
    """What threads that are ranks have in common."""

    barrier: threading.Barrier
    given: list[bytes]
    posts: dict[tuple[int, int, int], _Post] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def post(self, sender: int, receiver: int, tag: int) -> _Post:
        with self.lock:
            return self.posts.setdefault((sender, receiver, tag), _Post())


@dataclass
class _Post:
    """Where one thread leaves a message for another."""

    contents: queue.Queue[Tensor] = field(default_factory=queue.Queue)
    is_awaited: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Message:
    """A message under way; `content` None at its sender.

    As with gloo a send ends only once its receive is posted, so whoever would deadlock
    there does so here.
    """

    content: Tensor | None
    post: _Post

    def wait(self) -> None:
        if self.content is None:
            assert self.post.is_awaited.wait(DEADLINE_S), "nobody receives it"
            return
        self.content.copy_(self.post.contents.get(timeout=DEADLINE_S))


def assert_one_of_many_creates(storage: Storage) -> bytes:
    """Eight writers of one record: exactly one wins, and the record is its own. What it wrote."""
    together = threading.Barrier(8)

    def create(number: int) -> bool:
        together.wait(DEADLINE_S)
        return storage.put_if_absent("commits/00000001.json", b"writer %d" % number)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    winner = b"writer %d" % won.index(True)
    assert storage.read_bytes("commits/00000001.json") == winner
    return winner
