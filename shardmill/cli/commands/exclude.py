"""`shardmill exclude`: documents, or what some steps saw, that are not to be trained on any more.

The samples of a step are those that a loader opened now reads there, as `show --step` shows them:
where something is excluded already, the samples that replace it.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from shardmill.cli.commands.info import entry_facts, first_few
from shardmill.cli.options import AsJson, DataConfigFile
from shardmill.cli.printing import Answer
from shardmill.cli.steps import SourceName, TrainingOrder, find_moment, meant_sources
from shardmill.cli.terminal import visible
from shardmill.errors import OptionError
from shardmill.inspect.rows import Moment
from shardmill.loading import TokenSource
from shardmill.loading.config import meant_split
from shardmill.records import OffsetArray
from shardmill.sampling.order import by_value
from shardmill.store import Store, open_store, read_exclusions
from shardmill.store.exclusions import (
    NO_SPANS,
    ExcludedSteps,
    ExcludeEntry,
    add_exclusion,
    as_spans,
    count_tokens,
    documents_entry,
    merge_spans,
    remove_exclusion,
    spans_entry,
)

_CHUNK = 2**16  # samples looked at together
_MOST_SAMPLES = 2**27


@dataclass(frozen=True, kw_only=True)
class ExcludeCommand(TrainingOrder):
    """Tokens stay as they are. Readers skip every sample that has an excluded token: another sample
    of the same source is read instead, and all other samples stay where they are.

    Prints what is excluded now: documents or steps, tokens, windows that have one of them.

    Example: shardmill exclude store --document 17 --reason "takedown 4711"

    Example: shardmill exclude store --step 3:5 --batch-size 4 --seq-len 64 --reason spike

    Exit 0: recorded, listed or taken back. Exit 2: a mistake in the call or its input.
    """

    folder: Annotated[Path | None, "FOLDER", "The store; not needed with --config and --step."] = (
        None
    )
    document: Annotated[list[int] | None, "A document or conversation, from 0. Repeatable."] = None
    document_file: Annotated[Path | None, "--documents", "A file of such numbers, one a line."] = (
        None
    )
    steps: Annotated[
        str | None, "--step", "A step, or steps A:B up to but without B, of all ranks."
    ] = None
    reason: Annotated[str | None, "Why, in words."] = None
    seq_len: Annotated[int | None, "Inputs of a row. With documents: count such windows."] = None
    config: DataConfigFile = None
    name: SourceName = None
    list_all: Annotated[bool, "--list", "List the entries of the store, and change nothing."] = (
        False
    )
    remove: Annotated[int | None, "Take the entry of this number back."] = None
    dry_run: Annotated[bool, "Print what would be excluded; write nothing."] = False
    as_json: AsJson = False

    def run(self) -> Answer:
        by_document = bool(self.document or self.document_file)
        asked = (by_document, self.steps is not None, self.list_all, self.remove is not None)
        if sum(asked) != 1:
            raise OptionError(
                f"found {sum(asked)} things to do; wanted one of --document (and --documents), "
                "--step, --list and --remove"
            )
        if self.steps is None and self.given():
            raise OptionError(f"{self.given()[0]} is for --step")
        if self.remove is not None:
            return _remove(self, self.remove)
        if self.list_all:
            return _entries(_find_store(self)[0])
        if self.reason is None:
            raise OptionError("--reason is missing: why, in words; people will ask later")
        if self.steps is None:
            return _write([_by_documents(self, self.reason)], is_tried=self.dry_run)
        return _write(_by_steps(self, self.steps, self.reason), is_tried=self.dry_run)


@dataclass(frozen=True, slots=True)
class _Addition:
    """What one store is to exclude."""

    store: Store
    entry: ExcludeEntry  # not written yet
    windows: tuple[int, int] | tuple[None, None] = (None, None)  # with a token of it, of how many
    replacements: int = 0  # samples of the steps that already replace excluded ones


def _find_store(options: ExcludeCommand) -> tuple[Store, str]:
    if options.folder is None:
        raise OptionError("name the store")
    found = meant_split(options.folder, options.split)
    if found is None:
        raise OptionError(
            f"{options.folder}: not a store, so nothing can be recorded there; only stores have "
            "exclusions"
        )
    return found


# by steps


def _by_steps(options: ExcludeCommand, steps: str, reason: str) -> list[_Addition]:
    """An entry for every store that gave samples to these steps."""
    first, stop = parse_steps(steps)
    _, moment = find_moment(options.folder, replace(options, step=first))
    additions = []
    with closing(moment.stream) as stream:
        meant = meant_sources(options.folder, options, stream)
        for source, spans, replacements in _collect(moment, stop - first):
            if source.name not in meant:
                continue
            if source.split is None:
                raise OptionError(
                    f"source {source.name!r}: {source.path} is not a store, so nothing can be "
                    "recorded there; only stores have exclusions"
                )
            seen_by = ExcludedSteps(
                source=source.name,
                start=first,
                stop=stop,
                world=moment.world,
                batch_size=moment.batch_size,
                seq_len=stream.seq_len,
                seed=stream.seed,
                shuffle=stream.shuffle,
            )
            store, windows = open_store(source.path), source.windows_of(spans)
            entry = spans_entry(store, spans, reason=reason, split=source.split, steps=seen_by)
            additions.append(_Addition(store, entry, windows, replacements))
    return additions


def parse_steps(text: str) -> tuple[int, int]:
    """`A` or `A:B`, the latter without B."""
    found = re.fullmatch(r"([0-9]{1,15})(?::([0-9]{1,15}))?", text, re.ASCII)
    if found is None:
        raise OptionError(f"--step {text}: wanted a step, as 31207, or steps, as 31200:31210")
    start = int(found[1])
    stop = start + 1 if found[2] is None else int(found[2])
    if stop <= start:
        raise OptionError(f"--step {text}: holds no step; {start}:{start + 1} is one step")
    return start, stop


def _collect(moment: Moment, num_steps: int) -> list[tuple[TokenSource, OffsetArray, int]]:
    """The sources of these steps, the tokens of their samples, and how many samples replace
    excluded ones."""
    stream, size = moment.stream, moment.stop - moment.samples
    stop = moment.samples + num_steps * size
    if stop - moment.samples > _MOST_SAMPLES:
        raise OptionError(
            f"{num_steps:,} steps of {size:,} samples: wanted at most {_MOST_SAMPLES:,} samples; "
            "exclude fewer steps at a time"
        )
    seen: dict[int, tuple[TokenSource, OffsetArray, int]] = {}
    for start in range(moment.samples, stop, _CHUNK):
        samples = np.arange(start, min(start + _CHUNK, stop))
        found, meant = stream.take(samples), stream.take_all(samples)
        for number, chosen in by_value(found.source):
            source, items = stream.sources[number], found.item[chosen]
            if not isinstance(source, TokenSource):
                raise OptionError(
                    f"source {source.name!r}: these steps saw rows of a pack plan of "
                    f"{source.path}, and --step excludes windows only; exclude the conversations "
                    "with --document (`shardmill show --plan` prints which a row has)"
                )
            _, spans, replacements = seen.get(number, (source, NO_SPANS, 0))
            spans = merge_spans(np.concatenate((spans, source.spans(items))))
            replacements += int((items != meant.item[chosen]).sum())
            seen[number] = source, spans, replacements
    return [seen[number] for number in sorted(seen)]


# by documents


def _by_documents(options: ExcludeCommand, reason: str) -> _Addition:
    store, split = _find_store(options)
    numbers = _numbers(options.document or [], options.document_file)
    entry = documents_entry(store, numbers, reason=reason, split=split)
    seq_len = options.seq_len
    if seq_len is None:
        return _Addition(store, entry)
    if store.is_chat:
        raise OptionError(
            f"--seq-len {seq_len}: {store.folder} holds conversations, which are not cut into "
            "windows; leave it out"
        )
    with closing(TokenSource(store.folder, seq_len=seq_len, split=split)) as source:
        return _Addition(store, entry, source.windows_of(as_spans(entry.spans)))


def _numbers(given: list[int], path: Path | None) -> OffsetArray:
    """Those of --document, then those of the file."""
    words = [("--document", str(number)) for number in given]
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise OptionError(f"--documents {path}: cannot be read: {error}") from error
        found = [(f"--documents {path}, line {at:,}:", line) for at, line in enumerate(lines, 1)]
        words += [(where, line.strip()) for where, line in found if line.strip()]
        if not words:
            raise OptionError(f"--documents {path}: no number in it")
    for where, word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 20 and int(word) < 2**62):
            raise OptionError(f"{where} {word:.80}: wanted a number from 0")
    return np.array([int(word) for _, word in words], np.int64)


# writing


def _write(additions: list[_Addition], *, is_tried: bool) -> Answer:
    facts, lines = [], []
    for one in additions:
        store, entry, (windows, of_windows) = one.store, one.entry, one.windows
        before = read_exclusions(store)
        both = merge_spans(np.concatenate((before.spans(entry.split), as_spans(entry.spans))))
        new_tokens = count_tokens(both) - before.num_tokens(entry.split)
        if not is_tried:
            entry = add_exclusion(store, entry)
        facts.append(
            {
                "store": str(store.folder),
                "written": not is_tried,
                "new_tokens": new_tokens,
                "windows": windows,
                "of_windows": of_windows,
                "stand_ins": one.replacements,
                "entry": entry_facts(entry) | ({"number": None} if is_tried else {}),
            }
        )
        notes = f"{new_tokens:,} of these tokens were not excluded before"
        if windows is not None:
            notes += f"; {windows:,} of {of_windows:,} windows have one of them"
        if one.replacements:
            notes += f"; {one.replacements:,} samples of these steps replace excluded ones"
        name = "would be excluded" if is_tried else f"entry {entry.number}"
        lines.append(f"{store.folder}: {name}, {_entry_words(entry)} ({notes})")
    return Answer({"excluded": facts}, lines, indent=2)


def _remove(options: ExcludeCommand, number: int) -> Answer:
    if options.dry_run:
        raise OptionError("--dry-run: nothing to try out with --remove; see --list")
    store, _ = _find_store(options)
    gone = remove_exclusion(store, number)
    facts = {"store": str(store.folder), "removed": entry_facts(gone)}
    text = f"{store.folder}: taken back: entry {gone.number}, {_entry_words(gone)}"
    return Answer(facts, [text], indent=2)


def _entries(store: Store) -> Answer:
    found = read_exclusions(store)
    facts = {
        "store": str(store.folder),
        "sha256": found.sha256,
        "entries": [entry_facts(entry) for entry in found.entries],
    }
    lines = [f"entry {entry.number}, {_entry_words(entry)}" for entry in found.entries]
    for split in dict.fromkeys(entry.split for entry in found.entries):
        tokens, total = found.num_tokens(split), store.num_tokens(split)
        lines.append(f"{store.folder}, {split}: {tokens:,} of {total:,} tokens are excluded")
    return Answer(facts, lines or [f"{store.folder}: nothing is excluded"], indent=2)


def _entry_words(entry: ExcludeEntry) -> str:
    """What an entry excludes, and why."""
    steps = entry.steps
    if steps is not None:
        what = (
            f"steps {steps.start:,}..{steps.stop:,} of source {visible(steps.source)!r} "
            f"({steps.world} x {steps.batch_size} samples, seq_len {steps.seq_len:,}, seed "
            f"{steps.seed})"
        )
    elif entry.documents is not None:
        what = f"{len(entry.documents):,} documents ({first_few(entry.documents)})"
    else:
        what = f"{len(entry.spans):,} spans"
    reason = visible(entry.reason).replace("\n", " ")
    return f"{entry.split}: {what}, {entry.num_tokens:,} tokens: {reason}"
