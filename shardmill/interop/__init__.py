"""Other people's formats, in and out.

In: their files, or our stores.  Out: the same tokens in the other form.
Promise: nothing is unpickled unrestricted; what cannot be represented is refused. A name is
imported when somebody asks for it, so that no format costs those who do not use it.
Not here: object storage (remote), tensors (pytorch).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmill.interop.datatrove import open_datatrove
    from shardmill.interop.dolma import open_dolma
    from shardmill.interop.llmc import open_llmc
    from shardmill.interop.megatron import open_megatron, write_megatron
    from shardmill.interop.packed import convert_legacy_to_memmap, open_packed, pack_from_spool

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
    "convert_legacy_to_memmap": "packed",
    "open_datatrove": "datatrove",
    "open_dolma": "dolma",
    "open_llmc": "llmc",
    "open_megatron": "megatron",
    "open_packed": "packed",
    "pack_from_spool": "packed",
    "write_megatron": "megatron",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
