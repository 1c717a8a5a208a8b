"""Libraries that need not be installed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def library(module: str, extra: str, path: Path) -> Any:
    """A module of an extra of ours, which `path` needs.

    Raises:
        ValueError: it is not installed.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package {package}; pip install 'outlast[{extra}]'"
        ) from error
