"""What cannot fit into memory is refused before it is tried, with the numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest

from shardmill import machine
from shardmill.errors import OptionError
from shardmill.loading import Loader, plan_step
from shardmill.loading.streaming.stream import BatchShape, TextStream
from shardmill.machine import available_memory
from shardmill.records import TokenFile
from shardmill.store.readers import TokenSpace, Windows
from tests.loading.stores import open_stream
from tests.loading.streaming.pipelines import Case


def test_a_batch_larger_than_memory_is_refused_with_what_it_takes_and_what_there_is(stores):
    stream = open_stream(stores, ["wiki"], seq_len=8)
    with pytest.raises(OptionError) as caught:
        Loader(stream, batch_size=10**9)
    message = str(caught.value)
    assert "batch_size=1,000,000,000: a batch of 1,000,000,000 x 8 tokens takes 128.0 GB" in message
    assert re.search(r"3 are held at a time .*: 384.0 GB; found [0-9.]+ GB of memory", message)
    assert "lower batch_size, ahead or seq_len" in message


@pytest.mark.parametrize(
    ("batch_size", "options", "fits"),
    [
        (1000, {"ahead": 0}, True),  # 128,000 bytes, twice: one given, one made
        (10_000, {"ahead": 0}, False),
        (3000, {"ahead": 0}, True),
        (3000, {"ahead": 4}, False),
        (3000, {"ahead": 0, "documents": True}, False),
    ],
)
def test_buffers_and_documents_count(stores, monkeypatch, batch_size, options, fits):
    monkeypatch.setattr(machine, "available_memory", lambda: 10**6)
    stream = open_stream(stores, ["wiki"], seq_len=8)
    if fits:
        Loader(stream, batch_size=batch_size, **options)
        return
    with pytest.raises(OptionError, match=r"0\.001 GB of memory"):
        Loader(stream, batch_size=batch_size, **options)


def test_a_machine_that_does_not_say_refuses_nothing(stores, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    Loader(open_stream(stores, ["wiki"], seq_len=8), batch_size=10**9)


def test_a_planned_step_of_absurd_size_is_refused(stores):
    with pytest.raises(OptionError, match=r"batch_size=10,000,000,000: .* rows: .* found .* mem"):
        plan_step(open_stream(stores, ["wiki"], seq_len=8), samples=0, batch_size=10**10)


def test_a_gather_larger_than_memory_is_refused(tmp_path):
    path = tmp_path / "sparse.bin"
    with path.open("wb") as file:
        file.truncate(2**34)
    space = TokenSpace([TokenFile(path=path, num_tokens=2**33, dtype="uint16")])
    with pytest.raises(OptionError, match=r"100 windows of 8,000,000,001 tokens: 1,600.0 GB"):
        Windows(space, seq_len=8 * 10**9).gather(np.zeros(100, np.int64))
    with pytest.raises(OptionError, match=r"1,000 windows of 1,000,000,000 tokens: 2,000.0 GB"):
        space.gather(np.zeros(1000, np.int64), 10**9)


def test_a_text_stream_with_a_batch_larger_than_memory_is_refused():
    shape = BatchShape(batch_size=10**6, grad_accum=1000, seq_len=1024)
    pipeline = Case(units=((3, 4),), shape=shape).pipeline()
    with pytest.raises(OptionError, match=r"\[1,000, 1,000,000, 1,024\]: 16,400.0 GB; found"):
        TextStream(pipeline)


MEMINFO = "MemTotal: 8000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n"


def write(root, **files: str):
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_available_memory_is_what_the_system_and_every_control_group_leave(tmp_path):
    assert available_memory(tmp_path) is None
    write(tmp_path, proc__meminfo=MEMINFO)
    assert available_memory(tmp_path) == 4000 * 1024
    write(tmp_path, proc__self__cgroup="0::/job/step\n")
    assert available_memory(tmp_path) == 4000 * 1024  # groups without a limit
    group = "sys__fs__cgroup__job"
    write(tmp_path, **{f"{group}__step__memory_DOT_max": "max\n"})
    assert available_memory(tmp_path) == 4000 * 1024
    write(tmp_path, **{f"{group}__memory_DOT_max": "3000000\n"})
    write(tmp_path, **{f"{group}__memory_DOT_stat": "file 999\nanon 1000000\n"})
    assert available_memory(tmp_path) == 2_000_000  # the page cache makes room when asked


def test_available_memory_knows_the_older_control_groups(tmp_path):
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="4:memory:/box\n1:cpu:/\n0::/\n")
    write(tmp_path, sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="9223372036854771712\n")
    assert available_memory(tmp_path) == 4000 * 1024
    write(tmp_path, sys__fs__cgroup__memory__box__memory_DOT_limit_in_bytes="500000\n")
    write(tmp_path, sys__fs__cgroup__memory__box__memory_DOT_stat="cache 1\ntotal_rss 100000\n")
    assert available_memory(tmp_path) == 400_000
    # inside a container the group of the process is the root of what is mounted
    write(tmp_path, proc__self__cgroup="4:memory:/docker/abc\n")
    write(tmp_path, sys__fs__cgroup__memory__memory_DOT_limit_in_bytes="300000\n")
    assert available_memory(tmp_path) == 300_000
