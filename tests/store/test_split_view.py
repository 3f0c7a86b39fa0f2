"""`store["train"]`: documents by number, as a user expects of a sequence."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import DamagedStoreError, OptionError
from shardmill.records import Ragged
from shardmill.store import open_store
from shardmill.store.layout import index_header
from shardmill.store.readers import Example
from shardmill.testing.stores import build_small_chat_store, build_small_store, make_examples

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [10, 11]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five documents over shards of two tokens, and an empty split."""
    splits = {"train": Ragged.from_sequences(DOCUMENTS), "val": Ragged.from_sequences([])}
    build_small_store(tmp_path / "store", splits, shard_bytes=4)
    return tmp_path / "store"


@given(start=st.integers(-7, 7), stop=st.integers(-7, 7), step=st.sampled_from([None, 1, 2, -1]))
@settings(max_examples=30, deadline=None)
def test_items_and_slices_are_those_of_a_list(
    tmp_path_factory: pytest.TempPathFactory, start: int, stop: int, step: int | None
) -> None:
    folder = tmp_path_factory.getbasetemp() / "sliced"
    if not folder.exists():
        build_small_store(folder, {"train": Ragged.from_sequences(DOCUMENTS)}, shard_bytes=4)
    train = open_store(folder)["train"]
    assert [ids.tolist() for ids in train] == DOCUMENTS
    view, wanted = train[start:stop:step], DOCUMENTS[start:stop:step]
    assert len(view) == len(wanted)
    assert [ids.tolist() for ids in view] == wanted
    assert [ids.tolist() for ids in view[1:]] == wanted[1:]
    if -5 <= start < 5:
        assert train[start].tolist() == train[np.int64(start)].tolist() == DOCUMENTS[start]


def test_an_item_is_a_copy_in_the_dtype_of_the_store(folder: Path) -> None:
    train = open_store(folder)["train"]
    ids = train[3]
    assert ids.dtype == np.uint16
    ids[:] = 0
    assert train[3].tolist() == DOCUMENTS[3]


def test_a_store_lists_its_splits_and_a_view_says_what_it_is(folder: Path) -> None:
    store = open_store(folder)
    assert list(store) == ["train", "val"]
    assert "val" in store
    assert "test" not in store
    assert len(store["val"]) == 0
    assert repr(store["train"]) == f"SplitView({str(folder)!r}, 'train', 5 documents)"
    assert repr(store["train"][1:3]) == f"SplitView({str(folder)!r}, 'train', 2 of 5 documents)"
    assert store["train"] is store["train"]  # files are not opened again for every item


def test_mistakes_are_refused_with_what_there_is(folder: Path) -> None:
    store = open_store(folder)
    with pytest.raises(OptionError, match="did you mean 'train'"):
        store["trian"]
    with pytest.raises(IndexError, match=r"5 documents.*no item 5"):
        store["train"][5]
    with pytest.raises(IndexError, match="no item -6"):
        store["train"][-6]
    with pytest.raises(IndexError):
        store["val"][0]
    with pytest.raises(TypeError):
        store["train"]["a"]  # type: ignore[call-overload]


def test_an_item_of_a_chat_store_is_ids_and_loss_mask(tmp_path: Path) -> None:
    chats = make_examples(
        [([9], [(1, [(3, False)]), (2, [(4, True), (5, True)])]), ([], [(2, [(6, True)])])]
    )
    build_small_chat_store(tmp_path / "chats", {"train": chats})
    train = open_store(tmp_path / "chats")["train"]
    assert len(train) == 2
    assert isinstance(train[0], Example)
    ids, loss_mask = train[0]
    assert ids.tolist() == [9, 3, 4, 5]
    assert loss_mask.tolist() == [False, False, True, True]
    assert train[-1].ids.tolist() == [6]
    assert "2 examples" in repr(train)


def test_a_view_is_pickled_by_the_path_of_its_store(folder: Path) -> None:
    view = open_store(folder)["train"][1:4]
    data = pickle.dumps(view)
    assert len(data) < 1000
    assert [ids.tolist() for ids in pickle.loads(data)] == DOCUMENTS[1:4]


def test_an_index_that_was_damaged_is_never_followed(folder: Path) -> None:
    starts = np.array([0, 9, 3, 4, 9], "<i8")
    (folder / "train_idx.npy").write_bytes(index_header(5) + starts.tobytes())
    train = open_store(folder)["train"]
    with pytest.raises(DamagedStoreError, match=r"document 1 is at 9\.\.3.*shardmill verify"):
        train[1]
