"""`shardmill check`: can these tokens be trained on, and how are they named in a config?

Files are read as a loader reads them, in the memory of one chunk: every token, or a sample that is
spread evenly from the first to the last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from shardmill.arguments import whole_number
from shardmill.cli.app import as_flag
from shardmill.cli.options import Split, parse_special
from shardmill.cli.printing import Answer, num_problems
from shardmill.cli.steps import choose_pattern
from shardmill.cli.terminal import one_bar, visible
from shardmill.errors import OptionError, StoreError, StoreNotFoundError
from shardmill.inspect.stores import open_named
from shardmill.loading.config import EVERY_FILE, DataConfig, config_flags, config_toml, meant_split
from shardmill.store import Store
from shardmill.store.readers import TokenFolder, TokenSpace, open_token_folder
from shardmill.store.readers.foreign import META_JSON, METADATA_YAML, DtypeRule, declared_facts

CHUNK = 2**21
"""Tokens read at a time."""
_LEAST_CHUNK = 2**10


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Prints what was found: files, tokens, dtype, vocabulary, largest id; problems on stderr. The
    flags can be passed to examples/train_tiny_gpt.py. The bytes of a store are compared with its
    manifest by `shardmill verify`.

    Example: shardmill check tokens --file-pattern '*.bin' --seq-len 1024

    Exit 0: it can be trained on. Exit 1: damaged or impossible, one line for each problem. Exit 2:
    a mistake in the call, or no such folder.
    """

    folder: Annotated[Path, "FOLDER", "A folder of .npy or .bin files, or a store."]
    file_pattern: Annotated[
        str | None, "Which files. Default: '*.npy' or '*.bin', what is there."
    ] = None
    dtype: Annotated[Literal["uint16", "uint32"] | None, "Of .bin files without metadata."] = None
    tokenizer: Annotated[str | None, "Compare the ids with the vocabulary of this tokenizer."] = (
        None
    )
    special: Annotated[list[str] | None, "NAME=STRING: special tokens it does not name itself."] = (
        None
    )
    split: Split = None
    seq_len: Annotated[int | None, "Count the windows of this length."] = None
    sample: Annotated[int | None, "About how many tokens to look at. Default: all of them."] = None
    as_json: Annotated[bool, "--json", "Print the facts as JSON."] = False

    def run(self) -> Answer:
        for key, number in (("seq_len", self.seq_len), ("sample", self.sample)):
            if number is not None:
                whole_number(number, key)
        facts: dict[str, Any] = {}
        try:
            found = find_tokens(self)
            declared = found.vocab_size
            if (name := self.tokenizer) is not None:
                stores = [found.store] if found.store else []
                size = open_named(name, parse_special(self.special), *stores).vocab_size
                found = replace(found, vocab_size=size, tokenizer=name, recorded_by=name)
            with TokenSpace(found.files) as space, one_bar("check", of_bytes=False) as on_progress:
                scan = scan_ids(
                    space, vocab_size=found.vocab_size, sample=self.sample, on_progress=on_progress
                )
        except StoreNotFoundError:
            raise  # a mistake in the call
        except StoreError as error:
            problems = [error.worded(as_flag)]
        else:
            facts = _facts(found, scan, self) | {"vocab_size_declared": declared}
            problems = list(_problems(found, scan, self))
        folder = str(self.folder)
        return Answer(
            {"folder": folder, "ok": not problems, "problems": problems, **facts},
            _lines(folder, facts, problems),
            [visible(problem) for problem in problems],
            found=bool(problems),
            indent=2,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTokens(TokenFolder):
    """The token files of a folder or a split, and what is recorded about them."""

    file_pattern: str | None  # None: a store lists its files
    store: Store | None = None
    split: str | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None
    recorded_by: str = ""  # the file that records the vocabulary and the tokenizer

    def location(self, token: int) -> str:
        """The file of a token, and which token of the file it is."""
        for file in self.files:
            if token < file.num_tokens:
                return f"{file.path}, token {token:,}"
            token -= file.num_tokens
        raise IndexError(token)


@dataclass(slots=True)
class IdScan:
    """The ids that were seen. Positions are counted over all files."""

    num_seen: int = 0
    largest_id: int = -1  # no token was seen
    largest_at: int = 0
    num_outside: int = 0  # ids that the vocabulary does not have
    first_outside: tuple[int, int] | None = None  # (position, id)


def _problems(found: FoundTokens, scan: IdScan, options: CheckCommand) -> Iterator[str]:
    if scan.first_outside is not None:
        position, number = scan.first_outside
        advice = "; if that leaves out added tokens, compare with the tokenizer itself: --tokenizer"
        if found.recorded_by == found.tokenizer:
            advice = ""
        yield (
            f"{found.location(position)}: id {number:,}, but the vocabulary has "
            f"{found.vocab_size:,} ids ({found.recorded_by}); {scan.num_outside:,} of "
            f"{scan.num_seen:,} ids are outside: another tokenizer, another dtype, or "
            f"damage{advice}"
        )
    if found.decided.doubt and options.dtype is None:
        yield (
            f"read as {found.decided.dtype}, because {found.decided.reason}, but "
            f"{found.decided.doubt}; correct the metadata, or pass --dtype"
        )
    if found.num_tokens == 0:
        yield f"{found.folder}: holds no token"
    elif options.seq_len is not None and not _windows(found, options.seq_len):
        yield (
            f"--seq-len {options.seq_len:,}: no window: {found.num_tokens:,} tokens, wanted at "
            f"least {options.seq_len + 1:,}"
        )


def _windows(found: FoundTokens, seq_len: int) -> int:
    return max(0, (found.num_tokens - 1) // seq_len)


def _facts(found: FoundTokens, scan: IdScan, options: CheckCommand) -> dict[str, Any]:
    tokenizer, seq_len = found.tokenizer, options.seq_len
    if tokenizer is not None and os.path.lexists(tokenizer):
        tokenizer = str(Path(tokenizer).absolute())  # valid in every folder
    config = DataConfig(
        dataset_path=str(found.folder),
        file_pattern=found.file_pattern or EVERY_FILE,
        dtype=options.dtype if found.store is None else None,
        split=found.split,
        tokenizer_path=tokenizer,
    )
    facts: dict[str, Any] = {
        "shards": len(found.files),
        "bytes": sum(file.num_bytes for file in found.files),
        "tokens": found.num_tokens,
        "dtype": found.decided.dtype,
        "dtype_rule": found.decided.rule,
        "dtype_reason": found.decided.reason,
        "file_pattern": found.file_pattern,
        "split": found.split,
        "tokenizer": found.tokenizer,
        "vocab_size": found.vocab_size,
        "vocab_size_from": found.recorded_by if found.vocab_size is not None else None,
        "largest_id": scan.largest_id if scan.num_seen else None,
        "largest_id_at": found.location(scan.largest_at) if scan.num_seen else None,
        "tokens_seen": scan.num_seen,
        "ids_outside_vocabulary": scan.num_outside if found.vocab_size is not None else None,
        "toml": config_toml(config),
        "flags": config_flags(config),
    }
    if seq_len is not None:
        facts["windows"] = _windows(found, seq_len)
        facts["samples_of_files"] = sum(f.num_tokens // (seq_len + 1) for f in found.files)
    return facts


def _lines(folder: str, facts: dict[str, Any], problems: list[str]) -> Iterator[str]:
    yield f"{visible(folder)}: {f'REFUSED, {num_problems(problems)}' if problems else 'ok'}"
    for label, value in _rows(facts) if facts else ():
        yield f"  {label:12} {visible(value)}"
    if not problems:
        yield f"\n{' '.join(facts['flags'])}\n\n{facts['toml'].rstrip()}"


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "shards", f"{facts['shards']:,}, {facts['bytes']:,} bytes"
    yield "tokens", f"{facts['tokens']:,}"
    yield "dtype", f"{facts['dtype']}: {facts['dtype_reason']}"
    yield "tokenizer", facts["tokenizer"] or "not recorded"
    if facts["vocab_size"] is None:
        yield "vocabulary", "not recorded, so no id could be refused; name it with --tokenizer"
    else:
        other = facts["vocab_size_declared"]
        more = f"; the metadata says {other:,}" if other not in (None, facts["vocab_size"]) else ""
        yield "vocabulary", f"{facts['vocab_size']:,} ids ({facts['vocab_size_from']}){more}"
    if facts["largest_id"] is not None:
        yield "largest id", f"{facts['largest_id']:,} ({facts['largest_id_at']})"
    part = facts["tokens_seen"] < facts["tokens"]
    seen = f"only {facts['tokens_seen']:,} of {facts['tokens']:,} tokens, as --sample asks"
    yield "looked at", seen if part else "every token"
    if "windows" in facts:
        yield "windows", f"{facts['windows']:,} over all files, one after another"
        yield "samples", f"{facts['samples_of_files']:,} when each file is cut separately"


# finding and reading


def find_tokens(options: CheckCommand) -> FoundTokens:
    """The tokens that the folder means: a store, its split, or a folder of token files."""
    folder, pattern, dtype = options.folder, options.file_pattern, options.dtype
    found = meant_split(folder, options.split)
    if found is None:
        pattern = choose_pattern(folder, options.split, pattern)
        opened = open_token_folder(folder, pattern, dtype=dtype)
        facts = declared_facts(opened.folder)
        there = [name for name in (META_JSON, METADATA_YAML) if (opened.folder / name).is_file()]
        return FoundTokens(
            folder=opened.folder,
            files=opened.files,
            decided=opened.decided,
            file_pattern=pattern,
            vocab_size=facts.vocab_size,
            tokenizer=facts.tokenizer,
            recorded_by=" or ".join(there),
        )
    store, split = found
    if store.is_chat:
        raise OptionError(
            f"{store.folder}: a store of conversations, which `shardmill verify` checks; train on "
            f"it with shardmill.load and a plan of `shardmill pack`, which use its loss mask"
        )
    if pattern is not None:
        raise OptionError(
            f"--file-pattern {pattern}: {store.folder} is a store, which lists its files"
        )
    if dtype is not None and dtype != store.dtype:
        raise OptionError(f"--dtype {dtype}: {store.folder} is a store of {store.dtype}")
    reason = "the store's manifest says so"
    return FoundTokens(
        folder=store.folder,
        files=tuple(store.token_files(split)),
        decided=DtypeRule(dtype=store.dtype, rule="store", reason=reason),
        file_pattern=None,
        store=store,
        split=split,
        vocab_size=store.manifest.vocab_size,
        recorded_by="the manifest",
    )


def scan_ids(
    space: TokenSpace,
    *,
    vocab_size: int | None,
    sample: int | None,
    on_progress: Callable[[int, int], None],
) -> IdScan:
    """The largest id, and those that are `vocab_size` or more."""
    chunks = list(_chunks(space.num_tokens, sample))
    total = sum(stop - start for start, stop in chunks)
    scan = IdScan()
    for start, stop in chunks:
        ids = space.read(start, stop)
        at = int(ids.argmax())
        if ids[at] > scan.largest_id:
            scan.largest_id, scan.largest_at = int(ids[at]), start + at
        if vocab_size is not None and ids[at] >= vocab_size:
            outside = np.flatnonzero(ids >= vocab_size)
            scan.num_outside += len(outside)
            first = (start + int(outside[0]), int(ids[outside[0]]))
            scan.first_outside = scan.first_outside or first
        scan.num_seen += stop - start
        on_progress(scan.num_seen, total)
    return scan


def _chunks(num_tokens: int, sample: int | None) -> Iterator[tuple[int, int]]:
    """Half-open ranges of tokens: all of them, or about `sample` tokens in evenly spread ones."""
    size = CHUNK if sample is None else min(sample, max(_LEAST_CHUNK, min(CHUNK, sample // 64)))
    count = num_tokens if sample is None else -(-sample // size)
    if count * size >= num_tokens:
        for start in range(0, num_tokens, CHUNK):
            yield start, min(start + CHUNK, num_tokens)
        return
    # the first at 0, the last up to the end; count * size < num_tokens, so none overlap
    for number in range(count):
        start = (num_tokens - size) * number // max(1, count - 1)
        yield start, start + size
