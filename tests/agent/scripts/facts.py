"""Prints what a process finds when it starts, as JSON, and ends with the code that it is given."""

from __future__ import annotations

import json
import logging
import multiprocessing.process
import os
import random
import signal
import sys
import threading
import warnings


def _descriptors() -> list[str]:
    """Open ones; of the listing's own, which is closed by now, there is no target."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        found.append(name)
    return found


def facts() -> dict[str, object]:
    main = sys.modules["__main__"]
    # One that still ran would leave its pipe, and a warning among the names.
    with os.popen("printenv OUTLAST_TEST") as printed:
        getenv = printed.read()
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "getenv": getenv,
        "executable": sys.executable,
        "path": sys.path,
        "name": __name__,
        "main is this": main.__dict__ is globals(),
        "main names": sorted(set(main.__dict__)),
        "file": __file__,
        "spec": None if __spec__ is None else __spec__.name,
        "package": __package__,
        "stdin": sys.stdin.read(),
        "unbuffered": sys.stdout.write_through,
        "signals": {
            name: str(signal.getsignal(getattr(signal, name)))
            for name in ("SIGINT", "SIGTERM", "SIGPIPE", "SIGXFSZ", "SIGHUP", "SIGUSR1", "SIGCHLD")
        },
        "flags": str(sys.flags),
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "leads a group": os.getpgrp() == os.getpid(),
        "descriptors": sorted(_descriptors()),
        "threads": threading.active_count(),
        "root handlers": len(logging.root.handlers),
        "root level": logging.root.level,
        "warnings": [str(each[:3]) for each in warnings.filters],
        "original folder": multiprocessing.process.ORIGINAL_DIR,
        "parent": multiprocessing.process.parent_process() is None,
        "ours": sorted(
            name
            for name in sys.modules
            if name.partition(".")[0] in ("trainer", "controller", "checkpoint", "diagnostics")
        ),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "recursion": sys.getrecursionlimit(),
        "torch threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 0,
    }


if __name__ == "__main__":
    print("facts:" + json.dumps({**facts(), "random": random.random()}))
    if len(sys.argv) > 1:
        sys.exit(int(sys.argv[1]))
