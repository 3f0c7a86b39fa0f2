"""Other ways from text to token files, each in a file of its own, each optional.

A file has `build(task)`, which is timed: JSON lines in, its own format out; and `documents(task)`,
which reads back what it wrote. `ENVIRON` is set before its process starts.

Every peer works in its documented way with two worker processes, forked where it lets us choose,
one thread of the tokenizer in each, and a file for each worker where it reads files. Where the
tokenizer is the user's own business it is the fast tokenizer of transformers, called with a list.
`tuned` calls the `tokenizers` library itself instead, the leanest call there is, which none of
their guides shows; such a row is told, and nothing is judged by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from peers import Peer
from shardmill.records import Ragged

WORKERS = 2
TEXTS_PER_CALL = 256
ENVIRON = {"TOKENIZERS_PARALLELISM": "false"}
Encode = Callable[[list[str]], list[list[int]]]

BUILDERS = (
    Peer("datatrove", "build_datatrove", "datatrove"),
    Peer("LitData", "build_litdata", "litdata"),
    Peer("MosaicML Streaming", "build_mosaic", "mosaicml-streaming"),
    Peer("Megatron Core", "build_megatron", "megatron-core"),
    Peer("datasets", "build_hugging_face", "datasets"),
)
TUNED = ("MosaicML Streaming",)  # one shows what it brings


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What everybody gets."""

    files: tuple[str, ...]  # JSON lines, a document each, under "text"
    model: str  # a tokenizer.json
    end: str  # the special token behind each document
    end_id: int
    out: str  # a folder that is there and empty
    tuned: bool = False  # the leanest tokenizer call instead of the usual one


def encoder(task: Task) -> Encode:
    """Texts to ids, with the end behind each."""
    return _leanest(task) if task.tuned else _usual(task)


def _usual(task: Task) -> Encode:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=task.model)

    def encode(texts: list[str]) -> list[list[int]]:
        rows = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False)
        return [[*ids, task.end_id] for ids in rows["input_ids"]]

    return encode


def _leanest(task: Task) -> Encode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(task.model)

    def encode(texts: list[str]) -> list[list[int]]:
        rows = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [[*row.ids, task.end_id] for row in rows]

    return encode


def texts_of(file: str) -> Iterator[list[str]]:
    """The documents of a file, some at a time."""
    with Path(file).open(encoding="utf-8") as lines:
        while some := [json.loads(line)["text"] for line in islice(lines, TEXTS_PER_CALL)]:
            yield some


def ragged(documents: list[np.ndarray]) -> Ragged:
    """Documents behind one another."""
    values = np.concatenate([np.empty(0, np.uint16), *documents])
    return Ragged.from_lengths(values, [len(one) for one in documents])
