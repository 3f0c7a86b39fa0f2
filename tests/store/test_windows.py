"""Windows lose no transition, and say what they leave out."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.records import TokenFile
from shardmill.store.readers import TokenSpace, Windows


def space_of(folder: Path, num_tokens: int, *, shard_tokens: int = 5) -> TokenSpace:
    """The tokens 0, 1, 2, ... in shards."""
    ids = np.arange(num_tokens, dtype="<u2")
    files = []
    for start in range(0, num_tokens, shard_tokens):
        part = ids[start : start + shard_tokens]
        path = folder / f"{start}.bin"
        part.tofile(path)
        files.append(TokenFile(path=path, num_tokens=len(part), dtype="uint16"))
    return TokenSpace(files)


def test_neighbouring_windows_share_one_token(tmp_path):
    windows = Windows(space_of(tmp_path, 14), seq_len=4)
    assert len(windows) == 3
    assert windows.gather([0, 1, 2]).tolist() == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9, 10, 11, 12],  # token 13 fills no window and is in none
    ]


@pytest.mark.parametrize(
    ("num_tokens", "num_windows"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (13, 3)]
)
def test_the_number_of_whole_windows(tmp_path, num_tokens, num_windows):
    assert len(Windows(space_of(tmp_path, num_tokens), seq_len=4)) == num_windows


@settings(deadline=None, max_examples=40)
@given(num_tokens=st.integers(0, 60), seq_len=st.integers(1, 12), shard_tokens=st.integers(1, 70))
def test_every_transition_is_in_exactly_one_window(num_tokens, seq_len, shard_tokens):
    with tempfile.TemporaryDirectory() as folder:
        space = space_of(Path(folder), num_tokens, shard_tokens=shard_tokens)
        windows = Windows(space, seq_len=seq_len)
        out = np.zeros((len(windows), seq_len + 1), np.int64)
        assert windows.gather(np.arange(len(windows)), out=out) is out
    pairs = Counter(zip(out[:, :-1].ravel().tolist(), out[:, 1:].ravel().tolist(), strict=True))
    reached = len(windows) * seq_len
    assert pairs == Counter((token, token + 1) for token in range(reached))
    assert num_tokens - 1 - reached < seq_len  # fewer transitions left over than a window has


def test_a_window_that_is_not_there_is_an_index_error(tmp_path):
    windows = Windows(space_of(tmp_path, 14), seq_len=4)
    for index in (3, -1, 2**61):  # 2**61 * 8 wraps round to 0 in 64 bits
        with pytest.raises(IndexError, match=f"window {index:,} of 3"):
            windows.gather([0, index])
        with pytest.raises(IndexError, match=f"window {index:,} of 3"):
            windows.prefetch([0, index])


def test_a_huge_index_does_not_wrap_round(tmp_path):
    windows = Windows(space_of(tmp_path, 14), seq_len=8)
    with pytest.raises(IndexError, match="of 1"):
        windows.gather([2**61])


def test_windows_read_ahead_and_close_with_their_space(tmp_path):
    windows = Windows(space_of(tmp_path, 14), seq_len=4)
    windows.prefetch([0, 2])
    assert repr(windows) == (
        "Windows(TokenSpace(14 uint16 tokens in 3 shards, mapped), seq_len=4, windows=3)"
    )
    windows.space.close()
    with pytest.raises(ValueError, match="closed"):
        windows.gather([0])


def test_seq_len_counts_inputs_and_is_at_least_one(tmp_path):
    space = space_of(tmp_path, 14)
    assert Windows(space, seq_len=1).gather([0]).shape == (1, 2)
    with pytest.raises(OptionError, match="seq_len=0"):
        Windows(space, seq_len=0)
