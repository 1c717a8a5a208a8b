"""Model FLOPs of a token: what `outlast plan` foretells and the controller measures by."""

from __future__ import annotations


def flops_per_token(
    *, layers: int, hidden: int, mlp_hidden: int, vocab_size: int, seq_len: int
) -> int:
    """FLOPs of forward and backward for one token, causal attention counted as half.

    Six per weight that a token is multiplied with (two forward, four backward),
    plus the two attention products over half of the sequence on average.
    """
    weights = layers * (4 * hidden**2 + 2 * hidden * mlp_hidden) + vocab_size * hidden
    attention = layers * 2 * hidden * seq_len // 2
    return 6 * (weights + attention)
