"""Small stores that all tests of the loader share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardmill.loading import SampleStream, TokenSource
from shardmill.records import IGNORE_INDEX, Ragged
from shardmill.testing.stores import build_small_store

SIZES = {"wiki": 611, "web": 1203, "code": 97}  # tokens


@dataclass(frozen=True, slots=True)
class Small:
    """A store, with its tokens and documents in memory."""

    folder: Path
    tokens: np.ndarray
    starts: np.ndarray  # of documents, empty ones among them


def write_small(folder: Path, num_tokens: int, seed: int, dtype: str = "uint16") -> Small:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, np.iinfo(dtype).max + 1, num_tokens, dtype=np.int64)
    lengths: list[int] = []
    while sum(lengths) < num_tokens:
        lengths.append(int(min(rng.integers(0, 23), num_tokens - sum(lengths))))
    documents = Ragged.from_lengths(ids, lengths)
    build_small_store(folder, {"train": documents}, dtype=dtype, shard_bytes=128)
    return Small(folder, ids, documents.offsets[:-1])


def write_all(folder: Path) -> dict[str, Small]:
    dtypes = {"wiki": "uint16", "web": "uint32", "code": "uint16"}
    return {
        name: write_small(folder / name, size, seed, dtypes[name])
        for seed, (name, size) in enumerate(SIZES.items())
    }


def open_stream(stores: dict[str, Small], names: list[str], *, seq_len: int, **options: object):
    sources = [TokenSource(stores[name].folder, seq_len=seq_len) for name in names]
    return SampleStream(sources, **options)  # type: ignore[arg-type]


def expected_rows(stores: dict[str, Small], stream: SampleStream, samples, *, documents: bool):
    """Inputs and labels of these samples, by slicing the tokens one by one."""
    found = stream.take(list(samples))
    rows = []
    for source, item in zip(found.source.tolist(), found.item.tolist(), strict=True):
        small = stores[stream.sources[source].name]
        start = item * stream.seq_len
        window = small.tokens[start : start + stream.seq_len + 1]
        labels = window[1:].copy()
        if documents:
            begins = set(small.starts.tolist())
            for column in range(stream.seq_len):
                if start + column + 1 in begins:
                    labels[column] = IGNORE_INDEX
        rows.append((window[:-1].tolist(), labels.tolist()))
    return rows
