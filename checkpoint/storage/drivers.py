"""Packages that read the stores which fsspec knows but does not read by itself.

They are the user's choice and not ours to install, so one may be missing. This looks without
importing any of them; what they do with a URL does not belong here.
"""

from __future__ import annotations

from importlib.util import find_spec

# By the scheme of a URL: the package to install, and the module that it brings.
_DRIVERS = {
    "s3": ("s3fs", "s3fs"),
    "s3a": ("s3fs", "s3fs"),
    "gs": ("gcsfs", "gcsfs"),
    "gcs": ("gcsfs", "gcsfs"),
    "hdfs": ("hdfs-native", "hdfs_native"),
    "webhdfs": ("requests", "requests"),
}


def missing_driver(url: str) -> str | None:
    """What is to be installed before anything at `url` can be read here; None if nothing is."""
    scheme = url.partition("://")[0].lower()
    package, module = _DRIVERS.get(scheme, ("", ""))
    if not package or find_spec(module) is not None:
        return None
    return (
        f"{scheme}:// URLs need the package {package}, which is not installed; remedy: "
        f"pip install {package}"
    )
