"""A tokenizer.json that can only make text: no string in it leads to a special id.

In: a parsed tokenizer.json and the strings that are special.  Out: a changed copy.
Promise: every id keeps its number; text without special strings gives the same ids; nothing is
added before, after, or between the ids of a text.
How: special added tokens and their vocabulary entries get names no text can hold, merges that would
build them are left out, and post-processor, truncation and padding go. One such file makes the
reference and the fast engines, so they agree on what a special is.
Not here: loading it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shardmill.errors import TokenizerError


def text_only(config: Mapping[str, Any], hidden: Mapping[str, str]) -> dict[str, Any]:
    """The copy; `hidden` maps each special string to the name that takes its place."""
    model = dict(config["model"])
    if model.get("dropout"):
        raise TokenizerError(
            f"this model encodes at random (BPE dropout {model['dropout']}): the same text would "
            'give other ids each time; set "dropout" to null in its tokenizer.json'
        )
    model["vocab"] = _rename_vocab(model.get("vocab"), hidden)
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _builds(merge, hidden)]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    added = [
        {**token, "content": hidden[token["content"]], "normalized": False}
        if token["content"] in hidden
        else token
        for token in config.get("added_tokens") or []
    ]
    return {
        **config,
        "model": model,
        "added_tokens": added,
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }


def special_strings(config: Mapping[str, Any]) -> dict[str, int]:
    """Literal string to id of the added tokens that the file itself calls special."""
    return {
        token["content"]: token["id"]
        for token in config.get("added_tokens") or []
        if token.get("special")
    }


def added_strings(config: Mapping[str, Any]) -> list[str]:
    """The added tokens that are matched in text."""
    tokens = config.get("added_tokens") or []
    return sorted(token["content"] for token in tokens if not token.get("special"))


def looks_around(config: Mapping[str, Any]) -> bool:
    """Whether an added token takes the whitespace beside it, or asks for a word's border."""
    return any(
        token.get(flag)
        for token in config.get("added_tokens") or []
        if not token.get("special")
        for flag in ("lstrip", "rstrip", "single_word")
    )


def unknown_token(config: Mapping[str, Any]) -> str | None:
    """The string of the id for text outside the vocabulary, if the model has one."""
    model = config["model"]
    if model.get("type") == "Unigram":
        number = model.get("unk_id")
        return None if number is None else str(model["vocab"][number][0])
    token = model.get("unk_token")
    return token if isinstance(token, str) and token else None


def is_exact(config: Mapping[str, Any], alphabet: Collection[str], hidden: Collection[str]) -> bool:
    """Whether every text comes back exactly: byte-level BPE that changes and drops nothing."""
    model = config["model"]
    decoder = config.get("decoder") or {}
    strips = any(
        token.get("lstrip") or token.get("rstrip")
        for token in config.get("added_tokens") or []
        if not token.get("special")
    )
    return (
        model.get("type") == "BPE"
        and not config.get("normalizer")
        and decoder.get("type") == "ByteLevel"
        and _keeps_all(config.get("pre_tokenizer") or {})
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and set(alphabet) <= set(model["vocab"]) - set(hidden)
        and not strips
    )


def _keeps_all(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Sequence":
        steps = step.get("pretokenizers") or [{}]
        return all(_keeps_text(part) for part in steps[:-1]) and _keeps_all(steps[-1])
    return kind == "ByteLevel" and not step.get("add_prefix_space")


def _keeps_text(step: Mapping[str, Any]) -> bool:
    kind = step.get("type")
    return kind == "Digits" or (kind == "Split" and step.get("behavior") != "Removed")


def _rename_vocab(vocab: Any, hidden: Mapping[str, str]) -> Any:
    if isinstance(vocab, dict):
        return {hidden.get(token, token): number for token, number in vocab.items()}
    if isinstance(vocab, list):
        return [[hidden.get(token, token), score] for token, score in vocab]
    raise TokenizerError(
        f"not a tokenizer.json this version reads: model.vocab is {type(vocab).__name__}, wanted "
        "an object or a list"
    )


def _builds(merge: str | list[str], hidden: Mapping[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in hidden or right in hidden or left + right in hidden
