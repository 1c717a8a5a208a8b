"""xxh3 without the package `xxhash`."""

from __future__ import annotations

import importlib.util
import mmap
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from xxhash import _xxhash

import checkpoint
from checkpoint.core.names import XXH3_LIBRARY

SOURCE = Path(checkpoint.__file__).with_name("xxh3.py")


def load(folder: Path) -> Callable[[Any], int]:
    """The function, as a copy of the module in this folder has it."""
    path = shutil.copy(SOURCE, folder)
    spec = importlib.util.spec_from_file_location("copy_of_xxh3", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Any], int] = module.xxh3_64_intdigest
    return found


def test_it_is_that_of_the_package_whatever_holds_the_bytes(tmp_path: Path) -> None:
    shutil.copy(_xxhash.__file__, tmp_path / XXH3_LIBRARY)
    digest = load(tmp_path)
    # Each way that the hash has for a length, and its borders.
    lengths = (*range(300), 1023, 1024, 1025, 4 << 20, (4 << 20) + 7)
    generator = random.Random(0)
    for length in lengths:
        content = generator.randbytes(length)
        expected = xxhash.xxh3_64_intdigest(content)
        writable = bytearray(content)
        for held in (content, memoryview(content), writable, memoryview(writable)):
            assert digest(held) == expected
    with mmap.mmap(-1, 4096) as memory:
        assert digest(memoryview(memory)[5:99]) == xxhash.xxh3_64_intdigest(bytes(94))


def test_without_it_the_package_to_install_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="remedy: pip install xxhash"):
        load(tmp_path)
    (tmp_path / XXH3_LIBRARY).write_bytes(b"of another machine")
    with pytest.raises(ImportError, match="remedy: pip install xxhash"):
        load(tmp_path)
