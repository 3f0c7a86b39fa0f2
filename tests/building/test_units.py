"""Units are a partition of chunks, and a receipt counts only for what it was made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.building.journal import UnitKey, read_receipts
from shardmill.building.plan import chunk_sizes, chunks_of, inputs_of, read_chunks, unit_ranges
from shardmill.sources import BatchLimits, JsonlSource, MemorySource
from shardmill.tokenizers import ByteTokenizer
from tests.helpers import folder_digest

SIZES = st.lists(st.integers(0, 50), max_size=30)


@given(sizes=SIZES, before=st.integers(1, 120), now=st.integers(1, 120), data=st.data())
def test_units_are_runs_that_cover_all_chunks_and_keep_what_was_begun(sizes, before, now, data):
    first = list(unit_ranges(sizes, before, {}))
    chosen = data.draw(st.lists(st.sampled_from(first), unique=True) if first else st.just([]))
    found = list(unit_ranges(sizes, now, dict(chosen)))
    assert [chunk for start, stop in found for chunk in range(start, stop)] == list(
        range(len(sizes))
    )
    assert set(chosen) <= set(found)
    for start, stop in set(found) - set(chosen):
        assert stop == start + 1 or sum(sizes[start:stop]) <= now


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 1_000)
    monkeypatch.setattr("shardmill.building.journal.SEGMENT_TOKENS", 300)
    rows = [json.dumps({"text": f"{number} " * 20}) for number in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "a.jsonl"


def source_of(corpus: Path) -> JsonlSource:
    return JsonlSource(corpus, limits=BatchLimits(num_documents=4))


def test_chunks_give_the_batches_of_the_source_from_any_cursor_on(corpus):
    pieces = chunks_of(source_of(corpus))
    assert len(pieces) > 3
    assert sum(chunk_sizes(pieces)) == pytest.approx(corpus.stat().st_size, abs=len(pieces))
    found = list(read_chunks(pieces, None))
    texts = [text for one in found for text in one.texts.to_pylist()]
    whole = source_of(corpus).batches()
    assert texts == [text for batch in whole for text in batch.texts.to_pylist()]
    for number, one in enumerate(found):
        rest = [after.cursor for after in read_chunks(pieces, one.cursor)]
        assert rest == [after.cursor for after in found[number + 1 :]]


def test_a_source_that_cannot_be_cut_is_one_chunk():
    source = MemorySource(["a"])
    assert list(chunks_of(source)) == [source]


class Stopped(Exception):
    """Stands for a process that ends in mid-build."""


def build(corpus: Path, name: str, *, stop_at: int | None = None, **options: object) -> str:
    def tell(progress) -> None:
        if stop_at is not None and progress.documents > stop_at:
            raise Stopped

    build_store(
        [Feed(source=source_of(corpus), fill=(("train", None),))],
        corpus.parent / name,
        tokenizer=ByteTokenizer(),
        spec=BuildSpec(shard_bytes=2_000),
        on_progress=tell,
        **{"workers": 1, "unit_bytes": 2_000, **options},
    )
    return folder_digest(corpus.parent / name)


def stopped(corpus: Path, **options: object) -> Path:
    with pytest.raises(Stopped):
        build(corpus, "s", stop_at=70, **options)
    return corpus.parent / ".s.building/segments"


@pytest.mark.parametrize("unit_bytes", [1, 3_000, 10**9])
def test_a_resume_with_other_units_keeps_what_was_begun(corpus, unit_bytes):
    wanted = build(corpus, "whole")
    begun = {path.name for path in stopped(corpus).iterdir()}
    seen: set[str] = set()

    def look(_progress) -> None:
        seen.update(path.name for path in (corpus.parent / ".s.building/segments").iterdir())

    options = {"workers": 1, "unit_bytes": unit_bytes, "resume": True, "on_progress": look}
    build_store(
        [Feed(source=source_of(corpus), fill=(("train", None),))],
        corpus.parent / "s",
        tokenizer=ByteTokenizer(),
        spec=BuildSpec(shard_bytes=2_000),
        **options,
    )
    assert begun <= seen
    assert folder_digest(corpus.parent / "s") == wanted


def test_receipts_of_another_plan_are_never_used(corpus, tmp_path):
    """The workplace of one build, filled with the segments of another."""
    journal = stopped(corpus)
    shutil.copytree(journal, tmp_path / "kept")
    other = tmp_path / "other"
    other.mkdir()
    lines = [json.dumps({"text": f"{number} other " * 9}) for number in range(100)]
    (other / "a.jsonl").write_text("\n".join(lines) + "\n")
    theirs = stopped(other / "a.jsonl")
    shutil.rmtree(theirs)
    shutil.copytree(tmp_path / "kept", theirs)
    assert build(other / "a.jsonl", "s", resume=True) == build(other / "a.jsonl", "whole")


@pytest.mark.parametrize("how", ["swapped", "missing", "of another unit", "not JSON"])
def test_a_receipt_that_does_not_follow_its_predecessor_does_not_count(corpus, how):
    wanted = build(corpus, "whole")
    journal = stopped(corpus)
    unit, other = sorted(journal.iterdir())[:2]
    receipts = sorted(unit.glob("*.json"))
    assert len(receipts) > 1
    if how == "swapped":
        data = [path.read_bytes() for path in receipts[:2]]
        for path, content in zip(receipts, reversed(data), strict=False):
            path.write_bytes(content)
    elif how == "missing":
        receipts[0].unlink()
    elif how == "of another unit":
        for path in other.iterdir():
            shutil.copy(path, unit / path.name)
    else:
        receipts[0].write_bytes(b"\xff\xfe")
    assert build(corpus, "s", resume=True) == wanted


def test_reading_receipts_removes_what_does_not_belong_to_them(corpus):
    journal = stopped(corpus)
    unit = sorted(journal.iterdir())[0]
    (unit / "000077.tokens").write_bytes(b"left over")
    receipts = read_receipts(unit)
    assert not (unit / "000077.tokens").exists()
    assert receipts[-1].last
    key = receipts[0].key
    changed = UnitKey(feed=0, start=key.start, stop=key.stop, plan=key.plan, inputs="other")
    assert read_receipts(unit, changed) == []
    assert list(unit.iterdir()) == []


def test_inputs_depend_on_when_a_file_was_written(corpus):
    pieces = chunks_of(source_of(corpus))
    before = inputs_of(pieces)
    assert inputs_of(chunks_of(source_of(corpus))) == before
    corpus.write_bytes(corpus.read_bytes())
    assert inputs_of(pieces) != before
