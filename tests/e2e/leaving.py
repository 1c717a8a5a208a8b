"""Runs a script with processes that left its group: `python leaving.py FOLDER SCRIPT ARGUMENTS`.

Each rank notes them in a file of the folder, having said which of those noted before are there.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path


def main() -> None:
    del sys.argv[0]
    folder = Path(sys.argv.pop(0))
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    # The other rank of this attempt may have noted its own by now.
    earlier = [path for path in folder.glob("*.pids") if not path.name.startswith(f"{attempt}-")]
    noted = [pid for path in earlier for pid in path.read_text().split()]
    print("still there:", *(pid for pid in noted if os.path.exists(f"/proc/{pid}")), flush=True)
    started = [daemon(), forked_daemon()]
    name = f"{attempt}-{os.environ['RANK']}"
    (folder / f"{name}.pids").write_text(" ".join(map(str, started)))
    runpy.run_path(sys.argv[0], run_name="__main__")


def daemon() -> int:
    """A grandchild with a session of its own, whose parent has ended."""
    shell = ["sh", "-c", "setsid sleep 1000 >/dev/null & echo $!"]
    return int(subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout)


def forked_daemon() -> int:
    """The same without a program of its own."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        if (grandchild := os.fork()) == 0:
            signal.pause()
        os.write(writing, f"{grandchild}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(reading, 20))


main()
