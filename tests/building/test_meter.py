"""The share of a source that is done is right in every format, and never falls."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict

import pytest

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.sources import BatchLimits, open_source
from shardmill.tokenizers import ByteTokenizer
from tests.helpers import folder_digest

ROWS = [{"text": "word " * 20, "meta": "x" * 900} for _ in range(600)]
LIMITS = BatchLimits(num_documents=10)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_the_share_grows_to_the_whole_whatever_a_row_holds_beside_its_text(
    tmp_path, monkeypatch, workers, packed
):
    """Text is a tenth of this input, or far more than all of it."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 500 if packed else 30_000)
    for number in range(6):
        data = "".join(json.dumps(row) + "\n" for row in ROWS[number::6]).encode()
        name = f"{number}.jsonl{'.gz' if packed else ''}"
        (tmp_path / name).write_bytes(gzip.compress(data) if packed else data)
    suffix = "*.gz" if packed else "*.jsonl"
    seen = defaultdict(list)
    feeds = [
        Feed(source=open_source(f"{tmp_path}/{glob}{suffix}", limits=LIMITS), fill=(fill,))
        for glob, fill in (("[012]", ("train", None)), ("[345]", ("val", None)))
    ]
    build_store(
        feeds,
        tmp_path / "s",
        tokenizer=ByteTokenizer(),
        spec=BuildSpec(),
        workers=workers,
        unit_bytes=1,
        on_progress=lambda progress: seen[progress.feed].append(progress),
    )
    assert sorted(seen) == [0, 1]
    for reports in seen.values():
        shares = [progress.share for progress in reports]
        assert shares == sorted(shares)
        assert shares[0] < 0.4
        assert shares[-1] == 1.0
        assert reports[-1].documents == 300


def test_progress_changes_no_byte(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, tell in (("shown", lambda _: None), ("quiet", None)):
        feed = Feed(source=open_source(path), fill=(("train", None),))
        build_store(
            [feed],
            tmp_path / name,
            tokenizer=ByteTokenizer(),
            spec=BuildSpec(),
            workers=1,
            on_progress=tell,
        )
    assert folder_digest(tmp_path / "shown") == folder_digest(tmp_path / "quiet")
