from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.core.checked_json import RecordError, canonical, encode_checked, sha256
from checkpoint.core.manifest import (
    CHECKSUMS,
    CommitRecord,
    Manifest,
    PartRecord,
)
from checkpoint.core.shards import Rectangle, ShardTable, lay_out

# The machine may be busy: the time of one example says nothing.
few = settings(max_examples=40, deadline=None)

sizes = st.integers(0, 5)


@st.composite
def rectangles(draw: st.DrawFn) -> Rectangle:
    global_shape = tuple(draw(st.lists(sizes, max_size=3)))
    offsets = tuple(draw(st.integers(0, size)) for size in global_shape)
    shape = tuple(
        draw(st.integers(0, size - offset))
        for size, offset in zip(global_shape, offsets, strict=True)
    )
    num_items = 1
    for size in shape:
        num_items *= size
    item_bytes = draw(st.sampled_from([1, 2, 4, 8]))
    return Rectangle(
        name=draw(st.text(min_size=1, max_size=8)),
        dtype=f"int{8 * item_bytes}",
        global_shape=global_shape,
        offsets=offsets,
        shape=shape,
        nbytes=num_items * item_bytes,
        prefix_nbytes=64 * draw(st.integers(0, 2)),
        suffix_nbytes=draw(st.integers(0, 100)),
    )


@st.composite
def tables(draw: st.DrawFn) -> ShardTable:
    shards = draw(st.lists(rectangles(), max_size=6, unique_by=lambda shard: shard.name))
    num_owned = draw(st.integers(0, len(shards)))
    shards[num_owned:] = [
        replace(shard, owned=False, prefix_nbytes=0, suffix_nbytes=0)
        for shard in shards[num_owned:]
    ]
    world_size = draw(st.integers(1, 9))
    return lay_out(draw(st.integers(0, world_size - 1)), world_size, shards)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    step, attempt = draw(st.integers(0, 10**9)), draw(st.integers(1, 10**6))
    ranks = draw(st.lists(st.integers(0, 8), min_size=1, max_size=3, unique=True))
    parts = []
    for rank in sorted(ranks):
        table = replace(draw(tables()), rank=0, world_size=9)
        block_bytes = draw(st.integers(1, 64))
        num_blocks = -(-table.owned_bytes // block_bytes)
        checksums = st.integers(0, 2**64 - 1)
        parts.append(
            PartRecord(
                step=step,
                attempt=attempt,
                rank=rank,
                world_size=9,
                num_parts=len(ranks),
                file=f"__{rank}_0.distcp",
                nbytes=table.owned_bytes,
                block_bytes=block_bytes,
                checksum=draw(st.sampled_from(CHECKSUMS)),
                blocks=tuple(draw(st.lists(checksums, min_size=num_blocks, max_size=num_blocks))),
                tensors=table.owned,
                extra=draw(st.text(max_size=20)),
            )
        )
    return Manifest(
        step=step,
        attempt=attempt,
        world_size=9,
        parts=tuple(parts),
        metadata_sha256=draw(st.text(max_size=4)),
    )


@few
@given(manifests())
def test_manifest_survives_json(manifest: Manifest) -> None:
    assert Manifest.from_json(manifest.to_json()) == manifest
    part = manifest.parts[0]
    assert PartRecord.from_json(part.to_json()) == part


@few
@given(tables())
def test_table_survives_json_and_places_every_shard(table: ShardTable) -> None:
    assert ShardTable.from_json(table.to_json()) == table
    end = 0
    for number, tensor in enumerate(table.tensors):
        if number == table.num_owned:
            assert table.owned_bytes == end
        assert tensor.frame_offset >= end
        assert tensor.byte_offset >= tensor.frame_offset
        assert tensor.byte_offset % 64 == 0
        end = tensor.frame_offset + tensor.frame_nbytes
        assert tensor.byte_offset + tensor.nbytes <= end
    assert table.payload_bytes == end


def test_owned_shards_come_first() -> None:
    with pytest.raises(ValueError, match="before the others"):
        lay_out(0, 1, [replace(shard(), owned=False), shard("v")])


@few
@given(manifests(), st.data())
def test_any_changed_byte_of_a_record_is_noticed(manifest: Manifest, data: st.DataObject) -> None:
    raw = bytearray(manifest.to_json())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        Manifest.from_json(bytes(raw))


COMMIT = CommitRecord(
    step=50, attempt=2, world_size=8, size_bytes=1234, manifest_sha256=sha256(b"manifest")
)


def test_every_byte_of_a_commit_record_counts() -> None:
    raw = COMMIT.to_json()
    assert CommitRecord.from_json(raw) == COMMIT
    for at in range(len(raw)):
        for damaged in (raw[:at], raw[:at] + b" " + raw[at:], raw[:at] + raw[at + 1 :]):
            with pytest.raises(RecordError):
                CommitRecord.from_json(damaged)


def test_newer_major_format_is_refused_by_name() -> None:
    body = {"format": {"major": 2, "minor": 0}, "step": 1}
    raw = canonical({**body, "sha256": sha256(canonical(body))})
    with pytest.raises(RecordError, match="newer Outlast"):
        CommitRecord.from_json(raw)


def test_checkpoint_of_0_1_0_is_refused_by_name() -> None:
    tensor = {
        "byte_offset": 0,
        "dtype": "float32",
        "global_shape": [256, 32],
        "name": "model.embedding",
        "nbytes": 32768,
        "offsets": [0, 0],
        "shape": [256, 32],
    }
    raw = encode_checked({"num_owned": 1, "rank": 0, "tensors": [tensor], "world_size": 1})
    with pytest.raises(RecordError, match=r"saved by Outlast 0\.1\.0, whose checkpoints"):
        ShardTable.from_json(raw)


def test_unknown_field_of_a_newer_minor_is_ignored() -> None:
    fields = {
        "attempt": 2,
        "later": "news",
        "manifest_sha256": COMMIT.manifest_sha256,
        "size_bytes": 1234,
        "step": 50,
        "world_size": 8,
    }
    assert CommitRecord.from_json(encode_checked(fields)) == COMMIT


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", -1), ("step", "50"), ("step", True), ("step", 1.0), ("manifest_sha256", 5)],
)
def test_field_of_the_wrong_type_is_refused(field: str, value: object) -> None:
    fields: dict[str, object] = {
        "attempt": 2,
        "manifest_sha256": COMMIT.manifest_sha256,
        "size_bytes": 1234,
        "step": 50,
        "world_size": 8,
    }
    fields[field] = value
    with pytest.raises(RecordError, match=field):
        CommitRecord.from_json(encode_checked(fields))


def shard(name: str = "w", offset: int = 0) -> Rectangle:
    return Rectangle(
        name=name, dtype="float32", global_shape=(8,), offsets=(offset,), shape=(4,), nbytes=16
    )


def test_one_rectangle_twice_is_refused_two_rectangles_of_one_tensor_are_not() -> None:
    with pytest.raises(ValueError, match="twice"):
        lay_out(0, 1, [shard(), shard()])
    assert len(lay_out(0, 1, [shard(), shard(offset=4)]).tensors) == 2


def test_rectangle_outside_its_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="not inside"):
        lay_out(0, 1, [shard(offset=5)])


def test_digest_tells_tables_apart() -> None:
    digests = {
        lay_out(0, 2, [shard()]).digest,
        lay_out(1, 2, [shard()]).digest,
        lay_out(0, 1, [shard()]).digest,
        lay_out(0, 2, [shard(offset=4)]).digest,
        lay_out(0, 2, [shard(name="v")]).digest,
    }
    assert len(digests) == 5
    assert all(0 <= digest < 2**63 for digest in digests)


def test_manifest_with_a_part_missing_cannot_be_made() -> None:
    part = PartRecord(
        step=1,
        attempt=1,
        rank=0,
        world_size=2,
        num_parts=2,
        file="__0_0.distcp",
        nbytes=0,
        block_bytes=1,
        checksum="crc32",
        blocks=(),
        tensors=(),
        extra="{}",
    )
    with pytest.raises(ValueError, match="not all"):
        Manifest(step=1, attempt=1, world_size=2, parts=(part,))
