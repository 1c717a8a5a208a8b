"""Stage 2: from host memory to storage, and the commit that makes it a checkpoint."""
