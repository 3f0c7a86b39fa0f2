"""One unit of a build: read, encode, write its shards and its receipt. What a worker does.

The same code runs in the coordinator when there are no workers. The encoder is chosen once, in the
coordinator; a fast engine that makes an error is replaced by the reference.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.building.plan import BuildSpec, Unit, inputs_of
from shardmill.building.segments import (
    EncodedBatch,
    Output,
    Receipt,
    SegmentWriter,
    find_receipt,
)
from shardmill.building.splits import Fill, FillState, HashSplit, state_after
from shardmill.building.workplace import Workplace
from shardmill.errors import (
    BuildError,
    EngineMismatchError,
    OptionError,
    SourceError,
    TokenizerError,
)
from shardmill.protocols import Texts, Tokenizer
from shardmill.records import JSON, IntArray, OffsetArray, Ragged, TextBatch
from shardmill.sources.batches import sizes_of, too_large
from shardmill.store.layout import ITEMSIZE, check_tokens, fit_tokens
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
from shardmill.tokenizers.engines import FastEngine, first_candidate

log = logging.getLogger(__name__)

_LONG_DOCUMENT = 300  # tokens


def append_to_each(documents: Ragged, token: int, dtype: npt.DTypeLike) -> Ragged:
    """Each document followed by `token`, in `dtype`, which holds every id.

    [4 5 | 6] with 9 -> [4 5 9 | 6 9]: document i moves right by i.
    """
    offsets = documents.offsets + np.arange(len(documents) + 1)
    if len(documents.values) > _LONG_DOCUMENT * len(documents):
        # Few long documents: joining their bytes is quicker than a mask over every token.
        ids: IntArray = documents.values.astype(dtype, copy=False)
        data, edges = ids.view(np.uint8).data, documents.offsets * ids.itemsize
        parts = [data[start:stop] for start, stop in pairwise(edges.tolist())]
        end = np.array([token], ids.dtype).tobytes()
        return Ragged(np.frombuffer(end.join((*parts, b"")), ids.dtype), offsets)
    values: IntArray = np.empty(offsets[-1], dtype)
    is_text = np.ones(len(values), bool)
    is_text[offsets[1:] - 1] = False
    values[is_text] = documents.values
    values[offsets[1:] - 1] = token
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
    """A worker's `EncoderProvider`: reopens the engine that the coordinator chose and proved. It is
    sent before that, so that workers start beside the proof; tasks have the choice."""

    tokenizer: Tokenizer
    check: EngineCheck
    produced_by: Mapping[str, JSON] = field(default_factory=dict)
    has_spare_cores: bool = False  # there are more cores than workers, so threads find idle ones
    may_be_fast: bool = False  # whether the choice may be a fast engine
    opened: ChosenEncoder | None = None  # by the worker
    candidate: FastEngine | None = None  # the same, before the choice

    def prepare(self) -> None:
        """What a worker can do before there is a task."""
        if self.may_be_fast:
            self.candidate = first_candidate(self.tokenizer)

    def use(self, produced_by: Mapping[str, JSON]) -> None:
        """This engine from now on."""
        if produced_by != self.produced_by:
            self.produced_by, self.opened = produced_by, None

    def encoder(self, first: Texts) -> ChosenEncoder:  # noqa: ARG002 - it was chosen before
        if self.opened is None:
            self.opened = reopen_encoder(
                self.tokenizer, self.produced_by, check=self.check, opened=self.candidate
            )
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
        self.may_be_fast = engine != "reference"
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
    """Reads and encodes units. It is pickled."""

    @property
    def rules(self) -> TokenRules: ...

    def first_texts(self, unit: Unit) -> Texts:
        """Some texts of a unit, to choose an encoder by."""

    def batches(
        self, units: Sequence[Unit], provider: EncoderProvider
    ) -> Generator[EncodedBatch, None, None]:
        """The batches of units of one feed, one after the other."""


class ReadBatch(NamedTuple):
    """A batch as it was read."""

    unit: Unit
    chunk: int  # number in its feed
    read: Any  # TextBatch or ConversationBatch


def read_batches(units: Sequence[Unit]) -> Generator[ReadBatch, None, None]:
    for unit in units:
        for number, chunk in enumerate(unit.chunks, unit.first_chunk):
            for batch in chunk.batches():
                yield ReadBatch(unit, number, batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkEncoder:
    """The `UnitEncoder` of documents, none larger than `max_document` bytes."""

    rules: TokenRules
    max_document: int
    by_hash: tuple[HashSplit | None, ...]  # of each feed

    def first_texts(self, unit: Unit) -> Texts:
        with closing(read_batches([unit])) as batches:
            first = next(batches, None)
        return first.read.texts if first is not None else []

    def batches(
        self, units: Sequence[Unit], provider: EncoderProvider
    ) -> Generator[EncodedBatch, None, None]:
        """One encoded batch for each batch of the chunks.

        With spare cores, reading, encoding and the caller run at the same time, each in its own
        thread. Without, one after the other takes a sixth less CPU time with a fast engine, since a
        batch stays in the caches of its core. A reference engine makes an object for every token
        and keeps its thread, which has its own memory for them.
        """
        spare, found = provider.has_spare_cores, read_batches(units)
        by_hash, given = self.by_hash[units[0].feed], Counter[int]()
        with closing(read_ahead(found) if spare else found) as batches:
            first = next(batches, None)
            encoder = provider.encoder(first.read.texts if first is not None else [])
            rest = chain([first], batches) if first is not None else iter(())
            made = self._encoded(rest, encoder)
            with closing(read_ahead(made) if spare or not encoder.is_fast else made) as encoded:
                for (unit, chunk, read), ids in encoded:
                    sizes = sizes_of(read)
                    encoder.watch(_texts_of(read), ids, sizes)
                    before = given[unit.number]
                    documents, void = self.rules.apply(ids, source=unit.name, first=before)
                    given[unit.number] += len(ids)
                    splits = None if by_hash is None else by_hash.of_texts(read.texts)
                    if splits is not None and void:
                        splits = np.delete(splits, void)
                    yield EncodedBatch(
                        unit=unit.number,
                        chunk=chunk,
                        read=read,
                        num_given=len(sizes),
                        num_bytes=int(sizes.sum()),
                        documents=documents,
                        void=void,
                        drops=read.drops,
                        splits=splits,
                    )

    def _encoded(
        self, batches: Iterator[ReadBatch], encoder: ChosenEncoder
    ) -> Generator[tuple[ReadBatch, Ragged], None, None]:
        for batch in batches:
            unit, chunk, read = batch
            longest = int(sizes_of(read).max(initial=0))
            if longest > self.max_document:
                where = unit.chunks[chunk - unit.first_chunk].name
                raise too_large(where, f"a document of {longest:,} bytes", self.max_document)
            texts = _texts_of(read)
            ids = encoder.encode_unwatched(texts)
            assert len(ids) == len(texts), "an encoder gives one sequence for each text"
            yield batch, ids


def _texts_of(read: TextBatch) -> Texts:
    return read.texts if read.strings is None else read.strings


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTask:
    """Some neighbouring units of one feed. An `engines.Task`."""

    feed: int
    units: tuple[Unit, ...]
    fill: Fill
    before: FillState  # the first unit
    is_guess: bool = False  # whether that state is one; then what is made for another one may do
    encoder: UnitEncoder
    output: Output
    shard_tokens: int
    produced_by: Mapping[str, JSON] | None = None  # by what engine; None: the coordinator's own

    @property
    def name(self) -> str:
        return " ... ".join(
            dict.fromkeys(unit.name for unit in (*self.units[:1], *self.units[-1:]))
        )

    def after(self, note: Receipt) -> UnitTask:
        left = tuple(unit for unit in self.units if unit.number > note.unit)
        return replace(self, units=left, before=note.after)

    def run(
        self,
        tools: EncoderProvider,
        emit: Callable[[Receipt], None],
        on_batch: Callable[[Unit, EncodedBatch], None] = lambda _unit, _batch: None,
    ) -> None:
        """Emit the receipt of each unit, also of those that an earlier attempt has made."""
        if isinstance(tools, WorkerTools) and self.produced_by is not None:
            tools.use(self.produced_by)
        units, before = self.units, self.before
        while units and before[0] < len(self.fill):
            made = self._made(units[0])
            after = None if made is None else state_after(self.fill, before, made)
            if made is not None and after is None and self.is_guess:
                after = made.after  # of an earlier run, which may have known
            if made is not None and after is not None:
                emit(made)
                before, units = after, units[1:]
            else:
                stop = next((n for n in range(1, len(units)) if self._made(units[n])), len(units))
                for receipt in self._make(units[:stop], before, tools, on_batch):
                    emit(receipt)
                    before = receipt.after
                units = units[stop:]

    def _made(self, unit: Unit) -> Receipt | None:
        found = find_receipt(self.output, *unit.key, itemsize=ITEMSIZE[self.encoder.rules.dtype])
        return found if found is not None and found.is_of(unit) else None

    def _make(
        self,
        units: Sequence[Unit],
        before: FillState,
        tools: EncoderProvider,
        on_batch: Callable[[Unit, EncodedBatch], None],
    ) -> Iterator[Receipt]:
        """Units as one stream, until all splits are full. A unit is sealed while the next one is
        encoded: a disk takes its time to make shards and receipt durable."""
        sealed: Future[Receipt] | None = None
        with (
            ThreadPoolExecutor(1, thread_name_prefix="shardmill-seal") as sealing,
            closing(self.encoder.batches(units, tools)) as batches,
        ):
            try:
                batch = next(batches, None)
                for unit in units:
                    with ExitStack() as unsealed:
                        writer = unsealed.enter_context(closing(self._writer(unit, before)))
                        while batch is not None and batch.unit == unit.number:
                            writer.add(batch)
                            on_batch(unit, batch)
                            if writer.is_full:  # what comes then is not read: it may be broken
                                break
                            batch = next(batches, None)
                        _check_unchanged(unit)
                        if sealed is not None:
                            receipt, sealed = sealed.result(), None
                            yield receipt
                        before, sealed = writer.after, sealing.submit(_sealed, writer)
                        unsealed.pop_all()
                    if before[0] == len(self.fill):
                        break
            except Exception:
                if sealed is not None:  # what was made before the error counts
                    yield sealed.result()
                raise
            if sealed is not None:
                yield sealed.result()

    def _writer(self, unit: Unit, before: FillState) -> SegmentWriter:
        return SegmentWriter(
            unit, self.output, fill=self.fill, before=before, shard_tokens=self.shard_tokens
        )


def _sealed(writer: SegmentWriter) -> Receipt:
    with closing(writer):
        return writer.seal()


def _check_unchanged(unit: Unit) -> None:
    if unit.inputs and inputs_of(unit.chunks) != unit.inputs:
        raise SourceError(
            f"{unit.name}: changed while it was read; a file must not change while a store is "
            "built from it: wait for its writer, then start again with {overwrite}",
            overwrite=True,
        )
