"""Which characters a token is: exact where a text comes back, a piece of a character has all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.testing.tokenizers import nasty_texts
from shardmill.tokenizers import ByteTokenizer
from shardmill.tokenizers.base import character_spans
from tests.tokenizers.conftest import HF_KINDS, KINDS

REPLACEMENT = "\ufffd"


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
@settings(deadline=None, max_examples=40)
@given(text=nasty_texts())
def test_the_spans_of_tokens_cover_the_text_in_order(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids, spans = tokenizer.encode(text), tokenizer.spans(text)
    assert spans.shape == (len(ids), 2)
    starts, stops = spans.T
    assert (starts >= 0).all()
    assert (starts <= stops).all()
    assert (stops <= len(text)).all()
    if not tokenizer.round_trips(text) or REPLACEMENT in text:
        return
    covered = np.zeros(len(text), bool)
    for number, (start, stop) in enumerate(spans.tolist()):
        covered[start:stop] = True
        decoded = tokenizer.decode(ids[: number + 1])
        assert text[:stop].startswith(decoded.rstrip(REPLACEMENT))
        assert stop - len(decoded.rstrip(REPLACEMENT)) == (REPLACEMENT in decoded)
    assert covered.all()


def test_a_token_inside_a_character_spans_all_of_it(tokenizers):
    text = "a\u7d20\U0001f98a"
    for kind in ("byte", "bpe", "unigram", "byte-bpe", "hf llama-like"):
        tokenizer = tokenizers[kind]
        found = {text[start:stop] for start, stop in tokenizer.spans(text).tolist()}
        assert found - {""} == {"a", "\u7d20", "\U0001f98a"}, kind


def test_an_added_prefix_has_no_characters(tokenizers):
    tokenizer = tokenizers["hf llama-like"]
    assert [tokenizer.spans(text).tolist() for text in ("", "ab")] == [[], [[0, 2]]]


@settings(deadline=None, max_examples=50)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    cuts=st.lists(st.integers(0, 36), max_size=6),
)
def test_bytes_become_characters(text, cuts):
    total = len(text.encode())
    sizes = np.diff([0, *sorted(min(cut, total) for cut in cuts), total]).tolist()
    of_bytes = ByteTokenizer().spans(text).tolist()
    found, at = character_spans(text, np.array(sizes, np.int64)).tolist(), 0
    for size, (start, stop) in zip(sizes, found, strict=True):
        mine = of_bytes[at : at + size]
        if mine:
            assert (start, stop) == (mine[0][0], mine[-1][1])
        else:
            assert start == stop
        at += size
