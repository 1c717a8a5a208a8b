"""The files of `torch.distributed.checkpoint`: ours as it reads them, and its own."""
