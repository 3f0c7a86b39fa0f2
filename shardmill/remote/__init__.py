"""A finished folder to and from object storage.

In: a finished folder, or a block that builds one, and a URL.  Out: the same folder at the other
end, or shards as they are read.
Promise: nothing unfinished looks finished, at either end; every file is checked by its sha256.
Not here: how to build; a client (fsspec and its file systems: `shardmill[s3]` for S3).
"""

from __future__ import annotations

from shardmill.remote.build_to import Outgoing, build_to
from shardmill.remote.contents import TransferReceipt
from shardmill.remote.pull import pull, remote_manifest, verify_remote
from shardmill.remote.push import push
from shardmill.remote.remote_store import RemoteStore, open_remote

__all__ = [
    "Outgoing",
    "RemoteStore",
    "TransferReceipt",
    "build_to",
    "open_remote",
    "pull",
    "push",
    "remote_manifest",
    "verify_remote",
]
