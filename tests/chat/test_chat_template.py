"""Conversations to ids, and what is refused on the way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.chat import (
    REASONS,
    TokenTemplate,
    assistant_mask,
    reason_to_drop,
    render,
    render_sound,
    sift,
    special_in_text,
)
from shardmill.errors import OptionError, TokenizerError
from shardmill.protocols import Texts
from shardmill.records import Drop, Ragged

TEMPLATE = TokenTemplate(openings={"system": 1, "user": 2, "assistant": 3}, end_id=4)


class ByteEncoder:
    """Bytes from 10 up; counts its calls. Text with "!" cheats: it becomes the end id."""

    def __init__(self) -> None:
        self.calls = 0

    def encode_batch(self, texts: Texts) -> Ragged:
        self.calls += 1
        return Ragged.from_sequences(
            [[4 if b == ord("!") else b + 10 for b in str(text).encode()] for text in texts]
        )


def text_of(ids: np.ndarray) -> str:
    marks = {1: "<sys>", 2: "<usr>", 3: "<asst>", 4: "<end>"}
    return "".join(marks.get(i) or chr(i - 10) for i in ids.tolist())


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


words = st.text(alphabet="abc \n", max_size=6)
chats = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), words), max_size=5)


def test_a_batch_of_conversations_is_one_call_of_the_encoder() -> None:
    encoder = ByteEncoder()
    rendered = render(
        [
            chat(("system", "s"), ("user", "hi"), ("assistant", "yo")),
            chat(("user", ""), ("assistant", "b")),
        ],
        TEMPLATE,
        encoder,
    )
    assert [text_of(ids) for ids in rendered] == [
        "<sys>s<end><usr>hi<end><asst>yo<end>",
        "<usr><end><asst>b<end>",
    ]
    assert encoder.calls == 1


@settings(deadline=None, max_examples=100)
@given(batch=st.lists(chats, max_size=5))
def test_the_trained_tokens_are_what_the_assistant_said_and_its_end(
    batch: list[list[tuple[str, str]]],
) -> None:
    rendered = render([chat(*turns) for turns in batch], TEMPLATE, ByteEncoder())
    assert len(rendered) == len(batch)
    for ids, turns in zip(rendered, batch, strict=True):
        mask = assistant_mask(ids, open_id=3, end_id=4)
        said = "".join(f"{content}<end>" for role, content in turns if role == "assistant")
        assert text_of(ids[mask]) == said


def test_ids_keep_their_dtype_unless_a_marker_is_wider() -> None:
    class Narrow:
        def encode_batch(self, texts: Texts) -> Ragged:
            return Ragged.from_sequences([[5]] * len(texts), np.uint8)

    wide = TokenTemplate(openings={"system": 1, "user": 2, "assistant": 70_000}, end_id=4)
    turns = [chat(("assistant", "x"))]
    assert render(turns, TEMPLATE, Narrow()).values.dtype == np.uint8
    assert render(turns, wide, Narrow()).values.tolist() == [70_000, 5, 4]


def test_text_that_becomes_a_marker_is_an_error_or_a_named_loss() -> None:
    batch = [
        chat(("user", "a"), ("assistant", "b")),
        chat(("user", "a"), ("assistant", "b!")),
        chat(("assistant", "c")),
    ]
    with pytest.raises(TokenizerError, match="conversation 1"):
        render(batch, TEMPLATE, ByteEncoder())
    rendered, kept = render_sound(batch, TEMPLATE, ByteEncoder())
    assert kept.tolist() == [0, 2]
    assert [text_of(ids) for ids in rendered] == ["<usr>a<end><asst>b<end>", "<asst>c<end>"]


def test_special_in_text_finds_the_texts_and_skips_empty_ones() -> None:
    texts = Ragged.from_sequences([[], [5, 1], [], [6], [2, 2], []])
    assert special_in_text(texts, [1, 2]).tolist() == [1, 4]


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        (chat(("user", "a"), ("assistant", "b")), None),
        ((*chat(("assistant", "")),), None),
        ("text", "not_a_list"),
        (None, "not_a_list"),
        (iter([]), "not_a_list"),
        ([], "no_messages"),
        (["hello"], "bad_message"),
        ([{"role": "user"}], "bad_message"),
        (chat(("tool", "a")), "unknown_role"),
        ([{"role": ["user"], "content": "a"}], "unknown_role"),
        ([{"role": "assistant", "content": None}], "content_not_text"),
        (chat(("assistant", "caf\u00e9 \ud800")), "invalid_unicode"),
        (chat(("system", "s"), ("user", "a")), "no_assistant"),
    ],
)
def test_a_conversation_that_cannot_be_trained_has_a_reason(
    conversation: object, reason: str | None
) -> None:
    assert reason_to_drop(conversation) == reason
    assert reason is None or reason in REASONS


def test_sift_keeps_positions_and_names_the_drops() -> None:
    good, kept, drops = sift(
        [("a:1", []), ("a:2", chat(("assistant", "x"))), ("a:3", chat(("user", "x")))]
    )
    assert good == [chat(("assistant", "x"))]
    assert kept.tolist() == [1]
    assert drops == (Drop(id="a:1", reason="no_messages"), Drop(id="a:3", reason="no_assistant"))


def test_a_template_needs_every_role_once_and_different_ids() -> None:
    with pytest.raises(OptionError, match="system"):
        TokenTemplate(openings={"user": 1, "assistant": 2}, end_id=3)
    with pytest.raises(OptionError, match="different ids"):
        TokenTemplate(openings={"system": 1, "user": 2, "assistant": 3}, end_id=3)
