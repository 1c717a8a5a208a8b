"""How many tokens' logits exist at a time while the loss is computed.

`trainer.parallel.vocab` cuts by this, and `trainer.core.activations` counts it.
"""

from __future__ import annotations

# 4 Mi logits are 16 MiB in fp32: small beside a layer's activations, and still
# matrix products of hundreds of rows at a vocabulary of 8k.
_MOST_LOGITS_ON_CPU = 2**22
# A GPU wants matrix products of thousands of rows: at a vocabulary of 128k the CPU's
# bound leaves 32. 64 Mi logits are 256 MiB in fp32.
_MOST_LOGITS_ON_GPU = 2**26
# Fewer rows do not fill the tiles of all multiprocessors, however large the vocabulary.
_LEAST_TOKENS_ON_GPU = 1024


def loss_chunk_tokens(vocab_rows: int, *, on_gpu: bool) -> int:
    """Tokens of one chunk of the loss, where a rank holds so many rows of the vocabulary."""
    if on_gpu:
        return max(_LEAST_TOKENS_ON_GPU, _MOST_LOGITS_ON_GPU // vocab_rows)
    return max(1, _MOST_LOGITS_ON_CPU // vocab_rows)
