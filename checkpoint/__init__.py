"""Checkpoints in two stages: device to host memory, host memory to storage.

- `stage.py` copies a rank's tensors into memory-mapped slots, step after step, inside
  the `frames.py` that make them files of torch's format;
- `upload.py` moves what each rank owns of a sealed slot to storage in the background,
  `commit.py` makes it a checkpoint that exists, `describe.py` and `dcp.py` describe it for
  torch's own tools;
- `transfer.py` sends one file, `cleaning.py` deletes what is not kept, `keeping.py`
  has pins and leases, `catalog.py` what people do with checkpoints by hand;
- `restore.py` brings either back, from storage onto any layout: `readahead.py` reads
  and verifies, `passing.py` passes on, `peers.py` says what that takes of other ranks,
  `sharing.py` has the memory that ranks of one node pass it on in;
- `slotfile.py` is the slot format that worker and agent share; `guarding.py` gives sealed slots
  their checksums (`slot_sums.py`), woken by `bell.py`, and `damage.py` refuses what does not fit;
- `storage.py` is the edge to storage, with a deadline on every call; `stores.py`
  (fsspec), `local.py` and `hdfs.py` are the kinds of store behind it;
- `convert.py` takes over what plain torch has saved, which `foreign.py` parses;
- `core/` decides: names, manifest, who owns what, which slot to write, what to delete.

Agents upload without torch: only `stage.py`, `frames.py`, `restore.py` and what it uses,
`dcp.py` and `convert.py` import it.

What comes later has its place: replicas on a peer node beside `upload.py`, with
their placement in `core/`.
"""
