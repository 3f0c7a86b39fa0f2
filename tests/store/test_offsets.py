"""Files whose tokens begin after a header read like files without one."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import DamagedStoreError, OptionError
from shardmill.records import TokenFile
from shardmill.store.readers import TokenSpace
from tests.store.shards import assert_gathers_exactly

READERS = ("mapped", "pread")
SIZES = st.sampled_from([1, 2, 1984, 2048, 2049, 4032, 4096]) | st.integers(1, 3000)
OFFSETS = st.sampled_from([0, 4, 64, 128, 4092, 4096, 4224, 8192])


def write(folder: Path, shapes: list[tuple[int, str, int]]) -> tuple[list[TokenFile], np.ndarray]:
    rng = np.random.default_rng(0)
    files, tokens = [], [np.empty(0, np.int64)]
    for number, (num_tokens, dtype, offset) in enumerate(shapes):
        ids = rng.integers(0, np.iinfo(dtype).max + 1, num_tokens).astype(dtype)
        path = folder / f"{number}.bin"
        path.write_bytes(b"\xee" * offset + ids.tobytes())
        files.append(TokenFile(path=path, num_tokens=num_tokens, dtype=dtype, offset=offset))
        tokens.append(ids.astype(np.int64))
    return files, np.concatenate(tokens)


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(
    shapes=st.sampled_from(["uint16", "uint32"]).flatmap(
        lambda dtype: st.lists(st.tuples(SIZES, st.just(dtype), OFFSETS), min_size=1, max_size=5)
    ),
    reader=st.sampled_from(READERS),
    max_maps=st.sampled_from([1, 2, 99]),
    data=st.data(),
)
def test_gather_skips_every_header(shapes, reader, max_maps, data):
    with tempfile.TemporaryDirectory() as folder:
        files, tokens = write(Path(folder), shapes)
        length = data.draw(st.integers(1, len(tokens)))
        starts = data.draw(st.lists(st.integers(0, len(tokens) - length), max_size=4))
        space = TokenSpace(files, max_maps=max_maps, reader=reader)
        space.prefetch(starts, length)
        assert_gathers_exactly(space, tokens, starts, length)
        assert_gathers_exactly(space, tokens, [0, len(tokens) - length], length)
        again = pickle.loads(pickle.dumps(space))
        assert_gathers_exactly(again, tokens, starts, length)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_whose_header_was_cut_off_is_refused(tmp_path, reader):
    files, _ = write(tmp_path, [(100, "uint16", 128)])
    space = TokenSpace(files, reader=reader)
    files[0].path.write_bytes(files[0].path.read_bytes()[128:])
    with pytest.raises(DamagedStoreError, match=r"found 200 bytes, wanted 328 .*header of 128"):
        space.gather([0], 10)
    with pytest.raises(DamagedStoreError, match="found 200 bytes, wanted 328"):
        TokenSpace(files)


def test_an_offset_that_splits_tokens_is_refused(tmp_path):
    for offset, dtype in [(1, "uint16"), (2, "uint32"), (-4, "uint32")]:
        file = TokenFile(path=tmp_path / "a", num_tokens=1, dtype=dtype, offset=offset)
        with pytest.raises(OptionError, match=f"byte {offset}"):
            TokenSpace([file])
