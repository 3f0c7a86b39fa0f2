"""What is written can be read back: chats and texts, to the token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache.build_cache import Message, build_pretrain_cache, build_sft_cache
from niels_gpt.cache.meta import read_meta
from niels_gpt.messages import Chat
from niels_gpt.special_tokens import EOT
from shardmill.errors import SourceError, StoreExistsError, TokenizerError, TokenRangeError
from shardmill.store import verify

IDS = {"sys": 0, "usr": 1, "asst": 2, "eot": 3}


class Bytes:
    """A caller's tokenizer: bytes from 10 up."""

    vocab_size = 266

    def encode(self, text: str) -> list[int]:
        return [byte + 10 for byte in text.encode()]

    def special_token_ids(self) -> dict[str, int]:
        return IDS


def render(chat: list[Message]) -> list[int]:
    names = {"system": "sys", "user": "usr", "assistant": "asst"}
    ids = []
    for message in chat:
        ids += [IDS[names[message["role"]]], *Bytes().encode(message["content"]), IDS["eot"]]
    return ids


def read_split(folder: Path, split: str) -> list[list[int]]:
    """The examples of a split, with numpy alone."""
    tokens = np.fromfile(folder / f"{split}_tokens.bin", "<u2")
    starts = np.load(folder / f"{split}_idx.npy", allow_pickle=False)
    assert starts.dtype == np.int64
    assert len(starts) == 0 or starts[0] == 0
    assert (np.diff(starts) > 0).all()
    return [part.tolist() for part in np.split(tokens, starts[1:])] if len(starts) else []


def question(text: str, answer: str = "yes") -> list[Message]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def test_chats_come_back_as_they_were_tokenised(tmp_path: Path) -> None:
    chats: list[list[Message]] = [question(f"question {n}", f"answer {n}") for n in range(20)]
    chats[4] = [{"role": "system", "content": "be brief"}, *question("why?", "so \u2192 so")]
    build_sft_cache(chats, str(tmp_path / "c"), tokenizer=Bytes(), val_frac=0.25, seed=42)
    train, val = read_split(tmp_path / "c", "train"), read_split(tmp_path / "c", "val")
    # torch.randperm(20, seed 42) begins 2, 14, 18, 15, 1: written down, not computed here.
    assert val == [render(chats[n]) for n in (1, 2, 14, 15, 18)]
    assert train == [render(chats[n]) for n in range(20) if n not in (1, 2, 14, 15, 18)]
    assert verify(tmp_path / "c").problems == []


def test_a_dropped_chat_keeps_its_place_in_the_split(tmp_path: Path) -> None:
    chats: list[list[Message]] = [question(f"question {n}") for n in range(20)]
    chats[3] = [{"role": "user", "content": "no answer"}]
    chats[14] = []
    build_sft_cache(chats, str(tmp_path / "c"), tokenizer=Bytes(), val_frac=0.25, seed=42)
    # The same draw as above, over all 20 that were read.
    assert read_split(tmp_path / "c", "val") == [render(chats[n]) for n in (1, 2, 15, 18)]
    rest = [n for n in range(20) if n not in (1, 2, 3, 14, 15, 18)]
    assert read_split(tmp_path / "c", "train") == [render(chats[n]) for n in rest]


texts = st.text(max_size=8).filter(lambda text: text.isprintable())
turns = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), texts), max_size=4)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(batch=st.lists(turns, max_size=12), seed=st.integers(0, 5))
def test_every_chat_is_in_one_split_or_dropped_for_a_reason(
    tmp_path_factory: pytest.TempPathFactory, batch: list[list[tuple[str, str]]], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("sft") / "c"
    chats = [[{"role": r, "content": c} for r, c in chat] for chat in batch]
    good = [chat for chat in chats if any(m["role"] == "assistant" for m in chat)]
    if not good:
        with pytest.raises(SourceError, match="none of"):
            build_sft_cache(chats, str(folder), tokenizer=Bytes(), val_frac=0.3, seed=seed)
        return
    build_sft_cache(chats, str(folder), tokenizer=Bytes(), val_frac=0.3, seed=seed)
    train, val = read_split(folder, "train"), read_split(folder, "val")
    assert sorted(train + val) == sorted(render(chat) for chat in good)
    meta = read_meta(str(folder / "meta.json"))
    dropped = meta["ledger"]["documents"]["dropped"]
    assert meta["ledger"]["documents"]["read"] == len(chats)
    assert sum(dropped.values()) == len(chats) - len(good)
    assert set(dropped) <= {"no_messages", "no_assistant"}
    assert (meta["train_examples"], meta["val_examples"]) == (len(train), len(val))


def test_malformed_chats_are_listed_with_id_and_reason(tmp_path: Path) -> None:
    chats = [
        question("a"),
        [{"role": "user", "content": "only a question"}],
        Chat([{"role": "assistant", "content": None}], id="dolly:7"),  # type: ignore[typeddict-item]
        question("b"),
    ]
    build_sft_cache(chats, str(tmp_path / "c"), tokenizer=Bytes(), val_frac=0.1, seed=0)
    lines = (tmp_path / "c" / "dropped.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"id": "example 1", "reason": "no_assistant"},
        {"id": "dolly:7", "reason": "content_not_text"},
    ]
    meta = read_meta(str(tmp_path / "c" / "meta.json"))
    assert meta["ledger"]["documents"]["dropped"] == {"content_not_text": 1, "no_assistant": 1}


def test_chats_of_one_tree_stay_on_one_side(tmp_path: Path) -> None:
    chats = [Chat(question(f"tree {n % 7}"), id=str(n), group=f"tree {n % 7}") for n in range(40)]
    for seed in range(6):
        folder = tmp_path / str(seed)
        build_sft_cache(
            chats, str(folder), tokenizer=Bytes(), val_frac=0.3, seed=seed, sft_split="tree"
        )
        train = {tuple(ids) for ids in read_split(folder, "train")}
        val = {tuple(ids) for ids in read_split(folder, "val")}
        assert len(val) == 2
        assert not train & val


def test_by_default_the_split_is_by_example_also_for_trees(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trees = [Chat(question(f"chat {n}"), id=str(n), group=f"tree {n % 7}") for n in range(40)]
    plain = [question(f"chat {n}") for n in range(40)]
    for name, chats in (("trees", trees), ("plain", plain)):
        build_sft_cache(chats, str(tmp_path / name), tokenizer=Bytes(), val_frac=0.1, seed=3)
    for split in ("train", "val"):
        assert read_split(tmp_path / "trees", split) == read_split(tmp_path / "plain", split)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist()
    wanted = [Bytes().encode(f"chat {n}") for n in sorted(order[:4])]
    found = read_split(tmp_path / "trees", "val")
    assert len(found) == len(wanted)
    assert all(str(ids)[1:-1] in str(one) for ids, one in zip(wanted, found, strict=True))
    assert [record.message for record in caplog.records if "trees" in record.message]
    for name in ("trees", "plain"):
        rule = read_meta(str(tmp_path / name / "meta.json"))["split_rule"]
        assert rule.startswith("by example: ")


def test_one_chat_alone_is_for_training(tmp_path: Path) -> None:
    build_sft_cache([question("a")], str(tmp_path / "c"), tokenizer=Bytes(), val_frac=0.5, seed=0)
    assert len(read_split(tmp_path / "c", "train")) == 1
    assert read_split(tmp_path / "c", "val") == []


def test_a_text_that_becomes_a_special_id_is_dropped_by_name(tmp_path: Path) -> None:
    class Naive(Bytes):
        def encode(self, text: str) -> list[int]:
            return [3] if text == EOT else super().encode(text)

    chats = [question("fine"), question(EOT), question("fine, too")]
    build_sft_cache(chats, str(tmp_path / "c"), tokenizer=Naive(), val_frac=0.4, seed=0)
    assert json.loads((tmp_path / "c" / "dropped.jsonl").read_text()) == {
        "id": "example 1",
        "reason": "special_in_text",
    }


def test_texts_come_back_as_they_were_tokenised(tmp_path: Path) -> None:
    documents = [f"text number {n}. " * (n % 4 + 1) for n in range(40)]
    ids = [Bytes().encode(text) for text in documents]
    build_pretrain_cache(
        documents,
        str(tmp_path / "c"),
        tokenizer=Bytes(),
        max_train_tokens=10**6,
        max_val_tokens=100,
        shard_bytes=256,
        seed=0,
        shuffle_buffer=None,
    )
    shards = sorted((tmp_path / "c" / "train").glob("shard_*.bin"))
    assert [path.name for path in shards[:2]] == ["shard_00000.bin", "shard_00001.bin"]
    assert {path.stat().st_size for path in shards[:-1]} == {256}
    train = np.concatenate([np.fromfile(path, "<u2") for path in shards])
    val = np.fromfile(tmp_path / "c" / "val" / "shard_00000.bin", "<u2")
    # Documents 0, 1 and 2 have 15, 30 and 45 tokens: the fourth fills val up and is cut there.
    assert [len(document) for document in ids[:4]] == [15, 30, 45, 60]
    assert val.tolist() == [token for document in ids[:4] for token in document][:100]
    assert train.tolist() == [token for document in ids[4:] for token in document]
    meta = read_meta(str(tmp_path / "c" / "meta.json"))
    assert meta["ledger"]["tokens"]["over_budget"] == 50
    assert (meta["val_tokens"], meta["train_tokens"]) == (100, len(train))
    assert verify(tmp_path / "c").problems == []


def test_append_eot_closes_every_document(tmp_path: Path) -> None:
    build_pretrain_cache(
        ["ab", "c"],
        str(tmp_path / "c"),
        tokenizer=Bytes(),
        max_train_tokens=100,
        max_val_tokens=0,
        shard_bytes=64,
        seed=0,
        shuffle_buffer=None,
        append_eot=True,
    )
    found = np.fromfile(tmp_path / "c" / "train" / "shard_00000.bin", "<u2")
    assert found.tolist() == [107, 108, 3, 109, 3]


class OnlyEncode:
    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]


def test_a_tokenizer_needs_only_encode(tmp_path: Path) -> None:
    build_pretrain_cache(
        ["one three", "a"],
        str(tmp_path / "c"),
        tokenizer=OnlyEncode(),
        max_train_tokens=100,
        max_val_tokens=0,
        shard_bytes=64,
        seed=0,
        shuffle_buffer=None,
    )
    found = np.fromfile(tmp_path / "c" / "train" / "shard_00000.bin", "<u2")
    assert found.tolist() == [3, 5, 1]
    meta = read_meta(str(tmp_path / "c" / "meta.json"))
    assert (meta["vocab_size"], meta["special_token_ids"]) == (None, {})


def test_chats_need_the_four_special_ids(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no id for sys, usr, asst, eot"):
        build_sft_cache(
            [question("a")], str(tmp_path / "c"), tokenizer=OnlyEncode(), val_frac=0.1, seed=0
        )
    assert not (tmp_path / "c").exists()


def test_ids_beyond_uint16_are_refused_and_nothing_appears(tmp_path: Path) -> None:
    class Wide:
        def encode(self, text: str) -> list[int]:
            return [5, 65_536 if "big" in text else 6]

    class Declared(Wide):
        vocab_size = 70_000

    options = {
        "max_train_tokens": 100,
        "max_val_tokens": 0,
        "shard_bytes": 64,
        "seed": 0,
        "shuffle_buffer": None,
    }
    out = str(tmp_path / "c")
    with pytest.raises(TokenRangeError, match=r"document 1.*65,?536"):
        build_pretrain_cache(["small", "big"], out, tokenizer=Wide(), **options)  # type: ignore[arg-type]
    with pytest.raises(TokenRangeError, match=r"70,000 ids"):
        build_pretrain_cache(["small"], out, tokenizer=Declared(), **options)  # type: ignore[arg-type]
    assert not Path(out).exists()


def test_a_finished_cache_is_replaced_only_on_request(tmp_path: Path) -> None:
    out = str(tmp_path / "c")
    build_sft_cache([question("old")] * 3, out, tokenizer=Bytes(), val_frac=0.4, seed=0)
    with pytest.raises(StoreExistsError, match="overwrite"):
        build_sft_cache([question("new")] * 3, out, tokenizer=Bytes(), val_frac=0.4, seed=0)
    assert read_split(tmp_path / "c", "train") == [render(question("old"))] * 2
    build_sft_cache(
        [question("new")] * 3, out, tokenizer=Bytes(), val_frac=0.4, seed=0, overwrite=True
    )
    assert read_split(tmp_path / "c", "train") == [render(question("new"))] * 2
