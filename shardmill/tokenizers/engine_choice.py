"""Choose the engine that encodes a build, prove it equal to the reference, and keep checking it.

A fast engine is used only after it gave the reference's ids on the battery and on this corpus, and
it is compared on a sample of every build. A difference raises an error; wrong ids are never passed
on. The choice is a pure function of the arguments and the installed versions: the per-user cache of
proofs only saves time. A worker opens the engine that its parent proved (`reopen_encoder`) without
proving it again.

A worker has n threads if `thread_limits(n)` is in its environment before it starts, since each
library reads its variable once:

    fastokens       FASTOKENS_BPE_THREADS, at its first call
    tokenizers      RAYON_NUM_THREADS, at its first batch, which opening one already is; and
                    TOKENIZERS_PARALLELISM, where "false" means the caller's thread only
    sentencepiece   no variable: SentencePieceTokenizer(num_threads=n), 1 by default, is pickled
    gigatoken       runs in the caller's thread
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
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
FAST_FROM_BYTES = 32 * 2**20
SAMPLE_ONE_IN = 2048
_PER_COMPARISON = 2**17  # characters: the reference takes a kilobyte of memory for some

EngineChoice = Literal["reference", "fast", "auto"]
EngineCheck = Literal["sample", "full"]


class ChosenEncoder:
    """The encoder of one build.

    With a fast engine, at least one byte in 2,048 so far is encoded by the reference too (all of
    them with check="full"). Which documents are compared depends only on the sequence of calls.
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
        self.produced_by = produced_by  # the record for the manifest
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
        """The ids of each text; EngineMismatchError if a compared document differs."""
        ids = self.encode_unwatched(texts)
        self.watch(texts, ids)
        return ids

    def encode_unwatched(self, texts: Texts) -> Ragged:
        """The ids of each text, not compared yet: give them to `watch` before they are kept.

        The two halves of `encode_batch`, for a caller with a thread for each.
        """
        if self._fast is None:
            return self._reference.encode_batch(texts)
        ids = self._fast.encode_batch(texts)
        if len(ids) != len(texts):
            raise EngineMismatchError(
                f"{self._fast.name} gave {len(ids):,} sequences for {len(texts):,} texts; build "
                "with {engine}",
                engine="reference",
            )
        return ids

    def watch(self, texts: Texts, ids: Ragged) -> None:
        """Compare a sample of what was encoded. Call it with the batches in order."""
        if self._fast is None or not len(texts):
            return
        numbers = self._choose_sample(num_bytes(texts)).tolist()
        sample = [_text(texts, number) for number in numbers]
        wanted = self._reference.encode_batch(sample)
        for number, text, right in zip(numbers, sample, wanted, strict=True):
            if not np.array_equal(right, ids[number]):
                raise EngineMismatchError(
                    f"{self._fast.name} {self._fast.version} is not this tokenizer: "
                    f"{_describe_difference(self._reference, text, right, ids[number])}; "
                    "build with {engine}",
                    engine="reference",
                )
        self.documents_compared += len(sample)
        self.bytes_compared += int(num_bytes(sample).sum())

    def _choose_sample(self, sizes: OffsetArray) -> OffsetArray:
        """The documents to compare: none while we are ahead, else as many as catch up."""
        self.bytes_seen += int(sizes.sum())
        self._calls += 1
        if self._check == "full":
            return np.arange(len(sizes))
        missing = -(-self.bytes_seen // SAMPLE_ONE_IN) - self.bytes_compared
        if missing <= 0:
            return np.empty(0, np.int64)
        # Start elsewhere in every call, so that the sample is not all first documents.
        order = (np.arange(len(sizes)) + (self._calls - 1) * 7919) % len(sizes)
        stop = int(np.searchsorted(np.cumsum(sizes[order]), missing)) + 1
        return order[:stop]

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
    """The encoder for a build that begins with the texts `corpus`.

    "auto" tries fast engines if about `size_hint` bytes (None: unknown) make the proof worth its
    seconds, and falls back to the reference; "fast" raises if none is proved.
    """
    if engine not in ("reference", "fast", "auto"):
        raise OptionError("{engine}: wanted reference, fast or auto", engine=engine)
    _check_check(check)
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
    if engine == "fast":
        reasons = "; ".join([*candidates.refusals, *(str(item) for item in rejected)])
        failure = EngineMismatchError if rejected else TokenizerError
        raise failure(
            f"no fast engine for {tokenizer!r}: {reasons}; build with {{engine}}", engine="auto"
        )
    reason = "every fast engine differed" if rejected else "no fast engine for this model"
    return _use_reference(tokenizer, reason, rejected, check)


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
        "versions": _versions(tokenizer, fast),
        "check": f"1/{SAMPLE_ONE_IN} of the bytes" if check == "sample" else "everything",
        "proof": proof,
        **({"rejected": rejected} if rejected else {}),
    }
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
        "versions": _versions(tokenizer, None),
        "reason": reason,
        **({"rejected": rejected} if rejected else {}),
    }
    return ChosenEncoder(tokenizer, None, check=check, produced_by=produced_by)


def reopen_encoder(
    tokenizer: Tokenizer, produced_by: Mapping[str, JSON], *, check: EngineCheck = "sample"
) -> ChosenEncoder:
    """The encoder that `choose_encoder` gave for an equal tokenizer in another process.

    `produced_by` is its record, as it is or decoded from JSON. The versions must be the same. Every
    worker compares its own sample, at least one byte in 2,048 of what it encodes.
    """
    _check_check(check)
    engine, reference = produced_by.get("engine"), produced_by.get("reference")
    if not isinstance(engine, str) or not isinstance(reference, str):
        raise TokenizerError(
            f"not the record of a chosen engine: {dict(produced_by)!r:.200}; wanted the "
            "produced_by of the encoder that the parent chose"
        )
    fast = None if engine == reference else open_fast(tokenizer, engine)
    found, wanted = _versions(tokenizer, fast), produced_by.get("versions")
    if found != wanted:
        raise TokenizerError(
            f"the engine was proved with {wanted}, but this process has {found}; install the same "
            "versions everywhere, or build again"
        )
    return ChosenEncoder(tokenizer, fast, check=check, produced_by=dict(produced_by))


def thread_limits(num_threads: int) -> dict[str, str]:
    """Environment variables for a process whose engines use so many threads."""
    if num_threads < 1:
        raise OptionError("{num_threads}: wanted 1 or more", num_threads=num_threads)
    return {
        "FASTOKENS_BPE_THREADS": str(num_threads),
        "RAYON_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "true" if num_threads > 1 else "false",
    }


def _check_check(check: EngineCheck) -> None:
    if check not in ("sample", "full"):
        raise OptionError("{check}: wanted sample or full", check=check)


def _versions(tokenizer: Tokenizer, fast: FastEngine | None) -> dict[str, JSON]:
    source: EngineSource | None = getattr(tokenizer, "engine_source", None)
    found: dict[str, JSON] = {} if fast is None else {fast.name: fast.version}
    if source is not None:
        found[source.library] = source.library_version
    return found


def _text(texts: Texts, number: int) -> str:
    one = texts[number]
    return str(one.as_py() if is_arrow(texts) else one)  # type: ignore[union-attr]


def _prove(
    tokenizer: Tokenizer, fast: FastEngine, corpus: Sequence[str]
) -> tuple[dict[str, JSON], str | None]:
    """The proof for the manifest, or the first difference.

    Compares the whole battery, with the model's own special strings, and the first two megabytes
    of the corpus.
    """
    source: EngineSource = tokenizer.engine_source  # type: ignore[attr-defined]
    specials = [
        tokenizer.decode([number]) for number in sorted({*tokenizer.special_token_ids().values()})
    ]
    added = source.facts.get("added_tokens")
    tokens = [str(text) for text in added] if isinstance(added, list) else []
    battery = list(battery_texts(specials, tokens))
    extent = _extent(battery)
    facts: dict[str, JSON] = {
        "battery": [BATTERY_VERSION, extent["sha256"]],
        "tokenizer": tokenizer.fingerprint,
        "engine": [fast.name, fast.version],
        "reference": [source.library, source.library_version],
        "machine": platform.machine(),
    }
    cached = cache_folder("engine-proofs") / f"{fingerprint_of(facts)}.json"
    known, difference = _read_cache(cached, facts)
    if not known:
        _log.info("comparing %s with %s on the battery", fast.name, source.library)
        difference = compare(tokenizer, fast, battery)
        _write_cache(cached, facts, difference)
    if difference is not None:
        return {}, f"battery: {difference}"
    stop = int(np.searchsorted(np.cumsum(num_bytes(corpus)), CORPUS_BYTES)) + 1
    first = list(corpus[:stop])
    difference = compare(tokenizer, fast, first)
    if difference is not None:
        return {}, f"corpus: {difference}"
    return {"battery": {"version": BATTERY_VERSION, **extent}, "corpus": _extent(first)}, None


def _extent(texts: Sequence[str]) -> dict[str, JSON]:
    size = int(num_bytes(texts).sum())
    return {"documents": len(texts), "bytes": size, "sha256": battery_sha256(texts)}


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
                return _describe_difference(tokenizer, text, right, given)
    return None


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Slices of the texts, so that a long corpus is compared in little memory."""
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


def _describe_difference(tokenizer: Encoder, text: str, wanted: IntArray, found: IntArray) -> str:
    """Where two encodings of a text part, with the text before it and the ids of both."""
    shorter = min(len(wanted), len(found))
    unequal = np.flatnonzero(wanted[:shorter] != found[:shorter])
    start = int(unequal[0]) if len(unequal) else shorter
    before = ""
    decode = getattr(tokenizer, "decode", None)
    if decode is not None:
        before = f", after {decode(wanted[max(0, start - 8) : start])!r}"
    return (
        f"text {text[:60]!r}{'...' if len(text) > 60 else ''} ({len(text):,} characters): from "
        f"token {start:,} on{before} the reference gives {wanted[start : start + 8].tolist()}, the "
        f"fast engine {found[start : start + 8].tolist()}"
    )


def _read_cache(path: Path, facts: dict[str, JSON]) -> tuple[bool, str | None]:
    """(whether the outcome is known, the difference). Anything unexpected counts as unknown."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False, None
    if not isinstance(found, dict) or set(found) != {"facts", "difference"}:
        return False, None
    difference = found["difference"]
    if found["facts"] != facts or not (difference is None or isinstance(difference, str)):
        return False, None
    return True, difference


def _write_cache(path: Path, facts: dict[str, JSON], difference: str | None) -> None:
    """Best effort: without it the next run takes some seconds longer."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(json.dumps({"facts": facts, "difference": difference}).encode())
    except OSError as problem:
        _log.info("the proof is not cached: %s", problem)
