"""One unit of a build: read, encode, write segments. What a worker does, and its tools.

A unit that was begun continues after its last sealed segment. A worker that does not see the
journal sends its segments instead. The same code runs in the coordinator when there are no workers.
The encoder is chosen once, in the coordinator; a fast engine that makes an error is replaced by the
reference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.building import journal
from shardmill.building.journal import EncodedBatch, Receipt, Segment, SegmentWriter, read_receipts
from shardmill.building.plan import BuildSpec, Unit, inputs_of, read_chunks
from shardmill.building.workplace import Workplace
from shardmill.errors import (
    BuildError,
    EngineMismatchError,
    OptionError,
    SourceError,
    TokenizerError,
)
from shardmill.protocols import Texts, Tokenizer, continues
from shardmill.records import JSON, Cursor, IntArray, OffsetArray, Ragged, TextBatch
from shardmill.sources.batches import byte_lengths, too_large
from shardmill.store.layout import check_tokens, fit_tokens
from shardmill.threads import read_ahead
from shardmill.tokenizers import (
    ChosenEncoder,
    EngineCheck,
    EngineChoice,
    choose_encoder,
    reopen_encoder,
    vocab_size_of,
)
from shardmill.tokenizers.base import as_list

log = logging.getLogger(__name__)

_LONG_DOCUMENT = 300  # tokens


def append_to_each(documents: Ragged, token: int, dtype: npt.DTypeLike) -> Ragged:
    """Each document followed by `token`, in `dtype`, which holds every id.

    [4 5 | 6] with 9 -> [4 5 9 | 6 9]: document i moves right by i.
    """
    offsets = documents.offsets + np.arange(len(documents) + 1)
    values: IntArray = np.empty(offsets[-1], dtype)
    values[offsets[1:] - 1] = token
    if len(values) > _LONG_DOCUMENT * len(documents):
        # Few long documents: a copy of each is quicker than a mask over every token.
        for (start, stop), first in zip(
            pairwise(documents.offsets.tolist()), offsets.tolist(), strict=False
        ):
            values[first : first + stop - start] = documents.values[start:stop]
        return Ragged(values, offsets)
    is_text = np.ones(len(values), bool)
    is_text[offsets[1:] - 1] = False
    values[is_text] = documents.values
    return Ragged(values, offsets)


def _choose_dtype(dtype: str | None, vocab_size: int | None) -> str:
    """The dtype of the shards: as asked, else the narrowest that holds the vocabulary."""
    if dtype not in (None, "uint16", "uint32"):
        raise OptionError("{dtype}: wanted 'uint16' or 'uint32'", dtype=dtype)
    if vocab_size is None:
        if dtype is None:
            raise OptionError(
                "this tokenizer does not know its vocab_size, so the dtype of the shards cannot be "
                "chosen: give {dtype}, 'uint16' or 'uint32'",
                dtype=...,
            )
        return dtype
    needed = "uint16" if vocab_size <= 2**16 else "uint32"
    if dtype == "uint16" and needed == "uint32":
        raise OptionError(
            f"{vocab_size:,} ids do not fit uint16 shards (65,536): build with {{dtype}}",
            dtype="uint32",
        )
    return dtype or needed


def _end_id(tokenizer: Tokenizer) -> int:
    """The id appended to each document."""
    specials = tokenizer.special_token_ids()
    if "eot" not in specials:
        raise OptionError(
            "this tokenizer names no 'eot' token to append to each document (it names "
            f"{sorted(specials) or 'none'}): name one with {{eot}} ('byte:1' in place of 'byte' "
            "has an id for it), or build with {append_eot}",
            eot=...,
            append_eot=False,
        )
    return specials["eot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What happens to encoded documents before they are written."""

    dtype: str
    vocab_size: int | None
    end_id: int | None

    @classmethod
    def of(cls, spec: BuildSpec, tokenizer: Tokenizer) -> TokenRules:
        vocab_size = vocab_size_of(tokenizer)
        return cls(
            dtype=_choose_dtype(spec.dtype, vocab_size),
            vocab_size=vocab_size,
            end_id=_end_id(tokenizer) if spec.append_eot else None,
        )

    def fit(self, ids: Ragged, *, source: str, first: int) -> Ragged:
        """The same ids in the store's dtype; `first` is the number of documents before these."""
        return fit_tokens(ids, self.dtype, vocab_size=self.vocab_size, where=source, first=first)

    def apply(self, ids: Ragged, *, source: str, first: int) -> tuple[Ragged, tuple[int, ...]]:
        """The documents as they are stored, and the positions of those without any token."""
        void = np.flatnonzero(ids.lengths == 0)
        positions = tuple(void.tolist())
        if self.end_id is None:
            documents = self.fit(ids, source=source, first=first)
            return _without(documents, void), positions
        # One pass for both: the cast is part of the copy that makes space for the end token.
        check_tokens(ids, self.dtype, vocab_size=self.vocab_size, where=source, first=first)
        stored = np.dtype(self.dtype).newbyteorder("<")
        return append_to_each(_without(ids, void), self.end_id, stored), positions


def _without(documents: Ragged, void: OffsetArray) -> Ragged:
    """Without the documents `void`, which hold no token."""
    if not len(void):
        return documents
    return Ragged(documents.values, np.delete(documents.offsets, void + 1))


@dataclass(kw_only=True)
class WorkerTools:
    """A worker's `EncoderProvider`: reopens the engine that the coordinator chose and proved."""

    tokenizer: Tokenizer
    produced_by: Mapping[str, JSON]
    check: EngineCheck
    has_spare_cores: bool = False  # there are more cores than workers, so threads find idle ones
    opened: ChosenEncoder | None = None  # by the worker

    def encoder(self, first: Texts) -> ChosenEncoder:  # noqa: ARG002 - it was chosen before
        if self.opened is None:
            self.opened = reopen_encoder(self.tokenizer, self.produced_by, check=self.check)
        return self.opened


class EncoderChoice:
    """The coordinator's `EncoderProvider`: chooses at the first batch, and records the choice and
    its proof in the workplace, so that a resumed build uses the same encoder."""

    has_spare_cores = True  # the coordinator encodes only when no worker does

    def __init__(
        self,
        work: Workplace,
        tokenizer: Tokenizer,
        *,
        engine: EngineChoice,
        check: EngineCheck,
        size_hint: int | None,
        required: Mapping[str, JSON] | None = None,
    ) -> None:
        """`required`: the record of the engine that made the store that is appended to; no other
        is allowed."""
        self.tokenizer, self.check = tokenizer, check
        self._work, self._engine, self._size_hint = work, engine, size_hint
        self._required = required
        self._chosen: ChosenEncoder | None = None

    def encoder(self, first: Texts) -> ChosenEncoder:
        """The encoder of this build; `first` are the first texts of the first call."""
        if self._chosen is None:
            chosen = self._proved(first) if self._required is None else self._reopened()
            now = chosen.produced_by
            earlier = self._work.read_note("produced_by")
            if earlier is None:
                self._work.write_note("produced_by", now)
                earlier = now
            for key in ("engine", "versions"):
                if earlier.get(key) != now.get(key):
                    raise BuildError(
                        f"the unfinished build used {key} {earlier.get(key)!r}, now it would be "
                        f"{now.get(key)!r}: restore that, or start again with {{overwrite}}",
                        overwrite=True,
                    )
            self._chosen = chosen
        return self._chosen

    def drop(self, mismatch: EngineMismatchError) -> None:
        """The fast engine made an error: its work is discarded, and from now on, also after a
        resume, the reference is used."""
        if self._required is not None:
            raise BuildError(
                f"{mismatch}\nThat engine made the existing tokens too: build the whole store "
                "again with {overwrite} and {engine}.",
                overwrite=True,
                engine="reference",
            ) from mismatch
        log.warning("%s\nstarting again with the reference engine", mismatch)
        self._chosen = None
        self._work.start_again({"asked_for": self._engine, "mismatch": str(mismatch)})

    def produced_by(self) -> dict[str, JSON]:
        """For the manifest: engine, versions and proof, as the first run of this build had them."""
        noted = self._work.read_note("produced_by")
        if noted is None:  # nothing had to be encoded
            noted = self.encoder([]).produced_by
        dropped = self._work.read_note("dropped_engine")
        return {**noted, "dropped_engine": dropped} if dropped else noted

    def _proved(self, first: Texts) -> ChosenEncoder:
        dropped = self._work.read_note("dropped_engine")
        try:
            return choose_encoder(
                self.tokenizer,
                engine="reference" if dropped else self._engine,
                check=self.check,
                corpus=as_list(first),
                size_hint=self._size_hint,
            )
        except EngineMismatchError as failed:  # no engine yet, so nothing to fall back from
            raise TokenizerError(str(failed)) from failed

    def _reopened(self) -> ChosenEncoder:
        assert self._required is not None
        try:
            return reopen_encoder(self.tokenizer, self._required, check=self.check)
        except TokenizerError as error:
            raise BuildError(
                f"the existing tokens were made by an engine that is missing now ({error}): "
                "install it, or build the whole store again with {overwrite}",
                overwrite=True,
            ) from error


EncoderProvider: TypeAlias = WorkerTools | EncoderChoice
"""Gives the encoder of a build, once the first texts to encode are known."""


class UnitEncoder(Protocol):
    """Reads and encodes units."""

    @property
    def rules(self) -> TokenRules: ...

    def batches(
        self, unit: Unit, cursor: Cursor | None, given: int, provider: EncoderProvider
    ) -> Generator[EncodedBatch, None, None]:
        """The batches of a unit after `cursor`; `given` texts of its feed come before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEncoder:
    """The `UnitEncoder` of documents, none larger than `max_document` bytes."""

    rules: TokenRules
    max_document: int

    def batches(
        self, unit: Unit, cursor: Cursor | None, given: int, provider: EncoderProvider
    ) -> Generator[EncodedBatch, None, None]:
        """One encoded batch for each batch of the chunks.

        With spare cores, reading, encoding and the caller run at the same time, each in its own
        thread. Without, one after the other takes a sixth less CPU time with a fast engine, since a
        batch stays in the caches of its core. A reference engine makes an object for every token
        and keeps its thread, which has its own memory for them.
        """
        spare, chunks = provider.has_spare_cores, read_chunks(unit.chunks, cursor)
        with closing(read_ahead(chunks) if spare else chunks) as batches:
            first = next(batches, None)
            encoder = provider.encoder(first.texts if first is not None else [])
            rest = chain([first], batches) if first is not None else iter(())
            made = self._encoded(unit, rest, encoder)
            with closing(read_ahead(made) if spare or not encoder.is_fast else made) as encoded:
                for batch, ids in encoded:
                    encoder.watch(batch.texts, ids)
                    documents, void = self.rules.apply(ids, source=unit.source, first=given)
                    given += len(ids)
                    after: Any = batch.cursor
                    at_start = after["rows"] == batch.num_rows
                    yield EncodedBatch(
                        documents=documents,
                        drops=batch.drops,
                        void=void,
                        num_read=batch.num_read,
                        num_given=len(batch.texts),
                        num_bytes=batch.texts.nbytes,
                        counts=batch.counts,
                        num_rows=batch.num_rows,
                        starts_file=at_start and not continues(unit.chunks[after["grain"]]),
                        cursor=batch.cursor,
                        chunk=after["grain"],
                    )

    def _encoded(
        self, unit: Unit, batches: Iterator[TextBatch], encoder: ChosenEncoder
    ) -> Generator[tuple[TextBatch, Ragged], None, None]:
        for batch in batches:
            longest = int(byte_lengths(batch.texts).max(initial=0))
            if longest > self.max_document:
                after: Any = batch.cursor
                what = f"a document of {longest:,} bytes"
                raise too_large(unit.chunks[after["grain"]].name, what, self.max_document)
            ids = encoder.encode_unwatched(batch.texts)
            assert len(ids) == len(batch.texts), "an encoder gives one sequence for each text"
            yield batch, ids


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTask:
    """A unit of documents, small when pickled. An `engines.Task`."""

    unit: Unit
    folder: Path | None  # of the unit in the journal; None: this process does not see it
    encoder: UnitEncoder
    done: tuple[Receipt, ...] | None = None  # None: what the journal has when it runs
    segment_tokens: int = field(default_factory=lambda: journal.SEGMENT_TOKENS)

    @property
    def name(self) -> str:
        return self.unit.name

    def run(
        self,
        tools: EncoderProvider,
        emit: Callable[[Segment], None],
        *,
        add: Callable[[EncodedBatch], bool] | None = None,
        given: int | None = None,
    ) -> None:
        """Emit every segment of the unit, those of an earlier attempt first. The last is marked,
        and may be empty.

        `add` gets each batch and says whether that was enough; without it the limit of the feed
        does. `given` texts of the feed come before; None: those of the unit alone are counted.
        """
        unit, done = self.unit, self._receipts()
        for receipt in done:
            emit(Segment(receipt=receipt))
        after = done[-1] if done else None
        if after is not None and after.last:
            return
        tokens = sum(receipt.num_tokens for receipt in done)
        if given is None:
            given = sum(receipt.num_given for receipt in done)
        cursor: Cursor = {} if after is None else after.cursor

        def seal(*, last: bool) -> Receipt:
            if inputs_of(unit.chunks) != unit.key.inputs:
                raise SourceError(
                    f"{unit.name}: changed while it was read; a file must not change while a store "
                    "is built from it: wait for its writer, then start again with {overwrite}",
                    overwrite=True,
                )
            segment = writer.seal(self.folder, cursor, last=last)
            emit(segment)
            return segment.receipt

        writer = SegmentWriter(unit.key, after=after, num_tokens=self.segment_tokens)
        with closing(self.encoder.batches(unit, cursor or None, given, tools)) as batches:
            for batch in batches:
                writer.add(batch)
                cursor, tokens = batch.cursor, tokens + batch.num_tokens
                limit = unit.max_tokens
                if add(batch) if add is not None else limit is not None and tokens >= limit:
                    break
                if writer.is_due:
                    after = seal(last=False)
                    writer = SegmentWriter(unit.key, after=after, num_tokens=self.segment_tokens)
            seal(last=True)

    def detached(self) -> UnitTask:
        return replace(self, folder=None, done=tuple(self._receipts()))

    def _receipts(self) -> Sequence[Receipt]:
        if self.folder is not None:
            self.folder.mkdir(exist_ok=True)
        if self.done is not None:
            return self.done
        assert self.folder is not None, "a process that sees no journal gets what is done"
        return read_receipts(self.folder, self.unit.key)
