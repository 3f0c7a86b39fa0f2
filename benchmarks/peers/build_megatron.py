"""Megatron: the path of its preprocessing tool, which is no part of the package.

A pool parses lines and encodes them, a document a call and 32 a message; the first process adds
documents to an indexed dataset as they come back, in order. The tokenizer is Megatron's own class
over the fast tokenizer of transformers, asked for ids at once, not for pieces and then for ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.tokenizers.text.libraries import HuggingFaceTokenizer

from peers.builders import WORKERS, Ragged, Task

_LINES = 32  # a message
_mine: dict[str, Any] = {}


def start(task: Task) -> None:
    _mine["end"] = task.end_id
    folder = str(Path(task.model).parent)
    _mine["tokenizer"] = HuggingFaceTokenizer(folder, include_special_tokens=True)


def encode(line: str) -> list[int]:
    ids: list[int] = _mine["tokenizer"].text_to_ids(json.loads(line)["text"])
    ids.append(_mine["end"])
    return ids


def lines_of(files: tuple[str, ...]) -> Iterator[str]:
    for file in files:
        with Path(file).open(encoding="utf-8") as lines:
            yield from lines


def build(task: Task) -> None:
    out = IndexedDatasetBuilder(f"{task.out}/text.bin", dtype=np.uint16)
    with get_context("fork").Pool(WORKERS, start, (task,)) as pool:
        for ids in pool.imap(encode, lines_of(task.files), _LINES):
            out.add_document(ids, [len(ids)])
    out.finalize(f"{task.out}/text.idx")


def documents(task: Task) -> Ragged:
    data = IndexedDataset(f"{task.out}/text", mmap=True)
    flat = np.fromfile(f"{task.out}/text.bin", np.uint16)
    return Ragged.from_lengths(flat, data.sequence_lengths)
