"""Token files of llm.c: a header of 256 int32, then tokens.

In: a `.bin` file.  Out: a `ForeignFile`.
Promise: magic, version and count are checked against the size before a token is read.
Not here: writing them.

int32 0: 20240520 (GPT-2, uint16, version 1) or 20240801 (llama-3, uint32, version 7); int32 1: the
version; int32 2: the number of tokens. Documents have no index; each begins with the end-of-text.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardmill.errors import DamagedStoreError, StoreError
from shardmill.formats.token_files import (
    ForeignFile,
    Separator,
    documents_of,
    file_size,
    map_tokens,
    whole_tokens,
)

_HEADER_BYTES = 1024
_KINDS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


def open_llmc(path: str | Path, *, separator: Separator | None = None) -> ForeignFile:
    """One file: a single document, unless `separator` says where documents begin."""
    path = Path(path)
    size = file_size(path)
    with path.open("rb") as file:
        head = np.frombuffer(file.read(12), "<i4") if size >= _HEADER_BYTES else ()
    if len(head) != 3:
        raise DamagedStoreError(f"{path}: {size:,} bytes, less than the header of an llm.c file")
    magic, version, claimed = (int(number) for number in head)
    dtype = _KINDS.get((magic, version))
    if dtype is None:
        raise StoreError(
            f"{path}: magic {magic} version {version}; wanted one of "
            f"{', '.join(f'{one} version {two}' for one, two in _KINDS)}"
        )
    num_tokens = whole_tokens(path, size - _HEADER_BYTES, dtype)
    if num_tokens != claimed:
        raise DamagedStoreError(
            f"{path}: holds {num_tokens:,} tokens, but its header says {claimed:,}: truncated, or "
            "damaged: copy it again"
        )
    tokens = map_tokens(path, dtype, _HEADER_BYTES, num_tokens)
    num_documents, ends = documents_of(tokens, separator)
    return ForeignFile(
        path=path,
        dtype=dtype,
        num_tokens=num_tokens,
        num_documents=num_documents,
        ends=ends,
        offset=_HEADER_BYTES,
        facts={"format": "llmc", "separator": None if separator is None else separator.token},
    )
