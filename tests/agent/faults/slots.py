"""A step in host memory, as training leaves it there."""

from __future__ import annotations

import time
from pathlib import Path

from checkpoint.core.names import memory_folder
from checkpoint.core.shards import ShardTable, ShardTensor
from checkpoint.core.slots import NUM_SLOTS_WITH_REPLICAS, ReplicaState, UploadState
from checkpoint.stage.allocation import prepare
from checkpoint.stage.slotfile import Seal

_PAYLOAD_BYTES = 1 << 14


def seal_slot(
    job_dir: Path,
    *,
    rank: int,
    world_size: int,
    step: int = 1,
    upload: UploadState = UploadState.NONE,
    replica: ReplicaState = ReplicaState.NONE,
) -> None:
    """Put a step into a rank's host memory, as training does."""
    tensor = ShardTensor(
        name=f"w{rank}",
        dtype="uint8",
        global_shape=(_PAYLOAD_BYTES,),
        offsets=(0,),
        shape=(_PAYLOAD_BYTES,),
        byte_offset=0,
        nbytes=_PAYLOAD_BYTES,
        frame_offset=0,
        frame_nbytes=_PAYLOAD_BYTES,
    )
    table = ShardTable(rank=rank, world_size=world_size, num_owned=1, tensors=(tensor,))
    folder = job_dir / memory_folder(rank)
    slots = prepare(folder, table, num_slots=NUM_SLOTS_WITH_REPLICAS)
    seal = Seal(
        rank=rank,
        attempt=step,
        step=step,
        table_digest=table.digest,
        sealed_at_ns=time.time_ns(),
        upload=upload,
        replica=replica,
    )
    slots[0].seal(seal, b"{}")
    for slot in slots:
        slot.close()
