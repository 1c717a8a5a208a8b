"""An interpreter of somebody else's: with torch and what that needs, and nothing of ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path

# Another interpreter with a torch of its own, for `make test-foreign`.
GIVEN = "OUTLAST_FOREIGN_PYTHON"


def foreign_python(folder: Path) -> Path:
    """One that was given, or one with this Python and this torch, made in `folder`.

    It lacks numpy, pydantic, gRPC, xxhash and everything else that torch does not require.
    """
    given = os.environ.get(GIVEN)
    if given:
        return Path(given)
    home = folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    for place in _places():
        (packages / place.name).symlink_to(place)
    return home / "bin" / "python"


@lru_cache(maxsize=1)
def _places() -> tuple[Path, ...]:
    """Top folders and files of torch and of what it requires, and that in turn."""
    wanted, seen, places = ["torch"], set(), {}
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__", "bin"):
                places[top] = Path(str(distribution.locate_file(top)))
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                found = re.match(r"[A-Za-z0-9._-]+", requirement)
                assert found is not None
                wanted.append(found[0])
    return tuple(path for _, path in sorted(places.items()))
