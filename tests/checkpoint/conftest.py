from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A checkpoint root that does not exist yet; `memory` where a test asks for it."""
    if getattr(request, "param", "file") == "memory":
        return f"memory://{uuid.uuid4().hex}/job-1"
    return f"file://{tmp_path}/store/job-1"


both_stores = pytest.mark.parametrize("url", ["file", "memory"], indirect=True)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes tmpfs mounts of so many bytes."""
    mounted: list[Path] = []

    def mount(num_bytes: int) -> Path:
        folder = tmp_path / f"tmpfs-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("no mount command here")
        if done.returncode:
            pytest.skip(f"mounting a tmpfs is not permitted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
