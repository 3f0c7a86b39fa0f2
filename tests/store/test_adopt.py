"""A store of shards that others wrote is the store that the writer would have written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import BuildError, OptionError, UnfinishedBuildError
from shardmill.records import ChatExamples, Ragged
from shardmill.store import StoreWriter, WrittenShard, open_store, verify
from shardmill.store.layout import is_own_name, shard_name
from shardmill.testing.stores import (
    assert_same_examples,
    assert_store_laws,
    build_small_chat_store,
    build_small_store,
    chat_examples,
    documents,
    make_examples,
    plain_facts,
    read_documents,
    read_examples,
)
from tests.helpers import folder_digest
from tests.store.adopted import (
    HandCut,
    adopt_all,
    build_by_hand,
    equal_cut,
    hand_cuts,
    turns_of,
    write_by_hand,
)

DTYPES = ("uint16", "uint32")
SHA256 = "0" * 64
TEXTS = Ragged.from_sequences([[1, 2, 3], [], [4, 5]])
CHATS = make_examples(
    [([1], [(1, [(3, False)]), (2, [(4, False), (5, True)])]), ([], [(2, [(7, True)])])]
)  # 4 + 1 tokens


def writer(folder: Path, **changes: Any) -> StoreWriter:
    options = {"splits": ["train"], "dtype": "uint16", "shard_bytes": 8} | changes
    return StoreWriter(folder, **options)


def shard(tokens: int, file: str = "train/shard_00000.bin") -> WrittenShard:
    return WrittenShard(file=file, tokens=tokens, sha256=SHA256)


def without_cut(folder: Path) -> dict[str, Any]:
    """meta.json without what depends on where shards end."""
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_bytes())
    for name in ("version", "manifest_sha256"):
        del meta[name]
    for split in meta["splits"].values():
        del split["shards"]
    return meta


def plain_spans(found: Ragged, shard_tokens: list[int]) -> list[tuple[int, Any, Any]]:
    """Documents that start in each shard, its first and its last one, by a look at each token."""
    owner = np.repeat(np.arange(len(found)), found.lengths).tolist()
    spans, end, counted = [], 0, 0
    for number, tokens in enumerate(shard_tokens):
        begin, end = end, end + tokens
        last = number == len(shard_tokens) - 1
        started = len(found) if last else sum(at < end for at in found.offsets[:-1].tolist())
        held = owner[begin:end]
        spans.append((started - counted, held[0] if held else None, held[-1] if held else None))
        counted = started
    return spans


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), full=st.integers(1, 20))
def test_adopted_documents_are_those_that_are_appended(data, dtype, full, tmp_path_factory) -> None:
    place = tmp_path_factory.mktemp("adopt")
    drawn = documents(dtype=dtype, max_documents=8, max_tokens=9)
    splits = {"train": data.draw(drawn), "val": data.draw(drawn)}
    cuts = {name: data.draw(hand_cuts(part, max_tokens=full)) for name, part in splits.items()}
    shape = {"dtype": dtype, "shard_bytes": full * np.dtype(dtype).itemsize}
    build_small_store(place / "appended", splits, **shape)
    manifest = build_by_hand(place / "adopted", splits, cuts, **shape)
    assert without_cut(place / "adopted") == without_cut(place / "appended")
    for name, wanted in splits.items():
        assert read_documents(place / "adopted", name) == wanted
        shards = manifest.splits[name].shards
        found = [(one.documents, one.first_document, one.last_document) for one in shards]
        assert found == plain_spans(wanted, [one.tokens for one in shards])
        for file in (f"{name}_idx.npy",):
            bytes_of = [(place / kind / file).read_bytes() for kind in ("adopted", "appended")]
            assert bytes_of[0] == bytes_of[1]
    assert_store_laws(place / "adopted")
    equal = {name: equal_cut(part, full) for name, part in splits.items()}
    build_by_hand(place / "equal", splits, equal, counted=True, **shape)
    assert folder_digest(place / "equal") == folder_digest(place / "appended")


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(data=st.data(), full=st.integers(1, 20))
def test_adopted_conversations_are_those_that_are_appended(data, full, tmp_path_factory) -> None:
    place = tmp_path_factory.mktemp("adopt")
    splits = {name: data.draw(chat_examples()) for name in ("train", "val")}
    cuts = {name: data.draw(hand_cuts(part.ids, max_tokens=full)) for name, part in splits.items()}
    build_small_chat_store(place / "appended", splits, shard_bytes=2 * full)
    build_by_hand(place / "adopted", splits, cuts, shard_bytes=2 * full)
    assert without_cut(place / "adopted") == without_cut(place / "appended")
    for name, wanted in splits.items():
        assert_same_examples(read_examples(place / "adopted", name), wanted)
        for kind in ("idx.npy", "mask.bin", "turns.npy", "roles.bin"):
            files = [place / one / f"{name}_{kind}" for one in ("adopted", "appended")]
            assert files[0].read_bytes() == files[1].read_bytes(), kind
    assert_store_laws(place / "adopted")
    equal = {name: equal_cut(part.ids, full) for name, part in splits.items()}
    build_by_hand(place / "equal", splits, equal, counted=True, shard_bytes=2 * full)
    assert folder_digest(place / "equal") == folder_digest(place / "appended")


def test_a_small_adopted_store_is_exactly_this(tmp_path: Path) -> None:
    cuts = {"train": [HandCut(2, [1, 2]), HandCut(1, [2])]}
    manifest = build_by_hand(tmp_path, {"train": TEXTS}, cuts, shard_bytes=8)
    assert manifest.version == 2
    shards = manifest.splits["train"].shards
    assert [(one.file, one.tokens) for one in shards] == [
        ("train/shard_00000.bin", 1),
        ("train/shard_00000_001.bin", 2),
        ("train/shard_00001.bin", 2),
    ]
    # the document without a token starts where the second shard ends: so in the third
    assert [(one.documents, one.first_document, one.last_document) for one in shards] == [
        (1, 0, 0),
        (0, 0, 0),
        (2, 2, 2),
    ]
    assert verify(tmp_path).problems == []


def test_documents_without_a_token_wait_for_the_shard_that_follows(tmp_path: Path) -> None:
    texts = Ragged.from_sequences([[], [], [1, 2], [], [], [3], []])
    cuts = {"train": [HandCut(1, []), HandCut(3, [2]), HandCut(1, []), HandCut(2, [1])]}
    manifest = build_by_hand(tmp_path, {"train": texts}, cuts, shard_bytes=8)
    shards = manifest.splits["train"].shards
    assert [(one.documents, one.first_document, one.last_document) for one in shards] == [
        (3, 2, 2),
        (4, 5, 5),
    ]
    assert_store_laws(tmp_path)


def test_documents_without_any_token_have_the_one_empty_shard(tmp_path: Path) -> None:
    texts = Ragged.from_sequences([[], [], []])
    cuts = {"train": [HandCut(1, []), HandCut(2, [])]}
    build_by_hand(tmp_path / "adopted", {"train": texts}, cuts, shard_bytes=8)
    build_small_store(tmp_path / "appended", {"train": texts}, shard_bytes=8)
    assert folder_digest(tmp_path / "adopted") == folder_digest(tmp_path / "appended")


def test_files_that_are_elsewhere_are_never_opened(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        out.adopt("train", [shard(3), shard(2, "train/b.bin")], TEXTS.lengths)
        assert (out.num_tokens("train"), out.num_documents("train")) == (5, 3)
        manifest = out.finish(plain_facts({"train": TEXTS}))
    found = [(one.file, one.tokens, one.sha256) for one in manifest.splits["train"].shards]
    assert found == [("train/shard_00000.bin", 3, SHA256), ("train/b.bin", 2, SHA256)]
    assert verify(tmp_path).problems == [
        "train/shard_00000.bin: missing",
        "train/b.bin: missing",
    ]


@pytest.mark.parametrize(
    ("shards", "lengths", "wanted"),
    [
        ([shard(4)], [2, 3], r"its documents have 5 tokens, but .* shards hold 4"),
        ([], [1], "its documents have 1 tokens, but .* shards hold 0"),
        ([shard(1)], [], "its documents have 0 tokens, but .* shards hold 1"),
        ([shard(5)], [5], r"shard_00000\.bin has 5 tokens, wanted 1 to 4"),
        ([shard(4), shard(0, "train/b.bin")], [4], r"b\.bin has 0 tokens, wanted 1 to 4"),
        ([shard(1)], [2, -1], "a document of -1 tokens"),
    ],
)
def test_shards_that_do_not_hold_their_documents_are_refused(
    tmp_path: Path, shards, lengths, wanted
) -> None:
    with writer(tmp_path) as out:
        with pytest.raises(BuildError, match=wanted):
            out.adopt("train", shards, np.array(lengths, np.int64))
        adopt_all(out, "train", TEXTS, equal_cut(TEXTS, 3))  # the refused call wrote nothing
        out.finish(plain_facts({"train": TEXTS}))
    assert read_documents(tmp_path, "train") == TEXTS


@pytest.mark.parametrize("lengths", [[3, 2], np.array([3, 2], np.int32), np.array([[3, 2]])])
def test_lengths_are_one_array_of_int64(tmp_path: Path, lengths) -> None:
    with writer(tmp_path) as out, pytest.raises(OptionError, match="wanted 1-d int64"):
        out.adopt("train", [shard(4), shard(1, "train/b.bin")], lengths)


def test_a_split_is_appended_to_or_adopted(tmp_path: Path) -> None:
    with writer(tmp_path, splits=["a", "b"]) as out:
        out.append("a", TEXTS)
        adopt_all(out, "b", TEXTS, equal_cut(TEXTS, 3))
        with pytest.raises(OptionError, match="split 'a' is filled with append, not adopt"):
            out.adopt("a", [shard(1)], np.array([1]))
        with pytest.raises(OptionError, match="split 'b' is filled with adopt, not append"):
            out.append("b", TEXTS)
        out.finish(plain_facts({"a": TEXTS, "b": TEXTS}))
    assert read_documents(tmp_path, "a") == read_documents(tmp_path, "b") == TEXTS
    assert open_store(tmp_path).manifest.version == 2
    with writer(tmp_path / "chats", splits=["a"], chat=True) as out:
        adopt_all(out, "a", CHATS, equal_cut(CHATS.ids, 3))
        with pytest.raises(OptionError, match="split 'a' is filled with adopt, not append"):
            out.append_examples("a", CHATS)


def test_one_file_per_split_is_not_adopted(tmp_path: Path) -> None:
    out = writer(tmp_path, shard_bytes=None)
    with out, pytest.raises(OptionError, match="give shard_bytes"):
        out.adopt("train", [shard(1)], np.array([1]))


def test_conversations_come_with_their_turns_and_documents_without(tmp_path: Path) -> None:
    lengths = CHATS.ids.lengths
    out = writer(tmp_path / "a", chat=True, shard_bytes=20)
    with out, pytest.raises(OptionError, match="pass their turns as chat"):
        out.adopt("train", [shard(5)], lengths)
    out = writer(tmp_path / "b", shard_bytes=20)
    with out, pytest.raises(OptionError, match="open the writer with chat=True"):
        out.adopt("train", [shard(5)], lengths, turns_of(CHATS))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"mask_bits": np.array([0b11000, 0], np.uint8)}, r"the mask is uint8 \(2,\)"),
        ({"mask_bits": np.array([0b11000], np.int64)}, "the mask is int64"),
        ({"mask_bits": np.array([0b111000], np.uint8)}, "bits after its last token, 5"),
        ({"turn_starts": np.array([1, 2, 5])}, "a turn starts at token 5 of 5"),
        ({"turn_starts": np.array([2, 1, 4])}, "negative or decrease"),
        ({"turn_starts": np.array([1, 2], np.int32)}, "wanted 1-d int64"),
        ({"turn_roles": np.array([1, 2], np.uint8)}, r"roles are uint8 \(2,\)"),
        ({"turn_roles": np.array([1, 2, 4], np.uint8)}, "a turn has the role 4"),
    ],
)
def test_turns_that_do_not_fit_their_tokens_are_refused(tmp_path: Path, changes, wanted) -> None:
    out = writer(tmp_path, chat=True, shard_bytes=20)
    with out, pytest.raises(OptionError, match=wanted):
        out.adopt("train", [shard(5)], CHATS.ids.lengths, replace(turns_of(CHATS), **changes))


def test_a_conversation_without_a_token_is_refused(tmp_path: Path) -> None:
    out = writer(tmp_path, chat=True, shard_bytes=20)
    with out, pytest.raises(OptionError, match="example 1: has no token"):
        out.adopt("train", [shard(5)], np.array([4, 0, 1]), turns_of(CHATS))


def test_shards_that_are_here_already_are_adopted_but_not_appended_to(tmp_path: Path) -> None:
    here = write_by_hand(tmp_path, "train/shard_00000.bin", np.array([1, 2, 3]))
    with writer(tmp_path, splits=["train", "val"]) as out:
        with pytest.raises(UnfinishedBuildError, match=r"train/shard_00000\.bin: left by"):
            out.append("train", TEXTS)
        out.adopt("train", [here], np.array([3]))
        (tmp_path / "val/shard_00000.bin").write_bytes(b"ab")
        with pytest.raises(UnfinishedBuildError, match=r"val/shard_00000\.bin: left by"):
            out.finish(plain_facts({"train": Ragged.from_sequences([[1, 2, 3]])}))
    assert not (tmp_path / "meta.json").exists()


def test_written_shards_travel_as_json() -> None:
    data = msgspec.json.encode(shard(3))
    assert msgspec.json.decode(data, type=WrittenShard) == shard(3)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data.replace(b"tokens", b"tokenz"), type=WrittenShard)
    with pytest.raises(TypeError):
        WrittenShard("train/shard_00000.bin", 3, SHA256)  # type: ignore[misc]


@settings(deadline=None)
@given(
    names=st.lists(
        st.tuples(st.integers(0, 999), st.integers(0, 99_999), st.integers(0, 999)),
        min_size=2,
        unique=True,
    )
)
def test_names_of_shards_differ_and_sort_in_the_order_of_the_tokens(names) -> None:
    found = [shard_name("train", unit, part=part, feed=feed) for feed, unit, part in sorted(names)]
    assert found == sorted(set(found))
    assert all(is_own_name(name) for name in found)


def test_names_of_shards() -> None:
    assert shard_name("train", 0) == "train/shard_00000.bin"
    assert shard_name("train", 123_456, part=2) == "train/shard_123456_002.bin"
    assert shard_name("val", 7, feed=1) == "val/shard_f001_00007.bin"
    assert shard_name("val", 7, part=12, feed=31) == "val/shard_f031_00007_012.bin"
    for other in ("shard_00007_1.bin", "shard_f1_00007.bin", "shard_7.bin", "shard_00007-1.bin"):
        assert not is_own_name(f"val/{other}")


def random_chats(seed: int) -> ChatExamples:
    """Examples of 1 to 400 tokens, enough for masks of many bytes."""
    random = np.random.default_rng(seed)
    return make_examples(
        [
            ([], [(2, [(7, bool(bit)) for bit in random.integers(0, 2, size)] + [(1, True)])])
            for size in random.integers(0, 400, 12)
        ]
    )


@pytest.mark.parametrize("seed", range(4))
def test_long_masks_are_joined_at_every_bit(tmp_path: Path, seed: int, monkeypatch) -> None:
    monkeypatch.setattr("shardmill.store.writer._CHUNK", 56)  # tokens; the mask is cut into chunks
    examples = random_chats(seed)
    sizes = examples.ids.lengths.tolist()
    cuts = {"train": [HandCut(1, [size]) for size in sizes]}
    build_by_hand(tmp_path, {"train": examples}, cuts, shard_bytes=10_000)
    assert_same_examples(read_examples(tmp_path, "train"), examples)
    assert_store_laws(tmp_path)
