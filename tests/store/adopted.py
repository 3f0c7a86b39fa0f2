"""Shards of any size, written by hand as the workers of a build do, and stores that adopt them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from shardmill.records import ChatExamples, IntArray, Ragged
from shardmill.store import AdoptedTurns, Manifest, StoreWriter, WrittenShard
from shardmill.store.layout import shard_name
from shardmill.testing.stores import chat_facts, plain_facts, slice_examples


class HandCut(NamedTuple):
    """The next `documents` of a split, in shards of these sizes, which hold just their tokens."""

    documents: int
    shard_tokens: list[int]


@st.composite
def hand_cuts(draw: Any, documents: Ragged, *, max_tokens: int) -> list[HandCut]:
    """Batches that end anywhere between documents, in shards of 1 to `max_tokens` tokens."""
    borders = sorted(draw(st.lists(st.integers(0, len(documents)), max_size=4)))
    edges = [0, *borders, len(documents)]
    cuts = []
    for start, stop in pairwise(edges):
        left = int(documents.offsets[stop] - documents.offsets[start])
        sizes = []
        while left:
            sizes.append(draw(st.integers(1, min(left, max_tokens))))
            left -= sizes[-1]
        cuts.append(HandCut(stop - start, sizes))
    return cuts


def equal_cut(documents: Ragged, full: int) -> list[HandCut]:
    """One batch, cut as `StoreWriter.append` cuts it."""
    total = len(documents.values)
    return [HandCut(len(documents), [min(full, total - at) for at in range(0, total, full)])]


def write_by_hand(
    folder: Path, name: str, values: IntArray, *, dtype: str = "uint16"
) -> WrittenShard:
    data = values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    return WrittenShard(file=name, tokens=len(values), sha256=sha256)


def turns_of(examples: ChatExamples) -> AdoptedTurns:
    return AdoptedTurns(
        mask_bits=np.packbits(examples.mask, bitorder="little"),
        turn_starts=examples.turn_starts,
        turn_roles=examples.turn_roles,
    )


def adopt_all(
    writer: StoreWriter,
    split: str,
    given: Ragged | ChatExamples,
    cuts: Sequence[HandCut],
    *,
    counted: bool = False,
) -> None:
    """Write the shards of a split into the folder of the writer, and have them adopted.

    `counted`: names of shards count up, as those of `append`; else they are named after batches.
    """
    documents = given if isinstance(given, Ragged) else given.ids
    first, at, number = 0, 0, 0
    for unit, (count, sizes) in enumerate(cuts):
        shards = []
        for part, tokens in enumerate(sizes):
            name = shard_name(split, number) if counted else shard_name(split, unit, part=part)
            values = documents.values[at : at + tokens]
            shards.append(write_by_hand(writer.folder, name, values, dtype=writer.dtype))
            at, number = at + tokens, number + 1
        lengths = documents.lengths[first : first + count]
        chat = None
        if not isinstance(given, Ragged):
            chat = turns_of(slice_examples(given, first, first + count))
        writer.adopt(split, shards, lengths, chat)
        first += count


def build_by_hand(
    folder: Path,
    splits: Mapping[str, Ragged] | Mapping[str, ChatExamples],
    cuts: Mapping[str, Sequence[HandCut]],
    *,
    shard_bytes: int,
    counted: bool = False,
    **shape: Any,
) -> Manifest:
    """A finished store of shards that were written by hand."""
    chat = any(isinstance(given, ChatExamples) for given in splits.values())
    options = {"dtype": "uint16", "shard_bytes": shard_bytes, "chat": chat} | shape
    with StoreWriter(folder, splits=list(splits), **options) as writer:
        for split, given in splits.items():
            adopt_all(writer, split, given, cuts[split], counted=counted)
        return writer.finish((chat_facts if chat else plain_facts)(splits))
