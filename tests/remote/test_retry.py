"""What is tried again, how long it takes, and what is not."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.errors import StoreError, StoreNotFoundError
from shardmill.storage.object_store import open_place, part_bytes
from shardmill.storage.retry import attempt, backoff_seconds, is_transient


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(errno.EIO, "x"), True),
        (OSError(errno.EBUSY, "x"), True),
        (FileNotFoundError(errno.ENOENT, "x"), False),
        (PermissionError(errno.EACCES, "x"), False),
        (OSError(errno.EINVAL, "x"), False),
    ],
)
def test_only_what_may_go_well_later_is_transient(error: OSError, wanted: bool) -> None:
    assert is_transient(error) is wanted


def test_a_permanent_error_is_tried_once_and_told_in_our_words() -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise FileNotFoundError("bucket")

    with pytest.raises(StoreNotFoundError, match="place: not there: bucket"):
        attempt("place", fail)
    assert calls == [1]


def test_what_goes_well_at_the_third_try_goes_well() -> None:
    calls: list[int] = []

    def third() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("lost")
        return "done"

    assert attempt("place", third) == "done"
    assert len(calls) == 3


@given(number=st.integers(1, 60))
def test_pauses_grow_are_jittered_and_bounded(number: int) -> None:
    middle = min(0.2 * 2 ** (number - 1), 20.0)
    assert 0.5 * middle <= backoff_seconds(number) <= 1.5 * middle


@given(size=st.integers(0, 5 * 2**40))
def test_parts_are_within_what_s3_allows(size: int) -> None:
    part = part_bytes(size)
    assert 5 * 2**20 <= part <= 5 * 2**30
    assert -(-size // part) <= 10_000


def test_a_url_without_a_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="names no folder"):
        open_place("file:///")
    assert issubclass(StoreNotFoundError, StoreError)
