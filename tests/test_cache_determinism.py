"""Same input, same seed: the same bytes in every file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from niels_gpt.cache.build_cache import Message, build_pretrain_cache, build_sft_cache
from niels_gpt.cache.meta import read_meta, sha256_file


class Bytes:
    vocab_size = 266

    def encode(self, text: str) -> list[int]:
        return [byte + 10 for byte in text.encode()]

    def special_token_ids(self) -> dict[str, int]:
        return {"sys": 0, "usr": 1, "asst": 2, "eot": 3}


TEXTS = [f"document {n} " * (n % 9 + 1) for n in range(300)]
CHATS: list[list[Message]] = [
    [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]
    for n in range(50)
]


def files(folder: Path) -> dict[str, str]:
    """Every file below a folder and its sha256."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256_file(str(path)) for path in paths}


def pretrain(folder: Path, texts: Iterable[str] = TEXTS, **changes: Any) -> dict[str, str]:
    options: dict[str, Any] = {
        "max_train_tokens": 12_000,
        "max_val_tokens": 1_500,
        "shard_bytes": 4_096,
        "seed": 42,
        "shuffle_buffer": 50,
        **changes,
    }
    build_pretrain_cache(texts, str(folder), tokenizer=Bytes(), **options)
    return files(folder)


def sft(folder: Path, chats: Iterable[list[Message]] = CHATS, seed: int = 42) -> dict[str, str]:
    build_sft_cache(chats, str(folder), tokenizer=Bytes(), val_frac=0.1, seed=seed)
    return files(folder)


def test_a_pretrain_cache_is_the_same_every_time(tmp_path: Path) -> None:
    first = pretrain(tmp_path / "a")
    assert pretrain(tmp_path / "b") == first
    assert pretrain(tmp_path / "c", iter(TEXTS)) == first
    assert [name for name in first if name.startswith("train/")] == [
        f"train/shard_{n:05d}.bin" for n in range(6)
    ]
    assert {"val/shard_00000.bin", "meta.json"} <= set(first)


def test_another_seed_gives_another_order_of_the_same_documents(tmp_path: Path) -> None:
    everything = {"max_train_tokens": 10**6, "max_val_tokens": 0, "shard_bytes": 10**6}
    first = pretrain(tmp_path / "a", **everything)
    other = pretrain(tmp_path / "b", seed=43, **everything)
    shard = "train/shard_00000.bin"
    assert first[shard] != other[shard]
    tokens = [np.fromfile(tmp_path / name / shard, "<u2") for name in ("a", "b")]
    assert np.array_equal(np.sort(tokens[0]), np.sort(tokens[1]))


def test_without_a_buffer_the_order_is_the_input_and_the_seed_changes_no_token(
    tmp_path: Path,
) -> None:
    first = pretrain(tmp_path / "a", shuffle_buffer=None)
    other = pretrain(tmp_path / "b", shuffle_buffer=None, seed=43)
    del first["meta.json"], other["meta.json"]
    assert first == other


def test_a_chat_cache_is_the_same_every_time(tmp_path: Path) -> None:
    first = sft(tmp_path / "a")
    assert sft(tmp_path / "b") == first
    assert sft(tmp_path / "c", iter(CHATS)) == first
    assert sorted(first) == [
        "meta.json",
        "train_idx.npy",
        "train_tokens.bin",
        "val_idx.npy",
        "val_tokens.bin",
    ]
    assert sft(tmp_path / "d", seed=43)["val_tokens.bin"] != first["val_tokens.bin"]


def test_building_again_over_a_larger_cache_leaves_nothing_of_it(tmp_path: Path) -> None:
    pretrain(tmp_path / "a")
    small = {"max_train_tokens": 3_000}
    assert pretrain(tmp_path / "a", overwrite=True, **small) == pretrain(tmp_path / "b", **small)


COMMON = {
    "dataset_name": "demo",
    "dataset_config": "en",
    "seed": 42,
    "token_dtype": "uint16-le",
    "vocab_size": 266,
    "special_token_ids": {"sys": 0, "usr": 1, "asst": 2, "eot": 3},
    "streaming": True,
}


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_meta_holds_every_key_of_the_contract(tmp_path: Path, kind: str) -> None:
    named = {"source_name": "demo", "source_config": "en", "streaming": True}
    if kind == "pretrain":
        pretrain(tmp_path / "c", **named)
    else:
        build_sft_cache(
            CHATS, str(tmp_path / "c"), tokenizer=Bytes(), val_frac=0.1, seed=42, **named
        )  # type: ignore[arg-type]
    meta = read_meta(str(tmp_path / "c" / "meta.json"))
    assert {key: meta[key] for key in COMMON} == COMMON
    assert len(meta["tokenizer_sha256"]) == 64
    assert "val" in meta["split_rule"]
    if kind == "pretrain":
        assert (meta["train_tokens"], meta["val_tokens"]) == (12_000, 1_500)
        assert meta["shard_bytes"] == 4_096
        assert meta["shuffle_buffer"] == 50
    else:
        assert (meta["train_examples"], meta["val_examples"]) == (45, 5)


def test_the_tokenizers_sha256_is_that_of_its_model_file(tmp_path: Path) -> None:
    model = tmp_path / "spm.model"
    model.write_bytes(b"abc")

    class WithFile(Bytes):
        model_path = str(model)

    build_sft_cache(CHATS, str(tmp_path / "c"), tokenizer=WithFile(), val_frac=0.1, seed=0)
    assert read_meta(str(tmp_path / "c" / "meta.json"))["tokenizer_sha256"] == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
