"""Tensors whose rows or columns go by group, also on more tensor ranks than there are groups.

A group is a key/value head with the query heads that share it and, in the parallel block, its
share of the MLP. With as many groups as ranks, or more, a rank holds whole groups. With fewer,
the ranks of a group divide its query heads and MLP units, and each of them computes with the
group's whole key and value: it holds some of their rows, which are gathered where they are
used. So every number is held and updated once, and checkpoints are the same for any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.model.config import GptConfig
from trainer.model.parameters import ParallelModule
from trainer.parallel.tensor import group_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of every group.

    `suffix` tells them from others where they are a parameter of their own. `gathered`: each of
    the ranks that share a group computes with all of them.
    """

    suffix: str
    number: int
    gathered: bool = False


def ranks_of_group(config: GptConfig, tp_size: int) -> int:
    """Tensor ranks that share a group."""
    return max(1, tp_size // config.groups)


def attention_rows(config: GptConfig) -> tuple[Rows, Rows]:
    """Queries, then key and value."""
    return (
        Rows(suffix="", number=config.group_query_rows),
        Rows(suffix="_kv", number=2 * config.head_width, gathered=True),
    )


def mlp_rows(config: GptConfig) -> tuple[Rows, ...]:
    """A group's share of the MLP's inputs: gates come first."""
    units = config.mlp_hidden // config.groups
    suffixes = ("_mlp",) if config.gate is None else ("_gate", "_mlp")
    return tuple(Rows(suffix=suffix, number=units) for suffix in suffixes)


def output_columns(config: GptConfig) -> tuple[Rows, Rows]:
    """Outputs of query heads, then units of the MLP."""
    units = config.mlp_hidden // config.groups
    return Rows(suffix="", number=config.group_query_rows), Rows(suffix="_mlp", number=units)


class ByGroup:
    """One tensor of a layer; `width` is its other dimension, None for a vector."""

    def __init__(
        self,
        layer: ParallelModule,
        config: GptConfig,
        name: str,
        rows: Sequence[Rows],
        *,
        width: int | None,
        init: Literal["normal", "zeros"],
        std: float = 0.0,
        columns: bool = False,
    ) -> None:
        number = sum(each.number for each in rows)
        size = config.groups * number
        shape = (size,) if width is None else (width, size) if columns else (size, width)
        self._layer, self._dim = layer, int(columns)
        self._ranks = ranks_of_group(config, layer.comm.size)
        if self._ranks == 1:
            self._parts = [(name, False)]
            layer.declare(name, shape, init=init, std=std, shard_dim=self._dim)
            return
        group, place = divmod(layer.comm.index, self._ranks)
        self._parts = [(f"{name}{each.suffix}", each.gathered) for each in rows]
        start = group * number
        for each, (own_name, _) in zip(rows, self._parts, strict=True):
            held = each.number // self._ranks
            layer.declare(
                own_name,
                shape,
                init=init,
                std=std,
                shard_dim=self._dim,
                held=(start + place * held, held),
                stored=name,
            )
            start += each.number

    def tensor(self) -> Tensor:
        """What this rank computes with."""
        parameters = [
            group_rows(getattr(self._layer, name), self._layer.comm, self._ranks)
            if gathered
            else getattr(self._layer, name)
            for name, gathered in self._parts
        ]
        return parameters[0] if len(parameters) == 1 else torch.cat(parameters, dim=self._dim)
