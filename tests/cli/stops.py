"""Builds that stop on the way."""

from __future__ import annotations

import pytest

from shardmill.building.segments import Receipt, SegmentWriter


def small_units(patch: pytest.MonkeyPatch) -> None:
    """Units of a few kilobytes, so that a small build has several receipts."""
    patch.setattr("shardmill.building.plan.CHUNK_BYTES", 5_000)


def stop_at_unit(patch: pytest.MonkeyPatch, number: int) -> None:
    """As if Ctrl-C came when unit `number` is made."""
    seal = SegmentWriter.seal

    def stops(self: SegmentWriter) -> Receipt:
        if self._unit.number == number:
            raise KeyboardInterrupt
        return seal(self)

    patch.setattr(SegmentWriter, "seal", stops)
