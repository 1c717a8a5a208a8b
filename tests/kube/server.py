"""etcd and kube-apiserver as processes: the real thing, once per test session.

No controller-manager and no scheduler: tests play what those do. Rights are enforced (RBAC), and
the server's own audit log says who asked for what.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from pathlib import Path

from outlast.ports import free_ports
from tests.kube.request import Request

ADMIN_TOKEN = "admin-token"
# Both were up within 7 s on two cores; other work may be slower by far.
READY_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 10.0
_POLL_PERIOD_S = 0.05
_AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    users: ["system:apiserver"]
    omitStages: [RequestReceived, ResponseStarted, ResponseComplete, Panic]
  - level: Metadata
"""


class RealKube:
    """The two servers on free ports, with all their files below one folder; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd_port, self._etcd_peer_port, self._port = free_ports(3)
        self.admin_token = ADMIN_TOKEN

    @property
    def url(self) -> str:
        """Where kube-apiserver listens, on loopback."""
        return f"https://127.0.0.1:{self._port}"

    @property
    def ca(self) -> Path:
        """The certificate that it signed for itself."""
        return self._folder / "certificates" / "apiserver.crt"

    def __enter__(self) -> RealKube:
        found = binaries()
        self._write_files()
        try:
            self._start_etcd(found / "etcd")
            self._start_apiserver(found / "kube-apiserver")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End both and remove their files."""
        for name in ("kube-apiserver", "etcd"):
            process = self._processes.pop(name, None)
            if process is None:
                continue
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def freeze(self) -> None:
        """Accept requests and answer none, watches included, until `thaw`."""
        process = self._processes["kube-apiserver"]
        process.send_signal(signal.SIGSTOP)
        # A thread that runs on another core may answer once more until all have stopped.
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Answer again."""
        self._processes["kube-apiserver"].send_signal(signal.SIGCONT)

    def drop_connections(self) -> None:
        """Kill kube-apiserver and start it again: every connection breaks, all objects stay."""
        process = self._processes["kube-apiserver"]
        process.kill()
        process.wait()
        self._start_apiserver(binaries() / "kube-apiserver")

    def forget_changes(self) -> None:
        """Watches of the past get 410: a server that has just started remembers no changes."""
        self.drop_connections()

    def requests(self) -> list[Request]:
        """Everything that was asked for so far, oldest first."""
        found = []
        for line in (self._folder / "audit.log").read_text().splitlines():
            event = json.loads(line)
            about = event.get("objectRef") or {}
            # A caller whom nobody knows gets no decision.
            decisions = event.get("annotations") or {}
            is_allowed = decisions.get("authorization.k8s.io/decision") == "allow"
            group = about.get("apiGroup", "")
            resource = about.get("resource", "") + (f".{group}" if group else "")
            if subresource := about.get("subresource"):
                resource += f"/{subresource}"
            user = (event.get("user") or {}).get("username", "")
            found.append(Request(user, event["verb"], resource, is_allowed))
        return found

    def _write_files(self) -> None:
        folder = self._folder
        (folder / "tokens.csv").write_text(f'{ADMIN_TOKEN},admin,1,"system:masters"\n')
        (folder / "audit.yaml").write_text(_AUDIT_POLICY)
        key = str(folder / "accounts.key")
        _quietly("openssl", "genrsa", "-out", key, "2048")
        _quietly("openssl", "rsa", "-in", key, "-pubout", "-out", str(folder / "accounts.pub"))

    def _start_etcd(self, binary: Path) -> None:
        client = f"http://127.0.0.1:{self._etcd_port}"
        peer = f"http://127.0.0.1:{self._etcd_peer_port}"
        self._start(
            "etcd",
            [
                str(binary),
                f"--data-dir={self._folder / 'etcd'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--log-level=warn",
            ],
        )
        self._wait_ready("etcd", f"{client}/health", None)

    def _start_apiserver(self, binary: Path) -> None:
        folder = self._folder
        self._start(
            "kube-apiserver",
            [
                str(binary),
                f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
                "--bind-address=127.0.0.1",
                f"--secure-port={self._port}",
                f"--cert-dir={folder / 'certificates'}",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--authorization-mode=RBAC",
                f"--token-auth-file={folder / 'tokens.csv'}",
                f"--service-account-key-file={folder / 'accounts.pub'}",
                f"--service-account-signing-key-file={folder / 'accounts.key'}",
                "--service-account-issuer=https://kubernetes.default.svc",
                # It would mount a token into every pod, which the controller-manager makes.
                "--disable-admission-plugins=ServiceAccount",
                "--endpoint-reconciler-type=none",
                f"--audit-policy-file={folder / 'audit.yaml'}",
                f"--audit-log-path={folder / 'audit.log'}",
                "--profiling=false",
            ],
        )
        trust = ssl.create_default_context()
        trust.check_hostname = False
        trust.verify_mode = ssl.CERT_NONE
        self._wait_ready("kube-apiserver", f"{self.url}/readyz", trust)

    def _start(self, name: str, command: list[str]) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                # Should the tests be killed, nobody is left to end the servers.
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C is for the tests, which then end the servers in order.
                start_new_session=True,
            )

    def _wait_ready(self, name: str, url: str, trust: ssl.SSLContext | None) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
        while True:
            code = self._processes[name].poll()
            if code is not None or time.monotonic() > deadline_s:
                state = "is not ready in time" if code is None else f"ended with code {code}"
                log = (self._folder / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"{name} {state}; its log ends:\n{log[-3000:]}")
            try:
                with urllib.request.urlopen(request, context=trust, timeout=5):
                    return
            except OSError:
                time.sleep(_POLL_PERIOD_S)


def binaries() -> Path:
    """The folder with both servers; the script makes it when it is missing, which takes minutes.

    kubectl is there too, unless one is on the path.
    """
    script = Path(__file__).with_name("apiserver.sh")
    # Not its stderr: whoever waits wants to see why.
    done = subprocess.run([script], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


def _quietly(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
