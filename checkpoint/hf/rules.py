"""How tensors of `transformers` become ours, and ours become theirs again.

Every rule only moves numbers: rows of several tensors are cut into pieces and put together in
another order. So the way back is exact, and the same rules hold for weights and gradients.

What does not belong here: which rules a model has (`families.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One tensor of ours and those of theirs that it is made of, in order.

    Theirs have `rows` rows each, once they are transposed where `transposed` says that they
    keep [in, out]. Together these are cut into `pieces`, some of which are `merged` end to end
    first: numbers of pieces, for each that is left. `joined` says how ours holds those:
    one after another, group by group of heads, or as planes of a new first dimension.
    With `columns` what is said of rows is meant of the columns of both.
    Ours has zeros below, up to `padded_rows`. `stacked` planes of so many experts have a
    dimension for the expert in front. Of `inner_planes` theirs has the rows one after another in
    its second dimension, in front of which ours has one for the plane.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    pieces: tuple[int, ...]
    joined: Literal["rows", "groups", "planes"] = "rows"
    groups: int = 1
    transposed: bool = False
    columns: bool = False
    padded_rows: int | None = None
    merged: tuple[tuple[int, ...], ...] | None = None
    stacked: int | None = None
    inner_planes: int | None = None

    def to_ours(self, found: Mapping[str, Tensor]) -> Tensor:
        """Our tensor, in the same memory where it is one of theirs as it is.

        Raises ValueError where a shape is not what the rule says.
        """
        parts = []
        for name, rows in zip(self.theirs, self.rows, strict=True):
            part = found[name].t() if self.transposed != self.columns else found[name]
            if part.shape[0] != rows:
                dim = "columns" if self.transposed != self.columns else "rows"
                raise ValueError(f"{name} has {part.shape[0]} {dim}; its config says {rows}")
            parts.append(part)
        # Where tensors are the pieces, as an expert's are, there is no copy in between.
        whole = self.rows == self.pieces
        pieces = tuple(parts) if whole else torch.split(_together(parts), list(self.pieces))
        if self.merged is not None:
            pieces = tuple(torch.cat([pieces[number] for number in each]) for each in self.merged)
        joined = self._join(pieces)
        if self.inner_planes is not None:
            joined = torch.unflatten(joined, 1, (self.inner_planes, -1))
        if self.padded_rows is not None:
            padding = joined.new_zeros(self.padded_rows - joined.shape[0], *joined.shape[1:])
            joined = torch.cat((joined, padding))
        return (joined.t() if self.columns else joined).contiguous()

    def to_theirs(self, ours: Tensor) -> dict[str, Tensor]:
        """Their tensors, by name."""
        whole = ours.t() if self.columns else ours
        if self.inner_planes is not None:
            whole = whole.flatten(1, 2)
        parts = self._apart(self._cut(whole))
        if self.rows != self.pieces:
            parts = list(torch.split(_together(parts), list(self.rows)))
        return {
            name: (part.t() if self.transposed != self.columns else part).contiguous()
            for name, part in zip(self.theirs, parts, strict=True)
        }

    @property
    def _sizes(self) -> list[int]:
        """Rows of the pieces that are joined."""
        if self.merged is None:
            return list(self.pieces)
        return [sum(self.pieces[number] for number in each) for each in self.merged]

    def _apart(self, joined: Sequence[Tensor]) -> list[Tensor]:
        """The pieces in their order."""
        if self.merged is None:
            return list(joined)
        pieces: dict[int, Tensor] = {}
        for whole, numbers in zip(joined, self.merged, strict=True):
            sizes = [self.pieces[number] for number in numbers]
            pieces |= dict(zip(numbers, torch.split(whole, sizes), strict=True))
        return [pieces[number] for number in range(len(self.pieces))]

    def _join(self, pieces: Sequence[Tensor]) -> Tensor:
        match self.joined:
            case "rows":
                return _together(pieces)
            case "planes":
                planes = torch.stack(list(pieces))
                return (
                    planes
                    if self.stacked is None
                    else torch.unflatten(planes, 0, (self.stacked, -1))
                )
            case "groups":
                by_group = [piece.reshape(self.groups, -1, *piece.shape[1:]) for piece in pieces]
                return torch.cat(by_group, dim=1).flatten(0, 1)

    def _cut(self, whole: Tensor) -> Sequence[Tensor]:
        match self.joined:
            case "rows":
                return torch.split(whole[: sum(self.pieces)], self._sizes)
            case "planes":
                return (whole if self.stacked is None else whole.flatten(0, 1)).unbind()
            case "groups":
                by_group = torch.unflatten(whole, 0, (self.groups, -1))
                sizes = [rows // self.groups for rows in self._sizes]
                return [piece.flatten(0, 1) for piece in torch.split(by_group, sizes, dim=1)]


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts; a single one without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def copied(ours: str, theirs: str, rows: int, *, transposed: bool = False) -> Rule:
    """A tensor that is the same in both."""
    return Rule(ours=ours, theirs=(theirs,), rows=(rows,), pieces=(rows,), transposed=transposed)
