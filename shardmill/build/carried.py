"""Segments that are made where the journal is not, and carried to it.

In: a segment's parts in the memory of one process.  Out: the same segment in the unit's folder.
Promise: what arrives is what was sent, by its hashes; it counts from the moment its receipt stands
here, like one that was made here.
Not here: how a note travels (engines), what is in a segment (segments.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardmill.build.segments import (
    Receipt,
    Segment,
    SegmentSize,
    UnitKey,
    open_part,
    write_receipt,
)
from shardmill.errors import BuildError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """A receipt and what it is about."""

    receipt: Receipt
    parts: Mapping[str, bytearray] | None  # None: they lie in the journal already


Send = Callable[[Parcel], None]


class CarriedSegment(Segment):
    """A segment in memory, sent off when it is sealed."""

    def __init__(
        self, send: Send, key: UnitKey, *, after: Receipt | None, size: SegmentSize | None = None
    ) -> None:
        self._send = send
        self._buffers: dict[str, _HashedBuffer] = {}
        super().__init__(key, after=after, size=size)

    def _begin(self, part: str) -> _HashedBuffer:
        return self._buffers.setdefault(part, _HashedBuffer())

    def _keep(self, receipt: Receipt) -> None:
        parts = {part: buffer.data for part, buffer in self._buffers.items()}
        self._send(Parcel(receipt=receipt, parts=parts))


class _HashedBuffer:
    """A part that never sees a disk."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        self.data += data

    def finish(self) -> str:
        return self._sha256.hexdigest()

    def abort(self) -> None:
        """Nothing is held but memory."""


def keep_parcel(folder: Path, parcel: Parcel) -> Receipt:
    """Put a carried segment into the folder of its unit, durable, its receipt last."""
    receipt = parcel.receipt
    if parcel.parts is None:
        return receipt
    for part, data in parcel.parts.items():
        file = open_part(folder, receipt.number, part)
        try:
            file.write(memoryview(data))
            found = file.finish()
        finally:
            file.abort()
        if found != receipt.sha256[part]:
            raise BuildError(
                f"{folder / part}: segment {receipt.number} did not arrive as it was sent; it does "
                "not count: look at the network and the memory of the machines, and go on with "
                "resume=True"
            )
    write_receipt(folder, receipt)
    return receipt
