"""Conversations read back many at a time: any numbers, any shards, any process."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import DamagedStoreError, OptionError
from shardmill.store import open_store
from shardmill.store.readers import ChatSpace
from shardmill.store.readers.documents import spread
from shardmill.testing.stores import (
    assert_same_examples,
    build_small_chat_store,
    build_small_store,
    chat_examples,
    make_examples,
    shard_sizes,
    slice_examples,
)
from tests.store.test_chat_store import TWO


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["mapped", "pread"])
@settings(deadline=None, max_examples=20)
@given(data=st.data(), dtype=st.sampled_from(["uint16", "uint32"]))
def test_any_examples_in_any_order_come_back_as_they_were_written(
    reader, data, dtype, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("space") / "s"
    written = data.draw(chat_examples(dtype=dtype))
    build_small_chat_store(
        folder, {"train": written}, dtype=dtype, shard_bytes=data.draw(shard_sizes(dtype))
    )
    space = ChatSpace(open_store(folder), "train", reader=reader)
    assert space.reader == reader
    total = len(written.ids)
    assert len(space) == total
    assert space.lengths().tolist() == written.ids.lengths.tolist()
    assert_same_examples(space.examples(np.arange(total)), written)
    if total:
        chosen = data.draw(st.lists(st.integers(0, total - 1), max_size=12))
        found = space.examples(chosen)
        for row, number in enumerate(chosen):
            wanted = slice_examples(written, number, number + 1)
            assert_same_examples(slice_examples(found, row, row + 1), wanted)
    space.close()


def test_spread_lists_the_numbers_of_all_spans():
    numbers, offsets = spread(np.array([5, 0, 9]), np.array([7, 3, 9]))
    assert (numbers.tolist(), offsets.tolist()) == ([5, 6, 0, 1, 2], [0, 2, 5, 5])


@pytest.fixture
def space(tmp_path: Path) -> ChatSpace:
    build_small_chat_store(tmp_path / "s", {"train": TWO, "val": make_examples([])}, shard_bytes=8)
    return ChatSpace(open_store(tmp_path / "s"), "train")


@pytest.mark.parametrize("indices", [[2], [-1], [0, 1, 2**40], [0, -(2**62)]])
def test_a_number_outside_is_refused(space: ChatSpace, indices):
    with pytest.raises(IndexError, match="of 2"):
        space.examples(indices)


@pytest.mark.parametrize("indices", [[0.0], ["0"], [[0]], [True]])
def test_what_is_no_row_of_whole_numbers_is_refused(space: ChatSpace, indices):
    with pytest.raises(OptionError, match="positions"):
        space.examples(indices)


def test_no_examples_are_no_examples(space: ChatSpace):
    found = space.examples([])
    assert (len(found.ids), len(found.mask), len(found.turn_starts)) == (0, 0, 0)
    assert len(ChatSpace(space.store, "val")) == 0


def test_documents_are_no_conversations(tmp_path: Path):
    build_small_store(tmp_path / "d", {"train": TWO.ids})
    with pytest.raises(OptionError, match="holds documents"):
        ChatSpace(open_store(tmp_path / "d"), "train")


def _first(space: ChatSpace) -> list[int]:
    return space.examples([1]).turn_roles.tolist()


@pytest.mark.slow
def test_a_space_travels_to_a_spawned_process(space: ChatSpace):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_first, (space,)) == [0, 2, 1]


def test_a_pickled_space_refuses_a_store_that_was_built_again(space: ChatSpace):
    data = pickle.dumps(space)
    folder = space.store.folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    other = make_examples([([7], [(2, [(8, True)])])])
    build_small_chat_store(folder, {"train": other, "val": make_examples([])}, shard_bytes=8)
    with pytest.raises(DamagedStoreError, match="built"):
        pickle.loads(data)


@pytest.mark.parametrize(
    ("file", "change", "wanted"),
    [
        ("train_idx.npy", {0: 0, 1: 12}, "wanted within"),
        ("train_turns.npy", {0: 1, 1: 1, 2: 1, 3: 2, 4: 3}, "an example has no turn"),
        ("train_roles.bin", {0: 77}, "a turn has the role 77"),
    ],
)
def test_damage_that_opening_cannot_see_is_no_example(space: ChatSpace, file, change, wanted):
    path = space.store.folder / file
    data = bytearray(path.read_bytes())
    for place, value in change.items():
        if file.endswith(".npy"):
            data[128 + 8 * place : 136 + 8 * place] = int(value).to_bytes(8, "little")
        else:
            data[place] = value
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedStoreError, match=wanted):
        ChatSpace(open_store(space.store.folder), "train").examples([0, 1])


def test_the_repr_says_what_it_is(space: ChatSpace):
    assert (
        repr(space)
        == f"ChatSpace({json.dumps(str(space.store.folder))[1:-1]!r}, 'train', examples=2, mapped)"
    )
