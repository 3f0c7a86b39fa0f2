"""Text files: each is one document, or many that `split` parts.

A line, the text between blank lines, or the text after each line that begins with a match of a
regular expression is a document; only LF and CR LF end a line, and neither the line's end nor the
file's BOM belongs to one. UTF-8 is assumed; see `batches`. A file that ends in neither .txt nor .md
may be anything: with a NUL byte in its first 8 KiB, or when it is not UTF-8, it is a drop,
`not_text`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from shardmill.errors import OptionError, SourceError
from shardmill.records import JSON, Drop, OffsetArray, TextBatch
from shardmill.sources.batches import (
    BOM_BYTES,
    DEFAULT_LIMITS,
    BatchLimits,
    byte_lengths,
    counts_of,
    cut,
    make_batch,
    too_large,
)
from shardmill.sources.formats.lines import (
    LineBlock,
    LineFormat,
    between,
    codec_of,
    read_chunks,
)
from shardmill.sources.source import FileSource, Format, RowLocation
from shardmill.storage.files import Endings, InputFile, Where, open_file, packed

logger = logging.getLogger(__name__)

PROSE_ENDINGS = (".txt", ".md")
"""Files that are read as text whatever is in them."""
_CODE = """
    .rst .tex .bib .adoc .org .html .htm .xhtml .xml .css .scss .less .yaml .yml .toml .ini .cfg
    .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .m .mm .rs .go .zig .d .nim .v .sv .vhd
    .js .mjs .cjs .jsx .ts .tsx .vue .svelte .java .kt .kts .scala .groovy .clj .cs .fs .vb .swift
    .dart .rb .php .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl .elm .lisp .el .scm .rkt
    .f .f90 .f95 .for .pas .ada .asm .s .sh .bash .zsh .fish .ps1 .bat .sql .proto .graphql .thrift
    .cmake .mk .gradle .tf .nix .sol .lean .coq .agda .sage .awk .vim .diff .patch .po .srt .vtt
"""
TEXT_ENDINGS = (*PROSE_ENDINGS, *_CODE.split())
"""Those, source code, markup and the like."""
SPLITS = ("line", "blank-line")
"""Words for `split`; anything else is a regular expression."""

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LOOK_BYTES = 8192  # of a file, for NUL bytes
_COPY_BYTES = 2**20
_MOST_PATTERN = 1000
_RETURN, _NEWLINE = b"\r\n"


def is_text(name: str, data: bytes) -> bool:
    """Whether a file or a member of an archive is read as text."""
    base = name.lower().removesuffix(".gz").removesuffix(".zst")
    if base.endswith(PROSE_ENDINGS):
        return True
    if b"\0" in data[:_LOOK_BYTES]:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class TextFormat(Format):
    """A file is a document. A position is the number of documents read: 0 or 1."""

    kind = "text"
    endings = tuple(one for ending in TEXT_ENDINGS for one in packed(ending))

    def options(self) -> dict[str, JSON]:
        return {"split": None}

    def read(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[TextBatch]:
        if position is not None and counts_of(position, ("documents",), file.name)[0]:
            return
        data = _whole_file(file, limits.most_bytes)
        texts: list[bytes | None] = [data if is_text(file.name, data) else None]
        drops = [] if texts[0] is not None else [Drop(id=file.name, reason="not_text")]
        if not drops and data.startswith(_UTF16_MARKS):
            logger.warning("%s begins like UTF-16; it is read as UTF-8 with losses", file.place)
        yield make_batch(pa.array(texts, pa.large_binary()), {"documents": 1}, drops=drops)

    def locate(
        self, file: InputFile, _before: JSON, _after: JSON, _rows_before: int | None, /
    ) -> RowLocation:
        return RowLocation(id=file.name, file=file.name)


def _whole_file(file: InputFile, most: int | None) -> bytes:
    """All bytes of a file, decompressed."""
    if codec_of(file) is not None:
        parts, size = [], 0
        with closing(read_chunks(file, 0, _COPY_BYTES)) as chunks:
            for chunk in chunks:
                parts.append(chunk)
                size += len(chunk)
                if most is not None and size > most:
                    found = f"more than {most:,} bytes when it is decompressed"
                    raise too_large(str(file.place), f"{found} (a text file is one document)", most)
        return b"".join(parts)
    if most is not None and file.num_bytes > most:
        found = f"a document of {file.num_bytes:,} bytes (a text file is one document)"
        raise too_large(str(file.place), found, most)
    with open_file(file) as stream:
        data = bytes(stream.read())
    if len(data) != file.num_bytes:
        raise SourceError(f"{file.place}: changed while it was read; start over")
    return data


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


class _Parting(NamedTuple):
    """The lines of some data that part documents."""

    lines: OffsetArray  # their numbers
    starts: OffsetArray  # where they begin
    texts: OffsetArray  # where the text after what matched begins


@dataclass(frozen=True, kw_only=True)
class TextPartsFormat(LineFormat):
    """A document begins at each parting line: a blank one, or one that begins with a match.

    What matched is left out, with its line's end where nothing else is in the line; but a match of
    an expression with a group is kept. A position is where a parting line begins. A document
    belongs to the range in which its parting line begins; only the file's start needs none. Arrow's
    RE2 matches, in linear time.
    """

    kind = TextFormat.kind
    endings = TextFormat.endings

    split_on: str
    keeps_match: bool = False

    @property
    def _pattern(self) -> str:
        return r"^[ \t]*$" if self.split_on == "blank-line" else f"^(?:{self.split_on})"

    def options(self) -> dict[str, JSON]:
        return {"split": self.split_on, **super().options()}

    def read(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[TextBatch]:
        offset, line = self._counts(file, position)
        stop = file.num_bytes if self.range is None else self.range.stop
        if self.range is not None and offset >= stop:
            return
        is_inside = position is not None or self.range is None or self.range.start == 0
        pending: list[bytes] = []
        most, num_pending = limits.most_input(), 0
        for data in self._whole_lines(file, offset, limits, None):
            if not is_inside and offset >= stop:
                return
            parting = self._parting(data, is_first=offset == 0)
            is_done = False
            if self.range is not None:
                after = int(np.searchsorted(parting.starts, stop - offset))
                is_done = after < len(parting.starts)
                parting = _Parting(*(part[: after + 1] for part in parting))
            if len(parting.lines):
                before = b"".join((*pending, data[: parting.starts[0]])) if is_inside else b""
                yield from self._batches(before, data, parting, (offset, line), limits)
                if is_done:
                    return
                pending, num_pending, is_inside = [], 0, True
                data_left = data[parting.texts[-1] :]
            else:
                data_left = data
            if is_inside:
                pending.append(data_left)
                num_pending += len(data_left)
            if most is not None and num_pending > most:
                found = f"{num_pending:,} bytes and no line that parts documents"
                raise too_large(f"{file.place}, byte {offset:,}", found, most)
            offset += len(data)
            line += data.count(b"\n") + (not data.endswith(b"\n"))
        last = _without_end(b"".join(pending))
        if last:
            after_all = self.position_at(offset, line)
            yield make_batch(pa.array([last], pa.large_binary()), after_all)

    def _batches(
        self,
        before: bytes,
        data: bytes,
        parting: _Parting,
        start: tuple[int, int],
        limits: BatchLimits,
    ) -> Iterator[TextBatch]:
        """The documents that end at parting lines of `data`; the first one is `before`. `start`:
        bytes and lines before `data`."""
        ends = _line_end_before(data, parting.starts[1:])
        starts = np.minimum(parting.texts[:-1], parting.starts[1:])
        edges = np.stack([starts, np.maximum(starts, ends)], axis=1).reshape(-1)
        segments = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(),
            max(len(edges) - 1, 0),
            [None, pa.py_buffer(edges.astype(np.int64)), pa.py_buffer(data)],
        )
        found = pa.concat_arrays(
            [
                pa.array([_without_end(before)], pa.large_binary()),
                segments.take(pa.array(np.arange(0, len(edges), 2))),
            ]
        )
        sizes = byte_lengths(found)
        filled = np.flatnonzero(sizes)
        texts = found.take(pa.array(filled))
        for first, stop in cut(sizes[filled], limits):
            end = filled[stop - 1]  # the document that ends at this parting line
            after = self.position_at(
                start[0] + int(parting.starts[end]), start[1] + int(parting.lines[end])
            )
            yield make_batch(texts.slice(first, stop - first), after)

    def _parting(self, data: bytes, *, is_first: bool) -> _Parting:
        import pyarrow.compute as compute  # 40 ms, for this format alone

        ends = np.frombuffer(data, np.uint8) == _NEWLINE
        stops = np.flatnonzero(ends) + 1
        if not data.endswith(b"\n"):
            stops = np.append(stops, len(data))
        starts = np.concatenate(([0], stops[:-1]))
        if is_first and data.startswith(BOM_BYTES):
            starts[0] = len(BOM_BYTES)
        bare = _line_end_before(data, stops)
        edges = np.stack([starts, np.maximum(starts, bare)], axis=1).reshape(-1)
        lines = pa.LargeStringArray.from_buffers(
            len(edges) - 1, pa.py_buffer(edges.astype(np.int64)), pa.py_buffer(data)
        ).take(pa.array(np.arange(0, len(edges), 2)))
        found = np.flatnonzero(
            compute.match_substring_regex(lines, self._pattern).to_numpy(zero_copy_only=False)
        )
        texts = starts[found]
        if not self.keeps_match:
            rest = compute.replace_substring_regex(
                lines.take(pa.array(found)), self._pattern, "", max_replacements=1
            )
            left = byte_lengths(rest)
            # Where nothing is left of a line, its end belongs to no document either.
            texts = np.where(left > 0, bare[found] - left, stops[found])
        return _Parting(found, np.where(found == 0, 0, starts[found]), texts)

    def locate(
        self, file: InputFile, before: JSON, after: JSON, rows_before: int | None, /
    ) -> RowLocation:
        start, line = self._counts(file, before)
        stop, _ = self._counts(file, after)
        if self.range is not None:
            line += self.rows_before(file) if rows_before is None else rows_before
        data = b"".join(between(file, start, stop))
        parting = self._parting(data, is_first=start == 0)
        is_inside = before is not None or start == 0
        firsts = [0] * is_inside + parting.texts.tolist()
        ends = [*parting.starts.tolist()[not is_inside :], len(data)]
        filled = (a for a, b in zip(firsts, ends, strict=True) if _without_end(data[a:b]))
        line += data[: next(filled, 0)].count(b"\n") + 1
        return RowLocation(id=f"{file.name}:{line}", file=file.name, row=line)


def _line_end_before(data: bytes, stops: OffsetArray) -> OffsetArray:
    """Where each piece of data ends without the line's end that may be its last bytes."""
    found = np.frombuffer(data, np.uint8)
    before = np.maximum(stops - 2, 0)
    newlines = (stops >= 1) & (found[np.maximum(stops - 1, 0)] == _NEWLINE)
    returns = newlines & (stops >= 2) & (found[before] == _RETURN)
    ends: OffsetArray = stops - newlines - returns
    return ends


def _without_end(text: bytes) -> bytes:
    return text.removesuffix(b"\r\n") if text.endswith(b"\r\n") else text.removesuffix(b"\n")


def _check_split(split: str) -> bool:
    """Refuse what is no regular expression; whether it has a group."""
    import pyarrow.compute as compute

    try:
        if len(split) > _MOST_PATTERN:
            raise OptionError(f"a regular expression of {len(split):,} characters is too long")
        has_group = re.compile(split).groups > 0
        compute.match_substring_regex(pa.array([""]), f"^(?:{split})")
    except (re.error, RecursionError, OverflowError, pa.ArrowInvalid) as error:
        raise OptionError(
            f"cannot split on {split!r:.100}: wanted 'line', 'blank-line' or a regular expression "
            f"that RE2 reads, which has no look-around and no back references ({error})"
        ) from error
    return has_group


class TextSource(FileSource):
    """Text files, each one document, or with `split` many: "line", "blank-line", or a regular
    expression, at whose matches at the start of a line a document begins."""

    def __init__(
        self,
        where: Where,
        *,
        split: str | None = None,
        ext: Endings = None,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        format: Format = TextFormat()
        if split == "line":
            format = TextLineFormat()
        elif split == "blank-line":
            format = TextPartsFormat(split_on=split)
        elif split is not None:
            format = TextPartsFormat(split_on=split, keeps_match=_check_split(split))
        super().__init__(where, format, ext=ext, name=name, limits=limits)


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
