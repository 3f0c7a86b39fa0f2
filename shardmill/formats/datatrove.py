"""datatrove's tokenised files: `x.ds`, with `x.ds.index`, `x.ds.metadata` and `x.ds.loss`.

In: a `.ds` file.  Out: a `ForeignFile`.
Promise: the size of a token is said (`.metadata` or the caller), never guessed; the index covers
the tokens; a loss mask that leaves tokens out is not dropped unasked.
Not here: writing them.

`.ds`: raw uint16 or uint32. `.index`: one uint64 per document, the token it ends at. `.metadata`:
its first line ends in `|2` or `|4`, bytes per token; the second is their number. `.loss`: a byte
per token, 0 where it is not trained.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardmill.errors import DamagedStoreError, OptionError, StoreError
from shardmill.formats.token_files import (
    BATCH_TOKENS,
    ForeignFile,
    ends_in,
    file_size,
    map_tokens,
    one_document,
    whole_tokens,
)
from shardmill.records import JSON

_DTYPES = {"2": "<u2", "4": "<u4"}
_STORED = {"uint16": "<u2", "uint32": "<u4"}


def open_datatrove(
    path: str | Path, *, dtype: str | None = None, ignore_loss: bool = False
) -> ForeignFile:
    """One `.ds` file. Without an index it is a single document."""
    path = Path(path)
    said, claimed = _metadata(_beside(path, ".metadata"))
    stored = _dtype(path, said, dtype)
    num_tokens = whole_tokens(path, file_size(path), stored)
    if claimed is not None and claimed != num_tokens:
        raise DamagedStoreError(
            f"{path}: holds {num_tokens:,} tokens, but its .metadata says {claimed:,}; copy both"
        )
    facts: dict[str, JSON] = {"format": "datatrove", "tokenizer": said.rpartition("|")[0] or None}
    _check_loss(_beside(path, ".loss"), num_tokens, ignore_loss)
    index = _beside(path, ".index")
    if not index.exists():
        count = 1 if num_tokens else 0
        ends = one_document(num_tokens)
    else:
        count = whole_tokens(index, file_size(index), "<u8")
        ends = ends_in(map_tokens(index, "<i8", 0, count))
    return ForeignFile(
        path=path,
        dtype=stored,
        num_tokens=num_tokens,
        num_documents=count,
        ends=ends,
        facts=facts,
    )


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _metadata(path: Path) -> tuple[str, int | None]:
    """The first line and the number of tokens, as far as they are there."""
    if not path.exists():
        return "", None
    if file_size(path) > 2**16:
        raise StoreError(f"{path}: {file_size(path):,} bytes; this is no .metadata of datatrove")
    lines = path.read_bytes().decode("utf-8", "replace").splitlines()
    number = lines[1].strip() if len(lines) > 1 else ""
    return (lines[0] if lines else ""), int(number) if number.isdecimal() else None


def _dtype(path: Path, said: str, given: str | None) -> str:
    if given is not None and given not in _STORED:
        raise OptionError(f"dtype={given!r}: wanted 'uint16' or 'uint32'")
    found = _DTYPES.get(said.rpartition("|")[2]) if "|" in said else None
    asked = None if given is None else _STORED[given]
    if found and asked and found != asked:
        raise OptionError(f"{path}: dtype={given!r}, but its .metadata says {said[-40:]!r}")
    stored = asked or found
    if stored is None:
        raise OptionError(
            f"{path}: no .metadata says how wide its tokens are: pass dtype='uint16' or 'uint32'"
        )
    return stored


def _check_loss(path: Path, num_tokens: int, ignore: bool) -> None:
    if ignore or not path.exists():
        return
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
            "documents cannot say that: pass ignore_loss=True to train on all of them"
        )
