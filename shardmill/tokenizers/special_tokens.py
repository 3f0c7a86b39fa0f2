"""The rules of special tokens that every kind of tokenizer shares.

In: names, strings, ids.  Out: checked names; decoded text with each special as its literal string.
Promise: decoding loses no token.
Not here: keeping specials out of text; each kind does that in its own model.

What the special tokens of a Hugging Face tokenizer are called.

In: the files beside a tokenizer.json, or names given by the caller.  Out: name to id.
Promise: a name given by the caller is one id or an error; a name from a file that is not in the
vocabulary is announced and left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import TokenizerError
from shardmill.records import JSON, IntArray
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
"""What the start and the end of a document and padding are called; the first is their own name,
the others stand in for it."""


def usual_id(role: str, named: Mapping[str, int]) -> int | None:
    """The id for "bos", "eos" or "pad" among a tokenizer's special tokens; a stand-in is logged."""
    found = next((name for name in USUAL_NAMES[role] if name in named), None)
    if found is None:
        return None
    if found != role:
        _log.info("no special token is called %s; %s (%d) is taken", role, found, named[found])
    return named[found]


class SpecialRuns:
    """Decode a sequence piece by piece: runs of text, and specials between them."""

    def __init__(self, strings: Mapping[int, str]) -> None:
        self._strings = dict(strings)
        self._ids = np.array(sorted(self._strings), np.int64)
        self._by_string = {text: number for number, text in self._strings.items()}

    def id_of(self, text: str) -> int | None:
        """The special whose literal string this is."""
        return self._by_string.get(text)

    def decode(self, ids: IntArray, decode_text: Callable[[IntArray], str]) -> str:
        """`decode_text` gets each run between two specials; a special is its literal string.

        Every run is decoded on its own, as it was encoded: a tokenizer that marks the start of a
        text marks it once per run.
        """
        if ids.ndim != 1:
            raise TokenizerError(f"decode takes one sequence of ids, not an array {ids.shape}")
        places = np.flatnonzero(np.isin(ids, self._ids))
        parts: list[str] = []
        start = 0
        for place in places.tolist():
            if place > start:
                parts.append(decode_text(ids[start:place]))
            parts.append(self._strings[int(ids[place])])
            start = place + 1
        if start < len(ids):
            parts.append(decode_text(ids[start:]))
        return "".join(parts)


def short_name(literal: str) -> str:
    """`<|eot|>` is called eot; anything else is called what it is."""
    if len(literal) > 4 and literal.startswith("<|") and literal.endswith("|>"):
        return literal[2:-2]
    return literal


def read_meta(model: Path, model_sha256: str) -> dict[str, JSON] | None:
    """What `meta.json` beside a model says, or None without one.

    A meta.json that names another model's sha256 is an error: the two do not belong together.
    """
    path = model.parent / "meta.json"
    if not path.is_file():
        return None
    try:
        meta = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise TokenizerError(f"{path}: not JSON ({problem}); remove or repair it") from problem
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
    """The special names and ids a meta.json declares; empty when it declares none."""
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
    """Names read from files: those missing in the vocabulary are left out, not refused."""


def find_names(
    names: Mapping[str, str] | None,
    strings: Mapping[str, int],
    vocabulary: Mapping[str, int],
    unknown: str | None,
) -> dict[str, int]:
    """Name to id; strings of the file that nobody named are called by themselves.

    Names given by the caller stand alone. Without an "eot", the file's "eos" is one.
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
        found = _read_object(path.parent / file)
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


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise TokenizerError(f"{path}: not JSON ({problem}); remove or repair it") from problem
    return value if isinstance(value, dict) else {}
