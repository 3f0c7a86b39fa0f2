"""What a build may use: workers, cores, memory and disk. No byte of a store depends on it.

Memory is bounded by the number of processes and the largest document, never by the input. A
document that does not fit is refused by name and size. Disk is estimated from the beginning of each
source; what cannot be known stays None and never leads to a refusal.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, cast

import numpy as np

from shardmill.building import plan
from shardmill.building.plan import (
    SINGLE_PROCESS_UNIT_BYTES,
    UNIT_BYTES,
    BuildSpec,
    Feed,
    FeedChunks,
    check_feeds,
    cut_feed,
    read_chunks,
    unit_ranges,
)
from shardmill.building.worker import TokenRules
from shardmill.building.workplace import target_of
from shardmill.errors import BuildError, OptionError
from shardmill.machine import available_memory, num_cores
from shardmill.protocols import Source, Tokenizer
from shardmill.records import Cursor
from shardmill.sources import limited
from shardmill.tokenizers import thread_limits
from shardmill.tokenizers.base import EngineSource

if TYPE_CHECKING:
    from shardmill.building.ray import RayCluster

RunOn: TypeAlias = Literal["local", "ray"]

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
_UNKNOWN_SHARE = 2 * 2**30
"""Bytes assumed for a worker on machines that are not there yet."""
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


class WorkerKeywords(TypedDict, total=False):
    """How the work is divided."""

    workers: int | None  # processes; None: one for each core, if there is enough work
    unit_bytes: int | None  # of input for a worker at a time; None: 64 MiB
    memory: int | None  # bytes for all processes together; None: what is free
    run_on: RunOn  # "local" unless given
    ray_address: str | None  # for run_on="ray"; None: a Ray is started on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a build may use."""

    workers: int  # processes at most; 1: no other process
    is_asked: bool  # whether the user named that number
    unit_bytes: int
    limit_bytes: int  # of memory for one process
    is_limited: bool  # whether the user named the memory, so that the kernel keeps workers to it
    cluster: RayCluster | None = None  # where workers run; None: on this machine

    @property
    def total_bytes(self) -> int:
        """What the build takes when no document is large."""
        return _total_bytes(self.workers)

    def max_document(self, tokenizer: Tokenizer) -> int:
        """Bytes of text that one document may have."""
        source: EngineSource | None = getattr(tokenizer, "engine_source", None)
        library = "" if source is None else source.library
        per_byte = DOCUMENT_BYTES.get(library, _PLAIN_DOCUMENT_BYTES)
        return max((self.limit_bytes - PROCESS_BYTES) // per_byte, _SMALL_DOCUMENT)


@contextmanager
def open_resources(
    *,
    workers: int | None = None,
    unit_bytes: int | None = None,
    memory: int | None = None,
    run_on: RunOn = "local",
    ray_address: str | None = None,
) -> Iterator[Resources]:
    """Check the `WorkerKeywords`, and connect to Ray if the workers run there.

    As many workers as fit into the memory; too many are refused only when the user named their
    number.
    """
    for name, value in (("workers", workers), ("unit_bytes", unit_bytes), ("memory", memory)):
        if value is not None and value < 1:
            raise OptionError(f"{{{name}}}: wanted 1 or more", **{name: value})
    if run_on not in ("local", "ray"):
        raise OptionError("{run_on}: wanted 'local' or 'ray'", run_on=run_on)
    if run_on == "local" and ray_address is not None:
        raise OptionError(
            "{ray_address}: only with {run_on}", ray_address=ray_address, run_on="ray"
        )
    with _open_cluster(workers, ray_address) if run_on == "ray" else nullcontext() as cluster:
        fitting = wanted = workers or cores_of(cluster)
        total = memory
        if total is None and cluster is not None:
            # What is free here says nothing about the other machines.
            total = (cluster.memory_per_cpu or _UNKNOWN_SHARE) * (wanted + 1)
        if total is not None:
            fitting = min(wanted, max(total // PROCESS_BYTES - 1, 1))
            if total < PROCESS_BYTES or (workers is not None and fitting < workers):
                many = workers is not None and workers > 1
                needed = f", {workers} workers take about {_total_bytes(wanted):,}" if many else ""
                raise OptionError(
                    f"{{memory}}: one process takes about {_total_bytes(1):,} bytes{needed}: allow "
                    "that much" + (", or use fewer {workers}" if many else ""),
                    memory=total,
                    workers=...,
                )
        else:
            found = available_memory()
            total = _UNKNOWN_MEMORY if found is None else found
        # A single process needs no small units; what it began stays one unit when others join.
        usual = SINGLE_PROCESS_UNIT_BYTES if wanted == 1 and cluster is None else UNIT_BYTES
        yield Resources(
            workers=fitting,
            is_asked=workers is not None,
            unit_bytes=unit_bytes or usual,
            limit_bytes=max(total // _num_processes(fitting), PROCESS_BYTES + MIB),
            is_limited=memory is not None,
            cluster=cluster,
        )


def cores_of(cluster: RayCluster | None) -> int:
    """Of this machine, or of all that Ray has."""
    return cluster.num_cpus if cluster and cluster.is_elsewhere else num_cores()


def _open_cluster(workers: int | None, address: str | None) -> RayCluster:
    from shardmill.building.ray import RayCluster

    cluster = RayCluster(address, workers=workers or num_cores())
    if workers is None and not cluster.num_cpus:
        with cluster:
            raise OptionError(
                f"Ray has {cluster.describe()} now: start a node, or say how many {{workers}} it "
                "will have space for",
                workers=...,
            )
    return cluster


def worker_environ(num_threads: int) -> dict[str, str]:
    """The environment of a worker whose libraries, Arrow too, use `num_threads` each."""
    return {**thread_limits(num_threads), "OMP_NUM_THREADS": str(num_threads), **_ALLOCATION}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedEstimate:
    """What one feed will take."""

    source: str
    num_bytes: int | None  # of input; None when unknown
    num_units: int
    num_tokens: int | None  # about; None when unknown
    disk_bytes: int | None  # at the peak: segments and store together


def estimate_feed(
    feed: FeedChunks, tokenizer: Tokenizer, rules: TokenRules, *, num_units: int = 0
) -> FeedEstimate:
    size, max_tokens = feed.source.size_hint(), feed.max_tokens
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
    bytes_before: Callable[[Cursor], int] | None = getattr(chunk, "bytes_before", None)
    size = chunk.size_hint() or feed.sizes[0]
    with closing(read_chunks([chunk], None)) as batches:
        for batch in batches:
            texts = batch.texts
            num_bytes += texts.nbytes
            documents += len(texts)
            if not encoded and len(texts):
                some = texts[: max(1, SAMPLE_BYTES * len(texts) // max(texts.nbytes, 1))]
                encoded = some.nbytes
                tokens = len(tokenizer.encode_batch(some).values)
            if num_bytes >= plan.CHUNK_BYTES and bytes_before is not None:
                size = bytes_before(cast(Cursor, batch.cursor["cursor"]))
                break
    size = max(size, 1)
    return num_bytes / size * tokens / max(encoded, 1), documents / size


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build would take."""

    feeds: tuple[FeedEstimate, ...]
    workers: int  # processes at most; 1: no other process
    memory_bytes: int  # of all processes together, when no document is large
    most_document: int  # bytes of text: a larger document is refused
    free_bytes: int  # on the disk of the store, now

    @property
    def disk_bytes(self) -> int | None:
        """Needed at the peak; None when the size of a source is unknown."""
        known = [feed.disk_bytes for feed in self.feeds if feed.disk_bytes is not None]
        return sum(known) if len(known) == len(self.feeds) else None


def plan_store(
    feeds: Sequence[Feed],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    **workers: Unpack[WorkerKeywords],
) -> BuildPlan:
    """What `build_store` would take with these arguments. Nothing is written: a chunk of each
    source is read, and some kilobytes of it are encoded. Ray is asked only if its address is given.
    """
    check_feeds(feeds)
    rules = TokenRules.of(spec, tokenizer)
    workers["run_on"] = "local" if workers.get("ray_address") is None else "ray"
    with open_resources(**workers) as resources:
        max_document = resources.max_document(tokenizer)
    estimates = []
    for feed in limited_feeds(feeds, max_document):
        chunks = cut_feed(feed)
        num_units = sum(1 for _ in unit_ranges(chunks.sizes, resources.unit_bytes, {}))
        estimates.append(estimate_feed(chunks, tokenizer, rules, num_units=num_units))
    target = target_of(folder)
    existing = next(path for path in (target, *target.parents) if path.is_dir())
    return BuildPlan(
        feeds=tuple(estimates),
        workers=resources.workers,
        memory_bytes=resources.total_bytes,
        most_document=max_document,
        free_bytes=shutil.disk_usage(existing).free,
    )


def limited_feeds(feeds: Sequence[Feed], max_document: int) -> list[Feed]:
    """The same feeds, whose sources do not read documents that would not fit."""
    return [replace(feed, source=limited(feed.source, max_document)) for feed in feeds]


def check_space(
    folder: Path, feeds: Sequence[FeedChunks], tokenizer: Tokenizer, rules: TokenRules
) -> None:
    """Refuse to start what the disk of a workplace cannot hold."""
    if is_surely_enough(folder, feeds):
        return
    estimates = [estimate_feed(feed, tokenizer, rules) for feed in feeds]
    used = sum(path.stat().st_size for path in (folder / "segments").rglob("*"))
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
