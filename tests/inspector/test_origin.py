"""Whence a token is, and what is excluded, as a view tells it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmill.build import BuildSpec, Feed, build_chats, build_store
from shardmill.chat import bind_template, known_template
from shardmill.errors import OptionError
from shardmill.inspector.api import Desk
from shardmill.inspector.shelf import Shelf, Tokenizers
from shardmill.loading import Loader, SampleStream, TokenSource
from shardmill.shards import exclude_documents
from shardmill.sources import open_chats, open_source
from tests.inspector.conftest import OPENED, SPECIALS, ask

STORE = "/stores/{store}"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """`pages` from two files whose text is in a field of its own, `chats` from one."""
    for name in "ab":
        rows = [{"body": f"{name} {n} \u00e9<b>" * 9, "id": f"{name}-{n}"} for n in range(30)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    feed = Feed(
        source=open_source(str(tmp_path / "*.jsonl"), field="body"), fill=(("train", None),)
    )
    spec = BuildSpec(append_eot=True)
    build_store([feed], tmp_path / "pages", tokenizer=OPENED, spec=spec)
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
    (tmp_path / "talk.json").write_text(json.dumps([{"messages": talk}] * 3))
    build_chats(
        open_chats(tmp_path / "talk.json"),
        tmp_path / "chats",
        template=bind_template(known_template("four-marker"), OPENED),
        tokenizer=OPENED,
        spec=BuildSpec(),
    )
    return tmp_path


def open_desk(built: Path, name: str, *inputs: str, tokenizer: bool = True) -> Desk:
    names = ["byte:4"] if tokenizer else []
    return Desk(Shelf([built / name], Tokenizers(names, SPECIALS)), None, inputs)


def test_a_token_is_shown_in_the_row_it_came_from(built):
    desk = open_desk(built, "pages", str(built / "*.jsonl"))
    view = ask(desk, f"{STORE}/documents/{{document}}", store=0, document=31)
    at = view["first_token"] + view["view"]["texts"].index("<")
    found = ask(desk, f"{STORE}/blame", store=0, token=at)
    assert (found["file"], found["row"], found["own_id"]) == ("b.jsonl", "b.jsonl:2", "b-1")
    assert (found["text_before"], found["text"]) == ("b 1 \u00e9", "<")
    assert found["text_after"] == ("b>" + "b 1 \u00e9<b>" * 8)[:200]
    assert (found["from"], found["to"], found["note"]) == (5, 6, "")
    last = ask(desk, f"{STORE}/blame", store=0, token=at + view["num_tokens"] - 7)
    assert last["text"] == ""
    assert "put behind the document by the build" in last["note"]


def test_a_token_of_a_chat_is_shown_in_its_turn(built):
    desk = open_desk(built, "chats", str(built / "talk.json"))
    view = ask(desk, f"{STORE}/documents/{{document}}", store=0, document=1)
    at = view["first_token"] + view["view"]["texts"].index("w")
    found = ask(desk, f"{STORE}/blame", store=0, token=at)
    told = [found[key] for key in ("role", "turn", "text_before", "text", "text_after")]
    assert told == ["assistant", 1, "ans", "w", "er"]


def test_what_is_missing_is_said(built):
    with pytest.raises(OptionError, match="does not tell where that lies; say so with --input"):
        ask(open_desk(built, "pages"), f"{STORE}/blame", store=0, token=1)
    blind = open_desk(built, "pages", str(built / "*.jsonl"), tokenizer=False)
    with pytest.raises(OptionError, match="proved with its tokenizer: no tokenizer was named"):
        ask(blind, f"{STORE}/blame", store=0, token=1)


def test_the_documents_of_a_source_are_found(built):
    feeds = [
        Feed(source=open_source(str(built / f"{name}.jsonl"), field="body"), fill=fill)
        for name, fill in (("a", (("val", 500), ("train", None))), ("b", (("train", None),)))
    ]
    build_store(feeds, built / "both", tokenizer=OPENED, spec=BuildSpec(append_eot=True))
    desk = open_desk(built, "both")

    def found(source: str, split: str) -> list[str]:
        words = {"store": 0, "split": split, "kind": "source", "q": source}
        matches = ask(desk, f"{STORE}/search", **words)["matches"]
        return [match["snippet"][:1] for match in matches]

    in_val = len(found("a.jsonl", "val"))
    assert 0 < in_val < 30
    assert found("a.jsonl", "train") == ["a"] * (30 - in_val)
    assert found("b.jsonl", "train") == ["b"] * 30
    assert found("b.jsonl", "val") == []


def test_a_damaged_list_of_exclusions_hides_nothing_else(built):
    (built / "pages" / "exclude.json").write_text("garbage")
    facts = ask(open_desk(built, "pages"), STORE, store=0)
    assert facts["splits"][0]["documents"] == 60
    assert "exclude.json" in facts["exclusions"]["error"]


def test_an_exclusion_is_told_and_steps_are_those_of_a_loader_that_knows_it(built):
    desk = open_desk(built, "pages")

    def rows() -> list[list[int]]:
        found = ask(desk, "/step", store=0, step=1, batch_size=8, seq_len=32)
        return [row["view"]["ids"] for row in found["rows"]]

    before = rows()
    exclude_documents(built / "pages", range(20, 40), reason="a test")
    assert ask(desk, STORE, store=0)["exclusions"]["documents"] == 20
    loader = Loader(SampleStream([TokenSource(built / "pages", seq_len=32)]), batch_size=8)
    next(iter(loader))
    assert [row[:-1] for row in rows()] == next(iter(loader)).input_ids.tolist()
    assert rows() != before
