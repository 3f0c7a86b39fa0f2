"""Check every byte of a store against its manifest, and its overlays against the store.

A changed, missing, truncated, renamed or added file is reported, and so are a plan, exclusions and
a table of origins that are damaged or belong to other tokens. Structure is checked even where the
hash already differs, so that the report says what the damage does. Memory stays at a few MiB
whatever the size, plus some 50 bytes per example while a plan is checked, and 100 per branch of a
store of preferences.
"""

from __future__ import annotations

import errno
import hashlib
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.errors import ManifestError, StoreError
from shardmill.records import ROLES, BoolArray, OffsetArray
from shardmill.store.branches import (
    COLUMNS,
    is_branch,
    num_records,
    problems_of,
    saved_tokens,
)
from shardmill.store.exclusions import as_spans, read_exclusions, spans_of_documents
from shardmill.store.layout import DTYPES, EXCLUDE, INDEX_HEADER_BYTES, ORIGINS, index_header
from shardmill.store.manifest import (
    ChatEntry,
    DroppedRow,
    ListedFile,
    Manifest,
    ShardEntry,
    SplitEntry,
)
from shardmill.store.plans import PACKS, REASONS, SUFFIX, StoredPlan, plans_of, read_origins
from shardmill.store.store import (
    ShardDocuments,
    Store,
    damage,
    documents_started,
    foreign,
    list_files,
    read_built_manifest,
    read_chunks,
    wanted_sizes,
)

OnProgress = Callable[[int, int], None]
Tick = Callable[[int], None]
Check = Callable[[Path], Iterator[str]]
"""The problems of one kind of file, which was read once for its hash."""
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
    """Read the whole store at `folder` and compare it with its manifest.

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
    problems = [*broken, *foreign(wanted, found)]
    for part in (check.files(), check.plans(), check.exclusions(), check.origins()):
        try:
            problems.extend(part)
        except OSError as error:  # of an index that was sound when it was checked
            problems.append(f"{error.filename}: cannot be read ({error.strerror})")
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
        self._starts: dict[str, _Numbers] = {}  # of splits whose index can be trusted
        self._trains: dict[str, BoolArray] = {}  # of preferences, which examples are branches

    def files(self) -> Iterator[str]:
        for name, split in self.manifest.splits.items():
            if split.index.file in self.sound:
                problems = list(self._file(split.index, partial(_check_documents, split=split)))
                yield from problems
                self.documents += split.documents
                if not problems:
                    self._starts[name] = _starts_in(self.folder / split.index.file)
            if split.chat:
                examples = self._starts.get(name, np.empty(0, np.int64))
                yield from self._branches(name, split.chat)
                trains = self._trains.get(name)
                if split.chat.preference and trains is None:
                    trains = np.empty(0, np.bool_)  # not known, so nothing of it is compared
                mask = partial(_check_mask, split=split, starts=examples, trains=trains)
                turns = partial(_check_turns, split=split, examples=examples)
                yield from self._file(split.chat.mask, mask)
                yield from self._file(split.chat.turns, turns)
                yield from self._file(split.chat.roles, _check_roles)
            for shard in split.shards:
                yield from self._shard(shard)
                self.tokens += shard.tokens * (shard.file in self.sound)
        dropped = self.manifest.dropped
        if dropped:
            reasons = self.manifest.ledger.documents.dropped
            yield from self._file(dropped, partial(_check_dropped, reasons=reasons))

    def _branches(self, name: str, chat: ChatEntry) -> Iterator[str]:
        """Of a store of preferences."""
        found, split = chat.preference, self.manifest.splits[name]
        if found is None:
            return

        def check(path: Path) -> Iterator[str]:
            links = _Numbers(path, "<i8")[:].reshape(-1, len(COLUMNS))
            problems = list(problems_of(links, found.kind, split.documents))
            yield from problems
            if problems:
                return
            self._trains[name] = is_branch(links, split.documents)
            if num_records(links) != found.records:
                yield f"{num_records(links):,} records, but the manifest says {found.records:,}"
            if name in self._starts:
                lengths = np.diff(self._starts[name][:], append=split.tokens)
                saved = saved_tokens(links, lengths)
                if saved != found.saved_tokens:
                    yield f"saves {saved:,} tokens, the manifest says {found.saved_tokens:,}"

        yield from self._file(found.branches, check)

    def _shard(self, shard: ShardEntry) -> Iterator[str]:
        """No id outside the vocabulary, where its size is known."""
        dtype, vocab_size = DTYPES[self.manifest.token_dtype], self.manifest.vocab_size
        stored, highest = np.dtype(dtype).newbyteorder("<"), 0

        def see(chunk: memoryview) -> None:
            nonlocal highest
            ids = np.frombuffer(chunk, stored, count=len(chunk) // stored.itemsize)
            highest = max(highest, int(ids.max(initial=0)))

        def check(_: Path) -> Iterator[str]:
            if vocab_size is not None and highest >= vocab_size and shard.tokens:
                yield f"holds the id {highest:,}, but the vocabulary has {vocab_size:,} ids"

        yield from self._file(shard, check, see)

    def _file(
        self,
        entry: ListedFile | ShardEntry,
        check: Check,
        see: Callable[[memoryview], None] = lambda _: None,
    ) -> Iterator[str]:
        """The problems of a listed file; a disk that cannot be read is one more. `see` is shown
        its bytes: tokens are read only once."""
        if entry.file not in self.sound:
            return
        path, sha256 = self.folder / entry.file, hashlib.sha256()
        try:
            for chunk in read_chunks(path):
                sha256.update(chunk)
                see(chunk)
                self.tick(len(chunk))
            problems = list(check(path))
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
                    lengths = np.diff(self._starts[split][:], append=tokens)
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


def _check_roles(path: Path) -> Iterator[str]:
    """No role that does not exist."""
    highest = max((int(np.frombuffer(c, np.uint8).max()) for c in read_chunks(path)), default=0)
    if highest >= len(ROLES):
        yield f"holds the role {highest}, but there are {len(ROLES)}: {', '.join(ROLES)}"


def _check_dropped(path: Path, reasons: Mapping[str, int]) -> Iterator[str]:
    """One row with id and reason for each row that the ledger says was dropped."""
    found: Counter[str] = Counter()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                found[msgspec.json.decode(line, type=DroppedRow).reason] += 1
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                yield f"line {number:,} is no dropped row: {error}"
                return
    if found != Counter(reasons):
        yield f"lists dropped rows {dict(found)}, but the ledger says {dict(reasons)}"


class _Numbers:
    """The numbers in a file after its first `skip` bytes, read when they are asked for. They are
    not mapped: a file that is cut meanwhile is an error, not the end of the process."""

    def __init__(self, path: Path, dtype: npt.DTypeLike, *, skip: int = 0) -> None:
        self._path, self._dtype, self._skip = path, np.dtype(dtype), skip
        self._entries = max(0, path.stat().st_size - skip) // self._dtype.itemsize

    def __len__(self) -> int:
        return self._entries

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, int):
            return self[at : at + 1][0]
        start, stop, _ = at.indices(self._entries)
        offset = self._skip + start * self._dtype.itemsize
        found = np.fromfile(self._path, self._dtype, count=stop - start, offset=offset)
        if len(found) < stop - start:
            raise OSError(errno.EIO, "cut while it was checked", str(self._path))
        return found


_Starts: TypeAlias = _Numbers | OffsetArray


def _starts_in(index: Path) -> _Numbers:
    return _Numbers(index, "<i8", skip=INDEX_HEADER_BYTES)


def _check_header(path: Path, entries: int) -> Iterator[str]:
    with path.open("rb") as file:
        if file.read(INDEX_HEADER_BYTES) != index_header(entries):
            yield f"its header is not that of {entries:,} int64"


def _disorder(starts: _Numbers, what: str, *, tokens: int, last: int) -> str | None:
    """What is wrong with starts that should never decrease, and be at most `last`."""
    previous = 0
    for low in range(0, len(starts), _STARTS):
        part = starts[low : low + _STARTS]
        # compared, not subtracted: a difference could overflow
        falls = np.flatnonzero(part < np.concatenate(([previous], part[:-1])))
        if len(falls):
            return f"{what} {low + falls[0]:,} starts before the one before it"
        previous = int(part[-1])
        if previous > last:
            return f"a {what} starts at token {previous:,} of {tokens:,}"
    return None


def _check_documents(path: Path, split: SplitEntry) -> Iterator[str]:
    """The first document starts at 0, and each shard has the documents that it claims."""
    yield from _check_header(path, split.documents)
    starts = _starts_in(path)
    problem = _disorder(starts, "document", tokens=split.tokens, last=split.tokens)
    if problem is None and len(starts) and starts[0]:
        problem = f"document 0 starts at token {starts[0]:,}, wanted 0"
    if problem is not None:
        yield problem
        return
    documents = ShardDocuments([shard.tokens for shard in split.shards])
    for low in range(0, len(starts), _STARTS):
        documents.add(starts[low : low + _STARTS])
    spans = documents.spans()
    started = documents_started(spans, split.documents)
    for shard, count, span in zip(split.shards, started, spans, strict=True):
        found = (count, *span)
        claimed = (shard.documents, shard.first_document, shard.last_document)
        if claimed != found:
            yield (
                f"puts (started, first, last) {found} in {shard.file}, but the manifest says "
                f"{claimed}"
            )


def _check_turns(path: Path, split: SplitEntry, examples: _Starts) -> Iterator[str]:
    """A turn starts in every example; `examples`: their starts, none if their index is damaged."""
    yield from _check_header(path, split.chat.num_turns if split.chat else 0)
    turns = _starts_in(path)
    problem = _disorder(turns, "turn", tokens=split.tokens, last=split.tokens - 1)
    if problem is not None:
        yield problem
        return
    for low in range(0, len(examples), _STARTS):
        edges = examples[low : low + _STARTS + 1]
        if len(edges) <= _STARTS:
            edges = np.append(edges, split.tokens)
        first, last = (bisect_left(turns, edge) for edge in edges[[0, -1]])
        before = np.zeros(len(edges), np.int64)  # of these turns start before each edge
        for at in range(first, last, _STARTS):
            before += np.searchsorted(turns[at : min(at + _STARTS, last)], edges)
        without = np.flatnonzero(np.diff(before) == 0)
        if len(without):
            yield f"no turn starts in example {low + without[0]:,}"
            return


def _check_mask(
    path: Path, split: SplitEntry, starts: _Starts, trains: BoolArray | None
) -> Iterator[str]:
    """No bit after the last token, as many trained tokens as the manifest says, and one in each
    example. `starts`: of the examples, none when their index is damaged. `trains`: which examples
    of preferences train something; the others must not.

    Trained tokens before each start are counted over chunks; neighbours then differ by what an
    example trains.
    """
    before, idle = -1, None  # trained before the start seen last; the first that trains nothing
    seen = trained = done = 0  # tokens, trained ones, examples
    beyond = False

    def note(counts: OffsetArray, first: int) -> None:
        """Trained tokens before the examples `first` and following."""
        nonlocal before, idle
        found = np.diff(counts, prepend=before) > 0  # of the examples first - 1 and following
        if trains is None:
            wrong = np.flatnonzero(~found)
        else:
            wanted = trains[max(first - 1, 0) : first - 1 + len(found)]
            wrong = (
                len(found)
                - len(wanted)
                + np.flatnonzero(found[len(found) - len(wanted) :] != wanted)
            )
        if len(wrong) and idle is None:
            idle = first + int(wrong[0]) - 1
        before = int(counts[-1])

    packed = _Numbers(path, np.uint8)
    for byte in range(0, len(packed), _MASK_BYTES):
        bits = np.unpackbits(packed[byte : byte + _MASK_BYTES], bitorder="little")
        inside = min(len(bits), split.tokens - seen)
        beyond |= bool(bits[inside:].any())
        counted = np.zeros(inside + 1, np.int64)
        np.cumsum(bits[:inside], out=counted[1:])
        stop = bisect_left(starts, seen + inside)
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
        is_prefix = trains is not None and not trains[idle]
        yield f"example {idle:,} {'is a prompt and trains' if is_prefix else 'trains no token'}"


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
