"""Which targets a chat batch trains, on token files written by hand."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache.sft_dataset import SFTExampleDataset
from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError

SYS, USR, ASST, EOT = 3, 4, 5, 6
A, B = 101, 102
CHAT = [SYS, 50, EOT, USR, 60, 61, EOT, ASST, A, B, EOT]


def write(folder: Path, examples: list[list[int]]) -> tuple[str, str]:
    tokens, idx = folder / "train_tokens.bin", folder / "train_idx.npy"
    np.array([token for example in examples for token in example], "<u2").tofile(tokens)
    np.save(idx, np.cumsum([0, *map(len, examples)], dtype=np.int64)[:-1])
    return str(tokens), str(idx)


def dataset(folder: Path, examples: list[list[int]], length: int) -> SFTExampleDataset:
    return SFTExampleDataset(
        *write(folder, examples), T=length, device="cpu", eot_id=EOT, asst_id=ASST
    )


def batch(data: SFTExampleDataset, size: int = 1, seed: int = 0) -> tuple[torch.Tensor, ...]:
    return data.get_batch(B=size, generator=torch.Generator().manual_seed(seed))


def test_only_the_assistants_words_and_its_eot_are_targets(tmp_path: Path) -> None:
    x, y, masked = batch(dataset(tmp_path, [CHAT], 10))
    assert x.tolist() == [CHAT[:-1]]
    assert y.tolist() == [CHAT[1:]]
    assert masked.tolist() == [[-100] * 7 + [A, B, EOT]]
    assert {x.dtype, y.dtype, masked.dtype} == {torch.int64}


def test_padding_is_eot_and_never_trained(tmp_path: Path) -> None:
    x, y, masked = batch(dataset(tmp_path, [CHAT], 13))
    assert x.tolist() == [[*CHAT, EOT, EOT]]
    assert y.tolist() == [[*CHAT[1:], EOT, EOT, EOT]]
    assert masked.tolist() == [[-100] * 7 + [A, B, EOT] + [-100] * 3]


def test_padding_does_not_close_an_answer_that_has_no_end(tmp_path: Path) -> None:
    _, y, masked = batch(dataset(tmp_path, [[USR, 60, EOT, ASST, A]], 7))
    assert y.tolist() == [[60, EOT, ASST, A, EOT, EOT, EOT]]
    assert masked.tolist() == [[-100, -100, -100, A, -100, -100, -100]]


def test_a_long_example_keeps_its_first_tokens(tmp_path: Path) -> None:
    x, y, masked = batch(dataset(tmp_path, [CHAT], 8))
    assert x.tolist() == [CHAT[:8]]
    assert y.tolist() == [CHAT[1:9]]
    assert masked.tolist() == [[-100] * 7 + [A]]


def test_every_assistant_turn_is_trained(tmp_path: Path) -> None:
    chat = [USR, 60, EOT, ASST, A, EOT, USR, 61, EOT, ASST, EOT]
    _, _, masked = batch(dataset(tmp_path, [chat], 10))
    assert masked.tolist() == [[-100, -100, -100, A, EOT, -100, -100, -100, -100, EOT]]


def test_the_answer_of_one_example_does_not_reach_the_next(tmp_path: Path) -> None:
    first, second = [ASST, A], [USR, 60, EOT, ASST, B, EOT]
    _, _, masked = batch(dataset(tmp_path, [first, second], 5), size=40)
    assert {tuple(row) for row in masked.tolist()} == {
        (A, -100, -100, -100, -100),
        (-100, -100, -100, B, EOT),
    }


def test_examples_that_could_not_train_are_never_drawn_and_are_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long_prompt = [USR, *range(60, 70), EOT, ASST, A, EOT]
    cut_at_the_answer = [USR, 60, 61, EOT, ASST, B, EOT]
    with caplog.at_level(logging.WARNING):
        data = dataset(tmp_path, [long_prompt, CHAT[3:], cut_at_the_answer], 5)
    assert len(data) == 2
    assert data.num_examples == 3
    assert "1 of 3 examples are never drawn" in caplog.text
    _, _, masked = batch(data, size=50)
    assert bool((masked != -100).any(dim=1).all())


tokens = st.sampled_from([50, A, USR, ASST, EOT])
examples = st.lists(st.lists(tokens, min_size=1, max_size=12), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(examples=examples, length=st.integers(1, 14))
def test_every_row_trains_a_token_and_padding_none(
    tmp_path_factory: pytest.TempPathFactory, examples: list[list[int]], length: int
) -> None:
    folder = tmp_path_factory.mktemp("sft")

    def row(example: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """y and y_masked of an example, token by token."""
        cut, said, masked = example[: length + 1], False, []
        for token in cut:
            masked.append(token if said and token != ASST else -100)
            said = token == ASST or (said and token != EOT)
        missing = length + 1 - len(cut)
        y = (*cut, *[EOT] * missing)[1:]
        return y, (*masked, *[-100] * missing)[1:]

    wanted = {row(example) for example in examples}
    drawable = {(y, masked) for y, masked in wanted if set(masked) != {-100}}
    if not drawable:
        with pytest.raises(StoreError, match="nothing could be trained"):
            dataset(folder, examples, length)
        return
    data = dataset(folder, examples, length)
    _, y, masked = batch(data, size=64)
    drawn = {(tuple(a), tuple(b)) for a, b in zip(y.tolist(), masked.tolist(), strict=True)}
    assert drawn <= drawable
    everything = data.rows(np.arange(len(examples)))[2]
    assert {tuple(line) for line in everything.tolist()} == {masked for _, masked in wanted}


def test_without_asst_id_the_convention_is_used_and_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        data = SFTExampleDataset(*write(tmp_path, [CHAT]), T=10, device="cpu", eot_id=EOT)
    assert "eot_id - 1 = 5" in caplog.text
    assert batch(data)[2].tolist() == [[-100] * 7 + [A, B, EOT]]


def test_the_same_generator_draws_the_same_batches(tmp_path: Path) -> None:
    data = dataset(tmp_path, [[USR, n, EOT, ASST, A, EOT] for n in range(50, 90)], 6)
    first, again, other = (batch(data, size=16, seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_index_that_does_not_belong_to_the_tokens_is_refused(tmp_path: Path) -> None:
    tokens, idx = write(tmp_path, [CHAT])
    for wrong in ([0, 5, 4], [-1, 3], [0, 99]):
        np.save(idx, np.array(wrong, np.int64))
        with pytest.raises(DamagedStoreError, match="must rise from 0 inside the 11 tokens"):
            SFTExampleDataset(tokens, idx, T=4, device="cpu", eot_id=EOT, asst_id=ASST)
    np.save(idx, np.array([0], np.int32))
    with pytest.raises(DamagedStoreError, match="int32"):
        SFTExampleDataset(tokens, idx, T=4, device="cpu", eot_id=EOT, asst_id=ASST)
    Path(idx).unlink()
    with pytest.raises(StoreNotFoundError, match="train_idx"):
        SFTExampleDataset(tokens, idx, T=4, device="cpu", eot_id=EOT, asst_id=ASST)


def test_senseless_arguments_are_refused(tmp_path: Path) -> None:
    files = write(tmp_path, [CHAT])
    with pytest.raises(OptionError, match="T=0"):
        SFTExampleDataset(*files, T=0, device="cpu", eot_id=EOT, asst_id=ASST)
    with pytest.raises(OptionError, match="two different ids"):
        SFTExampleDataset(*files, T=4, device="cpu", eot_id=EOT, asst_id=EOT)
    with (tmp_path / "train_tokens.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedStoreError, match="23 bytes are no whole number"):
        SFTExampleDataset(*files, T=4, device="cpu", eot_id=EOT, asst_id=ASST)
