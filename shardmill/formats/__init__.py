"""Other people's formats, in and out.

In: their files, or our stores.  Out: the same tokens in the other form.
Promise: nothing is unpickled unrestricted; what cannot be represented is refused. A name is
imported when somebody asks for it, so that no format costs those who do not use it.
Not here: object storage (remote), tensors (pytorch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.lazy import lazy_getattr

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

__getattr__ = lazy_getattr(
    __name__,
    {
        "shardmill.formats.datatrove": ("open_datatrove",),
        "shardmill.formats.dolma": ("open_dolma",),
        "shardmill.formats.llmc": ("open_llmc",),
        "shardmill.formats.megatron": ("open_megatron", "write_megatron"),
        "shardmill.formats.packed": (
            *("convert_legacy_to_memmap", "open_packed", "pack_from_spool"),
        ),
    },
)
