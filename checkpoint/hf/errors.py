"""Why a folder of `transformers` cannot be taken over."""

from __future__ import annotations

from outlast.errors import FatalError


class UnsupportedModelError(FatalError):
    """An architecture that we do not know, or one with an option that we lack."""


class DamagedFolderError(FatalError):
    """Files are missing, cut off, or do not fit together."""
