"""Write packed shards to an fsspec file system.

On a local disk a shard is written in place. Elsewhere it is written to a temporary folder and sent
when it is complete: a memmap shard with its manifest last, the file of another storage after the
record beside it. Every file is compared with what was sent. A failure leaves nothing there that
looks finished, and nothing finished is replaced.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from shardmill.arguments import is_url, refuse_url
from shardmill.errors import DamagedStoreError, OptionError, StoreExistsError
from shardmill.formats.packed.files import file_sha256
from shardmill.formats.packed.memmap import MemmapShardWriter
from shardmill.formats.packed.pack import PackedOptions, pack_with, shard_name
from shardmill.remote.contents import LARGEST, FileFact, is_same
from shardmill.remote.folder import RemoteFolder, folder_at
from shardmill.remote.push import send
from shardmill.urls import Url

_WORKERS = 6  # a shard has six files
_LOCAL = {"file", "local"}


class ChatSftOutputConfig(BaseModel):
    """How `process_chat_sft_pack_from_spool_core` stores a shard. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")

    packed_storage: Literal["legacy_npy_pickle", "memmap_v1"] = "legacy_npy_pickle"


def process_chat_sft_pack_from_spool_core(
    *,
    spool_dir: str,
    output_dir: str,
    shard_id: str,
    pack_size: int,
    packer: Any,
    output_fs: Any,
    dtype: npt.DTypeLike = np.int32,
    packed_storage: str = "legacy_npy_pickle",
) -> dict[str, Any]:
    """Pack the local spool at `spool_dir` into `output_dir` of an fsspec file system; the receipt.

    The shard is `output_dir/shard_id`, with `.npy` or `.parquet` for those storages. `packer`: a
    name, a function or an object; see `pack_with`. Sequences that do not fit into `pack_size` are
    cut at their end; the receipt counts them as "truncated" and "truncated_tokens" ("dropped" and
    "dropped_tokens" when a packer filled a bin with more than it holds), and a warning says so.
    """
    refuse_url(spool_dir, "spool_dir", instead="copy the spool with shardmill.remote.pull first")
    place = _place(output_fs, output_dir)
    form = PackedOptions(packed_storage=packed_storage, dtype=dtype)
    name = shard_name(shard_id, form)
    pack = partial(pack_with, packer, spool_dir, shard_id, pack_size, form)
    if _LOCAL & set(place.protocols):
        given = str(output_dir).rstrip("/")
        as_given = given and not given.startswith("~") and not is_url(given)
        return pack(Path(given if as_given else place.root))
    shard = folder_at(place.fs, place.path(name), f"{place.url}/{name}")
    _refuse_finished(shard)
    with tempfile.TemporaryDirectory(prefix="shardmill-") as scratch:
        receipt = pack(Path(scratch))
        if packed_storage == "memmap_v1":
            send(Path(scratch, name), shard, workers=_WORKERS)
        else:
            _refuse_finished(shard)
            for path in sorted(Path(scratch).iterdir(), key=lambda path: path.name == name):
                _send_file(path, place)
    return receipt | {"output_path": f"{str(Url(str(output_dir))).rstrip('/')}/{name}"}


def write_memmap_to_cloud(
    output_fs: Any,
    output_dir: str,
    num_bins: int,
    pack_size: int,
    total_seq_starts: int,
    write_fn: Callable[[MemmapShardWriter], object],
) -> dict[str, Any]:
    """The manifest of the shard that `write_fn` writes; it calls `write_bin`, not `finalize`."""
    place = _place(output_fs, output_dir)

    def write(folder: Path) -> dict[str, Any]:
        with MemmapShardWriter(folder, num_bins, pack_size, total_seq_starts) as writer:
            write_fn(writer)
            return writer.finalize()

    if _LOCAL & set(place.protocols):
        return write(Path(place.root))
    _refuse_finished(place)
    with tempfile.TemporaryDirectory(prefix="shardmill-") as scratch:
        folder = Path(scratch, "shard")
        manifest = write(folder)
        send(folder, place, workers=_WORKERS)
        return manifest


def _place(fs: Any, folder: str) -> RemoteFolder:
    """A folder of this file system; the URL of another one is refused."""
    if not hasattr(fs, "protocol") or not hasattr(fs, "_strip_protocol"):
        raise OptionError(f"output_fs={fs!r:.100}: wanted an fsspec file system")
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    if str(folder).partition("://")[0].lower() not in protocols:
        ours = " or ".join(sorted(protocols))
        instead = f"output_fs is for {ours}: give a folder of it, or the file system of the URL"
        refuse_url(folder, "output_dir", instead=instead)
    return folder_at(fs, fs._strip_protocol(str(folder)), str(Url(str(folder))))


def _refuse_finished(shard: RemoteFolder) -> None:
    """Refuse a place where a file is, or a folder with a manifest."""
    if shard.listing().keys() & {"", *LARGEST}:  # the listing of a file is the file, as ""
        raise StoreExistsError(
            f"{shard.url}: a finished shard is there; remove it or choose another place"
        )


def _send_file(path: Path, place: RemoteFolder) -> None:
    fact = FileFact(name=path.name, size=path.stat().st_size, sha256=file_sha256(path))
    place.put(path, path.name, lambda _: None)
    if not is_same(place, fact, path, place.info(path.name)):
        place.remove(path.name)
        raise DamagedStoreError(
            f"{place.url}/{path.name}: what arrived is not what was sent, and was removed; pack "
            "again"
        )
