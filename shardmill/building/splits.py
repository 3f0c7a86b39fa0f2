"""Which split gets a document: by a hash of the document, or by budgets of tokens.

A hash needs no order: a document's split follows from the seed and its own bytes, so the same
documents are chosen for any number of workers, any order of files and any batches, and exact
duplicates never part. The hash is uniform over 64 bits: "val" takes the lowest part of its range,
"test" the next. A larger share of "val" keeps what was in "val".

Budgets fill one split after the other in the order of the documents. How far they are is a
`FillState`; a unit is made for the state before it, which may be guessed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, SourceError
from shardmill.records import Conversation, OffsetArray, Ragged

if TYPE_CHECKING:
    import pyarrow as pa

    Data = bytes | memoryview


Fill: TypeAlias = tuple[tuple[str, int | None], ...]
"""Splits in the order in which they are filled, and the most tokens of each; None: no limit."""
FillState: TypeAlias = tuple[int, int | None]
"""Which split of a fill is open, and how many tokens it has: 0 where there is no limit, None where
the number is not known and the limit is taken to be far away. One past the last split: full."""


BY_HASH = "by the hash of"
"""How the rule in a manifest begins."""


def _plain(value: object) -> object:
    """A form for what JSON has none for: a reader's own classes, dates of Parquet."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) else str(value)


_KEYS = frozenset(
    ("role", "content", "name", "train", "reasoning_content", "tool_calls", "tool_call_id")
)
"""What decides an example: the keys of a message that templates are written for. Another key, such
as an id or a time, does not move a conversation; to add one here moves those that have it."""


def _known(message: object) -> object:
    """A message without its other keys; whatever is no message stays, for a template to drop."""
    # dict first: the check of a Mapping takes longer
    if not isinstance(message, (dict, Mapping)) or message.keys() <= _KEYS:
        return message
    return {key: value for key, value in message.items() if key in _KEYS}


# Made once. Of equal conversations the text is equal, whatever the order of their keys.
_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=_plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashSplit:
    """About these fractions of the documents, chosen by a keyed hash. The number of a split is its
    position in `splits`."""

    seed: int
    fractions: tuple[tuple[str, float], ...] = ()  # name and share, as (("val", 0.01),)

    def __post_init__(self) -> None:
        whole_number(self.seed, "seed", least=None)
        given = {f"{name}_fraction": share for name, share in self.fractions}
        for option, share in given.items():
            is_number = isinstance(share, int | float) and not isinstance(share, bool)
            if not is_number or not 0 < share < 1:
                raise OptionError(
                    f"{{{option}}}: wanted a share of the documents, above 0 and below 1",
                    **{option: share},
                )
        if math.fsum(given.values()) >= 1:
            named = " and ".join(f"{{{option}}}" for option in given)
            raise OptionError(
                f"{named}: together {math.fsum(given.values()):g}, which leaves nothing for "
                "'train'; wanted less than 1",
                **given,
            )

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", *(name for name, _ in self.fractions))

    def words(self) -> str:
        """For the manifest."""
        if not self.fractions:
            return "all to train"
        parts = [f"the lowest {float(self.fractions[0][1])!r} of its range to {self.splits[1]}"]
        parts += [f"the next {float(share)!r} to {name}" for name, share in self.fractions[1:]]
        return (
            f"{BY_HASH} seed and document (of a conversation its group, else its messages and "
            f"tools): {', '.join(parts)}, else train"
        )

    def of_texts(self, texts: pa.LargeStringArray) -> npt.NDArray[np.uint8]:
        """The number of the split of each document; `texts` has no nulls."""
        if not self.fractions or not len(texts):
            return np.zeros(len(texts), np.uint8)
        texts = texts.cast("large_string")  # no copy, unless a user's own source gives another type
        _, offsets, data = texts.buffers()
        found = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        view = memoryview(data)
        return self._numbers(view[start:stop] for start, stop in pairwise(found.tolist()))

    def of_conversations(self, conversations: Iterable[Conversation]) -> npt.NDArray[np.uint8]:
        """The number of the split of each conversation; they have been checked by a template."""
        if not self.fractions:
            return np.zeros(sum(1 for _ in conversations), np.uint8)
        return self._numbers(map(_bytes_of, conversations))

    def _numbers(self, found: Iterable[Data]) -> npt.NDArray[np.uint8]:
        blake2b, key = hashlib.blake2b, hashlib.sha256(f"{self.seed:d} split".encode()).digest()
        digests = b"".join([blake2b(data, digest_size=8, key=key).digest() for data in found])
        shares = (int(share * 2**64) for _, share in self.fractions)
        limits = np.array(list(accumulate(shares)), np.uint64)
        # With limits [10 30]: hash 4 -> 0, 10 -> 1, 29 -> 1, 30 -> 2. The last is "train".
        ranges = np.searchsorted(limits, np.frombuffer(digests, "<u8"), side="right")
        return ((ranges + 1) % len(self.splits)).astype(np.uint8)


def hash_split(seed: int, val_fraction: float, test_fraction: float) -> HashSplit:
    """Of the options of a build, where 0 leaves a split out."""
    given = (("val", val_fraction), ("test", test_fraction))
    return HashSplit(seed=seed, fractions=tuple(one for one in given if one[1] != 0))


def _bytes_of(conversation: Conversation) -> bytes:
    """Equal for conversations that must not part."""
    conversation = conversation.part_of or conversation
    if conversation.group is not None:
        return conversation.group.encode("utf-8", "surrogatepass")
    messages: object = conversation.messages
    try:
        if isinstance(messages, Sequence):
            messages = list(map(_known, messages))
        return _JSON.encode([messages, conversation.tools or None]).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SourceError(
            f"conversation {conversation.id!r}: {error}; its split is drawn from its messages as "
            "JSON: correct them, or give the conversation a group"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Documents `start..stop` of a batch go to a split; the last loses `cut` tokens."""

    split: int | None  # its number in the fill; None: over budget, all of it
    start: int
    stop: int
    cut: int = 0

    def take(self, documents: Ragged) -> Ragged:
        """Its documents with the cut applied, without copying tokens."""
        part = documents.slice(self.start, self.stop)
        if not self.cut:
            return part
        offsets = part.offsets.copy()
        offsets[-1] -= self.cut
        return Ragged(part.values[: offsets[-1]], offsets)


def open_state(fill: Fill, split: int = 0, tokens: int = 0) -> FillState:
    """The state in which a split has this many tokens; the next one is open when it is full."""
    if split < len(fill):
        limit = fill[split][1]
        if limit is None:
            return split, 0
        if tokens >= limit:
            return open_state(fill, split + 1)
    return split, tokens


class Filler:
    """Fills splits one after the other, each up to its limit. The one owner of the budget rule."""

    def __init__(self, fill: Fill, before: FillState) -> None:
        self._fill = fill
        self.after = before
        """The state after the documents so far."""

    @property
    def is_full(self) -> bool:
        return self.after[0] == len(self._fill)

    def place(self, lengths: OffsetArray) -> Iterator[Placement]:
        """Where the next documents go. `lengths` are all above 0."""
        ends = np.cumsum(lengths)
        start = 0
        while start < len(lengths):
            if self.is_full:
                yield Placement(split=None, start=start, stop=len(lengths))
                return
            split, tokens = self.after
            limit = self._fill[split][1]
            before = int(ends[start - 1]) if start else 0
            left = None if limit is None or tokens is None else limit - tokens
            if left is None or ends[-1] - before < left:
                if left is not None and tokens is not None:
                    self.after = split, tokens + int(ends[-1]) - before
                yield Placement(split=split, start=start, stop=len(lengths))
                return
            # The first document whose end reaches the limit closes the split.
            stop = int(np.searchsorted(ends, before + left, side="left")) + 1
            cut = int(ends[stop - 1]) - before - left
            self.after = open_state(self._fill, split + 1)
            yield Placement(split=split, start=start, stop=stop, cut=cut)
            start = stop


class _Made(Protocol):
    """What a unit gave: a receipt."""

    @property
    def before(self) -> FillState: ...

    @property
    def after(self) -> FillState: ...

    @property
    def num_tokens(self) -> int: ...


def state_after(fill: Fill, now: FillState, made: _Made) -> FillState | None:
    """The state after a unit that begins in the state `now`; None if it was made for another one,
    so that it must be made again."""
    if made.before == now:
        return made.after
    split, tokens = now
    if made.before != (split, None) or tokens is None:
        return None
    limit = fill[split][1]
    assert limit is not None, "the tokens of a split without a limit are not counted"
    total = tokens + made.num_tokens
    # At the limit the rest of its batches may not be read: they may hold rows that are dropped.
    return (split, total) if total < limit else None
