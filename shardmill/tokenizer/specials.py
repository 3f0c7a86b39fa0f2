"""The rules of special tokens that every kind of tokenizer shares.

In: names, strings, ids.  Out: checked names; decoded text with each special as its literal string.
Promise: decoding loses no token.
Not here: keeping specials out of text; each kind does that in its own model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from shardmill.errors import TokenizerError
from shardmill.records import JSON, IntArray

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
