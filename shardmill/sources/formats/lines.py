"""Bytes of a file in whole lines, plain or compressed.

In: a file and how much of it was read before.  Out: blocks that end at a line's end.
Promise: the blocks joined are exactly the rest of the (decompressed) file, or of its lines that
begin before `stop`; only the very last may lack its newline; a line longer than a block arrives
whole, or is refused when it is longer than the limits allow, before it is read to its end; a
compressed file that breaks off, is damaged or has no bytes is an error, never a short file. Memory:
about two blocks, or the longest line that is allowed, whatever a file unpacks to.
Not here: what a line means; which lines are wanted (`lineranges`).

Ranges of a plain file's bytes that own whole lines.

In: a file, and a range [start, stop) of its bytes.  Out: the lines whose first byte lies in it.
Promise: ranges that touch share no line and lose none, wherever their edges fall: a line belongs to
the range it begins in, and a range in the middle of a long line owns nothing. Reading looks at
nothing before `start - 1`, and at nothing behind the last line. Lines are counted from the first
line of the range; how many lie before it takes reading them, which only an error asks for.
Not here: what a line means. A compressed file is read from its start, so it has no ranges.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import zstandard

from shardmill.errors import SourceError
from shardmill.records import JSON, Cursor, OffsetArray
from shardmill.sources.batches import BatchLimits, counts_of, cut, too_large
from shardmill.sources.cleaning import BOM_BYTES
from shardmill.storage.files import InputFile, open_file

_NEWLINE = 10
_LONG_LINE = 500  # bytes; from here on jumping is quicker than looking at every byte
_LOOK = 2**16  # bytes that show whether lines are long
_COMPRESSED_CHUNK = 256 * 2**10
_ZSTD_PIECE = 2**10  # unpacked at a time: four bytes can become 128 KiB, so to 32 MiB at most
_COUNT_BYTES = 2**20
_COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineBlock:
    """Whole lines. The BOM of a file's first line is not in `data`, but in the counts."""

    data: bytes
    stops: OffsetArray  # (n,) where each line ends in `data`, behind its newline if it has one
    first_line: int  # lines of the file before this block
    end: int  # bytes of the (decompressed) file up to and with this block

    def lines(self) -> Iterator[bytes]:
        """Each line, with its newline."""
        start = 0
        for stop in self.stops.tolist():
            yield self.data[start:stop]
            start = stop


def line_blocks(
    file: InputFile,
    *,
    start: int,
    first_line: int,
    limits: BatchLimits,
    stop: int | None = None,
    is_json: bool = False,
) -> Iterator[LineBlock]:
    """Blocks within the limits, from byte `start` on, which must be the start of a line; of a plain
    file also up to the last line that begins before byte `stop`, which lies behind `start`.

    A line may have `limits.most_input()` bytes, its end included; with `is_json` an escape such as
    \\u0041 counts as the one byte of text that it may be.
    """
    most = limits.most_input()
    # A little under the limit, so that a block with its last line usually is one batch.
    cell = limits.num_bytes - limits.num_bytes // 16
    with closing(read_chunks(file, start, max(cell // 8, 1), stop)) as chunks:
        wanted = chunks if stop is None else _to_line_end(chunks, start, stop)
        if most is not None:
            wanted = _bounded(wanted, start, most, file, is_json=is_json)
        for data in _whole_lines(wanted, start, cell):
            for block in _cut_block(data, start, first_line, limits):
                _check_lines(block, most, file, is_json=is_json)
                start = block.end
                first_line += len(block.stops)
                yield block


class _Length:
    """Bytes of an unfinished line. Of JSON: the least that its text can have.

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
    """The chunks, until a line that has no end yet is too long."""
    begin, length = start, _Length(is_json=is_json)  # of the line that is open
    for chunk in chunks:
        newline = chunk.rfind(b"\n")
        if newline >= 0:
            begin, length = start + newline + 1, _Length(is_json=is_json)
        start += len(chunk)
        if length.add(chunk[newline + 1 :]) > most:
            raise _too_long(file, begin, f"{start - begin:,} bytes and no end of the line", most)
        yield chunk


def _check_lines(block: LineBlock, most: int | None, file: InputFile, *, is_json: bool) -> None:
    """The lines that are whole, to the byte."""
    if most is None or len(block.data) <= most:
        return
    edges = np.concatenate(([0], block.stops))
    for number in np.flatnonzero(np.diff(edges) > most).tolist():
        begin, end = int(edges[number]), int(edges[number + 1])
        length, found = _Length(is_json=is_json), 0
        for piece in range(begin, end, _COUNT_BYTES):
            found = length.add(block.data[piece : min(piece + _COUNT_BYTES, end)])
        if found > most:
            begin_of_block = block.end - len(block.data)
            words = f"a line of {end - begin:,} bytes"
            raise _too_long(file, begin_of_block + begin, words, most)


def _too_long(file: InputFile, begin: int, found: str, most: int) -> SourceError:
    number = count_lines(file, begin) + 1
    return too_large(f"{file.place}, line {number:,} (byte {begin:,})", found, most)


def count_lines(file: InputFile, stop: int) -> int:
    """Lines that end before byte `stop` of the (decompressed) file. Reads them all."""
    num_lines = 0
    with closing(read_chunks(file, 0, _COUNT_BYTES)) as chunks:
        for chunk in chunks:
            if stop <= 0:
                break
            num_lines += chunk.count(b"\n", 0, stop)
            stop -= len(chunk)
    return num_lines


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
    """The place behind each newline. Few long lines are found by jumping from one to the next."""
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


def _to_line_end(chunks: Iterator[bytes], start: int, stop: int) -> Iterator[bytes]:
    """Up to the end of the line that byte `stop - 1` is in."""
    for chunk in chunks:
        last = stop - 1 - start
        end = chunk.find(b"\n", max(last, 0)) + 1 if last < len(chunk) else 0
        if end:
            yield chunk[:end]
            return
        yield chunk
        start += len(chunk)


def is_compressed(file: InputFile) -> bool:
    """Whether the name says that the file must be decompressed, from its start."""
    return file.name.lower().endswith(_COMPRESSED)


def read_chunks(
    file: InputFile, start: int, size: int, stop: int | None = None
) -> Generator[bytes, None, None]:
    """The decompressed bytes from `start` on, in pieces of about `size`. They do not end at `stop`,
    but it is as far as a file on object storage is fetched ahead."""
    name = file.name.lower()
    try:
        if name.endswith(_COMPRESSED):
            if file.num_bytes == 0:
                # A decompressor takes this for a regular end.
                raise EOFError("the file has 0 bytes, but even an empty one compresses to more")
            with open_file(file) as raw:
                yield from _skip(_unpacked(raw, name, size), start, file)
        else:
            yield from _plain_chunks(file, start, size, stop)
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
        if "too much memory" in str(error):
            raise SourceError(
                f"{file.place}: compressed with a window of more than 128 MiB (zstd --long), which "
                "takes that much memory to read; compress it again without --long"
            ) from error
        raise SourceError(
            f"{file.place}: the compressed data is damaged or breaks off ({error}); "
            "fetch or write the file again"
        ) from error


def _plain_chunks(file: InputFile, start: int, size: int, stop: int | None) -> Iterator[bytes]:
    if start > file.num_bytes:
        raise _past_the_end(file, start, file.num_bytes)
    with open_file(file, start, stop) as stream:
        while chunk := stream.read(_step(start, size, stop)):
            yield bytes(chunk)  # of a local file it is bytes already
            start += len(chunk)


def _step(start: int, size: int, stop: int | None) -> int:
    """How much to read next: up to `stop`, and behind it in small steps to the end of a line."""
    if stop is None:
        return size
    return min(size, stop - start if start < stop else _LOOK)


def stored_before(file: InputFile, num_bytes: int) -> int:
    """About how many bytes of a compressed file hold its first `num_bytes`. Unpacks them."""
    unpacked = 0
    with open_file(file) as raw:
        for chunk in _unpacked(raw, file.name.lower(), _LOOK, step=_LOOK // 16):
            unpacked += len(chunk)
            if unpacked >= num_bytes:  # in steps; of the last one a part
                return raw.tell() * num_bytes // unpacked
    return file.num_bytes


def _unpacked(
    raw: io.RawIOBase, name: str, size: int, *, step: int = _COMPRESSED_CHUNK
) -> Iterator[bytes]:
    """The bytes in pieces of about `size`; zstd is read in steps of `step`."""
    return _gzip_chunks(raw, size) if name.endswith(".gz") else _zstd_chunks(raw, step)


def _gzip_chunks(raw: io.RawIOBase, size: int) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=raw) as stream:
        while chunk := stream.read(size):
            yield chunk


def _zstd_chunks(raw: io.RawIOBase, step: int) -> Iterator[bytes]:
    """Frame by frame, so that a frame that breaks off is seen: the stream reader of zstandard
    takes it for the end."""
    frame = None
    while data := memoryview(raw.read(step) or b""):
        start = 0
        while piece := data[start : start + _ZSTD_PIECE]:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if found := frame.decompress(piece):
                yield found
            start += len(piece)
            if frame.eof:
                start -= len(frame.unused_data)
                frame = None
    if frame is not None:
        raise EOFError("the last zstd frame is not complete")


def _skip(chunks: Iterator[bytes], start: int, file: InputFile) -> Iterator[bytes]:
    """Decompression cannot jump: read and forget what was read before."""
    left = start
    for chunk in chunks:
        if left < len(chunk):
            yield chunk[left:] if left else chunk
            left = 0
        else:
            left -= len(chunk)
    if left:
        raise _past_the_end(file, start, start - left)


def _past_the_end(file: InputFile, start: int, size: int) -> SourceError:
    return SourceError(
        f"{file.place}: the cursor stands at byte {start:,}, but there are only {size:,}; "
        "resume with the input the cursor came from"
    )


_LOOK_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class LineRange:
    """Half-open; the first begins at 0, and the last stops at the end of the file."""

    start: int
    stop: int


class LinesOfFiles:
    """For readers of lines: whole files, or one range of a file. The position is the bytes and
    lines read, of the decompressed file; in a range the lines are its own, and it is named."""

    _limits: BatchLimits
    _range: LineRange | None = None
    _is_json = False  # whether a line may hold its text escaped

    @property
    def part(self) -> str:
        return "" if self._range is None else f":bytes {self._range.start}-{self._range.stop}"

    @property
    def continues(self) -> bool:
        return self._range is not None and self._range.start > 0

    def size_hint(self, file: InputFile) -> int:
        return file.num_bytes if self._range is None else self._range.stop - self._range.start

    def bytes_before(self, file: InputFile, position: JSON) -> int:
        if self._range is not None:
            return _place_in(file, self._range, position)[0] - self._range.start
        done, _ = counts_of(position, ("bytes", "lines"), file.name)
        return stored_before(file, done) if is_compressed(file) else done

    def with_limits(self, limits: BatchLimits) -> Self:
        reader = copy(self)
        reader._limits = limits
        return reader

    def settled(self) -> Self:
        return self

    def divide(self, file: InputFile) -> Sequence[Self]:  # noqa: ARG002 - of any file
        return (self.settled(),)

    def cut(self, file: InputFile, num_bytes: int) -> Sequence[Self]:
        """One reader per range, all of about one size; the file whole when it is small enough."""
        reader = self.settled()
        num_ranges = -(-file.num_bytes // num_bytes)
        if self._range is not None or num_ranges < 2 or is_compressed(file):
            return (reader,)
        edges = [number * file.num_bytes // num_ranges for number in range(num_ranges + 1)]
        return [reader._limited(*edge) for edge in pairwise(edges)]

    def _limited(self, start: int, stop: int) -> Self:
        reader = copy(self)
        reader._range = LineRange(start, stop)
        return reader

    def _range_options(self) -> dict[str, JSON]:
        """For `options`: which documents a range gives."""
        return {} if self._range is None else {"bytes": [self._range.start, self._range.stop]}

    def _blocks(self, file: InputFile, position: JSON) -> Iterator[LineBlock]:
        owned = self._range
        if owned is not None:
            return range_blocks(file, owned, position, self._limits, is_json=self._is_json)
        start, line = 0, 0
        if position is not None:
            start, line = counts_of(position, ("bytes", "lines"), file.name)
        return line_blocks(
            file, start=start, first_line=line, limits=self._limits, is_json=self._is_json
        )

    def _position(self, block: LineBlock) -> Cursor:
        """Behind a block."""
        place: Cursor = {"bytes": block.end, "lines": block.first_line + len(block.stops)}
        if self._range is not None:
            place |= {"start": self._range.start, "stop": self._range.stop}
        return place

    def _lines_before(self, file: InputFile) -> int:
        """Lines of the file before the first that is read. Reads them all."""
        return 0 if self._range is None else lines_before(file, self._range)


def range_blocks(
    file: InputFile, owned: LineRange, position: JSON, limits: BatchLimits, *, is_json: bool
) -> Iterator[LineBlock]:
    """Blocks of the lines that a range owns, from `position` on (None: the first)."""
    if position is None:
        start, line = line_start(file, owned), 0
    else:
        start, line = _place_in(file, owned, position)
    if start is None or start >= owned.stop:
        return iter(())
    return line_blocks(
        file, start=start, first_line=line, limits=limits, stop=owned.stop, is_json=is_json
    )


def _place_in(file: InputFile, owned: LineRange, position: JSON) -> tuple[int, int]:
    keys = ("bytes", "lines", "start", "stop")
    start, line, *named = counts_of(position, keys, file.name)
    if named != [owned.start, owned.stop] or start < owned.start:
        raise SourceError(
            f"{file.place}: the cursor {position!r:.200} stands in another range than bytes "
            f"{owned.start:,} to {owned.stop:,}; resume with the piece the cursor came from"
        )
    return start, line


def line_start(file: InputFile, owned: LineRange) -> int | None:
    """Where the first line begins that begins in a range; None when none does."""
    if owned.start == 0:
        return 0
    place, last = owned.start - 1, owned.stop - 1
    with closing(read_chunks(file, place, _LOOK_BYTES, owned.stop)) as chunks:
        for chunk in chunks:
            # A newline on the last byte begins a line behind the range.
            found = chunk.find(b"\n", 0, last - place)
            if found >= 0:
                return place + found + 1
            place += len(chunk)
            if place >= last:
                break
    return None


def lines_before(file: InputFile, owned: LineRange) -> int:
    """Lines of the file before the first of a range that owns one."""
    return count_lines(file, line_start(file, owned) or 0)
