"""Hosts the store at which the ranks of a script meet, until it is killed.

Standard input is the agent's listening socket. One line on standard output says that it answers.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys

from torch._C._distributed_c10d import TCPStore

from diagnostics.children import die_with


def main(arguments: list[str] | None = None) -> int:
    """Host the store."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.worker.script_store", description=__doc__
    )
    parser.add_argument("--host", required=True, help="address of this node, as ranks know it")
    parser.add_argument("--parent", type=int, required=True, help="pid of the agent")
    given = parser.parse_args(arguments)
    die_with(given.parent)
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as listening:
        port = listening.getsockname()[1]
    # The store closes the descriptor that it listens on.
    store = TCPStore(
        given.host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(sys.stdin.fileno()),
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while store is not None:
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
