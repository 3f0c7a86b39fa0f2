"""The texts of any input: documents, or what the messages of conversations say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardmill.errors import OptionError, SourceError
from shardmill.sources import open_texts, texts_of

TURNS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo", "reasoning_content": "a greeting"},
]
SAID = ["hi", "a greeting", "yo"]


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def found(where: Any, **options: Any) -> list[str]:
    return list(texts_of(open_texts(where, **options)))


def test_documents_of_every_kind_are_read_as_build_reads_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    written(tmp_path / "b.jsonl", {"text": "line"}, {"text": ""}, {"text": "other"})
    pq.write_table(pa.table({"text": ["cell"], "body": ["other cell"]}), tmp_path / "c.parquet")
    files = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.parquet")]
    assert found(files) == ["text", "line", "other", "cell"]
    assert found(tmp_path / "*.parquet", field="body") == ["other cell"]


def test_conversations_give_what_their_messages_say(tmp_path: Path) -> None:
    chats = written(tmp_path / "a.jsonl", {"messages": TURNS}, {"messages": TURNS[:1]})
    assert found(chats) == [*SAID, "hi"]
    pair = {"prompt": "why", "chosen": "good", "rejected": "bad"}
    (tmp_path / "pairs").mkdir()
    assert found(written(tmp_path / "pairs/p.jsonl", pair)) == ["why", "good", "bad"]
    (tmp_path / "pairs/p.jsonl").unlink()
    (tmp_path / "b.json").write_text(json.dumps([{"messages": TURNS}]))
    assert found(tmp_path / "b.json") == SAID
    assert found(tmp_path) == [*SAID, "hi", *SAID]
    pq.write_table(pa.table({"prompt": ["who?"], "response": ["me"]}), tmp_path / "c.parquet")
    assert found(tmp_path / "c.parquet") == ["who?", "me"]
    renamed = written(tmp_path / "d.jsonl", {"talk": [{"by": "user", "said": "hi"}]})
    options = {"messages_field": "talk", "role_field": "by", "content_field": "said"}
    assert found(renamed, **options) == ["hi"]


def test_a_field_or_a_text_makes_documents_and_a_shape_conversations(tmp_path: Path) -> None:
    both = written(tmp_path / "a.jsonl", {"text": "whole", "messages": TURNS, "prompt": "who?"})
    assert found(both) == ["whole"]
    assert found(both, field="prompt") == ["who?"]
    assert found(both, shape="messages") == SAID
    with pytest.raises(OptionError, match="another option says that these are conversations"):
        open_texts(both, field="prompt", shape="messages")


def test_rows_that_give_no_text_are_counted(tmp_path: Path, caplog: Any) -> None:
    chats = written(tmp_path / "a.jsonl", {"messages": TURNS}, {"messages": "none"})
    assert found(chats, on_bad="skip") == SAID
    assert "rows that gave no text (bad_message: 1)" in caplog.text or "1)" in caplog.text
    with pytest.raises(SourceError):
        found(chats)


def test_what_is_wrong_is_said_as_build_says_it(tmp_path: Path) -> None:
    strange = written(tmp_path / "a.jsonl", {"numbers": [1, 2]})
    with pytest.raises(SourceError, match="neither a field 'text' nor any string field"):
        found(strange)
