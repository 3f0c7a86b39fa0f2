"""Check every byte of a store against its manifest, and what lies beside it against the store.

In: a folder.  Out: a report with every problem found, not only the first.
Promise: a changed, missing, truncated, swollen, renamed or added token file, index or list is
reported, and so are a plan, exclusions and a table of origins that are damaged or of other tokens;
memory stays at a few MiB whatever the size, and for each plan in turn at some 50 bytes an example;
damage is a report, never an exception.
Not here: repair. A damaged store is copied or built again, a plan is packed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardmill.errors import ManifestError, StoreError
from shardmill.records import OffsetArray
from shardmill.store.contents import (
    check_dropped,
    check_index,
    check_mask,
    check_roles,
    check_shard,
    check_turns,
    content_problems,
)
from shardmill.store.entries import ChatEntry, Manifest, SplitEntry
from shardmill.store.exclusions import (
    EXCLUDE,
    as_spans,
    decode_exclusions,
    document_spans,
    read_bytes,
)
from shardmill.store.layout import DTYPES, ORIGINS
from shardmill.store.manifest import read_manifest, refuse_remote
from shardmill.store.origins import read_origins
from shardmill.store.plans import PACKS, SUFFIX, plans_of
from shardmill.store.store import (
    Listing,
    Store,
    damage,
    foreign,
    list_files,
    map_index,
    not_built,
    wanted_sizes,
)

OnProgress = Callable[[int, int], None]


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

    `on_progress(done, total)` is called with bytes. A folder with no finished store raises
    StoreNotFoundError; everything else that is wrong is a problem in the report.
    """
    refuse_remote(folder)
    folder = Path(folder).absolute()
    try:
        manifest = read_manifest(folder)
    except ManifestError as error:
        return VerifyReport(problems=[str(error)], files=1, tokens=0, documents=0)
    if not manifest.built:
        raise not_built(folder)
    wanted = wanted_sizes(manifest)
    found = list_files(folder, manifest)
    broken = list(damage(folder, wanted, found))
    sound = wanted.keys() - {problem.partition(":")[0] for problem in broken}
    check = _Check(folder, manifest, sound, _meter(found, sound, on_progress))
    problems = [*broken, *foreign(wanted, found), *check.problems(), *check.plan_problems()]
    problems += [*check.exclusion_problems(), *check.origin_problems()]
    return VerifyReport(
        problems=problems,
        files=1 + len(sound) + check.beside,
        tokens=check.tokens,
        documents=check.documents,
    )


class _Check:
    """One pass over the files that have the right name and size."""

    def __init__(
        self, folder: Path, manifest: Manifest, sound: set[str], tick: Callable[[int], None]
    ) -> None:
        self.folder, self.manifest, self.sound, self.tick = folder, manifest, sound, tick
        self.tokens = 0
        self.documents = 0
        self.beside = 0  # sound files that the manifest does not list
        self._starts: dict[str, OffsetArray] = {}  # of splits whose index can be trusted

    def problems(self) -> Iterator[str]:
        for name, split in self.manifest.splits.items():
            yield from self._split(name, split)
        listed = self.manifest.dropped
        if listed and listed.file in self.sound:
            wanted = self.manifest.ledger.documents.dropped
            path = self.folder / listed.file
            yield from _named(listed.file, check_dropped(path, listed, wanted, self.tick))

    def plan_problems(self) -> Iterator[str]:
        """After `problems`: examples are those of an index that was found sound."""
        folder = self.folder / PACKS
        if folder.is_symlink() or (os.path.lexists(folder) and not folder.is_dir()):
            yield f"{PACKS}: not a folder (a link?); put the folder itself there"
            return
        for name, plan in plans_of(Store(self.folder, self.manifest, {})):
            file = f"{PACKS}/{name}{SUFFIX}"
            if (self.folder / file).is_symlink():
                yield f"{file}: a link; put the file itself there"
                continue
            if isinstance(plan, StoreError):
                yield f"{file}: {str(plan).removeprefix(f'{self.folder / file}: ')}"
                continue
            self.beside += 1
            split = plan.facts.split
            if split in self._starts:
                tokens = self.manifest.splits[split].tokens
                lengths = np.diff(self._starts[split], append=tokens)
                yield from _named(file, content_problems(plan, lengths))

    def exclusion_problems(self) -> Iterator[str]:
        """After `problems`, for the same reason."""
        path = self.folder / EXCLUDE
        try:
            data = read_bytes(path)
            if data is None:
                return
            found = decode_exclusions(data, self.manifest, where=str(path))
        except StoreError as error:
            yield f"{EXCLUDE}: {str(error).removeprefix(f'{path}: ')}"
            return
        self.beside += 1
        store = Store(self.folder, self.manifest, {})
        for entry in found.entries:
            if entry.documents is not None and entry.split in self._starts:
                wanted = document_spans(store, entry.split, np.array(entry.documents, np.int64))
                if not np.array_equal(as_spans(entry.spans), wanted):
                    yield f"{EXCLUDE}: entry {entry.number}: other tokens than its documents have"

    def origin_problems(self) -> Iterator[str]:
        try:
            self.beside += read_origins(self.folder, self.manifest) is not None
        except StoreError as error:
            yield f"{ORIGINS}: {str(error).removeprefix(f'{self.folder / ORIGINS}: ')}"

    def _split(self, name: str, split: SplitEntry) -> Iterator[str]:
        dtype, vocabulary = DTYPES[self.manifest.token_dtype], self.manifest.vocab_size
        starts = None
        if split.index.file in self.sound:
            path = self.folder / split.index.file
            problems = list(_named(split.index.file, check_index(path, split, self.tick)))
            yield from problems
            self.documents += split.documents
            if not problems:
                starts = self._starts[name] = map_index(path, split.documents)
        if split.chat:
            yield from self._chat(split, split.chat, starts)
        for shard in split.shards:
            if shard.file in self.sound:
                path = self.folder / shard.file
                yield from _named(
                    shard.file, check_shard(path, shard, dtype, vocabulary, self.tick)
                )
                self.tokens += shard.tokens

    def _chat(
        self, split: SplitEntry, chat: ChatEntry, starts: OffsetArray | None
    ) -> Iterator[str]:
        """`starts` of the examples, when their index can be trusted."""
        mask, turns, roles = (
            self.folder / entry.file for entry in (chat.mask, chat.turns, chat.roles)
        )
        checks = {
            chat.mask.file: check_mask(mask, split, chat, starts, self.tick),
            chat.turns.file: check_turns(turns, split, chat, starts, self.tick),
            chat.roles.file: check_roles(roles, chat, self.tick),
        }
        for file, problems in checks.items():
            if file in self.sound:
                yield from _named(file, problems)


def _named(file: str, problems: Iterator[str]) -> Iterator[str]:
    """Every problem with its file in front; a disk that cannot be read is one more problem."""
    try:
        for problem in problems:
            yield f"{file}: {problem}"
    except OSError as error:
        yield f"{file}: cannot be read ({error.strerror})"


def _meter(
    found: Listing, sound: set[str], on_progress: OnProgress | None
) -> Callable[[int], None]:
    """A function that adds bytes and tells the caller."""
    done, total = 0, sum(found[file].stat().st_size for file in sound)

    def tick(size: int) -> None:
        nonlocal done
        done += size
        if on_progress is not None:
            on_progress(done, total)

    return tick
