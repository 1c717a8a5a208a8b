"""SeaweedFS as a process: a real S3 server, with all its files below one folder."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from pathlib import Path

from outlast.ports import free_ports

ACCESS_KEY, SECRET_KEY = "tester", "s" * 16
BUCKET = "checkpoints"
# It took 1.5 s on two idle cores; other work may be slower by far.
_READY_TIMEOUT_S = 60.0
_POLL_S = 0.1
_OTHER_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port.grpc", "admin.port", "admin.port.grpc"),
)


class Seaweed:
    """A server on a free port; a context manager."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        # Everything that it would open at a port of its own otherwise.
        self.port, *self._other_ports = free_ports(1 + len(_OTHER_PORTS))

    def __enter__(self) -> Seaweed:
        identity = {
            "name": "tester",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self._folder / "data").mkdir(parents=True)
        (self._folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        """Start it; returns when it listens. Its first write may still have to wait."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(str(self._binary), "mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                    *(f"-dir={self._folder / 'data'}", f"-s3.port={self.port}"),
                    *(f"-s3.config={self._folder / 's3.json'}", "-master.telemetry=false"),
                    *("-webdav=false", "-admin.ui=false", f"-bucket={BUCKET}"),
                    *("-s3.port.iceberg=0", "-s3.port.lance=0"),
                    *(
                        f"-{name}={port}"
                        for name, port in zip(_OTHER_PORTS, self._other_ports, strict=True)
                    ),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while not listens(self.port):
            assert self._process.poll() is None, self._last_words()
            assert time.monotonic() < deadline_s, self._last_words()
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _last_words(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-3000:]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
