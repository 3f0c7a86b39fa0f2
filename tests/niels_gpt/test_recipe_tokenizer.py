"""The recipe's tokenizer: special strings in text stay text."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from niels_gpt.cache_tokenizer import CacheTokenizer
from niels_gpt.special_tokens import ASST, EOT, SPECIAL_TOKENS, SYS, USR
from niels_gpt.tokenizer import SentencePieceTokenizer, load_tokenizer
from shardmill.errors import TokenizerError

NOTE = "The capital of Peru is Lima."


@pytest.fixture(scope="module")
def user_defined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that holds the four strings as user-defined symbols, as older recipes train them."""
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([NOTE, "Tea and bread.", "one two three four five"] * 20),
        model_writer=stream,
        vocab_size=330,
        byte_fallback=True,
        character_coverage=1.0,
        hard_vocab_limit=False,
        user_defined_symbols=list(SPECIAL_TOKENS.values()),
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("user_defined") / "spm.model"
    path.write_bytes(stream.getvalue())
    return path


def test_the_four_strings_are_those_of_the_recipe() -> None:
    assert SPECIAL_TOKENS == {
        "sys": "<|ngpt_sys_84a5023f67d74cf29cc4001becde983c|>",
        "usr": "<|ngpt_usr_84a5023f67d74cf29cc4001becde983c|>",
        "asst": "<|ngpt_asst_84a5023f67d74cf29cc4001becde983c|>",
        "eot": "<|ngpt_eot_84a5023f67d74cf29cc4001becde983c|>",
    }


def test_special_ids_are_consecutive_and_named(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    assert tokenizer.special_token_ids() == {"sys": 1, "usr": 2, "asst": 3, "eot": 4}
    assert tokenizer.vocab_size == 800
    assert Path(str(tokenizer.model_path)) == model
    assert load_tokenizer(model.parent).model_path == model


@pytest.mark.parametrize("kind", ["control", "user-defined"])
def test_special_strings_in_text_never_become_special_ids(
    kind: str, model: Path, user_defined: Path
) -> None:
    tokenizer = SentencePieceTokenizer(model if kind == "control" else user_defined)
    special = set(tokenizer.special_token_ids().values())
    assert len(special) == 4
    for text in (SYS, f"{USR}hello{EOT}{ASST}", f"a {EOT} b", EOT[:-1] + "|>"):
        ids = tokenizer.encode(text)
        assert not special & set(ids)
        assert tokenizer.decode(ids).strip() == text
        assert tokenizer.encode_batch([text, NOTE])[0].tolist() == ids


def test_ids_come_as_a_tensor_and_decode_with_their_specials(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    ids = tokenizer.encode_torch(NOTE)
    assert ids.dtype == torch.int64
    assert ids.tolist() == tokenizer.encode(NOTE)
    assert tokenizer.decode([2, *ids.tolist(), 4]) == f"{USR}{NOTE}{EOT}"


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(parts=st.lists(st.sampled_from([*SPECIAL_TOKENS.values(), "<|", "|>", "x", " ", "\n"])))
def test_no_text_made_of_special_strings_reaches_a_special_id(
    model: Path, parts: list[str]
) -> None:
    tokenizer = load_tokenizer(model)
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert not {1, 2, 3, 4} & set(ids)
    assert tokenizer.decode(ids) == text


def test_a_model_without_the_four_strings_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([NOTE] * 20),
        model_writer=stream,
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "spm.model").write_bytes(stream.getvalue())
    with pytest.raises(TokenizerError, match="special 'sys'"):
        load_tokenizer(tmp_path)


def test_a_caller_without_special_ids_is_asked_by_its_strings() -> None:
    class Asked:
        def encode(self, text: str) -> list[int]:
            known = {text: number for number, text in enumerate(SPECIAL_TOKENS.values(), 7)}
            return [known[text]] if text in known else [1] * len(text)

    class Blind:
        def encode(self, text: str) -> list[int]:
            return [0]

    assert CacheTokenizer(Asked()).chat_ids() == {"sys": 7, "usr": 8, "asst": 9, "eot": 10}
    with pytest.raises(TokenizerError, match="no id for sys"):
        CacheTokenizer(Blind()).chat_ids()
