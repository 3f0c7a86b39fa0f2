"""A file read by ranges is the file, whatever is asked of it and in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.storage.ranges import DEPTH, Range, RangedFile, blocks_of

DATA = bytes(number * 7 % 251 for number in range(500))


def once(ask: Callable[[], bytes]) -> bytes:
    """No retry."""
    return ask()


def ranges(size: int) -> st.SearchStrategy[list[Range]]:
    """Ascending, without overlap, some of them empty."""
    edges = st.lists(st.integers(0, size), max_size=16).map(sorted)
    return edges.map(lambda found: list(zip(found[::2], found[1::2], strict=False)))


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(wanted=ranges(500), block=st.integers(1, 90), gap=st.integers(0, 60))
def test_blocks_cover_what_is_wanted_and_little_more(
    wanted: list[Range], block: int, gap: int
) -> None:
    blocks = blocks_of(wanted, block=block, gap=gap)
    covered = [byte for start, stop in blocks for byte in range(start, stop)]
    asked = {byte for start, stop in wanted for byte in range(start, stop)}

    assert covered == sorted(set(covered))
    assert asked <= set(covered)
    assert all(0 < stop - start <= block for start, stop in blocks)
    if gap == 0:
        assert set(covered) == asked
    assert not covered or covered[0] == min(asked)


def test_neighbours_share_a_request_and_long_ranges_are_cut() -> None:
    assert blocks_of([(10, 20), (25, 30), (60, 70)], block=30, gap=5) == [(10, 30), (60, 70)]
    assert blocks_of([(10, 20), (26, 30)], block=30, gap=5) == [(10, 20), (26, 30)]
    assert blocks_of([(0, 25)], block=10, gap=5) == [(0, 10), (10, 20), (20, 25)]
    assert blocks_of([(0, 8), (9, 14)], block=10, gap=5) == [(0, 8), (9, 14)]


@settings(deadline=None, max_examples=60)
@given(
    planned=ranges(500),
    block=st.integers(1, 90),
    reads=st.lists(st.tuples(st.integers(0, 520), st.integers(-1, 200)), max_size=12),
)
def test_any_read_gives_the_bytes_of_the_file(
    planned: list[Range], block: int, reads: list[tuple[int, int]]
) -> None:
    blocks = blocks_of(planned, block=block, gap=3)
    with RangedFile(lambda start, stop: DATA[start:stop], 500, blocks, retry=once) as file:
        for place, size in reads:
            assert file.seek(place) == place
            wanted = DATA[place:] if size < 0 else DATA[place : place + size]
            assert bytes(file.read(size)) == wanted
            assert file.tell() == place + len(wanted)


def test_reading_on_fetches_each_block_once_and_few_ahead() -> None:
    fetched: list[Range] = []
    ahead: list[int] = []
    lock = threading.Lock()

    def fetch(start: int, stop: int) -> bytes:
        with lock:
            fetched.append((start, stop))
        return DATA[start:stop]

    blocks = blocks_of([(100, 500)], block=20, gap=0)
    with RangedFile(fetch, 500, blocks, retry=once) as file:
        file.seek(100)
        found = b""
        while part := bytes(file.read(7)):
            found += part
            with lock:
                ahead.append(max(stop for _, stop in fetched) - file.tell())

    assert found == DATA[100:]
    assert sorted(fetched) == blocks
    assert len(blocks) == 20
    assert max(ahead) <= DEPTH * 20


def test_blocks_are_fetched_concurrently() -> None:
    together = threading.Barrier(DEPTH, timeout=600)  # broken unless this many run at once

    def fetch(start: int, stop: int) -> bytes:
        together.wait()
        return DATA[start:stop]

    with RangedFile(fetch, DEPTH * 10, blocks_of([(0, DEPTH * 10)], block=10), retry=once) as file:
        assert bytes(file.read()) == DATA[: DEPTH * 10]


def test_an_error_comes_out_of_the_read_that_needed_the_bytes() -> None:
    def fetch(start: int, stop: int) -> bytes:
        if start >= 20:
            raise ConnectionResetError(f"at {start}")
        return DATA[start:stop]

    with RangedFile(fetch, 500, blocks_of([(0, 100)], block=10), retry=once) as file:
        assert bytes(file.read(20)) == DATA[:20]
        with pytest.raises(ConnectionResetError, match="at 20"):
            file.read(1)


def test_closing_does_not_wait_for_requests_under_way() -> None:
    release, ended = threading.Event(), threading.Event()

    def fetch(start: int, stop: int) -> bytes:
        if start > 0:
            release.wait(600)
            ended.set()
        return DATA[start:stop]

    file = RangedFile(fetch, 500, blocks_of([(0, 100)], block=10), retry=once)
    file.read(5)
    file.close()
    assert not ended.is_set()
    release.set()

    with pytest.raises(ValueError, match="closed"):
        file.read(1)
