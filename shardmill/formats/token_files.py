"""Token files of other programs, read as documents: llm.c, datatrove and Dolma (OLMo).

Sizes are checked before the first token is read. Arrays are mapped, and batches are cut at about
four million tokens, so memory is that of the page cache. Ids below 0 are refused where they are
stored.

llm.c, `.bin`: a header of 256 int32, then tokens. int32 0: 20240520 (GPT-2, uint16, version 1) or
20240801 (llama-3, uint32, version 7); int32 1: the version; int32 2: the number of tokens. There is
no index; each document begins with the end-of-text.

datatrove, `.ds`: raw uint16 or uint32. `.ds.index`: one uint64 per document, the token it ends at.
`.ds.metadata`: its first line ends in `|2` or `|4`, bytes per token; the second is their number.
`.ds.loss`: a byte per token, 0 where it is not trained.

Dolma, `.npy`: raw numbers, mostly without a NumPy header. `.csv.gz`: no head; columns start, end,
and three more, in tokens, one line per document.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.records import JSON, OffsetArray, Ragged
from shardmill.store.readers.foreign import decide_dtype, read_npy_header

logger = logging.getLogger(__name__)

BATCH_TOKENS = 2**22
BATCH_DOCUMENTS = 2**16
_STORED = {"uint16": "<u2", "uint32": "<u4"}
_LLMC_HEADER = 1024  # bytes
_LLMC_KINDS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """The tokenizer that made some tokens, as a store records it."""

    name: str  # for messages
    fingerprint: str
    sha256: str | None  # of the model's file, if it has one
    vocab_size: int
    special_token_ids: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForeignFile:
    """One file of tokens and the documents in it."""

    path: Path
    dtype: str  # of numpy, with its byte order: "<u2"
    num_tokens: int
    num_documents: int
    # where each document ends, in tokens: of all, or a function that gives those of start..stop
    ends: OffsetArray | Callable[[int, int], OffsetArray]
    offset: int = 0  # bytes before the first token
    facts: dict[str, JSON] = field(default_factory=dict)  # what else the format states

    def batches(self) -> Iterator[Ragged]:
        """All documents, in order."""
        size = self.offset + self.num_tokens * np.dtype(self.dtype).itemsize
        if file_size(self.path) != size:
            raise DamagedStoreError(f"{self.path}: changed its size; convert again")
        tokens = map_tokens(self.path, self.dtype, self.offset, self.num_tokens)
        begin = 0
        for first in range(0, self.num_documents, BATCH_DOCUMENTS):
            last = min(first + BATCH_DOCUMENTS, self.num_documents)
            ends = self.ends(first, last) if callable(self.ends) else self.ends[first:last]
            offsets = np.concatenate(([begin], ends)).astype(np.int64)
            if (np.diff(offsets) < 0).any() or offsets[-1] > self.num_tokens:
                raise DamagedStoreError(
                    f"{self.path}: from document {first:,} on, documents end before they start or "
                    f"after the {self.num_tokens:,} tokens; its index is damaged: copy it again"
                )
            for start, stop in document_cuts(offsets):
                part = offsets[start : stop + 1]
                yield Ragged(tokens[part[0] : part[-1]], part - part[0])
            begin = int(offsets[-1])
        if begin != self.num_tokens:
            raise DamagedStoreError(
                f"{self.path}: its documents end at token {begin:,} of {self.num_tokens:,}; "
                "another file's index, or a damaged one: copy both again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Separator:
    """A token between documents, for files that have no index."""

    token: int
    first: bool = False  # it opens a document, as llm.c writes them, instead of closing it


def documents_of(tokens: npt.NDArray[Any], separator: Separator | None) -> OffsetArray:
    """Where documents end; without a separator all of it is one.

    Separator 9: tokens 4 9 5 6 9 7 end at 2, 5, 6; when it comes first, at 1, 4, 6.
    """
    if separator is None or not len(tokens):
        return np.full(min(len(tokens), 1), len(tokens))
    after = 0 if separator.first else 1
    found = [
        np.flatnonzero(tokens[start : start + BATCH_TOKENS] == separator.token) + start + after
        for start in range(0, len(tokens), BATCH_TOKENS)
    ]
    ends = np.concatenate(found).astype(np.int64)
    return np.append(ends[(ends > 0) & (ends < len(tokens))], len(tokens))


def map_tokens(path: Path, dtype: str, offset: int, num_tokens: int) -> npt.NDArray[Any]:
    return np.memmap(path, dtype, "r", offset, (num_tokens,)) if num_tokens else np.empty(0, dtype)


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"{path}: no such file; check the path") from error
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def whole_tokens(path: Path, num_bytes: int, dtype: str) -> int:
    """How many tokens `num_bytes` are; a rest is refused."""
    width = np.dtype(dtype).itemsize
    if num_bytes % width:
        raise DamagedStoreError(
            f"{path}: {num_bytes:,} bytes are no whole number of tokens of {width} bytes: "
            "truncated, or another dtype"
        )
    return num_bytes // width


def document_cuts(offsets: OffsetArray) -> Iterator[tuple[int, int]]:
    """Documents start..stop of about a batch each; a longer document alone."""
    start, last = 0, len(offsets) - 1
    while start < last:
        stop = int(np.searchsorted(offsets, offsets[start] + BATCH_TOKENS, side="right")) - 1
        stop = min(max(stop, start + 1), last)
        yield start, stop
        start = stop


def open_llmc(path: str | Path, *, separator: Separator | None = None) -> ForeignFile:
    """One file: a single document, unless `separator` says where documents begin."""
    path = Path(path)
    size = file_size(path)
    with path.open("rb") as file:
        head = np.frombuffer(file.read(12), "<i4") if size >= _LLMC_HEADER else ()
    if len(head) != 3:
        raise DamagedStoreError(f"{path}: {size:,} bytes, less than the header of an llm.c file")
    magic, version, stated = (int(number) for number in head)
    dtype = _LLMC_KINDS.get((magic, version))
    if dtype is None:
        raise StoreError(
            f"{path}: magic {magic} version {version}; wanted one of "
            f"{', '.join(f'{one} version {two}' for one, two in _LLMC_KINDS)}"
        )
    num_tokens = whole_tokens(path, size - _LLMC_HEADER, dtype)
    if num_tokens != stated:
        raise DamagedStoreError(
            f"{path}: holds {num_tokens:,} tokens, but its header says {stated:,}: truncated, or "
            "damaged: copy it again"
        )
    ends = documents_of(map_tokens(path, dtype, _LLMC_HEADER, num_tokens), separator)
    return ForeignFile(
        path=path,
        dtype=dtype,
        num_tokens=num_tokens,
        num_documents=len(ends),
        ends=ends,
        offset=_LLMC_HEADER,
        facts={"format": "llmc", "separator": None if separator is None else separator.token},
    )


def open_datatrove(
    path: str | Path, *, dtype: str | None = None, ignore_loss: bool = False
) -> ForeignFile:
    """One `.ds` file. Without an index it is a single document.

    The width of a token comes from `.metadata` or the caller, and is never guessed. A loss mask
    that leaves tokens out is dropped only with `ignore_loss`.
    """
    path = Path(path)
    beside = {name: path.with_name(f"{path.name}.{name}") for name in ("metadata", "loss", "index")}
    first_line, stated = _datatrove_metadata(beside["metadata"])
    stored = _datatrove_dtype(path, first_line, dtype)
    num_tokens = whole_tokens(path, file_size(path), stored)
    if stated is not None and stated != num_tokens:
        raise DamagedStoreError(
            f"{path}: holds {num_tokens:,} tokens, but its .metadata says {stated:,}; copy both"
        )
    if not ignore_loss and beside["loss"].exists():
        _check_loss(beside["loss"], num_tokens)
    if beside["index"].exists():
        count = whole_tokens(beside["index"], file_size(beside["index"]), "<u8")
        ends = map_tokens(beside["index"], "<i8", 0, count)
    else:
        ends = documents_of(map_tokens(path, stored, 0, num_tokens), None)
    return ForeignFile(
        path=path,
        dtype=stored,
        num_tokens=num_tokens,
        num_documents=len(ends),
        ends=ends,
        facts={"format": "datatrove", "tokenizer": first_line.rpartition("|")[0] or None},
    )


def _datatrove_metadata(path: Path) -> tuple[str, int | None]:
    """The first line and the number of tokens, as far as they are there."""
    if not path.exists():
        return "", None
    if file_size(path) > 2**16:
        raise StoreError(f"{path}: {file_size(path):,} bytes; this is no .metadata of datatrove")
    lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    number = lines[1].strip() if len(lines) > 1 else ""
    return (lines[0] if lines else ""), int(number) if number.isdecimal() else None


def _datatrove_dtype(path: Path, first_line: str, given: str | None) -> str:
    if given is not None and given not in _STORED:
        raise OptionError("{dtype}: wanted 'uint16' or 'uint32'", dtype=given)
    width = first_line.rpartition("|")[2] if "|" in first_line else ""
    found = {"2": "<u2", "4": "<u4"}.get(width)
    asked = None if given is None else _STORED[given]
    if found and asked and found != asked:
        raise OptionError(
            f"{path}: {{dtype}}, but its .metadata says {first_line[-40:]!r}", dtype=given
        )
    stored = asked or found
    if stored is None:
        raise OptionError(
            f"{path}: no .metadata says how wide its tokens are: pass {{dtype}} or 'uint32'",
            dtype="uint16",
        )
    return stored


def _check_loss(path: Path, num_tokens: int) -> None:
    if file_size(path) != num_tokens:
        raise DamagedStoreError(f"{path}: {file_size(path):,} bytes for {num_tokens:,} tokens")
    mask = map_tokens(path, "|u1", 0, num_tokens)
    left_out = sum(
        len(part) - int(np.count_nonzero(part))
        for part in (mask[at : at + BATCH_TOKENS] for at in range(0, num_tokens, BATCH_TOKENS))
    )
    if left_out:
        raise StoreError(
            f"{path}: leaves {left_out:,} of {num_tokens:,} tokens out of the loss, and a store of "
            "documents cannot say that: pass {ignore_loss} to train on all of them",
            ignore_loss=True,
        )


def open_dolma(
    path: str | Path, *, dtype: str | None = None, separator: Separator | None = None
) -> ForeignFile:
    """One `.npy`: documents as its `.csv.gz` says, else by `separator`, else a single one.

    A NumPy header decides the dtype, else `dtype`, else the rule for bare token files, which
    refuses what stays ambiguous.
    """
    path = Path(path).absolute()
    size = file_size(path)
    if not size:
        raise DamagedStoreError(f"{path}: empty (0 bytes); copy it again or remove it")
    stored, offset, reason = _dolma_layout(path, size, dtype)
    num_tokens = whole_tokens(path, size - offset, stored)
    beside = path.with_name(path.name.removesuffix(".npy") + ".csv.gz")
    if beside.exists():
        ends = _read_ends(beside)
    else:
        ends = documents_of(map_tokens(path, stored, offset, num_tokens), separator)
    return ForeignFile(
        path=path,
        dtype=stored,
        num_tokens=num_tokens,
        num_documents=len(ends),
        ends=ends,
        offset=offset,
        facts={"format": "dolma", "dtype_because": reason, "csv": beside.exists()},
    )


def _dolma_layout(path: Path, size: int, dtype: str | None) -> tuple[str, int, str]:
    """The dtype, where the tokens begin, and what decided."""
    with path.open("rb") as file:
        is_npy = file.read(6) == b"\x93NUMPY"
    if is_npy:
        found = read_npy_header(path, size)
        return _STORED[found.dtype], found.offset, "its NumPy header says so"
    decided = decide_dtype(path.parent, [path], [size], dtype)
    if decided.doubt:
        logger.warning("%s: %s, but %s", path, decided.reason, decided.doubt)
    return _STORED[decided.dtype], 0, decided.reason


def _read_ends(path: Path) -> OffsetArray:
    """Where documents end; they start where the one before ended."""
    ends: list[OffsetArray] = [np.empty(0, np.int64)]
    before = 0
    for starts, stops in _csv_blocks(path):
        wanted = np.concatenate(([before], stops[:-1]))
        if not np.array_equal(starts, wanted):
            raise DamagedStoreError(
                f"{path}: its documents do not follow one another; tokens between them would be "
                "lost: copy it again"
            )
        ends.append(stops)
        before = int(stops[-1])
    return np.concatenate(ends)


def _csv_blocks(path: Path) -> Iterator[tuple[OffsetArray, OffsetArray]]:
    import pyarrow as pa  # takes a while to import, and only this format needs it
    from pyarrow import csv

    try:
        reader = csv.open_csv(
            str(path),
            read_options=csv.ReadOptions(autogenerate_column_names=True, block_size=2**22),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                include_columns=["f0", "f1"], column_types={"f0": pa.int64(), "f1": pa.int64()}
            ),
        )
        for batch in reader:
            if batch.num_rows:
                starts, stops = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
                yield starts, stops
    except (pa.ArrowException, OSError) as error:
        raise DamagedStoreError(
            f"{path}: cannot be read ({error!s:.200}); copy it again"
        ) from error
