"""A column that changes what a row means is read, ignored on request, or refused: never passed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmill
from shardmill.errors import OptionError, SourceError
from shardmill.sources import open_chats, open_source
from shardmill.sources.meaning import LOOK_ROWS
from shardmill.sources.rows import check_columns
from shardmill.testing.sources import assert_cut_is_the_source

TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PLAIN = {"messages": TALK}

MEANT = [
    ("chosen", "good"),
    ("rejected", TALK),
    ("chosen_score", 1.0),
    ("score_rejected", 2),
    ("chosen-rating", 3),
    ("Rejected", "bad"),
    ("preference", "a"),
    ("winner", "model_b"),
    ("completions", [{"text": "x", "overall_score": 3}]),
    ("responses", ["x", "y"]),
    ("scores", [1.0, 2.0]),
    ("label", True),
    ("label", False),
    ("label", 0),
    ("label", "bad"),
    ("score", 0.5),
    ("score", "0.5"),
    ("rating", {"helpful": 4}),
    ("weight", 0),
    ("images", ["a.png"]),
    ("image", {"bytes": "aa", "path": None}),
    ("audio", "a.wav"),
    ("videos", [{"path": "v.mp4"}]),
]
NOT_MEANT = [
    *((name, value) for name, _ in MEANT for value in (None, "", [], {})),
    ("completions", [{"text": "x"}]),
    ("responses", ["x"]),
    ("score", "high"),
    ("scored", 1),
    ("labels", {"spam": 0.1}),
    ("url", "https://example.org"),
]


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(where: Any, **options: Any) -> tuple[int, list[tuple[str, str]]]:
    """How many conversations there are, and the drops."""
    batches = list(open_chats(where, **options).batches())
    drops = [(drop.id, drop.reason) for batch in batches for drop in batch.drops]
    return sum(len(batch.conversations) for batch in batches), drops


@pytest.mark.parametrize(("name", "value"), MEANT)
def test_a_column_that_changes_what_is_trained_is_refused(tmp_path, name, value):
    path = write(tmp_path / "c.jsonl", PLAIN | {name: value})
    for options in ({}, {"on_bad": "skip"}, {"shape": "messages"}):
        with pytest.raises(SourceError, match="would be ignored") as caught:
            read(path, **options)
        assert f"{name!r} (" in str(caught.value)
        assert f"ignore_columns=[{name!r}]" in str(caught.value)
    assert read(path, ignore_columns=[name]) == (1, [])


@pytest.mark.parametrize(("name", "value"), NOT_MEANT)
def test_a_column_that_holds_nothing_or_something_else_is_read_over(tmp_path, name, value):
    assert read(write(tmp_path / "c.jsonl", PLAIN | {name: value})) == (1, [])


def test_the_message_says_what_the_columns_mean_and_every_way_to_go_on(tmp_path):
    rows = [PLAIN | {"chosen": "a", "rejected": "b", "score_chosen": 9}]
    with pytest.raises(SourceError) as caught:
        read(write(tmp_path / "c.jsonl", *rows))
    text = str(caught.value)
    assert f"{tmp_path}/c.jsonl:1: columns that change" in text
    assert "'chosen' (a string) and 'rejected' (a string) and 'score_chosen' (a number)" in text
    assert "which of several answers was preferred" in text
    assert "shape='preference'" in text
    assert "ignore_columns=['chosen', 'rejected', 'score_chosen']" in text
    with pytest.raises(SourceError) as caught:
        read(write(tmp_path / "k.jsonl", {"prompt": "p", "completion": "c", "label": False}))
    for way in ("shape='kto'", "filter='label'", "ignore_columns=['label']"):
        assert way in str(caught.value)


def test_a_file_of_preferences_alone_is_named_as_one(tmp_path):
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    with pytest.raises(SourceError, match="preference"):
        read(write(tmp_path / "c.jsonl", row))


def test_the_first_rows_of_every_file_are_looked_at(tmp_path):
    for number in range(9):
        write(tmp_path / f"{number}.jsonl", PLAIN, PLAIN | ({"label": 1} if number == 7 else {}))
    with pytest.raises(SourceError, match=r"/7\.jsonl:2: columns that change"):
        read(tmp_path)
    with pytest.raises(SourceError, match=r"/7\.jsonl:2: columns that change"):
        open_chats(tmp_path, shape="messages").describe() and read(tmp_path, shape="messages")


@pytest.mark.parametrize("ending", [".parquet", ".json", ".jsonl.gz"])
def test_every_format_is_looked_at(tmp_path, ending):
    path = tmp_path / f"c{ending}"
    rows = [PLAIN | {"label": None}, PLAIN | {"label": True}]
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif ending == ".json":
        path.write_text(json.dumps(rows))
    else:
        import gzip

        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    with pytest.raises(SourceError, match="'label'"):
        read(path)
    assert read(path, ignore_columns=["label"]) == (2, [])


@given(labels=st.lists(st.sampled_from([None, True, False]), min_size=1, max_size=60))
def test_no_row_with_such_a_column_becomes_a_conversation(tmp_path_factory, labels):
    """However late it comes: refused, an error, or a drop with a reason."""
    path = tmp_path_factory.mktemp("c") / "c.jsonl"
    write(path, *(PLAIN | ({} if label is None else {"label": label}) for label in labels))
    is_early = any(label is not None for label in labels[:LOOK_ROWS])
    late = [
        (f"c.jsonl:{number}", "ignored_column")
        for number, label in enumerate(labels, 1)
        if label is not None
    ]
    if is_early:
        with pytest.raises(SourceError, match="would be ignored"):
            read(path, on_bad="skip")
        return
    assert read(path, on_bad="skip") == (len(labels) - len(late), late)
    if late:
        with pytest.raises(SourceError, match=f"{late[0][0]}: the column 'label'.*ignore_columns"):
            read(path)


def test_pieces_of_a_file_see_late_columns_as_the_whole_does(tmp_path):
    rows = [PLAIN | ({"label": True} if number % 7 == 6 else {}) for number in range(80)]
    path = write(tmp_path / "c.jsonl", *([PLAIN] * LOOK_ROWS), *rows)
    source = open_chats(path, on_bad="skip")
    assert_cut_is_the_source(source, 300)
    assert len(read(path, on_bad="skip")[1]) == 11


def test_what_is_ignored_is_part_of_the_description(tmp_path):
    path = write(tmp_path / "c.jsonl", PLAIN | {"label": True, "score": 1})
    source = open_chats(path, ignore_columns=["score", "label"])
    assert source.describe()["ignore_columns"] == ["label", "score"]
    assert "ignore_columns" not in open_chats(write(tmp_path / "d.jsonl", PLAIN)).describe()


def test_an_ignored_column_that_no_first_row_has_is_announced(tmp_path, caplog):
    path = write(tmp_path / "c.jsonl", PLAIN | {"label": True})
    assert read(path, ignore_columns=["label", "lable"]) == (1, [])
    assert "no first row has the column 'lable' that is ignored; did you mean 'label'" in "".join(
        caplog.messages
    )
    late = write(tmp_path / "d.jsonl", *([PLAIN] * LOOK_ROWS), PLAIN | {"label": True})
    assert read(late, ignore_columns=["label"]) == (LOOK_ROWS + 1, [])
    with pytest.raises(OptionError, match="wanted a list of names"):
        open_chats(path, ignore_columns="label")


def test_the_named_column_of_turns_is_read_and_its_opposite_refused(tmp_path):
    path = write(tmp_path / "c.jsonl", {"chosen": TALK, "rejected": TALK})
    with pytest.raises(SourceError, match=r"ignore_columns=\['rejected'\]"):
        read(path, messages_field="chosen")
    assert read(path, messages_field="chosen", ignore_columns=["rejected"]) == (1, [])


def test_columns_that_nothing_reads_are_listed_in_one_line(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="shardmill")
    rows = [PLAIN | {"id": "1", "url": "x"}, PLAIN | {"prompt": "p", "tools": []}]
    assert read(write(tmp_path / "c.jsonl", *rows))[0] == 2
    listed = [text for text in caplog.messages if "not read" in text]
    assert listed == ["c.jsonl: columns that are not read: 'url', 'prompt'"]


# documents


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "good", "rejected": "bad"},
        {"text": "a caption", "image": {"path": "a.png"}},
        {"text": "a question", "completions": ["x", "y"]},
    ],
)
def test_documents_beside_such_columns_are_refused_unless_their_field_is_named(tmp_path, kind, row):
    path = tmp_path / f"d.{kind}"
    if kind == "jsonl":
        write(path, row)
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    field = next(iter(row))
    with pytest.raises(SourceError, match=f"field={field!r}, which says"):
        shardmill.build(path, tmp_path / "s", tokenizer="byte", append_eot=False)
    assert not (tmp_path / "s").exists()
    check_columns(open_source(path), field=None, ignored=[*row])
    done = shardmill.build(path, tmp_path / "s", tokenizer="byte", append_eot=False, field=field)
    assert done.manifest.ledger.documents.kept == 1


def test_labels_and_scores_of_documents_are_announced_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="shardmill")
    for name in ("a", "b"):
        rows = [{"text": "t", "label": number % 2, "score": 0.5} for number in range(30)]
        write(tmp_path / f"{name}.jsonl", *rows)
    shardmill.build(tmp_path / "*.jsonl", tmp_path / "s", tokenizer="byte", append_eot=False)
    listed = [text for text in caplog.messages if "not read" in text]
    assert listed == ["*.jsonl: columns that are not read: 'label', 'score'"]
