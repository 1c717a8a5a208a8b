"""`--kube=real` runs every test of this folder against kube-apiserver and etcd."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest
from kubernetes import client

from tests.kube.cluster import Kube, opened
from tests.kube.fake import FakeKube
from tests.kube.server import RealKube, binaries

Kubectl = Callable[..., str]


@pytest.fixture(scope="session")
def real_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RealKube]:
    with RealKube(tmp_path_factory.mktemp("kube")) as server:
        yield server


@pytest.fixture
def kube(request: pytest.FixtureRequest) -> Iterator[Kube]:
    """A server and a fresh namespace: in memory, or the real one with `--kube=real`."""
    kind: str = request.config.getoption("--kube")
    if kind == "real":
        with opened(kind, request.getfixturevalue("real_server")) as kube:
            yield kube
    else:
        with FakeKube() as server, opened(kind, server) as kube:
            yield kube


@pytest.fixture
def core(kube: Kube) -> client.CoreV1Api:
    """The core API in the hands of an administrator."""
    return kube.core()


@pytest.fixture(scope="session")
def kubectl(request: pytest.FixtureRequest) -> Kubectl:
    """What kubectl prints; it must succeed. Beside a real server it must be there."""
    program = shutil.which("kubectl")
    if program is None and request.config.getoption("--kube") == "real":
        program = str(binaries() / "kubectl")
    if program is None:
        pytest.skip("there is no kubectl; `make test-kube` brings one")

    def run(*arguments: str) -> str:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
