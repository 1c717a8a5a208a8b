"""Checkpoints in two stages: device to host memory, host memory to storage.

- `stage/` copies a rank's tensors into memory-mapped slots, step after step, and has the slot
  format that worker and agent share, with its checksums;
- `upload/` moves what each rank owns of a sealed slot to storage in the background, makes it a
  checkpoint that exists and deletes what is not kept;
- `storage/` is the edge to storage, with a deadline on every call, and the kinds of store;
- `restore/` brings either back, from storage onto any layout;
- `replicas/` copies host memory to other nodes;
- `torch_format/` makes payloads files of torch's own format, and takes over what torch saved;
- `catalog.py` has what people do with checkpoints by hand, `salvage.py` and `remains.py` what is
  left to do with damaged ones;
- `core/` decides: names, manifest, who owns what, which slot to write, what to delete.

Agents upload without torch: what they use of `stage/` and `torch_format/` does not import it.
"""
