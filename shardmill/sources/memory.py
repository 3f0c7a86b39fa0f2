"""Documents that are already in the program.

In: strings, from anything that can be looped over or from a function that makes such a thing.
Out: `TextBatch`es; the cursor is the number of documents read.
Promise: what can be read twice resumes exactly; what cannot (a generator) is refused on the second
reading, never taken for empty.
Not here: an identity of the content. `describe` holds the name alone: the caller vouches that the
same name means the same documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
import pyarrow.compute as pc

from shardmill.errors import SourceError
from shardmill.records import JSON, Cursor, TextBatch
from shardmill.sources.batching import DEFAULT_LIMITS, BatchLimits, cut
from shardmill.sources.clean import clean, strings_to_arrow
from shardmill.sources.cursors import cursor_count

Texts = Iterable[str] | Callable[[], Iterable[str]]


class MemorySource:
    """Texts from a list, a generator, or a function that gives a fresh iterable at each call."""

    def __init__(
        self, texts: Texts, *, name: str = "memory", limits: BatchLimits = DEFAULT_LIMITS
    ) -> None:
        if isinstance(texts, str | bytes):
            raise SourceError(f"{name}: one {type(texts).__name__} is not a list of texts: [text]")
        self._texts = texts
        self._name = name
        self._limits = limits
        self._used_up = False

    def __repr__(self) -> str:
        return f"MemorySource({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    def describe(self) -> dict[str, JSON]:
        return {"kind": "memory", "name": self._name}

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        start = cursor_count(cursor, "documents", self._name)
        return self._read(self._fresh(start), start)

    def _fresh(self, start: int) -> Iterator[str]:
        texts = self._texts() if callable(self._texts) else self._texts
        iterator = iter(texts)
        if iterator is texts and not callable(self._texts):
            if start or self._used_up:
                raise SourceError(
                    f"source {self._name!r} is a {type(texts).__name__} that can be read only "
                    f"once, and reading from document {start:,} was asked for"
                    f"{' after an earlier reading' if self._used_up else ''}; "
                    "pass a list, or a function that makes it anew"
                )
            self._used_up = True
        skipped = sum(1 for _ in islice(iterator, start))
        if skipped < start:
            raise SourceError(
                f"source {self._name!r}: the cursor stands after {start:,} documents, but there "
                f"are only {skipped:,}; resume with the texts the cursor came from"
            )
        return iterator

    def _read(self, iterator: Iterator[str], start: int) -> Iterator[TextBatch]:
        while chunk := self._chunk(iterator, start):
            array, repaired = strings_to_arrow(chunk)
            lengths = pc.binary_length(array).to_numpy(zero_copy_only=False)
            for first, stop in cut(lengths.astype(np.int64), self._limits):
                part = None if repaired is None else repaired[first:stop]
                cleaned = clean(array.slice(first, stop - first), repaired=part)
                yield TextBatch(
                    texts=cleaned.texts,
                    num_read=stop - first,
                    counts=cleaned.counts,
                    cursor={"documents": start + stop},
                )
            start += len(chunk)

    def _chunk(self, iterator: Iterator[str], start: int) -> list[str]:
        """The next texts, about one batch of them (characters stand for bytes here)."""
        chunk: list[str] = []
        num_characters = 0
        for text in iterator:
            if not isinstance(text, str):
                raise SourceError(
                    f"source {self._name!r}, document {start + len(chunk):,} (from 0): "
                    f"found {type(text).__name__} {text!r:.60}, wanted str"
                )
            chunk.append(text)
            num_characters += len(text)
            if num_characters >= self._limits.num_bytes or len(chunk) >= self._limits.num_documents:
                break
        return chunk
