"""Which tokens of a sequence a rank has where ranks divide it.

For attention by heads, tokens next to each other. In a ring two pieces, one from the front and one
as far from the end: a token sees all before it, so that ranks with such pieces see as many keys.

Source: the order of Megatron-LM's context parallelism; Striped Attention (arXiv 2311.09431) has
another one to the same end.
"""

from __future__ import annotations

Range = tuple[int, int]


def own_pieces(seq_len: int, part: int, num_parts: int, *, in_ring: bool) -> tuple[Range, ...]:
    """Where the pieces of a part begin and end, first ones first; all are of one length."""
    if not in_ring or num_parts == 1:
        length = seq_len // num_parts
        return ((part * length, (part + 1) * length),)
    length = seq_len // (2 * num_parts)
    return tuple(
        (piece * length, (piece + 1) * length) for piece in (part, 2 * num_parts - 1 - part)
    )


def own_places(seq_len: int, part: int, num_parts: int, *, in_ring: bool) -> list[int]:
    """The places of a part's tokens in the sequence, in their order on the rank."""
    pieces = own_pieces(seq_len, part, num_parts, in_ring=in_ring)
    return [place for piece in pieces for place in range(*piece)]
