"""`shardmill show`: what is trained can be seen, and nothing in the data can touch the terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_chats, build_store
from shardmill.chat import bind_template, known_template
from shardmill.cli import main
from shardmill.cli.printing import Heading, ShownTokens, Span, bracketed
from shardmill.cli.terminal import visible
from shardmill.records import Conversation
from shardmill.sources import MemoryChats, MemorySource
from shardmill.tokenizers import open_tokenizer
from tests.cli.test_build_chats import SPECIALS, TOKENIZER, call  # noqa: F401

OPENED = open_tokenizer("byte:4", specials=SPECIALS)
EVIL = "\x1b[31mred\x1b]0;title\x07\r\x9b2J\u200b\u202eabc\x00"


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three conversations in `s`, two documents in `d`."""
    place = tmp_path_factory.mktemp("show")
    chats = [
        [said("system", "be\nkind"), said("user", "hi"), said("assistant", "hello [[you]]")],
        [said("user", EVIL), said("assistant", EVIL)],
        [said("user", "one"), said("assistant", "1"), said("user", "two"), said("assistant", "22")],
    ]
    build_chats(
        MemoryChats([Conversation(messages=messages) for messages in chats]),
        place / "s",
        template=bind_template(known_template("four-marker"), OPENED),
        tokenizer=OPENED,
        spec=BuildSpec(),
    )
    feed = Feed(source=MemorySource(["a text", "other"]), fill=(("train", None),))
    build_store([feed], place / "d", tokenizer=OPENED, spec=BuildSpec(append_eot=True))
    return place


@pytest.fixture
def show(call, folder, monkeypatch):  # noqa: F811
    monkeypatch.chdir(folder)
    return lambda *arguments: call("show", *arguments)


def test_a_conversation_is_shown_turn_by_turn_with_what_is_trained_in_brackets(show):
    code, out, err = show("s", "--example", "0", *TOKENIZER)
    assert (code, err) == (0, "")
    assert out == (
        "-- s, split 'train', example 0: 3 turns, 28 tokens, 14 trained\n"
        "-- turn 0: system, tokens 0..9, 0 trained\n"
        "<|s|>be\\n\nkind<|e|>\n"
        "-- turn 1: user, tokens 9..13, 0 trained\n"
        "<|u|>hi<|e|>\n"
        "-- turn 2: assistant, tokens 13..28, 14 trained\n"
        "<|a|>[[hello [\\[you]\\]<|e|>]]\n"
    )


def test_colours_are_for_terminals(show, monkeypatch):
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "CI", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "argv", ["shardmill", "show", "s", "--example", "0", *TOKENIZER])
    with pytest.raises(SystemExit):
        main()
    out = screen.getvalue()
    assert "\x1b[32mhello [[you]]\x1b[0m" in out  # trained: green
    assert "\x1b[1;32m<|e|>\x1b[0m" in out  # a trained end: green and bold
    assert "\x1b[90mhi\x1b[0m" in out  # masked: grey
    assert "\x1b[1;90m<|u|>\x1b[0m" in out  # structure: bold
    monkeypatch.setenv("NO_COLOR", "1")
    screen.truncate(0)
    with pytest.raises(SystemExit):
        main()
    assert "[[hello [\\[you]\\]<|e|>]]" in screen.getvalue()


def test_nothing_in_the_data_reaches_the_terminal_unseen(show):
    code, out, _ = show("s", "--example", "1", *TOKENIZER)
    assert code == 0
    assert all(character.isprintable() or character == "\n" for character in out)
    assert "\\x1b[31mred\\x1b]0;title\\x07\\r\\x9b2J\\u200b\\u202eabc\\x00" in out


@pytest.mark.slow
@given(st.text())
def test_every_character_is_visible_and_visible_ones_stay(text: str) -> None:
    shown = visible(text)
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert shown.count("\n") == text.count("\n")
    if text.isprintable():
        assert shown == text


def test_the_row_that_training_gets_is_shown(show):
    # 22 tokens: usr o n e eot asst 1 eot usr t w o eot asst 2 2 eot = 17
    code, out, _ = show("s", "--example", "2", "--seq-len", "9", *TOKENIZER)
    assert code == 0
    assert out == (
        "-- s, split 'train', example 2: 4 turns, 17 tokens, 5 trained\n"
        "-- turn 0: user, tokens 0..5, 0 trained\n"
        "-- ... 5 tokens left out\n"
        "-- turn 1: assistant, tokens 5..8, 0 trained\n"
        "-- ... 3 tokens left out\n"
        "-- turn 2: user, tokens 8..13, 0 trained\n"
        "<|u|>two<|e|>\n"
        "-- turn 3: assistant, tokens 13..17, 3 trained\n"
        "<|a|>[[22<|e|>]]\n"
        "-- row of 10 tokens: 9 of the example, 8 left out, 1 padding\n"
    )
    _, out, _ = show("s", "--example", "2", "--seq-len", "9", "--fit", "drop", *TOKENIZER)
    assert "no row at seq_len 9: too_long: the example is longer than a row" in out


def test_a_document_is_shown_too(show):
    code, out, _ = show("d", "--example", "0", *TOKENIZER)
    assert (code, out) == (
        0,
        "-- d, split 'train', document 0: 7 tokens\na text<|e|>\n",
    )
    code, _, err = show("d", "--example", "0", "--seq-len", "4", *TOKENIZER)
    assert code == 2
    assert "holds documents" in err


def test_without_a_tokenizer_ids_are_shown(show):
    code, out, err = show("s", "--example", "2")
    assert code == 0
    assert "ids are shown" in err
    assert out.endswith("2 [[54 54 3 ]]\n")


def test_facts_as_json_are_exact(show):
    code, out, _ = show("s", "--example", "1", "--json", *TOKENIZER)
    facts = json.loads(out)
    assert (code, out.isascii()) == (0, True)
    assert facts["text"] == f"<|u|>{EVIL}<|e|><|a|>{EVIL}<|e|>"
    assert [turn["role"] for turn in facts["turns"]] == ["user", "assistant"]
    assert facts["turns"][1]["text"] == f"<|a|>{EVIL}<|e|>"
    trained = np.array(facts["ids"])[np.array(facts["mask"], bool)]
    assert OPENED.decode(trained) == f"{EVIL}<|e|>"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["s", "--example", "-1"], "--example -1: split 'train' has 3; wanted 0 to 2"),
        (["s", "--example", "3"], "--example 3: split 'train' has 3; wanted 0 to 2"),
        (["s", "--example", "x"], "--example: wanted a whole number"),
        (["s", "--example", "1.5"], "--example: wanted a whole number"),
        (["s", "--example", "0", "--split", "test"], "no split 'test'"),
        (["s", "--example", "0", "--seq-len", "0"], "--seq-len 0: wanted at least 1"),
        (["s", "--example", "0", "--fit", "cut"], "--fit cut: wanted one of drop-oldest-turns,"),
        (["s", "--example", "0", "--max-tokens", "-1"], "--max-tokens"),
        (["no", "--example", "0"], "no such folder"),
        (["s", "--example", "0", "--tokenizer", "byte"], "not the tokenizer of this store"),
        (["s", "--example", "0", "--tokenizer", "no.model"], "no such file"),
    ],
)
def test_a_mistake_in_the_call_is_one_clear_message(show, arguments, wanted):
    code, out, err = show(*arguments)
    assert (code, out, "Traceback" in err) == (2, "", False)
    assert wanted in re.sub(r"\s+", " ", err)


def test_a_long_example_is_cut_where_it_is_shown(show):
    _, out, _ = show("s", "--example", "2", "--max-tokens", "6", *TOKENIZER)
    assert "<|u|>one<|e|>\n" in out
    assert "<|a|>\n-- ... 2 tokens left out\n" in out


def test_brackets_open_and_close_once_around_neighbours():
    pieces = [
        Span(text="a", trained=True, marker=False),
        Span(text="E", trained=True, marker=True),
        Heading("turn"),
        Span(text="b", trained=False, marker=False),
        Span(text="c", trained=True, marker=False),
    ]
    assert "".join(piece.text for piece in bracketed(pieces)) == "[[aE]]turnb[[c]]"


def test_every_marker_is_one_span_and_every_token_is_in_one_span():
    ids = np.array([1, 1, 5, 6, 1, 7])
    mask = np.array([0, 0, 0, 1, 1, 1], bool)
    kept, markers = np.ones(6, bool), np.array([1])
    shown = ShownTokens(ids, mask, kept, markers, lambda part: str(part.tolist()))
    found = shown.spans(0, 6)
    assert [(s.text, s.trained, s.marker) for s in found] == [
        ("[1]", False, True),
        ("[1]", False, True),
        ("[5]", False, False),
        ("[6]", True, False),
        ("[1]", True, True),
        ("[7]", True, False),
    ]
