"""Guarantees of the store: equal bytes, identity, done means done."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import StoreNotFoundError, UnfinishedBuildError
from shardmill.records import Drop, Ragged
from shardmill.store import StoreWriter, open_store, verify
from shardmill.testing.stores import (
    assert_done_means_done,
    assert_store_laws,
    build_small_store,
    documents,
    plain_facts,
    read_documents,
    shard_sizes,
)

DTYPES = ("uint16", "uint32")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@settings(deadline=None, max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_what_is_written_is_what_is_read(data: st.DataObject, dtype: str, tmp_path_factory) -> None:
    splits = data.draw(
        st.dictionaries(
            st.sampled_from(["train", "val", "test-2"]), documents(dtype=dtype), min_size=1
        )
    )
    folder = tmp_path_factory.mktemp("identity") / "store"
    build_small_store(folder, splits, dtype=dtype, shard_bytes=data.draw(shard_sizes(dtype)))
    store = open_store(folder)
    assert sorted(store.splits) == sorted(splits)
    for split, written in splits.items():
        assert read_documents(folder, split) == written, f"split {split!r} changed"
        assert np.array_equal(store.document_starts(split), written.offsets[:-1])
        assert sum(file.num_tokens for file in store.token_files(split)) == len(written.values)
    assert_store_laws(folder)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(data=st.data(), ragged=documents(), shard_bytes=shard_sizes("uint16"))
def test_equal_documents_give_equal_bytes_however_they_are_appended(
    data: st.DataObject, ragged: Ragged, shard_bytes: int | None, tmp_path_factory
) -> None:
    place = tmp_path_factory.mktemp("bytes")
    build_small_store(place / "whole", {"train": ragged}, shard_bytes=shard_bytes)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ragged)), max_size=4)))
    with StoreWriter(
        place / "parts", splits=["train"], dtype="uint16", shard_bytes=shard_bytes
    ) as writer:
        for start, stop in zip([0, *cuts], [*cuts, len(ragged)], strict=True):
            part = ragged.slice(start, stop)
            kind = data.draw(st.sampled_from(["int64", "uint16", ">u2", "uint32"]))
            writer.append("train", Ragged(part.values.astype(kind), part.offsets))
        writer.finish(plain_facts({"train": ragged}))
    assert bytes_of(place / "parts") == bytes_of(place / "whole")


def test_a_small_store_is_exactly_these_bytes(tmp_path: Path) -> None:
    ragged = Ragged.from_sequences([[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [65535]])
    manifest = build_small_store(
        tmp_path, {"train": ragged, "val": Ragged.from_sequences([])}, shard_bytes=8
    )
    index = io.BytesIO()
    np.save(index, np.array([0, 3, 3, 4, 9]))
    empty = io.BytesIO()
    np.save(empty, np.empty(0, np.int64))
    found = bytes_of(tmp_path)
    found.pop("meta.json")
    assert found == {
        "train/shard_00000.bin": b"\1\0\2\0\3\0\4\0",
        "train/shard_00001.bin": b"\5\0\6\0\7\0\x08\0",
        "train/shard_00002.bin": b"\x09\0\xff\xff",
        "train_idx.npy": index.getvalue(),
        "val_idx.npy": empty.getvalue(),
    }
    spans = [
        (shard.tokens, shard.documents, shard.first_document, shard.last_document)
        for shard in manifest.splits["train"].shards
    ]
    assert spans == [(4, 3, 0, 2), (4, 1, 3, 3), (2, 1, 3, 4)]
    assert manifest.splits["val"].shards == []
    assert (tmp_path / "val").is_dir()


def test_one_file_per_split_exists_even_when_empty(tmp_path: Path) -> None:
    manifest = build_small_store(
        tmp_path, {"train": Ragged.from_sequences([[7]]), "val": Ragged.from_sequences([])}
    )
    assert (tmp_path / "train_tokens.bin").read_bytes() == b"\7\0"
    assert (tmp_path / "val_tokens.bin").read_bytes() == b""
    (shard,) = manifest.splits["val"].shards
    assert (shard.tokens, shard.documents, shard.first_document, shard.last_document) == (
        0,
        0,
        None,
        None,
    )
    assert len(open_store(tmp_path).document_starts("val")) == 0


def test_documents_without_any_token_still_start_in_a_shard(tmp_path: Path) -> None:
    manifest = build_small_store(tmp_path, {"a": Ragged.from_sequences([[], []])}, shard_bytes=4)
    (shard,) = manifest.splits["a"].shards
    assert (shard.tokens, shard.documents, shard.first_document) == (0, 2, None)
    assert_store_laws(tmp_path)


def test_an_exact_multiple_leaves_no_empty_shard(tmp_path: Path) -> None:
    ragged = Ragged.from_sequences([[1, 2], [3, 4], []])
    manifest = build_small_store(tmp_path, {"a": ragged}, shard_bytes=4)
    assert [shard.tokens for shard in manifest.splits["a"].shards] == [2, 2]
    assert [shard.documents for shard in manifest.splits["a"].shards] == [1, 2]
    assert_store_laws(tmp_path)


@settings(deadline=None, max_examples=15)
@given(ragged=documents(), shard_bytes=shard_sizes("uint16"))
def test_stale_files_are_never_read(ragged: Ragged, shard_bytes, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("stale") / "store"
    build_small_store(folder, {"train": ragged}, shard_bytes=shard_bytes)
    assert_done_means_done(folder)


def test_nothing_opens_before_finish(tmp_path: Path) -> None:
    ragged = Ragged.from_sequences([[1, 2, 3]])
    with StoreWriter(tmp_path / "s", splits=["a"], dtype="uint16", shard_bytes=2) as writer:
        writer.append("a", ragged)
        with pytest.raises(StoreNotFoundError, match="unfinished"):
            open_store(tmp_path / "s")
    with pytest.raises(StoreNotFoundError, match="unfinished"):
        open_store(tmp_path / "s")
    with pytest.raises(UnfinishedBuildError, match=r"a_idx\.npy"):
        StoreWriter(tmp_path / "s", splits=["a"], dtype="uint16", shard_bytes=2)


def test_a_store_with_dropped_rows_lists_each(tmp_path: Path) -> None:
    drops = [Drop(id="a.jsonl:3", reason="bad_json"), Drop(id="b\udcff.txt", reason="too_long")]
    ragged = Ragged.from_sequences([[1]])
    manifest = build_small_store(tmp_path, {"a": ragged}, drops=drops)
    assert (tmp_path / "dropped.jsonl").read_text() == (
        '{"id":"a.jsonl:3","reason":"bad_json"}\n{"id":"b\\\\udcff.txt","reason":"too_long"}\n'
    )
    assert manifest.dropped is not None
    assert manifest.dropped.entries == 2
    assert manifest.ledger.documents.read == 3
    assert verify(tmp_path).problems == []
