"""Check every byte of a store against its manifest, and its overlays against the store.

A changed, missing, truncated, renamed or added file is reported, and so are a plan, exclusions and
a table of origins that are damaged or belong to other tokens. Structure is checked even where the
hash already differs, so that the report says what the damage does. Memory stays at a few MiB
whatever the size, plus some 50 bytes per example while a plan is checked.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.errors import ManifestError, StoreError
from shardmill.records import ROLES, OffsetArray
from shardmill.store.exclusions import (
    EXCLUDE,
    MAX_EXCLUDE_BYTES,
    as_spans,
    decode_exclusions,
    document_spans,
)
from shardmill.store.layout import DTYPES, INDEX_HEADER_BYTES, ORIGINS, index_header
from shardmill.store.manifest import (
    ChatEntry,
    DroppedRow,
    FileEntry,
    Manifest,
    ShardEntry,
    SplitEntry,
    read_plain_file,
)
from shardmill.store.origins import read_origins
from shardmill.store.plans import PACKS, REASONS, SUFFIX, StoredPlan, plans_of
from shardmill.store.store import (
    Store,
    damage,
    foreign,
    list_files,
    map_index,
    read_built_manifest,
    read_chunks,
    wanted_sizes,
)

OnProgress = Callable[[int, int], None]
Tick = Callable[[int], None]
_MASK_BYTES = 2**17  # at a time: a million tokens, eight bytes each while they are counted
_STARTS = 2**19  # at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was checked, and what was wrong with it."""

    problems: list[str]  # one sentence each, beginning with the file
    files: int  # checked, with the manifest
    tokens: int  # in files whose contents were checked
    documents: int

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(folder: str | Path, *, on_progress: OnProgress | None = None) -> VerifyReport:
    """Read the whole store at `folder` once and compare it with its manifest.

    `on_progress(done, total)` is called with bytes. A folder without a finished store raises
    StoreNotFoundError; everything else that is wrong is a problem in the report.
    """
    try:
        folder, manifest = read_built_manifest(folder)
    except ManifestError as error:
        return VerifyReport(problems=[str(error)], files=1, tokens=0, documents=0)
    wanted, found = wanted_sizes(manifest), list_files(folder, manifest)
    broken = list(damage(folder, wanted, found))
    sound = wanted.keys() - {problem.partition(":")[0] for problem in broken}
    done, total = 0, sum(found[file].stat().st_size for file in sound)

    def tick(size: int) -> None:
        nonlocal done
        done += size
        if on_progress is not None:
            on_progress(done, total)

    check = _Check(folder, manifest, sound, tick)
    problems = [*broken, *foreign(wanted, found), *check.files(), *check.plans()]
    problems += [*check.exclusions(), *check.origins()]
    return VerifyReport(
        problems=problems,
        files=1 + len(sound) + check.num_overlays,
        tokens=check.tokens,
        documents=check.documents,
    )


class _Contents(Protocol):
    """What a check of one kind of file needs: all bytes, in chunks, then its verdict."""

    def add(self, chunk: memoryview) -> None: ...

    def problems(self) -> Iterator[str]: ...


class _Check:
    """One pass over the files that have the right name and size. Call `files` first: plans and
    exclusions are compared with the indexes that it found sound."""

    def __init__(self, folder: Path, manifest: Manifest, sound: set[str], tick: Tick) -> None:
        self.folder, self.manifest, self.sound, self.tick = folder, manifest, sound, tick
        self.tokens = 0
        self.documents = 0
        self.num_overlays = 0  # sound files that the manifest does not list
        self._starts: dict[str, OffsetArray] = {}  # of splits whose index can be trusted

    def files(self) -> Iterator[str]:
        dtype = np.dtype(DTYPES[self.manifest.token_dtype]).newbyteorder("<")
        for name, split in self.manifest.splits.items():
            if split.index.file in self.sound:
                problems = list(self._file(split.index, _DocumentStarts(split)))
                yield from problems
                self.documents += split.documents
                if not problems:
                    self._starts[name] = map_index(self.folder / split.index.file, split.documents)
            if split.chat:
                starts = self._starts.get(name)
                yield from self._file(split.chat.mask, _Mask(split, split.chat, starts))
                yield from self._file(split.chat.turns, _TurnStarts(split, split.chat, starts))
                yield from self._file(split.chat.roles, _Roles())
            for shard in split.shards:
                yield from self._file(shard, _Ids(dtype, self.manifest.vocab_size))
                self.tokens += shard.tokens * (shard.file in self.sound)
        dropped = self.manifest.dropped
        if dropped:
            reasons = self.manifest.ledger.documents.dropped
            yield from self._file(dropped, _DroppedRows(self.folder / dropped.file, reasons))

    def _file(self, entry: FileEntry | ShardEntry, contents: _Contents) -> Iterator[str]:
        """The problems of a listed file; a disk that cannot be read is one more."""
        if entry.file not in self.sound:
            return
        sha256 = hashlib.sha256()
        try:
            for chunk in read_chunks(self.folder / entry.file):
                sha256.update(chunk)
                contents.add(chunk)
                self.tick(len(chunk))
            if sha256.hexdigest() != entry.sha256:
                found = sha256.hexdigest()
                yield f"{entry.file}: damaged: its sha256 is {found}, wanted {entry.sha256}"
            for problem in contents.problems():
                yield f"{entry.file}: {problem}"
        except OSError as error:
            yield f"{entry.file}: cannot be read ({error.strerror})"

    def plans(self) -> Iterator[str]:
        folder = self.folder / PACKS
        if folder.is_symlink() or (os.path.lexists(folder) and not folder.is_dir()):
            yield f"{PACKS}: not a folder (a link?); put the folder itself there"
            return
        for name, plan in plans_of(Store(self.folder, self.manifest, {})):
            file = f"{PACKS}/{name}{SUFFIX}"
            if (self.folder / file).is_symlink():
                yield f"{file}: a link; put the file itself there"
            elif isinstance(plan, StoreError):
                yield self._overlay_problem(file, plan)
            else:
                self.num_overlays += 1
                split = plan.facts.split
                if split in self._starts:
                    tokens = self.manifest.splits[split].tokens
                    lengths = np.diff(self._starts[split], append=tokens)
                    yield from (f"{file}: {one}" for one in _plan_problems(plan, lengths))

    def exclusions(self) -> Iterator[str]:
        path = self.folder / EXCLUDE
        try:
            data = read_plain_file(path, MAX_EXCLUDE_BYTES)
            if data is None:
                return
            found = decode_exclusions(data, self.manifest, where=str(path))
        except StoreError as error:
            yield self._overlay_problem(EXCLUDE, error)
            return
        self.num_overlays += 1
        store = Store(self.folder, self.manifest, {})
        for entry in found.entries:
            if entry.documents is not None and entry.split in self._starts:
                wanted = document_spans(store, entry.split, np.array(entry.documents, np.int64))
                if not np.array_equal(as_spans(entry.spans), wanted):
                    yield f"{EXCLUDE}: entry {entry.number}: other tokens than its documents have"

    def origins(self) -> Iterator[str]:
        try:
            self.num_overlays += read_origins(self.folder, self.manifest) is not None
        except StoreError as error:
            yield self._overlay_problem(ORIGINS, error)

    def _overlay_problem(self, file: str, error: StoreError) -> str:
        return f"{file}: {str(error).removeprefix(f'{self.folder / file}: ')}"


class _Ids:
    """No id outside the vocabulary, where its size is known."""

    def __init__(self, dtype: np.dtype[Any], vocab_size: int | None) -> None:
        self._dtype, self._vocab_size, self._highest = dtype, vocab_size, -1

    def add(self, chunk: memoryview) -> None:
        ids = np.frombuffer(chunk, self._dtype, count=len(chunk) // self._dtype.itemsize)
        self._highest = max(self._highest, int(ids.max(initial=0)))

    def problems(self) -> Iterator[str]:
        if self._vocab_size is not None and self._highest >= self._vocab_size:
            yield f"holds the id {self._highest:,}, but the vocabulary has {self._vocab_size:,} ids"


class _Roles:
    """No role that does not exist."""

    def __init__(self) -> None:
        self._highest = 0

    def add(self, chunk: memoryview) -> None:
        self._highest = max(self._highest, int(np.frombuffer(chunk, np.uint8).max(initial=0)))

    def problems(self) -> Iterator[str]:
        if self._highest >= len(ROLES):
            yield f"holds the role {self._highest}, but there are {len(ROLES)}: {', '.join(ROLES)}"


class _DroppedRows:
    """One row with id and reason for each row that the ledger says was dropped."""

    def __init__(self, path: Path, reasons: Mapping[str, int]) -> None:
        self._path, self._reasons = path, reasons

    def add(self, chunk: memoryview) -> None:
        """Rows cross chunks, so they are read by line afterwards."""

    def problems(self) -> Iterator[str]:
        found: Counter[str] = Counter()
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    found[msgspec.json.decode(line, type=DroppedRow).reason] += 1
                except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                    yield f"line {number:,} is no dropped row: {error}"
                    return
        if found != Counter(self._reasons):
            yield f"lists dropped rows {dict(found)}, but the ledger says {dict(self._reasons)}"


class _Starts:
    """An index: its header, and starts that never decrease and are at most `last`."""

    def __init__(self, what: str, entries: int, tokens: int, last: int) -> None:
        self._what, self._entries, self._tokens, self._last_start = what, entries, tokens, last
        self._found: list[str] = []
        self._sound = True  # as far as it was read
        self._header_read = False
        self._previous = 0
        self.seen = 0

    def add(self, chunk: memoryview) -> None:
        if not self._header_read:
            self._header_read = True
            if chunk[:INDEX_HEADER_BYTES] != index_header(self._entries):
                self._found.append(f"its header is not that of {self._entries:,} int64")
            chunk = chunk[INDEX_HEADER_BYTES:]
        starts = np.frombuffer(chunk, "<i8", count=len(chunk) // 8)
        if not len(starts) or not self._sound:
            return
        # compared, not subtracted: a difference could overflow
        falls = np.flatnonzero(starts < np.concatenate(([self._previous], starts[:-1])))
        if len(falls):
            self._refuse(f"{self._what} {self.seen + falls[0]:,} starts before the one before it")
        elif starts[-1] > self._last_start:
            self._refuse(f"a {self._what} starts at token {starts[-1]:,} of {self._tokens:,}")
        else:
            self.note(starts)
            self.seen += len(starts)
            self._previous = int(starts[-1])

    def _refuse(self, problem: str) -> None:
        self._sound = False
        self._found.append(problem)

    def note(self, starts: OffsetArray) -> None:
        """Called with every chunk of starts that is in order."""
        raise NotImplementedError

    def verdict(self) -> Iterator[str]:
        """What else is wrong, when all starts are in order."""
        raise NotImplementedError

    def problems(self) -> Iterator[str]:
        yield from self._found
        if self._sound:
            yield from self.verdict()


class _DocumentStarts(_Starts):
    """The first document starts at 0, and each shard has the documents that it claims.

    The document of token `t` is the number of starts <= t, minus one, and such counts add up
    over chunks: so the first and last document of every shard need no second pass.
    """

    def __init__(self, split: SplitEntry) -> None:
        super().__init__("document", split.documents, split.tokens, last=split.tokens)
        self._split = split
        stops = np.cumsum([0] + [shard.tokens for shard in split.shards], dtype=np.int64)
        self._begins, self._ends = stops[:-1], stops[1:]
        self._up_to_first = np.zeros(len(self._begins), np.int64)  # starts <= the first token
        self._up_to_last = np.zeros(len(self._begins), np.int64)  # starts <= the last token

    def note(self, starts: OffsetArray) -> None:
        if self.seen == 0 and starts[0] != 0:
            self._refuse(f"document 0 starts at token {starts[0]:,}, wanted 0")
        self._up_to_first += np.searchsorted(starts, self._begins, side="right")
        self._up_to_last += np.searchsorted(starts, self._ends - 1, side="right")

    def verdict(self) -> Iterator[str]:
        if self.seen != self._split.documents:
            yield f"{self.seen:,} documents start, wanted {self._split.documents:,}"
            return
        # a document that starts where two shards meet starts in the second one; after the last
        # token there is no second one, so what starts there counts for the last shard
        started = np.diff(self._up_to_last, prepend=0)
        if len(started):
            started[-1] += self.seen - self._up_to_last[-1]
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


class _TurnStarts(_Starts):
    """A turn starts in every example: from one turn to the next the example number rises by at
    most one. `starts` of the examples; None when their index is damaged."""

    def __init__(self, split: SplitEntry, chat: ChatEntry, starts: OffsetArray | None) -> None:
        super().__init__("turn", chat.num_turns, split.tokens, last=split.tokens - 1)
        self._starts = starts
        self._last = -1  # the example of the turn seen last
        self._without: int | None = None  # the first example without a turn

    def note(self, starts: OffsetArray) -> None:
        if self._starts is None:
            return
        for low in range(0, len(starts), _STARTS):
            owners = np.searchsorted(self._starts, starts[low : low + _STARTS], side="right") - 1
            self._step(owners)

    def _step(self, owners: OffsetArray) -> None:
        steps = np.flatnonzero(np.diff(owners, prepend=self._last) > 1)
        if len(steps) and self._without is None:
            before = owners[steps[0] - 1] if steps[0] else self._last
            self._without = int(before) + 1
        self._last = int(owners[-1])

    def verdict(self) -> Iterator[str]:
        if self._starts is not None:
            self._step(np.array([len(self._starts)], np.int64))
        if self._without is not None:
            yield f"no turn starts in example {self._without:,}"


class _Mask:
    """No bit after the last token, as many trained tokens as the manifest says, and one in each
    example. `starts` of the examples; None when their index is damaged.

    Trained tokens before each start are counted over chunks; neighbours then differ by what an
    example trains.
    """

    def __init__(self, split: SplitEntry, chat: ChatEntry, starts: OffsetArray | None) -> None:
        self._tokens, self._claimed = split.tokens, chat.trained_tokens
        self._starts = np.empty(0, np.int64) if starts is None else starts
        self._next = 0  # the first start not seen
        self._before = -1  # trained tokens before the start seen last
        self._idle: int | None = None  # the first example that trains nothing
        self._seen = self._trained = 0
        self._beyond = False

    def add(self, chunk: memoryview) -> None:
        for start in range(0, len(chunk), _MASK_BYTES):
            self._add(np.frombuffer(chunk[start : start + _MASK_BYTES], np.uint8))

    def _add(self, packed: npt.NDArray[np.uint8]) -> None:
        bits = np.unpackbits(packed, bitorder="little")
        inside = min(len(bits), self._tokens - self._seen)
        self._beyond |= bool(bits[inside:].any())
        counted = np.zeros(inside + 1, np.int64)
        np.cumsum(bits[:inside], out=counted[1:])
        stop = int(np.searchsorted(self._starts, self._seen + inside))
        for low in range(self._next, stop, _STARTS):
            here = self._starts[low : min(low + _STARTS, stop)]
            self._note(counted[here - self._seen] + self._trained, low)
        self._next = stop
        self._seen += inside
        self._trained += int(counted[-1])

    def _note(self, before: OffsetArray, first: int) -> None:
        """Trained tokens before the examples `first` and following."""
        idle = np.flatnonzero(np.diff(before, prepend=self._before) == 0)
        if len(idle) and self._idle is None:
            self._idle = first + int(idle[0]) - 1
        self._before = int(before[-1])

    def problems(self) -> Iterator[str]:
        if self._beyond:
            yield f"has bits after its last token, {self._tokens:,}"
        if self._trained != self._claimed:
            yield f"trains {self._trained:,} tokens, but the manifest says {self._claimed:,}"
        if len(self._starts):
            # one more start, after the last example, closes it
            self._note(np.array([self._trained], np.int64), len(self._starts))
        if self._idle is not None:
            yield f"example {self._idle:,} trains no token"


def _plan_problems(plan: StoredPlan, lengths: OffsetArray) -> Iterator[str]:
    """What cannot be true of a plan of examples of these lengths."""
    arrays, facts = plan.arrays, plan.facts
    stops = lengths[arrays.examples]
    starts = np.zeros_like(stops)
    starts[arrays.cut_pieces] = arrays.cut_starts
    stops[arrays.cut_pieces] = arrays.cut_stops
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
        yield f"row {row:,} has {used[row]:,} tokens, but holds {facts.options.capacity:,}"
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
