"""What ranks do in tests, each function on every rank."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from checkpoint.restore import restore
from checkpoint.stage import stager as stage
from checkpoint.stage.stager import Stager
from outlast.blackbox import Group, Op, OpRecord
from outlast.chosen import ChosenStart
from outlast.layout import Layout, folds
from outlast.sizing.partition import stage_parts
from outlast.skipped import StepRange
from tests.checkpoint.copy_streams import GatedCopyStream
from tests.contracts import contract_of
from tests.trainer.ranks import RankContext
from trainer.core import schedule as schedules
from trainer.core.batch import BatchPlan
from trainer.core.context import own_places
from trainer.data.tokens import NO_TARGET
from trainer.model.config import GptConfig
from trainer.model.gpt import chunks_of
from trainer.model.parameters import FlatParameters
from trainer.optim.clip import squared_norm_share
from trainer.parallel.comm import Recorder
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.parallel.pipeline import MicroBatch, PipelineEngine
from trainer.parallel.zero import DataParallel, ZeroConfig
from trainer.worker import process as worker
from trainer.worker.state import TrainState


class Silent:
    """A black box for tests that do not look into it; keeps what was entered."""

    def __init__(self) -> None:
        self.entered: list[tuple[Op, Group, int]] = []

    def enter(
        self, op: Op, group: Group, detail: int = -1, peer: int = -1, message: int = -1
    ) -> int:
        self.entered.append((op, group, detail))
        return len(self.entered)

    def leave(self, departed_ns: int = 0) -> None:
        pass

    def stands_in(self, operation: OpRecord) -> None:
        pass

    def ended(self, operation: OpRecord) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout and a model to compare with the dense one."""

    layout: Layout
    sequence_parallel: bool = True
    tied: bool = True
    layers: int = 4
    schedule: str = "1f1b"
    virtual_stages: int = 1
    layer_split: tuple[int, ...] | None = None
    dtype: str = "fp64"
    hidden: int = 16
    seq_len: int = 8
    micro_batch: int = 2
    global_batch: int = 8
    context: Literal["all_to_all", "ring"] = "all_to_all"
    documents: bool = False
    """Whether each sequence has several documents that do not see each other."""


def mesh_of(
    context: RankContext,
    layout: Layout,
    *,
    tied: bool = True,
    recorder: Recorder | None = None,
    store: Any = None,
    folds: bool = False,
) -> Mesh:
    """The groups of a layout; they meet at `store`, if it is open already."""
    return build_mesh(
        layout,
        context.rank,
        store=store or context.store(),
        device=torch.device("cpu"),
        timeout_s=60,
        recorder=recorder or Silent(),
        tied_embeddings=tied,
        folds=folds,
        gloo_interface="lo",
    )


def loss_and_gradients(context: RankContext, case: Case) -> dict[str, Any]:
    """One forward and backward of the whole layout; this rank's shards of the gradients."""
    mesh = mesh_of(context, case.layout, tied=case.tied, folds=folds(case.schedule))
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[case.dtype]
    config = GptConfig(
        layers=case.layers,
        hidden=case.hidden,
        heads=4,
        mlp_hidden=3 * case.hidden,
        vocab_size=32,
        seq_len=case.seq_len,
        tied_embeddings=case.tied,
        norm_eps=1e-5,
        # Large enough that every gradient is far from zero.
        init_std=0.3,
        sequence_parallel=case.sequence_parallel,
        context=case.context,
        dtype=dtype,
    )
    parts = stage_parts(
        case.layers,
        stage=mesh.at.pp,
        num_stages=mesh.layout.pp,
        num_chunks=case.virtual_stages,
        folds=mesh.folds,
        given=case.layer_split,
    )
    chunks = chunks_of(config, mesh, parts)
    flat = FlatParameters(chunks, tp_size=mesh.tp.size)
    flat.initialise(7)
    split = case.sequence_parallel and mesh.tp.size > 1
    plan = BatchPlan(
        num_samples=64,
        global_batch=case.global_batch,
        micro_batch=case.micro_batch,
        num_replicas=case.layout.num_replicas,
        seed=3,
    )
    schedule = schedules.build(
        case.schedule, case.layout.pp, plan.num_micro_batches, num_chunks=case.virtual_stages
    )
    local_seq = case.seq_len // (mesh.cp.size * (mesh.tp.size if split else 1))
    boundary = (local_seq, case.micro_batch, case.hidden)
    config_of_zero = ZeroConfig(reshard_each_micro_batch=False, reduce_each_micro_batch=False)
    replicas = DataParallel(flat, chunks, mesh, config_of_zero, sequence_parallel=split)
    engine = PipelineEngine(
        chunks,
        mesh,
        schedule,
        boundary=boundary,
        replicated=mesh.tp.size > 1 and not split,
        hooks=replicas,
    )
    batches = [
        own_part(
            _random_batch(
                plan.samples(1, mesh.replica, index), case.seq_len, documents=case.documents
            ),
            mesh,
            in_ring=case.context == "ring",
        )
        for index in range(plan.num_micro_batches)
    ]
    replicas.begin_step(len(batches))
    loss = engine.run(batches, 1.0 / (case.global_batch * case.seq_len))
    replicas.finish_gradients()
    share = loss.double() if mesh.at.tp == 0 else torch.zeros_like(loss).double()
    row = torch.stack((share, squared_norm_share(flat, mesh)))
    loss_sum, squared_norm = mesh.fold(row, lambda rows: rows.sum(dim=0)).tolist()
    return {
        "loss": loss_sum,
        "norm": squared_norm**0.5,
        "numbers": sum(f.numel() for chunk in chunks for f in chunk.parameters()),
        "gradients": {
            name: (facts.global_shape, facts.offsets, flat.view(flat.grads, name).numpy().copy())
            for name, facts in flat.facts.items()
        },
    }


def own_part(batch: MicroBatch, mesh: Mesh, *, in_ring: bool = False) -> MicroBatch:
    """What a rank takes of a replica's micro-batch where ranks divide the sequence."""
    tokens, targets = (
        each[own_places(len(each), mesh.cp.index, mesh.cp.size, in_ring=in_ring)]
        for each in (batch.tokens, batch.targets)
    )
    return replace(batch, tokens=tokens, targets=targets)


def _random_batch(samples: tuple[int, ...], seq_len: int, *, documents: bool = False) -> MicroBatch:
    rows = np.stack(
        [np.random.default_rng(sample).integers(0, 32, seq_len + 1) for sample in samples]
    )
    block = torch.from_numpy(rows).t()
    tokens, targets = block[:-1].contiguous(), block[1:].contiguous()
    if not documents:
        return MicroBatch(tokens=tokens, targets=targets)
    # Two documents, which meet at another place in each sequence.
    cuts = torch.tensor([1 + sample % (seq_len - 1) for sample in samples])
    index = torch.arange(seq_len)[:, None]
    targets[index == cuts - 1] = NO_TARGET
    return MicroBatch(tokens=tokens, targets=targets, starts=torch.where(index < cuts, 0, cuts))


def collectives(context: RankContext, size: int) -> dict[str, Any]:
    """Every operation of `Comm` on one group of all ranks, twice."""
    comm = mesh_of(context, Layout(dp=context.world_size)).dp
    generator = torch.Generator().manual_seed(context.rank)
    own = torch.randn(size, 3, generator=generator)
    found: dict[str, Any] = {"own": own.numpy()}
    for turn in ("first", "second"):
        found[turn] = {
            "all_reduce": comm.all_reduce(own.clone()).numpy(),
            "all_reduce_max": comm.all_reduce_max(own.clone()).numpy(),
            "all_gather": comm.all_gather(own).numpy(),
            "reduce_scatter": comm.reduce_scatter(own).numpy(),
            "broadcast": comm.broadcast(own.clone(), 1).numpy(),
        }
    return found


def messages_out_of_order(context: RankContext) -> list[float]:
    """Rank 0 sends three tagged messages; rank 1 waits for them in reverse."""
    comm = mesh_of(context, Layout(dp=2)).dp
    if context.rank == 0:
        tensors = [torch.full((4,), float(tag)) for tag in (20, 21, 22)]
        works = [comm.post_send(t, 1, int(t[0])) for t in tensors]
        comm.wait(works, Op.SEND)
        return []
    buffers = {tag: torch.empty(4) for tag in (20, 21, 22)}
    posted = {tag: comm.post_recv(buffer, 0, tag) for tag, buffer in buffers.items()}
    values = []
    for tag in (22, 21, 20):
        comm.wait([posted[tag]], Op.RECV)
        values.append(float(buffers[tag][0]))
    return values


def lost_peer(context: RankContext) -> str:
    """Rank 1 leaves without a word; what rank 0 then raises."""
    comm = mesh_of(context, Layout(dp=2)).dp
    comm.all_reduce(torch.ones(1))
    if context.rank == 1:
        return ""
    try:
        comm.all_reduce(torch.ones(1))
    except Exception as error:  # noqa: BLE001  # its type is what the test is about
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def train(
    context: RankContext,
    folder: Path,
    spec: dict[str, Any],
    attempt: int,
    stop_after: int = 0,
    committed_step: int = 0,
    skipped: tuple[tuple[int, int], ...] = (),
    chosen: tuple[ChosenStart, ...] = (),
) -> dict[str, Any]:
    """A whole worker's exit code, and a digest of what it ended with.

    With `stop_after`, the last rank gets a SIGTERM while it works on its step of
    that number, counted from 1; all ranks must then stop after the same step.
    """
    code, states = worked(
        context, folder, spec, attempt, stop_after, committed_step, skipped, chosen=chosen
    )
    return {"code": code, "state": digest_of(states)}


def train_with_line(
    context: RankContext, folder: Path, spec: dict[str, Any], agent_line: str
) -> dict[str, Any]:
    """As `train`, with an agent that may ask the rank to leave and to join."""
    (folder / "port").write_text(str(context.port))
    copied = _noting_copies()
    code, states = worked(context, folder, spec, 1, agent_line=agent_line)
    return {
        "copied": copied,
        "code": code,
        "state": digest_of(states[-1:]),
        "pid": os.getpid(),
        "models": len({id(state.flat) for state in states}),
    }


def lose_a_peer(
    context: RankContext, folder: Path, spec: dict[str, Any], agent_line: str
) -> dict[str, Any]:
    """As `train_with_line`, and the last rank fails in its third step."""
    if context.rank == context.world_size - 1:
        worker.Stager = _failing_at(3)
    code, _ = worked(context, folder, spec, 1, agent_line=agent_line)
    return {"code": code, "pid": os.getpid()}


def lose_a_peer_and_the_device(
    context: RankContext, folder: Path, spec: dict[str, Any], agent_line: str
) -> dict[str, Any]:
    """As `lose_a_peer`, and the others' device is of no use then."""

    def broken(device: str) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    worker.settle = broken
    return lose_a_peer(context, folder, spec, agent_line)


def digest_of(states: list[TrainState]) -> str:
    """Of all bits that a rank has trained."""
    digest = hashlib.sha256()
    for state in states:
        for part in state.flat.parts:
            digest.update(part.master.numpy().tobytes())
        for buffer in (state.optimizer.exp_avg, state.optimizer.exp_avg_sq):
            digest.update(buffer.numpy().tobytes())
    return digest.hexdigest()


def train_late(
    context: RankContext, folder: Path, spec: dict[str, Any], attempt: int, stop_after: int = 0
) -> dict[str, Any]:
    """As `train`, with copies to host memory that end late in the next step."""
    stage.BATCH_BYTES = 1
    worker.copy_stream_for = lambda *_, **__: GatedCopyStream(after_s=0.002)
    return train(context, folder, spec, attempt, stop_after)


def worked(
    context: RankContext,
    folder: Path,
    spec: dict[str, Any],
    attempt: int,
    stop_after: int = 0,
    committed_step: int = 0,
    skipped: tuple[tuple[int, int], ...] = (),
    replayed_step: int = 0,
    suspects: tuple[str, ...] = (),
    nodes: tuple[str, ...] = (),
    chosen: tuple[ChosenStart, ...] = (),
    agent_line: str = "",
) -> tuple[int, list[TrainState]]:
    """A whole worker, as the standby process would run it; its exit code and its state."""
    # Forked with one thread, as production demands.
    assert len(os.listdir("/proc/self/task")) == 1
    rank = context.rank
    name = f"a{attempt}-rank-{rank}"
    contract = contract_of(
        folder,
        rank,
        world_size=context.world_size,
        attempt=attempt,
        rank_nodes=nodes or ("n1",) * context.world_size,
        spec_json=json.dumps(spec),
        rendezvous_port=context.port,
        rendezvous_fd=context.listen_fd if rank == 0 else None,
        blackbox_path=folder / f"{name}.blackbox",
        error_path=folder / f"{name}.error.json",
        environment_path=folder / f"{name}.environment.json",
        log_path=folder / f"{name}.log",
        committed_step=committed_step,
        skipped=tuple(StepRange(first=first, last=last) for first, last in skipped),
        replayed_step=replayed_step,
        suspects=suspects,
        chosen=chosen,
        checkpoint_url=str(folder / "store" / "job-1"),
        forked_at_ns=time.time_ns(),
        agent_line=agent_line,
    )
    log = os.open(contract.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    states: list[TrainState] = []
    # This process is a child of its own: what is replaced here ends with it.
    worker.build_state = _keeping(states, worker.build_state)
    if stop_after and rank == context.world_size - 1:
        worker.Stager = _terminating(stop_after)
    return worker.run(contract), states


def _noting_copies() -> list[bool]:
    """Of each load from host memory, whether tensors are copied."""
    copied: list[bool] = []
    load = restore.load_memory

    def noting(*arguments: Any, copies: bool = True) -> dict[str, object]:
        copied.append(copies)
        return load(*arguments, copies=copies)

    # This process is a child of its own.
    restore.load_memory = noting  # type: ignore[assignment]
    return copied


def _keeping(states: list[TrainState], build: Callable[..., TrainState]) -> Any:
    def kept(*arguments: Any) -> TrainState:
        states.append(build(*arguments))
        return states[-1]

    return kept


def _terminating(stop_after: int) -> Any:
    return _stager_with(lambda: os.kill(os.getpid(), signal.SIGTERM), stop_after)


def _failing_at(step: int) -> Any:
    def fail() -> None:
        raise ValueError(f"fails in step {step}")

    return _stager_with(fail, step)


def _stager_with(happens: Callable[[], None], at_step: int) -> Any:
    class Struck(Stager):
        """Asked once per step, just before the ranks agree on what comes next."""

        asked = 0

        @property
        def newest_sealed(self) -> int:
            self.asked += 1
            if self.asked == at_step:
                happens()
            return super().newest_sealed

    return Struck


def collectives_uneven(context: RankContext) -> dict[str, Any]:
    """A large all-reduce whose size the group does not divide."""
    comm = mesh_of(context, Layout(dp=context.world_size)).dp
    own = torch.randn(120_003, generator=torch.Generator().manual_seed(context.rank))
    return {"own": own.numpy().copy(), "sum": comm.all_reduce(own).numpy()}
