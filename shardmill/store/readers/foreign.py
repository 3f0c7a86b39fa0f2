"""A folder of token files that no manifest describes.

In: a folder and a file pattern.  Out: a `TokenFolder`: the files in order, ready to be mapped.
Promise: sorted by name, so the same everywhere; one format and one dtype for all; every file's
size checked; what decided the dtype is said and logged; nothing stays open, whatever happens.
Not here: stores with a manifest (shards), windows.

The header of a `.npy` file of tokens.

In: a path.  Out: a `TokenFile` that says where its tokens begin.
Promise: only what can be mapped as it lies is accepted: one dimension, uint16 or uint32, little
endian, complete and nothing behind it. No pickle is ever read.
Not here: tokens.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.records import TokenFile
from shardmill.store.readers.dtypes import DtypeRule, decide_dtype, dtype_name
from shardmill.store.readers.token_space import TokenSpace

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # of the header's own length, by version
_MAX_HEADER = 10_000  # numpy reads no longer ones either
_DTYPES = {"<u2": "uint16", "<u4": "uint32"}
_AGAIN = "copy the file again or write it again"


def read_npy_header(path: Path, num_bytes: int) -> TokenFile:
    """What the first bytes of `path`, a file of `num_bytes`, say about the rest."""
    try:
        with path.open("rb") as file:
            head = file.read(_MAX_HEADER)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    fields, offset = _parse(path, head)
    dtype, num_tokens = _checked_fields(path, fields)
    if num_tokens == 0:
        raise StoreError(f"{path}: holds no token (shape (0,)); remove it or write it again")
    found = TokenFile(path=path, num_tokens=num_tokens, dtype=dtype, offset=offset)
    if num_bytes != offset + found.num_bytes:
        problem = "truncated" if num_bytes < offset + found.num_bytes else "too long"
        raise DamagedStoreError(
            f"{path}: {problem}: found {num_bytes:,} bytes, wanted {offset + found.num_bytes:,} "
            f"({num_tokens:,} {dtype} tokens behind a header of {offset}); {_AGAIN}"
        )
    if offset % (found.num_bytes // num_tokens):
        raise StoreError(
            f"{path}: its header has {offset} bytes, so the {dtype} tokens are not aligned; "
            f"np.save(path, np.load(path)) puts that right"
        )
    return found


def _parse(path: Path, head: bytes) -> tuple[dict[str, Any], int]:
    """The header's dictionary, and where the data begins."""
    size = _LENGTH_BYTES.get((head[6], head[7])) if len(head) > 7 else None
    if not head.startswith(_MAGIC) or size is None:
        raise DamagedStoreError(
            f"{path}: begins with {head[:8]!r}, so it is no .npy file of version 1, 2 or 3; "
            f"{_AGAIN}"
        )
    start = 8 + size
    stop = start + int.from_bytes(head[8:start], "little")
    if len(head) < stop:
        raise DamagedStoreError(
            f"{path}: truncated: its header ends at byte {stop:,}, but {len(head):,} were found "
            f"(at most {_MAX_HEADER:,} are looked at); {_AGAIN}"
        )
    try:
        fields = ast.literal_eval(head[start:stop].decode("utf-8"))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise DamagedStoreError(
            f"{path}: its .npy header is damaged ({error}); {_AGAIN}"
        ) from error
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise DamagedStoreError(f"{path}: not the header of an array: {fields!r:.200}; {_AGAIN}")
    return fields, stop


def _checked_fields(path: Path, fields: dict[str, Any]) -> tuple[str, int]:
    """The dtype, and how many tokens there are."""
    shape, descr = fields["shape"], fields["descr"]
    dtype = _DTYPES.get(descr) if isinstance(descr, str) else None
    if dtype is None:
        raise StoreError(
            f"{path}: holds {descr!r:.100}, wanted '<u2' or '<u4' (uint16 or uint32, little "
            f"endian); {_advice(descr)}"
        )
    if not isinstance(shape, tuple) or len(shape) != 1:
        raise StoreError(
            f"{path}: an array of shape {shape!r:.100}, wanted one dimension; flatten it where it "
            f"is made"
        )
    num_tokens = shape[0]
    if type(num_tokens) is not int or num_tokens < 0:
        raise DamagedStoreError(f"{path}: an array of shape {shape!r:.100}; {_AGAIN}")
    return dtype, num_tokens


def _advice(descr: object) -> str:
    kind = descr[1:2] if isinstance(descr, str) else ""
    if kind == "O":
        return "it holds Python objects, which would have to be unpickled: that is never done"
    if kind in ("i", "u"):
        return "check that no id is negative or too large, then save it with .astype('<u4')"
    return "token ids are whole numbers: is this a file of tokens?"


logger = logging.getLogger(__name__)

FORMATS = (".npy", ".bin")
_LOOKS, _LOOK_TOKENS = 16, 256  # where, and how much, tokens are looked at for a fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFolder:
    """Token files that belong together, each to be cut into windows for itself."""

    folder: Path
    files: tuple[TokenFile, ...]  # sorted by path, none empty, all of one dtype
    decided: DtypeRule

    @property
    def dtype(self) -> str:
        return self.decided.dtype

    @property
    def num_tokens(self) -> int:
        return sum(file.num_tokens for file in self.files)


def open_token_folder(
    folder: str | Path, file_pattern: str = "*.npy", *, dtype: npt.DTypeLike | None = None
) -> TokenFolder:
    """The token files in `folder` that match `file_pattern`: `.npy` or `.bin`, not both.

    The dtype is the header's for `.npy`; for `.bin` see `decide_dtype`. `dtype` says what it is.
    """
    folder = Path(folder).absolute()
    paths = _matching(folder, file_pattern)
    sizes = [_size(path) for path in paths]
    if paths[0].suffix == ".npy":
        files, decided = _npy_files(paths, sizes, dtype)
    else:
        decided = decide_dtype(folder, paths, sizes, dtype)
        width = np.dtype(decided.dtype).itemsize
        files = [
            TokenFile(path=path, num_tokens=size // width, dtype=decided.dtype)
            for path, size in zip(paths, sizes, strict=True)
        ]
    logger.info("%s: %d files of %s (%s)", folder, len(files), decided.dtype, decided.reason)
    if decided.doubt:
        logger.warning("%s: read as %s, because %s, but %s", folder, *_warning(decided))
    return TokenFolder(folder=folder, files=tuple(files), decided=decided)


def _warning(decided: DtypeRule) -> tuple[str, str, str]:
    return decided.dtype, decided.reason, decided.doubt


def _matching(folder: Path, file_pattern: str) -> list[Path]:
    if not folder.is_dir():
        raise StoreNotFoundError(f"No files: {folder} is not a folder; check the path")
    try:
        paths = sorted(folder.glob(file_pattern))
    except (ValueError, NotImplementedError) as error:  # pathlib raises it for an absolute pattern
        raise OptionError(
            f"file_pattern={file_pattern!r}: {error}; wanted a pattern inside the folder, "
            f"such as '*.npy' or 'train/*.bin'"
        ) from error
    if not paths:
        there = sorted({path.suffix for path in folder.iterdir() if path.suffix in FORMATS})
        hint = f"there are {' and '.join(there)} files" if there else "there are no token files"
        raise StoreNotFoundError(f"No files match {file_pattern!r} in {folder}; {hint}")
    formats = {path.suffix: path for path in reversed(paths)}
    strange = next((path for suffix, path in formats.items() if suffix not in FORMATS), None)
    if strange is not None:
        raise OptionError(
            f"{strange}: file_pattern={file_pattern!r} matches it, but only .npy and .bin files "
            f"hold tokens; narrow the pattern"
        )
    if len(formats) > 1:
        raise OptionError(
            f"file_pattern={file_pattern!r} matches both {formats['.npy']} and {formats['.bin']}, "
            f"perhaps the same tokens twice; choose one of the two formats"
        )
    return paths


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be looked at: {error.strerror}; a broken link?"
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise OptionError(f"{path}: not a file; narrow file_pattern")
    if found.st_size == 0:
        raise StoreError(f"{path}: empty (0 bytes), perhaps an interrupted copy; copy it again")
    return found.st_size


def _npy_files(
    paths: Sequence[Path], sizes: Sequence[int], dtype: npt.DTypeLike | None
) -> tuple[list[TokenFile], DtypeRule]:
    files = [read_npy_header(path, size) for path, size in zip(paths, sizes, strict=True)]
    first = files[0]
    for file in files:
        if file.dtype != first.dtype:
            raise StoreError(
                f"mixed dtypes: {first.path} is {first.dtype}, but {file.path} is {file.dtype}; "
                f"put them into folders of their own"
            )
    if dtype is not None and dtype_name(dtype, "dtype") != first.dtype:
        raise OptionError(f"{first.path}: its header says {first.dtype}, but dtype={dtype!r}")
    reason = "the .npy headers say so"
    return files, DtypeRule(dtype=first.dtype, rule="header", reason=reason)


def folder_fingerprint(folder: TokenFolder, space: TokenSpace) -> str:
    """Over names, sizes and dtype of the files, and some tokens at sixteen places.

    No manifest vouches for such files: with the sizes alone the same texts in another
    tokenisation, padded to the same length, would pass for the same data.
    """
    listed = [
        (file.path.relative_to(folder.folder).as_posix(), file.num_tokens, file.dtype)
        for file in folder.files
    ]
    digest = hashlib.sha256(json.dumps(listed).encode())
    length = min(_LOOK_TOKENS, space.num_tokens)
    last = space.num_tokens - length
    places = [last * number // (_LOOKS - 1) for number in range(_LOOKS)]
    digest.update(space.gather(places, length).astype("<u4").tobytes())
    return digest.hexdigest()
