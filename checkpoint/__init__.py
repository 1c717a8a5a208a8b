"""Checkpoints in two stages: device to host memory, host memory to storage.

- `stage.py` copies a rank's tensors into memory-mapped slots, step after step;
- `upload.py` moves sealed slots to storage in the background, `commit.py` makes
  them a checkpoint that exists;
- `restore.py` brings either back, from storage onto any layout: `readahead.py` reads
  and verifies, `passing.py` passes on, `peers.py` says what that takes of other ranks;
- `slotfile.py` is the slot format that worker and uploader share, `storage.py`
  the edge to fsspec;
- `core/` decides: names, manifest, which slot to write, what to delete.

Only `stage.py`, `restore.py` and what that uses import torch: agents upload without it.

What comes later has its place: replicas on a peer node beside `upload.py`, with
their placement in `core/`; torch's own directory format beside `commit.py`.
"""
