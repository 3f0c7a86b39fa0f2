"""FineWeb-Edu: web pages, streamed from the hub and shuffled through a buffer, or read locally."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from niels_gpt.data.files import texts_of
from niels_gpt.data.shuffle import ShuffledSource
from shardmill.protocols import Source
from shardmill.sources import HubSource, open_source

DATASET = "HuggingFaceFW/fineweb-edu"
CONFIG = "CC-MAIN-2024-10"
SHUFFLE_BUFFER = 10_000


def iter_fineweb_edu(
    path: str | Path | None = None,
    *,
    dataset: str = DATASET,
    config: str | None = CONFIG,
    revision: str | None = None,
    seed: int = 42,
    shuffle_buffer: int | None = SHUFFLE_BUFFER,
) -> Iterator[str]:
    """The pages in the order of the hub's `shuffle(seed, buffer_size)`; nothing is kept.

    A local path (jsonl, parquet, a folder) is shuffled with torch's generator instead.
    """
    if path is not None:
        return texts_of(local_pages(path, seed=seed, shuffle_buffer=shuffle_buffer))
    shuffle = None if shuffle_buffer is None else (seed, shuffle_buffer)
    return texts_of(HubSource(dataset, config=config, revision=revision, shuffle=shuffle))


def local_pages(path: str | Path, *, seed: int, shuffle_buffer: int | None) -> Source:
    source = open_source(str(path))
    if shuffle_buffer is None:
        return source
    return ShuffledSource(source, seed=seed, buffer_size=shuffle_buffer)


__all__ = ["CONFIG", "DATASET", "SHUFFLE_BUFFER", "iter_fineweb_edu", "local_pages"]
