"""SentencePiece models: specials are hidden, and nothing else changes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import TokenizerError
from shardmill.testing.tokenizers import assert_tokenizer_laws, nasty_texts
from shardmill.tokenizers import open_tokenizer
from shardmill.tokenizers.battery import short_texts
from shardmill.tokenizers.sentencepiece import SentencePieceTokenizer, hide_pieces, read_facts
from tests.tokenizers.conftest import LANGUAGES

ROLES = ["<|sys_1|>", "<|usr_1|>", "<|eot_1|>"]


def train(**options: object) -> bytes:
    """A raw SentencePiece model, with the library's defaults but for `options`."""
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((LANGUAGES * 20).split("\n")),
        model_writer=writer,
        **{
            "vocab_size": 420,
            "byte_fallback": True,
            "character_coverage": 1.0,
            "num_threads": 1,
            "minloglevel": 2,
            "hard_vocab_limit": False,
            **options,
        },
    )
    return writer.getvalue()


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def foreign(request: pytest.FixtureRequest) -> bytes:
    """A model as others train it: normalised, dummy prefix, roles as user-defined symbols."""
    return train(model_type=request.param, user_defined_symbols=ROLES)


@settings(deadline=None, max_examples=60)
@given(text=nasty_texts())
def test_hiding_specials_changes_no_other_id(foreign: bytes, text: str) -> None:
    plain = sentencepiece.SentencePieceProcessor(model_proto=foreign)
    assert SentencePieceTokenizer(foreign).encode(text) == plain.encode(text)


def test_user_defined_roles_are_special_and_other_symbols_are_text() -> None:
    model = train(model_type="unigram", user_defined_symbols=[*ROLES, "<br>"])
    plain = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = SentencePieceTokenizer(model)
    roles = {role[2:-2]: plain.piece_to_id(role) for role in ROLES}
    assert tokenizer.special_token_ids() == {"bos": 1, "eos": 2, **roles}
    assert plain.piece_to_id(ROLES[0]) in plain.encode(f"a{ROLES[0]}b"), "the plain model is fooled"
    assert not {*roles.values()} & {*tokenizer.encode(f"a{ROLES[0]}b")}
    assert plain.piece_to_id("<br>") in tokenizer.encode("a<br>b")


@settings(deadline=None, max_examples=30)
@given(texts=st.lists(nasty_texts([*ROLES, "<s>", "</s>"]), min_size=1, max_size=4))
def test_a_foreign_model_keeps_the_laws(foreign: bytes, texts: list[str]) -> None:
    assert_tokenizer_laws(SentencePieceTokenizer(foreign), texts)


def test_a_model_with_identity_and_dummy_prefix_comes_back_exactly() -> None:
    model = train(
        model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    tokenizer = SentencePieceTokenizer(model)
    assert tokenizer.round_trips(" a  b ")
    assert not tokenizer.round_trips("\u2581")
    assert_tokenizer_laws(tokenizer, short_texts())


def test_a_normalising_model_promises_no_round_trip(foreign: bytes) -> None:
    assert not SentencePieceTokenizer(foreign).round_trips("a")


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_a_control_piece_of_one_character_is_not_matched(model_type: str) -> None:
    model = train(model_type=model_type, control_symbols=["\u2603"])
    assert_tokenizer_laws(SentencePieceTokenizer(model), ["a\u2603b", "\u2603", " \u2603 \u2603"])


def test_decode_shows_specials_and_loses_no_token(foreign: bytes) -> None:
    tokenizer = SentencePieceTokenizer(foreign)
    ids = tokenizer.special_token_ids()
    text = "The dog"
    chat = [ids["sys_1"], ids["sys_1"], *tokenizer.encode(text), ids["eot_1"], ids["eos"]]
    assert tokenizer.decode(chat) == f"{ROLES[0]}{ROLES[0]}The dog{ROLES[2]}</s>"


def test_names_given_by_the_caller_stand_alone(foreign: bytes) -> None:
    plain = sentencepiece.SentencePieceProcessor(model_proto=foreign)
    tokenizer = SentencePieceTokenizer(foreign, specials={"eot": ROLES[2]})
    assert tokenizer.special_token_ids() == {"eot": plain.piece_to_id(ROLES[2])}
    with pytest.raises(TokenizerError, match="special 'eot': '<end>' is not one piece"):
        SentencePieceTokenizer(foreign, specials={"eot": "<end>"})


def test_meta_beside_the_model_names_the_specials(foreign: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.model").write_bytes(foreign)
    plain = sentencepiece.SentencePieceProcessor(model_proto=foreign)
    wanted = {"sys": plain.piece_to_id(ROLES[0]), "eot": plain.piece_to_id(ROLES[2])}
    (tmp_path / "meta.json").write_text(json.dumps({"special_token_ids": wanted}))
    assert open_tokenizer(tmp_path / "a.model").special_token_ids() == wanted


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ('{"model_sha256": "00"}', "describes a model with sha256 00"),
        ("{", "not JSON"),
        ("[]", "wanted a JSON object"),
        ('{"special_token_ids": {"eot": 99999}}', "special 'eot' has id 99999"),
        ('{"special_token_ids": {"eot": "x"}}', "wanted name to id"),
        ('{"special_token_ids": {"eot": 0}}', "special 'eot' has id 0"),
    ],
)
def test_a_meta_that_does_not_fit_is_refused(
    foreign: bytes, tmp_path: Path, meta: str, message: str
) -> None:
    (tmp_path / "a.model").write_bytes(foreign)
    (tmp_path / "meta.json").write_text(meta)
    with pytest.raises(TokenizerError, match=message):
        open_tokenizer(tmp_path / "a.model")


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_a_damaged_model_is_an_error_of_ours_or_still_a_tokenizer(
    foreign: bytes, data: st.DataObject
) -> None:
    stop = data.draw(st.integers(0, len(foreign)))
    junk = data.draw(st.binary(max_size=8))
    damaged = foreign[:stop] + junk + foreign[stop + len(junk) + 1 :]
    try:
        tokenizer = SentencePieceTokenizer(damaged)
    except TokenizerError:
        return
    assert tokenizer.vocab_size > 0


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for number, data in enumerate([b"", b"not a model", b"\x0a\x02", b"\xff" * 20]):
        path = tmp_path / f"{number}.model"
        path.write_bytes(data)
        with pytest.raises(TokenizerError):
            open_tokenizer(path)


def test_hiding_nothing_copies_all_but_the_self_test(foreign: bytes) -> None:
    assert hide_pieces(foreign, {}) == foreign
    assert hide_pieces(foreign + b"\x22\x03abc", {}) == foreign


def test_a_hidden_piece_is_a_control_piece_and_keeps_its_id(foreign: bytes) -> None:
    before, after = read_facts(foreign), read_facts(hide_pieces(foreign, {300: "<hidden>"}))
    assert (after.pieces[300], after.types[300]) == ("<hidden>", 3)
    assert before.types[300] != 3
    assert after.pieces[:300] + after.pieces[301:] == before.pieces[:300] + before.pieces[301:]
    assert after.types[:300] + after.types[301:] == before.types[:300] + before.types[301:]


def test_the_facts_are_those_of_the_library(foreign: bytes) -> None:
    plain = sentencepiece.SentencePieceProcessor(model_proto=foreign)
    facts = read_facts(foreign)
    assert list(facts.pieces) == [plain.id_to_piece(number) for number in range(len(facts.pieces))]
    assert len(facts.pieces) == plain.vocab_size()
    assert [kind == 3 for kind in facts.types] == [
        plain.is_control(number) for number in range(len(facts.pieces))
    ]
    assert (facts.byte_fallback, facts.identity) == (True, False)


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
@pytest.mark.parametrize("removes", [True, False])
def test_only_a_normaliser_that_changes_nothing_is_the_identity(rule: str, removes: bool) -> None:
    model = train(model_type="bpe", normalization_rule_name=rule, remove_extra_whitespaces=removes)
    wanted = rule == "identity" and not removes
    assert read_facts(model).identity == wanted
    assert SentencePieceTokenizer(model).round_trips("a") == wanted


def test_the_library_version_is_part_of_the_fingerprint(
    foreign: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = SentencePieceTokenizer(foreign)
    before = tokenizer.fingerprint
    assert before == SentencePieceTokenizer(foreign).fingerprint
    monkeypatch.setattr(sentencepiece, "__version__", "0.0.1")
    assert tokenizer.fingerprint != before


def test_threads_change_no_id(foreign: bytes) -> None:
    one = SentencePieceTokenizer(foreign).encode_batch(short_texts())
    assert SentencePieceTokenizer(foreign, num_threads=2).encode_batch(short_texts()) == one
