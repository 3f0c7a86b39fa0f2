"""What a tokenizer is trained on: files or texts become chunks of lines.

In: paths, globs, folders; or an iterable of texts.  Out: chunks, and the record of where they came
from (sorted names with sha256).
Promise: the same input and seed give the same chunks in the same order; at most `max_bytes` of
them, drawn evenly from the whole input; text is cleaned as sources clean it (`\\r\\n` is `\\n`, no
BOM, invalid UTF-8 replaced).
Not here: training.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

import numpy as np

from shardmill.errors import TokenizerError
from shardmill.records import JSON

CHUNK_CHARACTERS = 16_384
_FOLDER_SUFFIXES = (".txt", ".md")
_STRUCTURED = (".jsonl", ".json", ".gz", ".zst", ".parquet", ".arrow", ".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingText:
    """The chunks a trainer sees and the account of them."""

    chunks: tuple[str, ...]  # whole lines, "\n" between them
    inputs: tuple[dict[str, JSON], ...]  # {"name", "sha256", "bytes"}, sorted by name
    bytes_read: int
    bytes_used: int


def find_files(patterns: Sequence[str | Path]) -> list[Path]:
    """The files that paths, globs and folders (their .txt and .md) name, sorted, once each."""
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            matched = [file for file in path.rglob("*") if file.suffix in _FOLDER_SUFFIXES]
        elif has_magic(str(pattern)) and not path.exists():
            matched = [Path(name) for name in glob(str(pattern), recursive=True)]  # noqa: PTH207
        else:
            matched = [path]
        files = {file for file in matched if file.is_file()}
        if not files:
            raise TokenizerError(
                f"no input matched {str(pattern)!r}; wanted a text file, a glob that matches some "
                f"(looked from {Path.cwd().name!r}), or a folder with .txt or .md files"
            )
        found |= files
    if not found:
        raise TokenizerError("no input to train on; name at least one text file, glob or folder")
    for file in sorted(found):
        if file.suffix in _STRUCTURED:
            raise TokenizerError(
                f"{file} is not plain text; train from a source's texts instead (texts=...)"
            )
    return sorted(found)


def read_files(files: Sequence[Path], *, seed: int, max_bytes: int | None) -> TrainingText:
    sample = _Sample(seed, max_bytes)
    inputs: list[dict[str, JSON]] = []
    root = Path(os.path.commonpath([file.resolve().parent for file in files]))
    for file in files:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        name = file.resolve().relative_to(root).as_posix()
        inputs.append({"name": name, "sha256": digest, "bytes": file.stat().st_size})
        with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
            sample.add_all(_chunks(_lines_of(lines)))
    return sample.finish(sorted(inputs, key=lambda item: str(item["name"])))


def read_texts(
    texts: Iterable[str], name: str, *, seed: int, max_bytes: int | None
) -> TrainingText:
    sample = _Sample(seed, max_bytes)
    digest = hashlib.sha256()
    size = 0
    for text in texts:
        data = text.encode("utf-8", "replace")
        digest.update(len(data).to_bytes(8, "little") + data)
        size += len(data)
        sample.add_all(_chunks(data.decode().splitlines(keepends=True)))
    return sample.finish([{"name": name, "sha256": digest.hexdigest(), "bytes": size}])


class _Sample:
    """The chunks with the smallest random keys that fit `max_bytes`, in the order they came."""

    def __init__(self, seed: int, max_bytes: int | None) -> None:
        digest = hashlib.sha256(repr((seed, "tokenizer", "chunks")).encode()).digest()
        key = int.from_bytes(digest[:16], "little")
        self._random = np.random.Generator(np.random.Philox(key=key))
        self._max_bytes = max_bytes
        self._heap: list[tuple[int, int, int, str]] = []  # (-key, number, bytes, chunk)
        self._read = self._used = self._count = 0

    def add_all(self, chunks: Iterable[str]) -> None:
        for chunk in chunks:
            size = len(chunk.encode("utf-8", "replace"))
            key = int(self._random.integers(0, 2**63))
            heapq.heappush(self._heap, (-key, self._count, size, chunk))
            self._count += 1
            self._read += size
            self._used += size
            while self._max_bytes is not None and self._used > self._max_bytes and self._heap[1:]:
                self._used -= heapq.heappop(self._heap)[2]

    def finish(self, inputs: list[dict[str, JSON]]) -> TrainingText:
        if not any(chunk.strip() for _, _, _, chunk in self._heap):
            names = ", ".join(str(item["name"]) for item in inputs[:5])
            raise TokenizerError(
                f"no text to train on: {len(inputs)} inputs hold only whitespace ({names})"
            )
        kept = sorted(self._heap, key=lambda item: item[1])
        return TrainingText(
            chunks=tuple(chunk for _, _, _, chunk in kept),
            inputs=tuple(inputs),
            bytes_read=self._read,
            bytes_used=self._used,
        )


def _lines_of(stream: Iterable[str]) -> Iterator[str]:
    for line in stream:
        yield line[:-2] + "\n" if line.endswith("\r\n") else line


def _chunks(lines: Iterable[str]) -> Iterator[str]:
    """Whole lines up to about 16 K characters; a longer line is cut."""
    chunk: list[str] = []
    size = 0
    for line in lines:
        for start in range(0, len(line), CHUNK_CHARACTERS):
            part = line[start : start + CHUNK_CHARACTERS]
            if size + len(part) > CHUNK_CHARACTERS and chunk:
                yield "".join(chunk)
                chunk, size = [], 0
            chunk.append(part)
            size += len(part)
    if chunk:
        yield "".join(chunk)
