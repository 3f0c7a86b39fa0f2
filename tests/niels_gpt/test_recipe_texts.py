"""The recipe's text sources: shuffle, split by file, articles."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data import iter_fineweb_edu, iter_gutenberg, iter_roam, iter_wikitext
from niels_gpt.data.files import num_val, split_list, texts_of
from niels_gpt.data.shuffle import ShuffledSource
from niels_gpt.data.wikitext import ArticleSource, articles
from shardmill.building import BuildReport, BuildSpec, Feed, build_store
from shardmill.errors import OptionError, SourceError
from shardmill.records import Cursor, Drop, TextBatch
from shardmill.sources import BatchLimits, MemorySource
from shardmill.tokenizers import ByteTokenizer
from tests.helpers import folder_digest

SMALL = BatchLimits(num_bytes=40, num_documents=3)


def numbered(count: int, buffer_size: int, seed: int = 0) -> ShuffledSource:
    """Documents "0".."n", every seventh empty."""
    texts = ["" if n % 7 == 6 else str(n) for n in range(count)]
    return ShuffledSource(
        MemorySource(texts, name="numbers", limits=SMALL), seed=seed, buffer_size=buffer_size
    )


@settings(deadline=None, max_examples=60)
@given(count=st.integers(0, 40), buffer_size=st.integers(1, 50), seed=st.integers(0, 99))
def test_shuffling_gives_each_document_once(count: int, buffer_size: int, seed: int) -> None:
    source = numbered(count, buffer_size, seed)
    assert sorted(texts_of(source), key=int) == [str(n) for n in range(count) if n % 7 != 6]
    assert list(texts_of(source)) == list(texts_of(source))
    for batch in source.batches():
        assert batch.num_read == len(batch.texts) + batch.counts.get("empty", 0) + len(batch.drops)


def test_a_document_is_drawn_from_the_buffer_only() -> None:
    texts = [str(n) for n in range(1, 200)]
    order = list(texts_of(ShuffledSource(MemorySource(texts), seed=5, buffer_size=10)))
    assert order != texts
    # The document at place i was drawn when i + 10 had been read.
    assert all(int(text) <= place + 11 for place, text in enumerate(order))
    other = list(texts_of(ShuffledSource(MemorySource(texts), seed=6, buffer_size=10)))
    assert order != other


@settings(deadline=None, max_examples=30)
@given(count=st.integers(0, 40), buffer_size=st.integers(1, 12))
def test_a_shuffled_stream_resumes_exactly(count: int, buffer_size: int) -> None:
    whole = list(numbered(count, buffer_size).batches())
    for stop, last in enumerate(whole, start=1):
        rest = list(numbered(count, buffer_size).batches(last.cursor))
        wanted = whole[stop:]
        assert [t for b in rest for t in b.texts.to_pylist()] == [
            t for b in wanted for t in b.texts.to_pylist()
        ]
        assert total_counts(rest) == total_counts(wanted)


def total_counts(batches: list[TextBatch]) -> Counter[str]:
    total: Counter[str] = Counter()
    for batch in batches:
        total.update(batch.counts)
        total["read"] += batch.num_read
        total["drops"] += len(batch.drops)
    return +total


class Dropping:
    """A source of one batch with drops, to see that they pass through the shuffle once."""

    name = "dropping"

    def describe(self) -> dict[str, object]:
        return {"kind": "dropping"}

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        for text in ("a", "b", "c"):
            (batch,) = MemorySource([text]).batches()
            drops = (Drop(id=f"row {text}", reason="bad"),)
            yield TextBatch(
                texts=batch.texts, num_read=2, counts={}, drops=drops, cursor=batch.cursor
            )


def test_drops_pass_through_a_shuffle_once() -> None:
    source = ShuffledSource(Dropping(), seed=0, buffer_size=2)  # type: ignore[arg-type]
    batches = list(source.batches())
    assert [d.id for b in batches for d in b.drops] == ["row a", "row b", "row c"]
    rest = list(source.batches(batches[1].cursor))
    assert [d.id for b in rest for d in b.drops] == ["row c"]


def test_a_cursor_from_other_input_is_refused() -> None:
    with pytest.raises(SourceError, match="past its end"):
        list(numbered(5, 2).batches({"documents": 99}))
    with pytest.raises(SourceError, match="no count"):
        list(numbered(5, 2).batches({"documents": "many"}))
    with pytest.raises(OptionError, match="shuffle buffer 0"):
        numbered(5, 0)


def test_a_seeded_split_keeps_order_and_parts_every_item() -> None:
    train, val = split_list(range(30), val_frac=0.2, seed=42)
    assert len(val) == 6
    assert sorted(train + val) == list(range(30))
    assert train == sorted(train)
    assert val == sorted(val)
    assert split_list(range(30), val_frac=0.2, seed=42) == (train, val)
    assert split_list(range(30), val_frac=0.2, seed=43) != (train, val)


@pytest.mark.parametrize(
    ("total", "val_frac", "wanted"),
    [(0, 0.1, 0), (1, 0.5, 0), (2, 0.1, 1), (19, 0.1, 1), (20, 0.1, 2), (10, 0.0, 1)],
)
def test_validation_gets_at_least_one_of_two(total: int, val_frac: float, wanted: int) -> None:
    assert num_val(total, val_frac) == wanted


def test_a_share_of_one_is_refused() -> None:
    with pytest.raises(OptionError, match=r"val_frac=1\.0"):
        num_val(10, 1.0)


def test_notes_are_split_by_file(tmp_path: Path) -> None:
    for n in range(20):
        folder = tmp_path / ("journals" if n % 2 else "pages")
        folder.mkdir(exist_ok=True)
        (folder / f"{n:02d}.md").write_bytes(f"- note {n}\r\n".encode())
    train = list(iter_roam(tmp_path, split="train"))
    val = list(iter_roam(tmp_path, split="val"))
    assert len(val) == 2
    assert sorted(train + val) == sorted(f"- note {n}\n" for n in range(20))
    assert list(iter_gutenberg(tmp_path, split="val")) == val
    assert list(iter_roam(tmp_path, split="val", seed=7)) != val


def test_a_lone_note_is_for_training(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text("- only\n")
    assert list(iter_roam(tmp_path, split="train")) == ["- only\n"]
    assert list(iter_roam(tmp_path, split="val")) == []


LINES = [
    *(" ", " = First = ", " ", " Text of it . ", " ", " = = Part = = ", " ", " More text . "),
    *(" ", " = Second = ", " ", " a = b = c "),
]
RAW = "".join(f"{line}\n" for line in LINES)
FIRST = " = First = \n Text of it . \n = = Part = = \n More text . \n"
SECOND = " = Second = \n a = b = c \n"


def test_articles_begin_at_titles_of_the_first_level() -> None:
    assert list(articles([RAW])) == [FIRST, SECOND]


def test_a_line_that_only_begins_like_a_title_is_text() -> None:
    assert list(articles([" = A = ", " = b = c "])) == [" = A = \n = b = c \n"]


def test_hub_rows_and_raw_lines_give_the_same_articles() -> None:
    # The hub's rows keep their line ends, and a blank line is an empty row.
    hub = ["" if not line.strip() else line for line in RAW.splitlines(keepends=True)]
    assert list(articles(hub)) == list(articles(RAW.splitlines())) == [FIRST, SECOND]


@settings(deadline=None, max_examples=100)
@given(lines=st.lists(st.sampled_from([" = A = ", " = = B = = ", " text ", "", " ", "= C ="])))
def test_joining_lines_to_articles_loses_only_blank_lines(lines: list[str]) -> None:
    found = list(articles(lines))
    assert "".join(found) == "".join(f"{line}\n" for line in lines if line.strip())
    assert all(text.count(" = A = \n") <= 1 for text in found)


def test_an_article_source_resumes_after_any_batch() -> None:
    def fresh() -> ArticleSource:
        return ArticleSource(MemorySource(RAW.splitlines(), name="wiki"))

    assert fresh().describe() == {
        "kind": "wikitext-articles",
        "name": "wiki",
        "rows": {"kind": "memory", "name": "wiki"},
    }
    assert list(texts_of(fresh())) == [FIRST, SECOND]
    (rest,) = fresh().batches({"documents": 1})
    assert rest.texts.to_pylist() == [SECOND]


def test_a_row_that_cannot_be_read_is_never_lost_from_an_article(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SourceError, match="row a: bad: an article would lose this row"):
        list(ArticleSource(Dropping()).batches())  # type: ignore[arg-type]
    (tmp_path / "wiki.train.raw").write_bytes(b" = A = \n caf\xe9 \n")
    assert list(iter_wikitext(tmp_path)) == [" = A = \n caf\ufffd \n"]
    assert "no UTF-8 replaced in 1 rows" in caplog.text


def test_local_wikitext_files_are_told_apart_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wiki.train.raw").write_text(RAW)
    (tmp_path / "wiki.valid.raw").write_text(" = Third = \n x \n")
    (tmp_path / "wiki.test.raw").write_text(" = Fourth = \n y \n")
    with caplog.at_level(logging.INFO):
        assert list(iter_wikitext(tmp_path)) == [FIRST, SECOND]
    assert "wiki.train.raw" in caplog.text
    assert list(iter_wikitext(tmp_path, split="val")) == [" = Third = \n x \n"]
    (tmp_path / "wiki.valid.raw").unlink()
    with pytest.raises(SourceError, match=r"'val'.*found: wiki.test.raw, wiki.train.raw"):
        iter_wikitext(tmp_path, split="val")


def test_local_web_pages_are_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(f'{{"text": "page {n}"}}\n' for n in range(50)))
    plain = list(iter_fineweb_edu(path, shuffle_buffer=None))
    assert plain == [f"page {n}" for n in range(50)]
    mixed = list(iter_fineweb_edu(path, seed=3, shuffle_buffer=20))
    assert mixed != plain
    assert sorted(mixed) == sorted(plain)


class Breaking:
    """A source that dies after some batches, once."""

    def __init__(self, inner: MemorySource, after: int) -> None:
        self._inner, self._left, self.name = inner, after, inner.name

    def describe(self) -> dict[str, object]:
        return dict(self._inner.describe())

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        for batch in self._inner.batches(cursor):
            self._left -= 1
            if self._left == 0:
                raise SourceError("the line went dead")
            yield batch


@pytest.mark.parametrize("after", [2, 9, 17, 30])
def test_a_shuffled_build_that_broke_off_resumes_to_the_same_bytes(
    tmp_path: Path, after: int
) -> None:
    texts = [f"document {n} " * (n % 5 + 1) for n in range(100)]

    def build(folder: Path, after: int, *, resume: bool = False) -> BuildReport:
        inner = Breaking(MemorySource(texts, name="texts", limits=SMALL), after)
        source = ShuffledSource(inner, seed=1, buffer_size=12)  # type: ignore[arg-type]
        fill: tuple[tuple[str, int | None], ...] = (("val", 300), ("train", None))
        return build_store(
            [Feed(source=source, fill=fill)],
            folder,
            tokenizer=ByteTokenizer(),
            spec=BuildSpec(dtype="uint16", shard_bytes=1_000, exact_shards=True),
            resume=resume,
        )

    build(tmp_path / "whole", 0)
    with pytest.raises(SourceError, match="went dead"):
        build(tmp_path / "broken", after)
    assert not (tmp_path / "broken").exists()
    assert build(tmp_path / "broken", 0, resume=True).resumed == (after > 9), (
        "what was sealed counts"
    )
    assert folder_digest(tmp_path / "broken") == folder_digest(tmp_path / "whole")
