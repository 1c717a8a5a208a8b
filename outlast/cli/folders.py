"""Where things are on this machine unless a command says otherwise, and where they may be."""

from __future__ import annotations

from pathlib import Path

from outlast.cli.errors import CliError

DEFAULT_STATE_DIR = Path("~/.local/state/outlast")


def check_writable(to: Path) -> None:
    """Before anything is done for a file of `--output`.

    Raises:
        CliError: it cannot be written there.
    """
    is_new = not to.exists()
    try:
        with to.open("ab"):
            pass
        if is_new:
            to.unlink()
    except OSError as error:
        raise CliError(f"--output: {to} cannot be written: {error.strerror}") from error
