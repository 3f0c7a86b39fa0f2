"""Who a tokenizer is: one hash over everything that decides its ids.

In: plain facts.  Out: sha256 hex.
Promise: equal facts, equal hash, on any machine; any other fact, another hash.
Not here: which facts count. Each tokenizer knows its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from shardmill.records import JSON


def fingerprint_of(facts: Mapping[str, JSON]) -> str:
    """sha256 over the facts as canonical JSON."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSource:
    """What a fast engine is made of: the reference's own model, with no special left in it."""

    kind: str  # "tokenizer.json" or "sentencepiece"
    model: bytes  # the file's contents; special strings replaced by names no text can hold
    facts: Mapping[str, JSON]  # model type, byte fallback, normaliser: what an engine asks first
    library: str  # the reference engine, for produced_by
    library_version: str
