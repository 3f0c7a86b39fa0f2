"""The kernel is asked ahead when data are not in memory, and left alone when they are."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.loading import loader as ask
from shardmill.loading.order import HORIZON
from shardmill.records import Ragged
from shardmill.testing.stores import build_small_store
from tests.loading.stores import open_stream


class Noted(TokenSource):
    """A source that notes which windows were asked for and which were read."""

    def prefetch(self, items) -> None:
        self.notes = [*getattr(self, "notes", []), ("asked", items.tolist())]
        super().prefetch(items)

    def fill_unchecked(self, items, input_ids, labels, rows=None) -> None:
        self.notes = [*getattr(self, "notes", []), ("read", items.tolist())]
        super().fill_unchecked(items, input_ids, labels, rows)

    def asked(self) -> list[int]:
        return [item for what, items in self.notes if what == "asked" for item in items]


def write_large(folder: Path) -> np.ndarray:
    """A store of 8 MiB of tokens, which are on disk and no more in memory."""
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("cannot drop files from memory here")
    tokens = np.random.default_rng(0).integers(0, 2**16, 2**22)
    build_small_store(folder, {"train": Ragged.from_lengths(tokens, [2**22])}, shard_bytes=2**20)
    for path in folder.rglob("*.bin"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return tokens


@pytest.mark.parametrize("ahead", [0, 2])
def test_ask_ahead_asks_for_every_window_once_and_before_it_is_read(stores, ahead):
    source = Noted(stores["web"].folder, seq_len=8)
    loader = Loader(SampleStream([source]), batch_size=4, ask_ahead=True, ahead=ahead)
    read = [item for batch in islice(loader, 30) for item in batch.item.tolist()]
    loader.close()
    asked = source.asked()
    assert asked[: len(read) - 4] == read[4:]  # all but those of the first step
    seen: set[int] = set()
    for number, (what, items) in enumerate(source.notes):
        if what == "asked":
            seen |= set(items)
        elif number > HORIZON:
            assert set(items) <= seen
    assert len(asked) <= len(read) + 4 * (HORIZON + ahead)


def test_it_does_not_ask_after_the_last_step(stores):
    source = Noted(stores["web"].folder, seq_len=8)
    loader = Loader(SampleStream([source]), batch_size=4, num_samples=20, ask_ahead=True)
    read = [item for batch in loader for item in batch.item.tolist()]
    assert len(read) == 20
    assert source.asked() == read[4:]


def test_every_source_of_a_mixture_is_asked_for_its_own(stores):
    sources = [Noted(stores[name].folder, seq_len=8) for name in ("wiki", "web")]
    loader = Loader(SampleStream(sources, weights=[1, 2]), batch_size=6, ask_ahead=True, ahead=0)
    batches = list(islice(loader, 10))
    for number, source in enumerate(sources):
        read = [item for b in batches[1:] for item in b.item[b.source == number].tolist()]
        assert source.asked()[: len(read)] == read
    assert len(sources[0].asked()) > 10


def test_without_ask_ahead_it_never_asks(tmp_path):
    write_large(tmp_path / "large")
    source = Noted(tmp_path / "large", seq_len=1024)
    list(islice(Loader(SampleStream([source]), batch_size=8, ask_ahead=False), 50))
    assert source.asked() == []


@pytest.mark.parametrize("reader", ["mapped", "pread"])
def test_data_in_memory_are_not_asked_for(stores, reader):
    source = Noted(stores["web"].folder, seq_len=8, reader=reader)
    stream = SampleStream([source])
    list(islice(Loader(stream, batch_size=8), 20))  # now they are in memory
    source.notes = []
    list(islice(Loader(stream, batch_size=8), 200))
    assert source.asked() == []


@pytest.mark.parametrize("reader", ["mapped", "pread"])
def test_data_on_disk_are_asked_for_as_soon_as_a_batch_waited(tmp_path, reader):
    tokens = write_large(tmp_path / "large")
    source = Noted(tmp_path / "large", seq_len=1024, reader=reader)
    count = ask.disk_waits if reader == "mapped" else ask.disk_reads
    before = count()
    loader = Loader(SampleStream([source]), batch_size=8, ahead=0)
    batches = list(islice(loader, 100))
    if count() == before:
        pytest.skip("this file system keeps files in memory")
    assert len(source.asked()) >= 8 * 8
    for batch in batches:
        for row, item in enumerate(batch.item.tolist()):
            assert np.array_equal(batch.input_ids[row], tokens[item * 1024 : (item + 1) * 1024])


def test_asking_stops_when_nothing_waits_and_lasts_longer_when_it_does(stores, monkeypatch):
    """The counter of the kernel is played: only that way it waits when the test wants."""
    waits = [0]
    monkeypatch.setattr(ask, "disk_waits", lambda: waits[0])

    class Waiting(Noted):
        wait = True

        def fill_unchecked(self, items, input_ids, labels, rows=None) -> None:
            waits[0] += self.wait
            super().fill_unchecked(items, input_ids, labels, rows)

    source = Waiting(stores["web"].folder, seq_len=8)
    batches = iter(Loader(SampleStream([source]), batch_size=1, ahead=0))
    for _ in range(105):  # looked at are the steps 0, 36 (32 steps on) and 104 (64 steps on)
        next(batches)
    assert len(source.asked()) == 104 + HORIZON
    source.wait = False
    for _ in range(300):  # the third spell ends with step 232, and nothing waits any more
        next(batches)
    assert len(source.asked()) == 232 + HORIZON


def test_a_stream_is_read_the_same_with_and_without_asking(stores):
    stream = open_stream(stores, ["wiki", "web"], seq_len=8)
    rows = [
        [batch.input_ids.tolist() for batch in islice(Loader(stream, batch_size=3, **how), 30)]
        for how in ({"ask_ahead": True}, {"ask_ahead": False}, {})
    ]
    assert rows[0] == rows[1] == rows[2]
