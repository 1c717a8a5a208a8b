"""torch's own checkpoint tools read what training saved, on every layout."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint.core.names import memory_folder
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.convert import convert
from outlast.blackbox import Reader
from outlast.sizing.of_spec import plan_input
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from tests.checkpoint.helpers import DEADLINE_S, uploading
from tests.trainer.jobs import train
from tests.trainer.jobs_checkpoint import Shown, train_and_show
from tests.trainer.ranks import RankPool
from trainer.core.memory import rank_memory

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dp2": {"dp": 2},
    "zero1": {"dp": 2, "zero": {"level": 1}},
    "zero2": {"dp": 2, "zero": {"level": 2}},
    "tp2-zero3": {"tp": 2, "dp": 2, "zero": {"level": 3}},
    "pp2-tied": {"pp": 2},
    "pp2-tp2": {"pp": 2, "tp": 2},
    "interleaved-zero3": {
        "pp": 2,
        "virtual_stages": 2,
        "schedule": "interleaved",
        "dp": 2,
        "zero": {"level": 3},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What all ranks held, and where their checkpoint is."""

    spec: JobSpec
    memory: Path
    root: Path
    shown: list[Shown]


def trained(ranks: RankPool, folder: Path, parallel: dict[str, Any], **model: Any) -> Saved:
    """Train, upload the last step."""
    text = " ".join(f"step {n} of {n * n};" for n in range(1500))
    (folder / "text.txt").write_text(text)
    spec = parse_spec(
        {
            "name": "job",
            "steps": STEPS,
            "model": {"layers": 4, "hidden": 16, "heads": 2, "seq_len": 16, **model},
            "data": {"source": str(folder / "text.txt"), "global_batch": 4},
            "parallel": parallel,
        }
    )
    world = spec.layout.world_size
    shown = ranks.run(train_and_show, world, folder, spec.model_dump(mode="json"))
    everyone = range(world)
    root, memory = folder / "store/job-1", folder / "memory/job-1"
    with uploading(str(root), memory, local=everyone, savers=everyone) as (uploader, news):
        assert uploader.drain(DEADLINE_S)
    assert (news.committed, news.trouble) == ([STEPS], [])
    every = [each for of_rank in shown for each in of_rank]
    return Saved(spec=spec, memory=memory, root=root, shown=every)


def whole_tensors(shown: list[Shown]) -> dict[str, dict[str, torch.Tensor]]:
    """The state as one process would hold it, with the keys that torch's tools use."""
    made: dict[str, np.ndarray[Any, Any]] = {}
    for piece in shown:
        whole = made.setdefault(piece.name, np.full(piece.global_shape, np.nan, piece.values.dtype))
        at = tuple(
            slice(start, start + size)
            for start, size in zip(piece.offsets, piece.values.shape, strict=True)
        )
        # What several ranks hold must be the same, or it matters whose copy is saved.
        assert np.isnan(whole[at]).all() or np.array_equal(whole[at], piece.values), piece.name
        whole[at] = piece.values
    nested: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optim": {}}
    for name, values in made.items():
        assert not np.isnan(values).any(), name
        kind, _, rest = name.partition(".")
        nested[kind][rest] = torch.from_numpy(values)
    return nested


def assert_same(
    found: dict[str, dict[str, torch.Tensor]], wanted: dict[str, dict[str, torch.Tensor]]
) -> None:
    assert found.keys() == wanted.keys()
    for kind in wanted:
        assert found[kind].keys() == wanted[kind].keys()
        for name, tensor in wanted[kind].items():
            assert found[kind][name].dtype == tensor.dtype
            assert torch.equal(found[kind][name], tensor), name


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def saved(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Saved:
    return trained(ranks, tmp_path_factory.mktemp("job"), request.param)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_what_any_layout_has_saved(saved: Saved, tmp_path: Path) -> None:
    wanted = whole_tensors(saved.shown)
    folder = saved.root / f"step-{STEPS:08d}.1"

    # A program that knows nothing of us: it asks for tensors by name.
    loaded = {
        kind: {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
        for kind, tensors in wanted.items()
    }
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert_same(loaded, wanted)
    # torch's converter asks for everything that is there.
    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    assert_same(torch.load(tmp_path / "whole.pt", weights_only=True), wanted)


def test_every_rectangle_has_one_owner_who_saves_it(saved: Saved) -> None:
    shown = saved.shown
    held = {(piece.name, piece.offsets) for piece in shown}
    owners = Counter((piece.name, piece.offsets) for piece in shown if piece.owned)
    assert owners == dict.fromkeys(held, 1)
    _, manifest = Storage(str(saved.root)).read_commit(STEPS)
    in_storage = [tensor for part in manifest.parts for tensor in part.tensors]
    assert Counter((tensor.name, tensor.offsets) for tensor in in_storage) == owners
    whole = [tensor for part in whole_tensors(shown).values() for tensor in part.values()]
    assert sum(each.nbytes for each in in_storage) == sum(each.nbytes for each in whole)


def test_slots_take_no_more_host_memory_than_the_plan_says(saved: Saved) -> None:
    for rank in range(saved.spec.layout.world_size):
        folder = saved.memory / memory_folder(rank)
        taken = sum(path.stat().st_size for path in folder.glob("slot-*"))
        stage = saved.spec.layout.coordinate(rank).pp
        plan = rank_memory(plan_input(saved.spec), stage)
        # Of a model this small most is header; ZeRO cuts state evenly only up to one element.
        assert plan.host_slots_bytes * 0.9 < taken <= plan.host_memory_bytes


def test_torchs_command_line_reads_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    saved = trained(ranks, tmp_path, {"tp": 2}, tied_embeddings=False)
    wanted, folder = whole_tensors(saved.shown), saved.root / f"step-{STEPS:08d}.1"
    command = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    subprocess.run([*command, str(folder), str(tmp_path / "whole.pt")], check=True)
    assert_same(torch.load(tmp_path / "whole.pt", weights_only=True), wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_job_goes_on_from_what_plain_torch_has_saved(ranks: RankPool, tmp_path: Path) -> None:
    """Ours to torch's, by its converter; saved by torch alone; and back to ours."""
    (tmp_path / "text.txt").write_text(" ".join(f"step {n};" for n in range(2000)))
    spec = parse_spec(
        {
            "name": "job",
            "steps": 6,
            "model": {"layers": 2, "hidden": 16, "heads": 2, "seq_len": 16},
            "data": {"source": str(tmp_path / "text.txt"), "global_batch": 4},
            "checkpoint": {"storage_interval_steps": 3},
        }
    ).model_dump(mode="json")
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    for folder in (whole, first, second):
        folder.mkdir()
    expected = ranks.run(train, 1, whole, spec, 1)
    ranks.run(train, 1, first, spec, 1, 3)
    with uploading(str(first / "store/job-1"), first / "memory/job-1") as (uploader, _):
        assert uploader.drain(DEADLINE_S)
    dcp_to_torch_save(first / "store/job-1/step-00000003.1", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)

    convert(Storage(str(tmp_path / "theirs")), Storage(str(second / "store/job-1")), step=3)
    assert ranks.run(train, 1, second, spec, 1) == expected
    reader = Reader(second / "a1-rank-0.blackbox")
    assert reader.new_steps()[0].step == 4
    reader.close()
