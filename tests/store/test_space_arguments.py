"""Arguments that make no sense are refused with the numbers in the message."""

from __future__ import annotations

import re

import numpy as np
import pytest

from shardmill.errors import OptionError, StoreError
from shardmill.records import TokenFile
from shardmill.store.readers import TokenSpace, Windows
from tests.store.shards import ShardShape, write_shards

READERS = ("mapped", "pread")


@pytest.fixture(params=READERS)
def space(tmp_path, request):
    """1,000 uint16 tokens: 700 and 300."""
    shapes = [ShardShape(700, "uint16"), ShardShape(300, "uint16")]
    return TokenSpace(write_shards(tmp_path, shapes), reader=request.param)


@pytest.mark.parametrize(
    ("starts", "length", "message"),
    [
        ([0, 991], 10, "window 1 of 2: tokens 991..1,001 of 1,000"),
        ([-1], 1, "window 0 of 1: tokens -1..0 of 1,000"),
        ([5, -3, 2000], 4, "window 1 of 3: tokens -3..1 of 1,000"),
        ([0], 1001, "window 0 of 1: tokens 0..1,001 of 1,000"),
        (np.array([2**64 - 1], np.uint64), 1, "window 0 of 1: tokens 9,223,372,036,854,775,807.."),
        (np.array([-1], np.int8), 1, "window 0 of 1: tokens -1..0 of 1,000"),
    ],
)
def test_a_window_outside_is_an_index_error_with_the_numbers(space, starts, length, message):
    out = np.full((len(starts), length), -1, np.int64)
    for call in (
        lambda: space.gather(starts, length),
        lambda: space.gather(starts, length, out=out),
        lambda: space.prefetch(starts, length),
    ):
        with pytest.raises(IndexError, match=re.escape(message)):
            call()
    assert (out == -1).all()


def test_the_first_and_the_last_window_are_inside(space):
    assert space.gather([0, 990], 10).tolist() == [
        space.read(0, 10).tolist(),
        space.read(990, 1000).tolist(),
    ]
    assert space.gather([0], 1000).shape == (1, 1000)


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 4), (0, 1001), (1001, 1001)])
def test_reading_outside_is_an_index_error(space, start, stop):
    with pytest.raises(IndexError, match=re.escape(f"tokens {start:,}..{stop:,} of 1,000")):
        space.read(start, stop)


def test_an_empty_range_and_an_empty_batch_give_empty_arrays(space):
    assert space.read(1000, 1000).tolist() == []
    assert space.gather([], 7).shape == (0, 7)
    assert space.gather(np.empty(0, np.int32), 7).dtype == np.uint16


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.uint64, ">i4"])
def test_starts_may_be_of_any_integer_dtype(space, dtype):
    assert space.gather(np.array([3, 99], dtype), 2).tolist() == [
        space.read(3, 5).tolist(),
        space.read(99, 101).tolist(),
    ]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([1.0], "dtype float64, wanted integers"),
        ([True], "dtype bool, wanted integers"),
        ([[1, 2]], "shape (1, 2), wanted one dimension"),
        (3, "shape (), wanted one dimension"),
        ([2**70], "dtype object, wanted integers"),
    ],
)
def test_starts_that_are_no_row_of_integers_are_refused(space, starts, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        space.gather(starts, 1)


@pytest.mark.parametrize("length", [0, -1])
def test_a_window_has_at_least_one_token(space, length):
    with pytest.raises(OptionError, match=f"length={length}: wanted at least 1"):
        space.gather([0], length)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "float64", "float32", "bool"])
def test_an_out_that_could_lose_a_bit_of_an_id_is_refused(space, dtype):
    out = np.zeros((1, 4), dtype)
    with pytest.raises(OptionError, match=f"dtype {dtype}, which does not hold every uint16"):
        space.gather([0], 4, out=out)


def test_an_out_that_does_not_hold_uint32_is_refused(tmp_path):
    space = TokenSpace(write_shards(tmp_path, [ShardShape(10, "uint32")]))
    with pytest.raises(OptionError, match="dtype int32, which does not hold every uint32"):
        space.gather([0], 4, out=np.zeros((1, 4), np.int32))


def test_files_of_two_dtypes_are_no_space(tmp_path):
    shapes = [ShardShape(10, "uint16"), ShardShape(0, "uint32")]
    with pytest.raises(OptionError, match=r"mixed dtypes: .*00000.bin is uint16, but .* is uint32"):
        TokenSpace(write_shards(tmp_path, shapes))


@pytest.mark.parametrize("shape", [(1, 4), (2, 5), (8,), (2, 4, 1)])
def test_an_out_of_another_shape_is_refused(space, shape):
    with pytest.raises(OptionError, match=re.escape(f"shape {shape}, wanted (2, 4)")):
        space.gather([0, 1], 4, out=np.zeros(shape, np.int64))


def test_an_out_that_is_no_numpy_array_is_refused(space):
    with pytest.raises(OptionError, match="out is a list, wanted a numpy array"):
        space.gather([0], 2, out=[[0, 0]])


def test_an_out_that_may_not_be_written_is_refused(space):
    out = np.zeros((1, 4), np.int64)
    out.flags.writeable = False
    with pytest.raises(OptionError, match="read-only"):
        space.gather([0], 4, out=out)


@pytest.mark.parametrize("value", [1.5, 4.0, "4", None, True, np.float64(4)])
def test_a_number_that_is_not_whole_is_refused_by_name(space, value):
    for name, call in {
        "length": lambda: space.gather([0], value),
        "start": lambda: space.read(value, 5),
        "stop": lambda: space.read(0, value),
        "seq_len": lambda: Windows(space, seq_len=value),
        "max_maps": lambda: TokenSpace([], max_maps=value),
    }.items():
        with pytest.raises(OptionError, match=re.escape(f"{name}={value!r} (")):
            call()


def test_whole_numbers_of_numpy_are_whole_numbers(space):
    assert space.read(np.int64(1), np.uint8(3)).tolist() == space.read(1, 3).tolist()
    assert len(Windows(space, seq_len=np.int32(9))) == 111


def test_options_of_a_space_are_checked(tmp_path):
    files = write_shards(tmp_path, [ShardShape(3, "uint16")])
    for max_maps in (0, 16_385):
        with pytest.raises(OptionError, match=f"max_maps={max_maps:,}: wanted 1 to 16,384"):
            TokenSpace(files, max_maps=max_maps)
    with pytest.raises(OptionError, match="reader='fast': wanted 'auto', 'mapped', 'pread'"):
        TokenSpace(files, reader="fast")
    with pytest.raises(OptionError, match="dtype 'int16'"):
        TokenSpace([TokenFile(path=files[0].path, num_tokens=3, dtype="int16")])
    with pytest.raises(OptionError, match="-1 tokens"):
        TokenSpace([TokenFile(path=files[0].path, num_tokens=-1, dtype="uint16")])


def test_a_space_without_tokens_has_no_window(tmp_path):
    for files in ([], write_shards(tmp_path, [ShardShape(0, "uint32")] * 3)):
        space = TokenSpace(files)
        assert space.num_tokens == 0
        assert space.gather([], 5).shape == (0, 5)
        assert space.read(0, 0).tolist() == []
        with pytest.raises(IndexError, match=re.escape("tokens 0..1 of 0")):
            space.gather([0], 1)


def test_a_closed_space_says_so_and_may_be_closed_again(space):
    space.gather([0], 1)
    space.close()
    space.close()
    assert repr(space) == f"TokenSpace(1,000 uint16 tokens in 2 shards, {space.reader}, closed)"
    for call in (
        lambda: space.gather([0], 1),
        lambda: space.read(0, 1),
        lambda: space.prefetch([0], 1),
    ):
        with pytest.raises(StoreError, match="is closed; open the tokens again"):
            call()


def test_closing_before_the_first_read_is_closing_too(space):
    with space:
        pass
    with pytest.raises(StoreError, match="closed"):
        space.read(0, 1)
