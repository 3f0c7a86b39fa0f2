"""Plain text files: each file is one document, or with `split="line"` each line that is not empty.

UTF-8 is assumed; see `batches`. Markdown is read as plain text. Only LF and CR LF end a line, and
neither the line's end nor the file's BOM belongs to a document.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pyarrow as pa

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, TextBatch
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, counts_of, make_batch, too_large
from shardmill.sources.formats.lines import LineBlock, LineFormat
from shardmill.sources.source import FileSource, Format, RowLocation
from shardmill.storage.files import InputFile, Where, open_file

logger = logging.getLogger(__name__)

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class TextFormat(Format):
    """A file is a document. A position is the number of documents read: 0 or 1."""

    kind = "text"
    endings = (".txt", ".md")

    def options(self) -> dict[str, JSON]:
        return {"split": None}

    def read(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[TextBatch]:
        if position is not None and counts_of(position, ("documents",), file.name)[0]:
            return
        most = limits.most_bytes
        if most is not None and file.num_bytes > most:
            found = f"a document of {file.num_bytes:,} bytes (a text file is one document)"
            raise too_large(str(file.place), found, most)
        with open_file(file) as stream:
            data = bytes(stream.read())
        if len(data) != file.num_bytes:
            raise SourceError(f"{file.place}: changed while it was read; start over")
        if data.startswith(_UTF16_MARKS):
            logger.warning("%s begins like UTF-16; it is read as UTF-8 with losses", file.place)
        yield make_batch(pa.array([data], pa.large_binary()), {"documents": 1})

    def locate(
        self, file: InputFile, _before: JSON, _after: JSON, _rows_before: int | None, /
    ) -> RowLocation:
        return RowLocation(id=file.name, file=file.name)


class TextLineFormat(LineFormat):
    """A line is a document."""

    kind = TextFormat.kind
    endings = TextFormat.endings

    def options(self) -> dict[str, JSON]:
        return {"split": "line", **super().options()}

    def read(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[TextBatch]:
        for block in self.blocks(file, position, limits):
            texts = _lines_to_arrow(block)
            if len(texts):
                yield make_batch(texts, self.position_after(block))


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
            raise OptionError("{split}: wanted None (a file is a document) or 'line'", split=split)
        format = TextLineFormat() if split == "line" else TextFormat()
        super().__init__(where, format, name=name, limits=limits)


def _lines_to_arrow(block: LineBlock) -> pa.LargeBinaryArray:
    """Every line that is not empty, without its end.

    Newlines are removed from the bytes, so line `i` ends `i + 1` bytes earlier:
    b"ab\\n\\nc\\n", stops [3 4 6] -> b"abc", stops [2 2 3]; the second is empty and left out.
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
