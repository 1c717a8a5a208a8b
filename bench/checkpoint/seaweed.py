"""SeaweedFS for as long as a measurement takes, as `tests/stores` starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.stores.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, Seaweed

_SCRIPT = Path(__file__).parents[2] / "tests" / "stores" / "servers.sh"


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a folder in its bucket; what this process starts finds server and client."""
    done = subprocess.run(
        [str(_SCRIPT), sys.executable], stdout=subprocess.PIPE, text=True, check=True
    )
    stores = Path(done.stdout.strip())
    before = dict(os.environ)
    with (
        tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder,
        Seaweed(stores / "weed", Path(folder) / "s3") as server,
    ):
        paths = (before.get("PYTHONPATH"), str(stores / "clients"))
        os.environ.update(
            PYTHONPATH=os.pathsep.join(path for path in paths if path),
            AWS_ACCESS_KEY_ID=ACCESS_KEY,
            AWS_SECRET_ACCESS_KEY=SECRET_KEY,
            AWS_DEFAULT_REGION="us-east-1",
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.port}",
        )
        try:
            yield f"s3://{BUCKET}/{uuid.uuid4().hex}"
        finally:
            os.environ.clear()
            os.environ.update(before)
