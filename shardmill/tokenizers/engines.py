"""Fast engines: which model each can load, the proof that one equals the reference, and its use.

A fast engine is used only after it gave the reference's ids on the battery and on this corpus, and
it is compared on a sample of every build. A difference raises an error; wrong ids are never passed
on. The choice is a pure function of the arguments and the installed versions: the per-user cache of
proofs only saves time. A worker opens the engine that its parent proved (`reopen_encoder`) without
proving it again. The libraries are imported when an engine is opened.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import (
    EngineMismatchError,
    MissingExtraError,
    OptionError,
    TokenizerError,
    missing_extra,
)
from shardmill.protocols import Encoder, Texts, Tokenizer
from shardmill.records import JSON, IntArray, OffsetArray, Ragged
from shardmill.storage.atomic import atomic_write, cache_folder
from shardmill.tokenizers.base import (
    EngineSource,
    as_list,
    engine_source_of,
    fingerprint_of,
    is_arrow,
    num_bytes,
    parts_of,
    slices,
    surrogate_error,
)
from shardmill.tokenizers.battery import BATTERY_VERSION, battery_sha256, battery_texts

_log = logging.getLogger(__name__)

CORPUS_BYTES = 2 * 2**20
FAST_FROM_BYTES = 32 * 2**20
SAMPLE_ONE_IN = 2048
_PER_COMPARISON = 2**17  # characters: the reference takes a kilobyte of memory for some
_PART_BYTES = 2**18
# of text for each thread of one call: what a call makes of it stays in the core's own cache. Calls
# with 4 MiB take a sixth longer; from 2**19 down to 2**15 there is no difference.

EngineChoice = Literal["reference", "fast", "auto"]
EngineCheck = Literal["sample", "full"]
Encode = Callable[[list[str]], Ragged]


class FastEngine:
    """An encoder that could replace a tokenizer's reference engine; opening it proves nothing."""

    def __init__(self, name: str, source: EngineSource) -> None:
        try:
            self._encode, num_threads = _LOADERS[name](source)
        except ImportError as missing:
            raise missing_extra(name, "fast") from missing
        except (ValueError, RuntimeError, TypeError) as problem:
            raise TokenizerError(f"{name} cannot load this model: {problem}") from problem
        self._part_bytes = _PART_BYTES * num_threads
        self.name = name
        self.version = version(name)

    def encode_batch(self, texts: Texts) -> Ragged:
        try:
            parts = [_narrowed(self._encode(part)) for part in parts_of(texts, self._part_bytes)]
        except (TypeError, UnicodeError) as problem:
            raise surrogate_error(as_list(texts)) from problem
        return Ragged.concatenate(parts) if len(parts) != 1 else parts[0]


def _narrowed(ids: Ragged) -> Ragged:
    """As uint16 if they fit, as most vocabularies do: half as much to copy from here on."""
    values = ids.values
    if not len(values) or values.max() >= 2**16:
        return ids
    return Ragged(values.astype(np.uint16), ids.offsets)


def _load_fastokens(source: EngineSource) -> tuple[Encode, int]:
    """Byte-level BPE from a tokenizer.json.

    It would use all cores, and a build on two cores took a fifth longer for it. So unless
    FASTOKENS_BPE_THREADS is set, one core is left for reading and writing.
    """
    import fastokens

    # The engine reads this variable once, when it first encodes.
    num_cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # the system knows which ones this process may use
        num_cores = len(os.sched_getaffinity(0))
    threads = os.environ.setdefault("FASTOKENS_BPE_THREADS", str(max(1, num_cores - 1)))
    engine = fastokens.Tokenizer.from_json_str(source.model.decode())
    engine.enable_segment_cache(0)  # an environment variable may have turned it on

    def encode(texts: list[str]) -> Ragged:
        ids, offsets = engine.encode_batch_flat(
            texts, add_special_tokens=False, split_special_tokens=True
        )
        return Ragged(np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64))

    # It never has more threads than cores; one for a number that it does not understand is safe.
    return encode, min(int(threads), num_cores) if threads.isdecimal() else 1


def _load_gigatoken(source: EngineSource) -> tuple[Encode, int]:
    """BPE from a tokenizer.json or a SentencePiece model; runs in the caller's thread."""
    import gigatoken

    of_sentencepiece = source.kind == "sentencepiece"
    kind = gigatoken.Tokenizer
    engine = (kind.from_sentencepiece if of_sentencepiece else kind.from_json)(source.model)

    def encode(texts: list[str]) -> Ragged:
        if not texts:
            return Ragged(np.empty(0, np.uint32), np.zeros(1, np.int64))
        layout = engine.encode_batch(texts, parallel=False).layout
        offsets = np.asarray(layout.offsets.data).astype(np.int64)
        values = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return Ragged(values, offsets - offsets[0])

    return encode, 1


_LOADERS = {"fastokens": _load_fastokens, "gigatoken": _load_gigatoken}
"""Name of an engine, and of its package -> what opens it: how it encodes, and its threads."""


@dataclass(frozen=True, slots=True)
class Candidates:
    engines: tuple[FastEngine, ...]  # best first
    refusals: tuple[str, ...]  # one sentence per engine that is no candidate


def fast_candidates(tokenizer: object) -> Candidates:
    """Every fast engine that loads this tokenizer's model."""
    source = engine_source_of(tokenizer)
    if source is None:
        return Candidates((), (f"{type(tokenizer).__name__} has no fast engine",))
    engines: list[FastEngine] = []
    refusals: list[str] = []
    for name in _names(source):
        try:
            engines.append(FastEngine(name, source))
        except (MissingExtraError, TokenizerError) as problem:
            refusals.append(str(problem))
    if source.facts.get("looks_around") and not (engines or refusals):
        refusals.append(
            "no fast engine is trusted with added tokens that strip or ask for a word's border"
        )
    elif not (engines or refusals):
        refusals.append(f"no fast engine takes {source.kind} models with {source.facts}")
    return Candidates(tuple(engines), tuple(refusals))


def _names(source: EngineSource) -> list[str]:
    facts = source.facts
    if source.kind == "tokenizer.json" and facts["model_type"] == "BPE":
        # Engines differ on added tokens that strip whitespace or ask for a word's border, and no
        # battery is long enough to show that one never will.
        return [] if facts["looks_around"] else ["fastokens", "gigatoken"]
    # gigatoken's SentencePiece normaliser gives other ids, so only models without one qualify.
    is_bpe = source.kind == "sentencepiece" and facts["model_type"] == "bpe"
    return ["gigatoken"] if is_bpe and facts["byte_fallback"] and facts["identity"] else []


@dataclass(eq=False, repr=False)
class ChosenEncoder:
    """The encoder of one build.

    With a fast engine, at least one byte in 2,048 so far is encoded by the reference too (all of
    them with check="full"). Which documents are compared depends only on the sequence of calls.
    """

    reference: Tokenizer
    fast: FastEngine | None
    check: EngineCheck = field(kw_only=True)
    produced_by: dict[str, JSON] = field(kw_only=True)  # the record for the manifest
    bytes_seen: int = field(default=0, init=False)
    bytes_compared: int = field(default=0, init=False)
    documents_compared: int = field(default=0, init=False)
    _calls: int = field(default=0, init=False)

    def __reduce__(self) -> tuple[object, ...]:
        """An engine is memory and threads of this process."""
        raise TokenizerError(
            f"{self!r} stays in its process; send the tokenizer and produced_by, and open the "
            "engine there with reopen_encoder(tokenizer, produced_by)"
        )

    @property
    def is_fast(self) -> bool:
        return self.fast is not None

    def encode_batch(self, texts: Texts) -> Ragged:
        """The ids of each text; EngineMismatchError if a compared document differs."""
        ids = self.encode_unwatched(texts)
        self.watch(texts, ids)
        return ids

    def encode_unwatched(self, texts: Texts) -> Ragged:
        """The ids of each text, not compared yet: give them to `watch` before they are kept.

        The two halves of `encode_batch`, for a caller with a thread for each.
        """
        if self.fast is None:
            return self.reference.encode_batch(texts)
        ids = self.fast.encode_batch(texts)
        if len(ids) != len(texts):
            raise EngineMismatchError(
                f"{self.fast.name} gave {len(ids):,} sequences for {len(texts):,} texts; build "
                "with {engine}",
                engine="reference",
            )
        return ids

    def watch(self, texts: Texts, ids: Ragged, sizes: OffsetArray | None = None) -> None:
        """Compare a sample of what was encoded. Call it with the batches in order. `sizes`: UTF-8
        bytes of each text, where they are known."""
        if self.fast is None or not len(texts):
            return
        numbers = self._choose_sample(num_bytes(texts) if sizes is None else sizes).tolist()
        chosen = [texts[number] for number in numbers]
        sample = [str(one.as_py()) for one in chosen] if is_arrow(texts) else list(map(str, chosen))
        wanted = self.reference.encode_batch(sample)
        difference = _difference(
            self.reference, sample, wanted, [ids[number] for number in numbers]
        )
        if difference is not None:
            raise EngineMismatchError(
                f"{self.fast.name} {self.fast.version} is not this tokenizer: {difference}; "
                "build with {engine}",
                engine="reference",
            )
        self.documents_compared += len(sample)
        self.bytes_compared += int(num_bytes(sample).sum())

    def _choose_sample(self, sizes: OffsetArray) -> OffsetArray:
        """The documents to compare: none while we are ahead, else as many as catch up."""
        self.bytes_seen += int(sizes.sum())
        self._calls += 1
        if self.check == "full":
            return np.arange(len(sizes))
        missing = -(-self.bytes_seen // SAMPLE_ONE_IN) - self.bytes_compared
        if missing <= 0:
            return np.empty(0, np.int64)
        # Start elsewhere in every call, so that the sample is not all first documents.
        order = (np.arange(len(sizes)) + (self._calls - 1) * 7919) % len(sizes)
        stop = int(np.searchsorted(np.cumsum(sizes[order]), missing)) + 1
        return order[:stop]

    def __repr__(self) -> str:
        return f"ChosenEncoder({self.produced_by['engine']!r}, check={self.check!r})"


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
        return _chosen(tokenizer, None, check, {"reason": "asked for"}, [])
    if engine == "auto" and size_hint is not None and size_hint < FAST_FROM_BYTES:
        reason = f"input under {FAST_FROM_BYTES // 2**20} MiB"
        return _chosen(tokenizer, None, check, {"reason": reason}, [])
    candidates = fast_candidates(tokenizer)
    rejected: list[JSON] = []
    for fast in candidates.engines:
        proof, difference = _prove(tokenizer, fast, corpus)
        if difference is None:
            compared = f"1/{SAMPLE_ONE_IN} of the bytes" if check == "sample" else "everything"
            outcome: dict[str, JSON] = {"check": compared, "proof": proof}
            return _chosen(tokenizer, fast, check, outcome, rejected)
        _log.warning("%s %s is not used: %s", fast.name, fast.version, difference)
        rejected.append({"engine": fast.name, "version": fast.version, "difference": difference})
    if engine == "fast":
        reasons = "; ".join([*candidates.refusals, *(str(item) for item in rejected)])
        failure = EngineMismatchError if rejected else TokenizerError
        raise failure(
            f"no fast engine for {tokenizer!r}: {reasons}; build with {{engine}}", engine="auto"
        )
    reason = "every fast engine differed" if rejected else "no fast engine for this model"
    return _chosen(tokenizer, None, check, {"reason": reason}, rejected)


def _chosen(
    tokenizer: Tokenizer,
    fast: FastEngine | None,
    check: EngineCheck,
    outcome: dict[str, JSON],
    rejected: list[JSON],
) -> ChosenEncoder:
    """The encoder with its record; `outcome` says why it was chosen."""
    source = engine_source_of(tokenizer)
    reference = source.library if source else type(tokenizer).__name__
    engine = reference if fast is None else fast.name
    why = outcome.get("reason", "proved equal")
    _log.info("engine: %s (%s); the reference is %s", engine, why, reference)
    produced_by: dict[str, JSON] = {
        "engine": engine,
        "reference": reference,
        "versions": _versions(tokenizer, fast),
        **outcome,
        **({"rejected": rejected} if rejected else {}),
    }
    return ChosenEncoder(tokenizer, fast, check=check, produced_by=produced_by)


def first_candidate(tokenizer: object) -> FastEngine | None:
    """The engine that `choose_encoder` would try first, if this process can open it."""
    source = engine_source_of(tokenizer)
    for name in [] if source is None else _names(source)[:1]:
        with suppress(MissingExtraError, TokenizerError):
            return FastEngine(name, cast(EngineSource, source))
    return None


def reopen_encoder(
    tokenizer: Tokenizer,
    produced_by: Mapping[str, JSON],
    *,
    check: EngineCheck = "sample",
    opened: FastEngine | None = None,
) -> ChosenEncoder:
    """The encoder that `choose_encoder` gave for an equal tokenizer in another process.

    `produced_by` is its record, as it is or decoded from JSON. The versions must be the same. Every
    worker compares its own sample, at least one byte in 2,048 of what it encodes. `opened` is an
    engine of this tokenizer, which saves opening it if it is the one.
    """
    _check_check(check)
    engine, reference = produced_by.get("engine"), produced_by.get("reference")
    if not isinstance(engine, str) or not isinstance(reference, str):
        raise TokenizerError(
            f"not the record of a chosen engine: {dict(produced_by)!r:.200}; wanted the "
            "produced_by of the encoder that the parent chose"
        )
    fast = None
    if engine != reference:
        source = engine_source_of(tokenizer)
        if source is None or engine not in _names(source):
            raise TokenizerError(
                f"{engine!r} is no fast engine for {tokenizer!r}; is it the tokenizer of this "
                "build?"
            )
        is_open = opened is not None and opened.name == engine
        fast = opened if is_open else FastEngine(engine, source)
    found, wanted = _versions(tokenizer, fast), produced_by.get("versions")
    if found != wanted:
        raise TokenizerError(
            f"the engine was proved with {wanted}, but this process has {found}; install the same "
            "versions everywhere, or build again"
        )
    return ChosenEncoder(tokenizer, fast, check=check, produced_by=dict(produced_by))


def thread_limits(num_threads: int) -> dict[str, str]:
    """Environment variables for a process whose engines use this number of threads.

    Set them before it starts: fastokens reads its variable at its first call, and tokenizers both
    of its own at its first batch, which opening one already is. SentencePiece has no variable
    (its `num_threads` is pickled), and gigatoken runs in the caller's thread.
    """
    whole_number(num_threads, "num_threads")
    return {
        "FASTOKENS_BPE_THREADS": str(num_threads),
        "RAYON_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "true" if num_threads > 1 else "false",
    }


def _check_check(check: EngineCheck) -> None:
    if check not in ("sample", "full"):
        raise OptionError("{check}: wanted sample or full", check=check)


def _versions(tokenizer: Tokenizer, fast: FastEngine | None) -> dict[str, JSON]:
    source = engine_source_of(tokenizer)
    found: dict[str, JSON] = {} if fast is None else {fast.name: fast.version}
    if source is not None:
        found[source.library] = source.library_version
    return found


def _prove(
    tokenizer: Tokenizer, fast: FastEngine, corpus: Sequence[str]
) -> tuple[dict[str, JSON], str | None]:
    """The proof for the manifest, or the first difference.

    Compares the whole battery, with the model's own special strings, and the first two megabytes
    of the corpus.
    """
    source = engine_source_of(tokenizer)
    assert source is not None  # it has a fast engine
    specials = [
        tokenizer.decode([number]) for number in sorted({*tokenizer.special_token_ids().values()})
    ]
    battery = list(battery_texts(specials, source.added_tokens))
    extent = _extent(battery)
    facts: dict[str, JSON] = {
        "battery": [BATTERY_VERSION, extent["sha256"]],
        "tokenizer": tokenizer.fingerprint,
        "engine": [fast.name, fast.version],
        "reference": [source.library, source.library_version],
        "machine": platform.machine(),
    }
    cached = cache_folder("engine-proofs") / f"{fingerprint_of(facts)}.json"
    known = _read_cache(cached, facts)
    if known is None:
        _log.info("comparing %s with %s on the battery", fast.name, source.library)
        known = {"facts": facts, "difference": compare(tokenizer, fast, battery)}
        _write_cache(cached, known)
    difference = known["difference"]
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
    for group in slices(texts, _PER_COMPARISON):
        wanted, found = tokenizer.encode_batch(group), engine.encode_batch(group)
        if len(found) != len(wanted):
            return f"{len(group)} texts gave {len(found)} sequences"
        difference = None if wanted == found else _difference(tokenizer, group, wanted, found)
        if difference is not None:
            return difference
    return None


def _difference(
    tokenizer: Encoder, texts: list[str], wanted: Iterable[IntArray], found: Iterable[IntArray]
) -> str | None:
    """Where the encodings of a text part, with the text before it and the ids of both; or None."""
    for text, right, given in zip(texts, wanted, found, strict=True):
        if np.array_equal(right, given):
            continue
        shorter = min(len(right), len(given))
        unequal = np.flatnonzero(right[:shorter] != given[:shorter])
        start = int(unequal[0]) if len(unequal) else shorter
        decode = getattr(tokenizer, "decode", None)
        before = f", after {decode(right[max(0, start - 8) : start])!r}" if decode else ""
        return (
            f"text {text[:60]!r}{'...' if len(text) > 60 else ''} ({len(text):,} characters): from "
            f"token {start:,} on{before} the reference gives {right[start : start + 8].tolist()}, "
            f"the fast engine {given[start : start + 8].tolist()}"
        )
    return None


def _read_cache(path: Path, facts: dict[str, JSON]) -> dict[str, Any] | None:
    """What `_write_cache` wrote for these facts; anything unexpected counts as unknown."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or set(found) != {"facts", "difference"}:
        return None
    is_text = found["difference"] is None or isinstance(found["difference"], str)
    return found if is_text and found["facts"] == facts else None


def _write_cache(path: Path, known: dict[str, Any]) -> None:
    """Best effort: without it the next run takes some seconds longer."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(json.dumps(known).encode())
    except OSError as problem:
        _log.info("the proof is not cached: %s", problem)
