"""What a build takes: cores, memory and disk.

Memory is bounded by the number of processes and the largest document, never by the input. A
document that does not fit is refused by name and size. Disk is estimated from the beginning of each
source; what cannot be known stays None and never leads to a refusal.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from shardmill.building import units
from shardmill.building.units import FeedChunks, read_chunks
from shardmill.building.worker import TokenRules
from shardmill.errors import BuildError, OptionError
from shardmill.machine import available_memory
from shardmill.protocols import Source, Tokenizer
from shardmill.records import Cursor
from shardmill.tokenizers import thread_limits
from shardmill.tokenizers.base import EngineSource

MIB = 2**20
PROCESS_BYTES = 512 * MIB
"""Of one process: libraries, a tokenizer, the batches that are read, encoded and written ahead."""
DOCUMENT_BYTES = {"tokenizers": 256, "sentencepiece": 80}
"""Memory per byte of the largest document, by the library that encodes it. Ordinary text takes half
of that; text of which every byte is a token takes all. A fast engine takes less, but is compared
with the library on every large document."""
_PLAIN_DOCUMENT_BYTES = 16
"""The same without a library: as read, as text, as ids, as written."""
_SMALL_DOCUMENT = MIB
"""A document of this size always fits into `PROCESS_BYTES`."""
_UNKNOWN_MEMORY = 8 * 2**30
SAMPLE_BYTES = 2**16
_MAX_EXPANSION = 40
"""Bytes on disk that a byte of uncompressed input never exceeds: a token of four bytes and its
length, twice."""
_COMPRESSED = (".gz", ".zst", ".parquet")
_ALLOCATION = {
    # Arrow's own allocators reserve a gigabyte at once, used or not, and a limit counts that.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    # A batch reuses the memory of the one before it instead of new pages: a tenth of all CPU time.
    "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
    "MALLOC_TRIM_THRESHOLD_": str(256 * MIB),
}


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_environ(num_threads: int) -> dict[str, str]:
    """The environment of a worker with so many threads. Arrow too has its own pool."""
    return {**thread_limits(num_threads), "OMP_NUM_THREADS": str(num_threads), **_ALLOCATION}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How many processes there are, and how much each may use."""

    workers: int
    total_bytes: int  # what the build takes when no document is large
    limit_bytes: int  # what one process may take

    def max_document(self, tokenizer: Tokenizer) -> int:
        """Bytes of text that one document may have."""
        source: EngineSource | None = getattr(tokenizer, "engine_source", None)
        library = "" if source is None else source.library
        per_byte = DOCUMENT_BYTES.get(library, _PLAIN_DOCUMENT_BYTES)
        return max((self.limit_bytes - PROCESS_BYTES) // per_byte, _SMALL_DOCUMENT)


def plan_memory(workers: int, memory: int | None, *, required: bool) -> MemoryPlan:
    """As many of `workers` as fit into `memory` (None: what is free now); 1 is this process alone.

    `required`: the user named the number of workers, so too many are refused.
    """
    total = memory
    if total is None:
        found = available_memory()
        total = _UNKNOWN_MEMORY if found is None else found
    if memory is not None:
        fits = max(memory // PROCESS_BYTES - 1, 1)
        if memory < PROCESS_BYTES or (required and workers > fits):
            many = required and workers > 1
            needed = f", {workers} workers take about {_total_bytes(workers):,}" if many else ""
            raise OptionError(
                f"{{memory}}: one process takes about {_total_bytes(1):,} bytes{needed}: allow "
                "that much" + (", or use fewer {workers}" if many else ""),
                memory=memory,
                workers=...,
            )
        workers = min(workers, fits)
    return MemoryPlan(
        workers=workers,
        total_bytes=_total_bytes(workers),
        limit_bytes=max(total // _num_processes(workers), PROCESS_BYTES + MIB),
    )


def _num_processes(workers: int) -> int:
    return workers + 1 if workers > 1 else 1


def _total_bytes(workers: int) -> int:
    return PROCESS_BYTES * _num_processes(workers)


def out_of_memory(where: str) -> BuildError:
    return BuildError(
        f"{where}: this build has too little memory for it; finished work is kept: allow more "
        "({memory}), use fewer {workers}, or shorten what is large in the input, and continue with "
        "{resume}",
        memory=...,
        workers=...,
        resume=True,
    )


@runtime_checkable
class _Measurable(Protocol):
    """A source that knows how many of its bytes are before a cursor."""

    def bytes_before(self, cursor: Cursor) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedEstimate:
    """What one feed will take."""

    source: str
    num_bytes: int | None  # of input; None when unknown
    num_units: int
    num_tokens: int | None  # about; None when unknown
    disk_bytes: int | None  # at the peak: segments and store together


def estimate_feed(
    feed: FeedChunks,
    tokenizer: Tokenizer,
    rules: TokenRules,
    *,
    num_units: int = 0,
    max_tokens: int | None,
) -> FeedEstimate:
    """`max_tokens` fill the feed's splits; None: there is no limit."""
    size = feed.source.size_hint()
    tokens: int | None = max_tokens
    disk: int | None = None
    if size is not None and feed.is_portable:
        tokens_per_byte, documents_per_byte = _density(feed, tokenizer)
        tokens, documents = int(size * tokens_per_byte), int(size * documents_per_byte)
        tokens += documents if rules.end_id is not None else 0
        if max_tokens is not None and tokens > max_tokens:
            tokens, documents = max_tokens, documents * max_tokens // tokens
        disk = 2 * (tokens * np.dtype(rules.dtype).itemsize + documents * 8)
    return FeedEstimate(
        source=feed.source.name,
        num_bytes=size,
        num_units=num_units,
        num_tokens=tokens,
        disk_bytes=disk,
    )


def _density(feed: FeedChunks, tokenizer: Tokenizer) -> tuple[float, float]:
    """Tokens and documents per byte of input, measured on the first chunk; on its beginning, when
    it is compressed and larger than its size."""
    num_bytes = documents = encoded = tokens = 0
    chunk = cast(Source, feed.chunks[0])
    size = chunk.size_hint() or feed.sizes[0]
    with closing(read_chunks([chunk], None)) as batches:
        for found in batches:
            texts = found.batch.texts
            num_bytes += texts.nbytes
            documents += len(texts)
            if not encoded and len(texts):
                some = texts[: max(1, SAMPLE_BYTES * len(texts) // max(texts.nbytes, 1))]
                encoded = some.nbytes
                tokens = len(tokenizer.encode_batch(some).values)
            if num_bytes >= units.CHUNK_BYTES and isinstance(chunk, _Measurable):
                size = chunk.bytes_before(cast(Cursor, found.batch.cursor["cursor"]))
                break
    size = max(size, 1)
    return num_bytes / size * tokens / max(encoded, 1), documents / size


def check_space(folder: Path, estimates: Sequence[FeedEstimate], *, used: int) -> None:
    """Refuse to start what the disk cannot hold; `used` bytes are in the journal already."""
    needed = sum(estimate.disk_bytes or 0 for estimate in estimates) - used
    free = shutil.disk_usage(folder).free
    if needed > free:
        read = sum(estimate.num_bytes or 0 for estimate in estimates)
        raise BuildError(
            f"{folder}: {_mb(free)} are free, but this build takes about {_mb(needed)} there until "
            f"it is finished, half of it for the store ({_mb(read)} of input, {len(estimates)} "
            f"source{'s' if len(estimates) > 1 else ''}): free some space, build on another disk, "
            "or limit the tokens"
        )


def is_surely_enough(folder: Path, feeds: Sequence[FeedChunks]) -> bool:
    """Whether the disk holds the worst that this input can become, so no estimate is needed."""
    found: list[Any] = [getattr(feed.source, "files", ()) for feed in feeds]
    files = (file for listed in found if isinstance(listed, tuple) for file in listed)
    if any(file.name.lower().endswith(_COMPRESSED) for file in files):
        return False
    size = sum(feed.source.size_hint() or 0 for feed in feeds)
    return shutil.disk_usage(folder).free > _MAX_EXPANSION * size


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
