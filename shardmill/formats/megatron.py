"""Megatron's indexed datasets: `prefix.bin` and `prefix.idx` (MMIDIDX, version 1), in and out.

Header, counts, sizes and pointers are checked before a token is read. What is written has 64-bit
pointers and one sequence per document, and appears complete, index last, never over other files.
Multimodal indexes (a mode per sequence) are refused.

The index: 9 bytes `MMIDIDX\\0\\0`, uint64 version 1, uint8 dtype code, uint64 sequences, uint64
entries of the document list; then int32 lengths of sequences (in tokens), int64 pointers (in
bytes), int64 document list: document d holds the sequences list[d]..list[d + 1].
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from shardmill.errors import (
    DamagedStoreError,
    OptionError,
    StoreError,
    StoreExistsError,
    TokenRangeError,
)
from shardmill.formats.packed.files import writing
from shardmill.formats.stores import StoreSplit
from shardmill.formats.token_files import ForeignFile, file_size, map_tokens, whole_tokens
from shardmill.records import OffsetArray
from shardmill.storage.atomic import atomic_write

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_CODES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODE_OF = {"uint16": 8, "uint32": 4}  # there is no code for uint32: ids go below 2**31
_CHUNK = 2**20


def open_megatron(prefix: str | Path) -> ForeignFile:
    """The dataset `prefix.bin`, `prefix.idx`. A document is all of its sequences."""
    tokens_path, index_path = megatron_paths(prefix)
    size = file_size(index_path)
    with index_path.open("rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise StoreError(f"{index_path}: begins with {head[:9]!r}, wanted {_MAGIC!r}")
    _, version, code, sequences, entries = _HEAD.unpack(head)
    if version != 1 or code not in _CODES:
        raise StoreError(
            f"{index_path}: version {version}, dtype code {code}; wanted version 1 and whole "
            f"numbers (codes {sorted(_CODES)})"
        )
    wanted = _HEAD.size + 12 * sequences + 8 * entries
    if size not in (wanted, wanted + sequences) or not entries:
        raise DamagedStoreError(
            f"{index_path}: {size:,} bytes, wanted {wanted:,} for {sequences:,} sequences and "
            f"{entries:,} ends of documents: truncated, or damaged: copy it again"
        )
    if size != wanted and sequences:
        raise StoreError(f"{index_path}: has modes of sequences (multimodal); only text is read")
    index = _Index(index_path, sequences, entries, np.dtype(_CODES[code]).itemsize)
    num_tokens = whole_tokens(tokens_path, file_size(tokens_path), _CODES[code])
    index.check(num_tokens)
    return ForeignFile(
        path=tokens_path,
        dtype=_CODES[code],
        num_tokens=num_tokens,
        num_documents=entries - 1,
        ends=index.ends,
        facts={"format": "megatron", "sequences": sequences, "dtype_code": code},
    )


def write_megatron(split: StoreSplit, prefix: str | Path) -> None:
    """`prefix.bin` and `prefix.idx` with the documents of a split, one sequence each."""
    tokens_path, index_path = megatron_paths(prefix)
    for path in (tokens_path, index_path):
        if path.exists():
            raise StoreExistsError(f"{path}: is here already; remove it or choose another prefix")
    code = _CODE_OF[split.dtype]
    with writing(tokens_path):
        tokens_path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(tokens_path) as file:
            for batch in split.batches():
                if code == 4 and int(batch.values.max(initial=0)) >= 2**31:
                    raise TokenRangeError(
                        f"token id {batch.values.max():,}: Megatron's int32 ends at 2,147,483,647"
                    )
                file.write(np.ascontiguousarray(batch.values, _CODES[code]).data)
        with atomic_write(index_path) as file:
            _write_index(file, split, code)


def megatron_paths(prefix: str | Path) -> tuple[Path, Path]:
    """The two files of a prefix, which may be given with .bin or .idx at its end."""
    name = os.fspath(prefix).removesuffix(".bin").removesuffix(".idx")
    if not Path(name).name:
        raise OptionError(f"{prefix}: wanted a prefix such as folder/train")
    return Path(name + ".bin"), Path(name + ".idx")


class _Index:
    """The arrays of an index, mapped."""

    def __init__(self, path: Path, sequences: int, entries: int, width: int) -> None:
        self._path, self._width = path, width
        start = _HEAD.size
        self._lengths = map_tokens(path, "<i4", start, sequences)
        self._pointers = map_tokens(path, "<i8", start + 4 * sequences, sequences)
        self._borders = map_tokens(path, "<i8", start + 12 * sequences, entries)

    def check(self, num_tokens: int) -> None:
        """Sequences must follow one another and fill the file; documents are made of them."""
        position = 0
        for start in range(0, len(self._lengths), _CHUNK):
            lengths = self._lengths[start : start + _CHUNK].astype(np.int64)
            stops = position + np.cumsum(lengths)
            pointers = (stops - lengths) * self._width
            if (lengths < 0).any() or (self._pointers[start : start + _CHUNK] != pointers).any():
                raise self._damaged(f"near sequence {start:,} they do not follow one another")
            position = int(stops[-1])
        if position != num_tokens:
            raise self._damaged(f"they hold {position:,} tokens, the .bin {num_tokens:,}")
        borders = self._borders
        if borders[0] != 0 or borders[-1] != len(self._lengths):
            raise self._damaged(f"documents hold sequences {borders[0]:,}..{borders[-1]:,}")
        for start in range(0, len(borders) - 1, _CHUNK):
            if (np.diff(borders[start : start + _CHUNK + 1]) < 0).any():
                raise self._damaged(f"near document {start:,} their borders go back")

    def ends(self, start: int, stop: int) -> OffsetArray:
        last = self._borders[start + 1 : stop + 1].astype(np.int64) - 1
        ends = np.zeros(len(last), np.int64)  # documents before the first sequence are empty
        some = last >= 0
        ends[some] = self._pointers[last[some]] // self._width + self._lengths[last[some]]
        return ends

    def _damaged(self, what: str) -> DamagedStoreError:
        return DamagedStoreError(f"{self._path}: of its sequences, {what}; copy both files again")


def _write_index(file: BinaryIO, split: StoreSplit, code: int) -> None:
    count, width = split.num_documents, np.dtype(_CODES[code]).itemsize
    file.write(_HEAD.pack(_MAGIC, 1, code, count, count + 1))
    for offsets in _offsets(split):
        lengths = np.diff(offsets)
        if len(lengths) and lengths.max() >= 2**31:
            raise TokenRangeError(f"a document of {lengths.max():,} tokens: lengths are int32")
        file.write(lengths.astype("<i4").data)
    for offsets in _offsets(split):
        file.write((offsets[:-1] * width).astype("<i8").data)
    for start in range(0, count + 1, _CHUNK):
        file.write(np.arange(start, min(start + _CHUNK, count + 1), dtype="<i8").data)


def _offsets(split: StoreSplit) -> Iterator[OffsetArray]:
    for start in range(0, split.num_documents, _CHUNK):
        yield split.offsets(start, min(start + _CHUNK, split.num_documents))
