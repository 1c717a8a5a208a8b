"""Real stores, once per session: what `make test-stores` runs, and `make test` leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stores.hadoop import Hadoop
from tests.stores.proxy import FaultProxy
from tests.stores.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, Seaweed


@pytest.fixture(scope="session")
def stores() -> Path:
    """The folder of servers and clients; the clients can be imported from now on."""
    script = Path(__file__).with_name("servers.sh")
    done = subprocess.run(
        [str(script), sys.executable], stdout=subprocess.PIPE, text=True, check=True
    )
    folder = Path(done.stdout.strip())
    clients = str(folder / "clients")
    # Last, so that what both have is the one that is tested everywhere else.
    sys.path.append(clients)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [path for path in (os.environ.get("PYTHONPATH"), clients) if path]
    )
    return folder


@pytest.fixture(scope="session")
def seaweed(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with Seaweed(stores / "weed", tmp_path_factory.mktemp("seaweed") / "s3") as server:
        yield server


@pytest.fixture(scope="session")
def session_proxy(seaweed: Seaweed) -> Iterator[FaultProxy]:
    """Between every S3 client and the server, as s3fs keeps its connections."""
    with FaultProxy(seaweed.port) as proxy:
        # What a user sets: nothing of S3 is said in URLs.
        os.environ.update(
            AWS_ACCESS_KEY_ID=ACCESS_KEY,
            AWS_SECRET_ACCESS_KEY=SECRET_KEY,
            AWS_DEFAULT_REGION="us-east-1",
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy.port}",
        )
        wait_until_it_takes_objects()
        yield proxy


@pytest.fixture
def proxy(session_proxy: FaultProxy) -> Iterator[FaultProxy]:
    yield session_proxy
    session_proxy.heal()


@pytest.fixture
def s3_url(proxy: FaultProxy) -> str:
    """A job's root in the bucket."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/job-1"


@pytest.fixture(scope="session")
def hadoop(stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hadoop]:
    with Hadoop(stores / "hadoop", tmp_path_factory.mktemp("hadoop")) as cluster:
        os.environ["HADOOP_USER_NAME"] = "root"
        # Where it is installed as usual, its entry point does this.
        import fsspec

        fsspec.register_implementation("hdfs", "hdfs_native.fsspec.HdfsFileSystem", clobber=True)
        yield cluster


@pytest.fixture(params=["webhdfs", "hdfs"])
def hdfs_url(request: pytest.FixtureRequest, hadoop: Hadoop) -> str:
    """A job's root in HDFS, over HTTP and over its own protocol."""
    if request.param == "webhdfs":
        return f"webhdfs://root@127.0.0.1:{hadoop.web_port}/{uuid.uuid4().hex}/job-1"
    return f"hdfs://127.0.0.1:{hadoop.rpc_port}/{uuid.uuid4().hex}/job-1"


def wait_until_it_takes_objects() -> None:
    """A server that has just started answers before it can store anything."""
    from checkpoint.errors import StorageUnavailableError
    from checkpoint.storage.storage import Storage
    from tests.checkpoint.helpers import wait_for

    def takes() -> bool:
        try:
            Storage(f"s3://{BUCKET}/ready-{uuid.uuid4().hex}").probe()
        except StorageUnavailableError:
            return False
        return True

    wait_for(takes, "a first object in SeaweedFS", timeout_s=120.0)


@pytest.fixture
def wait_for_server() -> Callable[[], None]:
    return wait_until_it_takes_objects
