"""Other people's formats, in and out.

In: their files, or our stores.  Out: the same tokens in the other form.
Promise: nothing is unpickled unrestricted; what cannot be represented is refused. A name is
imported when somebody asks for it, so that no format costs those who do not use it.
Not here: object storage (remote), tensors (pytorch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.lazy import later

if TYPE_CHECKING:
    from shardmill.formats.datatrove import open_datatrove
    from shardmill.formats.dolma import open_dolma
    from shardmill.formats.llmc import open_llmc
    from shardmill.formats.megatron import open_megatron, write_megatron
    from shardmill.formats.packed import convert_legacy_to_memmap, open_packed, pack_from_spool

__all__ = [
    "convert_legacy_to_memmap",
    "open_datatrove",
    "open_dolma",
    "open_llmc",
    "open_megatron",
    "open_packed",
    "pack_from_spool",
    "write_megatron",
]

_ROOMS = {
    "datatrove": ("open_datatrove",),
    "dolma": ("open_dolma",),
    "llmc": ("open_llmc",),
    "megatron": ("open_megatron", "write_megatron"),
    "packed": ("convert_legacy_to_memmap", "open_packed", "pack_from_spool"),
}

__getattr__ = later(
    __name__, {name: f"{__name__}.{room}" for room, names in _ROOMS.items() for name in names}
)
