"""What the special tokens of a Hugging Face tokenizer are called.

In: the files beside a tokenizer.json, or names given by the caller.  Out: name to id.
Promise: a name given by the caller is one id or an error; a name from a file that is not in the
vocabulary is announced and left out.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.errors import TokenizerError
from shardmill.tokenizer.identity import sha256_hex
from shardmill.tokenizer.specials import names_in_meta, read_meta, short_name

_log = logging.getLogger(__name__)


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
