"""Arrays are given out again only when nothing refers to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.loading import loader as buffers
from shardmill.loading.loader import Buffers

WAYS = {
    "itself": lambda array: array,
    "first half": lambda array: array[0],
    "row": lambda array: array[1][2],
    "slice of a slice": lambda array: array[:, 1:][:, ::2],
    "other dtype": lambda array: array.view(np.uint8),
    "flat": lambda array: array.reshape(-1),
    "memoryview": memoryview,
    "asarray of a memoryview": lambda array: np.asarray(memoryview(array)),
    "frombuffer": lambda array: np.frombuffer(array, np.int64),
    "iterator": lambda array: array.flat,
    "in a list": lambda array: [[array]],
    "in a closure": lambda array: lambda: array,
}


@pytest.mark.parametrize("way", WAYS)
def test_an_array_held_in_any_way_is_not_given_out_again(way):
    pool = Buffers((2, 3, 4), most=2)
    array = pool.take()
    address = array.ctypes.data
    held = WAYS[way](array)
    del array
    assert address not in {pool.take().ctypes.data for _ in range(20)}
    del held
    assert address in {pool.take().ctypes.data for _ in range(20)}


@given(st.lists(st.tuples(st.sampled_from(sorted(WAYS)), st.integers(0, 5)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_arrays_that_are_held_for_some_time_keep_their_numbers(holds):
    pool = Buffers((2, 3, 4), most=3)
    held: list[tuple[object, int, int]] = []
    for number, (way, life) in enumerate(holds):
        array = pool.take()
        array[...] = number
        held.append((WAYS[way](array), number, number + life))
        del array
        held = [entry for entry in held if entry[2] > number]
        for part, value, _ in held:
            assert set(np.unique(numbers_in(part)).tolist()) == {value}


def numbers_in(part: object) -> np.ndarray:
    if isinstance(part, list):
        return part[0][0]
    if callable(part):
        return part()
    array = np.asarray(part)
    return array.reshape(-1).view(np.int64) if array.dtype == np.uint8 else array


def test_an_array_that_is_let_go_is_used_again():
    pool = Buffers((2, 3, 4), most=4)
    assert len({pool.take().ctypes.data for _ in range(50)}) == 1
    one = pool.take()
    assert pool.take() is not one


def test_keeping_everything_keeps_no_more_than_that():
    pool = Buffers((2, 3, 4), most=3)
    kept = [pool.take() for _ in range(10)]
    assert len({array.ctypes.data for array in kept}) == 10
    assert len(pool._arrays) == 3


def test_where_references_are_not_counted_every_array_is_new(monkeypatch):
    monkeypatch.setattr(buffers.sys, "_is_gil_enabled", lambda: False, raising=False)
    pool = Buffers((2, 3, 4), most=4)
    first = pool.take()
    address = first.ctypes.data
    assert pool._arrays == []
    assert pool.take().ctypes.data != address


def test_tensors_that_share_the_memory_hold_it():
    torch = pytest.importorskip("torch")
    pool = Buffers((2, 3, 4), most=2)
    array = pool.take()
    array[...] = 7
    tensor = torch.from_numpy(array[0])[1:, ::2]
    del array
    for number in range(10):
        pool.take()[...] = number
    assert tensor.unique().tolist() == [7]
