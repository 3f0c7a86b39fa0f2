"""What blame refuses, and what it says of chats, of several feeds and of other tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardmill.building import BuildSpec, Feed, build_chats, build_store
from shardmill.chat import bind_template, known_template
from shardmill.errors import OptionError, SourceError
from shardmill.inspect.blame import Blame, blame_document, blame_token, blame_tokens
from shardmill.sources import JsonlSource, MemoryChats, MemorySource, TextSource, open_chats
from shardmill.store import open_store
from shardmill.store.layout import ORIGINS
from shardmill.tokenizers import ByteTokenizer, adapt_tokenizer

BYTES = ByteTokenizer(byte_offset=1, specials={"eot": "<e>"})
SPECIALS = {"sys": "<s>", "usr": "<u>", "asst": "<a>", "eot": "<e>"}


def write(path: Path, rows: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(source, out: Path, fill=(("train", None),), *, eot=True, tokenizer=BYTES) -> Path:
    spec = BuildSpec(append_eot=eot)
    build_store([Feed(source=source, fill=fill)], out, tokenizer=tokenizer, spec=spec, workers=1)
    return out


@pytest.fixture
def pages(tmp_path) -> Path:
    rows = [{"text": "first", "id": 7}, {"text": ""}, {"text": "caf\u00e9 \u7d20", "id": "b"}]
    write(tmp_path / "pages/a.jsonl", rows)
    return tmp_path / "pages"


def test_all_facts_of_a_token(pages, tmp_path):
    store = build(JsonlSource(pages), tmp_path / "store")
    token = blame_document(store, "train", 1).start + 4
    assert blame_token(store, "train", token, inputs=JsonlSource(pages), tokenizer=BYTES) == Blame(
        split="train",
        token=10,
        token_id=0xA9 + 1,
        document=1,
        offset=4,
        source="pages",
        file="a.jsonl",
        row=3,
        row_id="a.jsonl:3",
        own_id="b",
        kind="text",
        text="caf\u00e9 \u7d20",
        start=3,
        stop=4,
        found_by="origins",
    )


def test_the_end_that_a_build_appends_has_no_text(pages, tmp_path):
    store = build(JsonlSource(pages), tmp_path / "store")
    found = blame_token(store, "train", 5, inputs=JsonlSource(pages), tokenizer=BYTES)
    assert (found.kind, found.token_id, found.characters, found.start) == ("end", 0, "", None)


def test_the_input_may_lie_elsewhere_and_have_grown(pages, tmp_path):
    store = build(JsonlSource(pages), tmp_path / "store")
    pages.rename(tmp_path / "moved")
    write(tmp_path / "moved/0 before all.jsonl", [{"text": "new"}])
    found = blame_token(store, "train", 0, inputs=JsonlSource(tmp_path / "moved"), tokenizer=BYTES)
    assert (found.row_id, found.text) == ("a.jsonl:1", "first")


def test_other_input_is_refused_by_name(pages, tmp_path):
    store = build(JsonlSource(pages), tmp_path / "store")
    cases = [
        (None, OptionError, r"built from 'pages' \(jsonl: 'a.jsonl' .*, and does not record where"),
        ([JsonlSource(pages)] * 2, OptionError, "2 inputs, but the store was built from 1"),
        (JsonlSource(pages, field="id"), SourceError, "was read as .*'field': 'text'"),
        (MemorySource(["first"]), SourceError, "not what the store was built from"),
    ]
    for inputs, error, match in cases:
        with pytest.raises(error, match=match):
            blame_token(store, "train", 0, inputs=inputs, tokenizer=BYTES)
    write(pages / "a.jsonl", [{"text": "other"}])
    with pytest.raises(SourceError, match=r"a\.jsonl: changed since the store was built from it"):
        blame_token(store, "train", 0, inputs=JsonlSource(pages), tokenizer=BYTES)


def test_other_chats_are_refused_by_the_name_of_their_file(tmp_path):
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    tokenizer = ByteTokenizer(byte_offset=4, specials=SPECIALS)
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / "chats" / name, [chat])
    build_chats(
        open_chats(tmp_path / "chats"),
        tmp_path / "store",
        template=bind_template(known_template("four-marker"), tokenizer),
        tokenizer=tokenizer,
        spec=BuildSpec(),
    )
    write(tmp_path / "chats/b.jsonl", [chat, chat])
    with pytest.raises(SourceError, match=r"b\.jsonl: bytes \d+ -> \d+"):
        blame_token(
            tmp_path / "store",
            "train",
            0,
            inputs=open_chats(tmp_path / "chats"),
            tokenizer=tokenizer,
        )


def test_what_is_not_there_is_refused(pages, tmp_path):
    store, source = build(JsonlSource(pages), tmp_path / "store"), JsonlSource(pages)
    for token in (-1, open_store(store).num_tokens("train")):
        with pytest.raises(OptionError, match="split 'train' has 16 tokens"):
            blame_token(store, "train", token, inputs=source, tokenizer=BYTES)
    with pytest.raises(OptionError, match="not the tokenizer of this store"):
        blame_token(store, "train", 0, inputs=source, tokenizer=ByteTokenizer(byte_offset=2))
    with pytest.raises(OptionError, match="document 9: split 'train' has 2"):
        blame_document(store, "train", 9)


class Shouting(ByteTokenizer):
    """Of the same name, and other ids."""

    def encode_batch(self, texts):
        return super().encode_batch([text.upper() for text in texts])


def test_other_tokens_are_an_error_and_never_an_answer(pages, tmp_path):
    store = build(JsonlSource(pages), tmp_path / "store")
    with pytest.raises(SourceError, match="document 0 of split 'train' holds other tokens"):
        blame_token(store, "train", 0, inputs=JsonlSource(pages), tokenizer=Shouting(byte_offset=1))


def test_every_feed_leads_to_its_own_source(pages, tmp_path, monkeypatch):
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 30)
    (tmp_path / "notes.txt").write_text("first\nsecond note\nthird\n")
    sources = [JsonlSource(pages), TextSource(tmp_path / "notes.txt", split="line")]
    fill = (("val", 9), ("train", None))
    feeds = [Feed(source=source, fill=fill) for source in sources]
    build_store(feeds, tmp_path / "s", tokenizer=BYTES, spec=BuildSpec(), workers=1)
    how = {"inputs": sources, "tokenizer": BYTES}
    told = {
        split: dict.fromkeys(
            (one.source, one.row_id)
            for one in blame_tokens(
                tmp_path / "s", split, range(open_store(tmp_path / "s").num_tokens(split)), **how
            )
        )
        for split in ("train", "val")
    }
    assert {split: list(rows) for split, rows in told.items()} == {
        "val": [
            ("pages", "a.jsonl:1"),
            ("pages", "a.jsonl:3"),
            ("notes.txt", "notes.txt:1"),
            ("notes.txt", "notes.txt:2"),
        ],
        "train": [("notes.txt", "notes.txt:3")],
    }
    (tmp_path / "s" / ORIGINS).unlink()
    with pytest.raises(OptionError, match="built from 2 sources and has no table of origins"):
        blame_token(tmp_path / "s", "train", 0, **how)


def test_input_that_is_cut_otherwise_is_counted(pages, tmp_path, monkeypatch):
    store = build(JsonlSource(pages), tmp_path / "store", (("val", 6), ("train", None)))
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 10)
    found = blame_token(store, "train", 3, inputs=JsonlSource(pages), tokenizer=BYTES)
    assert (found.row_id, found.characters, found.found_by) == ("a.jsonl:3", "\u00e9", "counting")


def test_rows_of_sources_in_memory_are_numbered(tmp_path):
    source = MemorySource(["a", "", "bc"], name="mine")
    store = build(source, tmp_path / "store")
    found = blame_token(store, "train", 3, inputs=source, tokenizer=BYTES)
    assert (found.row_id, found.file, found.row) == ("mine: document 2", None, 2)
    with pytest.raises(OptionError, match="does not record where that is"):
        blame_token(store, "train", 3, tokenizer=BYTES)


def test_equal_texts_that_leave_the_order_of_splits_open_are_refused(tmp_path):
    source = MemorySource(["a", "a"], name="mine")
    store = build(source, tmp_path / "store", (("val", 2), ("train", None)))
    with pytest.raises(OptionError, match="order train,val or val,train: say which"):
        blame_token(store, "train", 0, inputs=source, tokenizer=BYTES)
    for fill, row in ((("val", "train"), 1), (("train", "val"), 0)):
        found = blame_token(store, "train", 0, inputs=source, tokenizer=BYTES, fill=fill)
        assert found.row == row
    with pytest.raises(OptionError, match="wanted each of"):
        blame_token(store, "train", 0, inputs=source, tokenizer=BYTES, fill=["val"])


class Own:
    """Someone's tokenizer: two characters per token, and without `spans`."""

    vocab_size = 2**16

    def encode(self, text: str) -> list[int]:
        return [(ord(a) % 256) * 256 + ord(b) % 256 for a, b in self._pairs(text)]

    def decode(self, ids) -> str:
        return "".join(chr(one // 256) + chr(one % 256) for one in ids).replace("\0", "")

    @staticmethod
    def _pairs(text: str):
        padded = text + "\0" * (len(text) % 2)
        return zip(padded[::2], padded[1::2], strict=True)


def test_a_tokenizer_of_a_user_is_asked_to_decode(tmp_path):
    tokenizer = adapt_tokenizer(Own())
    source = MemorySource(["hello"], name="mine")
    store = build(source, tmp_path / "store", eot=False, tokenizer=tokenizer)
    found = blame_tokens(store, "train", range(3), inputs=source, tokenizer=tokenizer)
    assert [one.characters for one in found] == ["he", "ll", "o"]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


CHATS = [
    [said("user", "hi"), said("assistant", " caf\u00e9 ")],
    [said("user", "nobody answers")],  # the template drops it
    [said("system", "be kind"), said("user", "one"), said("assistant", "1")],
]


@pytest.mark.parametrize("name", ["four-marker", "gemma"])
def test_tokens_of_a_conversation_are_found_turn_by_turn(tmp_path, name):
    markers = {"start": "<start_of_turn>", "end": "<end_of_turn>", "bos": "<bos>"}
    specials = SPECIALS if name == "four-marker" else markers
    tokenizer = ByteTokenizer(byte_offset=4, specials=specials)
    write(tmp_path / "c.jsonl", [{"messages": messages} for messages in CHATS])
    build_chats(
        open_chats(tmp_path / "c.jsonl"),
        tmp_path / "s",
        template=bind_template(known_template(name), tokenizer),
        tokenizer=tokenizer,
        spec=BuildSpec(),
        max_loss=0.5,
    )
    source, total = open_chats(tmp_path / "c.jsonl"), open_store(tmp_path / "s").num_tokens("train")
    found = blame_tokens(tmp_path / "s", "train", range(total), inputs=source, tokenizer=tokenizer)
    words: dict[tuple[object, ...], list[object]] = {}
    for one in found:
        if one.kind == "text":
            words.setdefault((one.row_id, one.turn, one.role, one.text), []).append(one.characters)
        else:
            assert (one.kind, one.start) == ("template", None)
    trimmed = name == "gemma"
    answer = "caf\u00e9\u00e9" if trimmed else " caf\u00e9\u00e9 "  # a character of two bytes
    first = {
        ("c.jsonl:1", 0, "user", "hi"): list("hi"),
        ("c.jsonl:1", 1, "assistant", " caf\u00e9 "): list(answer),
    }
    if trimmed:  # the system message is folded into the user's turn
        folded = "be kind\n\none"
        last = {("c.jsonl:3", 0, "user", folded): list(folded)}
        last[("c.jsonl:3", 1, "assistant", "1")] = ["1"]
    else:
        last = {
            ("c.jsonl:3", turn, message["role"], message["content"]): list(message["content"])
            for turn, message in enumerate(CHATS[2])
        }
    assert words == {**first, **last}
    assert {one.file for one in found} == {"c.jsonl"}
    assert {one.row for one in found} == {1, 3}


def test_conversations_of_both_splits_are_found(tmp_path):
    tokenizer = ByteTokenizer(byte_offset=4, specials=SPECIALS)
    chats = [[said("user", f"q{number}"), said("assistant", f"a{number}")] for number in range(40)]
    source = MemoryChats(chats, name="mine")
    build_chats(
        source,
        tmp_path / "s",
        template=bind_template(known_template("four-marker"), tokenizer),
        tokenizer=tokenizer,
        spec=BuildSpec(seed=3),
        val_fraction=0.3,
    )
    rows = []
    for split in ("train", "val"):
        for number in range(open_store(tmp_path / "s").num_documents(split)):
            token = blame_document(tmp_path / "s", split, number).start + 1
            found = blame_token(tmp_path / "s", split, token, inputs=source, tokenizer=tokenizer)
            assert found.text == f"q{found.row_id.removeprefix('mine:')}"
            rows.append(found.row_id)
    assert sorted(rows) == sorted(f"mine:{number}" for number in range(40))
