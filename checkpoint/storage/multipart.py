"""S3 multipart uploads: a file in parts, which is not there before it is complete.

An uploader that died leaves its upload open, and S3 keeps the parts. The next one takes
the upload over: S3 says of each part how long it is and what its digest is, so parts that
are there for certain are not sent again, and nothing of the dead one stays behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Call(Protocol):
    """Asks S3 for something, by botocore's name of it; returns what botocore parsed."""

    def __call__(self, method: str, **fields: Any) -> Any: ...


class MultipartWriter:
    """One file on its way to S3; `call` knows its bucket and key."""

    takes_any_order = True

    def __init__(self, call: Call, upload: str | None) -> None:
        """`upload` is one that was left open for this file; None begins one."""
        self._call = call
        self._left: dict[int, dict[str, Any]] = {}
        if upload is None:
            upload = str(call("create_multipart_upload")["UploadId"])
        else:
            self._left = {int(part["PartNumber"]): part for part in _parts(call, upload)}
        self._upload = upload
        self._tags: dict[int, str] = {}

    def write(self, index: int, chunk: memoryview) -> None:
        left = self._left.get(index + 1)
        if left is not None and _is_same(left, chunk):
            self._tags[index] = left["ETag"]
            return
        answer = self._call(
            "upload_part", UploadId=self._upload, PartNumber=index + 1, Body=bytes(chunk)
        )
        self._tags[index] = answer["ETag"]

    def finish(self) -> None:
        parts = [
            {"PartNumber": index + 1, "ETag": tag} for index, tag in sorted(self._tags.items())
        ]
        self._call(
            "complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts}
        )

    def abort(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._call("abort_multipart_upload", UploadId=self._upload)


def uploads_below(call: Call, prefix: str) -> Iterator[dict[str, Any]]:
    """Uploads of a bucket that were begun and not ended, of keys that begin so."""
    marker: dict[str, str] = {}
    while True:
        answer = call("list_multipart_uploads", Prefix=prefix, **marker)
        for upload in answer.get("Uploads") or ():
            # Some servers take no notice of the prefix.
            if str(upload["Key"]).startswith(prefix):
                yield upload
        if not answer.get("IsTruncated"):
            return
        marker = {
            "KeyMarker": answer["NextKeyMarker"],
            "UploadIdMarker": answer["NextUploadIdMarker"],
        }


def left_open(call: Call, key: str) -> str | None:
    """The newest upload of this very key that nobody has ended; None when there is none.

    Finding none, and not being allowed to look, come to the same: the file is sent anew.
    """
    try:
        found = [upload for upload in uploads_below(call, key) if upload["Key"] == key]
    except OSError as error:
        logger.info("uploads of %s cannot be listed: %s", key, error)
        return None
    newest = max(found, key=lambda upload: str(upload.get("Initiated", "")), default=None)
    return None if newest is None else str(newest["UploadId"])


def _parts(call: Call, upload: str) -> Iterator[dict[str, Any]]:
    marker: dict[str, int] = {}
    while True:
        answer = call("list_parts", UploadId=upload, **marker)
        yield from answer.get("Parts") or ()
        if not answer.get("IsTruncated"):
            return
        marker = {"PartNumberMarker": answer["NextPartNumberMarker"]}


def _is_same(part: dict[str, Any], chunk: memoryview) -> bool:
    """Whether a stored part is these bytes; False where the server's digest is of another kind."""
    if int(part["Size"]) != len(chunk):
        return False
    digest = hashlib.md5(chunk, usedforsecurity=False).hexdigest()
    return str(part["ETag"]).strip('"') == digest
