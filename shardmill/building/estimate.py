"""What a build would take: CPU time of each role, hours, units, shards, disk and requests.

A few megabytes of each source are made into a unit, by the code of a build, in a temporary folder.
Its CPU time, for as much input as there is, is that of the workers: right if all of the input is
like its beginning, and disks and networks keep up. What cannot be known stays None.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from shardmill.building.plan import (
    BuildSpec,
    Feed,
    FeedChunks,
    ReadChunk,
    Unit,
    check_feeds,
    chunks_of,
    cut_source,
    cut_units,
)
from shardmill.building.resources import (
    SAMPLE_BYTES,
    Sample,
    WorkerKeywords,
    cores_of,
    limited_feeds,
    open_resources,
    read_sample,
)
from shardmill.building.segments import Receipt
from shardmill.building.splits import open_state
from shardmill.building.worker import ChunkEncoder, TokenRules, UnitTask, WorkerTools
from shardmill.building.workplace import FolderOutput, target_of
from shardmill.protocols import CuttableSource, Source, Texts, Tokenizer
from shardmill.records import TextBatch
from shardmill.store.layout import ITEMSIZE
from shardmill.tokenizers import EngineChoice, choose_encoder
from shardmill.tokenizers.base import as_list

if TYPE_CHECKING:
    import pyarrow as pa

_SECONDS = 1.0
"""Of CPU for the sample of a source, about; it is encoded twice."""
_UNIT_SECONDS, _DOCUMENT_SECONDS = 400e-6, 20e-9
"""Of the coordinator's CPU: to hand out a unit and settle it, and for each document at the end. A
sample is too small to show them; `benchmarks/scale_model.py` measures them."""
_REQUESTS_OF_A_UNIT = 4
"""Its receipt is looked for, written, read and removed."""
_OTHER_REQUESTS = 30
"""Claims, listings, the plan, the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPlan:
    """What one feed would take; None: unknown."""

    source: str
    num_bytes: int | None  # of input
    num_tokens: int | None  # about, as everything after it
    disk_bytes: int | None = None  # at the peak: the store, and its receipts
    num_units: int | None = None
    num_shards: int | None = None
    worker_seconds: float | None = None  # of CPU, of all workers together
    coordinator_seconds: float | None = None  # of CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What a build would take. Sums are None when a part of them is unknown."""

    feeds: tuple[FeedPlan, ...]
    engine: str  # that encodes
    workers: int  # processes that encode; 1: only this one
    cores: int  # that they share
    start_seconds: float  # to choose the engine, which is proved once
    memory_bytes: int  # of all processes together, when no document is large
    most_document: int  # bytes of text: a larger document is refused
    free_bytes: int  # on the disk of the store, now
    requests: int | None  # about, to the URL of the store; None: it is in a folder

    @property
    def disk_bytes(self) -> int | None:
        """Needed at the peak."""
        found = self._total("disk_bytes")
        return None if found is None else int(found)

    @property
    def worker_hours(self) -> float | None:
        """Of CPU, on cores like these."""
        return _hours(self._total("worker_seconds"))

    @property
    def coordinator_hours(self) -> float | None:
        return _hours(self._total("coordinator_seconds"))

    @property
    def hours(self) -> float | None:
        """From start to end."""
        work, rest = self._total("worker_seconds"), self._total("coordinator_seconds")
        if work is None or rest is None:
            return None
        return _hours(self.start_seconds + work / min(self.workers, self.cores) + rest)

    def _total(self, name: str) -> float | None:
        found = [getattr(feed, name) for feed in self.feeds]
        return None if None in found else sum(found)

    def to_json(self) -> dict[str, Any]:
        sums = ("disk_bytes", "worker_hours", "coordinator_hours", "hours")
        return {**asdict(self), **{name: getattr(self, name) for name in sums}}


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600


def plan_store(
    feeds: Sequence[Feed],
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    spec: BuildSpec,
    engine: EngineChoice = "auto",
    to_url: bool = False,
    **workers: Unpack[WorkerKeywords],
) -> BuildPlan:
    """What `build_store` would take with these arguments. Nothing is built: about a second of work
    is done for each source, in a temporary folder. Ray is asked only if its address is given.

    `to_url`: the store goes to a URL, and `folder` has only files at work.
    """
    check_feeds(feeds)
    rules = TokenRules.of(spec, tokenizer)
    workers["run_on"] = "local" if workers.get("ray_address") is None else "ray"
    with open_resources(**workers) as resources:
        max_document = resources.max_document(tokenizer)
    feeds = limited_feeds(feeds, max_document)
    by_hash = tuple(feed.by_hash for feed in feeds)
    encoder = ChunkEncoder(rules=rules, max_document=max_document, by_hash=by_hash)
    tools, start_seconds = _open_tools([feed.source for feed in feeds], tokenizer, engine)
    plans = [_plan_feed(feed, number, spec, encoder, tools) for number, feed in enumerate(feeds)]
    known = sum(feed.num_bytes or 0 for feed in plans if feed.num_units)
    target = target_of(folder)
    existing = next(path for path in (target, *target.parents) if path.is_dir())
    return BuildPlan(
        feeds=tuple(plans),
        engine=str(tools.produced_by["engine"]),
        workers=resources.workers_for(known),
        cores=cores_of(resources.cluster),
        start_seconds=start_seconds,
        memory_bytes=resources.total_bytes,
        most_document=max_document,
        free_bytes=shutil.disk_usage(existing).free,
        requests=_requests(plans, ITEMSIZE[rules.dtype]) if to_url else None,
    )


def _open_tools(
    sources: Sequence[Source], tokenizer: Tokenizer, engine: EngineChoice
) -> tuple[WorkerTools, float]:
    """The encoder that a build of these sources would use, and the seconds to choose it."""
    sizes, started = [source.size_hint() for source in sources], time.monotonic()
    first: Texts = []
    if isinstance(sources[0], CuttableSource):  # another may be read only once
        first = next((batch.texts for batch in chunks_of(sources[0])[0].batches()), [])
    chosen = choose_encoder(
        tokenizer,
        engine=engine,
        corpus=as_list(first),
        size_hint=None if None in sizes else sum(size or 0 for size in sizes),
    )
    tools = WorkerTools(
        tokenizer=tokenizer, produced_by=chosen.produced_by, check="sample", opened=chosen
    )
    return tools, time.monotonic() - started


def _plan_feed(
    feed: Feed, number: int, spec: BuildSpec, encoder: ChunkEncoder, tools: WorkerTools
) -> FeedPlan:
    started = time.process_time()
    chunks, rules = cut_source(feed.source, feed.fill), encoder.rules
    size, limit = feed.source.size_hint(), chunks.max_tokens
    if size is None or not chunks.is_cut:
        return FeedPlan(source=feed.source.name, num_bytes=size, num_tokens=limit)
    units = list(
        cut_units(chunks, number, plan="", shard_bytes=spec.shard_bytes, dtype=rules.dtype)
    )
    cut_seconds = time.process_time() - started
    # The first times take up to three times as long: libraries start, and memory is new.
    sample = min((read_sample(chunks) for _ in range(3)), key=attrgetter("read_seconds"))
    trials = (_try(chunks, number, sample, spec, encoder, tools) for _ in range(2))
    trial = min(trials, key=lambda trial: trial.worker_seconds / trial.num_bytes)
    scale, text = size / sample.input_bytes, size / sample.input_bytes * sample.text_bytes
    tokens = text * trial.num_tokens / trial.num_bytes
    used = 1.0 if limit is None or tokens <= limit else limit / tokens
    itemsize = ITEMSIZE[rules.dtype]
    shares = [1.0]
    if feed.by_hash is not None:
        others = [share for _, share in feed.by_hash.fractions]
        shares = [1 - sum(others), *others]
    return FeedPlan(
        source=feed.source.name,
        num_bytes=size,
        num_tokens=int(used * tokens),
        disk_bytes=int(used * (tokens * itemsize + 2 * 8 * scale * sample.documents)),
        num_units=len(units),
        num_shards=sum(
            ceil(used * tokens * unit.num_bytes / size * share * itemsize / spec.shard_bytes)
            for unit in units[: ceil(used * len(units))]
            for share in shares
        ),
        worker_seconds=used
        * (scale * sample.read_seconds + text * trial.worker_seconds / trial.num_bytes),
        coordinator_seconds=cut_seconds
        + used * (_UNIT_SECONDS * len(units) + _DOCUMENT_SECONDS * scale * sample.documents),
    )


class _Trial(NamedTuple):
    """What some texts gave and took."""

    num_bytes: int  # of text, at least 1
    num_tokens: int
    worker_seconds: float  # of CPU


def _try(
    feed: FeedChunks,
    number: int,
    sample: Sample,
    spec: BuildSpec,
    encoder: ChunkEncoder,
    tools: WorkerTools,
) -> _Trial:
    """Make a unit of as many of these texts as take about a second."""
    texts = _some_texts(sample, tools)
    batches = tuple(TextBatch(texts=one, num_read=len(one), cursor={}) for one in texts)
    unit = Unit(
        feed=number,
        number=0,
        plan="",
        inputs="",
        source=feed.source.name,
        first_chunk=0,
        chunks=(ReadChunk(name=feed.source.name, held=batches),),
        num_bytes=0,
    )
    fill = feed.fill if encoder.by_hash[number] is not None else (("train", None),)
    receipts: list[Receipt] = []
    itemsize = ITEMSIZE[encoder.rules.dtype]
    with tempfile.TemporaryDirectory() as folder:
        output = FolderOutput(store=Path(folder) / "store", receipts=Path(folder))
        output.store.mkdir()
        task = UnitTask(
            feed=number,
            units=(unit,),
            fill=fill,
            before=open_state(fill),
            encoder=encoder,
            output=output,
            shard_tokens=spec.shard_bytes // itemsize,
        )
        started = time.process_time()
        task.run(tools, receipts.append)
        made = time.process_time()
    num_bytes = sum(one.nbytes for one in texts)
    return _Trial(max(num_bytes, 1), receipts[0].num_tokens, made - started)


def _some_texts(sample: Sample, tools: WorkerTools) -> list[pa.LargeStringArray]:
    """The first texts, up to about a second of work. A few are encoded for that, which also warms
    the engine up."""
    texts = [batch.texts for batch in sample.batches if len(batch.texts)]
    if not texts:
        return []
    first = texts[0][: max(1, SAMPLE_BYTES * len(texts[0]) // max(texts[0].nbytes, 1))]
    started = time.process_time()
    tools.encoder(first).encode_batch(first)
    left = first.nbytes * _SECONDS / max(time.process_time() - started, 1e-6)
    some = []
    for one in texts:
        if left > 0:
            some.append(one[: max(1, int(len(one) * min(1.0, left / max(one.nbytes, 1))))])
            left -= one.nbytes
    return some


def _requests(feeds: Sequence[FeedPlan], itemsize: int) -> int | None:
    """Uploads of shards, in parts, and a look at each; receipts; everything else."""
    from shardmill.remote.folder import part_bytes  # fsspec takes a while

    total = _OTHER_REQUESTS
    for feed in feeds:
        if feed.num_shards is None or feed.num_tokens is None or feed.num_units is None:
            return None
        size = feed.num_tokens * itemsize // max(feed.num_shards, 1)
        parts = ceil(size / part_bytes(size))
        upload = 1 if parts <= 1 else parts + 2  # begin and end
        total += feed.num_shards * (upload + 1) + _REQUESTS_OF_A_UNIT * feed.num_units
    return total
