"""What each token adds to the text: nothing is lost, nothing is twice, whatever the tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.inspect.tokens import (
    LEAD,
    MOST_CHARACTERS,
    MOST_TEXT,
    TAIL,
    Reading,
    TokenTexts,
    common,
    shown,
)
from shardmill.testing.tokenizers import nasty_texts
from shardmill.tokenizers import ByteTokenizer
from tests.tokenizers.conftest import HF_KINDS, KINDS, tokenizers, trained  # noqa: F401

TEXT = (
    "  The quick\tbrown fox\n\n \U0001f468\u200d\U0001f469\u200d\U0001f467 \u00fcber "
    "\u7d20\u65e9\u3044\u72d0 caf\u00e9 \U0001f600\U0001f600 end "
)


@pytest.fixture(scope="module")
def words(tokenizers):  # noqa: F811
    return {kind: TokenTexts(tokenizer) for kind, tokenizer in tokenizers.items()}


def reading(words: TokenTexts | None) -> Reading:
    why = None if words else "no tokenizer"
    return Reading(texts=words, why=why, markers=np.array([7], np.int64))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
@given(text=nasty_texts(["<|eot|>", "</s>"]), data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_texts_of_all_tokens_join_to_the_decoded_text(words, kind, text, data):
    own = words[kind]
    ids = own.tokenizer.encode(text)
    specials = sorted(own.tokenizer.special_token_ids().values())
    for number in data.draw(st.lists(st.sampled_from(specials), max_size=2)) if specials else ():
        ids.insert(data.draw(st.integers(0, len(ids))), number)
    array = np.array(ids, np.int64)
    texts = own.texts(array)
    assert len(texts) == len(ids)
    assert "".join(texts) == own.decode(array)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte", "unigram", "bpe", "byte-bpe", "hf llama-like"])
@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_ids_that_are_no_valid_text_join_too(words, kind, data):
    own = words[kind]
    size = own.tokenizer.vocab_size
    known = st.integers(0, size - 1) | st.integers(0, min(size, 260) - 1)
    array = np.array(data.draw(st.lists(known, max_size=60)), np.int64)
    assert "".join(own.texts(array)) == own.decode(array)


@pytest.mark.parametrize("kind", ["byte", "unigram", "bpe", "byte-bpe"])
@pytest.mark.parametrize("size", [1, 5, 64])
def test_pages_of_a_document_join_to_its_text(words, kind, size):
    own = words[kind]
    ids = np.array(own.tokenizer.encode(TEXT * 4), np.int64)
    parts = []
    for start in range(0, len(ids), size):
        stop = min(start + size, len(ids))
        lead, tail = max(0, start - LEAD), min(len(ids), stop + TAIL)
        view = shown(ids[lead:tail], (start - lead, stop - lead), reading(own), at=lead)
        assert (view["start"], view["stop"], view["ids"]) == (start, stop, ids[start:stop].tolist())
        parts += view["texts"]
    assert "".join(parts) == own.decode(ids)
    assert parts == own.texts(ids)


def test_a_character_comes_with_its_last_token_and_a_broken_one_with_its_first():
    own = TokenTexts(ByteTokenizer())
    ids = np.frombuffer("a\U0001f600".encode() + b"\xff\xe2\x82b\xf0\x9f", np.uint8)
    assert own.texts(ids.astype(np.int64)) == [
        *("a", "", "", "", "\U0001f600"),
        *("\ufffd", "\ufffd", "", "b", "\ufffd", ""),
    ]


def test_where_a_run_is_read_as_a_whole_every_token_has_its_part_of_it(words):
    """This decoder gives a broken character for every byte of a run that is not all valid."""
    own = words["hf llama-like"]
    run = "\U0001f600".encode() * 10 + b"\xff"
    ids = np.frombuffer(run, np.uint8).astype(np.int64) + 3
    assert own.decode(ids) == "\ufffd" * 41
    texts = own.texts(ids)
    assert "".join(texts) == "\ufffd" * 41
    # four bytes still could be a character, so the fourth may add nothing, and the next one two
    assert {len(text) for text in texts} <= {0, 1, 2}
    assert own.texts(ids[:40]) == ["", "", "", "\U0001f600"] * 10


@given(data=st.binary(max_size=120))
@settings(deadline=None)
def test_nothing_is_lost_when_no_prefix_may_be_decoded(words, data):
    own = words["hf llama-like"]
    ids = np.frombuffer("\U0001f600".encode() * 8 + data, np.uint8).astype(np.int64) + 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.inspect.tokens._MOST_PREFIXES", 0)
        assert "".join(own.texts(ids)) == own.decode(ids)


def test_a_token_of_words_has_its_leading_space(words):
    own = words["byte-bpe"]
    ids = np.array(own.tokenizer.encode("the fox the fox"), np.int64)
    texts = own.texts(ids)
    assert "".join(texts) == "the fox the fox"
    assert any(text.startswith(" ") for text in texts[1:])


class Counting(ByteTokenizer):
    """Counts what it decodes."""

    decoded = 0

    def decode(self, ids):
        self.decoded += len(ids)
        return super().decode(ids)


@pytest.mark.parametrize("text", ["plain words ", "\U0001f600", "\u00e9", "\x80"])
def test_work_grows_with_the_tokens_not_with_their_square(text):
    own = TokenTexts(tokenizer := Counting())
    raw = text.encode() if text != "\x80" else b"\x80"  # nothing but broken characters
    ids = np.frombuffer(raw * (8000 // len(raw)), np.uint8).astype(np.int64)
    assert "".join(own.texts(ids)) == own.decode(ids)
    assert tokenizer.decoded < 40 * len(ids)


def test_texts_of_one_row_are_decoded_apart_at_its_edges():
    own = TokenTexts(ByteTokenizer())
    emoji = "\U0001f600".encode()
    ids = np.frombuffer(b"a" + emoji[:2] + emoji[2:] + b"b", np.uint8).astype(np.int64)
    view = shown(ids, (0, len(ids)), reading(own), edges=[3])
    assert view["texts"] == ["a", "\ufffd", "", "\ufffd", "\ufffd", "b"]


def test_a_token_of_ten_megabytes_is_cut_and_ends_the_view():
    huge = "<|" + "x" * 10_000_000 + "|>"
    own = TokenTexts(ByteTokenizer(byte_offset=1, specials={"huge": huge}))
    number = own.tokenizer.special_token_ids()["huge"]
    first = own.tokenizer.encode("a")[0]
    ids = np.array([first, *[number] * 50, first], np.int64)
    assert own.fitting(ids) == 1
    view = shown(ids, (0, len(ids)), reading(own))
    assert (view["texts"], view["stop"], view["cut"]) == (["a"], 1, [])
    view = shown(ids, (1, len(ids)), reading(own))
    assert (view["start"], view["stop"], view["cut"]) == (1, 2, [0])
    assert view["texts"] == [huge[:MOST_TEXT]]
    assert len(huge) > MOST_CHARACTERS


def test_without_a_tokenizer_ids_are_shown_and_it_is_said():
    ids = np.array([5, 7, 70_000], np.int64)
    view = shown(ids, (1, 3), reading(None))
    assert (view["texts"], view["marker"], view["note"]) == (["7", "70000"], [1, 0], "no tokenizer")


def test_ids_that_the_tokenizer_does_not_have_are_shown_as_they_are():
    ids = np.array([65, 300], np.int64)
    view = shown(ids, (0, 2), reading(TokenTexts(ByteTokenizer())))
    assert view["texts"] == ["65", "300"]
    assert "id 300 is not in the vocabulary" in view["note"]


@given(a=st.text("ab\ufffd", max_size=9), b=st.text("ab\ufffd", max_size=9))
def test_common_counts_equal_characters_at_the_front(a, b):
    count = common(a, b)
    assert a[:count] == b[:count]
    assert count == min(len(a), len(b)) or a[count] != b[count]
