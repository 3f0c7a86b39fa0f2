"""Laws of a store, and the smallest real stores to try them on.

In: documents, or a finished store of any builder.  Out: nothing, or an AssertionError.
Promise: the checks read the folder with json, numpy and hashlib, beside the code under test;
the store that is passed in is never changed.
Not here: a runner; call these from your own tests.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import StoreNotFoundError, missing_extra
from shardmill.records import Drop, Ragged
from shardmill.store import (
    DocumentLedger,
    Ledger,
    Manifest,
    StoreFacts,
    StoreWriter,
    TokenLedger,
    open_store,
    verify,
)

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise missing_extra("hypothesis", "dev") from missing

__all__ = [
    "assert_done_means_done",
    "assert_store_laws",
    "assert_write_then_read_is_identity",
    "build_small_store",
    "documents",
    "plain_facts",
    "read_documents",
    "shard_sizes",
]


def documents(
    *, max_documents: int = 12, max_tokens: int = 24, dtype: str = "uint16"
) -> st.SearchStrategy[Ragged]:
    """Documents of ids that fit `dtype`, its largest among them; some have no token."""
    ids = st.integers(0, int(np.iinfo(dtype).max)) | st.sampled_from([0, np.iinfo(dtype).max])
    return st.lists(st.lists(ids, max_size=max_tokens), max_size=max_documents).map(
        Ragged.from_sequences
    )


def shard_sizes(dtype: str, *, max_tokens: int = 40) -> st.SearchStrategy[int | None]:
    """None (one file), or room for 1 to `max_tokens` tokens."""
    size = np.dtype(dtype).itemsize
    return st.none() | st.integers(1, max_tokens).map(lambda tokens: tokens * size)


def plain_facts(
    splits: Mapping[str, Ragged], drops: Sequence[Drop] = (), **changes: Any
) -> StoreFacts:
    """Facts whose ledger balances for exactly these documents; `changes` replace fields."""
    kept = sum(len(ragged) for ragged in splits.values())
    tokens = sum(len(ragged.values) for ragged in splits.values())
    dropped = dict(Counter(drop.reason for drop in drops))
    ledger = Ledger(
        documents=DocumentLedger(
            read=kept + len(drops), kept=kept, empty=0, over_budget=0, dropped=dropped
        ),
        tokens=TokenLedger(encoded=tokens, separators=0, kept=tokens, over_budget=0),
        repaired={},
        chat=None,
    )
    fields: dict[str, Any] = {
        "dataset_name": "small",
        "dataset_config": None,
        "dataset_revision": None,
        "streaming": False,
        "split_rule": "given",
        "seed": 0,
        "shuffle_buffer": None,
        "append_eot": False,
        "unit": "document",
        "tokenizer_sha256": hashlib.sha256(b"none").hexdigest(),
        "tokenizer_fingerprint": hashlib.sha256(b"none").hexdigest(),
        "vocab_size": None,
        "special_token_ids": {},
        "sources": [],
        "options": {},
        "ledger": ledger,
        "produced_by": {},
    }
    return StoreFacts(**(fields | changes))


def build_small_store(
    folder: Path,
    splits: Mapping[str, Ragged],
    *,
    dtype: str = "uint16",
    shard_bytes: int | None = None,
    drops: Sequence[Drop] = (),
    **changes: Any,
) -> Manifest:
    """A finished store of these documents; `changes` replace facts, for instance `vocab_size`."""
    with StoreWriter(folder, splits=list(splits), dtype=dtype, shard_bytes=shard_bytes) as writer:
        for split, ragged in splits.items():
            writer.append(split, ragged, where="small store")
        writer.record_drops(drops)
        return writer.finish(plain_facts(splits, drops, **changes))


def read_documents(folder: Path, split: str) -> Ragged:
    """All documents of a split, read with json and numpy alone. For small stores."""
    meta = json.loads((folder / "meta.json").read_bytes())
    dtype = {"uint16-le": "<u2", "uint32-le": "<u4"}[meta["token_dtype"]]
    entry = meta["splits"][split]
    shards = [np.fromfile(folder / shard["file"], dtype) for shard in entry["shards"]]
    values = np.concatenate(shards) if shards else np.empty(0, dtype)
    starts = np.load(folder / entry["index"]["file"], allow_pickle=False)
    return Ragged(values, np.append(starts, entry["tokens"]).astype(np.int64))


def assert_write_then_read_is_identity(
    splits: Mapping[str, Ragged], *, dtype: str, shard_bytes: int | None
) -> None:
    """Law 2: the documents come back, ids and borders, through a store of any shape."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "store"
        build_small_store(folder, splits, dtype=dtype, shard_bytes=shard_bytes)
        store = open_store(folder)
        assert sorted(store.splits) == sorted(splits)
        for split, written in splits.items():
            assert read_documents(folder, split) == written, f"split {split!r} changed"
            assert np.array_equal(store.document_starts(split), written.offsets[:-1])
            assert sum(file.num_tokens for file in store.token_files(split)) == len(written.values)
        assert_store_laws(folder)


def assert_done_means_done(folder: Path) -> None:
    """Law 3: without its manifest nothing opens; what the manifest does not list is not read."""
    with _copy(folder) as store:
        before = {split: open_store(store).token_files(split) for split in open_store(store).splits}
        stale = [store / "stale_tokens.bin", store / "stale_idx.npy"]
        for split in before:
            (store / split).mkdir(exist_ok=True)
            stale.append(store / split / "shard_98765.bin")
        for path in stale:
            path.write_bytes(b"\xff" * 64)
        after = {split: open_store(store).token_files(split) for split in before}
        assert after == before, "a file that the manifest does not list is read"
        problems = verify(store).problems
        for path in stale:
            name = path.relative_to(store).as_posix()
            assert any(problem.startswith(f"{name}:") for problem in problems), f"{name} unseen"
        (store / "meta.json").unlink()
        try:
            open_store(store)
        except StoreNotFoundError:
            return
        raise AssertionError("a folder without meta.json opens")


def assert_store_laws(folder: Path) -> None:
    """Everything a finished store promises, whoever built it."""
    report = verify(folder)
    assert report.problems == []
    meta = json.loads((folder / "meta.json").read_bytes())
    assert meta["built"] is True
    _assert_ledger_balances(meta)
    for name, split in meta["splits"].items():
        _assert_split(folder, name, split, meta)
    assert_done_means_done(folder)


def _assert_ledger_balances(meta: dict[str, Any]) -> None:
    documents, tokens = meta["ledger"]["documents"], meta["ledger"]["tokens"]
    dropped = sum(documents["dropped"].values())
    buckets = documents["kept"] + documents["empty"] + documents["over_budget"] + dropped
    assert documents["read"] == buckets
    assert tokens["encoded"] + tokens["separators"] == tokens["kept"] + tokens["over_budget"]
    assert documents["kept"] == sum(split["documents"] for split in meta["splits"].values())
    assert tokens["kept"] == sum(split["tokens"] for split in meta["splits"].values())


def _assert_split(folder: Path, name: str, split: dict[str, Any], meta: dict[str, Any]) -> None:
    assert meta[f"{name}_tokens"] == split["tokens"]
    assert meta[f"{name}_{meta['unit']}s"] == split["documents"]
    for entry in (split["index"], *split["shards"]):
        data = (folder / entry["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], entry["file"]
    found = read_documents(folder, name)
    assert len(found) == split["documents"]
    assert all(left <= right for left, right in pairwise(found.offsets.tolist()))
    assert found.offsets[0] == 0 or not len(found)
    assert found.offsets[-1] == len(found.values) == split["tokens"]
    for shard in split["shards"][:-1]:
        assert (folder / shard["file"]).stat().st_size == meta["shard_bytes"], shard["file"]


@contextmanager
def _copy(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield Path(shutil.copytree(folder, Path(place) / "store"))
