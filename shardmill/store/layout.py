"""The names, dtypes and fixed bytes of a store: FORMAT.md as constants and small functions.

The writer and every reader take names and headers from here. Every cast of ids to the dtype of a
store goes through `fit_tokens` or `check_tokens`, because numpy wraps int64 to uint16 silently.
"""

from __future__ import annotations

import hashlib
import re
from typing import Literal, TypeAlias, TypeVar

import msgspec
import numpy as np

from shardmill.errors import DamagedStoreError, ManifestError, OptionError, TokenRangeError
from shardmill.records import Ragged

FORMAT: Literal["shardmill-store"] = "shardmill-store"
VERSIONS = (1, 2, 3)  # that are read; a store is written as the lowest that describes it
META = "meta.json"
DROPPED = "dropped.jsonl"
ORIGINS = "origins.table"
EXCLUDE = "exclude.json"
INDEX_HEADER_BYTES = 128
MAX_COUNT = 2**62

DtypeName: TypeAlias = Literal["uint16", "uint32"]
StoredDtype: TypeAlias = Literal["uint16-le", "uint32-le"]
DTYPES: dict[str, DtypeName] = {"uint16-le": "uint16", "uint32-le": "uint32"}
STORED: dict[str, StoredDtype] = {"uint16": "uint16-le", "uint32": "uint32-le"}
ITEMSIZE: dict[str, int] = {"uint16": 2, "uint32": 4}

SPLIT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)
"""Letters, digits, `_` and `-`, at most 64: a folder name on every system."""

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
FILE_NAME = re.compile(rf"{_PART}(/{_PART})?", re.ASCII)
"""A path inside the store: one or two plain parts, so never absolute, `..` or hidden."""

_OWN = re.compile(
    rf"{SPLIT_NAME.pattern}(/shard_(f[0-9]{{3,}}_)?[0-9]{{5,}}(_[0-9]{{3,}})?\.bin"
    r"|_(tokens|mask|roles|branches)\.bin|_(idx|turns)\.npy)"
    rf"|dropped\.jsonl|origins\.table|packs/{SPLIT_NAME.pattern}-[A-Za-z0-9_.-]{{1,100}}\.plan",
    re.ASCII,
)


def shard_name(split: str, unit: int, *, part: int = 0, feed: int = 0) -> str:
    """Where a build puts the tokens of a unit. Names sort in the order of the tokens, for those
    who list a folder.

    `part`: of a unit that fills more than one shard. The first feed and the first part have no
    number.
    """
    before, after = f"f{feed:03d}_" if feed else "", f"_{part:03d}" if part else ""
    return f"{split}/shard_{before}{unit:05d}{after}.bin"


def is_own_name(file: str) -> bool:
    """Whether our builds give this relative path to a file of a store, a plan or a table."""
    return file == META or _OWN.fullmatch(file) is not None


def looks_like_data(name: str) -> bool:
    """Whether a reader that lists folders would take this file for data of a store."""
    return name.endswith((".bin", ".npy")) or name == DROPPED


def index_header(entries: int) -> bytes:
    """The first 128 bytes of an index: a version 1.0 .npy header for `entries` int64."""
    shape = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({entries},), }}"
    head = b"\x93NUMPY\x01\x00" + (INDEX_HEADER_BYTES - 10).to_bytes(2, "little")
    return head + shape.encode("ascii").ljust(INDEX_HEADER_BYTES - 11) + b"\n"


Header = TypeVar("Header", bound=msgspec.Struct)
ALIGNMENT = 64  # bytes; of the header line and of the arrays of a sealed file
_SEAL_BYTES = 32
_MAX_HEADER = 2**20


def encode_sealed(header: msgspec.Struct, body: bytes) -> bytes:
    """The frame of plans and tables of origins: one padded line of JSON, the body, their sha256.

    The first fields of `header` are `format` and `version`.
    """
    line = msgspec.json.encode(header)
    line += b" " * (-(len(line) + 1) % ALIGNMENT) + b"\n"
    return line + body + hashlib.sha256(line + body).digest()


def decode_sealed(
    data: memoryview,
    kind: type[Header],
    name: str,
    *,
    where: str,
    what: str,
    advice: str,
    newest: int = 1,
) -> tuple[Header, memoryview, str]:
    """Header, body and sha256 of a sealed file of the format `name`. The bytes are not trusted."""
    head = re.match(rb'\{"format":"([a-z-]+)","version":([0-9]+),', data[: 2 * ALIGNMENT])
    if head is None or head[1] != name.encode() or len(data) < ALIGNMENT + _SEAL_BYTES:
        raise ManifestError(f"{where}: not {what} of ours, or its beginning is damaged; {advice}")
    if not 1 <= int(head[2]) <= newest:
        raise ManifestError(
            f"{where}: {what} of version {int(head[2])}, but this shardmill reads version "
            f"{newest}; upgrade shardmill, or {advice}"
        )
    sealed = data[:-_SEAL_BYTES]
    sha256 = hashlib.sha256(sealed)
    if sha256.digest() != data[-_SEAL_BYTES:]:
        raise DamagedStoreError(
            f"{where}: its sha256 is not the one at its end: changed or cut off; {advice}"
        )
    line = bytes(sealed[:_MAX_HEADER]).partition(b"\n")[0]
    try:
        header = msgspec.json.decode(line, type=kind)
        if (len(line) + 1) % ALIGNMENT:
            raise msgspec.DecodeError(f"a line of {len(line) + 1:,} bytes")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DamagedStoreError(
            f"{where}: its first line is no header ({error}); {advice}"
        ) from error
    return header, sealed[len(line) + 1 :], sha256.hexdigest()


def check_dtype(dtype: str) -> None:
    if dtype not in ITEMSIZE:
        raise OptionError("{dtype}: a store holds 'uint16' or 'uint32' tokens", dtype=dtype)


def check_shape(splits: tuple[str, ...], dtype: str, shard_bytes: int | None) -> None:
    """Refuse, in the caller's words, a store that could not be written."""
    check_dtype(dtype)
    for name in splits:
        if not SPLIT_NAME.fullmatch(name):
            raise OptionError(
                f"split {name!r}: a split's name is 1 to 64 letters, digits, '_' or '-', and "
                "begins with a letter or digit"
            )
        if name.lower() == "packs":
            raise OptionError(f"split {name!r}: is the folder of pack plans; wanted another name")
    if not splits or len({name.lower() for name in splits}) < len(splits):
        raise OptionError(
            "{splits}: name at least one, each once (case ignored)", splits=list(splits)
        )
    size = ITEMSIZE[dtype]
    if shard_bytes is not None and (not size <= shard_bytes <= MAX_COUNT or shard_bytes % size):
        raise OptionError(
            f"{{shard_bytes}}: not a whole number of {dtype} tokens; use a positive multiple of "
            f"{size}, for instance {max(size, shard_bytes // size * size):,}",
            shard_bytes=shard_bytes,
        )


def fit_tokens(
    documents: Ragged, dtype: str, *, vocab_size: int | None = None, where: str = "", first: int = 0
) -> Ragged:
    """The same documents in `dtype`, little-endian; not copied when they already are.

    `first` is the number of documents of `where` before these, for the message.
    """
    check_tokens(documents, dtype, vocab_size=vocab_size, where=where, first=first)
    stored = np.dtype(dtype).newbyteorder("<")
    return Ragged(documents.values.astype(stored, copy=False), documents.offsets)


def check_tokens(
    documents: Ragged, dtype: str, *, vocab_size: int | None = None, where: str = "", first: int = 0
) -> None:
    """Refuse the first document with an id that is negative, too wide or outside the vocabulary."""
    check_dtype(dtype)
    _check_ragged(documents, where or "documents")
    values = documents.values
    most = 2 ** (8 * ITEMSIZE[dtype])
    limit = most if vocab_size is None else min(most, vocab_size)
    narrow = values.dtype.kind == "u" and 2 ** (8 * values.dtype.itemsize) <= limit
    if len(values) == 0 or narrow:
        return
    if int(values.max()) < limit and (values.dtype.kind == "u" or int(values.min()) >= 0):
        return
    position = int(np.flatnonzero((values < 0) | (values >= limit))[0])
    found = int(values[position])
    number = int(np.searchsorted(documents.offsets, position, side="right")) - 1 + first
    options = {}
    if vocab_size is not None and not 0 <= found < vocab_size:
        advice = f"a vocabulary of {vocab_size:,} ids: the tokenizer contradicts itself"
    elif found < 0:
        advice = f"{dtype}: an id is never negative, so the tokenizer is broken"
    elif dtype == "uint16" and found < 2**32:
        advice = f"uint16, which ends at {most - 1:,}: build with {{dtype}}"
        options = {"dtype": "uint32"}
    else:
        advice = f"{dtype}, and no store holds ids that large: the tokenizer is broken"
    raise TokenRangeError(
        f"{where + ', ' if where else ''}document {number:,}: token id {found:,} does not fit "
        f"{advice}",
        **options,
    )


def _check_ragged(documents: Ragged, where: str) -> None:
    values, offsets = documents.values, documents.offsets
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise OptionError(f"{where}: ids are {values.ndim}-d {values.dtype}, wanted 1-d integers")
    sound = offsets.ndim == 1 and len(offsets) > 0 and offsets.dtype == np.int64
    if not sound or offsets[0] != 0 or offsets[-1] != len(values):
        raise OptionError(
            f"{where}: offsets must be int64 from 0 to {len(values):,}, the number of ids"
        )
    if (offsets[1:] < offsets[:-1]).any():
        raise OptionError(f"{where}: offsets decrease, so a document would end before it starts")
