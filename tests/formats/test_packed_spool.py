"""The spool gives back what was appended, or is not there at all."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import (
    DamagedStoreError,
    ManifestError,
    OptionError,
    StoreExistsError,
    StoreNotFoundError,
    TokenRangeError,
)
from shardmill.formats.packed import ChatStoreSpool, SequenceSpoolReader, SequenceSpoolWriter
from shardmill.records import Ragged
from shardmill.testing.stores import build_small_chat_store, build_small_store, chat_examples
from tests.formats.packed import token_sequences, write_spool


@settings(deadline=None, max_examples=15)
@given(
    sequences=token_sequences(),
    dtype=st.sampled_from(["uint16", "int32", "uint32", "int64"]),
    data=st.data(),
)
def test_one_by_one_or_many_at_once_gives_the_same_files(sequences, dtype, data) -> None:
    cut = data.draw(st.integers(0, len(sequences)))
    with tempfile.TemporaryDirectory() as top:
        write_spool(Path(top) / "one", sequences, dtype)
        with SequenceSpoolWriter(Path(top) / "two", dtype=dtype) as spool:
            for part in (sequences[:cut], sequences[cut:]):
                ids = Ragged.from_sequences([ids for ids, _ in part])
                spool.extend(ids, np.array([bit for _, mask in part for bit in mask], np.bool_))
        reader = SequenceSpoolReader(Path(top) / "one")
        assert [
            (ids.tolist(), mask.tolist())
            for ids, mask in (reader.read_sequence(i) for i in range(len(reader)))
        ] == sequences
        assert reader.lengths().tolist() == [len(ids) for ids, _ in sequences]
        assert reader.verify() == []
        assert all(
            path.read_bytes() == (Path(top) / "two" / path.name).read_bytes()
            for path in (Path(top) / "one").iterdir()
        )


def test_pieces_are_cut_in_one_gather(tmp_path) -> None:
    write_spool(tmp_path / "a", [([1, 2, 3], [0, 1, 0]), ([4, 5, 6, 7], [1, 1, 0, 1])])
    reader = pickle.loads(pickle.dumps(SequenceSpoolReader(tmp_path / "a")))
    ids, mask = reader.read_pieces(np.array([1, 0, 1]), np.array([2, 0, 0]), np.array([4, 3, 1]))
    assert ids.tolist() == [6, 7, 1, 2, 3, 4]
    assert mask.tolist() == [0, 1, 0, 1, 0, 1]
    with pytest.raises(DamagedStoreError, match="outside its sequence"):
        reader.read_pieces(np.array([0]), np.array([0]), np.array([4]))
    with pytest.raises(IndexError, match="sequence 2 of 2"):
        reader.read_sequence(2)


@settings(deadline=None, max_examples=8)
@given(examples=chat_examples())
def test_a_chat_store_is_a_spool(examples) -> None:
    with tempfile.TemporaryDirectory() as top:
        build_small_chat_store(Path(top) / "chats", {"train": examples})
        spool = ChatStoreSpool(Path(top) / "chats", "train")
        assert len(spool) == len(examples.ids)
        assert spool.lengths().tolist() == examples.ids.lengths.tolist()
        offsets = examples.ids.offsets
        for number, wanted in enumerate(examples.ids):
            ids, mask = spool.read_sequence(number)
            assert ids.tolist() == wanted.tolist()
            part = examples.mask[offsets[number] : offsets[number + 1]]
            assert mask.tolist() == part.astype(int).tolist()
            whole, bits = spool.read_pieces(np.array([number]), np.array([1]), np.array([len(ids)]))
            assert (whole.tolist(), bits.tolist()) == (ids[1:].tolist(), mask[1:].tolist())
        spool.close()


def test_a_store_of_documents_is_no_spool(tmp_path) -> None:
    build_small_store(tmp_path / "texts", {"train": Ragged.from_sequences([[1, 2]])})
    with pytest.raises(OptionError, match="no loss mask; wanted a chat store"):
        ChatStoreSpool(tmp_path / "texts", "train")


@pytest.mark.parametrize(
    ("ids", "mask", "error", "words"),
    [
        ([70_000], [1], TokenRangeError, "token id 70,000 does not fit uint16"),
        ([-1], [1], TokenRangeError, "token id -1 does not fit uint16"),
        ([1, 2], [1], OptionError, r"a mask of shape \(1,\) for 2 ids"),
        ([1, 2], [1, 2], OptionError, "other values than 0 and 1"),
        ([1.5], [1], OptionError, "float64, wanted 1-d ints"),
        ([[1]], [[1]], OptionError, r"shape \(1, 1\), wanted one dimension"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_of_it_is_kept(
    tmp_path, ids, mask, error, words
) -> None:
    with SequenceSpoolWriter(tmp_path / "a", dtype=np.uint16) as spool:
        spool.append([1], [0])
        with pytest.raises(error, match=words):
            spool.append(np.array(ids), np.array(mask))
    assert SequenceSpoolReader(tmp_path / "a").lengths().tolist() == [1]


def test_an_error_leaves_nothing_and_a_finished_spool_stays(tmp_path) -> None:
    def fail() -> None:
        with SequenceSpoolWriter(tmp_path / "a") as spool:
            spool.append([1], [1])
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
    write_spool(tmp_path / "a", [([1], [1])])
    with pytest.raises(StoreExistsError, match="a finished spool is here"):
        SequenceSpoolWriter(tmp_path / "a")
    with pytest.raises(StoreNotFoundError, match="no finished spool"):
        SequenceSpoolReader(tmp_path / "b")


@pytest.mark.parametrize("name", ["tokens.bin", "masks.bin", "offsets.bin"])
def test_damage_is_refused_by_size_and_found_by_hash(tmp_path, name) -> None:
    write_spool(tmp_path / "a", [([1, 2], [0, 1]), ([3], [1])])
    path = tmp_path / "a" / name
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert SequenceSpoolReader(tmp_path / "a").verify() == [
        f"{path}: its sha256 is not the one in the manifest"
    ]
    path.write_bytes(data[:-1])
    with pytest.raises(DamagedStoreError, match=name):
        SequenceSpoolReader(tmp_path / "a")


def test_a_changed_manifest_is_refused(tmp_path) -> None:
    write_spool(tmp_path / "a", [([1, 2], [0, 1])])
    path = tmp_path / "a/manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["dtype"] == "<i4"
    path.write_text(json.dumps({**manifest, "trained_tokens": 2}))
    with pytest.raises(ManifestError, match="was changed or damaged"):
        SequenceSpoolReader(tmp_path / "a")


def test_offsets_that_fall_are_refused(tmp_path) -> None:
    write_spool(tmp_path / "a", [([1, 2], [0, 1]), ([3], [1])])
    np.array([0, 3, 2], "<i8").tofile(tmp_path / "a/offsets.bin")
    reader = SequenceSpoolReader(tmp_path / "a")
    with pytest.raises(DamagedStoreError, match=r"offsets\.bin falls"):
        reader.lengths()
    with pytest.raises(DamagedStoreError, match=r"sequence 1 is at 3\.\.2"):
        reader.read_sequence(1)
