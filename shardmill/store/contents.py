"""Read one file of a store and compare its contents with its entry.

In: a path and what the manifest says of it.  Out: sentences about what is wrong, without the name.
Promise: a few MiB of memory; every byte is hashed; structure is checked even where the hash
already differs, so that the report says what the damage does.
Not here: names and sizes (scan.py), the order of files (verify.py).

Read the chat files of a split and compare them with its entry.

In: paths and what the manifest says of them.  Out: sentences about what is wrong.
Promise: a few MiB of memory; every byte is hashed; a mask with bits behind the last token, another
number of trained tokens or an example that trains nothing, turns that fall or lie outside, an
example without a turn, and unknown roles are found.
Not here: names and sizes (scan.py), tokens and index (contents.py).

Compare a pack plan with the examples it is of.

In: a plan and the lengths of the examples.  Out: sentences about what is wrong.
Promise: a piece outside its example, a row over its room, an example that is in rows twice or
nowhere and not left out, and another number of tokens than the metrics say are found; memory grows
with examples and pieces.
Not here: whether the file is whole and of this store (plans.py), the loss mask.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from shardmill.records import ROLES, OffsetArray
from shardmill.store.entries import ChatEntry, FileEntry, ShardEntry, SplitEntry
from shardmill.store.layout import INDEX_HEADER_BYTES, index_header
from shardmill.store.plans import REASONS, PlanArrays, StoredPlan

Tick = Callable[[int], None]
_CHUNK = 2**22  # bytes; a multiple of every item size


def check_shard(
    path: Path, shard: ShardEntry, dtype: str, vocab_size: int | None, tick: Tick
) -> Iterator[str]:
    """sha256, and no id outside the vocabulary where its size is known."""
    sha256, highest = hashlib.sha256(), -1
    stored = np.dtype(dtype).newbyteorder("<")
    for chunk in chunks(path, tick):
        sha256.update(chunk)
        ids = np.frombuffer(chunk, stored, count=len(chunk) // stored.itemsize)
        highest = max(highest, int(ids.max(initial=0)))
    yield from hash_problem(sha256.hexdigest(), shard.sha256)
    if vocab_size is not None and highest >= vocab_size:
        yield f"holds the id {highest:,}, but the vocabulary has {vocab_size:,} ids"


def check_index(path: Path, split: SplitEntry, tick: Tick) -> Iterator[str]:
    """sha256, header, starts that rise from 0 within the split, and the spans of the shards."""
    sha256 = hashlib.sha256()
    spans = _Spans(split)
    for number, chunk in enumerate(chunks(path, tick)):
        sha256.update(chunk)
        if number == 0 and chunk[:INDEX_HEADER_BYTES] != index_header(split.documents):
            yield f"its header is not that of {split.documents:,} int64"
        data = chunk[INDEX_HEADER_BYTES:] if number == 0 else chunk
        spans.add(np.frombuffer(data, "<i8", count=len(data) // 8))
    yield from hash_problem(sha256.hexdigest(), split.index.sha256)
    yield from spans.problems()


def check_dropped(
    path: Path, entry: FileEntry, reasons: Mapping[str, int], tick: Tick
) -> Iterator[str]:
    """sha256, and one row with id and reason for each row that the ledger says was dropped."""
    sha256 = hashlib.sha256()
    for chunk in chunks(path, tick):
        sha256.update(chunk)
    yield from hash_problem(sha256.hexdigest(), entry.sha256)
    found: Counter[str] = Counter()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                found[msgspec.json.decode(line, type=_Dropped).reason] += 1
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                yield f"line {number:,} is no dropped row: {error}"
                return
    if found != Counter(reasons):
        yield f"lists dropped rows {dict(found)}, but the ledger says {dict(reasons)}"


class _Dropped(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    reason: str


class _Spans:
    """Compare document starts, seen in chunks, with what the shards claim.

    The document of token `t` is the number of starts <= t, minus one, and such counts add up
    over chunks: so the first and last document of every shard need no second pass.
    """

    def __init__(self, split: SplitEntry) -> None:
        self._split = split
        stops = np.cumsum([0] + [shard.tokens for shard in split.shards], dtype=np.int64)
        self._begins, self._ends = stops[:-1], stops[1:]
        self._up_to_first = np.zeros(len(self._begins), np.int64)  # starts <= the first token
        self._up_to_last = np.zeros(len(self._begins), np.int64)  # starts <= the last token
        self._seen = 0
        self._previous = 0
        self._problem: str | None = None

    def add(self, starts: OffsetArray) -> None:
        if len(starts) == 0 or self._problem:
            return
        self._problem = self._order_problem(starts)
        self._up_to_first += np.searchsorted(starts, self._begins, side="right")
        self._up_to_last += np.searchsorted(starts, self._ends - 1, side="right")
        self._seen += len(starts)
        self._previous = int(starts[-1])

    def _order_problem(self, starts: OffsetArray) -> str | None:
        if self._seen == 0 and starts[0] != 0:
            return f"document 0 starts at token {starts[0]:,}, wanted 0"
        before = np.concatenate(([self._previous], starts[:-1]))
        falls = np.flatnonzero(starts < before)  # a difference could overflow
        if len(falls):
            return f"document {self._seen + falls[0]:,} starts before the one in front of it"
        if starts[-1] > self._split.tokens:
            return f"a document starts at token {starts[-1]:,} of {self._split.tokens:,}"
        return None

    def problems(self) -> Iterator[str]:
        if self._problem:
            yield self._problem
        elif self._seen != self._split.documents:
            yield f"{self._seen:,} documents start, wanted {self._split.documents:,}"
        else:
            yield from self._shard_problems()

    def _shard_problems(self) -> Iterator[str]:
        # a document that starts at the border of two shards starts in the second one; behind the
        # last token there is no second one, so what starts there counts for the last shard
        started = np.diff(self._up_to_last, prepend=0)
        if len(started):
            started[-1] += self._seen - self._up_to_last[-1]
        firsts, lasts = self._up_to_first - 1, self._up_to_last - 1
        counted = zip(started.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
        for shard, (documents, first, last) in zip(self._split.shards, counted, strict=True):
            claimed = (shard.documents, shard.first_document, shard.last_document)
            found = (documents, first, last) if shard.tokens else (documents, None, None)
            if claimed != found:
                yield (
                    f"puts (started, first, last) {found} in {shard.file}, but the manifest says "
                    f"{claimed}"
                )


def hash_problem(found: str, wanted: str) -> Iterator[str]:
    if found != wanted:
        yield f"damaged: its sha256 is {found}, wanted {wanted}"


def chunks(path: Path, tick: Tick) -> Iterator[memoryview]:
    """The bytes of a file, a few MiB at a time, in a buffer that is used again."""
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb") as file:
        while size := file.readinto(buffer):
            yield buffer[:size]
            tick(size)


_MASK_BYTES = 2**17  # at a time: a million tokens, eight bytes each while they are counted
_STARTS = 2**19


def check_mask(
    path: Path, split: SplitEntry, chat: ChatEntry, starts: OffsetArray | None, tick: Tick
) -> Iterator[str]:
    """sha256, trained tokens, no bit behind the last token, and one trained in each example.

    `starts` of the examples; None when their index is damaged.
    """
    sha256 = hashlib.sha256()
    counts = _TrainedCounts(split.tokens, starts)
    for chunk in chunks(path, tick):
        sha256.update(chunk)
        for start in range(0, len(chunk), _MASK_BYTES):
            counts.add(np.frombuffer(chunk[start : start + _MASK_BYTES], np.uint8))
    yield from hash_problem(sha256.hexdigest(), chat.mask.sha256)
    yield from counts.problems(chat.trained_tokens)


class _TrainedCounts:
    """Trained tokens in front of each start, over chunks of the mask, so that neighbours tell
    how many an example has."""

    def __init__(self, tokens: int, starts: OffsetArray | None) -> None:
        self._tokens = tokens
        self._starts = np.empty(0, np.int64) if starts is None else starts
        self._next = 0  # the first start not seen
        self._before = -1  # trained tokens in front of the start seen last
        self._idle: int | None = None  # the first example that trains nothing
        self._seen = self.trained = 0
        self._beyond = False

    def add(self, packed: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        bits = np.unpackbits(packed, bitorder="little")
        inside = min(len(bits), self._tokens - self._seen)
        self._beyond |= bool(bits[inside:].any())
        counted = np.zeros(inside + 1, np.int64)
        np.cumsum(bits[:inside], out=counted[1:])
        stop = int(np.searchsorted(self._starts, self._seen + inside))
        for low in range(self._next, stop, _STARTS):
            here = self._starts[low : min(low + _STARTS, stop)]
            self._note(counted[here - self._seen] + self.trained, low)
        self._next = stop
        self._seen += inside
        self.trained += int(counted[-1])

    def _note(self, before: OffsetArray, first: int) -> None:
        """Trained tokens in front of the examples `first` and following."""
        idle = np.flatnonzero(np.diff(before, prepend=self._before) == 0)
        if len(idle) and self._idle is None:
            self._idle = first + int(idle[0]) - 1
        self._before = int(before[-1])

    def problems(self, claimed: int) -> Iterator[str]:
        if self._beyond:
            yield f"has bits behind its last token, {self._tokens:,}"
        if self.trained != claimed:
            yield f"trains {self.trained:,} tokens, but the manifest says {claimed:,}"
        if len(self._starts):
            # one more start, behind the last example, closes it
            self._note(np.array([self.trained], np.int64), len(self._starts))
        if self._idle is not None:
            yield f"example {self._idle:,} trains no token"


def check_turns(
    path: Path, split: SplitEntry, chat: ChatEntry, starts: OffsetArray | None, tick: Tick
) -> Iterator[str]:
    """sha256, header, starts that never fall and lie within the split, a turn in each example."""
    sha256, previous, seen, problem = hashlib.sha256(), 0, 0, ""
    examples = _OwnedTurns(starts)
    for number, chunk in enumerate(chunks(path, tick)):
        sha256.update(chunk)
        if number == 0 and chunk[:INDEX_HEADER_BYTES] != index_header(chat.num_turns):
            yield f"its header is not that of {chat.num_turns:,} int64"
        data = chunk[INDEX_HEADER_BYTES:] if number == 0 else chunk
        turns = np.frombuffer(data, "<i8", count=len(data) // 8)
        if not len(turns) or problem:
            continue
        falls = np.flatnonzero(turns < np.concatenate(([previous], turns[:-1])))
        if len(falls):
            problem = f"turn {seen + falls[0]:,} starts before the one in front of it, or before 0"
        elif turns[-1] >= split.tokens:
            problem = f"a turn starts at token {turns[-1]:,} of {split.tokens:,}"
        else:
            examples.add(turns)
        previous, seen = int(turns[-1]), seen + len(turns)
    yield from hash_problem(sha256.hexdigest(), chat.turns.sha256)
    if problem:
        yield problem
    else:
        yield from examples.problems()


class _OwnedTurns:
    """Which example each turn starts in: a step of more than one leaves an example out."""

    def __init__(self, starts: OffsetArray | None) -> None:
        self._starts = starts
        self._last = -1
        self._mute: int | None = None

    def add(self, turns: OffsetArray) -> None:
        if self._starts is None:
            return
        for low in range(0, len(turns), _STARTS):
            owners = np.searchsorted(self._starts, turns[low : low + _STARTS], side="right") - 1
            self._step(owners)

    def _step(self, owners: OffsetArray) -> None:
        steps = np.flatnonzero(np.diff(owners, prepend=self._last) > 1)
        if len(steps) and self._mute is None:
            before = owners[steps[0] - 1] if steps[0] else self._last
            self._mute = int(before) + 1
        self._last = int(owners[-1])

    def problems(self) -> Iterator[str]:
        if self._starts is not None:
            self._step(np.array([len(self._starts)], np.int64))
        if self._mute is not None:
            yield f"no turn starts in example {self._mute:,}"


def check_roles(path: Path, chat: ChatEntry, tick: Tick) -> Iterator[str]:
    """sha256, and no role that does not exist."""
    sha256, highest = hashlib.sha256(), 0
    for chunk in chunks(path, tick):
        sha256.update(chunk)
        highest = max(highest, int(np.frombuffer(chunk, np.uint8).max(initial=0)))
    yield from hash_problem(sha256.hexdigest(), chat.roles.sha256)
    if highest >= len(ROLES):
        yield f"holds the role {highest}, but there are {len(ROLES)}: {', '.join(ROLES)}"


def piece_spans(arrays: PlanArrays, lengths: OffsetArray) -> tuple[OffsetArray, OffsetArray]:
    """(pieces,) which tokens of its example each piece is: start and stop."""
    stops = lengths[arrays.examples]
    starts = np.zeros_like(stops)
    starts[arrays.cut_pieces] = arrays.cut_starts
    stops[arrays.cut_pieces] = arrays.cut_stops
    return starts, stops


def content_problems(plan: StoredPlan, lengths: OffsetArray) -> Iterator[str]:
    """What cannot be true of a plan of examples of these lengths."""
    arrays, facts = plan.arrays, plan.facts
    starts, stops = piece_spans(arrays, lengths)
    wrong = (starts < 0) | (starts >= stops) | (stops > lengths[arrays.examples])
    if wrong.any():
        piece = int(np.flatnonzero(wrong)[0])
        yield (
            f"piece {piece:,} is {starts[piece]:,}..{stops[piece]:,} of example "
            f"{arrays.examples[piece]:,}, which has {lengths[arrays.examples[piece]]:,} tokens"
        )
        return
    if int((stops - starts).sum()) != facts.metrics.num_tokens:
        yield f"its pieces have {int((stops - starts).sum()):,} tokens, its metrics say otherwise"
    step = facts.options.align_to
    ends = np.cumsum(-(-(stops - starts) // step) * step)
    last = np.cumsum(arrays.counts, dtype=np.int64) - 1
    used = np.diff(ends[last], prepend=0)
    if (used > facts.options.capacity).any():
        row = int(np.flatnonzero(used > facts.options.capacity)[0])
        yield f"row {row:,} has {used[row]:,} tokens and room for {facts.options.capacity:,}"
    yield from _lost_examples(arrays, lengths, starts, stops)


def _lost_examples(
    arrays: PlanArrays, lengths: OffsetArray, starts: OffsetArray, stops: OffsetArray
) -> Iterator[str]:
    order = np.lexsort((starts, arrays.examples))
    example = arrays.examples[order]
    again = example[1:] == example[:-1]
    # of two pieces of an example the second may begin with the last token of the first
    twice = np.flatnonzero(again & (starts[order][1:] < stops[order][:-1] - 1))
    if len(twice):
        yield f"example {example[twice[0]]:,} has tokens in more than one row"
    seen = lengths == 0
    for name in ("examples", *REASONS):
        seen[getattr(arrays, name)] = True
    if not seen.all():
        lost = np.flatnonzero(~seen)
        yield f"example {lost[0]:,} is in no row and not left out ({len(lost):,} such examples)"
