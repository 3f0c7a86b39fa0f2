"""Names and ids of special tokens, and decoding that shows each as its literal string."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.errors import TokenizerError
from shardmill.protocols import Texts
from shardmill.records import JSON, IntArray, Ragged
from shardmill.tokenizers.texts import sha256_hex

_log = logging.getLogger(__name__)

DEFAULT_SPECIALS: Mapping[str, str] = {
    "sys": "<|sys|>",
    "usr": "<|usr|>",
    "asst": "<|asst|>",
    "eot": "<|eot|>",
}

USUAL_NAMES: Mapping[str, tuple[str, ...]] = {
    "bos": ("bos", "<s>", "begin_of_text"),
    "eos": ("eos", "</s>", "eot", "endoftext", "end_of_text"),
    "pad": ("pad", "<pad>", "[PAD]"),
}
"""What the start and the end of a document and padding may be called, the best name first."""


def usual_id(role: str, named: Mapping[str, int]) -> int | None:
    """The id for "bos", "eos" or "pad" among named special tokens; another name is logged."""
    found = next((name for name in USUAL_NAMES[role] if name in named), None)
    if found is None:
        return None
    if found != role:
        _log.info("no special token is called %s; using %s (%d)", role, found, named[found])
    return named[found]


class TokenizerWithSpecials(ABC):
    """What the tokenizers of this package share: text and special tokens are kept apart.

    `special_names` maps names to ids, `special_strings` maps every special id, also one without a
    name, to its literal string.
    """

    special_names: dict[str, int]
    special_strings: dict[int, str]

    @abstractmethod
    def encode_batch(self, texts: Texts) -> Ragged: ...

    @abstractmethod
    def _decode_text(self, ids: IntArray) -> str:
        """Decode ids of which none is special."""

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_batch([text]).values.tolist()
        return ids

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """The text, with each special as its literal string; no token is lost.

        Every run between two specials is decoded separately, as it was encoded: a tokenizer that
        marks the start of a text marks it once per run.
        """
        array: IntArray = np.asarray(ids, np.int64)
        if array.ndim != 1:
            raise TokenizerError(f"decode takes one sequence of ids, not an array {array.shape}")
        parts: list[str] = []
        start = 0
        for at in np.flatnonzero(np.isin(array, sorted(self.special_strings))).tolist():
            if at > start:
                parts.append(self._decode_text(array[start:at]))
            parts.append(self.special_strings[int(array[at])])
            start = at + 1
        if start < len(array):
            parts.append(self._decode_text(array[start:]))
        return "".join(parts)

    def special_token_ids(self) -> dict[str, int]:
        return dict(self.special_names)

    def marker_id(self, text: str) -> int | None:
        """The id of the special token with this literal string, named or not."""
        found = (number for number, literal in self.special_strings.items() if literal == text)
        return next(found, None)

    def _refuse_unknown(self, ids: IntArray, is_unknown: npt.NDArray[np.bool_]) -> None:
        if is_unknown.any():
            raise TokenizerError(
                f"{self!r}: id {int(ids[is_unknown][0]):,} is not in the vocabulary; these tokens "
                "come from another tokenizer"
            )


def short_name(literal: str) -> str:
    """The name of a special: eot for `<|eot|>`, the string itself for anything else."""
    if len(literal) > 4 and literal.startswith("<|") and literal.endswith("|>"):
        return literal[2:-2]
    return literal


def read_meta(model: Path, model_sha256: str) -> dict[str, JSON] | None:
    """The `meta.json` beside a model, or None. It is an error if it describes another model."""
    path = model.parent / "meta.json"
    if not path.is_file():
        return None
    meta = _read_json(path)
    if not isinstance(meta, dict):
        raise TokenizerError(f"{path}: found {type(meta).__name__}, wanted a JSON object")
    named = meta.get("model_sha256")
    if named is not None and named != model_sha256:
        raise TokenizerError(
            f"{path} describes a model with sha256 {named}, but {model.name} has {model_sha256}; "
            "put the right meta.json beside it, or train again"
        )
    return meta


def names_in_meta(meta: Mapping[str, JSON], where: Path) -> dict[str, int]:
    """The special names and ids that a meta.json declares; may be empty."""
    found = meta.get("special_token_ids")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise TokenizerError(f"{where}: special_token_ids is {found!r}, wanted name to id")
    names: dict[str, int] = {}
    for name, number in found.items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise TokenizerError(f"{where}: special_token_ids[{name!r}] is {number!r}, no id")
        names[name] = number
    return names


class FileNames(dict[str, str]):
    """Names read from files: one that is not in the vocabulary is left out, not refused."""


def find_names(
    names: Mapping[str, str] | None,
    strings: Mapping[str, int],
    vocabulary: Mapping[str, int],
    unknown: str | None,
) -> dict[str, int]:
    """Name to id of the special tokens of a Hugging Face tokenizer.

    Names given by the caller are the only ones. Otherwise a string of the file without a name is
    its own name, and without an "eot", the file's "eos" is one.
    """
    found: dict[str, int] = {}
    for name, text in (names or {}).items():
        if text in vocabulary:
            found[name] = vocabulary[text]
        elif isinstance(names, FileNames):
            _log.info("special token %s: %r is not in the vocabulary; left out", name, text)
        else:
            raise TokenizerError(
                f"special {name!r}: {text!r} is not one id of this tokenizer; its special tokens "
                f"are {sorted(strings)[:20]}"
            )
    found = dict(sorted(found.items(), key=lambda item: item[1]))
    if unknown is not None and found.get("unk") == vocabulary.get(unknown):
        found.pop("unk", None)
    if names is not None and not isinstance(names, FileNames):
        return found
    taken = {*found.values(), None if unknown is None else vocabulary.get(unknown)}
    for text, number in strings.items():
        if number not in taken:
            name = short_name(text)
            found[text if name in found else name] = number
    if "eot" not in found and "eos" in found:
        _log.info("no special token is called eot; eos (%d) ends a document", found["eos"])
        found["eot"] = found["eos"]
    return found


def names_beside(path: Path) -> FileNames:
    """Names from our meta.json, else from tokenizer_config.json and special_tokens_map.json."""
    meta = read_meta(path, sha256_hex(path.read_bytes()))
    if meta is not None and names_in_meta(meta, path.parent / "meta.json"):
        strings = meta.get("special_tokens")
        if isinstance(strings, dict):
            return FileNames({name: str(text) for name, text in strings.items()})
    names = FileNames()
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        beside = path.parent / file
        value = _read_json(beside) if beside.is_file() else {}
        found = value if isinstance(value, dict) else {}
        decoder = found.get("added_tokens_decoder")
        for token in decoder.values() if isinstance(decoder, dict) else ():
            text = token.get("content") if isinstance(token, dict) else None
            if isinstance(text, str) and token.get("special"):
                names[short_name(text)] = text
        for key, value in found.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str) and text:
                names[key.removesuffix("_token")] = text
    return names


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise TokenizerError(f"{path}: not JSON ({problem}); remove or repair it") from problem
