"""Choose the engine that encodes a build, and keep watching it.

In: a tokenizer, a wish (reference, fast, auto), the first texts of the corpus.  Out: an encoder
with `produced_by`, the record for the manifest.
Promise: a fast engine serves only after it gave the reference's ids on the battery and on this
corpus, and is compared on a sample of every build; a difference raises, it is never passed on.
What was chosen is a pure function of the arguments and the installed versions.
Not here: building again after a mismatch; the same engine in another process (`reopen`).

Show that a fast engine gives the reference's ids, or where it does not.

In: a tokenizer, a fast engine, texts.  Out: the first difference, or a proof (a JSON value).
Promise: a proof is a pure function of model, engine versions, battery and corpus. The per-user
cache only saves the time of the battery: it never changes the outcome, and is ignored when
unreadable.
Not here: deciding what to do about a difference.

Open in a worker the engine that its parent proved.

In: the tokenizer, and the parent's `produced_by`.  Out: an encoder that watches its sample as ever.
Promise: the same engine in the same version, or an error that names both; nothing is proved again,
so it opens at once. Engines themselves do not travel: the tokenizer does, by its model.
Not here: choosing and proving (`choose`).

Threads. A worker has n of them when `thread_limits(n)` is in its environment before it starts, for
each library reads its variable once:

    fastokens       FASTOKENS_BPE_THREADS, at its first call
    tokenizers      RAYON_NUM_THREADS, at its first batch, which opening one already is; and
                    TOKENIZERS_PARALLELISM, where "false" is no thread beside the caller's
    sentencepiece   no variable: SentencePieceTokenizer(num_threads=n), 1 unless said, which travels
    gigatoken       runs in the caller's thread
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from shardmill.errors import EngineMismatchError, OptionError, TokenizerError
from shardmill.protocols import Encoder, Texts, Tokenizer
from shardmill.records import JSON, IntArray, OffsetArray, Ragged
from shardmill.storage.atomic import atomic_write, cache_folder
from shardmill.tokenizers.battery import BATTERY_VERSION, battery_sha256, battery_texts
from shardmill.tokenizers.fast import FastEngine, fast_candidates, open_fast
from shardmill.tokenizers.texts import EngineSource, fingerprint_of, is_arrow, num_bytes

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


def reopen_encoder(
    tokenizer: Tokenizer, produced_by: Mapping[str, JSON], *, check: EngineCheck = "sample"
) -> ChosenEncoder:
    """The encoder that `choose_encoder` gave for an equal tokenizer in another process.

    `produced_by` is its record, as it is or out of JSON. Every worker compares its own sample, at
    least one byte in 2,048 of what it encodes. For its threads see above.
    """
    if check not in ("sample", "full"):
        raise OptionError(f"check={check!r}: wanted sample or full")
    engine, reference = produced_by.get("engine"), produced_by.get("reference")
    if not isinstance(engine, str) or not isinstance(reference, str):
        raise TokenizerError(
            f"no record of a chosen engine: {dict(produced_by)!r:.200}; wanted the produced_by of "
            "the encoder that the parent chose"
        )
    fast = None if engine == reference else open_fast(tokenizer, engine)
    found, wanted = _versions(tokenizer, fast), produced_by.get("versions")
    if found != wanted:
        raise TokenizerError(
            f"the engine was proved with {wanted}, but this process has {found}; install the same "
            "versions everywhere, or choose and prove anew"
        )
    return ChosenEncoder(tokenizer, fast, check=check, produced_by=dict(produced_by))


def thread_limits(num_threads: int) -> dict[str, str]:
    """Environment variables for a process whose engines shall have so many threads."""
    if num_threads < 1:
        raise OptionError(f"num_threads={num_threads}: wanted 1 or more")
    return {
        "FASTOKENS_BPE_THREADS": str(num_threads),
        "RAYON_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "true" if num_threads > 1 else "false",
    }


def _versions(tokenizer: Tokenizer, fast: FastEngine | None) -> dict[str, JSON]:
    source: EngineSource | None = getattr(tokenizer, "engine_source", None)
    found: dict[str, JSON] = {} if fast is None else {fast.name: fast.version}
    if source is not None:
        found[source.library] = source.library_version
    return found
