"""What ranks do in tests of many models: one process is the worker of one job after another."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # a re-export

from outlast.skipped import StepRange
from outlast.spec.parse import parse_spec
from tests.contracts import contract_of
from tests.trainer.jobs import mesh_of
from tests.trainer.ranks import RankContext
from trainer.worker import process as worker


def save_what_is_loaded(context: RankContext, jobs: Mapping[Path, dict[str, Any]]) -> list[int]:
    """The exit codes of whole workers: each loads what its spec says, and saves it again.

    `jobs` has the spec of each by its folder, all of one layout. Their only batch is left out, so
    that nothing is trained in between. They share their groups, which take longer to make than
    all else.
    """
    store = context.store()
    (layout,) = {parse_spec(spec).layout for spec in jobs.values()}
    mesh = mesh_of(context, layout, store=store)
    # This process is a child of its own: what is replaced here ends with it.
    worker.build_mesh = lambda *_, **__: mesh
    codes = []
    for number, (folder, spec) in enumerate(jobs.items(), start=1):
        worker._rendezvous = partial(_prefixed, PrefixStore(f"job-{number}/", store))
        codes.append(_work(context, folder, spec))
    return codes


def _prefixed(store: Any, *_: object) -> Any:
    return store


def _work(context: RankContext, folder: Path, spec: dict[str, Any]) -> int:
    name = f"a1-rank-{context.rank}"
    contract = contract_of(
        folder,
        context.rank,
        world_size=context.world_size,
        spec_json=json.dumps(spec),
        blackbox_path=folder / f"{name}.blackbox",
        error_path=folder / f"{name}.error.json",
        environment_path=folder / f"{name}.environment.json",
        log_path=folder / f"{name}.log",
        skipped=(StepRange(first=1, last=1),),
        checkpoint_url=str(folder / "store" / "job-1"),
        forked_at_ns=time.time_ns(),
    )
    log = os.open(contract.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.close(log)
    return worker.run(contract)
