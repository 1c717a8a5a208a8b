"""Generate the gRPC stubs; `make proto` writes them, a test compares them."""

from __future__ import annotations

import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(into: Path) -> None:
    """Write the stubs of every file under proto/ below `into`."""
    sources = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    plugins = Path(sys.executable).parent
    outputs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    plugin_flags = [
        f"--plugin=protoc-gen-{name}={plugins / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
    ]
    # Google's own messages (Struct, Timestamp) come with the compiler.
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    includes = [f"-I{ROOT / 'proto'}", f"-I{well_known}"]
    status = protoc.main(["protoc", *includes, *outputs, *plugin_flags, *sources])
    if status:
        raise SystemExit(f"protoc failed with status {status}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
