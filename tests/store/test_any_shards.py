"""Shards of any size: the same tokens, however they are cut, are read the same by everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmill
from shardmill.building import build_plan
from shardmill.errors import ManifestError
from shardmill.formats.stores import StoreSplit
from shardmill.inspect.diff import diff_stores
from shardmill.records import Ragged
from shardmill.remote import open_remote, push, verify_remote
from shardmill.store import exclude_documents, open_store, verify
from shardmill.store.readers import ChatSpace, DocumentWindows, PackSpace, Windows, open_tokens
from shardmill.testing.stores import (
    assert_same_examples,
    assert_store_laws,
    build_small_chat_store,
    build_small_store,
    chat_examples,
    documents,
)
from tests.helpers import run_command
from tests.packs import plan_options
from tests.store.adopted import HandCut, build_by_hand, hand_cuts
from tests.store.test_format import reader as reader_of_the_text
from tests.store.test_manifest import sealed

READERS = ("mapped", "pread")
ROUGH = Ragged.from_sequences([range(10, 17), [], range(20, 31), [40], range(50, 53)])
ROUGH_CUTS = {"train": [HandCut(2, [3, 1, 3]), HandCut(2, [12]), HandCut(1, [2, 1])]}


def windows_of(folder: Path, split: str, seq_len: int, reader: str) -> tuple[Any, ...]:
    """All that can be read of the tokens of a split."""
    store = open_store(folder)
    with open_tokens(store, split, reader=reader) as space:
        windows = Windows(space, seq_len=seq_len)
        every = np.arange(len(windows))
        starts = np.arange(max(0, space.num_tokens - seq_len))
        batch = DocumentWindows(space, store.document_starts(split)).gather(
            starts, seq_len=seq_len, true_positions=True
        )
        whole = space.read(0, space.num_tokens).tolist()
        fields = (batch.input_ids, batch.labels, batch.segments.doc_ids)
        rows = [windows.gather(every).tolist(), *(field.tolist() for field in fields)]
        alone = [space.read(at, at + 1).tolist() for at in range(space.num_tokens)]
        texts = [text.tolist() for text in store[split]]
    return whole, rows, alone, texts


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@settings(deadline=None, max_examples=40)
@given(data=st.data(), dtype=st.sampled_from(["uint16", "uint32"]), seq_len=st.integers(1, 9))
def test_documents_are_read_as_from_one_shard(reader, data, dtype, seq_len, tmp_path_factory):
    place = tmp_path_factory.mktemp("any")
    splits = {"train": data.draw(documents(dtype=dtype, max_documents=8, max_tokens=9))}
    full = data.draw(st.integers(1, 30))
    cuts = {"train": data.draw(hand_cuts(splits["train"], max_tokens=full))}
    build_small_store(place / "one", splits, dtype=dtype)
    shard_bytes = full * np.dtype(dtype).itemsize
    manifest = build_by_hand(place / "any", splits, cuts, dtype=dtype, shard_bytes=shard_bytes)
    found, wanted = (windows_of(place / one, "train", seq_len, reader) for one in ("any", "one"))
    assert found == wanted
    assert_store_laws(place / "any")
    sizes = [shard.tokens for shard in manifest.splits["train"].shards]
    assert manifest.version == (1 if all(size == full for size in sizes[:-1]) else 2)
    tokens, starts, _ = reader_of_the_text()["read_store"](place / "any")["train"]
    assert tokens.tolist() == found[0]
    assert starts.tolist() == splits["train"].offsets[:-1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@settings(deadline=None, max_examples=15)
@given(data=st.data(), examples=chat_examples(), options=plan_options())
def test_conversations_and_packed_rows_are_read_as_from_one_shard(
    reader, data, examples, options, tmp_path_factory
) -> None:
    place = tmp_path_factory.mktemp("any")
    full = data.draw(st.integers(1, 30))
    cuts = {"train": data.draw(hand_cuts(examples.ids, max_tokens=full))}
    build_small_chat_store(place / "one", {"train": examples})
    build_by_hand(place / "any", {"train": examples}, cuts, shard_bytes=2 * full)
    rows = []
    for folder in (place / "one", place / "any"):
        store = open_store(folder)
        chats = ChatSpace(store, "train", reader=reader)
        assert_same_examples(chats.examples(np.arange(len(chats))), examples)
        space = PackSpace(
            store, build_plan(folder, options=options, allow_empty=True), reader=reader
        )
        found = space.rows(np.arange(len(space)))
        rows.append([found.ids.tolist(), found.trained.tolist(), found.used.tolist()])
        assert verify(folder).problems == []  # of the plan, too
    assert rows[0] == rows[1]


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    """The same documents in one file, and in shards of 3, 1, 3, 12, 2 and 1 tokens."""
    one, rough = tmp_path / "one/store", tmp_path / "rough/store"  # orders depend on the name
    build_small_store(one, {"train": ROUGH})
    manifest = build_by_hand(rough, {"train": ROUGH}, ROUGH_CUTS, shard_bytes=24)
    assert manifest.version == 2
    return one, rough


def test_the_loader_yields_the_same_batches(both: tuple[Path, Path]) -> None:
    found = [
        [
            (batch.input_ids.tolist(), batch.labels.tolist())
            for batch in shardmill.load(
                folder, seq_len=3, batch_size=2, seed=1, num_samples=14, documents=True
            )
        ]
        for folder in both
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 7


def test_a_conversion_reads_the_same_documents(both: tuple[Path, Path]) -> None:
    texts = [
        [text.tolist() for batch in StoreSplit(folder, "train").batches() for text in batch]
        for folder in both
    ]
    assert texts[0] == texts[1] == [text.tolist() for text in ROUGH]


def test_exclusions_are_of_the_same_tokens(both: tuple[Path, Path]) -> None:
    spans = []
    for folder in both:
        entry = exclude_documents(folder, [2, 4], reason="test")
        spans.append(entry.spans)
        assert verify(folder).problems == []
    assert spans[0] == spans[1] == ((7, 18), (19, 22))


def test_diff_says_that_only_the_cut_differs(both: tuple[Path, Path]) -> None:
    found = diff_stores(*both)
    (split,) = found.documents
    assert (split.both, split.only_a, split.only_b) == (5, 0, 0)
    assert found.facts == {
        "options": ("shard_bytes: None -> 24",),
        "splits": ("train.shards: 1 -> 6",),
    }


def test_a_store_that_is_pushed_is_read_from_afar(both: tuple[Path, Path], tmp_path: Path) -> None:
    push(both[1], (tmp_path / "far").as_uri())
    assert verify_remote((tmp_path / "far").as_uri()).problems == []
    with open_tokens(open_store(both[0]), "train") as space:
        wanted = Windows(space, seq_len=4).gather(np.arange(5)).tolist()
    with open_remote((tmp_path / "far").as_uri(), cache=tmp_path / "cache", max_bytes=400) as far:
        assert far.document_starts("train").tolist() == ROUGH.offsets[:-1].tolist()
        with far.open_tokens("train") as space:
            assert Windows(space, seq_len=4).gather(np.arange(5)).tolist() == wanted


def shards(meta: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = meta["splits"]["train"]["shards"]
    return found


def empty_the_second(meta: dict[str, Any]) -> None:
    first, second = shards(meta)[:2]
    first["tokens"] += second["tokens"]
    second.update(tokens=0, first_document=None, last_document=None)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "larger than shard_bytes": (
        lambda m: m.update(shard_bytes=22),
        r"shard_00001\.bin has 12 tokens; a shard holds at most 11",
    ),
    "empty in the middle": (
        empty_the_second,
        r"shard_00000_001\.bin is empty, but not the only shard",
    ),
    "a wrong count": (lambda m: shards(m)[1].update(tokens=2), "hold 23 tokens, but it claims 22"),
    "unequal in version 1": (
        lambda m: m.update(version=1),
        r"shard_00000\.bin has 3 tokens; in version 1 all shards but the last are cut at 12",
    ),
    "a version that is not known": (
        lambda m: m.update(version=4),
        '"version" is 4, but this shardmill reads versions 1 to 3; upgrade',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shards_that_cannot_be_are_refused(both: tuple[Path, Path], name: str) -> None:
    edit, wanted = REFUSED[name]
    path = both[1] / "meta.json"
    meta = json.loads(path.read_bytes())
    edit(meta)
    path.write_bytes(sealed(meta))
    with pytest.raises(ManifestError, match=wanted):
        open_store(both[1])
    (problem,) = verify(both[1]).problems
    assert wanted.replace("\\", "") in problem


def test_a_count_that_is_wrong_in_two_shards_is_found(both: tuple[Path, Path]) -> None:
    """The sum is right, so only sizes and the index show it."""
    path = both[1] / "meta.json"
    meta = json.loads(path.read_bytes())
    shards(meta)[0]["tokens"] += 1
    shards(meta)[2]["tokens"] -= 1
    path.write_bytes(sealed(meta))
    problems = verify(both[1]).problems
    assert problems == [
        "train/shard_00000.bin: truncated: found 6 bytes, wanted 8",
        "train/shard_00000_002.bin: too long: found 6 bytes, wanted 4",
    ]


def test_version_2_may_have_equal_shards(tmp_path: Path) -> None:
    """Writers choose the lowest version; a reader does not insist."""
    build_small_store(tmp_path, {"train": ROUGH}, shard_bytes=8)
    path = tmp_path / "meta.json"
    meta = json.loads(path.read_bytes())
    path.write_bytes(sealed(meta | {"version": 2}))
    assert verify(tmp_path).problems == []
    assert [text.tolist() for text in open_store(tmp_path)["train"]] == [
        text.tolist() for text in ROUGH
    ]


def test_info_and_verify_count_the_shards(both: tuple[Path, Path]) -> None:
    assert astuple(verify(both[1])) == ([], 8, 22, 5)
    found = json.loads(run_command("info", str(both[1]), "--json").stdout)
    split = found["splits"]["train"]
    counts = (split["documents"], split["tokens"], split["shards"], found["shard_bytes"])
    assert (found["version"], counts) == (2, (5, 22, 6, 24))
