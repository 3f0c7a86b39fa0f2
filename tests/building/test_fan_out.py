"""Fan-out: each answer is an example with everything before it, and nothing else changes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import shardmill
from shardmill.building import BuildReport, BuildSpec, build_chats
from shardmill.chat import TrainPolicy, bind_template, known_template
from shardmill.errors import OptionError
from shardmill.sources import open_chats
from shardmill.store import open_store, verify
from shardmill.testing.stores import read_examples
from shardmill.tokenizers import open_tokenizer
from tests.helpers import folder_digest

SPECIALS = {"sys": "<|s|>", "usr": "<|u|>", "asst": "<|a|>", "eot": "<|e|>"}
TOKENIZER = open_tokenizer("byte:4", specials=SPECIALS)


def turns(*words: str) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    roles = ("user", "assistant") * len(words)
    return [{"role": role, "content": word} for role, word in zip(roles, words, strict=False)]


def write(path: Path, *talks: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


def build(path: Path, out: Path, **options: Any) -> BuildReport:
    given: dict[str, Any] = {"fan_out": True, "workers": 1, **options}
    return shardmill.build(
        path, out, tokenizer="byte:4", special=SPECIALS, template="four-marker", **given
    )


def texts(folder: Path, split: str = "train") -> list[tuple[str, str]]:
    """Each example, and what is trained of it."""
    found = read_examples(folder, split)
    offsets = found.ids.offsets.tolist()
    return [
        (TOKENIZER.decode(found.ids[n]), TOKENIZER.decode(found.ids[n][found.mask[start:stop]]))
        for n, (start, stop) in enumerate(pairwise(offsets))
    ]


def test_each_answer_is_an_example_with_everything_before_it(tmp_path: Path) -> None:
    chats = write(tmp_path / "c.jsonl", turns("a", "b", "c", "d"), turns("x", "y"))
    done = build(chats, tmp_path / "s")
    first = "<|u|>a<|e|><|a|>b<|e|>"
    assert texts(tmp_path / "s") == [
        (first, "b<|e|>"),
        (f"{first}<|u|>c<|e|><|a|>d<|e|>", "d<|e|>"),
        ("<|u|>x<|e|><|a|>y<|e|>", "y<|e|>"),
    ]
    ledger = done.manifest.ledger
    assert (ledger.documents.read, ledger.documents.kept) == (3, 3)
    assert ledger.tokens.kept == 6 + 12 + 6
    assert ledger.chat is not None
    assert (ledger.chat.turns, ledger.chat.repeated_tokens) == (2 + 4 + 2, 6)
    assert done.manifest.options["chat"]["train_on"] == "last-assistant"
    assert verify(tmp_path / "s").problems == []


def test_flags_choose_the_answers_that_are_examples(tmp_path: Path) -> None:
    talk = turns("a", "b", "c", "d", "e", "f")
    talk[1]["train"], talk[3]["train"] = False, True
    none = turns("m", "n")
    none[1]["train"] = False
    build(write(tmp_path / "c.jsonl", talk, none), tmp_path / "s", max_loss=0.5)
    assert [trained for _, trained in texts(tmp_path / "s")] == ["d<|e|>", "f<|e|>"]
    drops = [json.loads(line) for line in (tmp_path / "s/dropped.jsonl").read_text().splitlines()]
    assert drops == [{"id": "c.jsonl:2", "reason": "nothing_trained"}]


def test_ids_are_unique_and_a_drop_names_its_answer(tmp_path: Path) -> None:
    talk = turns("a", "b", "c", "d")
    talk[3]["tool_calls"] = [{"function": {"name": "look", "arguments": {}}}]
    chats = write(tmp_path / "c.jsonl", talk, turns("x", "y"), turns("only a question"))
    (batch,) = open_chats(chats, fan_out=True).batches()
    ids = [one.id for one in batch.conversations]
    assert ids == ["c.jsonl:1#1", "c.jsonl:1#3", "c.jsonl:2#1", "c.jsonl:3"]
    done = build(chats, tmp_path / "s", max_loss=0.5)
    drops = [json.loads(line) for line in (tmp_path / "s/dropped.jsonl").read_text().splitlines()]
    assert drops == [
        {"id": "c.jsonl:1#3", "reason": "no_place_for_tool_calls"},
        {"id": "c.jsonl:3", "reason": "no_assistant"},
    ]
    ledger = done.manifest.ledger.documents
    assert (ledger.read, ledger.kept, sum(ledger.dropped.values())) == (4, 2, 2)


def many(path: Path) -> Path:
    return write(
        path, *(turns(*(f"{n} {turn} " * (n % 7) for turn in range(2 + n % 5))) for n in range(80))
    )


def test_a_conversation_goes_to_the_split_it_goes_to_without_fan_out(tmp_path: Path) -> None:
    chats = many(tmp_path / "c.jsonl")
    fractions = {"val_fraction": 0.3, "test_fraction": 0.2, "seed": 5}
    build(chats, tmp_path / "whole", fan_out=False, **fractions)
    build(chats, tmp_path / "apart", **fractions)
    for split in ("train", "val", "test"):
        whole = [text for text, _ in texts(tmp_path / "whole", split)]
        apart = [text for text, _ in texts(tmp_path / "apart", split)]
        assert len(whole) > 5
        # The last example of a conversation is all of it up to its last answer.
        last = [one for one, after in pairwise([*apart, ""]) if not after.startswith(one)]
        assert last == [text[: _end(text)] for text in whole]


def _end(text: str) -> int:
    """Where the last answer ends, in what may end with a question."""
    return text.index("<|e|>", text.rindex("<|a|>")) + 5


def test_every_number_of_workers_gives_the_same_bytes(tmp_path: Path) -> None:
    chats = many(tmp_path / "c.jsonl")
    made = []
    for workers in (1, 2):
        build(chats, tmp_path / str(workers), workers=workers, unit_bytes=4_000, val_fraction=0.3)
        made.append(folder_digest(tmp_path / str(workers)))
    assert made[0] == made[1]
    ledger = open_store(tmp_path / "1").manifest.ledger
    lengths = {
        split: read_examples(tmp_path / "1", split).ids.lengths for split in ("train", "val")
    }
    shown = {split: [text for text, _ in texts(tmp_path / "1", split)] for split in lengths}
    repeated = sum(
        int(size)
        for split, all_texts in shown.items()
        for size, (one, after) in zip(lengths[split], pairwise([*all_texts, ""]), strict=True)
        if after.startswith(one)
    )
    assert ledger.chat is not None
    assert ledger.chat.repeated_tokens == repeated > 0
    assert ledger.tokens.kept == sum(int(one.sum()) for one in lengths.values())
    assert ledger.documents.kept + sum(ledger.documents.dropped.values()) == ledger.documents.read


def test_another_policy_is_refused_by_name(tmp_path: Path) -> None:
    chats = write(tmp_path / "c.jsonl", turns("a", "b"))
    with pytest.raises(OptionError, match=r"fan_out=True: .* leave out train_on='all'"):
        build(chats, tmp_path / "s", train_on="all")
    with pytest.raises(OptionError, match="not 'assistant': use train_on='last-assistant'"):
        build_chats(
            open_chats(chats, fan_out=True),
            tmp_path / "s",
            template=bind_template(known_template("four-marker"), TOKENIZER),
            tokenizer=TOKENIZER,
            spec=BuildSpec(),
            policy=TrainPolicy(),
        )
    assert not (tmp_path / "s").exists()
