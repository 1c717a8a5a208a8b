"""Checkpoints in two stages: device to host memory, host memory to storage.

- `stage.py` copies a rank's tensors into memory-mapped slots, step after step;
- `upload.py` moves sealed slots to storage in the background, `commit.py` makes
  them a checkpoint that exists;
- `transfer.py` sends one file, `cleaning.py` deletes what is not kept, `keeping.py`
  has pins and leases, `catalog.py` what people do with checkpoints by hand;
- `restore.py` brings either back;
- `slotfile.py` is the slot format that worker and uploader share;
- `storage.py` is the edge to storage, with a deadline on every call; `stores.py`
  (fsspec), `local.py` and `hdfs.py` are the kinds of store behind it;
- `core/` decides: names, manifest, which slot to write, what to delete.

Only `stage.py` and `restore.py` import torch: agents upload without it.

What comes later has its place: replicas on a peer node beside `upload.py`, with
their placement in `core/`; the plan for loading another layout in `core/`, read
by `restore.py`; torch's own directory format beside `commit.py`.
"""
