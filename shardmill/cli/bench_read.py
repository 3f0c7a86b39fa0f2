"""How fast this machine reads windows of a store, against a plain copy of as many tokens.

In: a store, its split, the shape of a batch.  Out: `Rate`s.
Promise: the limit is one thread that casts as many tokens as a batch has, in the order they lie in,
into reused int64 inputs and labels; all alternate in rounds in this process; a share is the median
of the rounds' ratios. Pages that are not in memory are read from where they lie, as in training.
Not here: text and builds (bench_text), printing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.cli.bench_rounds import Contender, alternate, speed_of
from shardmill.cli.bench_text import Rate
from shardmill.errors import OptionError
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.mapped import TokenSpace, open_tokens
from shardmill.mapped.space import ReaderName
from shardmill.records import OffsetArray
from shardmill.shards import Store

LIMIT, RANDOM, EPOCH = "read: a plain copy", "read: random windows", "read: shuffled epoch"
_ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a batch."""

    seq_len: int
    batch_size: int

    @property
    def num_tokens(self) -> int:
        return self.seq_len * self.batch_size


def measure_reading(
    store: Store, split: str, shape: Shape, seconds: float, reader: ReaderName = "auto"
) -> Iterator[Rate]:
    """The limit, windows from anywhere, and a shuffled epoch."""
    shape = _fitting(store, split, shape)
    source = TokenSource(store.folder, seq_len=shape.seq_len, split=split, reader=reader)
    loader = Loader(SampleStream([source], seed=0), batch_size=shape.batch_size)
    with open_tokens(store, split, reader=reader) as space, closing(loader):
        batches = iter(loader)
        contenders = [
            _copies(store, split, shape),
            _windows(space, shape),
            Contender(name=EPOCH, prepare=range, run=lambda _: next(batches)),
        ]
        calls = _calls(contenders, seconds)
        times = alternate(contenders, rounds=_ROUNDS, calls=calls)
    size = shape.num_tokens * np.dtype(store.dtype).itemsize
    for name, taken in times.items():
        one = statistics.median(taken)
        yield Rate(
            name=name,
            megabytes=size / one / 1e6,
            windows=shape.batch_size / one,
            share=speed_of(times, name, limit=LIMIT),
            limit=LIMIT,
        )


def _fitting(store: Store, split: str, shape: Shape) -> Shape:
    """A batch that fits into the largest shard, where the limit copies it from."""
    if store.is_chat:
        raise OptionError(
            f"{store.folder}: a store of conversations; this measures windows of documents"
        )
    largest = max((file.num_tokens for file in store.token_files(split)), default=0)
    most = (largest - 1) // shape.seq_len
    if most < 1:
        raise OptionError(
            f"{store.folder}, split {split!r}: its largest shard has {largest:,} tokens, a window "
            f"{shape.seq_len + 1:,}; take a smaller seq_len=, or more text"
        )
    return Shape(seq_len=shape.seq_len, batch_size=min(shape.batch_size, most))


def _copies(store: Store, split: str, shape: Shape) -> Contender:
    """The limit."""
    file = max(store.token_files(split), key=lambda one: one.num_tokens)
    tokens = np.asarray(np.memmap(file.path, np.dtype(store.dtype).newbyteorder("<"), mode="r"))
    size = shape.num_tokens
    inputs, labels = np.empty((2, size), np.int64)
    places = max(1, (len(tokens) - 1) // size)

    def copy(number: int) -> None:
        start = number % places * size
        inputs[:] = tokens[start : start + size]
        labels[:] = tokens[start + 1 : start + 1 + size]

    return Contender(name=LIMIT, prepare=range, run=copy)


def _windows(space: TokenSpace, shape: Shape) -> Contender:
    rng = np.random.default_rng(0)
    inputs, labels = np.empty((2, shape.batch_size, shape.seq_len), np.int64)

    def starts(calls: int) -> OffsetArray:
        last = space.num_tokens - shape.seq_len
        return rng.integers(0, last, (calls, shape.batch_size))

    def read(at: OffsetArray) -> None:
        ids = space.gather(at, shape.seq_len + 1)
        inputs[:] = ids[:, :-1]
        labels[:] = ids[:, 1:]

    return Contender(name=RANDOM, prepare=starts, run=read)


def _calls(contenders: list[Contender], seconds: float) -> int:
    """How many calls of each contender in each round fill about `seconds` for each contender."""
    slowest = 0.0
    for contender in contenders:
        arguments: list[Any] = list(contender.prepare(4))
        contender.run(arguments[0])
        began = time.perf_counter()
        for argument in arguments[1:]:
            contender.run(argument)
        slowest = max(slowest, (time.perf_counter() - began) / 3)
    return max(1, min(10_000, int(seconds / _ROUNDS / max(slowest, 1e-7))))
