"""What a careless or hostile hand does to a cache: refused in words, never read wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.data.wikitext import iter_wikitext
from niels_gpt.installed import install_tokenizer
from niels_gpt.special_tokens import SPECIAL_TOKENS
from shardmill.errors import (
    DamagedStoreError,
    OptionError,
    ShardmillError,
    SourceError,
    StoreError,
    StoreExistsError,
)
from shardmill.tokenizers import TrainSpec, train_tokenizer

IDS = {"sys": 1, "usr": 2, "asst": 3, "eot": 4}


class Words:
    """Knows five words and refuses every other text, as a test's own tokenizer often does."""

    def encode(self, text: str) -> list[int]:
        words = {"a": 5, "b": 6, "c": 7, "d": 8, "e": 9}
        return [words[word] for word in text.split()]


class Chatty(Words):
    def special_token_ids(self) -> dict[str, int]:
        return IDS


def pretrain(folder: Path, **changes: object) -> Path:
    options = {
        "tokenizer": Words(),
        "max_train_tokens": 100,
        "max_val_tokens": 6,
        "shard_bytes": 64,
        "seed": 42,
        "shuffle_buffer": None,
    }
    build_pretrain_cache(["a b c d e"] * 30, str(folder), **{**options, **changes})
    return folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    chat = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]
    build_sft_cache([chat] * 20, str(tmp_path / "s"), tokenizer=Chatty(), val_frac=0.3, seed=1)
    return tmp_path / "s"


def examples(tokens: Path, idx: Path) -> SFTExampleDataset:
    return SFTExampleDataset(str(tokens), str(idx), T=16, device="cpu", eot_id=4)


def test_a_tokenizer_that_refuses_unknown_words_builds_both_caches(tmp_path, chats):
    meta = json.loads((pretrain(tmp_path / "p") / "meta.json").read_text())
    assert (meta["train_tokens"], meta["val_tokens"]) == (100, 6)
    assert meta["special_token_ids"] == {}
    assert json.loads((chats / "meta.json").read_text())["special_token_ids"] == IDS


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, None, True])
def test_a_senseless_seed_is_refused(tmp_path, seed):
    with pytest.raises(OptionError, match="seed="):
        pretrain(tmp_path / "p", seed=seed, shuffle_buffer=5)
    with pytest.raises(OptionError, match="seed="):
        build_sft_cache([], str(tmp_path / "s"), tokenizer=Chatty(), val_frac=0.1, seed=seed)


@pytest.mark.parametrize("limit", [10.5, "5", -1])
def test_a_senseless_budget_is_refused(tmp_path, limit):
    with pytest.raises(OptionError, match="token limit"):
        pretrain(tmp_path / "p", max_train_tokens=limit)


def test_a_link_to_a_split_reads_through_the_manifest(tmp_path):
    store = pretrain(tmp_path / "p")
    (store / "train/shard_99999.bin").write_bytes(bytes(200))  # stale: not in the manifest
    (tmp_path / "link").symlink_to(store / "train")
    assert PretrainTokenStreamDataset(str(tmp_path / "link"), T=4, device="cpu").num_tokens == 100


@pytest.mark.parametrize("damage", [("shardmill-store", "shardmill-stord"), ("format", "gormat")])
def test_a_damaged_manifest_is_never_taken_for_a_bare_folder(tmp_path, chats, damage):
    for store in (pretrain(tmp_path / "p"), chats):
        meta = store / "meta.json"
        meta.write_text(meta.read_text().replace(*damage))
    with pytest.raises(ShardmillError):
        PretrainTokenStreamDataset(str(tmp_path / "p/train"), T=4, device="cpu")
    with pytest.raises(ShardmillError):
        examples(chats / "train_tokens.bin", chats / "train_idx.npy")


@pytest.mark.parametrize("meta", ["{}", '{"token_dtype": ["x"]}', "[" * 100_000])
def test_a_meta_that_says_nothing_is_an_error(tmp_path, meta):
    store = pretrain(tmp_path / "p")
    (store / "meta.json").write_text(meta)
    with pytest.raises(StoreError):
        PretrainTokenStreamDataset(str(store / "train"), T=4, device="cpu")


def test_the_index_of_other_tokens_is_refused(chats):
    with pytest.raises(StoreError, match="not the index of these tokens"):
        examples(chats / "train_tokens.bin", chats / "val_idx.npy")


def test_an_index_with_every_start_moved_is_refused(chats):
    path = chats / "train_idx.npy"
    data = bytearray(path.read_bytes())
    data[128:] = (np.frombuffer(bytes(data), "<i8", offset=128) + 1).tobytes()
    path.write_bytes(data)
    with pytest.raises(DamagedStoreError, match="sha256"):
        examples(chats / "train_tokens.bin", path)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00junk"])
def test_a_broken_index_of_a_bare_file_is_refused(tmp_path, data):
    np.array([2, 5, 3, 6, 4], "<u2").tofile(tmp_path / "t.bin")
    (tmp_path / "i.npy").write_bytes(data)
    with pytest.raises(DamagedStoreError):
        examples(tmp_path / "t.bin", tmp_path / "i.npy")


def test_a_wikitext_folder_takes_each_split_by_its_word_and_text_files_only(tmp_path):
    (tmp_path / "wiki.train.raw").write_text(" = T = \n\n train text\n")
    (tmp_path / "wiki.valid.raw").write_text(" = V = \n\n val text\n")
    (tmp_path / "wiki.train.raw.zip").write_bytes(b"PK\x05\x06" + bytes(18))
    (tmp_path / "wiki.retrieval.train.raw").write_text(" = R = \n\n more train\n")
    assert [text[:6] for text in iter_wikitext(tmp_path, split="val")] == [" = V ="]
    assert [text[:6] for text in iter_wikitext(tmp_path, split="train")] == [" = R =", " = T ="]
    (tmp_path / "wiki.train.valid.raw").write_text("both")
    with pytest.raises(SourceError, match="both"):
        list(iter_wikitext(tmp_path, split="train"))


def test_a_cache_never_holds_stores_of_two_tokenizers(tmp_path):
    texts = ["some words to train on, and some more of them"] * 9
    models = []
    for size in (277, 279):
        spec = TrainSpec(vocab_size=size, specials=SPECIAL_TOKENS)
        models.append(train_tokenizer(tmp_path / f"t{size}", texts=texts, spec=spec).model)
    cache = tmp_path / "cache"
    first = install_tokenizer(cache, models[0], overwrite=False)
    pretrain(cache / "pretrain/roam", tokenizer=first)
    install_tokenizer(cache, models[0], overwrite=False)
    with pytest.raises(StoreExistsError, match="another model"):
        install_tokenizer(cache, models[1], overwrite=False)
    with pytest.raises(StoreExistsError, match="roam was built with another tokenizer"):
        install_tokenizer(cache, models[1], overwrite=True, rebuilt=[cache / "pretrain/wikitext"])
    install_tokenizer(cache, models[1], overwrite=True, rebuilt=[cache / "pretrain/roam"])
