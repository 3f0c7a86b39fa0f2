"""What is retried, how long the pauses are, and what is raised at once."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.errors import HubError, SourceError, StoreError, StoreNotFoundError
from shardmill.remote.folder import open_folder, part_bytes
from shardmill.storage.retry import RetryPolicy, is_transient


class Answered(OSError):
    """An HTTP answer, as the clients report it."""

    def __init__(self, status: int) -> None:
        super().__init__(errno.EIO, f"status {status}")
        self.status = status


class S3Answered(Exception):
    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(code)
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


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
        (Answered(503), True),
        (Answered(429), True),
        (Answered(404), False),
        (S3Answered(400), False),
        (S3Answered(400, "RequestTimeout"), True),
        # a client may report a lost connection as a missing file, and any refusal as EIO
        (caused(FileNotFoundError("x"), ConnectionError()), True),
        (caused(OSError(errno.EIO, "x"), S3Answered(400)), False),
        (ValueError("x"), False),
    ],
)
def test_only_what_may_succeed_later_is_transient(error: Exception, wanted: bool) -> None:
    assert is_transient(error) is wanted


def test_a_permanent_error_is_raised_at_once_as_one_of_ours() -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise FileNotFoundError("bucket")

    with pytest.raises(StoreNotFoundError, match="s3://x: FileNotFoundError: bucket; check"):
        RetryPolicy().call(fail, "s3://x", raises=StoreError)
    with pytest.raises(SourceError, match="s3://x: FileNotFoundError: bucket; check"):
        RetryPolicy().call(fail, "s3://x")
    assert len(calls) == 2


@pytest.mark.parametrize(("raises", "wanted"), [(SourceError, HubError), (StoreError, StoreError)])
def test_retries_are_bounded_and_end_in_an_error_that_says_so(
    raises: type[SourceError] | type[StoreError],
    wanted: type[Exception],
) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise ConnectionError("lost")

    with pytest.raises(wanted, match=r"s3://x: unreachable after 6 tries .*lost"):
        RetryPolicy().call(fail, "s3://x", raises=raises)
    assert len(calls) == 6


def test_an_action_that_succeeds_at_the_third_try_succeeds() -> None:
    calls: list[int] = []

    def third() -> str:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError("lost")
        return "done"

    assert RetryPolicy(delay=0.001).call(third, "s3://x") == "done"
    assert len(calls) == 3


def test_a_mistake_in_our_code_is_neither_retried_nor_renamed() -> None:
    with pytest.raises(TypeError):
        RetryPolicy().call(lambda: len(1), "s3://x")  # type: ignore[arg-type]


@given(failures=st.integers(1, 60))
def test_pauses_grow_are_jittered_and_bounded(failures: int) -> None:
    middle = min(0.1 * 2 ** (failures - 1), 60.0)
    assert 0.5 * middle <= RetryPolicy(delay=0.1).backoff_seconds(failures) <= 1.5 * middle


@given(size=st.integers(0, 5 * 2**40))
def test_parts_are_within_what_s3_allows(size: int) -> None:
    part = part_bytes(size)
    assert 5 * 2**20 <= part <= 5 * 2**30
    assert -(-size // part) <= 10_000


def test_a_url_without_a_folder_is_refused() -> None:
    for url in ("file:///", "memory://", "s3://"):
        with pytest.raises(ValueError, match="names no folder"):
            open_folder(url)


@pytest.mark.parametrize("url", ["file://", "file://rel/x", "local://"])
def test_a_url_of_this_machine_has_an_absolute_path(url: str) -> None:
    with pytest.raises(ValueError, match=r"not absolute.*wanted file:///folder/name"):
        open_folder(url)
