"""The command line of a standby process."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

from outlast.startup import PACKAGES

# The entry point's own imports come on top; the last is for scripts. torch._dynamo (2.7 s) is left
# out: it comes with torch's own optimizers and compiler, and the trainer uses neither.
PRELOADED_MODULES = (
    "numpy",
    "numpy.random",
    "torch",
    "torch.distributed",
    "outlast.session.checkpoints",
)
ENTRY = "trainer.worker.process:run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the agent tells a standby process as it starts it."""

    control_fd: int
    rendezvous_fd: int
    # "" where there are scripts only.
    entry: str
    preload: tuple[str, ...]
    # Ours that are there; a script must not find them imported.
    packages: tuple[str, ...]
    # Of the job's script: modules, where they are looked for, and those not to be imported.
    extras: tuple[str, ...]
    folders: tuple[str, ...]
    left_out: dict[str, str]


def parse(arguments: list[str] | None) -> Options:
    """The options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.worker.standby", description=__doc__)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--rendezvous-fd", type=int, required=True)
    parser.add_argument("--entry", default=ENTRY)
    parser.add_argument("--preload", default=",".join(PRELOADED_MODULES))
    parser.add_argument("--packages", default=",".join(PACKAGES))
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--folder", action="append", default=[])
    parser.add_argument("--left-out", type=json.loads, default={})
    given = parser.parse_args(arguments)
    return Options(
        control_fd=given.control_fd,
        rendezvous_fd=given.rendezvous_fd,
        entry=given.entry,
        preload=_names(given.preload),
        packages=_names(given.packages),
        extras=tuple(given.extra),
        folders=tuple(given.folder),
        left_out=given.left_out,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)
