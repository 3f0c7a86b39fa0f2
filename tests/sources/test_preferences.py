"""Files of preferences: each shape gives the same records, and what does not fit has a reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardmill.errors import OptionError, SourceError
from shardmill.records import Conversation
from shardmill.sources import CHAT_REASONS, open_chats
from tests.preferences import Row, pair, write_rows

ASKED = {"role": "user", "content": "why"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))
TURNS = [{"from": "human", "value": "why"}]


def read(tmp_path: Path, *rows: Row, **options: Any) -> list[Conversation]:
    source = open_chats(write_rows(tmp_path / "rows.jsonl", rows), **options)
    return [one for batch in source.batches() for one in batch.conversations]


def reasons(tmp_path: Path, row: Row, **options: Any) -> list[str]:
    """Of the drops of a row that follows a sound one."""
    options = {"on_bad": "skip", "shape": "preference", **options}
    source = open_chats(write_rows(tmp_path / "rows.jsonl", [row]), **options)
    return [drop.reason for batch in source.batches() for drop in batch.drops]


PAIRS: dict[str, Row] = {
    "strings": pair("why", "good", "bad"),
    "answers as a message": {"prompt": "why", "chosen": GOOD, "rejected": BAD},
    "messages": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "an implicit prompt": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "a prompt that the answers repeat": {
        "prompt": "why",
        "prompt_id": "7",
        "chosen": [ASKED, GOOD],
        "rejected": [ASKED, BAD],
        "messages": [ASKED, GOOD],
        "score_chosen": 7.0,
    },
    "ShareGPT turns": {
        "conversations": TURNS,
        "chosen": {"from": "gpt", "value": "good"},
        "rejected": {"from": "gpt", "value": "bad"},
    },
    "alpaca columns": {"instruction": "why", "input": "", "chosen": "good", "rejected": "bad"},
    "flags, which say nothing": {
        "chosen": [ASKED, {**GOOD, "train": False}],
        "rejected": [ASKED, {**BAD, "train": True}],
    },
    "a list with scores": {"prompt": "why", "completions": ["bad", "good"], "scores": [0.5, 2]},
    "a list with ranks": {"prompt": "why", "responses": [[GOOD], [BAD]], "rank": [1, 2]},
    "a list with ratings": {"prompt": [ASKED], "responses": [GOOD, "bad"], "ratings": [5, 1]},
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_way_to_write_a_pair_is_one_record(tmp_path: Path, name: str) -> None:
    (found,) = read(tmp_path, PAIRS[name])
    assert [*found.messages] == [ASKED]
    answers = [([*branch.messages], branch.value) for branch in found.branches]
    assert answers == [([ASKED, GOOD], 0), ([ASKED, BAD], 1)]


LABELLED: dict[str, Row] = {
    "strings": {"prompt": "why", "completion": "good", "label": True},
    "a response": {"prompt": [ASKED], "response": [GOOD], "label": True},
    "a conversation": {"messages": [ASKED, GOOD], "label": True},
    "ShareGPT turns": {"conversations": [*TURNS, {"from": "gpt", "value": "good"}], "label": True},
}


@pytest.mark.parametrize("name", LABELLED)
def test_every_way_to_write_a_label_is_one_record(tmp_path: Path, name: str) -> None:
    (found,) = read(tmp_path, LABELLED[name])
    assert [*found.messages] == [ASKED]
    assert [([*b.messages], b.value) for b in found.branches] == [([ASKED, GOOD], 1)]
    (found,) = read(tmp_path, {**LABELLED[name], "label": False})
    assert [branch.value for branch in found.branches] == [0]


def test_equal_scores_are_equal_ranks_and_the_best_is_first(tmp_path: Path) -> None:
    row = {"prompt": "why", "completions": ["a", "b", "c", "d"], "scores": [1, 3, 1, 2]}
    (found,) = read(tmp_path, row)
    said = [(branch.messages[-1]["content"], branch.value) for branch in found.branches]
    assert said == [("b", 0), ("d", 1), ("a", 2), ("c", 2)]


def test_system_tools_group_and_id_come_along(tmp_path: Path) -> None:
    more = {"system": "be kind", "tools": '[{"name": "f"}]', "group": "g", "id": "row 1"}
    (found,) = read(tmp_path, pair("why", "good", "bad", **more))
    assert [*found.messages] == [{"role": "system", "content": "be kind"}, ASKED]
    assert (found.tools, found.group, found.id) == ([{"name": "f"}], "g", "row 1")
    assert all([*branch.messages[:2]] == [*found.messages] for branch in found.branches)


WRONG: dict[str, tuple[Row, str]] = {
    "no answer": (pair("why", "good", None), "other_shape"),  # type: ignore[arg-type]
    "a number": (pair("why", "good", 7), "bad_answer"),  # type: ignore[arg-type]
    "an empty list": ({"prompt": "why", "chosen": [], "rejected": "bad"}, "bad_answer"),
    "no speaker": ({"prompt": "why", "chosen": [{"a": 1}], "rejected": "bad"}, "bad_message"),
    "strings alone": ({"chosen": "good", "rejected": "bad"}, "no_prompt"),
    "two beginnings": (
        {"chosen": [ASKED, GOOD], "rejected": [{**ASKED, "content": "how"}, BAD]},
        "prompts_differ",
    ),
    "a question at the end": (
        {"prompt": "why", "chosen": [GOOD, ASKED], "rejected": [BAD]},
        "no_answer",
    ),
    "another prompt": (
        {"prompt": "how", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        "two_prompts",
    ),
    "two prompts": (pair("why", "good", "bad", question="how"), "two_columns"),
    "a prompt and other turns": (pair("how", "good", "bad", conversations=TURNS), "two_columns"),
    "all the same": (
        {"prompt": "why", "completions": ["a", "b"], "scores": [1, 1]},
        "no_preference",
    ),
    "a score too few": ({"prompt": "why", "completions": ["a", "b"], "scores": [1]}, "bad_ranks"),
    "words for scores": (
        {"prompt": "why", "completions": ["a", "b"], "scores": ["1", "2"]},
        "bad_ranks",
    ),
    "scores and ranks": (
        {"prompt": "why", "completions": ["a", "b"], "scores": [1, 2], "rank": [2, 1]},
        "two_columns",
    ),
    "a history": (pair("why", "good", "bad", history=[["a", "b"]]), "other_shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_does_not_fit_has_its_reason(tmp_path: Path, name: str) -> None:
    row, reason = WRONG[name]
    assert reasons(tmp_path, row) == [reason]
    assert reason in CHAT_REASONS


@pytest.mark.parametrize("label", [None, 1, "true"])
def test_a_label_is_true_or_false(tmp_path: Path, label: object) -> None:
    row = {"prompt": "why", "completion": "good", "label": label}
    assert reasons(tmp_path, row, shape="kto") == ["bad_label"]
    with pytest.raises(SourceError, match="wanted true or false"):
        list(open_chats(tmp_path / "rows.jsonl", shape="kto").batches())


def test_a_later_row_of_preferences_among_chats_is_an_error(tmp_path: Path) -> None:
    rows: list[Row] = [{"messages": [ASKED, GOOD]}, pair("why", "good", "bad")]
    with pytest.raises(SourceError, match=r"'chosen' .* which of several answers was preferred"):
        read(tmp_path, *rows)


def test_options_that_rename_turns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not for the shape 'preference'"):
        read(tmp_path, pair("why", "good", "bad"), role_map={"robot": "assistant"})


@pytest.mark.skipif("SHARDMILL_REAL_DATA" not in os.environ, reason="no real data")
def test_real_pairs_are_read() -> None:
    path = Path(os.environ["SHARDMILL_REAL_DATA"]) / "preference" / "dpo_en_demo.json"
    source = open_chats(path)
    found = [one for batch in source.batches() for one in batch.conversations]
    rows = json.loads(path.read_text())
    assert len(found) == len(rows) == 300
    for one, row in zip(found, rows, strict=True):
        said = [branch.messages[-1]["content"] for branch in one.branches]
        assert said == [row["chosen"]["value"], row["rejected"]["value"]]
        assert len(one.messages) == len(row["conversations"])
