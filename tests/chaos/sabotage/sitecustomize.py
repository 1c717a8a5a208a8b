"""Faults inside the processes of a cluster: read by Python when one starts, by way of PYTHONPATH.

Wraps a few functions of the product once their module is imported, so that the product knows
nothing of it. Without `OUTLAST_CHAOS_DIR` it does nothing. Orders are in that folder (see
`tests/chaos/orders.py`). Standard library only: it is loaded before everything else.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("OUTLAST_CHAOS_DIR", "")
# Whoever gave the order is slow where the machine does much else.
ORDER_HOLD_S = 240.0
HOLD_S = 60.0
POLL_S = 0.02
EXIT_CODE = 3
# What a checkpoint takes now and then, and each call to the store.
SLOW_S = 0.5
SLOW_EVERY_STEPS = 90
# What a loss is multiplied with. In the last digits, and still a number: nothing but other bits can
# show that.
_FACTORS = {"wrong": 1 + 2**-20, "spike": 8.0}
# Which attempt this process belongs to, and as which rank: set when a worker begins.
_here = {"rank": -1, "attempt": -1}
# Its black box, from then on.
_box: list[Any] = []
# What the present step is to be spoilt with.
_spoilt = {"by": ""}


@functools.cache
def _orders() -> list[dict[str, Any]]:
    # Read by the first worker or uploader that asks: they are given before a job starts.
    orders: list[dict[str, Any]] = json.loads(Path(FOLDER, "orders.json").read_text())
    return orders


def _reach(at: str, rank: int, attempt: int, step: int | None) -> str:
    """Carry out what is ordered for this moment; what is left for the caller to do."""
    for order in _orders():
        # Attempt 0 stands for every one.
        place = (order["at"], order["attempt"] or attempt, order["step"])
        # A deadlock by swapped collectives takes all ranks: some swap, some do not.
        is_meant = order["rank"] == rank or order["act"] == "swap"
        if place == (at, attempt, step) and is_meant:
            left = _obey(order, rank)
            if left:
                return left
    return ""


def _obey(order: dict[str, Any], rank: int) -> str:
    if order["rank"] == rank:
        _write_whole(Path(FOLDER, f"{order['name']}.reached"), str(os.getpid()))
    match order["act"]:
        case "hold":
            deadline_s = time.monotonic() + ORDER_HOLD_S
            while not Path(FOLDER, "released").exists() and time.monotonic() < deadline_s:
                time.sleep(POLL_S)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(EXIT_CODE)
        case "raise":
            raise RuntimeError("ordered by tests/chaos")
        case "break":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        case "poison":
            _bad_reports().write_into(_box[0])
        case "swap":
            return "swap-here" if order["rank"] == rank else "swap-there"
        case act:
            return str(act)
    return ""


def _bad_reports() -> ModuleType:
    # Beside this file. Loaded only where it is needed: it needs the product's messages.
    return importlib.import_module("bad_reports")


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def _before(owner: Any, name: str, hook: Callable[..., None]) -> None:
    """Run `hook` with the same arguments before each call."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        hook(*arguments, **named)
        return function(*arguments, **named)

    setattr(owner, name, wrapped)


def _patch_worker(module: ModuleType) -> None:
    def begins(assignment: Any, box: Any, *_: Any) -> None:
        _here.update(rank=assignment.rank, attempt=assignment.attempt)
        _box[:] = [box]
        _reach("start", _here["rank"], _here["attempt"], None)

    # Inside `run`, which reports what is raised.
    _before(module, "_train", begins)


def _patch_loop(module: ModuleType) -> None:
    agree = module.TrainLoop._agree

    def begins(loop: Any, step: int) -> None:
        _spoilt["by"] = _reach("step", _here["rank"], _here["attempt"], step)
        if _spoilt["by"].startswith("swap"):
            _swap(loop, swapped=_spoilt["by"] == "swap-here")

    @functools.wraps(agree)
    def agreed(loop: Any, loss: Any, scale: float) -> Any:
        # In the middle of a step: at its beginning it would be a part of the last checkpoint.
        time.sleep(_slow()[1])
        if _spoilt["by"] == "nan":
            loss = loss * float("nan")
        elif _spoilt["by"] == "flip":
            _flip_largest(loop._state)
        _spoilt["by"] = ""
        return agree(loop, loss, scale)

    _before(module.TrainLoop, "train_step", begins)
    module.TrainLoop._agree = agreed


def _patch_pipeline(module: ModuleType) -> None:
    run = module.PipelineEngine.run

    @functools.wraps(run)
    def ran(engine: Any, *arguments: Any, **named: Any) -> Any:
        loss = run(engine, *arguments, **named)
        return loss * _FACTORS.get(_spoilt["by"], 1.0)

    module.PipelineEngine.run = ran


def _swap(loop: Any, *, swapped: bool) -> None:
    """Two collectives, in an order that not all ranks have.

    Where a rank has two groups, every other rank takes these the other way round, so that all
    wait in a circle. Where it has one, it is two broadcasts of different roots: an all-reduce
    and an all-gather look alike on gloo.
    """
    import torch

    mesh = loop._mesh
    groups = [comm for comm in (mesh.tp, mesh.dp, mesh.pp) if comm.size > 1]
    if len(groups) > 1:
        if sum(comm.index for comm in groups) % 2:
            groups.reverse()
        for comm in groups:
            comm.all_reduce(torch.ones(1))
    else:
        for root in (1, 0) if swapped else (0, 1):
            groups[0].broadcast(torch.ones(1), root)


def _flip_largest(state: Any) -> None:
    """Flip the highest bit of the exponent in the largest gradient that this rank answers for."""
    import torch

    from trainer.model.buckets import overlap
    from trainer.optim.clip import _counted

    mesh, own = state.mesh, []
    for part in state.flat.parts:
        shard = part.bucket.shard(mesh.dp.index, mesh.dp.size)
        own.append(part.grads[part.among(overlap(_counted(part.bucket, mesh), shard))])
    grads = max((each for each in own if each.numel()), key=lambda each: float(each.abs().max()))
    index = int(grads.abs().argmax())
    bits = grads[index : index + 1].view(torch.int32)
    bits.bitwise_xor_(torch.tensor(1 << 30, dtype=torch.int32))


def _patch_stage(module: ModuleType) -> None:
    copy, save = module.Stager._copy, module.Stager.save
    step_of = {"saving": -1}

    @functools.wraps(save)
    def saved(stager: Any, step: int, *arguments: Any, **named: Any) -> Any:
        step_of["saving"] = step
        return save(stager, step, *arguments, **named)

    @functools.wraps(copy)
    def copied(stager: Any, saving: Any) -> None:
        copy(stager, saving)
        if _slow()[0] == "all" and step_of["saving"] % SLOW_EVERY_STEPS == 0:
            time.sleep(SLOW_S)
        # The slot holds new bytes and is not sealed yet.
        _reach("stage", _here["rank"], _here["attempt"], step_of["saving"])

    module.Stager.save = saved
    module.Stager._copy = copied


def _patch_upload(module: ModuleType) -> None:
    def begins(part: Any, send: Any) -> None:
        _reach("upload", part.folder.rank, part.facts.attempt, part.facts.step)

    _before(module.Part, "write", begins)


def _patch_resume(module: ModuleType) -> None:
    def begins(loader: Any, ranks: Any, sources: Any) -> None:
        _reach("restore", _here["rank"], _here["attempt"], None)

    _before(module, "restore", begins)


def _patch_storage(module: ModuleType) -> None:
    call = module.Storage._call

    @functools.wraps(call)
    def called(storage: Any, what: str, path: str, work: Callable[[], Any]) -> Any:
        return call(storage, what, path, lambda: _through_the_store(path, work))

    module.Storage._call = called


def _through_the_store(path: str, work: Callable[[], Any]) -> Any:
    """Runs in the thread of the call, so that the product's own deadlines hold."""
    deadline_s = time.monotonic() + HOLD_S
    while _store() == "silent" and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    if _slow()[0] == "all":
        time.sleep(SLOW_S)
    if _store() == "down":
        raise ConnectionRefusedError(f"{path}: ordered by tests/chaos")
    return work()


def _store() -> str:
    try:
        return Path(FOLDER, "store").read_text()
    except FileNotFoundError:
        return ""


def _slow() -> tuple[str, float]:
    """What is slow (`steps`, `all`, or nothing), and by how many seconds each step is."""
    try:
        what, step_s = Path(FOLDER, "slow").read_text().split()
    except FileNotFoundError:
        return "", 0.0
    return what, float(step_s)


def _patch_agent(module: ModuleType) -> None:
    heartbeat = module.Agent._heartbeat
    emitted = set[str]()

    @functools.wraps(heartbeat)
    def beaten(agent: Any) -> Any:
        beat = heartbeat(agent)
        try:
            ordered = Path(FOLDER, f"poison-{agent._config.node}").read_text()
        except FileNotFoundError:
            return beat
        bad_reports = _bad_reports()
        case = bad_reports.Case(**json.loads(ordered))
        if ordered not in emitted:
            emitted.add(ordered)
            for event in bad_reports.events(case):
                agent._emit(event, module.Weight.LASTING)
        # Before and behind what is true: the last word on a rank may be the bad one. Every
        # heartbeat for a while: a slow line gets the newest only.
        true = [*beat.ranks]
        del beat.ranks[:]
        beat.ranks.extend([*bad_reports.summaries(case), *true, *bad_reports.summaries(case)])
        return beat

    module.Agent._heartbeat = beaten


def _patch_clock() -> None:
    """A wall clock that jumps when its host's file says so; the monotonic one never does."""
    node = Path(os.environ.get("OUTLAST_LOCAL_NODE", "controller")).name
    path = Path(FOLDER, f"clock-{node}")
    now, now_ns = time.time, time.time_ns

    def offset_s() -> float:
        try:
            return float(path.read_text())
        except (FileNotFoundError, ValueError):
            return 0.0

    time.time = lambda: now() + offset_s()
    time.time_ns = lambda: now_ns() + int(offset_s() * 1e9)


_PATCHES = {
    "controller.agent.agent": _patch_agent,
    "trainer.worker.process": _patch_worker,
    "trainer.worker.loop": _patch_loop,
    "trainer.parallel.pipeline": _patch_pipeline,
    "checkpoint.restore.resume": _patch_resume,
    "checkpoint.stage.stager": _patch_stage,
    "checkpoint.upload.part": _patch_upload,
    "checkpoint.storage.storage": _patch_storage,
}


class _Loader(importlib.abc.Loader):
    """The real loader, and our patch after it."""

    def __init__(self, real: importlib.abc.Loader, patch: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        self._patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = _PATCHES.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if patch else None
        if patch is None or spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, patch)
        return spec


if FOLDER:
    sys.meta_path.insert(0, _Finder())
    _patch_clock()
