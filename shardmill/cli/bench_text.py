"""How fast this machine tokenises and builds, on the user's own text.

In: a source, a tokenizer, how much text and time.  Out: `Rate`s.
Promise: engines encode the same texts from memory, as many batches as the time allows; the build
reads the source itself, into a folder that is removed unless somebody reads it. The proof of a fast
engine is told apart: it costs the same for a megabyte and for a terabyte.
Not here: reading stores (bench_read), printing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.build import BuildSpec, Feed, build_store
from shardmill.errors import EngineMismatchError, OptionError, TokenizerError
from shardmill.protocols import Encoder, Source, Tokenizer
from shardmill.sources.clean import byte_lengths
from shardmill.tokenizer import EngineChoice, choose_encoder
from shardmill.tokenizer.fast import fast_candidates
from shardmill.tokenizer.texts import as_list

_LEAST_UNIT = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One measured speed."""

    name: str
    megabytes: float | None = None  # a second: of text, or of tokens as they are stored
    windows: float | None = None  # a second
    share: float | None = None  # of the speed of `limit`
    limit: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The beginning of a source, in memory."""

    batches: tuple[Any, ...]  # Arrow arrays of texts
    num_bytes: int
    cuts_short: bool  # the source has more


def take_sample(source: Source, num_bytes: int) -> Sample:
    """The first batches that together have at least so many bytes of text."""
    batches, total, cuts_short = [], 0, False
    for batch in source.batches():
        if total >= num_bytes:
            cuts_short = True
            break
        if len(batch.texts):
            batches.append(batch.texts)
            total += int(byte_lengths(batch.texts).sum())
    if not total:
        raise OptionError(f"{source.name}: holds no text to measure with; name other inputs")
    return Sample(batches=tuple(batches), num_bytes=total, cuts_short=cuts_short)


def measure_engines(tokenizer: Tokenizer, sample: Sample, seconds: float) -> Iterator[Rate]:
    """The reference, then each fast engine that takes this model, whether it is proved or not."""
    reference = encode_speed(tokenizer, sample, seconds)
    name = "tokenise: reference"
    yield Rate(name=name, megabytes=reference)
    candidates = fast_candidates(tokenizer)
    for engine in candidates.engines:
        speed = encode_speed(engine, sample, seconds)
        yield Rate(
            name=f"tokenise: {engine.name} {engine.version}",
            megabytes=speed,
            share=speed / reference,
            limit=name,
        )
    for refusal in candidates.refusals:
        yield Rate(name="tokenise: no fast engine", note=refusal)


def encode_speed(encoder: Encoder, sample: Sample, seconds: float) -> float:
    """Megabytes of text a second, over as many batches as fit into the time, at least one. None is
    encoded twice: an engine may remember words."""
    encoder.encode_batch(["warm up"])
    done, taken, began = 0, 0.0, time.perf_counter()
    for texts in sample.batches:
        encoder.encode_batch(texts)
        done += int(byte_lengths(texts).sum())
        taken = time.perf_counter() - began
        if taken >= seconds:
            break
    return done / taken / 1e6


def measure_build(
    source: Source,
    tokenizer: Tokenizer,
    sample: Sample,
    folder: Path,
    *,
    workers: int,
    engines: Sequence[Rate],
) -> Iterator[Rate]:
    """A store of about the sample's text, built from the source itself into `folder`; `engines` are
    the speeds to compare it with."""
    proved, proof = _proved(tokenizer, sample)
    if proof is not None:
        yield proof
    engine: EngineChoice = "fast" if proved else "reference"
    tokens = _count_tokens(tokenizer, sample) if sample.cuts_short else None
    _, seconds = timed(
        lambda: build_store(
            [Feed(source=source, fill=(("train", tokens),))],
            folder,
            tokenizer=tokenizer,
            spec=BuildSpec(append_eot="eot" in tokenizer.special_token_ids()),
            engine=engine,
            workers=workers,
            unit_bytes=max(_LEAST_UNIT, sample.num_bytes // (4 * workers)),
        )
    )
    work = max(seconds - (_proof_seconds(tokenizer, sample) if engine == "fast" else 0), 1e-9)
    processes = "1 process" if workers == 1 else f"{workers} workers"
    alone = next(rate for rate in engines if f" {proved or engine}" in rate.name)
    speed = sample.num_bytes / work / 1e6
    yield Rate(
        name=f"build: {processes}, {engine}",
        megabytes=speed,
        share=speed / (alone.megabytes or speed),
        limit=alone.name,
    )


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the seconds it took."""
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began


def _proved(tokenizer: Tokenizer, sample: Sample) -> tuple[str | None, Rate | None]:
    """The fast engine that a long build would use, and what its proof took; None: the reference."""
    if not fast_candidates(tokenizer).engines:
        return None, None
    texts = as_list(sample.batches[0])
    try:
        chosen, seconds = timed(lambda: choose_encoder(tokenizer, engine="fast", corpus=texts))
    except (EngineMismatchError, TokenizerError) as error:
        return None, Rate(name="build: proof of fast", note=f"failed: {error}")
    told = f"{seconds:.1f} s, once a build"
    return str(chosen.produced_by["engine"]), Rate(name="build: proof of fast", note=told)


def _proof_seconds(tokenizer: Tokenizer, sample: Sample) -> float:
    """Of a proof whose first part is known by now, as the build found it."""
    texts = as_list(sample.batches[0])
    return timed(lambda: choose_encoder(tokenizer, engine="fast", corpus=texts))[1]


def _count_tokens(tokenizer: Tokenizer, sample: Sample) -> int:
    engines = fast_candidates(tokenizer).engines
    encoder: Encoder = engines[0] if engines else tokenizer
    found = sum(len(encoder.encode_batch(texts).values) for texts in sample.batches)
    separators = "eot" in tokenizer.special_token_ids()
    return found + separators * sum(len(texts) for texts in sample.batches)
