"""A folder of token files that no manifest describes.

In: a folder and a file pattern.  Out: a `TokenFolder`: the files in order, ready to be mapped.
Promise: sorted by name, so the same everywhere; one format and one dtype for all; every file's
size checked; what decided the dtype is said and logged; nothing stays open, whatever happens.
Not here: stores with a manifest (shards), windows.
"""

from __future__ import annotations

import hashlib
import json
import logging
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError, StoreError, StoreNotFoundError
from shardmill.mapped.declared import dtype_name
from shardmill.mapped.dtype_rule import DtypeRule, decide_dtype
from shardmill.mapped.npy import read_npy_header
from shardmill.mapped.space import TokenSpace
from shardmill.records import TokenFile

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
