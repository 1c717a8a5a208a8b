"""Prometheus beside a controller, for `outlast up --observe`.

It is the machine's own installation, on loopback, with the scrape configuration
and rules that ship with Outlast; its configuration, data and log lie in the state
folder. It ends with `outlast up`, however that ends.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

from outlast.cli.errors import CliError
from outlast.ports import free_port

# From deploy/prometheus, which this links to.
RULES = Path(__file__).resolve().parent / "templates" / "prometheus" / "rules"
# A person looks at it as a job runs; a laptop's run is over in minutes.
SCRAPE_INTERVAL_S = 2.0
READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.1
_USUAL_PORT = 9090
_LOG_TAIL_LINES = 10
# Becomes the program given to it, which the kernel then kills when its parent ends. An
# interpreter in between, since a fork of ours would run gRPC's fork handlers.
_END_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def find_prometheus() -> str:
    """The installed program.

    Raises:
        CliError: there is none; the message says how to get it.
    """
    found = shutil.which("prometheus")
    if found is None:
        raise CliError(
            "--observe needs Prometheus and there is none on this machine; install it "
            "(Debian and Ubuntu: apt-get install --no-install-recommends prometheus), or leave "
            "--observe out and let a Prometheus of yours scrape /metrics"
        )
    return found


def configuration(
    http: str,
    *,
    interval_s: float,
    rules: Path = RULES,
    alertmanager: str = "",
    ca_file: Path | None = None,
) -> dict[str, Any]:
    """A scrape configuration for the controller at `http` and every agent that it knows.

    `ca_file`: of the authority that signed the controller's certificate, where it has one.
    """
    scheme = "http" if ca_file is None else "https"
    tls = {} if ca_file is None else {"tls_config": {"ca_file": str(ca_file)}}
    interval = f"{interval_s * 1000:.0f}ms"
    alerting = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(rules / "*.yml")],
        **({"alerting": alerting} if alertmanager else {}),
        "scrape_configs": [
            {
                "job_name": "outlast-controller",
                "scheme": scheme,
                **tls,
                "static_configs": [{"targets": [http]}],
            },
            {
                "job_name": "outlast-agents",
                "http_sd_configs": [
                    {"url": f"{scheme}://{http}/sd/agents", "refresh_interval": interval, **tls}
                ],
            },
        ],
    }


class Prometheus:
    """One Prometheus, from start to end. Start it in the main thread: it ends with that."""

    def __init__(self, program: str, folder: Path, port: int = _USUAL_PORT) -> None:
        """It listens at `port` if nobody has that, else at any free one."""
        self._program = program
        self._folder = folder
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = False
        self.address = ""

    def start(self, document: dict[str, Any]) -> None:
        """Start it with this configuration; returns at once."""
        import yaml

        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        self.address = f"127.0.0.1:{_port(self._port)}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _END_WITH_PARENT, self._program),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={self._data}",
                    f"--web.listen-address={self.address}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C is for `up`, which ends this in its turn.
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it answers.

        Raises:
            CliError: it ended or did not answer in time; the message has its last words.
        """
        process = self._process
        assert process is not None, "start comes first"
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not self._answers():
            if process.poll() is not None:
                raise CliError(f"Prometheus ended at once:\n{self._last_words()}")
            if time.monotonic() > deadline_s:
                raise CliError(
                    f"Prometheus did not answer at {self.address} within {READY_TIMEOUT_S:.0f} s:\n"
                    f"{self._last_words()}"
                )
            time.sleep(_POLL_S)

    def tell_when_ready(self) -> None:
        """Print where it is as soon as it answers, or why it does not."""
        threading.Thread(target=self._tell, name="prometheus-ready", daemon=True).start()

    def stop(self) -> None:
        """End it within seconds."""
        process = self._process
        if process is None:
            return
        self._is_stopping = True
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def _log(self) -> Path:
        return self._folder / "prometheus.log"

    def _tell(self) -> None:
        try:
            self.wait_ready()
        except CliError as error:
            if not self._is_stopping:
                print(f"outlast: {error}", flush=True)
            return
        for line in ready_lines(self.address):
            print(line, flush=True)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _answers(self) -> bool:
        """Whether it is ready, and not another one that took the port in between."""
        try:
            self._get("-/ready")
            flags = json.loads(self._get("api/v1/status/flags"))["data"]
            is_ours = bool(flags["storage.tsdb.path"] == str(self._data))
        # Whoever listens there may say anything.
        except (OSError, HTTPException, ValueError, LookupError, TypeError):
            return False
        return is_ours

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self.address}/{path}", timeout=1) as answer:
            return bytes(answer.read())

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LOG_TAIL_LINES:])


def ready_lines(address: str) -> list[str]:
    """Where a person should look."""
    return [
        f"Prometheus scrapes it: http://{address} (alerts at http://{address}/alerts).",
        "Dashboards for Grafana are in deploy/grafana/dashboards; its data source is that address.",
    ]


def _port(wanted: int) -> int:
    """This port if nobody has it, else any free one."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            pass
        else:
            return int(probe.getsockname()[1])
    try:
        return free_port()
    except OSError as error:
        raise CliError(f"no port is free for Prometheus: {error}") from error
