"""A real Prometheus and a real Alertmanager on free ports of loopback, and who they tell."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from outlast.cli.observe import Prometheus, configuration, find_prometheus
from outlast.ports import free_port
from tests.e2e.cluster import DEADLINE_S, wait_for

# Rules wait for minutes and look back for hours; a run of a test lasts two minutes.
TIMES_FASTER = 20
_DURATION = re.compile(r"(?<![\w.])(\d+)([mhd])\b")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}


def hasten(source: Path, target: Path) -> None:
    """Copy rule files with every duration in them divided."""
    target.mkdir()

    def divided(text: str) -> str:
        return _DURATION.sub(
            lambda found: f"{int(found[1]) * _SECONDS[found[2]] * 1000 // TIMES_FASTER}ms", text
        )

    for path in source.glob("*.yml"):
        document = yaml.safe_load(path.read_text())
        for group in document["groups"]:
            for rule in group["rules"]:
                rule["expr"] = divided(rule["expr"])
                if "for" in rule:
                    rule["for"] = divided(rule["for"])
        (target / path.name).write_text(yaml.safe_dump(document))


class Hook:
    """The end of a webhook: keeps every alert that it is told of."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        alerts = self.alerts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                alerts.extend(json.loads(body)["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(self, name: str, status: str, within_s: float = DEADLINE_S) -> dict[str, Any]:
        """The first alert of this name that came with this status."""

        def told() -> dict[str, Any] | None:
            for alert in list(self.alerts):
                if (alert["labels"]["alertname"], alert["status"]) == (name, status):
                    return alert
            return None

        return wait_for(told, f"{name} to be {status}", within_s)


class Api:
    """Asks a Prometheus."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        url = f"http://{self.address}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def now(self, expr: str) -> list[Any]:
        """Series of an instant query."""
        return self.at(time.time(), expr)

    def at(self, at_s: float, expr: str) -> list[Any]:
        """Series of an instant query of that moment."""
        found: list[Any] = self.get("query", query=expr, time=str(at_s))["result"]
        return found

    def since(self, start_s: float, expr: str) -> list[Any]:
        """Series of a range query from then until now."""
        answer = self.get(
            "query_range", query=expr, start=str(start_s), end=str(time.time()), step="1"
        )
        found: list[Any] = answer["result"]
        return found


@contextmanager
def alertmanager(folder: Path, hook: str) -> Iterator[str]:
    """The address of an Alertmanager that tells `hook` at once."""
    folder.mkdir()
    config = folder / "alertmanager.yml"
    receiver = {"name": "hook", "webhook_configs": [{"url": hook, "send_resolved": True}]}
    route = {
        "receiver": "hook",
        "group_by": ["..."],
        "group_wait": "100ms",
        "group_interval": "1s",
    }
    config.write_text(yaml.safe_dump({"route": route, "receivers": [receiver]}))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus-alertmanager",
        f"--config.file={config}",
        f"--storage.path={folder / 'data'}",
        f"--web.listen-address={address}",
        # No cluster: it would listen on every interface.
        "--cluster.listen-address=",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


@contextmanager
def prometheus(folder: Path, http: str, rules: Path, alerts_to: str = "") -> Iterator[Api]:
    """A Prometheus that looks at a controller once a second."""
    hastened = folder / "rules"
    folder.mkdir()
    hasten(rules, hastened)
    # Not the usual port, for which `outlast up --observe` of another test may look.
    it = Prometheus(find_prometheus(), folder, port=0)
    it.start(configuration(http, interval_s=1.0, rules=hastened, alertmanager=alerts_to))
    try:
        it.wait_ready()
        yield Api(it.address)
    finally:
        it.stop()
