"""Context parallelism in a ring: queries stay where they are, keys and values go round.

A rank attends with its own tokens to the keys and values of one rank after another, which its
neighbour hands on, and merges what it finds by the logarithms of its sums of exponentials. While
it computes with one block, the next one is on its way. Backwards the blocks go round once more,
and each block's gradients with them, one neighbour behind, until they are home.

Each rank has two pieces of a causal sequence, one from the front and the one as far from the end,
so that all ranks see as many keys (`trainer.core.context`). Pairs of pieces that see nothing of
each other are left out; only those that see some of each other have a mask.

A pair without a mask, or of a piece with itself, goes through torch's kernel
(`trainer.parallel.flash`); others, and all where there is none, through products of their own. Of
these no scores but those of some queries of one pair exist at a time. The backward pass makes them
again, so a rank keeps what it has put in and got out, and one number for each query and head.

Source: Ring Attention (Liu et al., arXiv 2310.01889); the order of pieces as in Striped Attention
(2311.09431) and Megatron-LM, the backward pass as in FlashAttention (2205.14135).
"""

# B micro-batch, H query heads, G key/value heads, L own part of the sequence, Q queries and K keys
# of two pieces, C head width.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from outlast.blackbox import Op
from trainer.core.context import Range
from trainer.parallel import flash
from trainer.parallel.comm import Comm, Exchange

# Scores that exist at a time: 16 MiB of fp32, a few of which are needed beside each other.
_MOST_SCORES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A piece of a rank's queries and one of another one's keys, as slices of the ranks' parts.

    `mask` [.., Q, K] is None where all keys are seen, or where `is_causal`: both are one piece,
    and each query sees all keys up to its own.
    """

    queries: slice
    keys: slice
    is_causal: bool
    mask: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Which keys a query sees.

    `pieces` has, by rank, where the pieces of its part of the sequence begin and end. `starts_BS`
    has for each token where its document begins; None: nothing is apart.
    """

    pieces: tuple[tuple[Range, ...], ...]
    bidirectional: bool = False
    window: int | None = None
    starts_BS: Tensor | None = None

    def pairs(
        self, rank: int, other: int, *, has_kernel: bool, device: torch.device
    ) -> Iterator[Pair]:
        """Pieces of a rank's queries and of another one's keys, where some of these are seen.

        The first pair of a piece with `other` = `rank` is that with itself. A causal pair has a
        mask, too, unless there is a kernel for such ones.
        """
        for queries, in_part in _placed(self.pieces[rank]):
            # Its own piece first: there each query sees a key at least.
            others = sorted(_placed(self.pieces[other]), key=lambda each: each[0] != queries)
            for keys, in_other in others:
                if self._sees_some(queries, keys):
                    is_causal = has_kernel and self._is_causal(queries, keys)
                    mask = None if is_causal else self._mask(queries, keys, device)
                    yield Pair(queries=in_part, keys=in_other, is_causal=is_causal, mask=mask)

    def _is_causal(self, queries: Range, keys: Range) -> bool:
        if queries != keys or self.bidirectional or self.starts_BS is not None:
            return False
        return self.window is None or self.window >= queries[1] - queries[0]

    def _sees_some(self, queries: Range, keys: Range) -> bool:
        if self.bidirectional:
            return True
        reach = queries[1] if self.window is None else self.window
        return keys[0] < queries[1] and keys[1] - 1 > queries[0] - reach

    def _sees_all(self, queries: Range, keys: Range) -> bool:
        if self.starts_BS is not None:
            return False
        if self.bidirectional:
            return True
        reach = queries[1] if self.window is None else self.window
        return keys[1] - 1 <= queries[0] and keys[0] > queries[1] - 1 - reach

    def _mask(self, queries: Range, keys: Range, device: torch.device) -> Tensor | None:
        if self._sees_all(queries, keys):
            return None
        query, key = (torch.arange(*each, device=device) for each in (queries, keys))
        starts_BS = self.starts_BS
        if self.bidirectional:
            assert starts_BS is not None
            same = starts_BS[:, query, None] == starts_BS[:, None, key]
            return same[:, None, None]
        ahead = query[:, None] - key
        allowed = ahead >= 0
        if self.window is not None:
            allowed = allowed & (ahead < self.window)
        if starts_BS is None:
            return allowed
        return (allowed & (key >= starts_BS[:, query, None]))[:, None, None]


def _placed(pieces: Sequence[Range]) -> Iterator[tuple[Range, slice]]:
    """Pieces, with their places in their rank's part."""
    begin = 0
    for piece in pieces:
        length = piece[1] - piece[0]
        yield piece, slice(begin, begin + length)
        begin += length


def ring_attention(
    q_BHLC: Tensor, k_BGLC: Tensor, v_BGLC: Tensor, comm: Comm, seen: Seen, scale: float | None
) -> Tensor:
    """Each own query's mixture of the values of all ranks."""
    scale = q_BHLC.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _Ring.apply(q_BHLC, k_BGLC, v_BGLC, comm, seen, scale)  # type: ignore[no-untyped-call]
    return out


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Comm, seen: Seen, scale: float
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        totals = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        has_kernel = flash.is_usable(q)
        for owner, block in _blocks(torch.stack((k, v)), comm):
            for pair in seen.pairs(comm.index, owner, has_kernel=has_kernel, device=q.device):
                part = _Part(pair, q, block, scale)
                if has_kernel and pair.mask is None:
                    part.by_kernel(out, totals)
                else:
                    part.by_products(out, totals)
        found = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, found, totals)
        ctx.comm, ctx.seen, ctx.scale, ctx.has_kernel = comm, seen, scale, has_kernel
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, totals = ctx.saved_tensors
        comm, seen, wide = ctx.comm, ctx.seen, totals.dtype
        # The kernel wants it as the output lies.
        grad = grad.contiguous()
        deltas = (grad.to(wide) * out.to(wide)).sum(dim=-1)
        grad_q = torch.zeros(q.shape, dtype=wide, device=q.device)
        home = _Home(comm)
        for owner, block in _blocks(torch.stack((k, v)), comm):
            grads = torch.zeros_like(block, dtype=wide)
            for pair in seen.pairs(comm.index, owner, has_kernel=ctx.has_kernel, device=q.device):
                part = _Part(pair, q, block, ctx.scale)
                if ctx.has_kernel and pair.mask is None:
                    part.back_by_kernel(grad, out, totals, grad_q, grads)
                else:
                    part.back_by_products(grad, deltas, totals, grad_q, grads)
            home.send(grads)
        grad_k, grad_v = home.own()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


class _Part:
    """Attention of some own queries to some keys of a block, which is [2, B, G, L, C].

    Outputs and their gradients are [B, H, L, C], sums and what goes with them [B, H, L], of all
    queries; gradients of a block are like the block.
    """

    def __init__(self, pair: Pair, q: Tensor, block: Tensor, scale: float) -> None:
        self._pair, self._scale = pair, scale
        self._query = q[:, :, pair.queries]
        self._key, self._value = block[:, :, :, pair.keys]
        # Query heads by the head of keys that they share.
        self._groups = (block.shape[2], -1)

    def by_kernel(self, out: Tensor, totals: Tensor) -> None:
        """Merge what these keys give into outputs and sums, in place."""
        rows = self._pair.queries
        found, sums = flash.attend(
            self._query,
            self._key,
            self._value,
            is_causal=self._pair.is_causal,
            scale=self._scale,
        )
        own_out, own_totals = out[:, :, rows], totals[:, :, rows]
        both = torch.logaddexp(own_totals, sums)
        own_out.mul_((own_totals - both).exp_().unsqueeze(-1))
        own_out += found * (sums - both).exp_().unsqueeze(-1)
        own_totals.copy_(both)

    def back_by_kernel(
        self, grad: Tensor, out: Tensor, totals: Tensor, grad_q: Tensor, grads: Tensor
    ) -> None:
        """Add this part's to the gradients of queries and of the block."""
        rows, keys = self._pair.queries, self._pair.keys
        of_query, of_key, of_value = flash.attend_backward(
            grad[:, :, rows],
            self._query,
            self._key,
            self._value,
            out[:, :, rows],
            totals[:, :, rows],
            is_causal=self._pair.is_causal,
            scale=self._scale,
        )
        grad_q[:, :, rows] += of_query
        grads[0, :, :, keys] += of_key
        grads[1, :, :, keys] += of_value

    def by_products(self, out: Tensor, totals: Tensor) -> None:
        """As `by_kernel`."""
        own_out, own_totals = self._own(out), self._own(totals)
        query = torch.unflatten(self._query, 1, self._groups)
        for rows, allowed in self._chunks():
            scores = _scores(query[..., rows, :], self._key, allowed, self._scale)
            _merge(own_out[..., rows, :], own_totals[..., rows], scores, self._value)

    def back_by_products(
        self, grad: Tensor, deltas: Tensor, totals: Tensor, grad_q: Tensor, grads: Tensor
    ) -> None:
        """As `back_by_kernel`; `deltas` are the sums of outputs times their gradients."""
        wide = totals.dtype
        key, value = self._key.to(wide).unsqueeze(2), self._value.to(wide).unsqueeze(2)
        all_queries = torch.unflatten(self._query, 1, self._groups)
        own = [self._own(each) for each in (grad, deltas, totals, grad_q)]
        of_key, of_value = grads[:, :, :, self._pair.keys]
        for rows, allowed in self._chunks():
            query, own_grad = all_queries[..., rows, :].to(wide), own[0][..., rows, :].to(wide)
            scores = _scores(query, self._key, allowed, self._scale)
            weights = scores.sub_(own[2][..., rows, None]).exp_()
            of_value += (weights.transpose(-1, -2) @ own_grad).sum(dim=2)
            of_weights = own_grad @ value.transpose(-1, -2)
            of_scores = weights * (of_weights - own[1][..., rows, None]) * self._scale
            own[3][..., rows, :] += of_scores @ key
            of_key += (of_scores.transpose(-1, -2) @ query).sum(dim=2)

    def _own(self, of_all: Tensor) -> Tensor:
        """A view of what belongs to these queries, by the head of keys."""
        return torch.unflatten(of_all[:, :, self._pair.queries], 1, self._groups)

    def _chunks(self) -> Iterator[tuple[slice, Tensor | None]]:
        """Some queries at a time, each with its rows of the mask."""
        mask, length = self._pair.mask, self._query.shape[2]
        beside = self._query[:, :, 0, 0].numel() * self._key.shape[2]
        most = max(1, _MOST_SCORES // beside)
        for start in range(0, length, most):
            rows = slice(start, min(start + most, length))
            yield rows, None if mask is None else mask[..., rows, :]


def _scores(query: Tensor, key: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """[B, G, H / G, Q, K] in fp32 at least, -inf where a query may not look."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).unsqueeze(2).transpose(-1, -2)
    scores = scores.mul_(scale)
    return scores if allowed is None else scores.masked_fill_(~allowed, -torch.inf)


def _merge(out: Tensor, totals: Tensor, scores: Tensor, value: Tensor) -> None:
    """Add what some more keys give to some queries' mixtures, in place.

    The first keys of a query are those of its own piece, of which it sees one at least.
    """
    found = torch.logsumexp(scores, dim=-1)
    both = torch.logaddexp(totals, found)
    weights = scores.sub_(both.unsqueeze(-1)).exp_()
    out.mul_((totals - both).exp_().unsqueeze(-1))
    out += weights @ value.to(out.dtype).unsqueeze(2)
    totals.copy_(both)


def _blocks(own: Tensor, comm: Comm) -> Iterator[tuple[int, Tensor]]:
    """Every rank's block, this one's first, with whose it is; the next is on its way meanwhile."""
    block = own
    for step in range(comm.size):
        coming = torch.empty_like(own)
        moving = None if step == comm.size - 1 else _hand_on(block, coming, comm)
        yield (comm.index - step) % comm.size, block
        if moving is not None:
            moving.wait()
            block = coming


def _hand_on(block: Tensor, coming: Tensor, comm: Comm) -> Exchange:
    """Start to send a block to the next rank, and to receive another one from that before."""
    nothing = block.new_empty(0)
    incoming, outgoing = [nothing] * comm.size, [nothing] * comm.size
    incoming[(comm.index - 1) % comm.size] = coming
    outgoing[(comm.index + 1) % comm.size] = block
    exchange = comm.start_exchange(incoming, Op.ALL_TO_ALL)
    exchange.send(outgoing)
    return exchange


class _Home:
    """Gradients of blocks on their way to the ranks that the blocks are of.

    Each rank adds its own part to those of a block, and hands them on right behind the block.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._moving: Exchange | None = None
        self._own: Tensor | None = None
        self._coming = torch.empty(0)

    def send(self, grads: Tensor) -> None:
        """This rank's part of the gradients of the block that has come; the own one comes first."""
        if self._own is None:
            self._own = grads
            return
        if self._moving is not None:
            self._moving.wait()
            grads += self._coming
        self._coming = torch.empty_like(grads)
        self._moving = _hand_on(grads, self._coming, self._comm)

    def own(self) -> Tensor:
        """All ranks' parts of the gradients of the own block."""
        assert self._own is not None
        if self._moving is not None:
            self._moving.wait()
            self._own += self._coming
        return self._own
