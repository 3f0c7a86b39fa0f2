"""Write a packed shard where no file can be mapped.

In: an fsspec file system, a folder of it, a function that writes bins.  Out: the shard there.
Promise: on a local disk it is written in place; elsewhere it is written to a temporary folder and
pushed, the manifest last; a failure leaves nothing there that looks finished.
Not here: bins (interop.packed).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardmill.errors import StoreExistsError
from shardmill.interop.packed.memmap import MemmapShardWriter
from shardmill.remote.contents import LARGEST, local_contents
from shardmill.remote.place import place_of, shown
from shardmill.remote.send import send

_WORKERS = 6  # a shard has six files


def write_memmap_to_cloud(
    output_fs: Any,
    output_dir: str,
    num_bins: int,
    pack_size: int,
    total_seq_starts: int,
    write_fn: Callable[[MemmapShardWriter], object],
) -> dict[str, Any]:
    """The manifest of the shard that `write_fn` writes; it calls `write_bin`, not `finalize`."""
    shape = (num_bins, pack_size, total_seq_starts)
    place = place_of(output_fs, output_fs._strip_protocol(output_dir), shown(str(output_dir)))
    if {"file", "local"} & set(place.protocols):
        return _written(Path(place.root), shape, write_fn)
    for name in LARGEST.keys() & place.listing().keys():
        raise StoreExistsError(
            f"{place.url}: a finished folder is there ({name}); remove it or choose another place"
        )
    with tempfile.TemporaryDirectory(prefix="shardmill-") as scratch:
        folder = Path(scratch, "shard")
        manifest = _written(folder, shape, write_fn)
        send(folder, local_contents(folder), place, (_WORKERS, None), False)
        return manifest


def _written(
    folder: Path, shape: tuple[int, int, int], write_fn: Callable[[MemmapShardWriter], object]
) -> dict[str, Any]:
    with MemmapShardWriter(folder, *shape) as writer:
        write_fn(writer)
        return writer.finalize()
