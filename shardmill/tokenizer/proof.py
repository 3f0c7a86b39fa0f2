"""Show that a fast engine gives the reference's ids, or where it does not.

In: a tokenizer, a fast engine, texts.  Out: the first difference, or a proof (a JSON value).
Promise: a proof is a pure function of model, engine versions, battery and corpus. The per-user
cache only saves the time of the battery: it never changes the outcome, and is ignored when
unreadable.
Not here: deciding what to do about a difference.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardmill.atomic import atomic_write
from shardmill.caches import cache_folder
from shardmill.protocols import Encoder, Tokenizer
from shardmill.records import JSON, IntArray
from shardmill.tokenizer.battery import BATTERY_VERSION, battery_sha256, battery_texts
from shardmill.tokenizer.fast import FastEngine
from shardmill.tokenizer.identity import EngineSource, fingerprint_of
from shardmill.tokenizer.texts import num_bytes

_log = logging.getLogger(__name__)
CORPUS_BYTES = 2 * 2**20
_PER_COMPARISON = 2**17  # characters: the reference takes a kilobyte of memory for some


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a comparison found."""

    documents: int
    bytes: int
    sha256: str  # of the texts compared
    difference: str | None  # None: equal everywhere

    def to_json(self) -> dict[str, JSON]:
        return {"documents": self.documents, "bytes": self.bytes, "sha256": self.sha256}


def compare(tokenizer: Encoder, engine: Encoder, texts: Sequence[str]) -> str | None:
    """The first difference in words, or None."""
    for group in _groups(texts):
        wanted, found = tokenizer.encode_batch(group), engine.encode_batch(group)
        if len(found) != len(wanted):
            return f"{len(group)} texts gave {len(found)} sequences"
        if wanted == found:
            continue
        for text, right, given in zip(group, wanted, found, strict=True):
            if not np.array_equal(right, given):
                return describe_difference(tokenizer, text, right, given)
    return None


def describe_difference(tokenizer: Encoder, text: str, wanted: IntArray, found: IntArray) -> str:
    """Where two encodings of a text part, with the text around it and both ids lists there."""
    shorter = min(len(wanted), len(found))
    unequal = np.flatnonzero(wanted[:shorter] != found[:shorter])
    place = int(unequal[0]) if len(unequal) else shorter
    around = ""
    decode = getattr(tokenizer, "decode", None)
    if decode is not None:
        around = f", after {decode(wanted[max(0, place - 8) : place])!r}"
    return (
        f"text {text[:60]!r}{'...' if len(text) > 60 else ''} ({len(text):,} characters): from "
        f"token {place:,} on{around} the reference gives {wanted[place : place + 8].tolist()}, the "
        f"fast engine {found[place : place + 8].tolist()}"
    )


def compare_battery(tokenizer: Tokenizer, engine: FastEngine, source: EngineSource) -> Outcome:
    """The model's part of the proof: every text of the battery, with its own special strings."""
    specials = [tokenizer.decode([number]) for number in sorted(_special_ids(tokenizer))]
    added = source.facts.get("added_tokens")
    tokens = [str(text) for text in added] if isinstance(added, list) else []
    texts = list(battery_texts(specials, tokens))
    sha256 = battery_sha256(texts)
    facts: dict[str, JSON] = {
        "battery": [BATTERY_VERSION, sha256],
        "tokenizer": tokenizer.fingerprint,
        "engine": [engine.name, engine.version],
        "reference": [source.library, source.library_version],
        "machine": platform.machine(),
    }
    place = cache_folder("engine-proofs") / f"{fingerprint_of(facts)}.json"
    known, difference = _read_cache(place, facts)
    if not known:
        _log.info("comparing %s with %s on the battery", engine.name, source.library)
        difference = compare(tokenizer, engine, texts)
        _write_cache(place, facts, difference)
    size = int(num_bytes(texts).sum())
    return Outcome(documents=len(texts), bytes=size, sha256=sha256, difference=difference)


def compare_corpus(tokenizer: Tokenizer, engine: Encoder, corpus: Sequence[str]) -> Outcome:
    """The corpus' part: its first two megabytes, compared every time."""
    sizes = np.cumsum(num_bytes(corpus))
    stop = min(len(corpus), int(np.searchsorted(sizes, CORPUS_BYTES)) + 1)
    texts = list(corpus[:stop])
    return Outcome(
        documents=len(texts),
        bytes=int(sizes[stop - 1]) if stop else 0,
        sha256=battery_sha256(texts),
        difference=compare(tokenizer, engine, texts),
    )


def _special_ids(tokenizer: Tokenizer) -> set[int]:
    return set(tokenizer.special_token_ids().values())


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Slices of some text, so that a long corpus is compared in little memory."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= _PER_COMPARISON:
            yield group
            group, size = [], 0
    if group:
        yield group


def _read_cache(place: Path, facts: dict[str, JSON]) -> tuple[bool, str | None]:
    """(whether the outcome is known, the difference). Anything unexpected counts as not known."""
    try:
        found = json.loads(place.read_bytes())
    except (OSError, ValueError):
        return False, None
    if not isinstance(found, dict) or set(found) != {"facts", "difference"}:
        return False, None
    difference = found["difference"]
    if found["facts"] != facts or not (difference is None or isinstance(difference, str)):
        return False, None
    return True, difference


def _write_cache(place: Path, facts: dict[str, JSON], difference: str | None) -> None:
    """Best effort: a folder that cannot be written costs the next run some seconds, no more."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(place) as file:
            file.write(json.dumps({"facts": facts, "difference": difference}).encode())
    except OSError as problem:
        _log.info("the proof is not kept for next time: %s", problem)
