"""Every kind of tokenizer keeps the laws of `shardmill.testing.tokenizers`."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.records import Ragged
from shardmill.testing.tokenizers import (
    assert_text_is_never_structure,
    assert_tokenizer_laws,
    nasty_texts,
)
from shardmill.tokenizers.battery import short_texts
from tests.tokenizers.conftest import HF_KINDS, KINDS

SPECIALS = ["<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>", "</s>", "<s>", "[CLS]", "[SEP]", "x</s>"]


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
@settings(deadline=None, max_examples=25)
@given(texts=st.lists(nasty_texts(SPECIALS), min_size=1, max_size=5))
def test_every_kind_keeps_the_laws(
    tokenizers: dict[str, Tokenizer], kind: str, texts: list[str]
) -> None:
    assert_tokenizer_laws(tokenizers[kind], texts)


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
def test_the_laws_hold_on_the_short_battery(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    assert_tokenizer_laws(tokenizers[kind], short_texts())


@pytest.mark.parametrize("kind", [*KINDS[2:], "hf ignore_merges", "byte", "byte with specials"])
def test_these_kinds_promise_that_text_comes_back(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    assert tokenizers[kind].round_trips("any text")  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
def test_no_texts_give_no_sequences(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    empty = tokenizers[kind].encode_batch([])
    assert (len(empty), len(empty.values), empty.offsets.tolist()) == (0, 0, [0])
    assert len(tokenizers[kind].encode_batch([""])) == 1


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
def test_a_lone_surrogate_is_refused_by_number(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    with pytest.raises(TokenizerError, match="text 1 of 3: character 2 is the lone surrogate"):
        tokenizers[kind].encode_batch(["fine", "ab\ud800", "fine"])


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
def test_an_id_outside_the_vocabulary_is_never_decoded(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    for number in (tokenizer.vocab_size, -1):
        with pytest.raises(TokenizerError, match="another tokenizer"):
            tokenizer.decode([*tokenizer.encode("a"), number])


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
def test_a_pickled_tokenizer_is_the_same(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    again = pickle.loads(pickle.dumps(tokenizers[kind]))
    assert again.fingerprint == tokenizers[kind].fingerprint
    assert again.encode_batch(short_texts()) == tokenizers[kind].encode_batch(short_texts())


def test_kinds_have_different_fingerprints(tokenizers: dict[str, Tokenizer]) -> None:
    assert len({tokenizer.fingerprint for tokenizer in tokenizers.values()}) == len(tokenizers)


class Gullible:
    """A tokenizer that turns a special string into its id."""

    vocab_size = 257
    fingerprint = "0" * 64

    def encode(self, text: str) -> list[int]:
        head, found, tail = text.partition("<e>")
        return [*head.encode(), *([256] if found else []), *tail.encode()]

    def encode_batch(self, texts: list[str]) -> Ragged:
        return Ragged.from_sequences([self.encode(text) for text in texts])

    def decode(self, ids: list[int]) -> str:
        return "".join("<e>" if number == 256 else chr(number) for number in ids)

    def special_token_ids(self) -> dict[str, int]:
        return {"eot": 256}


def test_the_law_catches_a_tokenizer_that_takes_text_for_structure() -> None:
    with pytest.raises(AssertionError, match="became the special ids"):
        assert_text_is_never_structure(Gullible(), ["harmless"])  # type: ignore[arg-type]


def test_the_byte_tokenizer_gives_bytes_plus_offset() -> None:
    from shardmill.tokenizers import ByteTokenizer

    ids = ByteTokenizer(byte_offset=3).encode_batch(["A\u00e9", "", "~"])
    assert ids.values.tolist() == [68, 198, 172, 129]
    assert ids.offsets.tolist() == [0, 3, 3, 4]
    assert ids.values.dtype == np.uint16
    assert ByteTokenizer().encode_batch(["a"]).values.dtype == np.uint8
