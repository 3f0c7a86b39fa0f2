"""Datasets over finished stores: only what the manifest lists is read."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from niels_gpt.cache import (
    PretrainTokenStreamDataset,
    SFTExampleDataset,
    build_pretrain_cache,
    build_sft_cache,
    read_meta,
    write_meta,
)
from niels_gpt.messages import Message
from niels_gpt.special_tokens import EOT
from niels_gpt.tokenizer import load_tokenizer
from shardmill.errors import (
    DamagedStoreError,
    ManifestError,
    OptionError,
    StoreError,
    StoreNotFoundError,
)


@pytest.fixture
def stream(tmp_path: Path, model: Path) -> Path:
    """A store of 5,000 training tokens in shards of 1,000."""
    texts = [f"Document {n} is about the number {n}." for n in range(2_000)]
    build_pretrain_cache(
        texts,
        str(tmp_path / "stream"),
        tokenizer=load_tokenizer(model),
        max_train_tokens=5_000,
        max_val_tokens=500,
        shard_bytes=2_000,
        seed=0,
        shuffle_buffer=None,
    )
    return tmp_path / "stream"


@pytest.fixture
def chats(tmp_path: Path, model: Path) -> Path:
    made: list[list[Message]] = [
        [
            {"role": "user", "content": f"What is {n} plus {n}?"},
            {"role": "assistant", "content": f"{n} plus {n} is {2 * n}."},
        ]
        for n in range(40)
    ]
    out = tmp_path / "chats"
    build_sft_cache(made, str(out), tokenizer=load_tokenizer(model), val_frac=0.1, seed=0)
    return out


def windows(folder: Path, length: int = 16) -> PretrainTokenStreamDataset:
    return PretrainTokenStreamDataset(str(folder / "train"), T=length, device="cpu")


def test_stale_shards_are_never_read(stream: Path) -> None:
    before = windows(stream).num_windows
    np.full(10_000, 7, "<u2").tofile(stream / "train" / "shard_00099.bin")
    data = windows(stream)
    assert data.num_windows == before == 5 * (1_000 - 16)
    assert data.num_tokens == 5_000


def test_a_shard_of_another_size_is_refused(stream: Path) -> None:
    path = stream / "train" / "shard_00002.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DamagedStoreError, match="shard_00002"):
        windows(stream)


def test_a_folder_without_its_manifest_is_read_bare(stream: Path) -> None:
    (stream / "meta.json").unlink()
    assert windows(stream).num_tokens == 5_000


def test_the_dtype_of_a_foreign_meta_is_believed(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    np.arange(70_000, 70_020, dtype="<u4").tofile(tmp_path / "train" / "shard_00000.bin")
    write_meta(str(tmp_path / "meta.json"), {"token_dtype": "uint32-le"})
    x, _ = windows(tmp_path, 19).get_batch(B=1, generator=torch.Generator())
    assert x.tolist() == [list(range(70_000, 70_019))]
    write_meta(str(tmp_path / "meta.json"), {"token_dtype": "float"})
    with pytest.raises(StoreError, match="'float'"):
        windows(tmp_path, 19)


def test_datasets_pickle_by_path(stream: Path) -> None:
    data = windows(stream)
    copy = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 5_000
    first, second = (
        d.get_batch(B=4, generator=torch.Generator().manual_seed(1))[0] for d in (data, copy)
    )
    assert torch.equal(first, second)


def test_a_chat_cache_knows_its_assistant_and_trains_what_it_said(chats: Path, model: Path) -> None:
    tokenizer = load_tokenizer(model)
    data = SFTExampleDataset(
        str(chats / "train_tokens.bin"),
        str(chats / "train_idx.npy"),
        T=64,
        device="cpu",
        eot_id=tokenizer.special_token_ids()["eot"],
    )
    assert len(data) == data.num_examples == 36
    _, _, masked = data.get_batch(B=32, generator=torch.Generator().manual_seed(0))
    said = {tokenizer.decode(row[row != -100].numpy()) for row in masked}
    possible = {f"{n} plus {n} is {2 * n}.{EOT}" for n in range(40)}
    assert said <= possible
    assert len(said) > 5


def test_ids_that_contradict_the_manifest_are_refused(chats: Path) -> None:
    files = (str(chats / "train_tokens.bin"), str(chats / "train_idx.npy"))
    with pytest.raises(OptionError, match=r"eot_id=9, but its meta\.json says 4"):
        SFTExampleDataset(*files, T=8, device="cpu", eot_id=9)
    with pytest.raises(OptionError, match=r"asst_id=2, but its meta\.json says 3"):
        SFTExampleDataset(*files, T=8, device="cpu", eot_id=4, asst_id=2)


def test_a_token_file_the_manifest_does_not_list_is_not_read(chats: Path) -> None:
    stale = chats / "old_tokens.bin"
    stale.write_bytes((chats / "train_tokens.bin").read_bytes())
    with pytest.raises(StoreError, match="does not list this file"):
        SFTExampleDataset(str(stale), str(chats / "train_idx.npy"), T=8, device="cpu", eot_id=4)


def test_meta_is_written_whole_and_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "meta.json")
    write_meta(path, {"b": [1, None], "a": "caf\u00e9"})
    assert read_meta(path) == {"a": "caf\u00e9", "b": [1, None]}
    assert Path(path).read_text() == '{\n  "a": "caf\\u00e9",\n  "b": [\n    1,\n    null\n  ]\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        write_meta(path, {"a": float("nan")})
    assert read_meta(path)["b"] == [1, None]
    assert [file.name for file in Path(path).parent.iterdir()] == ["meta.json"]


def test_a_missing_or_broken_meta_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="build the cache first"):
        read_meta(str(tmp_path / "meta.json"))
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(ManifestError, match="not JSON"):
        read_meta(str(tmp_path / "meta.json"))
    (tmp_path / "meta.json").write_text("[]")
    with pytest.raises(ManifestError, match="list"):
        read_meta(str(tmp_path / "meta.json"))
