"""Real text: it comes back exactly, and engines agree on it. Needs SHARDMILL_REAL_DATA."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from shardmill.protocols import Tokenizer
from shardmill.tokenizers.engines import compare, fast_candidates

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("SHARDMILL_REAL_DATA" not in os.environ, reason="SHARDMILL_REAL_DATA"),
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """A few megabytes: web pages, chats, notes, books (one Spanish), an encyclopedia."""
    data = Path(os.environ["SHARDMILL_REAL_DATA"])
    pages = pq.read_table(data / "fineweb" / "fineweb_sample_2800.parquet", columns=["text"])
    found: list[str] = pages["text"].to_pylist()[:80]
    dolly = (data / "dolly" / "databricks-dolly-15k.jsonl").read_text().splitlines()[:400]
    found += [value for line in dolly for value in json.loads(line).values()]
    found += [path.read_text() for path in sorted((data / "notes").rglob("*.md"))]
    found += [path.read_bytes().decode()[:40_000] for path in (data / "gutenberg").glob("*.txt")]
    found.append((data / "wikitext" / "wiki.test.raw").read_text()[:150_000])
    return found


@pytest.mark.parametrize("kind", ["byte", "unigram", "bpe", "byte-bpe"])
def test_real_text_round_trips_exactly(
    tokenizers: dict[str, Tokenizer], texts: list[str], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode_batch(texts)
    assert len(ids) > 1_900
    for text, one in zip(texts, ids, strict=True):
        assert tokenizer.decode(one) == text or "\u2581" in text


@pytest.mark.parametrize("kind", ["bpe", "byte-bpe"])
def test_fast_engines_agree_on_real_text(
    tokenizers: dict[str, Tokenizer], texts: list[str], kind: str
) -> None:
    engines = fast_candidates(tokenizers[kind]).engines
    assert engines
    for engine in engines:
        assert compare(tokenizers[kind], engine, texts) is None, engine.name
