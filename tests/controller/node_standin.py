"""Stands in for an agent: has a child, as an agent has workers, and goes with SIGTERM."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


def main() -> None:
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    memory = Path(arguments["--memory-dir"])
    memory.mkdir(parents=True, exist_ok=True)
    (memory / "slot").touch()
    # A worker leads its own group, ignores SIGTERM, and stays in the session.
    script = "import os,signal;os.setpgid(0,0);signal.signal(15,signal.SIG_IGN);signal.pause()"
    child = subprocess.Popen([sys.executable, "-S", "-c", script])
    Path(arguments["--state-dir"], "child").write_text(str(child.pid))
    signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    main()
