"""Tiny real models, trained once per session on text that is on every machine."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from shardmill.protocols import Tokenizer
from shardmill.tokenizers import ByteTokenizer, TrainSpec, open_tokenizer, train_tokenizer

LANGUAGES = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps.\n"
    "Der schnelle braune Fuchs springt \u00fcber den faulen Hund.\n"
    "Le renard brun rapide saute par-dessus le chien paresseux : \u00e7a va ?\n"
    "\u0411\u044b\u0441\u0442\u0440\u0430\u044f \u043b\u0438\u0441\u0430 \u043f\u0440\u044b\u0433"
    "\u0430\u0435\u0442 \u0447\u0435\u0440\u0435\u0437 \u0441\u043e\u0431\u0430\u043a\u0443.\n"
    "\u7d20\u65e9\u3044\u72d0\u304c\u72ac\u3092\u98db\u3073\u8d8a\u3048\u308b\u3002\n"
)
KINDS = ("byte", "byte with specials", "unigram", "bpe", "byte-bpe")
HF_KINDS = ("hf unigram", "hf wordlevel", "hf wordpiece", "hf ignore_merges", "hf llama-like")


def stdlib_files() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [folder / name for name in ("argparse.py", "ast.py", "base64.py", "bisect.py")]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model type to the folder of a model with 700 ids."""
    base = tmp_path_factory.mktemp("trained")
    (base / "languages.txt").write_text(LANGUAGES * 40)
    folders = {}
    for model_type in ("unigram", "bpe", "byte-bpe"):
        spec = TrainSpec(vocab_size=700, model_type=model_type)
        files = [*stdlib_files(), base / "languages.txt"]
        train_tokenizer(base / model_type, files=files, spec=spec)
        folders[model_type] = base / model_type
    return folders


@pytest.fixture(scope="session")
def tokenizers(trained: dict[str, Path]) -> dict[str, Tokenizer]:
    """Every kind of tokenizer by name: KINDS and HF_KINDS."""
    found: dict[str, Tokenizer] = {
        "byte": ByteTokenizer(),
        "byte with specials": ByteTokenizer(byte_offset=3, specials={"eot": "<e>", "usr": "[u]"}),
    }
    for name, folder in trained.items():
        found[name] = open_tokenizer(folder)
    folder = trained["byte-bpe"].parent
    for name, config in hf_configs(trained["byte-bpe"] / "tokenizer.json").items():
        path = folder / name.replace(" ", "_") / "tokenizer.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config))
        found[name] = open_tokenizer(path)
    return found


def added(content: str, number: int, *, special: bool = True) -> dict[str, Any]:
    return {
        "id": number,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def hf_configs(byte_bpe: Path) -> dict[str, dict[str, Any]]:
    """Models that reach their specials through the vocabulary, not only through added tokens."""
    empty: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
    }
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    # "</s>" scores best of all, so a Unigram that sees it takes it.
    unigram = [["<unk>", 0.0], ["<s>", 0.0], ["</s>", 5.0], ["<", -9.0], ["/", -9.0], [">", -9.0]]
    unigram += [[letter, -8.0] for letter in [*letters, " "]] + [["the", -3.0], ["x</s>", 9.0]]
    words = ["[UNK]", "[CLS]", "[SEP]", "hello", "world", "the", "##lo", "hel", "a", "##a"]
    merging = json.loads(byte_bpe.read_text())
    merging["model"]["ignore_merges"] = True
    merging["added_tokens"].append(added("    ", 700, special=False))
    llama = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    llama += ["<", "/", "s", ">", "</", "s>", "a", "b", "ab", "\u2581ab"]
    merges = [["<", "/"], ["s", ">"], ["</", "s>"], ["a", "b"], ["\u2581", "ab"]]
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    return {
        "hf unigram": {
            **empty,
            "added_tokens": [added("<unk>", 0), added("<s>", 1), added("</s>", 2)],
            "model": {"type": "Unigram", "unk_id": 0, "vocab": unigram, "byte_fallback": False},
        },
        "hf wordlevel": {
            **empty,
            "added_tokens": [added(word, number) for number, word in enumerate(words[:3])],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {
                "type": "WordLevel",
                "vocab": {word: number for number, word in enumerate(words)},
                "unk_token": "[UNK]",
            },
        },
        "hf wordpiece": {
            **empty,
            "added_tokens": [added(word, number) for number, word in enumerate(words[:3])],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
            "model": {
                "type": "WordPiece",
                "vocab": {word: number for number, word in enumerate(words)},
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            },
        },
        "hf ignore_merges": merging,
        "hf llama-like": {
            **empty,
            "added_tokens": [added(llama[number], number) for number in range(3)],
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "\u2581"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
                ],
            },
            "post_processor": template,
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": "<unk>",
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": {word: number for number, word in enumerate(llama)},
                "merges": merges,
            },
        },
    }
