"""What a build says it will take is near what it then takes, in every format."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from shardmill.building import BuildSpec, Feed, build_store, plan_store
from shardmill.building.plan import cut_source
from shardmill.building.resources import is_surely_enough
from shardmill.errors import SourceError
from shardmill.sources import BatchLimits, ConcatSource, TextSource, open_source
from shardmill.tokenizers import ByteTokenizer

WORDS = np.array(["the", "of", "mill", "water", "turning", "stone", "and", "corn", "1874", "it"])
LIMITS = BatchLimits(num_bytes=20_000)


def texts(seed: int, number: int = 800) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, int(draw.integers(5, 200)))) for _ in range(number)]


def lines(seed: int) -> bytes:
    rows = ({"text": text, "url": f"https://example.org/{seed}"} for text in texts(seed))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(folder: Path, kind: str) -> Path:
    folder.mkdir()
    for seed in range(3):
        place = folder / f"{seed}.{kind}"
        if kind == "parquet":
            table = pa.table({"text": texts(seed), "number": range(800)})
            pq.write_table(table, place, compression="zstd", row_group_size=300)
        elif kind == "txt":
            place.write_text("\n\n".join(texts(seed)))
        elif kind == "jsonl":
            place.write_bytes(lines(seed))
        elif kind == "jsonl.gz":
            place.write_bytes(gzip.compress(lines(seed)))
        else:
            place.write_bytes(zstandard.ZstdCompressor(level=9).compress(lines(seed)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "chunk_bytes"),
    [
        *((kind, 400_000) for kind in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt")),
        ("jsonl.zst", 10**9),  # zstd has blocks of 128 KiB
        ("parquet", 10**9),
    ],
)
def test_an_estimate_is_near_what_the_build_takes(tmp_path, monkeypatch, kind, chunk_bytes):
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", chunk_bytes)
    source = open_source(write(tmp_path / "in", kind), limits=LIMITS)
    feeds = [Feed(source=source, fill=(("train", None),))]
    how = {"tokenizer": ByteTokenizer(), "spec": BuildSpec(dtype="uint16")}
    plan = plan_store(feeds, tmp_path / "s", **how)
    build_store(feeds, tmp_path / "s", workers=1, **how)
    stored = sum(path.stat().st_size for path in (tmp_path / "s/train").iterdir())
    (feed,) = plan.feeds
    assert feed.disk_bytes is not None
    assert 1 / 1.5 < feed.disk_bytes / stored < 1.5


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst"])
def test_only_the_beginning_of_a_packed_file_is_read_for_an_estimate(tmp_path, monkeypatch, kind):
    """The end of this one is broken, which its reader would notice."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 30_000)
    folder = write(tmp_path / "in", kind)
    path = folder / f"0.{kind}"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    source = open_source(folder, limits=LIMITS)
    plan = plan_store(
        [Feed(source=source, fill=(("train", None),))],
        tmp_path / "s",
        tokenizer=ByteTokenizer(),
        spec=BuildSpec(),
    )
    assert plan.disk_bytes is not None
    with pytest.raises(SourceError, match="truncated"):
        list(source.batches())


def test_packed_input_is_never_surely_small_enough(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    plain.write_text("words")
    packed.write_bytes(gzip.compress(b"words\n"))
    sources = [TextSource(plain), TextSource(packed, split="line")]
    feeds = [cut_source(source, (("train", None),)) for source in (*sources, ConcatSource(sources))]
    assert [is_surely_enough(tmp_path, [feed]) for feed in feeds] == [True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt"])
def test_the_bytes_before_a_cursor_grow_to_the_size_of_the_source(tmp_path, kind):
    source = open_source(write(tmp_path / "in", kind), limits=LIMITS)
    found = [source.bytes_before(batch.cursor) for batch in source.batches()]
    # For compressed files it grows in steps, and only approximately.
    slack = 1.0 if kind in ("jsonl", "parquet", "txt") else 0.9
    assert all(later >= slack * earlier for earlier, later in pairwise(found))
    assert found[0] < source.size_hint() / 2
    assert found[-1] == source.size_hint()
