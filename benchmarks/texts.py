"""Text for benchmarks: real, never repeated, in documents of a few thousand characters.

In: the folder of real data, when there is one.  Out: documents; as many as are asked for.
Not here: files and formats.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq

DOCUMENT_CHARS = 6000


def documents(data: Path | None) -> Iterator[str]:
    """Real text in documents of a few thousand characters, never repeated."""
    texts: list[Iterable[str]] = []
    if data is not None:
        table = pq.read_table(data / "fineweb/fineweb_sample_2800.parquet", columns=["text"])
        books = sorted((data / "gutenberg").glob("*.txt"))
        texts += [table["text"].to_pylist(), (book.read_text("utf-8", "replace") for book in books)]
    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    paths = (path for root in roots for path in sorted(root.rglob("*.py")))
    texts.append(path.read_text("utf-8", "replace") for path in paths)
    for text in chain.from_iterable(texts):
        for start in range(0, len(text), DOCUMENT_CHARS):
            yield text[start : start + DOCUMENT_CHARS]


def some_documents(data: Path | None, megabytes: float) -> list[str]:
    """The first documents that together hold so much text."""
    texts, size = [], 0
    for text in documents(data):
        texts.append(text)
        size += len(text.encode())
        if size >= megabytes * 10**6:
            break
    return texts


def text_bytes(texts: Iterable[str]) -> int:
    return sum(len(text.encode()) for text in texts)
