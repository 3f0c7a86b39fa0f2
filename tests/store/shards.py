"""Token files of many shapes, and what a token space must read from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from shardmill.records import IntArray, TokenFile
from shardmill.store.readers import TokenSpace


@dataclass(frozen=True, slots=True)
class ShardShape:
    """How large a shard is, and the dtype of its tokens."""

    num_tokens: int
    dtype: str  # "uint16" or "uint32"


def shard_shapes(*, max_shards: int = 7) -> st.SearchStrategy[list[ShardShape]]:
    """Shards of either dtype: empty, of one token, around whole pages, and of odd sizes."""
    near_pages = [0, 1, 2, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 8192]
    sizes = st.sampled_from(near_pages) | st.integers(0, 3000)

    def shards(sizes: st.SearchStrategy[int], dtype: str) -> st.SearchStrategy[list[ShardShape]]:
        return st.lists(st.builds(ShardShape, sizes, st.just(dtype)), max_size=max_shards)

    whole_pages = shards(st.sampled_from([2048, 4096]), "uint16")
    return shards(sizes, "uint16") | shards(sizes, "uint32") | whole_pages


def write_shards(folder: Path, shapes: Sequence[ShardShape], *, seed: int = 0) -> list[TokenFile]:
    """Random ids over the whole range of each dtype, one file for each shard."""
    rng = np.random.default_rng(seed)
    files = []
    for number, shape in enumerate(shapes):
        stop = np.iinfo(shape.dtype).max + 1
        path = folder / f"shard_{number:05d}.bin"
        ids = rng.integers(0, stop, shape.num_tokens).astype(shape.dtype)
        ids.astype(np.dtype(shape.dtype).newbyteorder("<")).tofile(path)
        files.append(TokenFile(path=path, num_tokens=shape.num_tokens, dtype=shape.dtype))
    return files


def read_shards(files: Sequence[TokenFile]) -> npt.NDArray[np.int64]:
    """All tokens of all files, joined, in memory."""
    arrays = [
        np.fromfile(file.path, np.dtype(file.dtype).newbyteorder("<")).astype(np.int64)
        for file in files
    ]
    return np.concatenate([np.empty(0, np.int64), *arrays])


def slice_windows(tokens: IntArray, starts: Sequence[int], length: int) -> npt.NDArray[np.int64]:
    """What `gather` must return."""
    rows = [np.asarray(tokens[start : start + length], np.int64) for start in starts]
    return np.array(rows, np.int64).reshape(len(starts), length)


def assert_gathers_exactly(
    space: TokenSpace, tokens: IntArray, starts: Sequence[int], length: int
) -> None:
    """`gather` equals slicing: with a new array, with int64 rows, and with rows of a wider array
    whose other columns do not change."""
    expected = slice_windows(tokens, starts, length)
    assert space.num_tokens == len(tokens)
    fresh = space.gather(starts, length)
    assert fresh.dtype == space.dtype
    np.testing.assert_array_equal(fresh, expected)
    out = np.full((len(starts), length), -1, np.int64)
    assert space.gather(np.array(starts, np.int64), length, out=out) is out
    np.testing.assert_array_equal(out, expected)
    wide = np.full((len(starts), 2 * length + 1), -7, np.int64)
    space.gather(starts, length, out=wide[:, 1::2])
    np.testing.assert_array_equal(wide[:, 1::2], expected)
    assert (wide[:, 0::2] == -7).all()


def assert_reads_exactly(space: TokenSpace, tokens: IntArray, start: int, stop: int) -> None:
    """`read` equals slicing, and returns a copy that may be changed."""
    copy = space.read(start, stop)
    np.testing.assert_array_equal(copy, tokens[start:stop])
    copy[:] = 0
    np.testing.assert_array_equal(space.read(start, stop), tokens[start:stop])
