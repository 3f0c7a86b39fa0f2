"""Shuffle a source through a buffer, with torch's generator alone.

The order is a pure function of the input's order, the seed and the buffer size. Resuming is exact:
the stream is drawn again from its start and what was given before is skipped, which costs reading
but never tokenising. Memory holds one buffer of documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import torch

from niels_gpt.seeds import seeded
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source
from shardmill.records import JSON, Cursor, Drop, TextBatch
from shardmill.sources import limited, stamp_of


class ShuffledSource:
    """The documents of `source`, each drawn at random from a buffer of the next `buffer_size`."""

    def __init__(self, source: Source, *, seed: int, buffer_size: int) -> None:
        if buffer_size < 1:
            raise OptionError(f"shuffle buffer {buffer_size}: wanted at least 1 document, or None")
        seeded(seed)  # an invalid one is refused before any work
        self._source, self._seed, self._buffer_size = source, seed, buffer_size

    @property
    def name(self) -> str:
        return self._source.name

    def describe(self) -> dict[str, JSON]:
        shuffle: dict[str, JSON] = {
            "rng": "torch.Generator",
            "seed": self._seed,
            "buffer_size": self._buffer_size,
        }
        return {**self._source.describe(), "shuffle": shuffle}

    def stamp(self) -> JSON:
        return stamp_of(self._source)

    def size_hint(self) -> int | None:
        return self._source.size_hint()

    def limited(self, num_bytes: int) -> ShuffledSource:
        """The same over a source that refuses a document over `num_bytes`."""
        source = limited(self._source, num_bytes)
        return ShuffledSource(source, seed=self._seed, buffer_size=self._buffer_size)

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        given = Counter() if cursor is None else _read_cursor(cursor, self.name)
        skip = Counter(given)
        for texts, counts, drops in self._draws():
            texts = texts[_take(skip, "documents", len(texts)) :]
            drops = drops[_take(skip, "drops", len(drops)) :]
            left = {
                key: count - _take(skip, f"count.{key}", count) for key, count in counts.items()
            }
            num_read = len(texts) + left.get("empty", 0) + len(drops)
            if not num_read and not any(left.values()):
                continue
            given["documents"] += len(texts)
            given["drops"] += len(drops)
            given.update({f"count.{key}": count for key, count in left.items()})
            yield TextBatch(
                texts=pa.array(texts, pa.large_string()),
                num_read=num_read,
                counts=left,
                drops=drops,
                cursor=dict(given),
            )
        if sum(skip.values()):
            raise SourceError(
                f"source {self.name!r}: the cursor is past its end (missing: "
                f"{dict(+skip)}); resume with the input the cursor came from"
            )

    def _draws(self) -> Iterator[tuple[list[str], dict[str, int], tuple[Drop, ...]]]:
        """What each batch of the inner source pushes out of the buffer; at last, the buffer."""
        generator = seeded(self._seed)
        buffer: list[str] = []
        for batch in self._source.batches():
            incoming = batch.texts.to_pylist()
            room = self._buffer_size - len(buffer)
            buffer += incoming[:room]
            out = incoming[room:]
            places = torch.randint(self._buffer_size, (len(out),), generator=generator).tolist()
            for index, place in enumerate(places):
                out[index], buffer[place] = buffer[place], out[index]
            yield out, dict(batch.counts), batch.drops
        order = torch.randperm(len(buffer), generator=generator).tolist()
        yield [buffer[place] for place in order], {}, ()


def _take(skip: Counter[str], key: str, amount: int) -> int:
    """How much of `amount` was given before; that much less is left to skip."""
    taken = min(skip[key], amount)
    skip[key] -= taken
    return taken


def _read_cursor(cursor: Cursor, name: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for key, value in cursor.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise SourceError(f"source {name!r}: {key!r} in the cursor {cursor!r:.200} is no count")
        counts[key] = value
    return counts


__all__ = ["ShuffledSource"]
