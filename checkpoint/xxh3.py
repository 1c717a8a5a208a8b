"""xxh3 in an interpreter that has no package `xxhash`: from the shared object of the agent's own.

The agent puts a copy of it beside this file where it gives our modules to another interpreter.
The hash's functions in it are plain C, which knows nothing of Python: they are called by ctypes,
whatever the version of the interpreter, and run as fast. What the object has beside them for its
own Python is never touched.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from checkpoint.core.names import XXH3_LIBRARY


def _load() -> Any:
    """The function of the shared object.

    Raises:
        ImportError: it is not there, or is of no use here.
    """
    path = Path(__file__).with_name(XXH3_LIBRARY)
    try:
        function = ctypes.CDLL(str(path)).XXH3_64bits
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"checksums need the package xxhash; remedy: pip install xxhash ({error})"
        ) from error
    function.restype = ctypes.c_uint64
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return function


_hash = _load()


def xxh3_64_intdigest(data: bytes | bytearray | memoryview) -> int:
    """As `xxhash.xxh3_64_intdigest`, of a contiguous buffer; other threads run meanwhile."""
    view = memoryview(data).cast("B")
    if not view.nbytes or view.readonly:
        # ctypes gives no address of memory that may not be written.
        content = bytes(view)
        return int(_hash(content, len(content)))
    return int(_hash(ctypes.byref(ctypes.c_char.from_buffer(view)), view.nbytes))
