"""Time until every group of a 3D layout has done its first operation: ours beside torch's ways.

All ranks are forked from one process that has imported torch, as warm as our standby
process. The baselines are a loop of `new_group` over all groups, as the common frameworks
have it, and `init_device_mesh`: tp, dp, pp, and a replica's own, which is tp by pp. Fork,
store and the world group are part of every time: a job waits for them too.

    python -m bench.trainer.groups --variant ours|new_group|device_mesh --world 64
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # a re-export
from torch.distributed.device_mesh import init_device_mesh

from bench.trainer.quiet import NoBox
from outlast.layout import Layout
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.worker.hugepages import gather_pages

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 300.0
_KEPT: list[Mesh] = []


def layout_of(world_size: int) -> Layout:
    """tp 8 inside a node, two stages, the rest replicas."""
    tp = min(8, world_size // 4)
    return Layout(tp=tp, pp=2, dp=world_size // (2 * tp))


def measure(world_size: int, variant: str) -> float:
    """Seconds from the first fork until the last rank has used all its groups."""
    # torch's store asks for the names of addresses, and a resolver that drops some of so many
    # questions stalls a rank by a second or five. Without a network they fail at once.
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    command = [*alone, sys.executable, "-m", "bench.trainer.groups", "--variant", variant,
               "--world", str(world_size)]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True,
        timeout=2 * _TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{variant} at {world_size} ranks failed:\n{done.stderr[-3000:]}")
    seconds: float = json.loads(done.stdout.splitlines()[-1])
    return seconds


def _ours(layout: Layout, rank: int, store: TCPStore) -> None:
    mesh = build_mesh(
        layout,
        rank,
        store=store,
        device=torch.device("cpu"),
        timeout_s=_TIMEOUT_S,
        recorder=NoBox(),
        tied_embeddings=False,
        gloo_interface="lo",
    )
    # As torch's registry keeps its groups: their end is no part of a start.
    _KEPT.append(mesh)
    # What the ranks of one replica add up goes over tp, then pp.
    for comm in (mesh.tp, mesh.dp, mesh.pp, mesh.tp, mesh.pp):
        comm.all_reduce(torch.ones(1))


def _new_group(layout: Layout, rank: int, store: TCPStore) -> None:
    _join_world(layout, rank, store)
    own = []
    three = (*layout.tp_groups(), *layout.dp_groups(), *layout.pp_groups())
    for ranks in (*three, *_model_groups(layout)):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            own.append(group)
    _use(own)


def _device_mesh(layout: Layout, rank: int, store: TCPStore) -> None:
    _join_world(layout, rank, store)
    names = ("pp", "dp", "tp")
    mesh = init_device_mesh("cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=names)
    mesh["pp", "tp"]._flatten("model")
    _use([mesh.get_group(name) for name in (*names, "model")])


def _model_groups(layout: Layout) -> list[tuple[int, ...]]:
    """The ranks that hold one replica of the model together, tp by pp."""
    replicas: dict[int, list[int]] = {}
    for rank in range(layout.world_size):
        replicas.setdefault(layout.coordinate(rank).dp, []).append(rank)
    return [tuple(ranks) for ranks in replicas.values()]


def _join_world(layout: Layout, rank: int, store: TCPStore) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size)


def _use(groups: list[Any]) -> None:
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)


VARIANTS: Mapping[str, Callable[[Layout, int, TCPStore], None]] = {
    "ours": _ours,
    "new_group": _new_group,
    "device_mesh": _device_mesh,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--world", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(_time_forked_ranks(layout_of(options.world), VARIANTS[options.variant])))


def _time_forked_ranks(layout: Layout, join: Callable[[Layout, int, TCPStore], None]) -> float:
    gc.freeze()
    gather_pages()
    server, port = _fork_store()
    read_end, write_end = os.pipe()
    begin_s = time.monotonic()
    children = []
    for rank in range(layout.world_size):
        pid = os.fork()
        if pid == 0:
            _be_rank(layout, rank, port, join, write_end)
        children.append(pid)
    try:
        answers = b""
        while len(answers) < layout.world_size:
            left_s = begin_s + _TIMEOUT_S - time.monotonic()
            if left_s <= 0 or not select.select([read_end], [], [], left_s)[0]:
                raise TimeoutError(f"{len(answers)} of {layout.world_size} ranks were ready")
            answers += os.read(read_end, 4096)
        took_s = time.monotonic() - begin_s
    finally:
        for pid in (*children, server):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if answers != b"+" * layout.world_size:
        raise RuntimeError("a rank failed; its traceback is above")
    return took_s


def _fork_store() -> tuple[int, int]:
    """A process that serves the store, and its port: nothing else may slow it down."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        served = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write_end, str(served.port).encode())
        signal.pause()
    return pid, int(os.read(read_end, 16))


def _be_rank(
    layout: Layout,
    rank: int,
    port: int,
    join: Callable[[Layout, int, TCPStore], None],
    answer: int,
) -> None:
    """The rest of a child's life: it stays until it is killed, as its peers may still need it."""
    try:
        timeout = timedelta(seconds=_TIMEOUT_S)
        store = TCPStore("127.0.0.1", port, timeout=timeout, wait_for_workers=False)
        join(layout, rank, store)
    except BaseException:  # noqa: BLE001  # the last frame of the process
        sys.excepthook(*sys.exc_info())
        os.write(answer, b"-")
        os._exit(1)
    os.write(answer, b"+")
    signal.pause()


if __name__ == "__main__":
    main()
