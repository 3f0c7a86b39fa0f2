"""WikiText as whole articles, from rows of lines on the hub or from local files.

An article is its lines from one title line (" = Title = ") to the next. Lines keep their text and
order; blank lines are left out. Hub rows and raw files of the same data give the same documents.
Local files can be cut: an article belongs to the piece that holds its first line. The tokenisation
of the original (" @-@ ") stays.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, dropwhile, takewhile
from pathlib import Path
from typing import Self

from niels_gpt.data.files import Split, texts_of
from niels_gpt.data.rows import MAX_RETRIES
from shardmill.errors import SourceError
from shardmill.protocols import CuttableSource, Source
from shardmill.records import JSON, Cursor, TextBatch
from shardmill.sources import HubSource, MemorySource, TextSource, limited, open_source, stamp_of

log = logging.getLogger(__name__)

DATASET = "Salesforce/wikitext"
CONFIG = "wikitext-103-raw-v1"
HUB_SPLITS: dict[Split, str] = {"train": "train", "val": "validation"}

_TITLE = re.compile(r" = [^=](?:.*[^=])? = ")
_ROW_SUFFIXES = {".jsonl", ".gz", ".zst", ".parquet"}
_PLAIN_SUFFIXES = {".raw", ".txt", ".md", ".tokens", ""}


def iter_wikitext(
    path: str | Path | None = None,
    *,
    split: Split = "train",
    dataset: str = DATASET,
    config: str = CONFIG,
    revision: str | None = None,
) -> Iterator[str]:
    """The articles of one split of the hub's dataset, or of a local file or folder."""
    if path is None:
        return texts_of(hub_articles(split, dataset=dataset, config=config, revision=revision))
    return texts_of(local_articles(path, split))


def articles(rows: Iterable[str]) -> Iterator[str]:
    """Join lines to articles. A row may hold one line or many, with or without their ends."""
    lines: list[str] = []
    for line in _filled_lines(rows):
        if lines and _is_title(line):
            yield "\n".join([*lines, ""])
            lines = []
        lines.append(line)
    if lines:
        yield "\n".join([*lines, ""])


def owned_articles(own: Iterable[str], after: Iterable[str], *, first: bool) -> Iterator[str]:
    """The articles whose first line is among the rows `own`; `after` are all rows after these.

    The `first` rows of all own what comes before any title too.
    """
    lines = _filled_lines(own)
    rest = takewhile(lambda line: not _is_title(line), _filled_lines(after))
    if first:
        return articles(chain(lines, rest))
    titled = dropwhile(lambda line: not _is_title(line), lines)
    title = next(titled, None)
    return iter(()) if title is None else articles(chain([title], titled, rest))


def _filled_lines(rows: Iterable[str]) -> Iterator[str]:
    return (line for row in rows for line in row.split("\n") if line.strip())


def _is_title(line: str) -> bool:
    return _TITLE.fullmatch(line) is not None


def _sound_rows(rows: Source) -> Iterator[str]:
    """The rows as texts. One that cannot be read would leave a hole in its article: an error."""
    for batch in rows.batches():
        if batch.drops:
            drop = batch.drops[0]
            raise SourceError(
                f"{drop.id}: {drop.reason}: an article would lose this row; repair it"
            )
        if batch.counts.get("invalid_utf8"):
            repaired = batch.counts["invalid_utf8"]
            log.warning("%s: bytes that are no UTF-8 replaced in %d rows", rows.name, repaired)
        yield from batch.texts.to_pylist()


class ArticleSource:
    """The articles in the rows of another source.

    Repaired rows are announced in the log; the ledger counts articles, not rows.
    """

    def __init__(self, rows: Source) -> None:
        self._rows = rows
        self._articles = MemorySource(lambda: articles(_sound_rows(rows)), name=rows.name)

    @property
    def name(self) -> str:
        return self._rows.name

    def describe(self) -> dict[str, JSON]:
        return {"kind": "wikitext-articles", "name": self.name, "rows": self._rows.describe()}

    def stamp(self) -> JSON:
        return stamp_of(self._rows)

    def size_hint(self) -> int | None:
        return self._rows.size_hint()

    def limited(self, num_bytes: int) -> Self:
        """The same over rows of which none is over `num_bytes`."""
        return type(self)(limited(self._rows, num_bytes))

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        return self._articles.batches(cursor)


class ArticleFiles(ArticleSource):
    """The articles in local files, which can be cut."""

    def cut(self, num_bytes: int) -> Sequence[Source]:
        rows = self._rows
        if not isinstance(rows, CuttableSource):
            return (self,)
        return [
            ArticlePiece(rows=rows, num_bytes=num_bytes, number=number, own=piece)
            for number, piece in enumerate(rows.cut(num_bytes))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArticlePiece:
    """The articles that begin in one piece of the rows. Small to send: what follows the piece is
    found by cutting the rows again."""

    rows: CuttableSource
    num_bytes: int  # of a piece, as the rows are cut
    number: int  # of this piece
    own: Source  # this piece

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def files(self) -> Sequence[object]:
        """Those of the piece, if it has any: they tell its size."""
        found: Sequence[object] = getattr(self.own, "files", ())
        return found

    def describe(self) -> dict[str, JSON]:
        return {"kind": "wikitext-articles", "name": self.name, "rows": self.own.describe()}

    def stamp(self) -> JSON:
        return stamp_of(self.own)

    def size_hint(self) -> int | None:
        return self.own.size_hint()

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        return MemorySource(self._owned, name=self.name).batches(cursor)

    def _owned(self) -> Iterator[str]:
        return owned_articles(_sound_rows(self.own), self._after(), first=self.number == 0)

    def _after(self) -> Iterator[str]:
        for piece in self.rows.cut(self.num_bytes)[self.number + 1 :]:
            yield from _sound_rows(piece)


def hub_articles(
    split: Split,
    *,
    dataset: str,
    config: str,
    revision: str | None,
    max_retries: int = MAX_RETRIES,
) -> Source:
    return ArticleSource(
        HubSource(
            dataset,
            config=config,
            split=HUB_SPLITS[split],
            revision=revision,
            max_retries=max_retries,
        )
    )


def local_articles(path: str | Path, split: Split) -> Source:
    """A folder whose file names say "train" and "valid" (or "val"); a file is taken as it is."""
    where = Path(path)
    files = sorted(where.iterdir()) if where.is_dir() else [where]
    if where.is_dir():
        named = [file for file in files if file.is_file() and not file.name.startswith(".")]
        files = [file for file in named if _split_of(file) == split]
        if not files:
            raise SourceError(
                f"{where}: no text file has the word {split!r} in its name (found: "
                f"{', '.join(file.name for file in named[:8]) or 'none'}); "
                "name the files wiki.train.raw and wiki.valid.raw"
            )
        log.info("wikitext %s: %s", split, ", ".join(file.name for file in files))
    if files[0].suffix.lower() in _PLAIN_SUFFIXES:
        return ArticleFiles(TextSource(files, split="line", name=f"wikitext/{split}"))
    if len(files) > 1:
        raise SourceError(
            f"{where}: {len(files)} files for {split!r} ({files[0].name}, ...); join them to one"
        )
    return ArticleFiles(open_source(str(files[0]), name=f"wikitext/{split}"))


def _split_of(file: Path) -> Split | None:
    """The split a file's name speaks of; None for other words and for endings that hold no text."""
    if file.suffix.lower() not in _PLAIN_SUFFIXES | _ROW_SUFFIXES:
        return None
    words = set(re.split(r"[^a-z]+", file.name.lower()))
    is_train, is_val = "train" in words, bool(words & {"val", "valid", "validation"})
    if is_train and is_val:
        raise SourceError(f"{file}: the name says both train and validation; say one of them")
    return "train" if is_train else "val" if is_val else None


__all__ = [
    "CONFIG",
    "DATASET",
    "HUB_SPLITS",
    "ArticleFiles",
    "ArticlePiece",
    "ArticleSource",
    "articles",
    "hub_articles",
    "iter_wikitext",
    "local_articles",
    "owned_articles",
]
