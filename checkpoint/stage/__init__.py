"""Stage 1: a rank's state in host memory, its slots and their checksums."""
