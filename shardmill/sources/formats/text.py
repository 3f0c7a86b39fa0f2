"""Plain text files as documents.

In: `.txt` and `.md` files (or any file named outright).  Out: one document per file, or per line.
Promise: a whole file is one document, whatever its size, up to the limits. With `split="line"`
every line that is not empty is a document: only LF and CR LF end a line, blank lines are not read
as documents, and neither its end nor the file's BOM belongs to a line. UTF-8 is assumed; see
`clean`.
Not here: markup. Markdown is read as it stands.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pyarrow as pa

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, TextBatch
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, counts_of, name_of, too_large
from shardmill.sources.cleaning import clean
from shardmill.sources.file_source import FileSource, WholeFiles
from shardmill.sources.formats.lines import LineBlock, LinesOfFiles
from shardmill.storage.files import InputFile, Where, list_files, open_file

logger = logging.getLogger(__name__)

TEXT_SUFFIXES = (".txt", ".md")
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class TextSource(FileSource):
    """Text files, each one document, or each line one document."""

    def __init__(
        self,
        where: Where,
        *,
        split: Literal["line"] | None = None,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        if split not in (None, "line"):
            raise OptionError(f"split={split!r}: wanted None (a file is a document) or 'line'")
        files = list_files(where, suffixes=TEXT_SUFFIXES)
        reader = _LineReader(limits) if split == "line" else _WholeReader(limits)
        super().__init__(files, reader, name=name or name_of(where), limits=limits)


class _WholeReader(WholeFiles):
    """A file is a document; its position is the number of documents read: 0 or 1."""

    kind = "text"

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits

    def with_limits(self, limits: BatchLimits) -> _WholeReader:
        return _WholeReader(limits)

    def options(self) -> dict[str, JSON]:
        return {"split": None}

    def size_hint(self, file: InputFile) -> int:
        return file.num_bytes

    def bytes_before(self, file: InputFile, position: JSON) -> int:
        return file.num_bytes * counts_of(position, ("documents",), file.name)[0]

    def read(self, file: InputFile, position: JSON) -> Iterator[TextBatch]:
        if position is not None and counts_of(position, ("documents",), file.name)[0]:
            return
        most = self._limits.most_bytes
        if most is not None and file.num_bytes > most:
            found = f"a document of {file.num_bytes:,} bytes (a text file is one document)"
            raise too_large(str(file.place), found, most)
        with open_file(file) as stream:
            data = bytes(stream.read())
        if len(data) != file.num_bytes:
            raise SourceError(f"{file.place}: changed while it was read; start anew")
        if data.startswith(_UTF16_MARKS):
            logger.warning("%s begins like UTF-16; it is read as UTF-8 with losses", file.place)
        cleaned = clean(pa.array([data], pa.large_binary()))
        yield TextBatch(
            texts=cleaned.texts, num_read=1, counts=cleaned.counts, cursor={"documents": 1}
        )


class _LineReader(LinesOfFiles):
    """A line is a document."""

    kind = "text"

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits

    def options(self) -> dict[str, JSON]:
        return {"split": "line", **self._range_options()}

    def read(self, file: InputFile, position: JSON) -> Iterator[TextBatch]:
        for block in self._blocks(file, position):
            texts = lines_to_arrow(block)
            if len(texts) == 0:
                continue
            cleaned = clean(texts)
            yield TextBatch(
                texts=cleaned.texts,
                num_read=len(texts),
                counts=cleaned.counts,
                cursor=self._position(block),
            )


def lines_to_arrow(block: LineBlock) -> pa.LargeBinaryArray:
    """Every line that is not empty, without its end.

    Newlines are taken out of the bytes, so line `i` ends `i + 1` bytes earlier:
    b"ab\\n\\nc\\n", stops [3 4 6] -> b"abc", stops [2 2 3]; the second is empty and goes.
    """
    data, stops = block.data, block.stops
    if b"\r\n" in data:
        ends = np.frombuffer(data, np.uint8)
        before = np.maximum(stops - 2, 0)
        returns = (stops >= 2) & (ends[stops - 1] == 10) & (ends[before] == 13)
        data = data.replace(b"\r\n", b"\n")
        stops = stops - np.cumsum(returns)
    bare = data.replace(b"\n", b"")
    missing = np.arange(1, len(stops) + 1)
    if not data.endswith(b"\n"):
        missing[-1] -= 1
    edges = np.concatenate(([0], stops - missing)).astype(np.int64)
    edges = edges[np.concatenate(([True], np.diff(edges) > 0))]
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(edges) - 1, [None, pa.py_buffer(edges), pa.py_buffer(bare)]
    )
