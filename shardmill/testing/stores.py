"""Guarantees of stores as tests, and the smallest real stores to try them on.

The checks read the folder with json, numpy and hashlib, independent of the code under test; the
store that is passed in is never changed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardmill.errors import StoreNotFoundError, missing_extra
from shardmill.records import ROLES, ChatExamples, Drop, Ragged
from shardmill.store import (
    ChatLedger,
    Manifest,
    StoreFacts,
    StoreWriter,
    given_facts,
    kept_ledger,
    open_store,
    verify,
)

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise missing_extra("hypothesis", "dev") from missing


def documents(
    *, max_documents: int = 12, max_tokens: int = 24, dtype: str = "uint16"
) -> st.SearchStrategy[Ragged]:
    """Documents of ids that fit `dtype`, including its largest; some have no token."""
    ids = st.integers(0, int(np.iinfo(dtype).max)) | st.sampled_from([0, np.iinfo(dtype).max])
    return st.lists(st.lists(ids, max_size=max_tokens), max_size=max_documents).map(
        Ragged.from_sequences
    )


def shard_sizes(dtype: str, *, max_tokens: int = 40) -> st.SearchStrategy[int | None]:
    """None (one file), or the bytes of 1 to `max_tokens` tokens."""
    size = np.dtype(dtype).itemsize
    return st.none() | st.integers(1, max_tokens).map(lambda tokens: tokens * size)


def plain_facts(
    splits: Mapping[str, Ragged], drops: Sequence[Drop] = (), **changes: Any
) -> StoreFacts:
    """Facts whose ledger balances for exactly these documents; `changes` replace fields."""
    kept = sum(len(ragged) for ragged in splits.values())
    tokens = sum(len(ragged.values) for ragged in splits.values())
    dropped = dict(Counter(drop.reason for drop in drops))
    ledger = kept_ledger(kept, tokens)
    rows = msgspec.structs.replace(ledger.documents, read=kept + len(drops), dropped=dropped)
    fields: dict[str, Any] = {
        "dataset_name": "small",
        "tokenizer_sha256": hashlib.sha256(b"none").hexdigest(),
        "tokenizer_fingerprint": hashlib.sha256(b"none").hexdigest(),
        "ledger": msgspec.structs.replace(ledger, documents=rows),
    }
    return given_facts(kept, tokens, **(fields | changes))


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


def assert_done_means_done(folder: Path) -> None:
    """Guarantee 3: nothing opens without its manifest, and only what that lists is read."""
    with tempfile.TemporaryDirectory() as place:
        store = Path(shutil.copytree(folder, Path(place) / "store"))
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
            assert any(problem.startswith(f"{name}:") for problem in problems), f"{name} not found"
        (store / "meta.json").unlink()
        try:
            open_store(store)
        except StoreNotFoundError:
            return
        raise AssertionError("a folder without meta.json opens")


def assert_store_laws(folder: Path) -> None:
    """Everything that a finished store guarantees, whatever built it."""
    assert verify(folder).problems == []
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
    buckets += documents.get("filtered", 0)
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
    sizes = [(folder / shard["file"]).stat().st_size for shard in split["shards"]]
    if meta["shard_bytes"] is not None:
        assert all(size <= meta["shard_bytes"] for size in sizes)
        if meta["version"] == 1:
            assert all(size == meta["shard_bytes"] for size in sizes[:-1])
    assert all(sizes) or len(sizes) == 1, "an empty shard is not the only one"


Turn = tuple[int, list[tuple[int, bool]]]
"""A role and the (id, trained) of each of its tokens."""


def make_examples(conversations: Sequence[tuple[list[int], Sequence[Turn]]]) -> ChatExamples:
    """Examples from plain lists: (ids before the first turn, turns)."""
    ids: list[list[int]] = []
    mask: list[bool] = []
    starts: list[int] = []
    roles: list[int] = []
    for opening, turns in conversations:
        ids.append(list(opening))
        mask += [False] * len(opening)
        for role, tokens in turns:
            starts.append(len(mask))
            roles.append(role)
            ids[-1] += [number for number, _ in tokens]
            mask += [trained for _, trained in tokens]
    return ChatExamples(
        ids=Ragged.from_sequences(ids),
        mask=np.array(mask, np.bool_),
        turn_starts=np.array(starts, np.int64),
        turn_roles=np.array(roles, np.uint8),
    )


def chat_examples(
    *, max_examples: int = 8, max_tokens: int = 9, dtype: str = "uint16"
) -> st.SearchStrategy[ChatExamples]:
    """Examples of a few turns, each of one token or more, the last with a trained one."""
    ids = st.integers(0, int(np.iinfo(dtype).max))
    role = st.integers(0, len(ROLES) - 1)
    turn = st.tuples(role, st.lists(st.tuples(ids, st.booleans()), min_size=1, max_size=max_tokens))
    end = st.tuples(ids, st.just(True))
    turns = st.tuples(st.lists(turn, max_size=3), turn, end).map(
        lambda parts: [*parts[0], (parts[1][0], [*parts[1][1], parts[2]])]
    )
    one = st.tuples(st.lists(ids, max_size=2), turns)
    return st.lists(one, max_size=max_examples).map(make_examples)


def slice_examples(examples: ChatExamples, start: int, stop: int) -> ChatExamples:
    """Examples `start..stop`, as if rendered alone."""
    first, last = (int(examples.ids.offsets[number]) for number in (start, stop))
    turns = slice(*np.searchsorted(examples.turn_starts, [first, last]).tolist())
    return ChatExamples(
        ids=examples.ids.slice(start, stop),
        mask=examples.mask[first:last],
        turn_starts=examples.turn_starts[turns] - first,
        turn_roles=examples.turn_roles[turns],
    )


def assert_same_examples(found: ChatExamples, wanted: ChatExamples) -> None:
    """Ids, offsets, mask, turns and roles are all equal."""
    assert found.ids == wanted.ids, "ids or offsets differ"
    assert found.mask.dtype == np.bool_
    assert found.mask.tolist() == wanted.mask.tolist(), "the masks differ"
    assert found.turn_starts.tolist() == wanted.turn_starts.tolist(), "the turns differ"
    assert found.turn_roles.tolist() == wanted.turn_roles.tolist(), "the roles differ"


def chat_facts(
    splits: Mapping[str, ChatExamples], drops: Sequence[Drop] = (), **changes: Any
) -> StoreFacts:
    """Facts whose ledger balances for exactly these examples; `changes` replace fields."""
    facts = plain_facts({name: part.ids for name, part in splits.items()}, drops, unit="example")
    chat = ChatLedger(
        turns=sum(len(part.turn_starts) for part in splits.values()),
        trained_tokens=sum(int(part.mask.sum()) for part in splits.values()),
    )
    ledger = msgspec.structs.replace(facts.ledger, chat=chat)
    return msgspec.structs.replace(facts, **({"ledger": ledger} | changes))


def build_small_chat_store(
    folder: Path,
    splits: Mapping[str, ChatExamples],
    *,
    dtype: str = "uint16",
    shard_bytes: int | None = None,
    cuts: Sequence[int] = (),
    **changes: Any,
) -> Manifest:
    """A finished store of these examples, appended in calls that end at the example `cuts`."""
    with StoreWriter(
        folder, splits=list(splits), dtype=dtype, shard_bytes=shard_bytes, chat=True
    ) as writer:
        for split, examples in splits.items():
            total = len(examples.ids)
            for start, stop in pairwise([0, *sorted(min(cut, total) for cut in cuts), total]):
                writer.append_examples(split, slice_examples(examples, start, stop))
        return writer.finish(chat_facts(splits, **changes))


def read_examples(folder: Path, split: str) -> ChatExamples:
    """All examples of a split, read with json and numpy alone. For small stores."""
    meta = json.loads((folder / "meta.json").read_bytes())
    chat, tokens = meta["splits"][split]["chat"], meta["splits"][split]["tokens"]
    bits = np.unpackbits(np.fromfile(folder / chat["mask"]["file"], np.uint8), bitorder="little")
    return ChatExamples(
        ids=read_documents(folder, split),
        mask=bits[:tokens].astype(np.bool_),
        turn_starts=np.load(folder / chat["turns"]["file"], allow_pickle=False),
        turn_roles=np.fromfile(folder / chat["roles"]["file"], np.uint8),
    )
