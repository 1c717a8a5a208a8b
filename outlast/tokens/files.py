"""Files of tokens: what `data.tokens` names, and whether it can be trained on.

It is a folder that `outlast data prepare` has made, a pair NAME.bin and NAME.idx in Megatron's
format (by the path of either or without an ending), or an array of numpy's in a `.npy` file: at a
path of this machine, or at the URL of a store (`remote_source.py`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from outlast.tokens.id_range import ENDING, MOST_BYTES
from outlast.tokens.index import read_index
from outlast.tokens.manifest import read_manifest
from outlast.tokens.remote_file import OpenRemote, is_remote
from outlast.tokens.remote_source import open_remote_source
from outlast.tokens.token_file import (
    TokenFile,
    TokenSource,
    alone,
    check_array,
    check_sizes,
    prepared,
)

__all__ = ["TokenFile", "TokenSource", "open_source"]


def open_source(name: str, open_remote: OpenRemote | None = None) -> TokenSource:
    """The tokens at a path, or at a URL that `open_remote` reads.

    Raises:
        ValueError: there are none, or their files do not belong together.
        StorageUnavailableError: the store of a URL does not answer.
    """
    path = Path(name)
    try:
        if is_remote(name):
            if open_remote is None:
                raise ValueError("is a URL, and only files of this machine are read here")
            return open_remote_source(name, open_remote)
        if path.is_dir():
            manifest = read_manifest(path)
            return prepared(
                name, manifest, lambda split: _of_pair(path / split), remedy="prepare it again"
            )
        if path.suffix == ".npy":
            return _alone(name, _of_array(path))
        stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        return _alone(name, _of_pair(stem))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror or error}") from error


def _alone(name: str, file: TokenFile) -> TokenSource:
    try:
        with Path(file.name + ENDING).open("rb") as opened:
            note = opened.read(MOST_BYTES)
    except OSError:
        # A note that cannot be read is none.
        return alone(name, file, None)
    return alone(name, file, note)


def _of_pair(stem: Path) -> TokenFile:
    index_path, path = (stem.with_name(stem.name + ending) for ending in (".idx", ".bin"))
    if not index_path.exists() and not path.exists():
        raise ValueError(
            f"is neither a folder of `outlast data prepare` nor a .npy file, and there are no "
            f"{path.name} and {index_path.name}"
        )
    for each, other in ((index_path, path), (path, index_path)):
        if not each.exists():
            raise ValueError(f"has {other.name} and no {each.name} beside it; copy both")
    try:
        index = read_index(index_path)
    except ValueError as error:
        raise ValueError(f"cannot be read: {error}") from error
    size, item = path.stat().st_size, np.dtype(index.token_type).itemsize
    check_sizes(path.name, index_path.name, size=size, expected=index.num_bytes)
    return TokenFile(
        name=str(path),
        token_type=index.token_type,
        offset_bytes=0,
        num_tokens=size // item,
        num_documents=index.num_documents,
    )


def _of_array(path: Path) -> TokenFile:
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ValueError(f"is no array that can be read: {error}") from error
    check_array(array.shape, array.dtype)
    return TokenFile(
        name=str(path),
        token_type=array.dtype.name,
        offset_bytes=int(array.offset),
        num_tokens=len(array),
        num_documents=None,
    )
