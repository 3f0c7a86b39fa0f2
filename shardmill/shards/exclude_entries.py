"""What is not to be trained on, as frozen records and plain spans.

In: nothing; these are records.  Out: `Exclusions`, its entries, and functions over spans.
Promise: the types alone refuse unknown keys, missing keys, negative and absurd numbers. Spans are
half-open, in the token space of a split; merged ones rise and do not touch.
Not here: the file (exclude.py), which samples of a source they meet (loading).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from shardmill.records import BoolArray, OffsetArray
from shardmill.shards.entries import Count

MOST_REASON = 1000
"""Characters of a reason."""


class ExcludedSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The steps whose samples an entry is of. For people: the spans say what is excluded."""

    source: str  # its name in the mixture
    start: Count
    stop: Count  # behind the last step
    world: Count
    batch_size: Count  # samples of one rank at a step
    seq_len: Count
    seed: Annotated[int, msgspec.Meta(ge=0)]
    shuffle: str


class ExcludeEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one command excluded, and why."""

    number: Count  # its name: from 1, rising through the file
    split: str
    reason: str  # in words
    documents: tuple[Count, ...] | None  # their numbers, rising; None: not by documents
    steps: ExcludedSteps | None  # None: not by steps
    spans: tuple[tuple[Count, Count], ...]  # start, stop; merged

    @property
    def num_tokens(self) -> int:
        return sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusions:
    """All that is not to be trained on in a store."""

    store: str  # its fingerprint
    entries: tuple[ExcludeEntry, ...]  # none: nothing is excluded
    sha256: str | None  # the seal of the file; None when there is none

    def spans(self, split: str) -> OffsetArray:
        """(k, 2) the tokens that any entry excludes, merged."""
        found = [entry.spans for entry in self.entries if entry.split == split and entry.spans]
        return merge_spans(np.concatenate([as_spans(one) for one in found])) if found else NO_SPANS

    def num_tokens(self, split: str) -> int:
        """Tokens of a split that are excluded, each counted once."""
        return count_tokens(self.spans(split))

    def covers(self, other: Exclusions) -> bool:
        """Whether all that `other` excludes is excluded here."""
        splits = {entry.split for entry in other.entries}
        return all(cover_spans(self.spans(split), other.spans(split)) for split in splits)


NO_SPANS: OffsetArray = np.empty((0, 2), np.int64)
NO_SPANS.setflags(write=False)


def as_spans(spans: object) -> OffsetArray:
    """Pairs as an array of (n, 2)."""
    return np.asarray(spans, np.int64).reshape(-1, 2)


def merge_spans(spans: OffsetArray) -> OffsetArray:
    """The same tokens in spans that rise and do not touch; empty ones leave no trace."""
    filled = spans[spans[:, 0] < spans[:, 1]]
    if not len(filled):
        return NO_SPANS
    ordered = filled[np.argsort(filled[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    # 0..4 1..2 4..6 8..9: reach 4 4 6 9; a new one begins where a start lies behind the reach
    first = np.flatnonzero(np.append(True, ordered[1:, 0] > reach[:-1]))
    last = np.append(first[1:], len(ordered)) - 1
    return np.stack((ordered[first, 0], reach[last]), axis=1)


def touched(spans: OffsetArray, starts: OffsetArray, stops: OffsetArray) -> BoolArray:
    """Which of the ranges start..stop have a token of these merged spans."""
    if not len(spans):
        return np.zeros(len(starts), np.bool_)
    behind = spans[:, 1].searchsorted(starts, side="right")  # the first span that ends behind start
    begins = np.append(spans[:, 0], np.iinfo(np.int64).max)[behind]
    met: BoolArray = (begins < stops) & (starts < stops)
    return met


def cover_spans(outer: OffsetArray, inner: OffsetArray) -> bool:
    """Whether every token of `inner` is in `outer`; both are merged."""
    both = merge_spans(np.concatenate((outer, inner)))
    return count_tokens(both) == count_tokens(outer)


def count_tokens(spans: OffsetArray) -> int:
    """In merged spans."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def entry_problems(
    entries: tuple[ExcludeEntry, ...], sizes: Mapping[str, int], documents: Mapping[str, int]
) -> Iterator[str]:
    """What cannot be true of entries in a store of so many tokens and documents a split."""
    numbers = [entry.number for entry in entries]
    if not numbers or numbers[0] < 1 or sorted(set(numbers)) != numbers:
        yield f"entries are numbered {numbers[:8]}; wanted at least one, rising from 1"
    for entry in entries:
        for problem in _problems_of(entry, sizes, documents):
            yield f"entry {entry.number}: {problem}"


def _problems_of(
    entry: ExcludeEntry, sizes: Mapping[str, int], documents: Mapping[str, int]
) -> Iterator[str]:
    spans = as_spans(entry.spans)
    if entry.split not in sizes:
        yield f"split {entry.split!r}; the store has {list(sizes)}"
    elif len(spans) and spans.max() > sizes[entry.split]:
        yield f"reaches token {spans.max():,} of {sizes[entry.split]:,}"
    if not np.array_equal(merge_spans(spans), spans):
        yield "its spans are empty, touch, or do not rise"
    if not entry.reason.strip() or len(entry.reason) > MOST_REASON:
        yield f"a reason of {len(entry.reason):,} characters; wanted 1 to {MOST_REASON:,}"
    if entry.documents is not None and entry.steps is not None:
        yield "of documents and of steps; wanted one of them"
    numbers = np.array(entry.documents or (), np.int64)
    if (numbers[1:] <= numbers[:-1]).any():
        yield "its documents do not rise"
    elif len(numbers) and numbers[-1] >= documents.get(entry.split, 0):
        yield f"document {numbers[-1]:,} of {documents.get(entry.split, 0):,}"
