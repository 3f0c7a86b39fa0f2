"""What a build may use: workers, cores, memory and disk. No byte of a store depends on it.

Memory is bounded by the number of processes and the largest document, never by the input. A
document that does not fit is refused by name and size. Disk is estimated from the beginning of each
source; what cannot be known stays None and never leads to a refusal.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import numpy as np

from shardmill.arguments import whole_number
from shardmill.building import plan
from shardmill.building.plan import Feed, FeedChunks
from shardmill.building.worker import TokenRules
from shardmill.errors import BuildError, OptionError
from shardmill.machine import available_memory, num_cores
from shardmill.protocols import Tokenizer
from shardmill.records import Cursor, TextBatch
from shardmill.sources import limited
from shardmill.tokenizers import thread_limits
from shardmill.tokenizers.base import EngineSource

if TYPE_CHECKING:
    from shardmill.building.engines.ray import RayCluster

RunOn: TypeAlias = Literal["local", "ray"]

MIB = 2**20
TASK_BYTES = 256 * MIB
"""Of input for a worker at a time."""
WORTH_A_WORKER = 128 * MIB
"""Of input for each worker that nobody asked for."""
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
_MAX_EXPANSION = 20
"""Bytes on disk that a byte of uncompressed input never exceeds: a token of four bytes, and its
length in the receipt and in the index."""
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
    unit_bytes: int | None  # of input for a worker at a time; None: 256 MiB
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

    def workers_for(self, num_bytes: int) -> int:
        """Processes that encode so much input; 1: only this one, unless they run on Ray.

        Unasked, workers are started when each gets enough to be worth the second that its start
        takes.
        """
        if self.is_asked or self.cluster is not None:
            return self.workers
        return max(1, min(self.workers, num_bytes // WORTH_A_WORKER))

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
        if value is not None:  # too little memory is refused below, where the least is known
            whole_number(value, name, least=None if name == "memory" else 1)
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
        yield Resources(
            workers=fitting,
            is_asked=workers is not None,
            unit_bytes=unit_bytes or TASK_BYTES,
            limit_bytes=max(total // _num_processes(fitting), PROCESS_BYTES + MIB),
            is_limited=memory is not None,
            cluster=cluster,
        )


def cores_of(cluster: RayCluster | None) -> int:
    """Of this machine, or of all that Ray has."""
    return cluster.num_cpus if cluster and cluster.is_elsewhere else num_cores()


def _open_cluster(workers: int | None, address: str | None) -> RayCluster:
    from shardmill.building.engines.ray import RayCluster

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """The beginning of a source, as it was read."""

    batches: tuple[TextBatch, ...]  # the first ones, of about a chunk of text
    input_bytes: int  # that gave the texts counted here
    text_bytes: int
    documents: int
    read_seconds: float  # of CPU


def read_sample(feed: FeedChunks) -> Sample:
    """The first chunk of a feed; its beginning, when it is compressed and larger than its size."""
    chunk, held = feed.chunks[0], []
    text_bytes = documents = 0
    bytes_before: Callable[[Cursor], int] | None = getattr(chunk, "bytes_before", None)
    size = chunk.size_hint() or feed.sizes[0]
    started = time.process_time()
    for batch in chunk.batches():
        if text_bytes < plan.CHUNK_BYTES:
            held.append(batch)
        text_bytes += batch.texts.nbytes
        documents += len(batch.texts)
        if text_bytes >= plan.CHUNK_BYTES and bytes_before is not None:
            size = bytes_before(batch.cursor)
            break
    return Sample(
        batches=tuple(held),
        input_bytes=max(size, 1),
        text_bytes=text_bytes,
        documents=documents,
        read_seconds=time.process_time() - started,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedEstimate:
    """What one feed will give; None: unknown."""

    source: str
    num_bytes: int | None  # of input
    num_tokens: int | None  # about
    disk_bytes: int | None  # at the peak: the store, and its receipts


def estimate_feed(
    feed: FeedChunks, tokenizer: Tokenizer, rules: TokenRules, sample: Sample | None = None
) -> FeedEstimate:
    """From a sample of the feed, which is read if none is given."""
    size, max_tokens = feed.source.size_hint(), feed.max_tokens
    tokens: int | None = max_tokens
    disk: int | None = None
    if size is not None and feed.is_cut:
        sample = sample or read_sample(feed)
        scale = size / sample.input_bytes
        tokens = int(scale * sample.text_bytes * _tokens_per_byte(sample, tokenizer))
        documents = int(scale * sample.documents)
        tokens += documents if rules.end_id is not None else 0
        if max_tokens is not None and tokens > max_tokens:
            tokens, documents = max_tokens, documents * max_tokens // tokens
        disk = tokens * np.dtype(rules.dtype).itemsize + 2 * documents * 8
    return FeedEstimate(source=feed.source.name, num_bytes=size, num_tokens=tokens, disk_bytes=disk)


def _tokens_per_byte(sample: Sample, tokenizer: Tokenizer) -> float:
    """Of text: of some kilobytes of it."""
    texts = next((batch.texts for batch in sample.batches if len(batch.texts)), None)
    if texts is None:
        return 0.0
    some = texts[: max(1, SAMPLE_BYTES * len(texts) // max(texts.nbytes, 1))]
    num_bytes: int = max(some.nbytes, 1)
    return len(tokenizer.encode_batch(some).values) / num_bytes


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
    used = sum(path.stat().st_size for path in folder.glob("run-*/*/**/*"))
    needed = sum(estimate.disk_bytes or 0 for estimate in estimates) - used
    free = shutil.disk_usage(folder).free
    if needed > free:
        read = sum(estimate.num_bytes or 0 for estimate in estimates)
        raise BuildError(
            f"{folder}: {_mb(free)} are free, but this build takes about {_mb(needed)} there "
            f"({_mb(read)} of input, {len(estimates)} "
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
