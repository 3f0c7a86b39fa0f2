"""Fast engines that could replace a tokenizer's reference engine, and which model each can load.

An engine listed here has proved nothing yet: `engine_choice` compares it with the reference. The
libraries are imported when an engine is opened. Ids come as one flat array, never as Python ints.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol

import numpy as np

from shardmill.errors import MissingExtraError, TokenizerError, missing_extra
from shardmill.protocols import Encoder, Texts
from shardmill.records import Ragged
from shardmill.tokenizers.texts import EngineSource, as_list, surrogate_error


class FastEngine(Encoder, Protocol):
    """An encoder with a name and a version."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Candidates:
    engines: tuple[FastEngine, ...]  # best first
    refusals: tuple[str, ...]  # one sentence per engine that is no candidate


def fast_candidates(tokenizer: object) -> Candidates:
    """Every fast engine that loads this tokenizer's model."""
    source: EngineSource | None = getattr(tokenizer, "engine_source", None)
    if source is None:
        return Candidates((), (f"{type(tokenizer).__name__} has no fast engine",))
    names = _names(source)
    if not names and source.facts.get("looks_around"):
        why = "no fast engine is trusted with added tokens that strip or ask for a word's border"
        return Candidates((), (why,))
    if not names:
        facts = {name: fact for name, fact in source.facts.items() if name != "added_tokens"}
        return Candidates((), (f"no fast engine takes {source.kind} models with {facts}",))
    engines: list[FastEngine] = []
    refusals: list[str] = []
    for name in names:
        try:
            engines.append(_ENGINES[name](source))
        except (MissingExtraError, TokenizerError) as problem:
            refusals.append(str(problem))
    return Candidates(tuple(engines), tuple(refusals))


def open_fast(tokenizer: object, name: str) -> FastEngine:
    """One engine by its name, with this tokenizer's model; an error if it is no candidate."""
    source: EngineSource | None = getattr(tokenizer, "engine_source", None)
    if source is None or name not in _names(source):
        raise TokenizerError(
            f"{name!r} is no fast engine for {tokenizer!r}; is it the tokenizer of this build?"
        )
    return _ENGINES[name](source)


def _names(source: EngineSource) -> list[str]:
    facts = source.facts
    if source.kind == "tokenizer.json" and facts["model_type"] == "BPE":
        # Engines differ on added tokens that strip whitespace or ask for a word's border, and no
        # battery is long enough to show that one never will.
        return [] if facts["looks_around"] else ["fastokens", "gigatoken"]
    # gigatoken's SentencePiece normaliser gives other ids, so only models without one qualify.
    is_bpe = source.kind == "sentencepiece" and facts["model_type"] == "bpe"
    return ["gigatoken"] if is_bpe and facts["byte_fallback"] and facts["identity"] else []


class FastokensEngine:
    """Byte-level BPE from a tokenizer.json.

    It would use all cores, and a build on two cores took a fifth longer for it. So unless
    FASTOKENS_BPE_THREADS is set, one core is left for reading and writing.
    """

    name = "fastokens"

    def __init__(self, source: EngineSource) -> None:
        try:
            import fastokens
        except ImportError as missing:
            raise missing_extra("fastokens", "fast") from missing
        self.version = version("fastokens")
        # The engine reads this variable once, when it first encodes.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", str(max(1, _num_cores() - 1)))
        try:
            self._engine = fastokens.Tokenizer.from_json_str(source.model.decode())
        except (ValueError, RuntimeError, TypeError) as problem:
            raise TokenizerError(f"fastokens cannot load this model: {problem}") from problem
        self._engine.enable_segment_cache(0)  # an environment variable may have turned it on

    def encode_batch(self, texts: Texts) -> Ragged:
        listed = as_list(texts)
        try:
            ids, offsets = self._engine.encode_batch_flat(
                listed, add_special_tokens=False, split_special_tokens=True
            )
        except (TypeError, UnicodeError) as problem:
            raise surrogate_error(listed) from problem
        return Ragged(np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64))


class GigatokenEngine:
    """BPE from a tokenizer.json or a SentencePiece model; runs in the caller's thread."""

    name = "gigatoken"

    def __init__(self, source: EngineSource) -> None:
        try:
            import gigatoken
        except ImportError as missing:
            raise missing_extra("gigatoken", "fast") from missing
        self.version = version("gigatoken")
        try:
            if source.kind == "sentencepiece":
                self._engine = gigatoken.Tokenizer.from_sentencepiece(source.model)
            else:
                self._engine = gigatoken.Tokenizer.from_json(source.model)
        except (ValueError, RuntimeError, TypeError) as problem:
            raise TokenizerError(f"gigatoken cannot load this model: {problem}") from problem

    def encode_batch(self, texts: Texts) -> Ragged:
        listed = as_list(texts)
        if not listed:
            return Ragged(np.empty(0, np.uint32), np.zeros(1, np.int64))
        try:
            layout = self._engine.encode_batch(listed, parallel=False).layout
        except (TypeError, UnicodeError) as problem:
            raise surrogate_error(listed) from problem
        offsets = np.asarray(layout.offsets.data).astype(np.int64)
        values = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return Ragged(values, offsets - offsets[0])


_ENGINES: dict[str, Callable[[EngineSource], FastEngine]] = {
    "fastokens": FastokensEngine,
    "gigatoken": GigatokenEngine,
}


def _num_cores() -> int:
    """Cores that this process may use, where the system can tell them from all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
