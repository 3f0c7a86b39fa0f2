"""Hugging Face models: the text-only copy is the original, but for its specials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers as library
from hypothesis import given, settings

from shardmill.errors import TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.testing.tokenizers import nasty_texts
from shardmill.tokenizers import huggingface, open_tokenizer
from shardmill.tokenizers.huggingface import HuggingFaceTokenizer, text_only
from tests.tokenizers.conftest import HF_KINDS, added, hf_configs

ALL_KINDS = ["byte-bpe", *HF_KINDS]


def original(trained: dict[str, Path], kind: str) -> Any:
    folder = trained["byte-bpe"]
    if kind != "byte-bpe":
        folder = folder.parent / kind.replace(" ", "_")
    found = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.encode_special_tokens = True
    return found


@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(deadline=None, max_examples=60)
@given(text=nasty_texts())
def test_text_without_specials_gives_the_ids_of_the_original(
    tokenizers: dict[str, Tokenizer], trained: dict[str, Path], kind: str, text: str
) -> None:
    for special in ("<unk>", "<s>", "</s>", "[UNK]", "[CLS]", "[SEP]"):
        text = text.replace(special, "")
    if any(special in text for special in ("<unk>", "<s>", "</s>", "[UNK]", "[CLS]", "[SEP]")):
        return
    wanted = original(trained, kind).encode(text, add_special_tokens=False).ids
    assert tokenizers[kind].encode(text) == wanted


@pytest.mark.parametrize(
    ("kind", "text", "special"),
    [
        ("hf unigram", "a</s>b", 2),
        ("hf wordlevel", "hello [CLS] world", 1),
        ("hf wordpiece", "hello [SEP] world", 2),
        ("hf llama-like", "</s>", 2),
    ],
)
def test_the_library_alone_would_be_fooled(
    tokenizers: dict[str, Tokenizer], trained: dict[str, Path], kind: str, text: str, special: int
) -> None:
    """The cases are real: asking the library to treat specials as text is not enough."""
    assert special in original(trained, kind).encode(text, add_special_tokens=False).ids
    assert special not in tokenizers[kind].encode(text)


def test_nothing_is_put_before_or_after_a_text(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["hf llama-like"].encode("ab") == [269]


def test_a_non_special_added_token_is_still_matched(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["hf ignore_merges"].encode("a    b")[1:-1] == [700]
    assert tokenizers["hf ignore_merges"].vocab_size == 701


def test_a_token_the_caller_names_special_is_not_matched(trained: dict[str, Path]) -> None:
    config = json.loads((trained["byte-bpe"] / "tokenizer.json").read_text())
    config["added_tokens"].append(added("<end>", 700, special=False))
    loose = HuggingFaceTokenizer(json.dumps(config))
    strict = HuggingFaceTokenizer(json.dumps(config), names={"eot": "<end>"})
    assert 700 in loose.encode("a<end>b")
    assert 700 not in strict.encode("a<end>b")
    assert strict.special_token_ids() == {"eot": 700}
    assert loose.fingerprint != strict.fingerprint


def test_ids_after_a_special_keep_their_numbers(trained: dict[str, Path]) -> None:
    config = json.loads((trained["byte-bpe"] / "tokenizer.json").read_text())
    config["added_tokens"] += [added("<end>", 700), added("  ", 701, special=False)]
    tokenizer = HuggingFaceTokenizer(json.dumps(config))
    assert tokenizer.encode("  ") == [701]
    assert tokenizer.decode([700, 701]) == "<end>  "


def test_truncation_and_padding_of_the_file_are_not_obeyed(trained: dict[str, Path]) -> None:
    config = json.loads((trained["byte-bpe"] / "tokenizer.json").read_text())
    plain = HuggingFaceTokenizer(json.dumps(config))
    config["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    config["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|sys|>",
    }
    text = "def function(argument): return argument"
    assert HuggingFaceTokenizer(json.dumps(config)).encode(text) == plain.encode(text)


def test_names_come_from_the_files_beside(trained: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((trained["byte-bpe"] / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "<|eot|>"},
                "bos_token": "<|sys|>",
                "pad_token": "<nowhere>",
                "model_max_length": 10,
            }
        )
    )
    wanted = {"bos": 0, "eos": 3, "usr": 1, "asst": 2, "eot": 3}
    assert open_tokenizer(tmp_path).special_token_ids() == wanted
    assert open_tokenizer(tmp_path / "tokenizer.json").special_token_ids() == wanted


def test_a_special_that_is_also_the_unknown_token_is_refused_when_it_could_arise() -> None:
    words = {"hello": 0, "<e>": 1}
    config = {
        "added_tokens": [added("<e>", 1)],
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<e>"},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
    }
    with pytest.raises(TokenizerError, match="and also the unknown token"):
        HuggingFaceTokenizer(json.dumps(config), names={"eot": "<e>"})


def test_a_byte_level_special_may_also_be_the_unknown_token(trained: dict[str, Path]) -> None:
    config = json.loads((trained["byte-bpe"] / "tokenizer.json").read_text())
    config["model"]["unk_token"] = "<|eot|>"
    tokenizer = HuggingFaceTokenizer(json.dumps(config), names={"eot": "<|eot|>"})
    assert tokenizer.unknown_id is None
    assert tokenizer.decode(tokenizer.encode("\u2603 x")) == "\u2603 x"


def test_a_model_that_encodes_at_random_is_refused(trained: dict[str, Path]) -> None:
    config = json.loads((trained["byte-bpe"] / "tokenizer.json").read_text())
    config["model"]["dropout"] = 0.1
    with pytest.raises(TokenizerError, match="at random"):
        HuggingFaceTokenizer(json.dumps(config))


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}']
)
def test_what_is_no_tokenizer_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        open_tokenizer(tmp_path)


def test_merges_that_would_build_a_special_are_left_out(trained: dict[str, Path]) -> None:
    config = hf_configs(trained["byte-bpe"] / "tokenizer.json")["hf llama-like"]
    changed = text_only(config, {"</s>": "@1", "<s>": "@2", "<unk>": "@3"})
    assert changed["model"]["merges"] == [["<", "/"], ["s", ">"], ["a", "b"], ["\u2581", "ab"]]
    assert changed["model"]["vocab"]["@1"] == 2
    assert changed["model"]["unk_token"] == "@3"
    assert changed["post_processor"] is None
    assert config["model"]["vocab"]["</s>"] == 2, "the original is not touched"


def test_formatting_of_the_file_does_not_change_the_fingerprint(trained: dict[str, Path]) -> None:
    text = (trained["byte-bpe"] / "tokenizer.json").read_text()
    again = HuggingFaceTokenizer(json.dumps(json.loads(text), indent=7))
    assert again.fingerprint == HuggingFaceTokenizer(text).fingerprint


def test_a_large_batch_is_encoded_in_order(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "_CHARACTERS_PER_CALL", 2000)
    tokenizer = tokenizers["byte-bpe"]
    texts = ["a" * 1500, "b", "c" * 1000, "d" * 3000, "e"]
    ids = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(part)[:1] for part in ids] == ["a", "b", "c", "d", "e"]
    assert [len(tokenizer.decode(part)) for part in ids] == [len(text) for text in texts]


@pytest.mark.slow
def test_a_folder_without_tokenizer_json_opens_through_transformers(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((trained["byte-bpe"] / "tokenizer.json").read_text())
    vocab, merges = config["model"]["vocab"], config["model"]["merges"]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|eot|>"})
    )
    opened = open_tokenizer(tmp_path)
    text = "def f(x): return <|eot|>"
    assert opened.special_token_ids()["eot"] == 3
    assert opened.encode(text) == open_tokenizer(trained["byte-bpe"]).encode(text)
