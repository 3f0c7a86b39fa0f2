"""Whole lines of a file, plain or compressed, and ranges of bytes that own whole lines.

Blocks joined are exactly the rest of the decompressed file. A line longer than a block arrives
whole, or is refused before it is read to its end when the limits forbid it. A damaged or truncated
compressed file is an error, never a short file. Memory is about two blocks, or the longest allowed
line. A line belongs to the range that its first byte is in, so ranges that touch share no line and
lose none. A compressed file can only be read from its start, so it has no ranges.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pyarrow as pa

from shardmill.errors import SourceError
from shardmill.records import JSON, Cursor, OffsetArray
from shardmill.sources.batches import BOM_BYTES, BatchLimits, counts_of, cut, too_large
from shardmill.sources.source import Format, RowLocation
from shardmill.storage.files import InputFile, open_file

_NEWLINE = 10
_LONG_LINE = 500  # bytes; from here on jumping is quicker than looking at every byte
_LOOK = 2**16  # bytes that show whether lines are long
_COUNT_BYTES = 2**20
_CODECS = {"gz": "gzip", "tgz": "gzip", "zst": "zstd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LineBlock:
    """Whole lines. A BOM at the start of the file is not in `data`, but `end` counts it."""

    data: bytes
    stops: OffsetArray  # (n,) where each line ends in `data`, after its newline if it has one
    first_line: int  # lines of the file or range before this block
    end: int  # bytes of the (decompressed) file up to the end of this block

    def lines(self) -> Iterator[bytes]:
        """Each line, with its newline."""
        start = 0
        for stop in self.stops.tolist():
            yield self.data[start:stop]
            start = stop


class TextLength:
    """Bytes of an unfinished line. For JSON: the fewest that its text can have.

    A prefix never measures more than the whole line, so a line is refused or not wherever the
    chunks end: an escape counts once it is complete, and no escape decodes to less than one byte.
    """

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._num_bytes = 0
        self._rest = b""  # a backslash whose escape is in the next piece

    def add(self, piece: bytes) -> int:
        """The length so far."""
        if self._is_json and (self._rest or b"\\" in piece):
            # \\ is one byte; of what is left \n is one byte and \u0041 at least one.
            piece = (self._rest + piece).replace(b"\\\\", b"_")
            self._rest = b"\\" if piece.endswith(b"\\") else b""
            self._num_bytes -= piece.count(b"\\") + 4 * piece.count(b"\\u")
        self._num_bytes += len(piece)
        return self._num_bytes


def _bounded(
    chunks: Iterator[bytes], start: int, most: int, file: InputFile, *, is_json: bool
) -> Iterator[bytes]:
    """The chunks, until a line is too long. A chunk has fewer bytes than a line may have, so only
    lines that cross from one chunk into the next are measured."""
    begin, length = start, TextLength(is_json=is_json)
    for chunk in chunks:
        end = chunk.find(b"\n") + 1
        if length.add(chunk[: end or None]) > most:
            found = "a line of {:,} bytes" if end else "{:,} bytes and no end of the line"
            where = f"{file.place}, line {count_lines(file, begin) + 1:,} (byte {begin:,})"
            raise too_large(where, found.format(start + (end or len(chunk)) - begin), most)
        if end:
            last = chunk.rfind(b"\n") + 1
            begin, length = start + last, TextLength(is_json=is_json)
            length.add(chunk[last:])
        start += len(chunk)
        yield chunk


def count_lines(file: InputFile, stop: int) -> int:
    """Lines that end before byte `stop` of the (decompressed) file. Reads them all."""
    return sum(chunk.count(b"\n") for chunk in between(file, 0, stop, _COUNT_BYTES))


def _cut_block(
    data: bytes, start: int, first_line: int, limits: BatchLimits
) -> Iterator[LineBlock]:
    """Pieces of `data` within the limits; `start` is where `data` begins in the file."""
    stops = _line_stops(data)
    if len(stops) == 0 or stops[-1] < len(data):
        stops = np.append(stops, len(data))
    edges = np.concatenate(([0], stops)).astype(np.int64)
    for first, last in cut(np.diff(edges), limits):
        begin, end = int(edges[first]), int(edges[last])
        marked = start + begin == 0 and data.startswith(BOM_BYTES)
        skipped = len(BOM_BYTES) if marked else 0
        yield LineBlock(
            data=data[begin + skipped : end],
            stops=edges[first + 1 : last + 1] - begin - skipped,
            first_line=first_line + first,
            end=start + end,
        )


def _line_stops(data: bytes) -> OffsetArray:
    """The offset after each newline. Few long lines are found by jumping from one to the next."""
    start = data[:_LOOK]
    if start.count(b"\n") * _LONG_LINE > len(start):
        return np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
    stops: list[int] = []
    stop = 0
    while stop := data.find(b"\n", stop) + 1:
        stops.append(stop)
    return np.array(stops, np.int64)


def _whole_lines(chunks: Iterator[bytes], start: int, cell: int) -> Iterator[bytes]:
    """Blocks of whole lines, each up to the line that reaches the next multiple of `cell`.

    So where a block ends depends on where it starts and on the file, not on where reading began.
    """
    pending: list[bytes | memoryview] = []
    num_pending = 0
    for chunk in chunks:
        rest = chunk
        while True:
            missing = cell - start % cell - num_pending
            end = rest.find(b"\n", max(missing - 1, 0)) + 1 if len(rest) >= missing else 0
            if not end:
                break
            block = b"".join((*pending, memoryview(rest)[:end]))
            start += num_pending + end
            rest = rest[end:]
            pending, num_pending = [], 0  # before the block is used: it may be large
            yield block
            del block
        pending.append(rest)
        num_pending += len(rest)
    last = b"".join(pending)
    if last:
        yield last


def _up_to_line_end(chunks: Iterator[bytes], start: int, stop: int) -> Iterator[bytes]:
    """Up to the end of the line that byte `stop - 1` is in."""
    for chunk in chunks:
        last = stop - 1 - start
        end = chunk.find(b"\n", max(last, 0)) + 1 if last < len(chunk) else 0
        if end:
            yield chunk[:end]
            return
        yield chunk
        start += len(chunk)


def codec_of(file: InputFile) -> str | None:
    """How a file is compressed, by the ending of its name; None: not at all."""
    return _CODECS.get(file.name.lower().rpartition(".")[2])


def read_chunks(
    file: InputFile, start: int, size: int, stop: int | None = None
) -> Generator[bytes, None, None]:
    """The decompressed bytes from `start` on, in pieces of about `size`. They continue after
    `stop`, but a file on object storage is fetched ahead only up to it."""
    codec = codec_of(file)
    if codec is None and start > file.num_bytes:
        raise _past_the_end(file, start, file.num_bytes)
    with ExitStack() as stack:
        opened = open_file(file, start, stop) if codec is None else open_file(file)
        stream: Any = stack.enter_context(opened)
        if codec is not None:
            stream = stack.enter_context(_unpacked(file, stream, codec))
            left = start  # decompression cannot seek
            while left:
                skipped = len(stream.read(min(left, _COUNT_BYTES)))
                if not skipped:
                    raise _past_the_end(file, start, start - left)
                left -= skipped
        while True:
            # Up to `stop`, and after it in small steps to the end of a line.
            wanted = size if stop is None else max(stop - start, 0) or _LOOK
            chunk = stream.read(min(size, wanted))
            if not chunk:
                return
            yield bytes(chunk)  # of a local file it is bytes already
            start += len(chunk)


class ChunkStream(io.RawIOBase):
    """`read_chunks` as a file that is read once, from the start to the end."""

    def __init__(self, file: InputFile, start: int = 0, size: int = _COUNT_BYTES) -> None:
        super().__init__()
        self._chunks = read_chunks(file, start, size)
        self._rest = memoryview(b"")
        self.position = start  # of the decompressed file
        self.tail = b""  # the last bytes that were read, at most 8

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer at the end of the file; -1: all."""
        found: list[memoryview] = []
        missing = sys.maxsize if size < 0 else size
        while missing:
            if not self._rest:
                self._rest = memoryview(next(self._chunks, b""))
                if not self._rest:
                    break
            found.append(self._rest[:missing])
            self._rest = self._rest[missing:]
            missing -= len(found[-1])
        data = b"".join(found)
        self.position += len(data)
        self.tail = (self.tail + data[-8:])[-8:]
        return data

    def skip(self, size: int) -> int:
        """Pass so many bytes; how many there were."""
        left = size
        while left and (step := len(self.read(min(left, _COUNT_BYTES)))):
            left -= step
        return size - left

    def close(self) -> None:
        self._chunks.close()
        super().close()


@contextmanager
def _unpacked(file: InputFile, raw: Any, codec: str) -> Iterator[Any]:
    """The decompressed bytes of an open file."""
    try:
        if file.num_bytes == 0:  # which decompressors take for a regular end
            raise EOFError("the file has 0 bytes, but even no data compresses to more")
        opened: Any
        if codec == "gzip":  # by Python, which accepts zeros after the end as tape tools leave them
            opened = gzip.GzipFile(fileobj=raw)
        else:
            opened = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)
        with opened as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and (
            error.errno or type(error) not in (OSError, gzip.BadGzipFile)
        ):  # not of a decompressor
            raise
        if "too much memory" in str(error):
            raise SourceError(
                f"{file.place}: compressed with a window of more than 128 MiB (zstd --long), which "
                "takes that much memory to read; compress it again without --long"
            ) from error
        raise SourceError(
            f"{file.place}: the compressed data is damaged or truncated, or no {codec} ({error}); "
            "fetch or write the file again"
        ) from error


def between(file: InputFile, start: int, stop: int, size: int = _LOOK) -> Iterator[bytes]:
    """The decompressed bytes `start..stop`, in pieces of about `size`."""
    if start >= stop:
        return
    with closing(read_chunks(file, start, size, stop)) as chunks:
        for chunk in chunks:
            yield chunk[: stop - start]
            start += len(chunk)
            if start >= stop:
                return


def stored_before(file: InputFile, codec: str, num_bytes: int) -> int:
    """About how many bytes of a compressed file hold its first `num_bytes`; decompresses them."""
    with open_file(file) as raw:
        few = SimpleNamespace(
            read=lambda size: raw.read(min(size, _LOOK // 16)), close=raw.close, closed=False
        )
        with _unpacked(file, few, codec) as stream:
            while num_bytes > 0 and (chunk := stream.read(min(num_bytes, _COUNT_BYTES))):
                num_bytes -= len(chunk)
            return raw.tell()


def _past_the_end(file: InputFile, start: int, size: int) -> SourceError:
    return SourceError(
        f"{file.place}: the cursor is at byte {start:,}, but there are only {size:,}; "
        "resume with the input the cursor came from"
    )


class ByteRange(NamedTuple):
    """Half-open; the first of a file begins at 0, the last stops at the end of the file."""

    start: int
    stop: int

    def first_line_in(self, file: InputFile) -> int:
        """Where the first line begins that begins in the range; its stop when none does."""
        if self.start == 0:
            return 0
        # The newline before a line may be the byte before the range; one on the last byte of the
        # range begins a line after it.
        offset = self.start - 1
        for chunk in between(file, offset, self.stop - 1):
            found = chunk.find(b"\n")
            if found >= 0:
                return offset + found + 1
            offset += len(chunk)
        return self.stop


@dataclass(frozen=True, kw_only=True)
class LineFormat(Format):
    """A format of lines. A position is the bytes and lines read of the decompressed file; in a
    range the lines are counted from its own first line, and the range is named too."""

    _is_json: ClassVar[bool] = False  # whether a line may hold its text escaped

    range: ByteRange | None = None

    @property
    def range_name(self) -> str:
        return "" if self.range is None else f":bytes {self.range.start}-{self.range.stop}"

    @property
    def continues(self) -> bool:
        return self.range is not None and self.range.start > 0

    def rows_before(self, file: InputFile, /) -> int:
        return 0 if self.range is None else count_lines(file, self.range.first_line_in(file))

    def options(self) -> dict[str, JSON]:
        return {} if self.range is None else {"bytes": list(self.range)}

    def size_hint(self, file: InputFile) -> int:
        return file.num_bytes if self.range is None else self.range.stop - self.range.start

    def bytes_before(self, file: InputFile, position: JSON, /) -> int:
        done, _ = self._counts(file, position)
        if self.range is not None:
            return done - self.range.start
        codec = codec_of(file)
        return done if codec is None else stored_before(file, codec, done)

    def split(self, file: InputFile, num_bytes: int | None, /) -> Sequence[Self]:
        """Ranges of about one size, of a plain file that is larger than `num_bytes`."""
        num_ranges = 1 if num_bytes is None else -(-file.num_bytes // num_bytes)
        if self.range is not None or num_ranges < 2 or codec_of(file):
            return (self,)
        return _Ranges(self, file.num_bytes, num_ranges, range(num_ranges))

    def blocks(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[LineBlock]:
        """Blocks of the file's or the range's lines, from `position` on (None: the first).

        A line may have `limits.most_input()` bytes, its end included; of JSON an escape such as
        \\u0041 counts as the one byte of text that it may be.
        """
        start, line = self._counts(file, position)
        stop = None if self.range is None else self.range.stop
        if stop is not None and start >= stop:
            return
        for data in self._whole_lines(file, start, limits, stop):
            for block in _cut_block(data, start, line, limits):
                start = block.end
                line += len(block.stops)
                yield block

    def _whole_lines(
        self, file: InputFile, start: int, limits: BatchLimits, stop: int | None
    ) -> Iterator[bytes]:
        """Whole lines from byte `start` on, up to the line that byte `stop - 1` is in. Where these
        pieces end depends on the file and not on where reading began."""
        most = limits.most_input()
        # A little under the limit, so that a block with its last line usually is one batch.
        cell = limits.num_bytes - limits.num_bytes // 16
        with closing(read_chunks(file, start, max(cell // 8, 1), stop)) as chunks:
            wanted: Iterator[bytes] = chunks
            if stop is not None:
                wanted = _up_to_line_end(chunks, start, stop)
            if most is not None:
                wanted = _bounded(wanted, start, most, file, is_json=self._is_json)
            yield from _whole_lines(wanted, start, cell)

    def position_after(self, block: LineBlock) -> Cursor:
        return self.position_at(block.end, block.first_line + len(block.stops))

    def position_at(self, num_bytes: int, num_lines: int) -> Cursor:
        position: Cursor = {"bytes": num_bytes, "lines": num_lines}
        if self.range is not None:
            position |= {"start": self.range.start, "stop": self.range.stop}
        return position

    def locate(
        self, file: InputFile, before: JSON, after: JSON, rows_before: int | None, /
    ) -> RowLocation:
        start, _ = self._counts(file, before)
        stop, line = self._counts(file, after)
        if self.range is not None:
            line += self.rows_before(file) if rows_before is None else rows_before
        # The last line of these bytes; blank ones may be before it.
        last = b"".join(between(file, start, stop)).strip().rpartition(b"\n")[2]
        own_id = self._own_id(last)
        return RowLocation(id=f"{file.name}:{line}", file=file.name, row=line, own_id=own_id)

    def _own_id(self, _line: bytes, /) -> str | None:
        """What a line calls itself; a line of plain text has no id."""
        return None

    def _counts(self, file: InputFile, position: JSON) -> tuple[int, int]:
        """Bytes before a position (None: the first line), and lines of the file or range."""
        if position is None:
            return (0 if self.range is None else self.range.first_line_in(file)), 0
        if self.range is None:
            start, line = counts_of(position, ("bytes", "lines"), file.name)
            return start, line
        keys = ("bytes", "lines", "start", "stop")
        start, line, *named = counts_of(position, keys, file.name)
        if named != list(self.range) or start < self.range.start:
            raise SourceError(
                f"{file.place}: the cursor {position!r:.200} is of another range than bytes "
                f"{self.range.start:,} to {self.range.stop:,}; resume with the piece the cursor "
                "came from"
            )
        return start, line


@dataclass(frozen=True, slots=True)
class _Ranges(Sequence[Any]):
    """Formats of the ranges of a file, each made when it is asked for."""

    format: LineFormat
    num_bytes: int
    num_ranges: int
    numbers: range  # those that are here

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return replace(self, numbers=self.numbers[index])
        number = self.numbers[index]
        start, stop = (n * self.num_bytes // self.num_ranges for n in (number, number + 1))
        return replace(self.format, range=ByteRange(start, stop))
