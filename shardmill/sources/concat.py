"""Several sources, one behind the other.

In: sources.  Out: one source.
Promise: all documents of the first, then all of the second, ...; the cursor says which and where.
Not here: mixing by weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import CuttableSource, DividedSource, Source
from shardmill.records import JSON, Cursor, TextBatch
from shardmill.sources.batches import check_num_bytes, counts_of, fields_of, limited, runs, stamp_of
from shardmill.sources.file_source import FileSource, check_at_least
from shardmill.storage.files import InputFile


class ConcatSource:
    """Sources read in order. Drop ids begin with what the parts wrote; name files apart."""

    def __init__(self, parts: Sequence[Source], *, name: str | None = None) -> None:
        if not parts:
            raise OptionError("ConcatSource needs at least one source")
        self._parts = tuple(parts)
        self._name = name or " + ".join(part.name for part in parts)

    def __repr__(self) -> str:
        return f"ConcatSource({', '.join(map(repr, self._parts))})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def parts(self) -> tuple[Source, ...]:
        return self._parts

    @property
    def files(self) -> tuple[InputFile, ...]:
        """Those of all parts that have files."""
        found = [part.files for part in self._parts if isinstance(part, FileSource | ConcatSource)]
        return tuple(file for files in found for file in files)

    def describe(self) -> dict[str, JSON]:
        parts: list[JSON] = [part.describe() for part in self._parts]
        return {"kind": "concat", "name": self._name, "parts": parts}

    def stamp(self) -> JSON:
        return [stamp_of(part) for part in self._parts]

    def size_hint(self) -> int | None:
        sizes = [part.size_hint() for part in self._parts]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def bytes_before(self, cursor: Cursor) -> int:
        """About how many bytes of `size_hint` lie before a cursor; of a part that cannot tell it,
        all of it."""
        first, inner = self._locate(cursor)
        before = sum(part.size_hint() or 0 for part in self._parts[:first])
        part = self._parts[first]
        if inner is None or not isinstance(part, FileSource | ConcatSource):
            return before + (part.size_hint() or 0)
        return before + part.bytes_before(inner)

    def limited(self, num_bytes: int) -> ConcatSource:
        """The same of parts that refuse a document over `num_bytes`."""
        return ConcatSource([limited(part, num_bytes) for part in self._parts], name=self._name)

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        first, inner = self._locate(cursor)
        return self._read(first, inner)

    def divide(self, at_least: int) -> Sequence[Source]:
        """The pieces of the parts, in order; a part that cannot be divided is one piece. Each part
        is asked for its coarsest pieces, then for its share, then for all."""
        check_at_least(at_least)
        share = -(-at_least // len(self._parts))
        pieces: list[Source] = []
        for wanted in (1, share, at_least):
            pieces = [piece for part in self._parts for piece in _pieces_of(part, wanted)]
            if len(pieces) >= at_least:
                break
        return pieces

    def cut(self, num_bytes: int) -> Sequence[Source]:
        """The pieces of the parts, in order; small parts together."""
        check_num_bytes(num_bytes)
        pieces = [
            part.cut(num_bytes) if isinstance(part, CuttableSource) else (part,)
            for part in self._parts
        ]
        sizes = [part.size_hint() for part in self._parts]
        return join_small(pieces, sizes, num_bytes, name=self._name)

    def _locate(self, cursor: Cursor | None) -> tuple[int, Cursor | None]:
        if cursor is None:
            return 0, None
        part, inner = fields_of(cursor, ("part", "cursor"), self._name)
        (first,) = counts_of({"part": part}, ("part",), self._name)
        if first >= len(self._parts) or not isinstance(inner, dict):
            raise SourceError(
                f"source {self._name!r}: the cursor stands in part {first} with {inner!r:.80}, but "
                f"there are {len(self._parts)} parts; resume with the sources it came from"
            )
        return first, inner

    def _read(self, first: int, inner: Cursor | None) -> Iterator[TextBatch]:
        for number in range(first, len(self._parts)):
            for batch in self._parts[number].batches(inner):
                yield replace(batch, cursor={"part": number, "cursor": batch.cursor})
            inner = None


def _pieces_of(part: Source, at_least: int) -> Sequence[Source]:
    return part.divide(at_least) if isinstance(part, DividedSource) else (part,)


def join_small(
    pieces: Sequence[Sequence[Source]], sizes: Sequence[int | None], num_bytes: int, *, name: str
) -> list[Source]:
    """The pieces of each part, in order; parts that are one piece together while they fit."""
    alone = [size if len(cut) == 1 else None for cut, size in zip(pieces, sizes, strict=True)]
    joined: list[Source] = []
    for start, stop in runs(alone, num_bytes):
        found = [piece for cut in pieces[start:stop] for piece in cut]
        if stop - start > 1:
            found = [ConcatSource(found, name=f"{name}/parts {start} to {stop - 1}")]
        joined += found
    return joined
