"""Preferences for tests: rows as files hold them, and what a store of them must say, by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from shardmill.building import BuildReport, BuildSpec, build_chats
from shardmill.chat import bind_template, known_template
from shardmill.sources import open_chats
from shardmill.store import Store, open_store
from shardmill.tokenizers import open_tokenizer

TOKENIZER = open_tokenizer(
    "byte:4", specials={"sys": "<|s|>", "usr": "<|u|>", "asst": "<|a|>", "eot": "<|e|>"}
)
TEMPLATE = bind_template(known_template("four-marker"), TOKENIZER)
MARKERS = {"system": "<|s|>", "user": "<|u|>", "assistant": "<|a|>"}

Row = dict[str, Any]
words = st.text("abc d", min_size=1, max_size=12)


class PlainRecord(NamedTuple):
    """What a record should become: texts."""

    prompt: str
    answers: list[tuple[str, int]]  # with rank or label


def plain_prompt(messages: Sequence[tuple[str, str]]) -> str:
    said = "".join(f"{MARKERS[role]}{text}<|e|>" for role, text in messages)
    return said + MARKERS["assistant"]


def pair(prompt: str, chosen: str, rejected: str, **more: Any) -> Row:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def rows_of_pairs(max_size: int = 12) -> st.SearchStrategy[list[Row]]:
    """Pairs of different answers; few prompts, so that some are the same as the one before."""
    one = st.tuples(st.sampled_from(["why", "how so", "a"]), words, words)
    different = one.filter(lambda row: row[1] != row[2])
    return st.lists(different.map(lambda row: pair(*row)), min_size=1, max_size=max_size)


def ranked_lists() -> st.SearchStrategy[list[Row]]:
    """Ranked lists with ties, of different answers."""

    def row(drawn: tuple[str, list[tuple[str, int]]]) -> Row:
        prompt, answers = drawn
        texts = [f"{text} {number}" for number, (text, _) in enumerate(answers)]
        return {
            "prompt": prompt,
            "completions": texts,
            "scores": [score for _, score in answers],
        }

    answers = st.lists(st.tuples(words, st.integers(0, 3)), min_size=2, max_size=5)
    several = answers.filter(lambda found: len({score for _, score in found}) > 1)
    return st.lists(st.tuples(words, several).map(row), min_size=1, max_size=6)


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_preferences(
    folder: Path, rows: Sequence[Row], *, val_fraction: float = 0.0, **options: Any
) -> BuildReport:
    """A store of these rows in `folder/store`."""
    source = open_chats(write_rows(folder / "rows.jsonl", rows), **options)
    return build_chats(
        source,
        folder / "store",
        template=TEMPLATE,
        tokenizer=TOKENIZER,
        spec=BuildSpec(shard_bytes=64),
        val_fraction=val_fraction,
        max_loss=1.0,
        allow_empty=True,
    )


def records_of(folder: Path, split: str = "train") -> list[PlainRecord]:
    """The records of a split, as text, in order."""
    store: Store = open_store(folder)
    found: list[PlainRecord] = []
    number = -1
    for example, prefix, record, value in store.branches(split).tolist():
        if record != number:
            number = record
            found.append(PlainRecord(TOKENIZER.decode(store[split][prefix].ids), []))
        answer = store[split][example]
        assert answer.loss_mask.all(), "all of an answer and its end are trained here"
        assert not store[split][prefix].loss_mask.any()
        found[-1].answers.append((TOKENIZER.decode(answer.ids), value))
    return found
