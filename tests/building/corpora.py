"""Small corpora with everything in them that a build can meet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.building import Feed
from shardmill.sources import BatchLimits, ConcatSource, JsonlSource, ParquetSource, TextSource

SMALL = BatchLimits(num_bytes=2_000, num_documents=23)


def write_corpus(folder: Path, *, seed: int = 0, num_files: int = 4) -> Path:
    """jsonl (bad rows, nulls, empties, blank lines, CRLF), parquet of odd row groups, texts."""
    draw = np.random.default_rng(seed)
    for name in ("pages", "tables", "notes"):
        (folder / name).mkdir(parents=True)
    for number in range(num_files):
        size = int(draw.integers(20, 200))
        data = b"".join(_line(draw, number, row) for row in range(size))
        (folder / f"pages/{number}.jsonl").write_bytes(data)
        texts = [None if row % 17 == 3 else _text(draw, row) for row in range(size)]
        table = pa.table({"text": pa.array(texts, pa.string())})
        groups = int(draw.integers(1, 40))
        pq.write_table(table, folder / f"tables/{number}.parquet", row_group_size=groups)
        (folder / f"notes/{number}.txt").write_text("\n".join(map(str, texts)) + "\n\n")
    (folder / "pages/empty.jsonl").write_bytes(b"\n\n")
    return folder


def _text(draw: np.random.Generator, row: int) -> str:
    words = int(draw.integers(0, 40))
    return f"{row} " * min(words, 1) + "caf\u00e9 word " * words


def _line(draw: np.random.Generator, number: int, row: int) -> bytes:
    kind = int(draw.integers(0, 12))
    end = b"\r\n" if number % 2 else b"\n"
    if kind == 0:
        return end
    is_lost = row % 4 == 0  # few enough to be within what a build may lose
    if kind == 1 and is_lost:
        return b"{broken" + end
    if kind == 2 and is_lost:
        return json.dumps({"text": None}).encode() + end
    text = "" if kind == 3 else f"{number}-{row} " + _text(draw, row)
    return json.dumps({"text": text}).encode() + end


def feeds_of(folder: Path, *, limits: tuple[int, int] | None = None) -> list[Feed]:
    """Three feeds: lines, then columns and whole texts together, then lines of texts."""
    pages = JsonlSource(folder / "pages", on_bad="skip", limits=SMALL)
    mixed = ConcatSource(
        [
            ParquetSource(folder / "tables", limits=SMALL),
            TextSource(folder / "notes", limits=SMALL),
        ],
        name="mixed",
    )
    lines = TextSource(folder / "notes", split="line", name="lines", limits=SMALL)
    fill: tuple[tuple[str, int | None], ...] = (("val", 3_000), ("train", None))
    if limits is not None:
        fill = (("val", limits[0]), ("train", limits[1]))
    return [
        Feed(source=pages, fill=fill),
        Feed(source=mixed, fill=(("train", None if limits is None else limits[1]),)),
        Feed(source=lines, fill=(("train", None),)),
    ]
