"""What every recipe receives, and the outcome of one that has nothing to build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from niels_gpt.cache_tokenizer import CacheTokenizer
from niels_gpt.settings import Settings
from shardmill.building import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of build-all."""

    settings: Settings
    tokenizer: CacheTokenizer
    resume: bool = False
    overwrite: bool = False
    on_progress: Callable[[Progress], None] | None = None


@dataclass(frozen=True, slots=True)
class Stub:
    """Nothing was built, on purpose."""

    words: str


__all__ = ["Run", "Stub"]
