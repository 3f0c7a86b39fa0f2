"""Opening by name, and adapting an object that someone else wrote."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers as library

from shardmill.errors import MissingExtraError, OptionError, TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.records import Ragged
from shardmill.tokenizers import adapt_tokenizer, choose_encoder, open_tokenizer, vocab_size_of


def test_byte_names() -> None:
    assert open_tokenizer("byte").vocab_size == 256
    assert open_tokenizer("byte:3").encode("a") == [100]
    opened = open_tokenizer("byte:2", specials={"eot": "<e>", "usr": "<u>"})
    assert opened.special_token_ids() == {"eot": 0, "usr": 1}
    assert opened.decode([1, *opened.encode("x<e>"), 0]) == "<u>x<e><e>"
    with pytest.raises(OptionError, match="byte_offset=0: 1 specials need at least 1"):
        open_tokenizer("byte", specials={"eot": "<e>"})


@pytest.mark.parametrize("kind", ["unigram", "bpe", "byte-bpe"])
def test_a_folder_and_its_file_are_the_same_tokenizer(trained: dict[str, Path], kind: str) -> None:
    (model,) = [file for file in trained[kind].iterdir() if file.name != "meta.json"]
    assert open_tokenizer(str(model)).fingerprint == open_tokenizer(trained[kind]).fingerprint


@pytest.mark.parametrize(
    "spec",
    ["missing.model", "no/spm.model", "no/such.json", "byte:x", "byte:-1", "./no", "/no", "a/b/c"],
)
def test_an_unknown_name_is_refused_without_asking_the_hub(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match="no such file or folder"):
        open_tokenizer(spec)


def test_a_folder_without_a_model_and_a_foreign_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"found 0 \.model files and no tokenizer\.json"):
        open_tokenizer(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"wanted a \.model file"):
        open_tokenizer(tmp_path / "a.bin")
    with pytest.raises(OptionError, match="for hub ids"):
        open_tokenizer(tmp_path, revision="main")


@pytest.mark.slow
def test_an_unreachable_hub_id_is_a_tokenizer_error() -> None:
    with pytest.raises(TokenizerError, match="transformers cannot open this tokenizer"):
        open_tokenizer("nobody/nothing-of-the-kind")


@pytest.mark.parametrize(
    ("blocked", "kind", "extra"),
    [
        ("sentencepiece", "bpe", "sentencepiece"),
        ("tokenizers", "byte-bpe", "hf"),
    ],
)
def test_a_missing_library_names_its_extra(
    trained: dict[str, Path], blocked: str, kind: str, extra: str
) -> None:
    code = (
        f"import sys; sys.modules[{blocked!r}] = None\n"
        "import shardmill.tokenizers as t\n"
        "from shardmill.errors import MissingExtraError\n"
        "try: t.open_tokenizer(sys.argv[1])\n"
        "except MissingExtraError as e: print(e)"
    )
    command = [sys.executable, "-c", code, str(trained[kind])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == f"{blocked} is not installed: pip install 'shardmill[{extra}]'\n"


def test_without_fast_engines_auto_uses_the_reference(trained: dict[str, Path]) -> None:
    code = (
        "import sys; sys.modules['fastokens'] = sys.modules['gigatoken'] = None\n"
        "from shardmill.tokenizers import choose_encoder, open_tokenizer\n"
        "print(choose_encoder(open_tokenizer(sys.argv[1])).produced_by['engine'])"
    )
    command = [sys.executable, "-c", code, str(trained["byte-bpe"])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "tokenizers\n"
    assert issubclass(MissingExtraError, ImportError)


# -- adapting


class OnlyEncode:
    """All a caller's tokenizer needs."""

    def __init__(self, as_type: Any = list) -> None:
        self.as_type = as_type

    def encode(self, text: str) -> Any:
        return self.as_type([ord(letter) for letter in text])


class ArrayLike:
    """Like a torch tensor: not a list, but numpy can read it."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self.ids, dtype or np.int64)


@pytest.mark.parametrize("as_type", [list, tuple, np.array, ArrayLike])
def test_encode_alone_is_enough_whatever_it_returns(as_type: Any) -> None:
    tokenizer = adapt_tokenizer(OnlyEncode(as_type))
    assert tokenizer.encode_batch(["ab", "", "c"]) == Ragged.from_sequences([[97, 98], [], [99]])
    assert tokenizer.encode("ab") == [97, 98]
    assert vocab_size_of(tokenizer) is None
    assert tokenizer.special_token_ids() == {}
    assert not choose_encoder(tokenizer, corpus=["a"]).is_fast
    with pytest.raises(TokenizerError, match="has no vocab_size"):
        _ = tokenizer.vocab_size
    with pytest.raises(TokenizerError, match="no decode"):
        tokenizer.decode([97])


def test_torch_tensors_are_ids_too() -> None:
    torch = pytest.importorskip("torch")
    assert adapt_tokenizer(OnlyEncode(torch.tensor)).encode("ab") == [97, 98]


class Whole(OnlyEncode):
    vocab_size = 128

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def special_token_ids(self) -> dict[str, int]:
        return {"eot": 0}


def test_optional_methods_of_an_object_are_used(tmp_path: Path) -> None:
    whole = Whole()
    tokenizer = adapt_tokenizer(whole)
    assert vocab_size_of(tokenizer) == tokenizer.vocab_size == 128
    assert tokenizer.decode(np.array([104, 105])) == "hi"
    assert tokenizer.special_token_ids() == {"eot": 0}
    assert adapt_tokenizer(tokenizer) is tokenizer


def test_a_batch_method_is_used_and_its_lists_become_arrays() -> None:
    class Batched(Whole):
        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [[len(text)] for text in texts]

    ids = adapt_tokenizer(Batched()).encode_batch(["ab", "", "c"])
    assert ids == Ragged.from_sequences([[2], [0], [1]])


def test_fingerprints_of_objects(tmp_path: Path) -> None:
    declared = Whole()
    declared.fingerprint = "ab" * 32  # type: ignore[attr-defined]
    assert adapt_tokenizer(declared).fingerprint == "ab" * 32
    with_file = Whole()
    with_file.model_path = str(tmp_path / "m")  # type: ignore[attr-defined]
    (tmp_path / "m").write_bytes(b"one")
    one = adapt_tokenizer(with_file).fingerprint
    (tmp_path / "m").write_bytes(b"two")
    assert adapt_tokenizer(with_file).fingerprint != one

    class Shifted(Whole):
        def encode(self, text: str) -> Any:
            return [ord(letter) + self.shift for letter in text]

    prints = set()
    for shift in (0, 1):
        shifted = Shifted()
        shifted.shift = shift  # type: ignore[attr-defined]
        prints |= {adapt_tokenizer(shifted).fingerprint, adapt_tokenizer(shifted).fingerprint}
    assert len(prints) == 2
    assert all(len(found) == len(hashlib.sha256().hexdigest()) for found in prints)


@pytest.mark.parametrize("ids", [[1.5], [[1, 2]], [-1], ["a"], [None], 3, [True, False]], ids=str)
def test_invalid_ids_are_refused(ids: Any) -> None:
    class Odd:
        def encode(self, text: str) -> Any:
            return ids

    with pytest.raises(TokenizerError, match=r"encode\('text'\) gave"):
        adapt_tokenizer(Odd()).encode("text")


def test_an_object_without_encode_or_with_an_invalid_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerError, match="has no encode"):
        adapt_tokenizer(object())
    odd = Whole()
    odd.vocab_size = "many"  # type: ignore[assignment]
    with pytest.raises(TokenizerError, match="wanted a whole number"):
        adapt_tokenizer(odd)


def test_library_objects_are_opened_by_their_model(trained: dict[str, Path]) -> None:
    """Their own encode would add specials, or make them out of text."""
    pieces = sentencepiece.SentencePieceProcessor(str(trained["bpe"] / "spm.model"))
    fast = library.Tokenizer.from_file(str(trained["byte-bpe"] / "tokenizer.json"))
    for kind, obj in (("bpe", pieces), ("byte-bpe", fast)):
        adapted = adapt_tokenizer(obj)
        opened: Tokenizer = open_tokenizer(trained[kind])
        assert adapted.fingerprint == opened.fingerprint
        assert adapted.encode("a<|eot|>b") == opened.encode("a<|eot|>b")


def test_a_subclass_of_our_tokenizers_is_not_wrapped(trained: dict[str, Path]) -> None:
    from shardmill.tokenizers.sentencepiece import SentencePieceTokenizer

    class Mine(SentencePieceTokenizer):
        pass

    mine = Mine(trained["bpe"] / "spm.model")
    assert adapt_tokenizer(mine) is mine


def test_of_two_names_for_one_string_the_later_one_is_the_marker() -> None:
    specials = {"im_start": "<|im_start|>", "im_end": "<|im_end|>", "eot": "<|im_end|>"}
    tokenizer = open_tokenizer("byte:4", specials=specials)
    assert tokenizer.special_token_ids() == {"im_start": 0, "im_end": 1, "eot": 2}
    assert tokenizer.marker_id("<|im_end|>") == 2
    assert tokenizer.decode([1, 2]) == "<|im_end|>" * 2
