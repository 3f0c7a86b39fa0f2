"""Files of other programs, in and out: the same tokens in the other form.

Nothing is unpickled, and what cannot be represented is refused. Names are imported when they are
asked for, so a format costs nothing to those who do not use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.lazy import lazy_getattr

if TYPE_CHECKING:
    from shardmill.formats.megatron import open_megatron, write_megatron
    from shardmill.formats.packed import convert_legacy_to_memmap, open_packed, pack_from_spool
    from shardmill.formats.token_files import open_datatrove, open_dolma, open_llmc

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
        "shardmill.formats.token_files": ("open_datatrove", "open_dolma", "open_llmc"),
        "shardmill.formats.megatron": ("open_megatron", "write_megatron"),
        "shardmill.formats.packed": (
            *("convert_legacy_to_memmap", "open_packed", "pack_from_spool"),
        ),
    },
)
