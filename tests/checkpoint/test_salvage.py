"""What is intact of a damaged checkpoint is saved bit for bit, and what is lost is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoint import catalog
from checkpoint.core.salvaging import Piece, plan_salvage
from checkpoint.core.shards import Rectangle, ShardTensor, lay_out
from checkpoint.remains import NothingLeftError, newest_remains
from checkpoint.salvage import Salvaged, salvage
from checkpoint.storage.root_owner import Owner, claim
from checkpoint.storage.storage import Storage
from tests.checkpoint.helpers import DEADLINE_S, make_stager, make_tensors, uploading

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FOLDER = "step-00000001.1"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of two ranks in blocks of 64 bytes."""
    monkeypatch.setattr("checkpoint.upload.part.BLOCK_BYTES", 64)
    monkeypatch.setattr("checkpoint.core.blocks.BLOCK_BYTES", 64)
    url = f"file://{tmp_path}/store/job-1"
    ranks = range(2)
    stagers = [
        make_stager(
            tmp_path / "memory",
            make_tensors(1, rank=rank, ranks=2, width=64),
            rank=rank,
            world_size=2,
        )
        for rank in ranks
    ]
    with uploading(url, tmp_path / "memory", local=ranks, savers=ranks) as (uploader, news):
        for stager in stagers:
            stager.save(1, {"step": 1}, upload=True, common_step=0)
        assert uploader.drain(DEADLINE_S), news
        assert news.committed == [1]
    for stager in stagers:
        stager.close()
    claim(Storage(url), Owner(job_id="job-1", mark="its mark"))
    return tmp_path / "store/job-1"


def expected() -> dict[str, Tensor]:
    """All tensors of that checkpoint, whole."""
    first, second = (make_tensors(1, rank=rank, ranks=2, width=64) for rank in range(2))
    whole = {named.name: named.tensor for named in first}
    whole["model.weight"] = torch.cat([first[0].tensor, second[0].tensor])
    return whole


def run(store: Path, tmp_path: Path) -> Salvaged:
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    report = salvage(Storage(str(store)), Storage(str(tmp_path / "saved")), 1, lambda _: None)
    after = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    assert after == before, "nothing is written where the checkpoint lies"
    written = json.loads((tmp_path / "saved/salvage.json").read_text())
    assert written["is_complete"] == report.is_complete
    assert len(written["lost"]) == len(report.lost)
    return report


def loaded(folder: Path, tmp_path: Path) -> dict[str, Tensor]:
    """What torch's own tool reads of a folder, by flat names."""
    dcp_to_torch_save(folder, tmp_path / "loaded.pt")
    nested: dict[str, Any] = torch.load(tmp_path / "loaded.pt", weights_only=True)
    return {
        f"{top}.{name}": tensor for top, inner in nested.items() for name, tensor in inner.items()
    }


def check_saved(report: Salvaged, tmp_path: Path) -> None:
    """Every element is saved with its bits, or lost by the report; never both, never neither."""
    wanted, seen = expected(), {}
    for name, tensor in wanted.items():
        seen[name] = torch.zeros(tensor.shape, dtype=torch.int32)
    if report.tensors:
        for name, tensor in loaded(tmp_path / "saved" / report.tensors, tmp_path).items():
            assert torch.equal(tensor, wanted[name]), name
            seen[name] += 1
    if report.pieces:
        for named, tensor in loaded(tmp_path / "saved" / report.pieces, tmp_path).items():
            name, _, indices = named.partition("[")
            where = indexed(indices)
            assert torch.equal(tensor, wanted[name][where]), named
            seen[name][where] += 1
    for lost in report.lost:
        seen[lost.tensor][indexed(lost.indices.removeprefix("["))] += 1
    for name, count in seen.items():
        assert torch.equal(count, torch.ones_like(count)), name


def indexed(text: str) -> tuple[slice, ...]:
    pairs = [pair for pair in text.removesuffix("]").split(", ") if pair]
    return tuple(slice(*(int(bound) for bound in pair.split(":"))) for pair in pairs)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


def shard(store: Path, name: str, rank: int) -> ShardTensor:
    manifest = Storage(str(store)).read_commit(1)[1]
    return next(one for one in manifest.parts[rank].tensors if one.name == name)


def goes_on_from(tmp_path: Path) -> None:
    """Our own tools find a whole checkpoint, without an owner: whoever loads it has its own."""
    saved = Storage(str(tmp_path / "saved"))
    assert saved.committed_steps() == [1]
    assert catalog.verify(saved, 1, lambda _: None) == []


def test_a_whole_checkpoint_is_saved_whole(store: Path, tmp_path: Path) -> None:
    report = run(store, tmp_path)
    assert report.is_complete
    assert (report.records, report.damage, report.lost) == ((), (), ())
    check_saved(report, tmp_path)
    goes_on_from(tmp_path)
    original, saved = (Storage(str(each)).read_commit(1)[1] for each in (store, tmp_path / "saved"))
    assert [part.extra for part in saved.parts] == [part.extra for part in original.parts]


def test_a_flipped_bit_costs_the_rows_of_its_block(store: Path, tmp_path: Path) -> None:
    weight = shard(store, "model.weight", 1)
    # A row has 256 bytes: the second row of rank 1, the sixth of the tensor.
    flip(store / FOLDER / "__1_0.distcp", weight.byte_offset + 256 + 5)
    report = run(store, tmp_path)
    assert not report.is_complete
    (damage,) = report.damage
    assert (damage.rank, damage.file) == (1, "__1_0.distcp")
    assert damage.problem == "they do not fit their checksum"
    assert damage.end - damage.start == 64
    (lost,) = report.lost
    assert (lost.tensor, lost.indices, lost.rank) == ("model.weight", "[5:6, 0:64]", 1)
    assert (report.num_whole, report.num_partial, report.num_lost) == (6, 1, 0)
    assert report.lost_bytes == 256
    check_saved(report, tmp_path)
    assert Storage(str(tmp_path / "saved")).committed_steps() == []


def test_a_truncated_file_costs_what_is_behind_the_cut(store: Path, tmp_path: Path) -> None:
    weight = shard(store, "model.weight", 0)
    path = store / FOLDER / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[: weight.byte_offset + 2 * 256 + 10])
    report = run(store, tmp_path)
    assert {each.rank for each in report.lost} == {0}
    assert "model.weight[0:2, 0:64]" in loaded(tmp_path / "saved/pieces", tmp_path)
    assert "the file ends at byte" in report.damage[-1].problem
    # What has no bytes cannot lose any.
    assert "optim.empty" in loaded(tmp_path / "saved" / report.tensors, tmp_path)
    check_saved(report, tmp_path)


def test_a_missing_file_costs_what_its_rank_saved(store: Path, tmp_path: Path) -> None:
    (store / FOLDER / "__1_0.distcp").unlink()
    report = run(store, tmp_path)
    (lost,) = report.lost
    assert (lost.tensor, lost.indices, lost.rank) == ("model.weight", "[4:8, 0:64]", 1)
    assert [each.problem for each in report.damage] == ["the file is missing"]
    check_saved(report, tmp_path)


def test_all_files_missing_leaves_a_report_of_what_is_lost(store: Path, tmp_path: Path) -> None:
    for path in (store / FOLDER).glob("*.distcp"):
        path.unlink()
    report = run(store, tmp_path)
    assert report.num_whole == 1  # the empty one
    assert report.num_lost == 6
    check_saved(report, tmp_path)


RECORDS = (f"{FOLDER}/manifest.json", "commits/00000001.json", f"{FOLDER}/.metadata", "owner.json")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [Path.unlink, halve, flip_middle])
@pytest.mark.parametrize("record", RECORDS)
def test_every_tensor_is_saved_whatever_record_is_damaged(
    store: Path, tmp_path: Path, record: str, damage: Callable[[Path], None]
) -> None:
    damage(store / record)
    report = run(store, tmp_path)
    assert report.lost == ()
    check_saved(report, tmp_path)
    has_manifest = record != RECORDS[0] or damage is flip_middle
    assert report.is_complete == has_manifest
    if report.is_complete:
        goes_on_from(tmp_path)
    else:
        assert report.unverified, "nothing vouches for what lies where"
    named = [line for line in report.records if record in line]
    assert named or (record, damage) == ("owner.json", Path.unlink)


def test_any_flipped_bit_of_the_manifest_costs_no_tensor(store: Path, tmp_path: Path) -> None:
    path = store / RECORDS[0]
    whole = path.read_bytes()
    for number, at in enumerate(range(0, len(whole), 97)):
        flip(path, at)
        folder = tmp_path / str(number)
        folder.mkdir()
        report = run(store, folder)
        assert report.lost == (), at
        check_saved(report, folder)
        path.write_bytes(whole)


def test_manifest_and_payload_damaged_saves_what_fits_its_checksum(
    store: Path, tmp_path: Path
) -> None:
    weight = shard(store, "model.weight", 1)
    flip(store / FOLDER / "__1_0.distcp", weight.byte_offset)
    manifest = store / RECORDS[0]
    flip(manifest, manifest.read_bytes().index(b'"world_size"') + 2)
    report = run(store, tmp_path)
    assert [(each.tensor, each.indices) for each in report.lost] == [
        ("model.weight", "[4:5, 0:64]")
    ]
    assert not report.is_complete
    check_saved(report, tmp_path)


def test_no_record_at_all_is_said(store: Path, tmp_path: Path) -> None:
    (store / RECORDS[0]).unlink()
    (store / RECORDS[2]).unlink()
    with pytest.raises(NothingLeftError, match="nothing says what lies where"):
        run(store, tmp_path)
    with pytest.raises(NothingLeftError, match="has nothing of step 7"):
        salvage(Storage(str(store)), Storage(str(tmp_path / "saved")), 7, lambda _: None)


def test_a_checkpoint_that_was_set_aside_is_found(store: Path, tmp_path: Path) -> None:
    Storage(str(store)).quarantine_step(1)
    assert newest_remains(Storage(str(store))) == 1
    report = run(store, tmp_path)
    assert report.is_complete
    check_saved(report, tmp_path)


def test_nothing_is_taken_from_another_attempt_of_the_step(store: Path, tmp_path: Path) -> None:
    (store / FOLDER / "__1_0.distcp").unlink()
    other = store / "step-00000001.2"
    other.mkdir()
    (other / "__1_0.distcp").write_bytes(b"other bits")
    report = run(store, tmp_path)
    assert report.other_attempts == ("step-00000001.2",)
    assert [each.rank for each in report.lost] == [1]
    check_saved(report, tmp_path)


@pytest.mark.parametrize("place", ["", "/inside"])
def test_the_checkpoints_own_folder_is_no_target(store: Path, place: str) -> None:
    with pytest.raises(ValueError, match="own folder"):
        salvage(Storage(str(store)), Storage(f"{store}{place}"), 1, lambda _: None)


def test_a_folder_with_something_in_it_is_no_target(store: Path, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/thesis.tex").touch()
    with pytest.raises(ValueError, match="is not empty: there is thesis"):
        salvage(Storage(str(store)), Storage(str(tmp_path / "saved")), 1, lambda _: None)


# The plan alone


def rectangle(name: str, rows: int, first: int, of: int) -> Rectangle:
    return Rectangle(
        name=name,
        dtype="float32",
        global_shape=(of, 3),
        offsets=(first, 0),
        shape=(rows, 3),
        nbytes=rows * 12,
    )


def cells(pieces: tuple[Piece, ...]) -> list[tuple[str, int]]:
    """Name and row of each row of some pieces."""
    return [
        (piece.tensor.name, piece.offsets[0] + row)
        for piece in pieces
        for row in range(piece.shape[0])
    ]


ranges = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 90)).map(lambda pair: (pair[0], sum(pair))),
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), cut=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_each_row_is_kept_once_or_lost_once(data: st.DataObject, cut: list[int]) -> None:
    """Parts 0 and 1 hold the same rectangles: a row is lost only where both are damaged."""
    of = sum(cut)
    held = [rectangle("a", rows, sum(cut[:index]), of) for index, rows in enumerate(cut)]
    table = lay_out(0, 2, held)
    damage = [data.draw(ranges), data.draw(ranges)]
    plan = plan_salvage([table.tensors, table.tensors], damage)
    kept = cells((*plan.whole, *plan.partial))
    lost = cells(plan.lost)
    assert sorted((*kept, *lost)) == [("a", row) for row in range(of)]
    assert plan.missing == ()
    bad = [
        {
            (tensor.name, tensor.offsets[0] + row)
            for tensor in table.tensors
            for row in range(tensor.shape[0])
            for start, end in part
            if start < tensor.byte_offset + 12 * (row + 1) and end > tensor.byte_offset + 12 * row
        }
        for part in damage
    ]
    assert set(lost) == bad[0] & bad[1]
    assert plan.is_complete == (not lost)
    assert not (plan.whole and plan.partial)
    for piece in (*plan.whole, *plan.partial):
        assert piece.end - piece.start == 4 * math.prod(piece.shape)
        assert not any(start < piece.end and end > piece.start for start, end in damage[piece.part])


def test_elements_that_no_record_places_are_counted() -> None:
    table = lay_out(0, 1, [rectangle("a", 2, 0, 5)])
    plan = plan_salvage([table.tensors], [[]])
    assert [(each.tensor, each.num_elements) for each in plan.missing] == [("a", 9)]
    assert not plan.whole
    assert cells(plan.partial) == [("a", 0), ("a", 1)]
