"""The recipe's format with real models, whatever they do with special strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from niels_gpt.format.sft import serialize_chat_to_ids
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.tokenizer import load_tokenizer
from shardmill.testing.tokenizers import nasty_texts

LITERALS = list(SPECIAL_TOKENS.values())


def chat(user: str, bot: str) -> Any:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": bot}]}


def serialize(user: str, bot: str, tokenizer: Any) -> list[int]:
    return serialize_chat_to_ids(chat(user, bot), tokenizer=tokenizer, default_system_text="kind")


class Naive:
    """A caller's wrapper round the model that lets special strings through."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = load_tokenizer(model)
        self.ids = self.tokenizer.special_token_ids()

    def encode(self, text: str) -> list[int]:
        for name, literal in SPECIAL_TOKENS.items():
            before, found, after = text.partition(literal)
            if found:
                return [*self.encode(before), self.ids[name], *self.encode(after)]
        return self.tokenizer.encode(text)

    def special_token_ids(self) -> dict[str, int]:
        return self.ids


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(user=nasty_texts(LITERALS), bot=nasty_texts(LITERALS), naive=st.booleans())
def test_structure_is_only_where_the_template_put_it(
    model: Path, user: str, bot: str, naive: bool
) -> None:
    ids = load_tokenizer(model).special_token_ids()
    found = serialize(user, bot, Naive(model) if naive else load_tokenizer(model))
    assert [token for token in found if token in ids.values()] == [
        *[ids["sys"], ids["eot"]],
        *[ids["usr"], ids["eot"]],
        *[ids["asst"], ids["eot"]],
    ]


def test_the_models_words_are_its_own(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    ids = tokenizer.special_token_ids()
    text = f"before {LITERALS[3]} after"
    wanted = [
        *[ids["sys"], *tokenizer.encode("kind"), ids["eot"]],
        *[ids["usr"], *tokenizer.encode(text), ids["eot"]],
        *[ids["asst"], *tokenizer.encode("yes"), ids["eot"]],
    ]
    assert serialize(text, "yes", tokenizer) == wanted
    assert tokenizer.decode(wanted).count(text) == 1
    # The same model as its library's own object is opened so that text stays text.
    raw = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert serialize(text, "yes", raw) == wanted


def test_an_added_token_of_the_library_is_found_by_its_string() -> None:
    alphabet = sorted(ByteLevel.alphabet())
    raw = Tokenizer(BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = ByteLevelDecoder()
    raw.add_special_tokens([AddedToken(text, special=True) for text in LITERALS])
    assert raw.encode(LITERALS[1]).ids == [257]
    found = serialize(LITERALS[1], "x", raw)
    assert [token for token in found if token > 255] == [256, 259, 257, 259, 258, 259]
    assert len(found) == 6 + len("kind") + len(LITERALS[1]) + len("x")
