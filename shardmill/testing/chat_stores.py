"""Laws of a store of conversations, and the smallest real ones to try them on.

In: rendered examples.  Out: nothing, or an AssertionError.
Promise: `read_examples` reads the folder with json and numpy alone, beside the code under test.
Not here: rendering (the chat room), a runner.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardmill.errors import missing_extra
from shardmill.records import ROLES, ChatExamples, Drop, Ragged
from shardmill.store import ChatLedger, Manifest, StoreFacts, StoreWriter
from shardmill.testing.stores import plain_facts, read_documents

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise missing_extra("hypothesis", "dev") from missing

__all__ = [
    "Turn",
    "assert_same_examples",
    "build_small_chat_store",
    "chat_examples",
    "chat_facts",
    "make_examples",
    "read_examples",
    "slice_examples",
]

Turn = tuple[int, list[tuple[int, bool]]]
"""A role and the (id, trained) of each of its tokens."""


def make_examples(conversations: Sequence[tuple[list[int], Sequence[Turn]]]) -> ChatExamples:
    """Examples from plain lists: (ids before the first turn, turns). For tests and small input."""
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
    """Examples `start..stop`, as they would have been rendered alone."""
    first, last = (int(examples.ids.offsets[number]) for number in (start, stop))
    turns = slice(*np.searchsorted(examples.turn_starts, [first, last]).tolist())
    return ChatExamples(
        ids=examples.ids.slice(start, stop),
        mask=examples.mask[first:last],
        turn_starts=examples.turn_starts[turns] - first,
        turn_roles=examples.turn_roles[turns],
    )


def assert_same_examples(found: ChatExamples, wanted: ChatExamples) -> None:
    """Ids, borders, mask, turns and roles, all of them."""
    assert found.ids == wanted.ids, "ids or borders differ"
    assert found.mask.dtype == np.bool_
    assert found.mask.tolist() == wanted.mask.tolist(), "the masks differ"
    assert found.turn_starts.tolist() == wanted.turn_starts.tolist(), "the turns differ"
    assert found.turn_roles.tolist() == wanted.turn_roles.tolist(), "the roles differ"


def chat_facts(
    splits: Mapping[str, ChatExamples], drops: Sequence[Drop] = (), **changes: Any
) -> StoreFacts:
    """Facts whose ledger balances for exactly these examples; `changes` replace fields."""
    facts = plain_facts({name: part.ids for name, part in splits.items()}, drops, unit="example")
    books = ChatLedger(
        turns=sum(len(part.turn_starts) for part in splits.values()),
        trained_tokens=sum(int(part.mask.sum()) for part in splits.values()),
    )
    ledger = msgspec.structs.replace(facts.ledger, chat=books)
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
            borders = [0, *sorted(min(cut, total) for cut in cuts), total]
            for start, stop in pairwise(borders):
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
