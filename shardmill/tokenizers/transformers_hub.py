"""A folder or hub id as `transformers` opens it. The one importer of transformers.

In: a folder or hub id, and a revision.  Out: the tokenizer.json text, and what its special tokens
are called; or the object itself, for its chat template.
Promise: no code of a repository is run; a tokenizer with no Rust twin is refused.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import TokenizerError, missing_extra

try:
    from transformers import AutoTokenizer
except ImportError as missing:
    raise missing_extra("transformers", "hub") from missing


def load_transformers(spec: str, revision: str | None = None) -> Any:
    """The tokenizer as transformers has it, with its chat template."""
    try:
        return AutoTokenizer.from_pretrained(
            spec, revision=revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as problem:
        raise TokenizerError(
            f"{spec!r} is no tokenizer that transformers can open: {problem}; give a folder with a "
            "tokenizer.json, a .model file, or the id of a public hub repository"
        ) from problem


def load_pretrained(spec: str, revision: str | None) -> tuple[str, dict[str, str]]:
    """The tokenizer.json, and name to string: {"eos": "</s>", ...}."""
    loaded = load_transformers(spec, revision)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(
            f"{spec!r} is a {type(loaded).__name__}, which has no tokenizer.json form; "
            "use its .model file, or adapt_tokenizer(...) for an object of your own"
        )
    names = {
        key.removesuffix("_token"): str(value)
        for key, value in loaded.special_tokens_map.items()
        if isinstance(value, str)
    }
    return str(backend.to_str()), names
