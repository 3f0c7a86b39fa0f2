"""Texts of a source to documents in the dtype of the store.

In: grains of a source, the encoder, where to go on.  Out: portions for the journal.
Promise: a portion for each batch of the source, in order; an id that does not fit is refused by
name.
Not here: when a feed has enough (commit.py, task.py).

Which split gets which document, and where a budget cuts.

In: document lengths, in order.  Out: placements.
Promise: every document and token is in exactly one place: a split, or over budget; a document
belongs to one split only; the result does not depend on how the documents were batched.
Not here: tokens. These functions see lengths only.

How much memory a build takes, and what fits into what there is.

In: how the work is to be done.  Out: how many processes fit, and how large a document may be.
Promise: memory is bounded by the number of processes and the largest document, never by the input;
a document that does not fit is refused by name and size: by its reader before it is whole, where
that can tell, else before it is encoded, which is where it would grow most.
Not here: measuring what was used (engines).

Which tokenizer engine a build uses, remembered so that a resumed build tells the same story.

A fast engine serves only while it equals the reference. When it does not, its work is thrown away
and the reference does it again; the manifest says so.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from shardmill.building.segments import Portion, SourceCounts
from shardmill.building.spec import BuildSpec, choose_dtype, end_id
from shardmill.building.units import GrainBatch, read_grains
from shardmill.building.workplace import Workplace
from shardmill.errors import BuildError, EngineMismatchError, OptionError, TokenizerError
from shardmill.machine import available_memory
from shardmill.protocols import Source, Texts, Tokenizer
from shardmill.records import JSON, Cursor, IntArray, OffsetArray, Ragged
from shardmill.sources import byte_lengths, too_large
from shardmill.store import check_tokens, fit_tokens
from shardmill.threads import read_ahead
from shardmill.tokenizers import (
    ChosenEncoder,
    EngineCheck,
    EngineChoice,
    choose_encoder,
    reopen_encoder,
    vocab_size_of,
)
from shardmill.tokenizers.texts import EngineSource, as_list

log = logging.getLogger(__name__)


_LONG_DOCUMENT = 300  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Documents `start..stop` of the batch go to `split`; the last loses `cut` tokens."""

    split: str | None  # None: over budget, all of it
    start: int
    stop: int
    cut: int = 0


class Filler:
    """Fills splits one after the other, each up to its limit. The one owner of the budget rule."""

    def __init__(
        self,
        fill: tuple[tuple[str, int | None], ...],
        filled: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`filled` tells the tokens that splits hold already."""
        self._open = [
            (split, limit) for split, limit in fill if limit is None or filled.get(split, 0) < limit
        ]
        self._tokens = filled.get(self._open[0][0], 0) if self._open else 0

    @property
    def full(self) -> bool:
        return not self._open

    def advance(self, lengths: OffsetArray) -> None:
        """Count documents that are placed elsewhere or later."""
        for _ in self.place(lengths):
            pass

    def place(self, lengths: OffsetArray) -> Iterator[Placement]:
        """Where the next documents go. `lengths` are all above 0."""
        ends = np.cumsum(lengths)
        start = 0
        while start < len(lengths):
            if self.full:
                yield Placement(split=None, start=start, stop=len(lengths))
                return
            split, limit = self._open[0]
            before = int(ends[start - 1]) if start else 0
            room = None if limit is None else limit - self._tokens
            if room is None or ends[-1] - before < room:
                self._tokens += int(ends[-1]) - before
                yield Placement(split=split, start=start, stop=len(lengths))
                return
            # The first document whose end reaches the limit closes the split.
            stop = int(np.searchsorted(ends, before + room, side="left")) + 1
            cut = int(ends[stop - 1]) - before - room
            self._open.pop(0)
            self._tokens = 0
            yield Placement(split=split, start=start, stop=stop, cut=cut)
            start = stop


def take(documents: Ragged, placement: Placement) -> Ragged:
    """The documents of a placement with the cut applied, without copying tokens."""
    part = documents.slice(placement.start, placement.stop)
    if not placement.cut:
        return part
    offsets = part.offsets.copy()
    offsets[-1] -= placement.cut
    return Ragged(part.values[: offsets[-1]], offsets)


def append_to_each(documents: Ragged, token: int, dtype: npt.DTypeLike) -> Ragged:
    """Each document with `token` behind it, in `dtype`, which holds every id.

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


MIB = 2**20
PROCESS_BYTES = 512 * MIB
"""Of one process: libraries, a tokenizer, the batches that are read, encoded and written ahead."""
DOCUMENT_BYTES = {"tokenizers": 256, "sentencepiece": 80}
"""For each byte of the largest document, by the library that encodes it. Ordinary text takes half
of it; text of which every byte is a token takes all. A fast engine takes less, but is compared with
the library on every large document."""
PLAIN_BYTES = 16
"""The same without a library: as read, as text, as ids, as written."""
LEAST_DOCUMENT = MIB
"""A document that always fits: into what a process may take anyway."""
_UNKNOWN = 8 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Who may use how much."""

    workers: int
    total_bytes: int  # that the build takes when no document is large
    limit_bytes: int  # that one process may take

    def most_document(self, tokenizer: Tokenizer) -> int:
        """Bytes of text that one document may have."""
        source: EngineSource | None = getattr(tokenizer, "engine_source", None)
        library = None if source is None else source.library
        each = PLAIN_BYTES if library is None else DOCUMENT_BYTES.get(library, PLAIN_BYTES)
        return max((self.limit_bytes - PROCESS_BYTES) // each, LEAST_DOCUMENT)


def plan_memory(workers: int, memory: int | None, *, asked: bool) -> MemoryPlan:
    """As many of `workers` as fit into `memory` (None: what is free now); 1 is this process alone.

    Asked for by name, workers that do not fit are refused instead.
    """
    total = memory if memory is not None else free_memory()
    if memory is not None:
        fits = max(memory // PROCESS_BYTES - 1, 1)
        if memory < PROCESS_BYTES or (asked and workers > fits):
            asked_for = (
                f", {workers} workers take about {_needed(workers):,}"
                if asked and workers > 1
                else ""
            )
            raise OptionError(
                f"memory={memory:,}: one process takes about {_needed(1):,} bytes{asked_for}: "
                "allow that much" + (", or use fewer workers" if asked_for else "")
            )
        workers = min(workers, fits)
    num_processes = workers + 1 if workers > 1 else 1
    share = max(total // num_processes, PROCESS_BYTES + MIB)
    return MemoryPlan(
        workers=workers,
        total_bytes=_needed(workers),
        limit_bytes=share,
    )


def check_documents(texts: object, most: int, *, where: str) -> None:
    """Refuse a batch with a document over `most` bytes."""
    lengths = byte_lengths(texts)
    longest = int(lengths.max(initial=0))
    if longest > most:
        raise too_large(where, f"a document of {longest:,} bytes", most)


def no_memory(where: str) -> BuildError:
    """The one wording for memory that ran out."""
    return BuildError(
        f"{where}: the memory of this build is not enough for it; what is done is kept: allow more "
        "(memory=), use fewer workers, or cut what is large in the input, and go on with "
        "resume=True"
    )


def free_memory() -> int:
    """Bytes that can be had without swapping, as far as the system tells."""
    found = available_memory()
    return _UNKNOWN if found is None else found


def _needed(workers: int) -> int:
    return PROCESS_BYTES * (workers + 1 if workers > 1 else 1)


_Item = TypeVar("_Item")


class EncoderDesk(Protocol):
    """Gives the encoder, once the first texts to encode are known."""

    @property
    def has_spare_cores(self) -> bool:
        """Whether threads of this process find cores that nobody else uses."""

    def encoder(self, first: Texts) -> ChosenEncoder: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRules:
    """What becomes of encoded documents before they are written."""

    dtype: str
    vocab_size: int | None
    end_id: int | None

    def fit(self, ids: Ragged, *, source: str, first: int) -> Ragged:
        """The same ids in the store's dtype; `first` is the number of documents before these."""
        return fit_tokens(ids, self.dtype, vocab_size=self.vocab_size, where=source, first=first)

    def apply(self, ids: Ragged, *, source: str, first: int) -> tuple[Ragged, tuple[int, ...]]:
        """The documents as they are stored, and the places of those that gave no token at all."""
        void = np.flatnonzero(ids.lengths == 0)
        places = tuple(void.tolist())
        if self.end_id is None:
            documents = self.fit(ids, source=source, first=first)
            return _without(documents, void), places
        # One pass for both: the cast is part of the copy that makes room for the end.
        check_tokens(ids, self.dtype, vocab_size=self.vocab_size, where=source, first=first)
        stored = np.dtype(self.dtype).newbyteorder("<")
        return append_to_each(_without(ids, void), self.end_id, stored), places


def _without(documents: Ragged, void: OffsetArray) -> Ragged:
    """Without the documents `void`, which hold no token."""
    if not len(void):
        return documents
    return Ragged(documents.values, np.delete(documents.offsets, void + 1))


def token_rules(spec: BuildSpec, tokenizer: Tokenizer) -> TokenRules:
    vocab_size = vocab_size_of(tokenizer)
    return TokenRules(
        dtype=choose_dtype(spec.dtype, vocab_size),
        vocab_size=vocab_size,
        end_id=end_id(spec, tokenizer),
    )


def unit_portions(
    grains: Sequence[Source],
    *,
    source: str,
    cursor: Cursor | None,
    given: int,
    desk: EncoderDesk,
    rules: TokenRules,
    most_document: int,
) -> Generator[tuple[Portion, SourceCounts], None, None]:
    """The documents of some grains, from `cursor` on; `given` texts of the source lie before them.
    None may be larger than `most_document` bytes.

    Where there are cores to spare, reading, encoding and what the caller does with portions go on
    at the same time, each in a thread of its own. Where there are none, one after the other takes a
    sixth less CPU time with a fast engine: a batch stays in the caches of its core. A reference
    engine makes an object for every token, and keeps a thread, which has its own memory for them.
    """
    reading = read_ahead if desk.has_spare_cores else _as_asked
    with closing(reading(read_grains(grains, cursor))) as batches:
        first = next(batches, None)
        encoder = desk.encoder(first.batch.texts if first is not None else [])
        rest = chain([first], batches) if first is not None else iter(())
        checked = _checked(rest, most_document)
        encoding = _as_asked if encoder.is_fast and not desk.has_spare_cores else read_ahead
        with closing(encoding(_encoded(checked, encoder))) as encoded:
            for found, ids in encoded:
                encoder.watch(found.batch.texts, ids)
                documents, void = rules.apply(ids, source=source, first=given)
                given += len(ids)
                drops = found.batch.drops
                yield Portion(documents=documents, drops=drops, void=void), _account(found)


def _as_asked(items: Iterator[_Item]) -> Generator[_Item, None, None]:
    yield from items


def _account(found: GrainBatch) -> SourceCounts:
    batch = found.batch
    return SourceCounts(
        num_read=batch.num_read,
        num_given=len(batch.texts),
        num_bytes=batch.texts.nbytes,
        counts=batch.counts,
        num_rows=batch.num_rows,
        begins=found.begins,
        cursor=batch.cursor,
        grain=found.number,
    )


def _checked(batches: Iterator[GrainBatch], most_document: int) -> Iterator[GrainBatch]:
    for found in batches:
        check_documents(found.batch.texts, most_document, where=found.grain)
        yield found


def _encoded(
    batches: Iterator[GrainBatch], encoder: ChosenEncoder
) -> Iterator[tuple[GrainBatch, Ragged]]:
    for found in batches:
        ids = encoder.encode_unwatched(found.batch.texts)
        assert len(ids) == len(found.batch.texts), "an encoder gives one sequence for each text"
        yield found, ids


class EngineDesk:
    """Chooses the encoder at the first batch and keeps its proof in the workplace."""

    has_spare_cores = True  # the first process makes documents only when no worker does

    def __init__(
        self,
        work: Workplace,
        tokenizer: Tokenizer,
        *,
        engine: EngineChoice,
        check: EngineCheck,
        size_hint: int | None,
        goes_on: Mapping[str, JSON] | None = None,
    ) -> None:
        """`goes_on`: the record of the engine that made the tokens in front; no other serves."""
        self._goes_on = goes_on
        self._work, self._tokenizer = work, tokenizer
        self._engine, self._check, self._size_hint = engine, check, size_hint
        self._chosen: ChosenEncoder | None = None

    def encoder(self, first: Texts) -> ChosenEncoder:
        """The encoder of this build; `first` are the first texts of the first call."""
        if self._chosen is None and self._goes_on is not None:
            self._chosen = self._reopened(self._goes_on)
            self._remember(self._chosen.produced_by)
        if self._chosen is None:
            dropped = self._work.read_note("dropped_engine")
            try:
                self._chosen = choose_encoder(
                    self._tokenizer,
                    engine="reference" if dropped else self._engine,
                    check=self._check,
                    corpus=as_list(first),
                    size_hint=self._size_hint,
                )
            except EngineMismatchError as failed:  # no engine yet, so nothing to fall back from
                raise TokenizerError(str(failed)) from failed
            self._remember(self._chosen.produced_by)
        return self._chosen

    def settle(self) -> None:
        """Choose now, when nothing had to be encoded."""
        if self._work.read_note("produced_by") is None:
            self.encoder([])

    def drop(self, mismatch: EngineMismatchError) -> None:
        """The fast engine was caught out: from here on, also after a resume, the reference."""
        if self._goes_on is not None:
            raise BuildError(
                f"{mismatch}\nThat engine made the tokens in front too: build the whole store anew "
                "with overwrite=True and engine='reference'."
            ) from mismatch
        log.warning("%s\nstarting again with the reference engine", mismatch)
        self._work.remove_note("produced_by")
        note: dict[str, JSON] = {"asked_for": self._engine, "mismatch": str(mismatch)}
        self._work.write_note("dropped_engine", note)
        self._chosen = None

    def produced_by(self) -> dict[str, JSON]:
        """For the manifest: engine, versions and proof, as the first run of this build had them."""
        noted = self._work.read_note("produced_by")
        assert noted is not None, "an encoder was chosen before the journal was full"
        dropped = self._work.read_note("dropped_engine")
        return {**noted, "dropped_engine": dropped} if dropped else noted

    def _reopened(self, produced_by: Mapping[str, JSON]) -> ChosenEncoder:
        try:
            return reopen_encoder(self._tokenizer, produced_by, check=self._check)
        except TokenizerError as error:
            raise BuildError(
                f"the tokens in front were made by an engine that is not here now ({error}): "
                "install it, or build the whole store anew with overwrite=True"
            ) from error

    def _remember(self, produced_by: dict[str, JSON]) -> None:
        earlier = self._work.read_note("produced_by")
        if earlier is None:
            self._work.write_note("produced_by", produced_by)
            return
        for key in ("engine", "versions"):
            if earlier.get(key) != produced_by.get(key):
                raise BuildError(
                    f"the unfinished build used {key} {earlier.get(key)!r}, now it would be "
                    f"{produced_by.get(key)!r}: restore that, or start again with overwrite=True"
                )
