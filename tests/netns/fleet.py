"""Nodes as network namespaces: a bridge in a hub, one cable to each node, real agents.

Everything carries a name of its own and is taken down again, whatever happens.
Traffic stays inside the namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ONE_BIT_OFF = Path(__file__).parent / "one_bit_off"
DEADLINE_S = 180.0
# What a healthy cable carries; a bad one carries a fiftieth of it.
HEALTHY_MBIT = 1_000
_NETWORK = "10.231.77"
_HUB = f"{_NETWORK}.254"
# Of the controller, inside the hub.
HTTP = f"{_HUB}:7071"


def why_not() -> str:
    """Why namespaces cannot be had here, "" when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (package iproute2)"
    probe = f"outlast-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return "" if made.returncode == 0 else f"`ip netns add` fails: {made.stderr.strip()}"


class Fleet:
    """A controller in a hub, and agents on nodes that only cables connect."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._names = [f"n{number}" for number in range(count)]
        self._prefix = f"ol{os.getpid()}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controller: subprocess.Popen[bytes] | None = None
        self._flaw = folder / "one-bit-off"

    @property
    def nodes(self) -> list[str]:
        return list(self._names)

    @property
    def in_hub(self) -> list[str]:
        """What a command begins with that is to run beside the controller."""
        return self._inside("hub")

    def api(self, path: str) -> Any:
        """What the controller's JSON API answers."""
        program = (
            "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
        )
        command = [*self.in_hub, sys.executable, "-c", program, f"http://{HTTP}/api/v1{path}"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def outlast(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `outlast` beside the controller."""
        command = ["-m", "outlast.cli.main", *arguments, "--state-dir", str(self._state_dir)]
        done = subprocess.run(
            [*self.in_hub, sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    @contextmanager
    def rails(self, node: str, count: int) -> Iterator[Path]:
        """More cables from a node to the hub, over all of which bursts go four times a second.

        Over one that has a file of its name in this folder nothing goes.
        """
        rails = self._folder / "rails"
        rails.mkdir()
        hub, space = self._space("hub"), self._space(node)
        for number in range(count):
            far = ("peer", "name", f"rail{number}", "netns", space)
            _ip("-n", hub, "link", "add", f"to-rail{number}", "type", "veth", *far)
            _ip("-n", hub, "link", "set", f"to-rail{number}", "up")
            _ip("-n", space, "addr", "add", f"10.231.{78 + number}.1/24", "dev", f"rail{number}")
            _ip("-n", space, "link", "set", f"rail{number}", "up")
            to = (f"10.231.{78 + number}.2", "lladdr", "02:00:00:00:00:01")
            _ip("-n", space, "neigh", "add", *to, "dev", f"rail{number}")
        sender = self._spawn(node, ["tests.netns.bursts", str(rails), str(count)], "bursts", {})
        try:
            yield rails
        finally:
            sender.kill()
            sender.wait()

    def diagnose(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """`outlast diagnose --json`: its exit code and its run."""
        done = self.outlast("diagnose", "--json", *arguments, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)["run"]

    @contextmanager
    def limited_link(self, one: str, other: str) -> Iterator[None]:
        """Let the traffic between two nodes have a fiftieth of what the others have."""
        self._shape(one, other, HEALTHY_MBIT // 50)
        self._shape(other, one, HEALTHY_MBIT // 50)
        try:
            yield
        finally:
            self._shape(one, other, HEALTHY_MBIT)
            self._shape(other, one, HEALTHY_MBIT)

    @contextmanager
    def one_bit_off(self) -> Iterator[str]:
        """Let the arithmetic of one node be wrong in one bit; its name."""
        self._flaw.touch()
        try:
            yield self._names[-1]
        finally:
            self._flaw.unlink()

    def restart_controller(self) -> None:
        """Kill the controller and start it anew on the same state."""
        assert self._controller is not None
        self._controller.kill()
        self._controller.wait()
        self._start_controller()
        self.wait_connected()

    def wait_connected(self) -> None:
        """Wait until every node is there."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            done = self.outlast("nodes", "--json", check=False)
            if done.returncode == 0:
                nodes = json.loads(done.stdout)["nodes"]
                if sum(node["connected"] for node in nodes) == len(self._names):
                    return
            logs = "\n".join(path.read_text()[-500:] for path in self._folder.glob("*.log"))
            assert time.monotonic() < deadline_s, f"nodes never joined\n{done.stderr}\n{logs}"
            time.sleep(0.2)

    @contextmanager
    def running(self) -> Iterator[Fleet]:
        """Everything up; everything gone afterwards."""
        with ExitStack() as stack:
            stack.callback(self._take_down)
            self._lay_cables()
            self._start_controller()
            for number, node in enumerate(self._names):
                self._start_agent(node, number)
            self.wait_connected()
            yield self

    @property
    def _state_dir(self) -> Path:
        return self._folder / "controller"

    def _space(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _cable(self, node: str) -> str:
        # Names of interfaces have 15 characters at most.
        return f"to-{node}"

    def _address(self, node: str) -> str:
        return f"{_NETWORK}.{self._names.index(node) + 1}"

    def _inside(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self._space(name)]

    def _lay_cables(self) -> None:
        hub = self._space("hub")
        _ip("netns", "add", hub)
        _ip("-n", hub, "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "addr", "add", f"{_HUB}/24", "dev", "br0")
        _ip("-n", hub, "link", "set", "br0", "up")
        for node in self._names:
            space, cable = self._space(node), self._cable(node)
            _ip("netns", "add", space)
            _ip("link", "add", cable, "netns", hub, "type", "veth", "peer", "eth0", "netns", space)
            _ip("-n", hub, "link", "set", cable, "master", "br0")
            _ip("-n", hub, "link", "set", cable, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{self._address(node)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            self._tc(node, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb")
            for other in self._names:
                if other != node:
                    self._add_class(node, other)

    def _add_class(self, node: str, other: str) -> None:
        """A class of its own for the traffic to each other node."""
        self._shape(node, other, HEALTHY_MBIT, verb="add")
        self._tc(
            node,
            *("filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", "u32"),
            *("match", "ip", "dst", f"{self._address(other)}/32"),
            *("flowid", self._class(other)),
        )

    def _class(self, other: str) -> str:
        return f"1:{self._names.index(other) + 10}"

    def _shape(self, node: str, other: str, mbit: int, verb: str = "change") -> None:
        self._tc(
            node,
            *("class", verb, "dev", "eth0", "parent", "1:", "classid", self._class(other)),
            *("htb", "rate", f"{mbit}mbit", "burst", "64kb", "quantum", "60000"),
        )

    def _tc(self, node: str, *arguments: str) -> None:
        _run([*self._inside(node), "tc", *arguments])

    def _start_controller(self) -> None:
        arguments = ["controller", "--state-dir", str(self._state_dir)]
        # Nobody else is in these namespaces.
        arguments += ["--grpc", f"{_HUB}:7070", "--http", HTTP]
        arguments += ["--open-http", "--insecure-i-know"]
        self._controller = self._spawn("hub", ["outlast.cli.main", *arguments], "controller", {})

    def _start_agent(self, node: str, number: int) -> None:
        folder = self._folder / node
        environment: dict[str, str] = {}
        if number == len(self._names) - 1:
            paths = [str(ONE_BIT_OFF), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            environment["OUTLAST_TEST_ONE_BIT_OFF"] = str(self._flaw)
        arguments = [
            *("controller.agent", "--node", node, "--controller", f"{_HUB}:7070"),
            *("--address", self._address(node), "--workers", "1"),
            *("--state-dir", str(folder / "state"), "--memory-dir", str(folder / "memory")),
            *("--data-dir", str(folder / "data")),
        ]
        self._spawn(node, arguments, node, environment)

    def _spawn(
        self, place: str, arguments: list[str], log: str, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with (self._folder / f"{log}.log").open("ab") as file:
            process = subprocess.Popen(
                [*self._inside(place), sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
            )
        self._processes.append(process)
        return process

    def _take_down(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        for name in ("hub", *self._names):
            space = self._space(name)
            # What an agent that had to be killed has left behind.
            left = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
            )
            for pid in left.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
