"""Every kind of tokenizer keeps the guarantees of `shardmill.testing.tokenizers`."""

from __future__ import annotations

from pathlib import Path

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
from shardmill.tokenizers import ByteTokenizer, adapt_tokenizer, open_tokenizer
from shardmill.tokenizers.battery import short_texts
from tests.tokenizers.conftest import HF_KINDS, KINDS

SPECIALS = ["<|sys|>", "<|usr|>", "<|asst|>", "<|eot|>", "</s>", "<s>", "[CLS]", "[SEP]", "x</s>"]


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
@settings(deadline=None, max_examples=25)
@given(texts=st.lists(nasty_texts(SPECIALS), min_size=1, max_size=5))
def test_every_kind_keeps_the_guarantees(
    tokenizers: dict[str, Tokenizer], kind: str, texts: list[str]
) -> None:
    assert_tokenizer_laws(tokenizers[kind], texts)


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
def test_the_guarantees_hold_on_the_short_battery(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    assert_tokenizer_laws(tokenizers[kind], short_texts())


def test_these_kinds_round_trip_exactly(tokenizers: dict[str, Tokenizer]) -> None:
    for kind in [*KINDS, "hf ignore_merges"]:
        assert tokenizers[kind].round_trips("any text")  # type: ignore[attr-defined]


def test_no_texts_give_no_sequences(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        empty = tokenizer.encode_batch([])
        assert (len(empty), len(empty.values), empty.offsets.tolist()) == (0, 0, [0])
        assert len(tokenizer.encode_batch([""])) == 1


def test_a_lone_surrogate_is_refused_by_number(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        with pytest.raises(TokenizerError, match="text 1 of 3: character 2 is the lone surrogate"):
            tokenizer.encode_batch(["fine", "ab\ud800", "fine"])


def test_an_id_outside_the_vocabulary_is_never_decoded(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        for number in (tokenizer.vocab_size, -1):
            with pytest.raises(TokenizerError, match="another tokenizer"):
                tokenizer.decode([*tokenizer.encode("a"), number])


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


def test_a_tokenizer_that_turns_text_into_specials_is_caught() -> None:
    with pytest.raises(AssertionError, match="became the special ids"):
        assert_text_is_never_structure(Gullible(), ["harmless"])  # type: ignore[arg-type]


def test_the_byte_tokenizer_gives_bytes_plus_offset() -> None:
    ids = ByteTokenizer(byte_offset=3).encode_batch(["A\u00e9", "", "~"])
    assert ids.values.tolist() == [68, 198, 172, 129]
    assert ids.offsets.tolist() == [0, 3, 3, 4]
    assert ids.values.dtype == np.uint16
    assert ByteTokenizer().encode_batch(["a"]).values.dtype == np.uint8


# -- special tokens by their literal string


def test_every_special_is_found_by_its_string(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        find = tokenizer.marker_id  # type: ignore[attr-defined]
        ids = set(tokenizer.special_token_ids().values())
        assert {find(tokenizer.decode([number])) for number in ids} == ids
        for text in ("", "a", " ", "    ", "<|", "<unk>", "[UNK]", "eot", "<0x41>"):
            assert find(text) is None


@pytest.mark.parametrize("kind", ["unigram", "byte-bpe"])
def test_a_special_without_a_name_is_found_too(kind: str, trained: dict[str, Path]) -> None:
    whole = open_tokenizer(trained[kind])
    few = open_tokenizer(trained[kind], specials={"stop": "<|eot|>"})
    ids = whole.special_token_ids()
    assert few.special_token_ids() == {"stop": ids["eot"]}
    found = few.marker_id("<|usr|>")  # type: ignore[attr-defined]
    assert found == ids["usr"]


def test_a_users_object_can_find_specials() -> None:
    class Plain:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    class Knowing(Plain):
        def marker_id(self, text: str) -> int | None:
            return 300 if text == "<x>" else None

    assert adapt_tokenizer(Plain()).marker_id("<x>") is None  # type: ignore[attr-defined]
    assert adapt_tokenizer(Knowing()).marker_id("<x>") == 300  # type: ignore[attr-defined]
    assert adapt_tokenizer(Knowing()).marker_id("<y>") is None  # type: ignore[attr-defined]
