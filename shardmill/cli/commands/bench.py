"""`shardmill bench`: how fast this machine tokenises, builds and reads, on the user's own data.

Contenders of one measurement alternate in this process, in an order that rotates; a share is the
median of the rounds' ratios, so other work on the machine disturbs it little.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from shardmill.arguments import whole_number
from shardmill.building import BuildSpec, Feed, build_store
from shardmill.cli.options import Field
from shardmill.cli.printing import Answer
from shardmill.errors import EngineMismatchError, OptionError, TokenizerError
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.loading.config import meant_split
from shardmill.protocols import Encoder, Source, Tokenizer
from shardmill.records import OffsetArray, TokenFile, write_next_token_pairs
from shardmill.sources import open_source
from shardmill.sources.batches import byte_lengths
from shardmill.store import Store, open_store
from shardmill.store.readers import TokenSpace, open_tokens
from shardmill.store.readers.token_space import ReaderName
from shardmill.tokenizers import EngineChoice, choose_encoder, open_tokenizer
from shardmill.tokenizers.base import as_list
from shardmill.tokenizers.engines import fast_candidates

LIMIT, RANDOM, EPOCH = "read: a plain copy", "read: random windows", "read: shuffled epoch"
_ROUNDS = 7
_LEAST_UNIT = 2**20


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Prints one table: megabytes of text a second for the reference engine, the fast ones and a
    whole build; windows a second of random reads and of a shuffled epoch, with their share of what
    a plain copy reaches. What is built for it is removed. A number may differ by a tenth from call
    to call; a machine that does other work gives other numbers.

    Example: shardmill bench 'data/*.jsonl' --tokenizer spm.model

    Example: shardmill bench --store store --json

    Exit 0: measured. Exit 2: a mistake in the call or its input.
    """

    inputs: Annotated[list[str] | None, "INPUTS", "Text to measure with, as for build."] = None
    tokenizer: Annotated[str | None, "Whose speed is measured on INPUTS, as for build."] = None
    store: Annotated[Path | None, "Read this store. Default: the one built from INPUTS."] = None
    field: Field = None
    megabytes: Annotated[int, "Text to tokenise and build with."] = 16
    seconds: Annotated[float, "To spend on each number, about."] = 2.0
    workers: Annotated[int, "Processes that build."] = 1
    seq_len: Annotated[int, "Inputs of a window that is read."] = 1024
    batch_size: Annotated[int, "Windows that are read at a time."] = 32
    reader: Annotated[ReaderName, "How the store is read."] = "auto"
    as_json: Annotated[bool, "--json", "Print the numbers as JSON."] = False

    def run(self) -> Answer:
        for name in ("seq_len", "batch_size", "megabytes", "workers"):
            whole_number(getattr(self, name), name)
        inputs, tokenizer = self.inputs, self.tokenizer
        if not 0 < self.seconds < 60:
            raise OptionError(f"--seconds {self.seconds}: wanted more than 0 and less than 60")
        if not inputs and self.store is None:
            raise OptionError("nothing to measure: name text and --tokenizer, or --store, or both")
        if bool(inputs) != bool(tokenizer):
            missing = "--tokenizer is missing" if inputs else "text is missing: name files for it"
            raise OptionError(f"{missing}; INPUTS and --tokenizer go together")
        rates: list[Rate] = []
        with tempfile.TemporaryDirectory(prefix="shardmill-bench-") as scratch:
            built = Path(scratch, "store")
            if inputs and tokenizer:
                given: dict[str, Any] = {"field": self.field} if self.field else {}
                source, opened = open_source(inputs, **given), open_tokenizer(tokenizer)
                sample = take_sample(source, self.megabytes * 10**6)
                rates += _announced(measure_engines(opened, sample, self.seconds))
                feed = Feed(source=source, fill=(("train", _num_tokens(opened, sample)),))
                rates += _announced(measure_build(feed, opened, sample, self.workers, built, rates))
            folder = self.store or built
            store, split = meant_split(folder, None) or (open_store(folder), "train")
            rates += _announced(measure_reading(store, split, self))
        facts = {
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "rates": [asdict(rate) for rate in rates],
        }
        return Answer(facts, _table(rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One measured speed."""

    name: str
    megabytes: float | None = None  # a second: of text, or of tokens as they are stored
    windows: float | None = None  # a second
    share: float | None = None  # of the speed of `limit`
    limit: str | None = None
    note: str = ""


def _announced(rates: Iterator[Rate]) -> Iterator[Rate]:
    """The rates, each with a line on stderr when it is measured."""
    for rate in rates:
        print(f"shardmill bench: {rate.name}", file=sys.stderr)
        yield rate


def _table(rates: list[Rate]) -> Iterator[str]:
    width = max(len(rate.name) for rate in rates)
    yield f"{'':{width}}  {'MB/s':>8}  {'windows/s':>10}  {'share':>6}"
    for rate in rates:
        share = "" if rate.share is None else f"{rate.share:.2f}"
        note = rate.note or (f"of {rate.limit}" if rate.limit not in (None, rate.name) else "")
        numbers = f"{_number(rate.megabytes):>8}  {_number(rate.windows):>10}  {share:>6}"
        yield f"{rate.name:{width}}  {numbers}  {note}".rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


# timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to do the work."""

    name: str
    prepare: Callable[[int], Iterable[Any]]  # fresh arguments for that many calls, not timed
    run: Callable[[Any], object]  # one call


def alternate(
    contenders: Sequence[Contender], *, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Seconds per call of each contender, one number per round.

    Every call gets arguments that no call had before, so that none finds in the cache what another
    fetched.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    gc.collect()
    gc.freeze()  # older objects are not visited by the collections below
    try:
        for number in range(rounds):
            shift = number % len(contenders)
            for contender in [*contenders[shift:], *contenders[:shift]]:
                arguments, run = list(contender.prepare(calls)), contender.run
                gc.collect()
                started = time.perf_counter()
                for argument in arguments:
                    run(argument)
                times[contender.name].append((time.perf_counter() - started) / len(arguments))
    finally:
        gc.unfreeze()
    return times


def speed_of(times: Mapping[str, Sequence[float]], name: str, *, limit: str) -> float:
    """How much of the limit's speed a contender reaches: the median of the rounds' ratios."""
    pairs = zip(times[limit], times[name], strict=True)
    return statistics.median(bound / taken for bound, taken in pairs)


# tokenising and building


def take_sample(source: Source, num_bytes: int) -> list[Any]:
    """The first batches of texts, as Arrow arrays, up to at least this many bytes of text."""
    batches, total = [], 0
    for batch in source.batches():
        if total >= num_bytes:
            break
        if len(batch.texts):
            batches.append(batch.texts)
            total += int(byte_lengths(batch.texts).sum())
    if not total:
        raise OptionError(f"{source.name}: holds no text to measure with; name other inputs")
    return batches


def measure_engines(tokenizer: Tokenizer, sample: list[Any], seconds: float) -> Iterator[Rate]:
    """The reference, then each fast engine that takes this model, whether it is proved or not."""
    reference = encode_speed(tokenizer, sample, seconds)
    name = "tokenise: reference"
    yield Rate(name=name, megabytes=reference)
    candidates = fast_candidates(tokenizer)
    for engine in candidates.engines:
        speed = encode_speed(engine, sample, seconds)
        yield Rate(
            name=f"tokenise: {engine.name} {engine.version}",
            megabytes=speed,
            share=speed / reference,
            limit=name,
        )
    for refusal in candidates.refusals:
        yield Rate(name="tokenise: no fast engine", note=refusal)


def encode_speed(encoder: Encoder, sample: list[Any], seconds: float) -> float:
    """Megabytes of text a second, over as many batches as fit into the time, at least one. None is
    encoded twice: an engine may remember words."""
    encoder.encode_batch(["warm up"])
    done, taken, began = 0, 0.0, time.perf_counter()
    for texts in sample:
        encoder.encode_batch(texts)
        done += int(byte_lengths(texts).sum())
        taken = time.perf_counter() - began
        if taken >= seconds:
            break
    return done / taken / 1e6


def _num_tokens(tokenizer: Tokenizer, sample: list[Any]) -> int:
    """About how many the build makes of the sample."""
    encoder: Encoder = next(iter(fast_candidates(tokenizer).engines), tokenizer)
    ends = sum(map(len, sample)) if _has_eot(tokenizer) else 0
    return ends + sum(len(encoder.encode_batch(texts).values) for texts in sample)


def _has_eot(tokenizer: Tokenizer) -> bool:
    return "eot" in tokenizer.special_token_ids()


def measure_build(
    feed: Feed,
    tokenizer: Tokenizer,
    sample: list[Any],
    workers: int,
    folder: Path,
    engines: list[Rate],
) -> Iterator[Rate]:
    """A store of the feed, which is about the sample; `engines` are the speeds to compare it with.

    The proof of a fast engine has its own line: it costs the same for a megabyte and a terabyte.
    """
    texts = as_list(sample[0])
    engine: EngineChoice = "reference"

    def prove() -> float:
        began = time.perf_counter()
        choose_encoder(tokenizer, engine="fast", corpus=texts)
        return time.perf_counter() - began

    if fast_candidates(tokenizer).engines:
        name = "build: proof of fast"
        try:
            seconds = prove()
        except (EngineMismatchError, TokenizerError) as error:
            yield Rate(name=name, note=f"failed: {error}")
        else:
            engine = "fast"
            yield Rate(name=name, note=f"{seconds:.1f} s, once a build")
    num_bytes = sum(int(byte_lengths(texts).sum()) for texts in sample)
    done = build_store(
        [feed],
        folder,
        tokenizer=tokenizer,
        spec=BuildSpec(append_eot=_has_eot(tokenizer)),
        engine=engine,
        workers=workers,
        unit_bytes=max(_LEAST_UNIT, num_bytes // (4 * workers)),
        max_loss=1.0,  # it is measured, not kept
        allow_empty=True,
    )
    # the build proved the engine, too, of which the first part was known by then, as it is now
    work = max(done.seconds - (prove() if engine == "fast" else 0), 1e-9)
    made_by = engine if engine == "reference" else done.manifest.produced_by["engine"]
    alone = next(rate for rate in engines if f" {made_by}" in rate.name)
    speed = num_bytes / work / 1e6
    processes = "1 process" if workers == 1 else f"{workers} workers"
    yield Rate(
        name=f"build: {processes}, {engine}",
        megabytes=speed,
        share=speed / (alone.megabytes or speed),
        limit=alone.name,
    )


# reading


def measure_reading(store: Store, split: str, options: BenchCommand) -> Iterator[Rate]:
    """The limit, random windows, and a shuffled epoch.

    The limit is one thread that casts as many tokens as a batch has, in stored order, into reused
    int64 inputs and labels. Pages that are not in memory are read from disk, as in training.
    """
    seq_len, reader = options.seq_len, options.reader
    if store.is_chat:
        raise OptionError(
            f"{store.folder}: a store of conversations; this measures windows of documents"
        )
    shards = sorted(store.token_files(split), key=lambda one: one.num_tokens)
    if not shards or shards[-1].num_tokens <= seq_len:
        largest = shards[-1].num_tokens if shards else 0
        raise OptionError(
            f"{store.folder}, split {split!r}: its largest shard has {largest:,} tokens, a window "
            f"{seq_len + 1:,}; take a smaller --seq-len, or more text"
        )
    shard = shards[-1]
    batch_size = min(options.batch_size, (shard.num_tokens - 1) // seq_len)
    source = TokenSource(store.folder, seq_len=seq_len, split=split, reader=reader)
    loader = Loader(SampleStream([source], seed=0), batch_size=batch_size)
    with open_tokens(store, split, reader=reader) as space, closing(loader):
        batches = iter(loader)
        contenders = [
            _plain_copy(shard, seq_len * batch_size),
            _random_windows(space, seq_len, batch_size),
            Contender(name=EPOCH, prepare=range, run=lambda _: next(batches)),
        ]
        warm = alternate(contenders, rounds=2, calls=3)  # the first round opens and maps files
        slowest = max(taken[1] for taken in warm.values())
        calls = max(1, min(10_000, int(options.seconds / _ROUNDS / max(slowest, 1e-7))))
        times = alternate(contenders, rounds=_ROUNDS, calls=calls)
    size = seq_len * batch_size * np.dtype(store.dtype).itemsize
    for name, taken in times.items():
        one = statistics.median(taken)
        yield Rate(
            name=name,
            megabytes=size / one / 1e6,
            windows=batch_size / one,
            share=speed_of(times, name, limit=LIMIT),
            limit=LIMIT,
        )


def _plain_copy(shard: TokenFile, size: int) -> Contender:
    tokens = np.asarray(np.memmap(shard.path, np.dtype(shard.dtype).newbyteorder("<"), mode="r"))
    inputs, labels = np.empty((2, size), np.int64)
    num_batches = max(1, (len(tokens) - 1) // size)

    def copy(number: int) -> None:
        start = number % num_batches * size
        inputs[:] = tokens[start : start + size]
        labels[:] = tokens[start + 1 : start + 1 + size]

    return Contender(name=LIMIT, prepare=range, run=copy)


def _random_windows(space: TokenSpace, seq_len: int, batch_size: int) -> Contender:
    rng = np.random.default_rng(0)
    inputs, labels = np.empty((2, batch_size, seq_len), np.int64)

    def starts(calls: int) -> OffsetArray:
        return rng.integers(0, space.num_tokens - seq_len, (calls, batch_size))

    def read(at: OffsetArray) -> None:
        write_next_token_pairs(space.gather(at, seq_len + 1), None, inputs, labels)

    return Contender(name=RANDOM, prepare=starts, run=read)
