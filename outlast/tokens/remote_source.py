"""Tokens at a URL: the same folders, pairs and arrays as on disk, looked at without copying them.

Of an index only its ends are read here: they say how many tokens and documents there are.
"""

from __future__ import annotations

import io

import numpy as np

from outlast.tokens.id_range import ENDING, MOST_BYTES
from outlast.tokens.index import HEADER_BYTES, IndexHeader, parse_header
from outlast.tokens.manifest import NAME, parse_manifest
from outlast.tokens.remote_file import OpenRemote, RemoteFile
from outlast.tokens.token_file import (
    TokenFile,
    TokenSource,
    alone,
    check_array,
    check_sizes,
    prepared,
)

# The longest manifest has a line for each of its sources.
_MAX_MANIFEST_BYTES = 64 << 20
# numpy pads the header of an array to 64 bytes; one of a single dimension is far shorter.
_ARRAY_HEADER_BYTES = 4096


def open_remote_source(name: str, open_remote: OpenRemote) -> TokenSource:
    """The tokens at a URL.

    Raises:
        ValueError: there are none, or their files do not belong together.
        StorageUnavailableError: the store does not answer.
    """
    url = name.rstrip("/")
    if url.endswith(".npy"):
        return _alone(name, _array(url, open_remote), open_remote)
    stem = url.removesuffix(".bin").removesuffix(".idx")
    if stem == url and (manifest := open_remote(f"{url}/{NAME}")) is not None:
        said = parse_manifest(manifest.read(0, min(manifest.size_bytes, _MAX_MANIFEST_BYTES)))
        return prepared(
            name,
            said,
            lambda split: _pair(f"{url}/{split}", open_remote),
            remedy="copy all of it again",
        )
    return _alone(name, _pair(stem, open_remote), open_remote)


def _alone(name: str, file: TokenFile, open_remote: OpenRemote) -> TokenSource:
    try:
        note = open_remote(f"{file.name}{ENDING}")
    except ValueError:
        # Some stores forbid to look for what is not there.
        note = None
    if note is None:
        return alone(name, file, None)
    return alone(name, file, note.read_ranges([(0, min(note.size_bytes, MOST_BYTES))])[0])


def _pair(stem: str, open_remote: OpenRemote) -> TokenFile:
    last = stem.rpartition("/")[2]
    names = [f"{last}.idx", f"{last}.bin"]
    found = [open_remote(f"{stem}{each[len(last) :]}") for each in names]
    index, tokens = found
    if index is None and tokens is None:
        raise ValueError(
            f"is neither a folder of `outlast data prepare` nor a .npy file, and there are no "
            f"{names[1]} and {names[0]}; check the bucket and the path"
        )
    if index is None or tokens is None:
        missing, other = names if index is None else names[::-1]
        raise ValueError(f"has {other} and no {missing} beside it; copy both")
    header, expected = _header(index)
    check_sizes(names[1], names[0], size=tokens.size_bytes, expected=expected)
    return TokenFile(
        name=tokens.url,
        token_type=header.token_type,
        offset_bytes=0,
        num_tokens=tokens.size_bytes // np.dtype(header.token_type).itemsize,
        num_documents=header.num_documents,
        remote=tokens,
        remote_index=index,
    )


def _header(index: RemoteFile) -> tuple[IndexHeader, int]:
    """What an index begins with, and the size of the tokens that it is of."""
    start = index.read_ranges([(0, min(index.size_bytes, HEADER_BYTES))])[0]
    try:
        header = parse_header(start, index.size_bytes, index.url)
    except ValueError as error:
        raise ValueError(f"cannot be read: {error}") from error
    return header, header.num_bytes(*index.read_ranges(header.ranges_of_last()))


def _array(url: str, open_remote: OpenRemote) -> TokenFile:
    file = open_remote(url)
    if file is None:
        raise ValueError("is not there; check the bucket and the path")
    start = io.BytesIO(file.read_ranges([(0, min(file.size_bytes, _ARRAY_HEADER_BYTES))])[0])
    try:
        version = np.lib.format.read_magic(start)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = read(start)
    except (ValueError, KeyError) as error:
        raise ValueError(f"is no array that can be read: {error}") from error
    offset = start.tell()
    check_array(shape, dtype)
    if file.size_bytes < offset + shape[0] * dtype.itemsize:
        raise ValueError(
            f"is no array that can be read: it has {file.size_bytes:,} bytes, and {shape[0]:,} ids "
            f"of {dtype} have {shape[0] * dtype.itemsize:,}; copy it again"
        )
    return TokenFile(
        name=url,
        token_type=dtype.name,
        offset_bytes=offset,
        num_tokens=shape[0],
        num_documents=None,
        remote=file,
    )
