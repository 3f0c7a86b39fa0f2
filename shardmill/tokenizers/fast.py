"""Which fast engines could stand in for a tokenizer's reference engine.

In: a tokenizer.  Out: engines that loaded its model, best first, and why others did not.
Promise: an engine listed here has proved nothing yet.
Not here: proving and choosing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shardmill.errors import MissingExtraError, TokenizerError
from shardmill.protocols import Encoder
from shardmill.tokenizers.texts import EngineSource


class FastEngine(Encoder, Protocol):
    """An encoder that names itself."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Candidates:
    engines: tuple[FastEngine, ...]
    refusals: tuple[str, ...]  # one sentence per engine that is no candidate


def fast_candidates(tokenizer: object) -> Candidates:
    """Every fast engine that loads this tokenizer's model."""
    source: EngineSource | None = getattr(tokenizer, "engine_source", None)
    if source is None:
        return Candidates((), (f"{type(tokenizer).__name__} has no fast engine",))
    names = _names(source)
    if not names:
        return Candidates((), (_why_none(source),))
    engines: list[FastEngine] = []
    refusals: list[str] = []
    for name in names:
        try:
            engines.append(_MAKERS[name](source))
        except (MissingExtraError, TokenizerError) as problem:
            refusals.append(str(problem))
    return Candidates(tuple(engines), tuple(refusals))


def open_fast(tokenizer: object, name: str) -> FastEngine:
    """One engine by its name, with this tokenizer's model; an error when it is no candidate."""
    source: EngineSource | None = getattr(tokenizer, "engine_source", None)
    if source is None or name not in _names(source):
        raise TokenizerError(
            f"{name!r} is no fast engine for {tokenizer!r}; is it the tokenizer of this build?"
        )
    return _MAKERS[name](source)


def _names(source: EngineSource) -> list[str]:
    if source.kind == "tokenizer.json" and source.facts["model_type"] == "BPE":
        # Engines differ on added tokens that strip or ask for borders, and no battery is long
        # enough to show that one never will.
        return [] if source.facts["looks_around"] else ["fastokens", "gigatoken"]
    if source.kind == "sentencepiece" and _is_plain_bpe(source):
        return ["gigatoken"]
    return []


def _is_plain_bpe(source: EngineSource) -> bool:
    """gigatoken's SentencePiece normaliser gives other ids; without one it has none to differ."""
    facts = source.facts
    return facts["model_type"] == "bpe" and bool(facts["byte_fallback"] and facts["identity"])


def _why_none(source: EngineSource) -> str:
    if source.facts.get("looks_around"):
        return "no fast engine is trusted with added tokens that strip or ask for a word's border"
    facts = {name: fact for name, fact in source.facts.items() if name != "added_tokens"}
    return f"no fast engine takes {source.kind} models with {facts}"


def _fastokens(source: EngineSource) -> FastEngine:
    from shardmill.tokenizers.fast_fastokens import FastokensEngine

    return FastokensEngine(source.model)


def _gigatoken(source: EngineSource) -> FastEngine:
    from shardmill.tokenizers.fast_gigatoken import GigatokenEngine

    return GigatokenEngine(source)


_MAKERS: dict[str, Callable[[EngineSource], FastEngine]] = {
    "fastokens": _fastokens,
    "gigatoken": _gigatoken,
}
