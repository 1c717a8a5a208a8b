"""A script that writes down what it finds, and ends as it is told, under whichever launcher.

`probe.py FOLDER [--meet] [RANK:ATTEMPT=HOW ...]`: a rank of an attempt that is named ends by
`HOW`, any other one returns. What it finds goes to `FOLDER/ATTEMPT-RANK.json`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

_RANK = int(os.environ["RANK"])
_ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
_TIMEOUT = timedelta(seconds=60)
_LIMIT_S = 120


def facts() -> dict[str, Any]:
    """What the operating system and the interpreter say of this process."""
    main = sys.modules["__main__"]
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines()
    )
    umask = os.umask(0)
    os.umask(umask)
    return {
        "argv": sys.argv[1:],
        "argv[0]": sys.argv[0],
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "executable": sys.executable,
        "flags": repr(sys.flags),
        "warnoptions": sys.warnoptions,
        "__name__": __name__,
        "__file__": __file__,
        "__package__": __package__,
        "__spec__": None if __spec__ is None else __spec__.name,
        "main names": sorted(main.__dict__),
        "cwd": os.getcwd(),
        "umask": umask,
        "leads a group": os.getpgrp() == os.getpid(),
        "leads a session": os.getsid(0) == os.getpid(),
        "stdin": os.read(0, 100).decode(),
        "stdout and stderr": os.fstat(1).st_ino == os.fstat(2).st_ino,
        "unbuffered": [sys.stdout.write_through, sys.stderr.write_through],
        "encodings": [sys.stdout.encoding, sys.getfilesystemencoding()],
        "handlers": {
            each.name: str(signal.getsignal(each))
            for each in signal.Signals
            if signal.getsignal(each) is not signal.SIG_DFL
        },
        "ignored": status["SigIgn"],
        # Without the two that the C library catches for its own threads.
        "caught": hex(int(status["SigCgt"], 16) & ~(3 << 31)),
        "blocked": status["SigBlk"],
        "descriptors": sorted(each.name for each in Path("/proc/self/fd").iterdir())[:-1],
        "threads": threading.active_count(),
        "nice": os.nice(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "oom score": Path("/proc/self/oom_score_adj").read_text(),
        "limits": {
            name: resource.getrlimit(getattr(resource, name))
            for name in ("RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_STACK")
        },
        "dumpable": os.access("/proc/self/environ", os.R_OK),
        "no new privileges": status["NoNewPrivs"],
    }


def store_of_earlier() -> dict[str, Any]:
    """Whether the store has what an earlier attempt has left there; leaves something itself."""
    from torch.distributed import TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
    seen = store.check(["left behind"])
    # Every rank has looked before any leaves something.
    store.add(f"looked in {_ATTEMPT}", 1)
    while store.add(f"looked in {_ATTEMPT}", 0) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    store.set("left behind", "")
    return {"keys of an earlier attempt": seen}


def met() -> dict[str, Any]:
    """What ranks that form a process group know of each other."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=_TIMEOUT)
    total = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    total[dist.get_rank()] = dist.get_rank() + 1
    dist.all_reduce(total)
    found = {
        "store": type(dist.distributed_c10d._get_default_store()).__name__,
        "rank": dist.get_rank(),
        "world size": dist.get_world_size(),
        "node-local rank": dist.get_node_local_rank(),
        "sum": total.tolist(),
        "launched by elastic": dist.is_torchelastic_launched(),
        "debug level": str(dist.get_debug_level()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "grad": torch.is_grad_enabled(),
        "dtype": str(torch.get_default_dtype()),
    }
    dist.barrier()
    dist.destroy_process_group()
    return found


def end(how: str) -> None:
    """End, unless `how` is to return."""
    match how.split("-"):
        case ["return"]:
            pass
        case ["exit", code]:
            sys.exit(int(code))
        case ["raise"]:
            raise ValueError("loss is not finite")
        case ["record"]:
            from torch.distributed.elastic.multiprocessing.errors import record

            record(end)("raise")
        case ["signal", name]:
            os.kill(os.getpid(), signal.Signals[name])
        case ["stop"]:
            name = signal.Signals(signal.sigwait([signal.SIGTERM, signal.SIGINT])).name
            # In one write: torchrun runs Python unbuffered, and print writes the line's end apart.
            sys.stdout.write(f"rank {_RANK} is asked to stop by {name}\n")
            sys.stdout.flush()


def main() -> None:
    """Look, write it down, and end."""
    folder, *words = sys.argv[1:]
    ends = dict(each.split("=") for each in words if "=" in each)
    how = ends.get(f"{_RANK}:{_ATTEMPT}", "return")
    found = {"environment": dict(os.environ), "process": facts(), "group": {}}
    # Nothing is left of a launcher that is killed.
    signal.alarm(_LIMIT_S)
    if "--meet" in words:
        found["group"] = store_of_earlier()
        # torchrun's ranks find the addresses of dead ones in the second attempt.
        found["group"] |= met() if _ATTEMPT == 0 else {}
    if how == "stop":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    place = Path(folder) / f"{_ATTEMPT}-{_RANK}.json"
    place.with_suffix(".part").write_text(json.dumps(found))
    place.with_suffix(".part").rename(place)
    # Nobody ends before all have written.
    while len(list(Path(folder).glob(f"{_ATTEMPT}-*.json"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    end(how)


if __name__ == "__main__":
    main()
