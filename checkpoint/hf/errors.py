"""Why a model of `transformers` is not one that we can train."""

from __future__ import annotations

from outlast.errors import FatalError


class UnsupportedModelError(FatalError):
    """An architecture that we do not know, or one with an option that we lack."""
