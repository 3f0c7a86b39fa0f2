"""Hugging Face tokenizers: a tokenizer.json, a folder or a hub id; training of byte-level BPE."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import TokenizerError, missing_extra
from shardmill.protocols import Texts
from shardmill.records import IntArray, OffsetArray, Ragged
from shardmill.tokenizers.base import (
    EngineSource,
    TokenizerWithSpecials,
    as_list,
    character_spans,
    fingerprint_of,
    read_json,
    read_meta,
    sha256_hex,
    short_name,
    slices,
    surrogate_error,
)
from shardmill.tokenizers.battery import short_texts

try:
    import tokenizers as library
    from tokenizers.pre_tokenizers import ByteLevel
except ImportError as missing:
    raise missing_extra("tokenizers", "hf") from missing

_log = logging.getLogger(__name__)


def text_only(config: Mapping[str, Any], hidden: Mapping[str, str]) -> dict[str, Any]:
    """A copy of a tokenizer.json that can only make text: no string leads to a special id.

    `hidden` maps each special string to a name that no text can hold. Special added tokens and
    their vocabulary entries get these names, merges that would build them are left out, and
    post-processor, truncation and padding go. Every id keeps its number, text without special
    strings gives the same ids, and nothing is added to the ids of a text. The reference and the
    fast engines are all made from this copy, so they agree on what is special.
    """
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


def _added_tokens(config: Mapping[str, Any], *, special: bool) -> list[dict[str, Any]]:
    """The added tokens that the file marks as special; or those that are matched in text."""
    tokens = config.get("added_tokens") or []
    return [token for token in tokens if bool(token.get("special")) == special]


def unknown_token(config: Mapping[str, Any]) -> str | None:
    """The string of the id for text outside the vocabulary, if the model has one."""
    model = config["model"]
    if model.get("type") == "Unigram":
        number = model.get("unk_id")
        return None if number is None else str(model["vocab"][number][0])
    token = model.get("unk_token")
    return token if isinstance(token, str) and token else None


def is_exact(config: Mapping[str, Any], alphabet: Collection[str], hidden: Collection[str]) -> bool:
    """Whether every text round-trips exactly: byte-level BPE that changes and drops nothing."""
    model = config["model"]
    decoder = config.get("decoder") or {}
    in_text = _added_tokens(config, special=False)
    return (
        model.get("type") == "BPE"
        and not config.get("normalizer")
        and decoder.get("type") == "ByteLevel"
        and _keeps_all(config.get("pre_tokenizer") or {})
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and set(alphabet) <= set(model["vocab"]) - set(hidden)
        and not any(token.get("lstrip") or token.get("rstrip") for token in in_text)
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
    ids, strings = read_meta(path, sha256_hex(path.read_bytes()))
    if ids and strings:
        return FileNames(strings)
    names = FileNames()
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        beside = path.parent / file
        value = read_json(beside) if beside.is_file() else {}
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


_CHARACTERS_PER_CALL = 2**21
"""The library keeps an object per token until a call ends: short calls keep memory flat."""


class HuggingFaceTokenizer(TokenizerWithSpecials):
    """One tokenizer.json.

    Special are the added tokens that the file marks as special, and every string in `names` (name
    to string). Text never becomes a special id. All other ids are the library's own, checked on
    opening: a non-special added token (a run of spaces, say) is matched in text as always. Decoding
    shows a special as its literal string and drops no token.
    """

    def __init__(self, config_json: str | bytes, *, names: Mapping[str, str] | None = None) -> None:
        config = _parse(config_json)
        data = config_json.encode() if isinstance(config_json, str) else config_json
        self._names = names if names is None or isinstance(names, FileNames) else dict(names)
        self.model_bytes = data
        self.model_sha256 = sha256_hex(data)
        self._original = _load(json.dumps(config))
        vocabulary: dict[str, int] = self._original.get_vocab(with_added_tokens=True)
        unknown = unknown_token(config)
        marked = {t["content"]: t["id"] for t in _added_tokens(config, special=True)}
        self.special_names = find_names(names, marked, vocabulary, unknown)
        hidden_ids = {*marked.values(), *self.special_names.values()}
        hidden = sorted(text for text, number in vocabulary.items() if number in hidden_ids)
        self._exact = is_exact(config, ByteLevel.alphabet(), hidden)
        if unknown is not None and vocabulary.get(unknown) in self.special_names.values():
            if not self._exact:
                raise TokenizerError(
                    f"{unknown!r} is a special token and also the unknown token, so text outside "
                    "the vocabulary would become a special id; give the model a separate unknown "
                    "token, or do not name this one special"
                )
            config = {**config, "model": {**config["model"], "unk_token": None}}
            unknown = None  # no text is unknown
        self.unknown_id = None if unknown is None else vocabulary.get(unknown)
        nonce = secrets.token_hex(16)
        replacements = {text: f"<{nonce}-{number}>" for number, text in enumerate(hidden)}
        self._config = config
        self._model_type = str(config["model"].get("type"))
        self._text_only = json.dumps(text_only(config, replacements))
        self._tokenizer = _load(self._text_only)
        strings = {vocabulary[text]: text for text in hidden}
        strings.pop(-1 if self.unknown_id is None else self.unknown_id, None)
        self.special_strings = strings
        self._known = np.zeros(max(vocabulary.values()) + 1, bool)
        self._known[list(vocabulary.values())] = True
        self._check_same_text(vocabulary, replacements)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles as its JSON and the names it was opened with; opening checks it again."""
        return partial(type(self), self.model_bytes, names=self._names), ()

    @property
    def vocab_size(self) -> int:
        return len(self._known)

    @cached_property
    def fingerprint(self) -> str:
        """Ignores the formatting of the JSON and the names of specials: they change no id."""
        return fingerprint_of(
            {
                "kind": "huggingface",
                "config": self._config,
                "hidden": [*sorted(self.special_strings)],
            }
        )

    @property
    def engine_source(self) -> EngineSource:
        """With the added tokens that are matched in text, and whether one takes the whitespace
        beside it or asks for a word's border."""
        in_text = _added_tokens(self._config, special=False)
        return EngineSource(
            kind="tokenizer.json",
            model=self._text_only.encode(),
            facts={
                "model_type": self._model_type,
                "looks_around": any(
                    token.get("lstrip") or token.get("rstrip") or token.get("single_word")
                    for token in in_text
                ),
            },
            added_tokens=tuple(sorted(token["content"] for token in in_text)),
            library="tokenizers",
            library_version=library.__version__,
        )

    def encode_batch(self, texts: Texts) -> Ragged:
        parts = [np.empty(0, np.uint32)]
        listed = as_list(texts)
        for group in slices(listed, _CHARACTERS_PER_CALL):
            try:
                encoded = self._tokenizer.encode_batch_fast(group, add_special_tokens=False)
            except (TypeError, UnicodeError) as problem:
                raise surrogate_error(listed) from problem
            parts.extend(np.array(one.ids, np.uint32) for one in encoded)
        return Ragged.from_lengths(np.concatenate(parts), [len(part) for part in parts[1:]])

    def spans(self, text: str) -> OffsetArray:
        """(n, 2) the characters start..stop of each token.

        Exact to the byte if ids decode to the text piece by piece, else as the library reports.
        """
        found = self._tokenizer.encode(text, add_special_tokens=False)
        if self._exact:
            added = self._tokenizer.get_added_tokens_decoder()
            sizes = [
                len(added[number].content.encode()) if number in added else len(token)
                for number, token in zip(found.ids, found.tokens, strict=True)
            ]
            if sum(sizes) == len(text.encode()):  # a byte is one character of such a token
                return character_spans(text, np.array(sizes, np.int64))
        return np.array(found.offsets, np.int64).reshape(-1, 2)

    def round_trips(self, text: str) -> bool:  # noqa: ARG002 - other kinds look at the text
        """True for byte-level BPE without a normaliser, and then for every text."""
        return self._exact

    def _decode_text(self, ids: IntArray) -> str:
        inside = (ids >= 0) & (ids < len(self._known))
        wrong = ~inside
        wrong[inside] = ~self._known[ids[inside]]
        self._refuse_unknown(ids, wrong)
        return str(self._original.decode(ids.tolist(), skip_special_tokens=False))

    def _check_same_text(
        self, vocabulary: Mapping[str, int], replacements: Mapping[str, str]
    ) -> None:
        """Check that the text-only copy gives the original's ids on text without specials."""
        found: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        wanted = {replacements.get(text, text): number for text, number in vocabulary.items()}
        if found != wanted:
            moved = sorted(set(found.items()) ^ set(wanted.items()))[:4]
            raise TokenizerError(f"hiding the special tokens moved other ids: {moved}")
        self._original.encode_special_tokens = True
        texts = [text for text in short_texts() if not any(word in text for word in replacements)]
        for text, ids in zip(texts, self.encode_batch(texts), strict=True):
            reference = self._original.encode(text, add_special_tokens=False).ids
            if ids.tolist() != reference:
                raise TokenizerError(
                    f"hiding the special tokens of this tokenizer.json changes other ids: "
                    f" {text[:80]!r} gives {reference[:20]} and "
                    f"{ids.tolist()[:20]}"
                )

    def __repr__(self) -> str:
        return f"HuggingFaceTokenizer({self._model_type}, vocab_size={self.vocab_size})"


def _parse(config_json: str | bytes) -> dict[str, Any]:
    try:
        config = json.loads(config_json)
    except (ValueError, RecursionError) as problem:
        raise TokenizerError(f"not a tokenizer.json: {problem}") from problem
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or "vocab" not in model:
        raise TokenizerError("not a tokenizer.json: it has no model with a vocab")
    return {**config, "padding": None, "truncation": None}


def _load(config_json: str) -> Any:
    try:
        return library.Tokenizer.from_str(config_json)
    except Exception as problem:  # tokenizers raises bare Exception
        raise TokenizerError(f"tokenizers refuses this tokenizer.json: {problem}") from problem


def open_file(path: Path, *, specials: Mapping[str, str] | None) -> HuggingFaceTokenizer:
    """A tokenizer.json; names of specials come from the files beside it."""
    try:
        return HuggingFaceTokenizer(
            path.read_bytes(), names=names_beside(path) if specials is None else specials
        )
    except OSError as problem:
        raise TokenizerError(f"{path}: cannot be read: {problem.strerror}") from problem
    except TokenizerError as problem:
        raise TokenizerError(f"{path}: {problem}") from problem


def from_library(
    loaded: Any, name: str, *, specials: Mapping[str, str] | None
) -> HuggingFaceTokenizer:
    """A tokenizer object of tokenizers or transformers, opened by its model."""
    backend = getattr(loaded, "backend_tokenizer", loaded)
    if not hasattr(backend, "to_str"):
        raise TokenizerError(
            f"{name} is a {type(loaded).__name__}, which has no tokenizer.json form; open its "
            ".model file, or use adapt_tokenizer(...) for your own object"
        )
    names = specials
    if names is None:  # transformers calls them {"eos_token": "</s>", ...}
        found = getattr(loaded, "special_tokens_map", {})
        names = FileNames(
            (key.removesuffix("_token"), text)
            for key, text in found.items()
            if isinstance(text, str)
        )
    return HuggingFaceTokenizer(str(backend.to_str()), names=names)


def load_transformers(spec: str, revision: str | None = None) -> Any:
    """The tokenizer as transformers has it, with its chat template. No remote code is run."""
    try:
        from transformers import AutoTokenizer
    except ImportError as missing:
        raise missing_extra("transformers", "hub") from missing
    try:
        return AutoTokenizer.from_pretrained(
            spec, revision=revision or "main", trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as problem:
        raise TokenizerError(
            f"{spec!r}: transformers cannot open this tokenizer: {problem}; give a folder with a "
            "tokenizer.json, a .model file, or the id of a public hub repository"
        ) from problem


def train_byte_bpe(chunks: Sequence[str], vocab_size: int, specials: Mapping[str, str]) -> bytes:
    """A tokenizer.json of byte-level BPE.

    The specials are ids 0, 1, ... and the 256 bytes follow; every text round-trips exactly.
    """
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials.values()),
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chunks, trainer, length=len(chunks))
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        raise TokenizerError(
            f"{{vocab_size}} is more than this text can fill; the largest possible is {size:,}: "
            "give that, or more text",
            vocab_size=vocab_size,
        )
    return str(tokenizer.to_str(pretty=True)).encode()
