"""Copy finished folders to and from object storage, or read a store there through a local cache.

Nothing unfinished looks finished at either end, and every file is checked by its sha256. Any file
system of fsspec works; `shardmill[s3]` installs the one for S3.
"""

from __future__ import annotations

from shardmill.remote.cached_store import RemoteStore, open_remote
from shardmill.remote.contents import TransferReceipt
from shardmill.remote.pull import pull, remote_manifest, verify_remote
from shardmill.remote.push import push

__all__ = [
    "RemoteStore",
    "TransferReceipt",
    "open_remote",
    "pull",
    "push",
    "remote_manifest",
    "verify_remote",
]
