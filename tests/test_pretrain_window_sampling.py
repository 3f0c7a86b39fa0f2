"""Random windows: what a batch of pretraining tokens promises."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache.build_cache import build_pretrain_cache
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError

VOCAB = 500


def write_shards(folder: Path, sizes: list[int], first: int = 0) -> list[list[int]]:
    """Shards of rising ids, no id twice: a window tells where it came from."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number, size in enumerate(sizes):
        shards.append(list(range(first, first + size)))
        np.array(shards[-1], "<u2").tofile(folder / f"shard_{number:05d}.bin")
        first += size
    return shards


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Letters:
    """A tokenizer of its own: one id a letter."""

    vocab_size = VOCAB

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % VOCAB for letter in text]


def test_targets_are_inputs_moved_by_one_and_ids_are_in_the_vocabulary(tmp_path: Path) -> None:
    texts = [f"document {n} says something of its own. " * 5 for n in range(60)]
    build_pretrain_cache(
        texts,
        str(tmp_path / "cache"),
        tokenizer=Letters(),
        max_train_tokens=8_000,
        max_val_tokens=1_000,
        shard_bytes=4_000,
        seed=1,
        shuffle_buffer=16,
    )
    data = PretrainTokenStreamDataset(str(tmp_path / "cache" / "train"), T=32, device="cpu")
    draws = generator()
    for _ in range(20):
        x, y = data.get_batch(B=16, generator=draws)
        assert x.shape == y.shape == (16, 32)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(y[:, :-1], x[:, 1:])
        assert int(x.min()) >= 0
        assert int(y.max()) < VOCAB


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    length=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_a_window_lies_inside_one_shard(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], length: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    shards = write_shards(folder, sizes)
    windows = {tuple(s[i : i + length + 1]) for s in shards for i in range(len(s) - length)}
    if not windows:
        with pytest.raises(StoreError):
            PretrainTokenStreamDataset(str(folder), T=length, device="cpu")
        return
    data = PretrainTokenStreamDataset(str(folder), T=length, device="cpu")
    x, y = data.get_batch(B=50, generator=generator(seed))
    drawn = {(*row, last) for row, last in zip(x.tolist(), y[:, -1].tolist(), strict=True)}
    assert drawn <= windows
    assert data.num_windows == len(windows)
    assert torch.equal(y[:, :-1], x[:, 1:])


def test_every_window_is_equally_likely(tmp_path: Path) -> None:
    write_shards(tmp_path, [3, 30, 2, 12])  # 1 + 28 + 0 + 10 windows of 3 tokens
    data = PretrainTokenStreamDataset(str(tmp_path), T=2, device="cpu")
    x, _ = data.get_batch(B=39_000, generator=generator(3))
    counts = Counter(x[:, 0].tolist())
    assert sorted(counts) == [0, *range(3, 31), *range(35, 45)]
    # 1,000 each, standard deviation 31: six of them leave no room for another rule.
    assert min(counts.values()) > 810
    assert max(counts.values()) < 1_190


def test_the_same_generator_draws_the_same_windows(tmp_path: Path) -> None:
    write_shards(tmp_path, [500, 300])
    data = PretrainTokenStreamDataset(str(tmp_path), T=8, device="cpu")
    first, again, other = (data.get_batch(B=8, generator=generator(s))[0] for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_inputs_and_targets_share_no_memory(tmp_path: Path) -> None:
    write_shards(tmp_path, [50])
    x, y = PretrainTokenStreamDataset(str(tmp_path), T=8, device="cpu").get_batch(
        B=2, generator=generator()
    )
    assert x.is_contiguous()
    assert y.is_contiguous()
    before = y.clone()
    x.zero_()
    assert torch.equal(y, before)


def test_a_bare_folder_is_read_as_uint16_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_shards(tmp_path, [4], first=65_000)
    with caplog.at_level(logging.INFO):
        data = PretrainTokenStreamDataset(str(tmp_path), T=3, device="cpu")
    assert "read as uint16" in caplog.text
    assert data.get_batch(B=1, generator=generator())[0].tolist() == [[65_000, 65_001, 65_002]]


def test_folders_that_hold_no_window_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="no such folder"):
        PretrainTokenStreamDataset(str(tmp_path / "nowhere"), T=4, device="cpu")
    with pytest.raises(FileNotFoundError, match="no shard files"):
        PretrainTokenStreamDataset(str(tmp_path), T=4, device="cpu")
    write_shards(tmp_path, [3, 4])
    with pytest.raises(ValueError, match=r"no shard has enough tokens .* 5; the longest has 4"):
        PretrainTokenStreamDataset(str(tmp_path), T=4, device="cpu")
    with pytest.raises(OptionError, match="T=0"):
        PretrainTokenStreamDataset(str(tmp_path), T=0, device="cpu")
    (tmp_path / "shard_00000.bin").write_bytes(b"abc")
    with pytest.raises(DamagedStoreError, match="3 bytes are no whole number"):
        PretrainTokenStreamDataset(str(tmp_path), T=1, device="cpu")
