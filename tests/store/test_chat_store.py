"""Conversations in a store: what is written is what is read, and damage is found."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmill.store
from shardmill.errors import (
    BuildError,
    DamagedStoreError,
    ManifestError,
    OptionError,
    ShardmillError,
)
from shardmill.records import ChatExamples, Ragged
from shardmill.store import (
    ChatLedger,
    StoreWriter,
    kept_ledger,
    open_store,
    read_manifest,
    verify,
    write_placeholder,
)
from shardmill.testing.stores import (
    assert_same_examples,
    assert_store_laws,
    build_small_chat_store,
    build_small_store,
    chat_examples,
    chat_facts,
    make_examples,
    read_examples,
    shard_sizes,
)
from tests.helpers import folder_digest
from tests.store.test_manifest import sealed
from tests.store.test_verify import ACTIONS, contents, damage

SYSTEM, USER, ASSISTANT = 0, 1, 2
TWO = make_examples(
    [
        (
            [1],
            [(USER, [(3, False), (10, False)]), (ASSISTANT, [(4, False), (11, True), (5, True)])],
        ),
        ([1], [(SYSTEM, [(2, False)]), (ASSISTANT, [(4, False), (5, True)]), (USER, [(3, False)])]),
    ]
)  # 6 + 5 = 11 tokens; trained: 4, 5, 9


def small(folder: Path, **changes) -> Path:
    build_small_chat_store(folder, {"train": TWO, "val": make_examples([])}, **changes)
    return folder


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(data=st.data(), dtype=st.sampled_from(["uint16", "uint32"]))
def test_examples_come_back_whole_however_they_were_appended(data, dtype, tmp_path_factory) -> None:
    place = tmp_path_factory.mktemp("identity")
    splits = {name: data.draw(chat_examples(dtype=dtype)) for name in ("train", "val")}
    shape = {"dtype": dtype, "shard_bytes": data.draw(shard_sizes(dtype))}
    build_small_chat_store(place / "a", splits, **shape)
    cuts = data.draw(st.lists(st.integers(0, 8), max_size=4))
    build_small_chat_store(place / "b", splits, cuts=cuts, **shape)
    assert folder_digest(place / "a") == folder_digest(place / "b")
    for name, wanted in splits.items():
        assert_same_examples(read_examples(place / "a", name), wanted)
        arrays = open_store(place / "a").chat_arrays(name)
        bits = np.unpackbits(arrays.mask_bits, bitorder="little")
        assert bits[: len(wanted.mask)].tolist() == wanted.mask.tolist()
        assert bits[len(wanted.mask) :].sum() == 0
        assert arrays.turn_starts.tolist() == wanted.turn_starts.tolist()
        assert arrays.turn_roles.tolist() == wanted.turn_roles.tolist()
    assert_store_laws(place / "a")


def test_a_small_chat_store_is_exactly_these_bytes(tmp_path: Path) -> None:
    manifest = build_small_chat_store(tmp_path / "s", {"train": TWO}, cuts=[1])
    folder = tmp_path / "s"
    assert sorted(path.name for path in folder.iterdir()) == [
        "meta.json",
        "train_idx.npy",
        "train_mask.bin",
        "train_roles.bin",
        "train_tokens.bin",
        "train_turns.npy",
    ]
    assert (folder / "train_mask.bin").read_bytes() == bytes([0b00110000, 0b00000010])
    assert (folder / "train_roles.bin").read_bytes() == bytes([1, 2, 0, 2, 1])
    assert np.load(folder / "train_turns.npy").tolist() == [1, 3, 7, 8, 10]
    assert np.load(folder / "train_idx.npy").tolist() == [0, 6]
    chat = manifest.splits["train"].chat
    assert (chat.num_turns, chat.trained_tokens, chat.mask.entries) == (5, 3, 11)
    assert manifest.ledger.chat == ChatLedger(turns=5, trained_tokens=3)


def test_the_reader_in_the_text_reads_conversations_and_refuses_a_changed_mask(tmp_path) -> None:
    folder = small(tmp_path / "s", shard_bytes=8)
    text = Path(shardmill.store.__file__).with_name("FORMAT.md").read_text()
    names: dict = {}
    exec(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0], names)
    _, starts, (mask, turns, roles) = names["read_store"](folder)["train"]
    assert (starts.tolist(), np.flatnonzero(mask).tolist()) == ([0, 6], [4, 5, 9])
    assert (turns.tolist(), roles.tolist()) == ([1, 3, 7, 8, 10], [1, 2, 0, 2, 1])
    (folder / "train_mask.bin").write_bytes(bytes([0b00110000, 0b00010010]))
    with pytest.raises(ValueError, match=r"train_mask\.bin is damaged"):
        names["read_store"](folder)
    with pytest.raises(ValueError, match="a loss mask does not match its tokens"):
        names["read_store"](folder, verify=False)


def test_the_text_names_every_key_of_a_chat_manifest(tmp_path: Path) -> None:
    text = Path(shardmill.store.__file__).with_name("FORMAT.md").read_text()
    meta = json.loads((small(tmp_path / "s") / "meta.json").read_bytes())
    keys = {*meta["splits"]["train"], *meta["splits"]["train"]["chat"], *meta["ledger"]["chat"]}
    assert {key for key in keys if f'"{key}"' not in text and f"`{key}`" not in text} == set()


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"mask": TWO.mask[:-1]}, r"the mask is bool \(10,\), wanted bool \(11,\)"),
        ({"mask": TWO.mask.astype(np.uint8)}, "the mask is uint8"),
        ({"mask": TWO.mask & (np.arange(11) < 6)}, "example 1: trains no token"),
        ({"mask": TWO.mask & (np.arange(11) > 6)}, "example 0: trains no token"),
        ({"turn_starts": TWO.turn_starts[::-1].copy()}, "negative or decrease"),
        ({"turn_starts": TWO.turn_starts - 2}, "negative or decrease"),
        ({"turn_starts": TWO.turn_starts + 1}, "a turn starts at token 11 of 11"),
        ({"turn_starts": TWO.turn_starts.astype(np.int32)}, "wanted 1-d int64"),
        ({"turn_starts": np.array([1, 3, 3, 3, 5])}, "example 1: no turn starts in it"),
        ({"turn_starts": np.array([6, 6, 7, 8, 9])}, "example 0: no turn starts in it"),
        ({"turn_roles": TWO.turn_roles[:-1]}, r"roles are uint8 \(4,\)"),
        ({"turn_roles": TWO.turn_roles + np.uint8(2)}, "a turn has the role 4, but there are 4"),
        (
            {"ids": Ragged(TWO.ids.values, np.array([0, 6, 6, 11]))},
            "example 1: has no token",
        ),
    ],
)
def test_examples_whose_parts_do_not_belong_together_are_refused(tmp_path, changes, wanted) -> None:
    with StoreWriter(
        tmp_path, splits=["train"], dtype="uint16", shard_bytes=None, chat=True
    ) as out:
        with pytest.raises(OptionError, match=wanted):
            out.append_examples("train", replace(TWO, **changes), where="chats")
        out.append_examples("train", TWO)  # nothing of the refused call was written
        out.finish(chat_facts({"train": TWO}))
    assert_same_examples(read_examples(tmp_path, "train"), TWO)


def test_documents_and_conversations_do_not_mix(tmp_path: Path) -> None:
    shape = {"splits": ["train"], "dtype": "uint16", "shard_bytes": None}
    chats = StoreWriter(tmp_path / "a", chat=True, **shape)
    with chats, pytest.raises(OptionError, match="append_examples only"):
        chats.append("train", TWO.ids)
    texts = StoreWriter(tmp_path / "b", **shape)
    with texts, pytest.raises(OptionError, match="chat=True"):
        texts.append_examples("train", TWO)
    build_small_store(tmp_path / "c", {"train": TWO.ids})
    store = open_store(tmp_path / "c")
    assert not store.is_chat
    with pytest.raises(OptionError, match="holds documents, so no loss mask"):
        store.chat_arrays("train")


@pytest.mark.parametrize("books", [None, ChatLedger(turns=5, trained_tokens=4)])
def test_books_that_do_not_know_the_turns_publish_nothing(tmp_path: Path, books) -> None:
    facts = chat_facts({"train": TWO})
    wrong = msgspec.structs.replace(facts, ledger=msgspec.structs.replace(facts.ledger, chat=books))
    shape = {"splits": ["train"], "dtype": "uint16", "shard_bytes": None, "chat": True}
    with StoreWriter(tmp_path, **shape) as out:
        out.append_examples("train", TWO)
        with pytest.raises(BuildError, match="the ledger"):
            out.finish(wrong)
    assert not (tmp_path / "meta.json").exists()


def test_a_placeholder_of_chats_opens_nothing(tmp_path: Path) -> None:
    facts = chat_facts({}, ledger=kept_ledger(0, 0))
    write_placeholder(tmp_path, facts, ["train"])
    assert read_manifest(tmp_path).built is False
    with pytest.raises(ShardmillError, match="placeholder"):
        open_store(tmp_path)


def test_the_fingerprint_follows_mask_turns_and_roles(tmp_path: Path) -> None:
    other_mask = replace(TWO, mask=TWO.mask | (np.arange(11) == 10))
    other_turns = replace(TWO, turn_starts=np.array([1, 3, 7, 8, 9]))
    other_roles = replace(TWO, turn_roles=np.array([1, 2, 0, 2, 3], np.uint8))
    seen = set()
    for number, examples in enumerate((TWO, other_mask, other_turns, other_roles)):
        build_small_chat_store(tmp_path / str(number), {"train": examples})
        seen.add(open_store(tmp_path / str(number)).fingerprint)
    assert len(seen) == 4


CHANGES = {
    "a chat entry less": lambda m: m["splits"]["val"].update(chat=None),
    "mask bits": lambda m: m["splits"]["train"]["chat"]["mask"].update(entries=10),
    "turn starts": lambda m: m["splits"]["train"]["chat"]["turns"].update(entries=4),
    "roles": lambda m: m["splits"]["train"]["chat"]["roles"].update(entries=6),
    "too many trained": lambda m: m["splits"]["train"]["chat"].update(trained_tokens=12),
    "too few trained": lambda m: m["splits"]["train"]["chat"].update(trained_tokens=1),
    "books": lambda m: m["ledger"]["chat"].update(turns=6),
    "no books": lambda m: m["ledger"].update(chat=None),
    "documents": lambda m: (
        m.update(unit="document"),
        [m.update({f"{s}_documents": m.pop(f"{s}_examples")}) for s in ("train", "val")],
    ),
    "name outside": lambda m: m["splits"]["train"]["chat"]["mask"].update(file="../x.bin"),
    "name twice": lambda m: m["splits"]["train"]["chat"]["mask"].update(file="train_roles.bin"),
    "missing key": lambda m: m["splits"]["train"].pop("chat"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_chat_manifest_that_cannot_be_true_is_refused(tmp_path: Path, name: str) -> None:
    folder = small(tmp_path / "s")
    meta = json.loads((folder / "meta.json").read_bytes())
    CHANGES[name](meta)
    (folder / "meta.json").write_bytes(sealed(meta))
    with pytest.raises(ManifestError):
        open_store(folder)


def hidden_edit(folder: Path, kind: str, data: bytes, **counts: int) -> None:
    """Change a chat file, its checksum and these counts: only the structure shows it."""
    meta = json.loads((folder / "meta.json").read_bytes())
    chat = meta["splits"]["train"]["chat"]
    chat[kind]["sha256"] = hashlib.sha256(data).hexdigest()
    chat.update(counts)
    if counts:
        meta["ledger"]["chat"]["trained_tokens"] = chat["trained_tokens"]
    (folder / chat[kind]["file"]).write_bytes(data)
    (folder / "meta.json").write_bytes(sealed(meta))


@pytest.mark.parametrize(
    ("mask", "counts", "wanted"),
    [
        ([0b00110000, 0b00001010], {}, "has bits after its last token, 11"),
        ([0b00110000, 0b00000110], {}, "trains 4 tokens, but the manifest says 3"),
        ([0b00110100, 0b00000000], {}, "example 1 trains no token"),
        ([0b11000000, 0b00000010], {}, "example 0 trains no token"),
        ([0b00110000, 0b00000110], {"trained_tokens": 4}, None),
    ],
)
def test_a_mask_is_judged_by_its_contents(tmp_path: Path, mask, counts, wanted) -> None:
    folder = small(tmp_path / "s")
    hidden_edit(folder, "mask", bytes(mask), **counts)
    problems = verify(folder).problems
    assert problems == [f"train_mask.bin: {wanted}"] if wanted else problems == []


@pytest.mark.parametrize(
    ("starts", "wanted"),
    [
        ([1, 3, 2, 8, 10], "turn 2 starts before the one before it"),
        ([-1, 3, 7, 8, 10], "turn 0 starts before the one before it"),
        ([1, 3, 7, 8, 11], "a turn starts at token 11 of 11"),
        ([6, 7, 7, 8, 10], "no turn starts in example 0"),
        ([1, 3, 3, 4, 5], "no turn starts in example 1"),
        ([0, 3, 6, 6, 6], None),
    ],
)
def test_turns_are_judged_by_their_contents(tmp_path: Path, starts, wanted) -> None:
    folder = small(tmp_path / "s")
    header = (folder / "train_turns.npy").read_bytes()[:128]
    hidden_edit(folder, "turns", header + np.array(starts, "<i8").tobytes())
    problems = verify(folder).problems
    assert [p.startswith(f"train_turns.npy: {wanted}") for p in problems] == [True] * bool(wanted)


def test_an_unknown_role_is_reported(tmp_path: Path) -> None:
    folder = small(tmp_path / "s")
    hidden_edit(folder, "roles", bytes([1, 2, 0, 9, 1]))
    (problem,) = verify(folder).problems
    assert problem.startswith("train_roles.bin: holds the role 9, but there are 4: system, user")


@pytest.mark.parametrize(
    ("file", "data", "wanted"),
    [
        ("train_mask.bin", b"\x30\xff", "has bits after its last token"),
        ("train_turns.npy", None, r"its \.npy header is not that of 5 int64"),
    ],
)
def test_what_opening_cannot_see_mapping_refuses(tmp_path: Path, file, data, wanted) -> None:
    folder = small(tmp_path / "s")
    path = folder / file
    path.write_bytes(data if data is not None else path.read_bytes().replace(b"<i8", b">i8"))
    with pytest.raises(DamagedStoreError, match=wanted):
        open_store(folder).chat_arrays("train")


@pytest.mark.parametrize("file", ["train_mask.bin", "train_turns.npy", "train_roles.bin"])
def test_a_chat_file_that_shrank_or_is_gone_is_refused(tmp_path: Path, file: str) -> None:
    folder = small(tmp_path / "s")
    store = open_store(folder)
    path = folder / file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedStoreError, match=f"{file}: truncated"):
        open_store(folder)
    with pytest.raises(DamagedStoreError, match=file):
        store.chat_arrays("train")  # it was sound when the store was opened
    path.unlink()
    with pytest.raises(DamagedStoreError, match=f"{file}: missing"):
        open_store(folder)
    with pytest.raises(DamagedStoreError, match=file):
        store.chat_arrays("train")


@pytest.fixture(scope="module", params=[8, None], ids=["shards", "one-file"])
def sound(request, tmp_path_factory) -> Path:
    return small(tmp_path_factory.mktemp("sound") / "store", shard_bytes=request.param)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(which=st.integers(0, 99), action=st.sampled_from(ACTIONS), number=st.integers(0, 2**16))
def test_any_damage_of_a_chat_store_is_found(sound, which, action, number, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(sound, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    damage(folder, files[which % len(files)], action, number)
    try:
        problems = verify(folder).problems
    except ShardmillError as error:
        problems = [str(error)]
    assert problems or contents(folder) == contents(sound)
    try:
        store = open_store(folder)
        for split in store.splits:
            store.chat_arrays(split)
    except ShardmillError:
        pass
    shutil.rmtree(folder)


def many(num_examples: int) -> ChatExamples:
    """Examples of 20 tokens: a user's 10, an assistant's 10, of which 9 are trained."""
    tokens = np.arange(20 * num_examples) % 20
    return ChatExamples(
        ids=Ragged.from_lengths(tokens.astype(np.uint16), np.full(num_examples, 20)),
        mask=tokens > 10,
        turn_starts=np.arange(2 * num_examples) * 10,
        turn_roles=np.tile(np.array([1, 2], np.uint8), num_examples),
    )


@pytest.mark.slow
def test_verifying_conversations_takes_a_few_mebibytes_whatever_the_size(tmp_path: Path) -> None:
    build_small_chat_store(tmp_path / "s", {"train": many(500_000)})
    tracemalloc.start()
    report = verify(tmp_path / "s")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.problems == []
    assert (report.tokens, report.documents) == (10_000_000, 500_000)
    assert peak < 24e6
