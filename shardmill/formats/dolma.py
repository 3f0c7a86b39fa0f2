"""Token files of Dolma and OLMo: raw numbers in a `.npy` without header, and a `.csv.gz` beside it.

In: a `.npy` file.  Out: a `ForeignFile`.
Promise: the dtype is said, or judged by the rule for bare token files (which says what decided, and
refuses what stays ambiguous); documents of the `.csv.gz` follow one another and cover the file.
Not here: writing them; object arrays (packed.legacy).

`.csv.gz`: no head; columns start, end, and three more, in tokens, one line per document.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from shardmill.errors import DamagedStoreError
from shardmill.formats.token_files import (
    ForeignFile,
    Separator,
    documents_of,
    ends_in,
    file_size,
    map_tokens,
    whole_tokens,
)
from shardmill.records import OffsetArray
from shardmill.store.readers.foreign import decide_dtype, read_npy_header

logger = logging.getLogger(__name__)

_STORED = {"uint16": "<u2", "uint32": "<u4"}
_BLOCK = 2**22


def open_dolma(
    path: str | Path, *, dtype: str | None = None, separator: Separator | None = None
) -> ForeignFile:
    """One `.npy`: documents as its `.csv.gz` says, else by `separator`, else a single one.

    A file with a real NumPy header is read by that.
    """
    path = Path(path).absolute()
    size = file_size(path)
    if not size:
        raise DamagedStoreError(f"{path}: empty (0 bytes); copy it again or remove it")
    stored, offset, reason = _layout(path, size, dtype)
    num_tokens = whole_tokens(path, size - offset, stored)
    beside = path.with_name(path.name.removesuffix(".npy") + ".csv.gz")
    if beside.exists():
        found = _read_ends(beside)
        num_documents, ends = len(found), ends_in(found)
    else:
        num_documents, ends = documents_of(map_tokens(path, stored, offset, num_tokens), separator)
    return ForeignFile(
        path=path,
        dtype=stored,
        num_tokens=num_tokens,
        num_documents=num_documents,
        ends=ends,
        offset=offset,
        facts={"format": "dolma", "dtype_because": reason, "csv": beside.exists()},
    )


def _layout(path: Path, size: int, dtype: str | None) -> tuple[str, int, str]:
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
    ends: list[OffsetArray] = []
    before = 0
    for starts, stops in _blocks(path):
        wanted = np.concatenate(([before], stops[:-1]))
        if not np.array_equal(starts, wanted):
            raise DamagedStoreError(
                f"{path}: its documents do not follow one another; tokens between them would be "
                "lost: copy it again"
            )
        ends.append(stops)
        before = int(stops[-1])
    return np.concatenate(ends) if ends else np.empty(0, np.int64)


def _blocks(path: Path) -> Any:
    try:
        reader = csv.open_csv(
            str(path),
            read_options=csv.ReadOptions(autogenerate_column_names=True, block_size=_BLOCK),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                include_columns=["f0", "f1"], column_types={"f0": pa.int64(), "f1": pa.int64()}
            ),
        )
        for batch in reader:
            if batch.num_rows:
                yield tuple(column.to_numpy(zero_copy_only=False) for column in batch.columns)
    except (pa.ArrowException, OSError) as error:
        raise DamagedStoreError(
            f"{path}: cannot be read ({error!s:.200}); copy it again"
        ) from error
