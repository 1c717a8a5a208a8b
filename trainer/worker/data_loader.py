"""The process that reads data for all ranks of a node, until it is killed.

Standard input is the listening socket at which ranks connect; the agent holds it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path

import torch

from diagnostics.children import die_with
from outlast.spec.parse import accepted_spec
from trainer.data.node import SplitId
from trainer.data.serving import Server
from trainer.worker.feeding import numbered, open_splits


def main(arguments: list[str] | None = None) -> int:
    """Read what ranks ask for."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.worker.data_loader", description=__doc__
    )
    parser.add_argument("--spec", type=Path, required=True, help="file with the job's spec")
    parser.add_argument("--data-dir", type=Path, required=True, help="for what is made of text")
    parser.add_argument("--parent", type=int, required=True, help="pid of the agent")
    given = parser.parse_args(arguments)
    die_with(given.parent)
    torch.set_num_threads(1)
    spec = accepted_spec(json.loads(given.spec.read_text()))
    splits = open_splits(spec, given.data_dir)
    read = numbered(splits)
    last_steps: dict[int, int] = dict.fromkeys(read, spec.eval.batches)
    last_steps[SplitId.TRAIN] = spec.steps
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as listening:
        Server(
            listening,
            read,
            steps_ahead=spec.data.steps_ahead,
            last_steps=last_steps,
        ).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
