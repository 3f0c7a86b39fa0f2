"""Disk and memory of a build: little more than the store, and no more for more input."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmill.building import BuildSpec, Feed, build_store, workplace
from shardmill.building.splits import HashSplit
from shardmill.protocols import Source
from shardmill.sources import BatchLimits, JsonlSource, MemorySource
from shardmill.tokenizers import ByteTokenizer
from tests.building import workplaces
from tests.building.simulated import Draws, simulated

pytestmark = pytest.mark.slow
KIB = 2**10
LIMITS = BatchLimits(num_bytes=16 * KIB)
HALVES = HashSplit(seed=1, fractions=(("val", 0.5),))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of 64 to 128 KiB."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 64 * KIB)


def texts(count: int) -> Iterator[str]:
    return (f"{number} " * 150 for number in range(count))


def write(path: Path, count: int) -> Path:
    with path.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts(count))
    return path


def build(source: Source, out: Path, *, hashed: bool = False, **how: Any) -> None:
    feed = Feed(source=source, fill=(("train", None),))
    if hashed:
        feed = Feed(source=source, fill=(("train", None), ("val", None)), by_hash=HALVES)
    spec = BuildSpec(shard_bytes=64 * KIB)
    build_store([feed], out, tokenizer=ByteTokenizer(), spec=spec, **how)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("hashed", [False, True])
def test_a_build_takes_little_more_disk_than_its_store(tmp_path, monkeypatch, workers, hashed):
    """At every receipt, and when all of it is there beside the receipts."""
    path, seen = write(tmp_path / "a.jsonl", 6_000), []  # 4.6 MB
    publish = workplace.publish_folder

    def look(*_arguments: object) -> None:
        seen.append(workplaces.size(tmp_path / "s"))

    def look_and_publish(*arguments: Any, **options: Any) -> None:
        look()
        publish(*arguments, **options)

    monkeypatch.setattr(workplace, "publish_folder", look_and_publish)
    source = JsonlSource(path, limits=LIMITS)
    build(source, tmp_path / "s", hashed=hashed, workers=workers, unit_bytes=1, on_progress=look)
    assert len(seen) > 12
    assert max(seen) < 1.1 * size_of(tmp_path / "s")


def peak_of(source: Source, out: Path, **how: Any) -> int:
    """Bytes of Python and numpy at the highest point; workers are threads of this process."""
    tracemalloc.start()
    try:
        with simulated(Draws(1)):
            build(source, out, **how)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        shutil.rmtree(out)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", ["files", "memory"])
def test_memory_does_not_grow_with_the_input(tmp_path, kind, workers):
    """Of a source that cannot be cut, which this process reads, as of files."""

    def peak(count: int) -> int:
        source: Source = MemorySource(lambda: texts(count), limits=LIMITS)
        if kind == "files":
            source = JsonlSource(write(tmp_path / "a.jsonl", count), limits=LIMITS)
        return peak_of(source, tmp_path / "s", hashed=True, workers=workers, unit_bytes=1)

    peak(100)  # what is imported and remembered once
    small, large = peak(1_500), peak(6_000)
    assert large < 1.3 * small + 200 * KIB
