"""Raw rows of a chat set: from the hub, or from a local .jsonl or .parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from shardmill.sources import iter_jsonl_rows, iter_rows

MAX_RETRIES = 5
"""How often the hub is asked again, in a row, before a source gives up."""


def open_rows(
    path: str | Path | None,
    *,
    dataset: str,
    split: str,
    revision: str | None,
    max_retries: int = MAX_RETRIES,
) -> Iterator[dict[str, Any]]:
    """Rows in order, as dicts: of `path` when there is one, else of the hub's dataset."""
    if path is None:
        return iter_rows(dataset, split=split, revision=revision, max_retries=max_retries)
    if Path(path).suffix == ".parquet":
        return _parquet_rows(Path(path))
    return iter_jsonl_rows(path)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


__all__ = ["MAX_RETRIES", "open_rows"]
