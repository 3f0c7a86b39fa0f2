"""The real sets named by SHARDMILL_REAL_DATA: the counts its README gives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardmill.protocols import CuttableSource
from shardmill.sources import (
    BatchLimits,
    JsonlSource,
    ParquetSource,
    TextSource,
    iter_jsonl_rows,
    open_source,
)
from shardmill.testing.sources import (
    assert_cut_is_the_source,
    assert_ledger_balances,
    assert_resumes_exactly,
)

ROOT = Path(os.environ.get("SHARDMILL_REAL_DATA", "."))
pytestmark = pytest.mark.skipif(
    "SHARDMILL_REAL_DATA" not in os.environ, reason="SHARDMILL_REAL_DATA is not set"
)


def test_dolly_has_15011_records() -> None:
    source = JsonlSource(ROOT / "dolly", field="response")
    found = assert_ledger_balances(source)
    assert found.num_read == 15_011
    assert len(found.texts) + found.counts["empty"] == 15_011
    assert found.drops == []
    rows = list(iter_jsonl_rows(ROOT / "dolly"))
    assert len(rows) == 15_011
    assert {tuple(sorted(row)) for row in rows} == {
        ("category", "context", "instruction", "response")
    }


def test_oasst_has_2022_messages_of_188_trees() -> None:
    rows = list(iter_jsonl_rows(ROOT / "oasst"))
    assert len(rows) == 2_022
    assert sum(row["parent_id"] is None for row in rows) == 188
    assert len(assert_ledger_balances(JsonlSource(ROOT / "oasst")).texts) == 2_022


@pytest.mark.parametrize(
    ("name", "lines"),
    # The README counts newlines; the third file is cut inside its 2,120th line.
    [("wiki.test.raw", 4_358), ("wiki.valid.raw", 3_760), ("wikitext2_train_first_1MB.txt", 2_120)],
)
def test_wikitext_has_a_document_per_line(name: str, lines: int) -> None:
    path = ROOT / "wikitext" / name
    found = assert_ledger_balances(TextSource(path, split="line"))
    assert found.num_read == lines
    assert "".join(text + "\n" for text in found.texts).encode()[: path.stat().st_size] == (
        path.read_bytes()
    )


def test_gutenberg_has_16_books_without_carriage_returns_or_boms() -> None:
    found = assert_ledger_balances(TextSource(ROOT / "gutenberg"))
    assert len(found.texts) == 16
    assert not any("\r\n" in text or text.startswith("\ufeff") for text in found.texts)
    raw = [path.read_bytes() for path in sorted((ROOT / "gutenberg").iterdir())]
    plain = [data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n") for data in raw]
    assert [text.encode() for text in found.texts] == plain
    assert found.counts == {"empty": 0, "invalid_utf8": 0}


def test_fineweb_has_2800_pages_and_resumes() -> None:
    found = assert_ledger_balances(ParquetSource(ROOT / "fineweb"))
    assert len(found.texts) == 2_800
    assert min(map(len, found.texts)) == 1_000
    assert max(map(len, found.texts)) == 48_185
    limits = BatchLimits(num_bytes=2 * 2**20)
    assert assert_resumes_exactly(lambda: ParquetSource(ROOT / "fineweb", limits=limits)) == found


def test_c4_has_300_pages_and_notes_313_files() -> None:
    assert len(assert_ledger_balances(JsonlSource(ROOT / "c4")).texts) == 300
    assert assert_ledger_balances(open_source(ROOT / "notes")).num_read == 313


def test_real_files_are_the_same_in_pieces() -> None:
    limits = BatchLimits(num_bytes=2**19)
    sources: list[CuttableSource] = [
        JsonlSource(ROOT / "dolly", field="response", limits=limits),
        JsonlSource(ROOT / "c4", limits=limits),
        TextSource(ROOT / "wikitext", split="line", limits=limits),
        TextSource(ROOT / "notes", limits=limits),
        ParquetSource(ROOT / "fineweb", limits=limits),
    ]
    for source in sources:
        assert_cut_is_the_source(source, 499_979)
