"""Openings that are encoded once: the ids are those of the whole text, whatever follows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardmill.chat.jinja.openings import Openings
from shardmill.records import Ragged
from tests.chat.jinja_kit import make_tokenizer


def trained(pattern: str, *, normalizer: object = None, added: str = "") -> PreTrainedTokenizerFast:
    """A byte-level BPE that splits at `pattern`, trained on lines that begin with "user"; without a
    pattern as GPT-2 does, with a blank before the first word."""
    model = Tokenizer(models.BPE())
    model.normalizer = normalizer
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    last = pre_tokenizers.ByteLevel(add_prefix_space=not pattern, use_regex=not pattern)
    model.pre_tokenizer = pre_tokenizers.Sequence([*parts, last])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(["user\nthe mill", "user\n7 mills", "user\nMill"] * 40, trainer)
    if added:
        model.add_tokens([AddedToken(added, lstrip=True)])
    return PreTrainedTokenizerFast(tokenizer_object=model)


APART = r"\s|[a-z]+|[A-Z0-9]+"
TOKENIZERS: dict[str, tuple[Callable[[], PreTrainedTokenizerFast], bool]] = {
    "as since GPT-4": (make_tokenizer, True),
    "as GPT-2": (lambda: make_tokenizer(newlines_apart=False), True),
    "each blank by itself": (lambda: trained(APART), True),
    "a token over the end of a line": (lambda: trained(" "), False),
    "a line is split by what follows it": (lambda: trained(rf"user\n(?=M)|{APART}"), False),
    "a blank before the first word": (lambda: trained(""), False),
    "a normaliser": (lambda: trained(APART, normalizer=normalizers.NFKC()), False),
    "an added token that takes the line's end": (lambda: trained(APART, added="the"), False),
}


class Recorder:
    """Encodes with a tokenizer, and remembers what."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.texts = tokenizer, list[str]()

    def encode(self, texts: Sequence[str]) -> Ragged:
        self.texts = list(texts)
        found = self.tokenizer(self.texts, add_special_tokens=False)["input_ids"] if texts else []
        return Ragged.from_sequences(found)


@functools.cache
def openings_of(name: str) -> tuple[Openings, Recorder]:
    recorder = Recorder(TOKENIZERS[name][0]())
    openings = Openings(recorder.encode, recorder.tokenizer)
    for opening in ("user\n", "user", "\n\n", "", "a: ", "user\nmodel\n"):
        openings.add(opening)
    return openings, recorder


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_opening_is_encoded_once_where_nothing_can_join_it(name: str) -> None:
    openings, recorder = openings_of(name)
    openings.encode_batch(["user\nx", "user\n x"])
    assert recorder.texts == ["x" if TOKENIZERS[name][1] else "user\nx", "user\n x"]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=50)
@given(data=st.data())
def test_openings_that_are_encoded_once_leave_the_ids(name: str, data: st.DataObject) -> None:
    openings, recorder = openings_of(name)
    words = st.sampled_from(["user", "\n", "model", " ", "the", "7", "'s", "Mill", ".", "\u0301"])
    texts = data.draw(st.lists(st.lists(words).map("".join)))
    assert openings.encode_batch(texts) == recorder.encode(texts)
