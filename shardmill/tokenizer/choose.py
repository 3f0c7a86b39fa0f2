"""Choose the engine that encodes a build, and keep watching it.

In: a tokenizer, a wish (reference, fast, auto), the first texts of the corpus.  Out: an encoder
with `produced_by`, the record for the manifest.
Promise: a fast engine serves only after it gave the reference's ids on the battery and on this
corpus, and is compared on a sample of every build; a difference raises, it is never passed on.
What was chosen is a pure function of the arguments and the installed versions.
Not here: building again after a mismatch; the same engine in another process (`reopen`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np

from shardmill.errors import EngineMismatchError, OptionError, TokenizerError
from shardmill.protocols import Texts, Tokenizer
from shardmill.records import JSON, OffsetArray, Ragged
from shardmill.tokenizer.battery import BATTERY_VERSION
from shardmill.tokenizer.fast import FastEngine, fast_candidates
from shardmill.tokenizer.identity import EngineSource
from shardmill.tokenizer.proof import (
    Outcome,
    compare_battery,
    compare_corpus,
    describe_difference,
)
from shardmill.tokenizer.texts import is_arrow, num_bytes

_log = logging.getLogger(__name__)
FAST_FROM_BYTES = 32 * 2**20
SAMPLE_ONE_IN = 2048

EngineChoice = Literal["reference", "fast", "auto"]
EngineCheck = Literal["sample", "full"]


class ChosenEncoder:
    """The encoder of one build.

    With a fast engine, at least one byte in 2,048 so far is encoded by the reference too (all of
    them with check="full"); which documents depends only on the sequence of calls.
    """

    def __init__(
        self,
        reference: Tokenizer,
        fast: FastEngine | None,
        *,
        check: EngineCheck,
        produced_by: dict[str, JSON],
    ) -> None:
        self._reference = reference
        self._fast = fast
        self._check = check
        self.produced_by = produced_by
        self.bytes_seen = 0
        self.bytes_compared = 0
        self.documents_compared = 0
        self._calls = 0

    def __reduce__(self) -> tuple[object, ...]:
        """An engine is memory and threads of this process."""
        raise TokenizerError(
            f"{self!r} stays in its process; send the tokenizer and produced_by, and open the "
            "engine there with reopen_encoder(tokenizer, produced_by)"
        )

    @property
    def is_fast(self) -> bool:
        return self._fast is not None

    def encode_batch(self, texts: Texts) -> Ragged:
        """The ids of each text; EngineMismatchError when a compared document differs."""
        ids = self.encode_unwatched(texts)
        self.watch(texts, ids)
        return ids

    def encode_unwatched(self, texts: Texts) -> Ragged:
        """The ids of each text, not yet compared: give them to `watch` before they are kept.

        The two halves of `encode_batch`, for a caller with a thread for each.
        """
        if self._fast is None:
            return self._reference.encode_batch(texts)
        ids = self._fast.encode_batch(texts)
        if len(ids) != len(texts):
            raise EngineMismatchError(
                f"{self._fast.name} gave {len(ids):,} sequences for {len(texts):,} texts; build "
                "with engine='reference'"
            )
        return ids

    def watch(self, texts: Texts, ids: Ragged) -> None:
        """Compare a sample of what was encoded; batches come here in their order."""
        if self._fast is not None and len(texts):
            self._compare(texts, ids, self._choose_sample(num_bytes(texts)))

    def _choose_sample(self, sizes: OffsetArray) -> OffsetArray:
        """Document numbers to compare: none while ahead, else as many as catch up."""
        self.bytes_seen += int(sizes.sum())
        self._calls += 1
        if self._check == "full":
            return np.arange(len(sizes))
        debt = -(-self.bytes_seen // SAMPLE_ONE_IN) - self.bytes_compared
        if debt <= 0:
            return np.empty(0, np.int64)
        # Another place in every call, so that the sample is not all first documents.
        order = (np.arange(len(sizes)) + (self._calls - 1) * 7919) % len(sizes)
        stop = int(np.searchsorted(np.cumsum(sizes[order]), debt)) + 1
        return order[:stop]

    def _compare(self, texts: Texts, ids: Ragged, numbers: OffsetArray) -> None:
        sample = [_text(texts, number) for number in numbers.tolist()]
        wanted = self._reference.encode_batch(sample)
        for number, text, right in zip(numbers.tolist(), sample, wanted, strict=True):
            if not np.array_equal(right, ids[number]):
                assert self._fast is not None
                raise EngineMismatchError(
                    f"{self._fast.name} {self._fast.version} is not this tokenizer: "
                    f"{describe_difference(self._reference, text, right, ids[number])}; "
                    "build with engine='reference'"
                )
        self.documents_compared += len(sample)
        self.bytes_compared += int(num_bytes(sample).sum())

    def __repr__(self) -> str:
        return f"ChosenEncoder({self.produced_by['engine']!r}, check={self._check!r})"


def choose_encoder(
    tokenizer: Tokenizer,
    *,
    engine: EngineChoice = "auto",
    check: EngineCheck = "sample",
    corpus: Sequence[str] = (),
    size_hint: int | None = None,
) -> ChosenEncoder:
    """The encoder for a build of `corpus` and what follows it.

    "auto" tries fast engines when about `size_hint` bytes (None: unknown) make the proof worth its
    seconds, and falls back to the reference; "fast" raises when none is proved.
    """
    if engine not in ("reference", "fast", "auto") or check not in ("sample", "full"):
        raise OptionError(
            f"engine={engine!r}, check={check!r}: wanted engine reference, fast or auto, and check "
            "sample or full"
        )
    if engine == "reference":
        return _use_reference(tokenizer, "asked for", [], check)
    if engine == "auto" and size_hint is not None and size_hint < FAST_FROM_BYTES:
        return _use_reference(tokenizer, f"input under {FAST_FROM_BYTES // 2**20} MiB", [], check)
    candidates = fast_candidates(tokenizer)
    rejected: list[JSON] = []
    for fast in candidates.engines:
        proof, difference = _prove(tokenizer, fast, corpus)
        if difference is None:
            return _use_fast(tokenizer, fast, proof, rejected, check)
        _log.warning("%s %s is not used: %s", fast.name, fast.version, difference)
        rejected.append({"engine": fast.name, "version": fast.version, "difference": difference})
    reasons = [*candidates.refusals, *(str(item) for item in rejected)]
    if engine == "fast":
        failure = EngineMismatchError if rejected else TokenizerError
        raise failure(
            f"no fast engine for {tokenizer!r}: {'; '.join(reasons)}; use engine='auto' or "
            "engine='reference'"
        )
    reason = "every fast engine differed" if rejected else "no fast engine for this model"
    return _use_reference(tokenizer, reason, rejected, check)


def _prove(
    tokenizer: Tokenizer, fast: FastEngine, corpus: Sequence[str]
) -> tuple[dict[str, JSON], str | None]:
    source = tokenizer.engine_source  # type: ignore[attr-defined]  # candidates come from it
    battery = compare_battery(tokenizer, fast, source)
    if battery.difference is not None:
        return {}, f"battery: {battery.difference}"
    first: Outcome = compare_corpus(tokenizer, fast, corpus)
    if first.difference is not None:
        return {}, f"corpus: {first.difference}"
    proof: dict[str, JSON] = {
        "battery": {"version": BATTERY_VERSION, **battery.to_json()},
        "corpus": first.to_json(),
    }
    return proof, None


def _use_fast(
    tokenizer: Tokenizer,
    fast: FastEngine,
    proof: dict[str, JSON],
    rejected: list[JSON],
    check: EngineCheck,
) -> ChosenEncoder:
    source: EngineSource = tokenizer.engine_source  # type: ignore[attr-defined]
    _log.info("engine: %s %s, proved equal to %s", fast.name, fast.version, source.library)
    produced_by: dict[str, JSON] = {
        "engine": fast.name,
        "reference": source.library,
        "versions": {fast.name: fast.version, source.library: source.library_version},
        "check": f"1/{SAMPLE_ONE_IN} of the bytes" if check == "sample" else "everything",
        "proof": proof,
    }
    if rejected:
        produced_by["rejected"] = rejected
    return ChosenEncoder(tokenizer, fast, check=check, produced_by=produced_by)


def _use_reference(
    tokenizer: Tokenizer, reason: str, rejected: list[JSON], check: EngineCheck
) -> ChosenEncoder:
    source: EngineSource | None = getattr(tokenizer, "engine_source", None)
    name = source.library if source else type(tokenizer).__name__
    _log.info("engine: the reference, %s (%s)", name, reason)
    produced_by: dict[str, JSON] = {
        "engine": name,
        "reference": name,
        "versions": {source.library: source.library_version} if source else {},
        "reason": reason,
    }
    if rejected:
        produced_by["rejected"] = rejected
    return ChosenEncoder(tokenizer, None, check=check, produced_by=produced_by)


def _text(texts: Texts, number: int) -> str:
    one = texts[number]
    return str(one.as_py() if is_arrow(texts) else one)  # type: ignore[union-attr]
