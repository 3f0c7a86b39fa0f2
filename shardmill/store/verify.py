"""Check every byte of a store against its manifest, and its overlays against the store.

A changed, missing, truncated, renamed or added file is reported, and so are a plan, exclusions and
a table of origins that are damaged or belong to other tokens. Structure is checked even where the
hash already differs, so that the report says what the damage does. Memory stays at a few MiB
whatever the size, plus some 50 bytes per example while a plan is checked.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shardmill.errors import ManifestError, StoreError
from shardmill.records import ROLES, OffsetArray
from shardmill.store.exclusions import as_spans, read_exclusions, spans_of_documents
from shardmill.store.layout import DTYPES, EXCLUDE, INDEX_HEADER_BYTES, ORIGINS, index_header
from shardmill.store.manifest import DroppedRow, ListedFile, Manifest, ShardEntry, SplitEntry
from shardmill.store.origins import read_origins
from shardmill.store.plans import PACKS, REASONS, SUFFIX, StoredPlan, plans_of
from shardmill.store.store import (
    ShardDocuments,
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
Chunks = Iterator[memoryview]
"""The bytes of a file, in a buffer that is used again."""
Check = Callable[[Chunks], Iterator[str]]
"""The problems of one kind of file. A check need not read to the end."""
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


class _Check:
    """One pass over the files that have the right name and size. Call `files` first: plans and
    exclusions are compared with the indexes that it found sound."""

    def __init__(self, folder: Path, manifest: Manifest, sound: set[str], tick: Tick) -> None:
        self.folder, self.manifest, self.sound, self.tick = folder, manifest, sound, tick
        self.store = Store(folder, manifest, {})
        self.tokens = 0
        self.documents = 0
        self.num_overlays = 0  # sound files that the manifest does not list
        self._starts: dict[str, OffsetArray] = {}  # of splits whose index can be trusted

    def files(self) -> Iterator[str]:
        ids = partial(
            _check_ids,
            dtype=np.dtype(DTYPES[self.manifest.token_dtype]).newbyteorder("<"),
            vocab_size=self.manifest.vocab_size,
        )
        for name, split in self.manifest.splits.items():
            if split.index.file in self.sound:
                problems = list(self._file(split.index, partial(_check_documents, split=split)))
                yield from problems
                self.documents += split.documents
                if not problems:
                    self._starts[name] = map_index(self.folder / split.index.file, split.documents)
            if split.chat:
                examples = self._starts.get(name)
                mask = partial(_check_mask, split=split, examples=examples)
                turns = partial(_check_turns, split=split, examples=examples)
                yield from self._file(split.chat.mask, mask)
                yield from self._file(split.chat.turns, turns)
                yield from self._file(split.chat.roles, _check_roles)
            for shard in split.shards:
                yield from self._file(shard, ids)
                self.tokens += shard.tokens * (shard.file in self.sound)
        dropped = self.manifest.dropped
        if dropped:
            reasons = self.manifest.ledger.documents.dropped
            path = self.folder / dropped.file
            yield from self._file(dropped, partial(_check_dropped, path=path, reasons=reasons))

    def _file(self, entry: ListedFile | ShardEntry, check: Check) -> Iterator[str]:
        """The problems of a listed file; a disk that cannot be read is one more."""
        if entry.file not in self.sound:
            return
        sha256 = hashlib.sha256()

        def chunks() -> Iterator[memoryview]:
            for chunk in read_chunks(self.folder / entry.file):
                sha256.update(chunk)
                yield chunk
                self.tick(len(chunk))

        read = chunks()
        try:
            problems = list(check(read))
            deque(read, maxlen=0)  # what the check did not look at counts for the hash
        except OSError as error:
            yield f"{entry.file}: cannot be read ({error.strerror})"
            return
        if sha256.hexdigest() != entry.sha256:
            found = sha256.hexdigest()
            yield f"{entry.file}: damaged: its sha256 is {found}, wanted {entry.sha256}"
        yield from (f"{entry.file}: {problem}" for problem in problems)

    def plans(self) -> Iterator[str]:
        folder = self.folder / PACKS
        if folder.is_symlink() or (os.path.lexists(folder) and not folder.is_dir()):
            yield f"{PACKS}: not a folder (a link?); put the folder itself there"
            return
        for name, plan in plans_of(self.store):
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
        try:
            found = read_exclusions(self.store)
        except StoreError as error:
            yield self._overlay_problem(EXCLUDE, error)
            return
        self.num_overlays += found.sha256 is not None
        for entry in found.entries:
            if entry.documents is not None and entry.split in self._starts:
                numbers = np.array(entry.documents, np.int64)
                wanted = spans_of_documents(self.store, entry.split, numbers)
                if not np.array_equal(as_spans(entry.spans), wanted):
                    yield f"{EXCLUDE}: entry {entry.number}: other tokens than its documents have"

    def origins(self) -> Iterator[str]:
        try:
            self.num_overlays += read_origins(self.folder, self.manifest) is not None
        except StoreError as error:
            yield self._overlay_problem(ORIGINS, error)

    def _overlay_problem(self, file: str, error: StoreError) -> str:
        return f"{file}: {str(error).removeprefix(f'{self.folder / file}: ')}"


def _check_ids(chunks: Chunks, *, dtype: np.dtype[Any], vocab_size: int | None) -> Iterator[str]:
    """No id outside the vocabulary, where its size is known."""
    highest = -1
    for chunk in chunks:
        ids = np.frombuffer(chunk, dtype, count=len(chunk) // dtype.itemsize)
        highest = max(highest, int(ids.max(initial=0)))
    if vocab_size is not None and highest >= vocab_size:
        yield f"holds the id {highest:,}, but the vocabulary has {vocab_size:,} ids"


def _check_roles(chunks: Chunks) -> Iterator[str]:
    """No role that does not exist."""
    highest = max((int(np.frombuffer(chunk, np.uint8).max()) for chunk in chunks), default=0)
    if highest >= len(ROLES):
        yield f"holds the role {highest}, but there are {len(ROLES)}: {', '.join(ROLES)}"


def _check_dropped(_: Chunks, *, path: Path, reasons: Mapping[str, int]) -> Iterator[str]:
    """One row with id and reason for each row that the ledger says was dropped."""
    found: Counter[str] = Counter()
    with path.open("rb") as lines:  # rows cross chunks
        for number, line in enumerate(lines, start=1):
            try:
                found[msgspec.json.decode(line, type=DroppedRow).reason] += 1
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                yield f"line {number:,} is no dropped row: {error}"
                return
    if found != Counter(reasons):
        yield f"lists dropped rows {dict(found)}, but the ledger says {dict(reasons)}"


@dataclass(slots=True)
class _Starts:
    """The starts of an index: a sound header, never decreasing, at most `last`."""

    chunks: Chunks
    what: str
    entries: int
    tokens: int
    last: int
    problems: list[str] = field(default_factory=list)
    seen: int = 0
    in_order: bool = True  # as far as it was read

    def __iter__(self) -> Iterator[OffsetArray]:
        """The starts, as long as they are in order; `problems` and `in_order` say what is wrong."""
        previous, skip = 0, INDEX_HEADER_BYTES
        for chunk in self.chunks:
            if skip and chunk[:skip] != index_header(self.entries):
                self.problems.append(f"its header is not that of {self.entries:,} int64")
            starts = np.frombuffer(chunk[skip:], "<i8", count=len(chunk[skip:]) // 8)
            skip = 0
            if not len(starts):
                continue
            # compared, not subtracted: a difference could overflow
            falls = np.flatnonzero(starts < np.concatenate(([previous], starts[:-1])))
            if len(falls):
                number = self.seen + falls[0]
                self.refuse(f"{self.what} {number:,} starts before the one before it")
            elif starts[-1] > self.last:
                self.refuse(f"a {self.what} starts at token {starts[-1]:,} of {self.tokens:,}")
            else:
                yield starts
                self.seen += len(starts)
                previous = int(starts[-1])
            if not self.in_order:
                return

    def refuse(self, problem: str) -> None:
        self.in_order = False
        self.problems.append(problem)


def _check_documents(chunks: Chunks, *, split: SplitEntry) -> Iterator[str]:
    """The first document starts at 0, and each shard has the documents that it claims."""
    index = _Starts(chunks, "document", split.documents, split.tokens, last=split.tokens)
    documents = ShardDocuments([shard.tokens for shard in split.shards])
    for starts in index:
        if index.seen == 0 and starts[0] != 0:
            index.refuse(f"document 0 starts at token {starts[0]:,}, wanted 0")
        documents.add(starts)
    yield from index.problems
    if not index.in_order:
        return
    if index.seen != split.documents:
        yield f"{index.seen:,} documents start, wanted {split.documents:,}"
        return
    for shard, found in zip(split.shards, documents.of_shards(), strict=True):
        claimed = (shard.documents, shard.first_document, shard.last_document)
        if claimed != found:
            yield (
                f"puts (started, first, last) {found} in {shard.file}, but the manifest says "
                f"{claimed}"
            )


def _check_turns(
    chunks: Chunks, *, split: SplitEntry, examples: OffsetArray | None
) -> Iterator[str]:
    """A turn starts in every example: from one turn to the next the example number rises by at
    most one. `examples`: their starts; None when their index is damaged."""
    turns = split.chat.num_turns if split.chat else 0
    index = _Starts(chunks, "turn", turns, split.tokens, last=split.tokens - 1)
    last, without = -1, None  # the example of the turn seen last; the first one without a turn

    def step(owners: OffsetArray) -> None:
        nonlocal last, without
        steps = np.flatnonzero(np.diff(owners, prepend=last) > 1)
        if len(steps) and without is None:
            without = int(owners[steps[0] - 1] if steps[0] else last) + 1
        last = int(owners[-1])

    for starts in index:
        for low in range(0, len(starts), _STARTS):
            if examples is not None:
                step(np.searchsorted(examples, starts[low : low + _STARTS], side="right") - 1)
    yield from index.problems
    if index.in_order and examples is not None:
        step(np.array([len(examples)]))
    if index.in_order and without is not None:
        yield f"no turn starts in example {without:,}"


def _check_mask(
    chunks: Chunks, *, split: SplitEntry, examples: OffsetArray | None
) -> Iterator[str]:
    """No bit after the last token, as many trained tokens as the manifest says, and one in each
    example. `examples`: their starts; None when their index is damaged.

    Trained tokens before each start are counted over chunks; neighbours then differ by what an
    example trains.
    """
    starts = np.empty(0, np.int64) if examples is None else examples
    before, idle = -1, None  # trained before the start seen last; the first that trains nothing
    seen = trained = done = 0  # tokens, trained ones, examples
    beyond = False

    def note(counts: OffsetArray, first: int) -> None:
        """Trained tokens before the examples `first` and following."""
        nonlocal before, idle
        equal = np.flatnonzero(np.diff(counts, prepend=before) == 0)
        if len(equal) and idle is None:
            idle = first + int(equal[0]) - 1
        before = int(counts[-1])

    parts = (
        chunk[k : k + _MASK_BYTES] for chunk in chunks for k in range(0, len(chunk), _MASK_BYTES)
    )
    for part in parts:
        bits = np.unpackbits(np.frombuffer(part, np.uint8), bitorder="little")
        inside = min(len(bits), split.tokens - seen)
        beyond |= bool(bits[inside:].any())
        counted = np.zeros(inside + 1, np.int64)
        np.cumsum(bits[:inside], out=counted[1:])
        stop = int(np.searchsorted(starts, seen + inside))
        for low in range(done, stop, _STARTS):
            here = starts[low : min(low + _STARTS, stop)]
            note(counted[here - seen] + trained, low)
        done = stop
        seen += inside
        trained += int(counted[-1])
    if beyond:
        yield f"has bits after its last token, {split.tokens:,}"
    claimed = split.chat.trained_tokens if split.chat else 0
    if trained != claimed:
        yield f"trains {trained:,} tokens, but the manifest says {claimed:,}"
    if len(starts):
        # one more start, after the last example, closes it
        note(np.array([trained], np.int64), len(starts))
    if idle is not None:
        yield f"example {idle:,} trains no token"


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
