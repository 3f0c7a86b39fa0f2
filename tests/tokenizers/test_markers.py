"""A special token by its literal string."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.protocols import Tokenizer
from shardmill.tokenizers import adapt_tokenizer, open_tokenizer
from tests.tokenizers.conftest import HF_KINDS, KINDS


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
def test_every_special_is_found_by_the_string_it_decodes_to(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[kind]
    find = tokenizer.marker_id  # type: ignore[attr-defined]
    ids = set(tokenizer.special_token_ids().values())
    assert {find(tokenizer.decode([number])) for number in ids} == ids
    for text in ("", "a", " ", "    ", "<|", "<unk>", "[UNK]", "eot", "<0x41>"):
        assert find(text) is None


@pytest.mark.parametrize("kind", ["unigram", "byte-bpe"])
def test_a_special_that_nobody_named_is_found_too(kind: str, trained: dict[str, Path]) -> None:
    whole = open_tokenizer(trained[kind])
    few = open_tokenizer(trained[kind], specials={"stop": "<|eot|>"})
    ids = whole.special_token_ids()
    assert few.special_token_ids() == {"stop": ids["eot"]}
    found = few.marker_id("<|usr|>")  # type: ignore[attr-defined]
    assert found == ids["usr"]


def test_a_callers_object_is_asked() -> None:
    class Plain:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    class Knowing(Plain):
        def marker_id(self, text: str) -> int | None:
            return 300 if text == "<x>" else None

    assert adapt_tokenizer(Plain()).marker_id("<x>") is None  # type: ignore[attr-defined]
    assert adapt_tokenizer(Knowing()).marker_id("<x>") == 300  # type: ignore[attr-defined]
    assert adapt_tokenizer(Knowing()).marker_id("<y>") is None  # type: ignore[attr-defined]
