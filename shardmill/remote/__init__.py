"""A finished folder to and from object storage.

In: a finished folder, or a block that builds one, and a URL.  Out: the same folder at the other
end, or shards as they are read.
Promise: nothing unfinished looks finished, at either end; every file is checked by its sha256.
Not here: how to build; a client (fsspec and its file systems: `shardmill[s3]` for S3).
"""

from __future__ import annotations

from shardmill.remote.outgoing import Outgoing, build_to
from shardmill.remote.packed import (
    ChatSftOutputConfig,
    process_chat_sft_pack_from_spool_core,
    write_memmap_to_cloud,
)
from shardmill.remote.receive import pull, remote_manifest, verify_remote
from shardmill.remote.records import Receipt
from shardmill.remote.send import push
from shardmill.remote.store import RemoteStore, open_remote

__all__ = [
    "ChatSftOutputConfig",
    "Outgoing",
    "Receipt",
    "RemoteStore",
    "build_to",
    "open_remote",
    "process_chat_sft_pack_from_spool_core",
    "pull",
    "push",
    "remote_manifest",
    "verify_remote",
    "write_memmap_to_cloud",
]
