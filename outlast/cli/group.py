"""A command group whose plain name lists: `outlast nodes` is `outlast nodes list`."""

from __future__ import annotations

import typer
from typer.core import TyperGroup


class ListingGroup(TyperGroup):
    """Runs `list` unless the first word is another of its commands."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's vendored base type is private
        wants_help = bool(args) and args[0] in ("--help", "-h")
        if not wants_help and (not args or args[0] not in self.commands):
            args = ["list", *args]
        return super().parse_args(ctx, args)
