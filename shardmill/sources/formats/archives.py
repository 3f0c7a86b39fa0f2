"""Archives: `.tar` (WebDataset too) and `.zip` of texts, read in place and never unpacked.

Each member that is text is a document. With a field, and for conversations, a sample is a row: the
neighbouring members whose names are equal up to the first dot of their last part, as WebDataset
writes them; its columns are those of its `.json` member, its text members by their endings, and
`__key__`. Which members are read follows from their endings; the others are counted in the log.

A name is only a name: nothing is written, links and devices are not followed, hidden members are
left out as hidden files are. A member may have as many bytes as a document, however small it is
when compressed. A damaged archive is an error that names the member.
"""

from __future__ import annotations

import errno
import logging
import lzma
import stat
import struct
import tarfile
import zipfile
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
import pyarrow as pa

from shardmill.errors import SourceError
from shardmill.records import JSON, Cursor, Drop, TextBatch
from shardmill.sources.batches import (
    DEFAULT_LIMITS,
    BatchLimits,
    counts_of,
    grouped,
    make_batch,
    strings_to_arrow,
    too_large,
    utf8_bytes,
)
from shardmill.sources.formats.jsonl import OnBad, check_on_bad, decode_row, own_id
from shardmill.sources.formats.lines import ChunkStream, codec_of, stored_before
from shardmill.sources.formats.text import TEXT_ENDINGS, is_text
from shardmill.sources.source import (
    BadRowError,
    FileSource,
    Format,
    InputRow,
    RowFormat,
    RowLocation,
    bad_row,
    name_row,
)
from shardmill.storage.files import (
    Endings,
    InputFile,
    Where,
    counted,
    ending_of,
    packed,
    parse_endings,
    some_endings,
    unreadable,
)
from shardmill.storage.object_store import open_object
from shardmill.storage.ranges import Range
from shardmill.urls import scrub

logger = logging.getLogger(__name__)

MOST_MEMBER = 2**30
"""Bytes of a member where the limits have no bound for a document."""
_MOST_HEADER = 2**20  # of a tar member's extended name and facts
_BLOCK = 512
_NO_FILE = "/"  # counted for folders, links and devices, which hold nothing to read


class Member(NamedTuple):
    """A file in an archive that is read."""

    name: str
    data: bytes
    after: Cursor


class _Sample(NamedTuple):
    key: str
    row: dict[str, Any] | BadRowError
    after: Cursor
    repaired: bool


@dataclass(frozen=True, kw_only=True)
class ArchiveFormat(RowFormat, Format):
    """Members of an archive."""

    field: str | None = None  # of a sample; None: each member is a document
    ext: tuple[str, ...] | None = None  # endings of the members that are read; None: of texts
    on_bad: OnBad = "error"

    @abstractmethod
    def members(
        self, file: InputFile, position: JSON, limits: BatchLimits, endings: tuple[str, ...], /
    ) -> Generator[Member, None, None]:
        """The members of these endings from `position` on."""

    def options(self) -> dict[str, JSON]:
        ext: JSON = None if self.ext is None else list(self.ext)
        return {"field": self.field, "ext": ext, "on_bad": self.on_bad}

    def read(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[TextBatch]:
        if self.field is None:
            sized = (
                (member, len(member.data), 1)
                for member in self.members(file, position, limits, self.ext or TEXT_ENDINGS)
            )
            for held in grouped(sized, limits):
                texts = [one.data if is_text(one.name, one.data) else None for one in held]
                pairs = zip(held, texts, strict=True)
                drops = [
                    Drop(id=f"{file.name}:{one.name}", reason="not_text")
                    for one, text in pairs
                    if text is None
                ]
                yield make_batch(pa.array(texts, pa.large_binary()), held[-1].after, drops=drops)
            return
        samples = self._samples(file, position, limits)
        weighed = ((sample, _text_bytes(sample, self.field), 1) for sample in samples)
        for group in grouped(weighed, limits):
            yield self._batch(file, group)

    def _batch(self, file: InputFile, held: Sequence[_Sample]) -> TextBatch:
        texts: list[str | None] = []
        drops = []
        for sample in held:
            drop = Drop(id=f"{file.name}:{sample.key}", reason="no_text")
            try:
                text = _field_of(sample, cast(str, self.field))
            except BadRowError as bad:
                if self.on_bad == "error":
                    raise bad_row(name_row(self, file, drop), bad) from bad
                text, drop = None, replace(drop, reason=bad.reason)
            drops += [drop] if text is None else []
            texts.append(text)
        array, repaired = strings_to_arrow(texts)
        return make_batch(array, held[-1].after, repaired=repaired, drops=drops)

    def rows(self, file: InputFile, position: JSON, limits: BatchLimits, /) -> Iterator[InputRow]:
        for sample in self._samples(file, position, limits):
            id = f"{file.name}:{sample.key}"
            yield InputRow(sample.row, id, sample.after, sample.repaired)

    def _samples(self, file: InputFile, position: JSON, limits: BatchLimits) -> Iterator[_Sample]:
        endings = (*(self.ext or TEXT_ENDINGS), ".json")
        members = self.members(file, position, limits, endings)
        for key, held in groupby(members, key=lambda member: _key_and_ending(member.name)[0]):
            yield _sample_of(key, list(held))

    def locate(
        self, file: InputFile, before: JSON, after: JSON, _rows_before: int | None, /
    ) -> RowLocation:
        own = None
        if self.field is None:
            endings = self.ext or TEXT_ENDINGS
            with closing(self.members(file, before, DEFAULT_LIMITS, endings)) as members:
                name = next(one.name for one in members if one.after == after)
        else:
            samples = self._samples(file, before, DEFAULT_LIMITS)
            found = next(sample for sample in samples if sample.after == after)
            name = found.key
            own = own_id(found.row.get("id")) if isinstance(found.row, dict) else None
        return RowLocation(id=f"{file.name}:{name}", file=file.name, own_id=own)


def _key_and_ending(name: str) -> tuple[str, str]:
    """ "a.b/001.seg.txt" -> ("a.b/001", "seg.txt"), as WebDataset parts names."""
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}{slash}{stem}", ending.lower()


def _sample_of(key: str, members: Sequence[Member]) -> _Sample:
    row: dict[str, Any] = {"__key__": key}
    is_repaired = False
    problem: BadRowError | None = None
    for member in members:
        ending = _key_and_ending(member.name)[1]
        if ending == "json":
            try:
                found, changed = decode_row(member.data)
            except BadRowError as bad:
                problem = bad
            else:
                row |= found
                is_repaired = is_repaired or changed
        elif not is_text(member.name, member.data):
            problem = BadRowError("not_text", f"the member {member.name!r:.80} is not text")
        else:
            text = member.data.decode("utf-8", "replace")
            is_repaired = is_repaired or text.encode() != member.data
            row[ending] = text
    return _Sample(key, problem or row, members[-1].after, is_repaired)


def _field_of(sample: _Sample, field: str) -> str | None:
    if isinstance(sample.row, BadRowError):
        raise sample.row
    text = sample.row.get(field)
    if text is not None and not isinstance(text, str):
        problem = f"the field {field!r} holds {type(text).__name__}, not a string"
        raise BadRowError("not_a_string", problem)
    return text


def _text_bytes(sample: _Sample, field: str) -> int:
    text = sample.row.get(field) if isinstance(sample.row, dict) else None
    return utf8_bytes(text) if isinstance(text, str) else 0


def _other(name: str, endings: tuple[str, ...]) -> str | None:
    """Why a member is not read, in a word for the log; None: it is read."""
    parts = name.split("/")
    is_hidden = any(part.startswith(".") and part not in (".", "..") for part in parts)
    if is_hidden or "__MACOSX" in parts:
        return "hidden"
    return None if name.lower().endswith(endings) else ending_of(name)


def _check_found(
    file: InputFile, endings: tuple[str, ...], left: Counter[str], num_read: int
) -> None:
    """Say what was left out of a whole archive; an error where nothing is left."""
    where = scrub(str(file.place))
    del left[_NO_FILE]
    if left and not num_read:
        raise SourceError(
            f"{where}: no member ends in {some_endings(endings)}; found {counted(left)}; choose "
            "with {ext}, where * is any",
            ext=...,
        )
    if left:
        logger.info(
            "%s: left out %s members of other endings (%s); read them with ext= (--ext)",
            where,
            f"{left.total():,}",
            counted(left),
        )


def _check_size(file: InputFile, name: str, size: int, limits: BatchLimits) -> None:
    most = limits.most_bytes or MOST_MEMBER
    if size > most:
        found = f"member {name!r:.200} of {size:,} bytes (a member is one document)"
        raise too_large(str(file.place), found, most)


def _damaged(file: InputFile, name: str, problem: object) -> SourceError:
    at = f", member {name!r:.200}" if name else ""
    return SourceError(
        f"{file.place}{at}: the archive is damaged or truncated ({problem}); fetch or write it "
        "again"
    )


@dataclass(frozen=True, kw_only=True)
class TarFormat(ArchiveFormat):
    """A tar archive, which is one piece: it has no directory. A position is how many members were
    passed, and the byte where the next one begins."""

    kind = "tar"
    endings = (*packed(".tar"), ".tgz")

    def bytes_before(self, file: InputFile, position: JSON, /) -> int:
        done = counts_of(position, ("members", "bytes"), file.name)[1]
        codec = codec_of(file)
        return done if codec is None else stored_before(file, codec, done)

    def members(
        self, file: InputFile, position: JSON, limits: BatchLimits, endings: tuple[str, ...], /
    ) -> Generator[Member, None, None]:
        number, start = 0, 0
        if position is not None:
            number, start = counts_of(position, ("members", "bytes"), file.name)
        left: Counter[str] = Counter()
        num_read = 0
        stream = ChunkStream(file, start)
        with closing(stream):
            while (found := _next_tar_member(file, stream)) is not None:
                name, info = found
                number += 1
                has_data = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
                padded = -(-info.size // _BLOCK) * _BLOCK if has_data else 0
                other = _other(name, endings) if info.isreg() else _NO_FILE
                if other is not None:
                    left[other] += 1
                    _pass(file, name, stream, padded)
                    continue
                _check_size(file, name, info.size, limits)
                data = stream.read(info.size)
                if len(data) < info.size:
                    raise _damaged(file, name, "it ends in this member")
                _pass(file, name, stream, padded - info.size)
                num_read += 1
                yield Member(name, data, {"members": number, "bytes": stream.position})
            while rest := stream.read(2**20):
                if rest.strip(b"\0"):
                    raise _damaged(file, "", "something follows its end")
        if position is None:
            _check_found(file, endings, left, num_read)


def _pass(file: InputFile, name: str, stream: ChunkStream, size: int) -> None:
    if stream.skip(size) < size:
        raise _damaged(file, name, "it ends in this member")


def _next_tar_member(file: InputFile, stream: ChunkStream) -> tuple[str, tarfile.TarInfo] | None:
    """The name and facts of the next member; None after the mark of the end. Of the extended
    headers only names and sizes count."""
    name, size = None, None
    while True:
        start = stream.position
        header = stream.read(_BLOCK)
        if header == bytes(_BLOCK):
            return None
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "backslashreplace")
        except tarfile.HeaderError as error:
            problem = error if header else "it ends without the mark of its end"
            raise _damaged(file, "", f"byte {start:,}: {problem}") from error
        if info.type == tarfile.GNUTYPE_SPARSE:
            raise _damaged(file, info.name, "a sparse file, which cannot be read here")
        if info.type not in _EXTENDED:
            info.size = info.size if size is None else size
            if info.size < 0:
                raise _damaged(file, info.name, f"a size of {info.size:,} bytes")
            return name or info.name, info
        if not 0 <= info.size <= _MOST_HEADER:
            raise _damaged(file, info.name, f"a header of {info.size:,} bytes")
        padded = -(-info.size // _BLOCK) * _BLOCK
        data = stream.read(padded)
        if len(data) < padded:
            raise _damaged(file, info.name, "it ends in a header")
        data = data[: info.size]
        if info.type == tarfile.GNUTYPE_LONGNAME:
            name = data.rstrip(b"\0").decode("utf-8", "backslashreplace")
        elif info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            facts = _pax_facts(file, data)
            if any(key.startswith("GNU.sparse.") for key in facts):
                raise _damaged(file, info.name, "a sparse file, which cannot be read here")
            name = facts.get("path", name)
            try:
                size = int(facts["size"]) if "size" in facts else size
            except ValueError as error:
                raise _damaged(file, info.name, error) from error


_EXTENDED = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE),
    tarfile.SOLARIS_XHDTYPE,
)


def _pax_facts(file: InputFile, data: bytes) -> dict[str, str]:
    """Records of "LENGTH KEY=VALUE\\n"; the length is that of the record."""
    facts: dict[str, str] = {}
    while data.strip(b"\0"):
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or not len(length) < int(length) <= len(data):
            raise _damaged(file, "", "an extended header that cannot be read")
        record = rest[: int(length) - len(length) - 2].decode("utf-8", "backslashreplace")
        key, _, facts[key] = record.partition("=")
        data = data[int(length) :]
    return facts


@dataclass(frozen=True, kw_only=True)
class ZipFormat(ArchiveFormat):
    """A zip archive. A position is how many of the members of its directory were passed."""

    kind = "zip"
    endings = (".zip",)

    range: Range | None = None  # only these members of the directory, half-open; None: all
    range_bytes: int = 0  # of text in these members

    @property
    def range_name(self) -> str:
        return "" if self.range is None else ":members {} to {}".format(*self.range)

    def options(self) -> dict[str, JSON]:
        ranged: dict[str, JSON] = {} if self.range is None else {"members": list(self.range)}
        return {**super().options(), **ranged}

    def size_hint(self, file: InputFile) -> int:
        """Of the members that are read, before compression."""
        if self.range is not None:
            return self.range_bytes
        with _open_zip(file) as archive:
            return sum(map(self._size, archive.infolist()))

    def bytes_before(self, file: InputFile, position: JSON, /) -> int:
        (done,) = counts_of(position, ("members",), file.name)
        first = 0 if self.range is None else self.range[0]
        with _open_zip(file) as archive:
            return sum(map(self._size, archive.infolist()[first:done]))

    def split(self, file: InputFile, num_bytes: int | None, /) -> Sequence[Self]:
        """Runs of samples, by the size of their members; reads the directory, as each piece does,
        which is why they are few."""
        if self.range is not None:
            return (self,)
        with _open_zip(file) as archive:
            keys = [_key_and_ending(info.filename)[0] for info in archive.infolist()]
            sizes = np.array([self._size(info) for info in archive.infolist()], np.int64)
        total = int(sizes.sum())
        num_parts = _MOST_PARTS if num_bytes is None else min(-(-total // num_bytes), _MOST_PARTS)
        starts = [n for n, key in enumerate(keys) if n and key != keys[n - 1]]
        before = (np.cumsum(sizes) - sizes)[starts]  # of each sample but the first
        wanted = [number * total // num_parts for number in range(1, num_parts)]
        inner = {starts[n] for n in np.searchsorted(before, wanted).tolist() if n < len(starts)}
        if not inner:
            return (self,)
        edges = [0, *sorted(inner), len(keys)]
        return [
            replace(self, range=(start, stop), range_bytes=int(sizes[start:stop].sum()))
            for start, stop in pairwise(edges)
        ]

    def _size(self, info: zipfile.ZipInfo) -> int:
        endings = (*(self.ext or TEXT_ENDINGS), ".json")
        return info.file_size if _other(info.filename, endings) is None else 0

    def members(
        self, file: InputFile, position: JSON, limits: BatchLimits, endings: tuple[str, ...], /
    ) -> Generator[Member, None, None]:
        left: Counter[str] = Counter()
        num_read = 0
        with _open_zip(file) as archive:
            found = archive.infolist()
            first, stop = self.range or (0, len(found))
            if position is not None:
                (number,) = counts_of(position, ("members",), file.name)
                if not first <= number <= stop:
                    raise SourceError(
                        f"{file.place}: the cursor is after {number:,} members, but {first:,} to "
                        f"{stop:,} are read; resume with the piece the cursor came from"
                    )
                first = number
            for number, info in enumerate(found[first:stop], first + 1):
                is_link = stat.S_ISLNK(info.external_attr >> 16)
                other = _other(info.filename, endings)
                if info.is_dir() or is_link or other is not None:
                    left[_NO_FILE if info.is_dir() or is_link else str(other)] += 1
                    continue
                _check_size(file, info.filename, info.file_size, limits)
                num_read += 1
                yield Member(info.filename, _zip_data(file, archive, info), {"members": number})
        if position is None and self.range is None:
            _check_found(file, endings, left, num_read)


_MOST_PARTS = 16
# What the standard library raises for bytes that are no archive.
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, NotImplementedError, EOFError, struct.error),
    *(ValueError, IndexError, OverflowError),
)


@contextmanager
def _open_zip(file: InputFile) -> Iterator[zipfile.ZipFile]:
    with ExitStack() as stack:
        raw: Any = None
        if isinstance(file.place, Path):
            try:
                raw = stack.enter_context(file.place.open("rb"))
            except OSError as error:
                raise unreadable(file.place, error) from error
        else:
            raw = stack.enter_context(open_object(file.place, file.num_bytes))
        try:
            archive = stack.enter_context(zipfile.ZipFile(raw))
        except (*_ZIP_ERRORS, OSError) as error:
            if _is_of_system(error):
                raise
            raise _damaged(file, "", error) from error
        yield archive


def _is_of_system(error: Exception) -> bool:
    """Whether an error is not of the archive. Where a directory leads before the start of the file,
    the system says that the argument is invalid."""
    if isinstance(error, SourceError):
        return True
    if not isinstance(error, OSError) or error.errno == errno.EINVAL:
        return False
    return type(error) is not OSError or bool(error.errno)


def _zip_data(file: InputFile, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """The bytes of a member, whose size its directory entry bounds and whose checksum it has."""
    if info.flag_bits & 1:
        raise SourceError(
            f"{file.place}, member {info.filename!r:.200}: is encrypted; write the archive again "
            "without a password"
        )
    try:
        with archive.open(info) as stream:
            data = stream.read()
    except (*_ZIP_ERRORS, zlib.error, lzma.LZMAError, OSError) as error:
        if _is_of_system(error):
            raise
        raise _damaged(file, info.filename, error) from error
    if len(data) != info.file_size:
        raise _damaged(file, info.filename, f"{len(data):,} bytes of {info.file_size:,}")
    return data


class TarSource(FileSource):
    """Tar archives of texts, or of samples as WebDataset writes them."""

    format: type[ArchiveFormat] = TarFormat

    def __init__(
        self,
        where: Where,
        *,
        field: str | None = None,
        on_bad: OnBad = "error",
        ext: Endings = None,
        name: str | None = None,
        limits: BatchLimits = DEFAULT_LIMITS,
    ) -> None:
        check_on_bad(on_bad)
        format = self.format(field=field, ext=parse_endings(ext), on_bad=on_bad)
        super().__init__(where, format, name=name, limits=limits)


class ZipSource(TarSource):
    """Zip archives of texts, or of samples."""

    format = ZipFormat
